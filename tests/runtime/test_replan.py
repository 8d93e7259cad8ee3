"""Measure, plan, go on by the plan: what is measured, that nothing else changes, and that the bits stay the model's."""

import copy
import threading
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import fastpipe
from fastpipe import Pipeline, make_schedule
from fastpipe.runtime.model.chain import Chain, Layers
from fastpipe.runtime.transport import Loopback
from fastpipe.testing import check_parity
from tests.conftest import executors_in_turn
from tests.runtime.checks import assert_same, reference_of, same_bits
from tests.runtime.models import CASES, WIDTH, Block, squared

NUM_LAYERS = 8
ZBV = make_schedule("zbv", num_ranks=2, num_microbatches=4)


def pipeline(schedule: Any = "1f1b", num_microbatches: int | None = 4, **options: Any) -> Pipeline:
    options = {"num_ranks": 2, "loss_fn": squared, **options}
    return Pipeline(CASES["plain"].layers(NUM_LAYERS), schedule, num_microbatches, **options)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    made = CASES["plain"].batches(1, 8)[0]
    return made.args[0], made.target


def plan_for(pipe: Pipeline, costs: Any, **options: Any) -> fastpipe.Plan:
    numbers = {"num_ranks": pipe.num_ranks, "num_microbatches": pipe.num_microbatches, "effort": 0.002, **options}
    return fastpipe.plan(costs, **numbers)


# What a profile has to look at: trees, integers, frozen layers, recomputes, losses and metrics, what is carried along.
MODELS = ["added_and_recomputed", "carried", "frozen_first", "metrics", "one_dict", "tokens", "two_tensors", "u_net"]


@executors_in_turn("name", MODELS)
def test_a_model_of_each_kind_is_profiled_planned_and_goes_on(name: str, executor: str) -> None:
    """Gradients accumulate over the steps before and after, and stay those of the unsplit model."""
    case = CASES[name]
    unsplit = Chain(dict(enumerate(case.layers(NUM_LAYERS))))
    pipe = Pipeline(case.layers(NUM_LAYERS), "zbv", 4, case.loss_fn, split=case.split, num_ranks=2, executor=executor)
    batches, twins = ([*case.batches(3, 8)] for _ in "ab")

    def step(number: int) -> None:
        mine, twin = batches[number], twins[number]
        result = pipe.step(*mine.args, target=mine.target, **mine.kwargs)
        assert_same(pipe, result, unsplit, reference_of(unsplit, twin, pipe, case))

    step(0)
    given = case.batches(1, 8)[0]
    stages = pipe.profile(*given.args, target=given.target, num_steps=1, **given.kwargs)
    pipe.replan(plan_for(pipe, stages, placement=pipe.schedule))
    step(1)
    layers = pipe.profile_layers(*given.args, target=given.target, num_steps=1, **given.kwargs)
    assert layers.num_layers == NUM_LAYERS
    pipe.replan(plan_for(pipe, layers, max_stages_per_rank=2))
    step(2)


@pytest.mark.parametrize(
    ("schedule", "to"),
    [("1f1b", "dualpipe"), ("zb_h1", "wave_zb"), ("zbv", "gpipe"), ("dualpipev", "zb_h1")]
    + [("dualpipe", "gpipe"), ("dualpipe", "wave_zb"), ("interleaved_1f1b", "dualpipe"), ("1f1b", "zb_h1")],
)
def test_threads_take_any_plan(schedule: str, to: str) -> None:
    """Other orders, other placements, other cuts, two routes and one, there and back."""
    pipe, case = pipeline(schedule), CASES["plain"]
    unsplit = Chain(dict(enumerate(case.layers(NUM_LAYERS))))
    optimizer, other = (torch.optim.AdamW(model.parameters(), lr=0.05) for model in (pipe, unsplit))
    uneven = [2.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 4.0]
    costs = fastpipe.LayerCosts(NUM_LAYERS, uneven, uneven, uneven)
    new = make_schedule(to, num_ranks=2, num_microbatches=4)
    plan = plan_for(pipe, costs, placement=new, effort=0)
    before, keys = pipe.schedule, list(pipe.state_dict())
    for number, given in enumerate(case.batches(3, 8)):
        if number == 1:
            pipe.replan(plan)
            assert pipe.schedule == plan.schedule
            assert pipe._local.layer_counts == [len(part) for part in plan.partition or ()]
        elif number == 2:
            pipe.replan(before) if before.num_stages == new.num_stages else pipe.replan(new)
        result = pipe.step(*given.args, target=given.target)
        assert_same(pipe, result, unsplit, reference_of(unsplit, given, pipe, case))
        for one in (optimizer, other):
            one.step()
            one.zero_grad()
    assert list(pipe.state_dict()) == keys
    assert all(same_bits(p, dict(unsplit.named_parameters())[name]) for name, p in pipe.named_parameters())


def test_a_profile_has_seconds_and_bytes(executor: str) -> None:
    pipe = pipeline("1f1b", executor=executor)
    x, y = batch()
    cost = pipe.profile(x, target=y)
    assert min((*cost.forward, *cost.backward_input, *cost.backward_weight)) > 0  # of whole backwards, too
    rows = len(x) // 4
    tensor = rows * WIDTH * x.element_size()
    assert cost.activation_bytes == (tensor, 0.0)
    # a Block keeps the input of its linear (its own, or the one before's output), and the tanh
    assert cost.stage_bytes[0] == (2 * NUM_LAYERS // 2 + 1) * tensor
    assert cost.backward is None and cost.overlapped is None and cost.comm >= 0
    layers = pipe.profile_layers(x, target=y)
    assert layers.activation_bytes == (tensor,) * (NUM_LAYERS - 1) + (0.0,)
    assert layers.held_bytes[1:-1] == (3 * tensor,) * (NUM_LAYERS - 2)
    weights = sum(p.nbytes for p in Block().parameters())
    assert layers.parameter_bytes == (2 * weights,) * NUM_LAYERS
    assert (layers.microbatch_size, layers.batch_size) == (rows, len(x))


def test_what_sleeps_is_what_is_found() -> None:
    """Stages of known durations: seconds of layers are those of their stage, shared out."""

    class Slow(Block):
        def __init__(self, seconds: float) -> None:
            super().__init__()
            self.seconds = seconds

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            time.sleep(self.seconds)
            return super().forward(x)

    layers = [Slow(0.004), Slow(0.012), Slow(0.004), Slow(0.028)]
    pipe = Pipeline(layers, "1f1b", 4, squared, num_ranks=2)
    costs = pipe.profile_layers(*batch()[:1], target=batch()[1], num_steps=1)
    slept = [0.004, 0.012, 0.004, 0.028]
    assert all(found >= least * 0.7 for found, least in zip(costs.forward, slept, strict=True))
    # what was measured is longer where the machine does much else; the plan is made for what was slept
    plan = plan_for(pipe, fastpipe.LayerCosts(4, slept, 0.0, 0.0), max_stages_per_rank=1)
    assert plan.partition == [range(0, 3), range(3, 4)]


def test_a_profile_leaves_no_trace(executor: str) -> None:
    class Noisy(Block):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))
            self.register_buffer("last", torch.zeros(()))
            self.noise = nn.Embedding(200, WIDTH, max_norm=1.0)  # a forward changes the rows that it reads

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x + self.noise(torch.randint(200, (len(x),)))
            if self.training:
                self.calls += 1
                self.last = x.detach().mean()
            return nn.functional.dropout(super().forward(x), 0.1)

    pipe = Pipeline([Noisy() for _ in range(4)], "1f1b", 4, squared, num_ranks=2, executor=executor)
    x, y = batch()
    pipe.step(x, target=y)
    before = copy.deepcopy(pipe.state_dict()), {n: p.grad for n, p in pipe.named_parameters()}, torch.get_rng_state()
    for profile in (pipe.profile, pipe.profile_layers):
        profile(x, target=y)
    assert all(same_bits(value, before[0][name]) for name, value in pipe.state_dict().items())
    assert all(p.grad is before[1][name] for name, p in pipe.named_parameters())
    assert torch.equal(torch.get_rng_state(), before[2]) and pipe.step_count == 1
    assert not any(module._forward_pre_hooks for stage in pipe._steps.stages for module in stage.module.modules())


def test_a_profile_restores_the_buffers_of_both_copies_of_a_stage(executor: str) -> None:
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)) for _ in range(2)]
    pipe = Pipeline(layers, "dualpipe", 4, squared, num_ranks=2, executor=executor)
    x, y = torch.randn(8, WIDTH), torch.randn(8, WIDTH)
    pipe.step(x, target=y)
    pipe.profile(x, target=y, num_steps=1)
    buffers = [dict(stage.module.named_buffers()) for stage in pipe._steps.stages]
    assert [value for named in buffers for name, value in named.items() if "num_batches" in name] == [2] * 4


@pytest.mark.parametrize("schedule", ["dualpipe", "1f1b"])
def test_changes_before_a_profile_reach_copies(schedule: str, executor: str) -> None:
    """Of a stage that two ranks hold, and of a layer that two stages use."""

    class Scaled(nn.Linear):
        factor = 1.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * self.factor

    layers = [Scaled(WIDTH, WIDTH) for _ in range(4)]
    layers[3] = layers[0]
    pipe = Pipeline(layers, schedule, 4, squared, num_ranks=2, executor=executor)
    x, y = torch.randn(8, WIDTH), torch.randn(8, WIDTH)
    for layer in layers[:3]:
        layer.factor = 1.5
        layer.register_forward_hook(lambda module, args, output: output * 0.5)
    pipe.profile(x, target=y, num_steps=1)
    assert check_parity(pipe, layers, (x, y)).ok


def test_tied_weights_stay_tied() -> None:
    layers = CASES["plain"].layers(NUM_LAYERS)
    layers[-1].linear.weight = layers[0].linear.weight
    pipe = Pipeline(layers, "1f1b", 4, squared, num_ranks=2)
    x, y = batch()
    before = pipe.step(x, target=y).loss
    gradient = dict(pipe.named_parameters())["0.linear.weight"].grad.clone()
    for parameter in pipe.parameters():
        parameter.grad = None
    pipe.replan(plan_for(pipe, fastpipe.LayerCosts(NUM_LAYERS), placement=ZBV, effort=0))
    assert same_bits(pipe.step(x, target=y).loss, before)
    torch.testing.assert_close(dict(pipe.named_parameters())["0.linear.weight"].grad, gradient)
    assert layers[-1].linear.weight is layers[0].linear.weight


def test_a_plan_with_more_stages_asks_again_whether_they_have_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a device with streams, and pairs, make of the stages of a rank, they make of those of the plan."""
    asked: list[list[int]] = []

    def wants(device: torch.device, overlap: str, held: Any) -> bool:
        asked.append([len(stages) for stages in held])
        return False

    monkeypatch.setattr("fastpipe.runtime.construction.wants_streams", wants)
    pipe = pipeline("1f1b")
    costs = fastpipe.LayerCosts(NUM_LAYERS, *[[1.0] * NUM_LAYERS] * 3)
    two_each = make_schedule("dualpipev", num_ranks=2, num_microbatches=4)
    pipe.replan(plan_for(pipe, costs, placement=two_each, effort=0))
    assert asked == [[1, 1], [2, 2]]


def test_stages_that_came_ready_made_can_move_but_not_be_cut() -> None:
    layers, (x, y) = CASES["plain"].layers(4), batch()
    pipe = Pipeline(dict(enumerate(layers)), "interleaved_1f1b", 4, squared, num_ranks=2)
    loss = pipe.step(x, target=y).loss
    pipe.replan(ZBV)
    assert same_bits(pipe.step(x, target=y).loss, loss)
    with pytest.raises(ValueError, match="plan has . stages but this pipeline was given "):
        pipe.replan(make_schedule("1f1b", num_ranks=2, num_microbatches=4))
    with pytest.raises(ValueError, match=r"profile_layers: stage 0"):
        pipe.profile_layers(x, target=y)


def test_stages_recompute_as_the_plan_says(executor: str) -> None:
    pipe, case = pipeline("1f1b", executor=executor), CASES["plain"]
    unsplit = Chain(dict(enumerate(case.layers(NUM_LAYERS))))
    costs = fastpipe.CostModel([1.0] * 2, 1.0, 1.0)
    plan = plan_for(pipe, costs, memory=0.5, recompute="auto", placement=pipe.schedule)
    assert plan.recomputes is not None and any(plan.recomputes)
    for number, given in enumerate(case.batches(2, 8)):
        if number:
            pipe.replan(plan)
        result = pipe.step(*given.args, target=given.target)
        assert_same(pipe, result, unsplit, reference_of(unsplit, given, pipe, case))
    assert tuple(stage.recompute == "full" for stage in pipe._steps.stages) == plan.recomputes
    built = pipeline(plan.schedule, None, executor=executor, recompute=plan.recompute)
    assert [stage.recompute for stage in built._steps.stages] == [stage.recompute for stage in pipe._steps.stages]


def test_layers_keep_their_names() -> None:
    """Those of a whole model that was taken apart, and a partition of them that a plan says."""
    names = [f"block{number}" for number in range(NUM_LAYERS)]
    layers = Layers(CASES["plain"].layers(NUM_LAYERS), names)
    pipe, (x, y) = Pipeline(layers, "1f1b", 4, squared, num_ranks=2), batch()
    keys, loss = list(pipe.state_dict()), pipe.step(x, target=y).loss
    costs = pipe.profile_layers(x, target=y)
    pipe.replan(plan_for(pipe, replace(costs, forward=[8.0, *[1.0] * 7]), max_stages_per_rank=1, effort=0))
    assert pipe._local.layer_counts != [4, 4] and list(pipe.state_dict()) == keys
    assert same_bits(pipe.step(x, target=y).loss, loss)


def test_a_step_number_goes_on() -> None:
    x, y = batch()
    pipe = pipeline("1f1b", rng="per_microbatch")
    pipe.step(x, target=y)
    pipe.replan(plan_for(pipe, fastpipe.LayerCosts(NUM_LAYERS), placement=ZBV, effort=0))
    assert pipe.step_count == 1
    pipe.step(x, target=y)
    assert pipe.step_count == 2 and "zbv" in pipe.describe()


def test_a_grad_scaler_goes_on() -> None:
    x, y = batch()
    scaled, plain = pipeline("1f1b"), pipeline("1f1b")
    scaler = fastpipe.GradScaler(scaled, init_scale=8.0)
    plan = plan_for(plain, fastpipe.LayerCosts(NUM_LAYERS), placement=ZBV, effort=0)
    for pipe in (scaled, plain):
        pipe.step(x, target=y)
        for parameter in pipe.parameters():
            parameter.grad = None
        pipe.replan(plan)
        pipe.step(x, target=y)
    scaler.unscale_(torch.optim.SGD(scaled.parameters()))
    assert all(same_bits(p.grad, q.grad) for p, q in zip(scaled.parameters(), plain.parameters(), strict=True))


@pytest.mark.parametrize(
    ("plan", "error", "message"),
    [
        (None, ValueError, "plan = None on rank 0"),
        ("1f1b", TypeError, "plan is a str"),
        (make_schedule("1f1b", num_ranks=3, num_microbatches=6), ValueError, "plan is for 3 ranks "),
        (ZBV, ValueError, "plan has 4 stages "),
    ],
)
def test_a_plan_for_something_else_is_refused_and_changes_nothing(plan: Any, error: type, message: str) -> None:
    pipe, (x, y) = pipeline(), batch()
    loss = pipe.step(x, target=y).loss
    with pytest.raises(error, match=message):
        pipe.replan(plan)
    assert pipe.schedule.name == "1f1b" and same_bits(pipe.step(x, target=y).loss, loss)
    with pytest.raises(ValueError, match="plan is for 9 layers but the model has 8"):
        pipe.replan(fastpipe.plan(fastpipe.LayerCosts(9), num_ranks=2, num_microbatches=4, effort=0))


def test_a_plan_that_the_layers_cannot_follow_changes_nothing() -> None:
    """Two ranks would need a copy of each stage."""
    layers, (x, y) = CASES["plain"].layers(NUM_LAYERS), batch()
    for layer in layers:
        layer.lock = threading.Lock()  # which cannot be copied
    pipe = Pipeline(layers, "1f1b", 4, squared, num_ranks=2)
    loss = pipe.step(x, target=y).loss
    twice = make_schedule("dualpipe", num_ranks=2, num_microbatches=4)
    with pytest.raises(TypeError, match="cannot pickle"):
        pipe.replan(plan_for(pipe, fastpipe.LayerCosts(NUM_LAYERS), placement=twice, effort=0))
    assert pipe.schedule.name == "1f1b" and same_bits(pipe.step(x, target=y).loss, loss)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"num_steps": 0}, "num_steps = 0"), ({"num_steps": 1.5}, "num_steps = 1.5"), ({"x": iter([])}, "not iterators")],
)
def test_profiles_refuse_what_they_cannot_measure(options: dict[str, Any], message: str) -> None:
    x, y = batch()
    pipe = pipeline()
    with pytest.raises(ValueError, match=message):
        pipe.profile(options.pop("x", x), target=y, **options)


def test_programs_of_former_plans_are_let_go() -> None:
    pipe, (x, y) = pipeline(), batch()
    for name in ("1f1b", "zb_h1", "gpipe", "1f1b"):
        pipe.replan(make_schedule(name, num_ranks=2, num_microbatches=4))
        pipe.step(x, target=y)
    assert len(pipe._steps.ranks._executors) == 1
    assert isinstance(pipe.transport, Loopback)
    assert len(pipe.transport._hubs) + len(pipe.transport._native_hubs) == 1
