"""Audits: every kind of flipped bit is found, the right rank is named, and nothing is found where nothing is wrong."""

import contextlib
import gc
import itertools
import re
import time
import weakref
from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fastpipe
from fastpipe import CorruptionError, Pipeline
from fastpipe.runtime.common import CPU, bit_sums, bytes_of, packing, version_of
from fastpipe.runtime.stage import Generators, Stage, StageWork, to_tensors
from fastpipe.runtime.step.audit import Audit, Draw, Recorder, Repetition, _record_in, draw, waits_of
from fastpipe.runtime.step.result import block_of
from fastpipe.testing import flip_bit
from tests.conftest import WAYS, skip_without_native
from tests.distributed.ranks import GroupOf, on_ranks, ranks
from tests.patience import PATIENCE
from tests.runtime.checks import rows_for
from tests.runtime.models import CASES

COUNT, WIDTH = 8, 6
V_SHAPED = ("zbv", "dualpipev")


def num_stages(schedule: str) -> int:
    return dist.get_world_size() * (2 if schedule in V_SHAPED else 1)


def most(schedule: str) -> float:
    """The largest share: some stage is audited in every step."""
    return 1 / (num_stages(schedule) * (2 if schedule == "dualpipe" else 1))


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(4 * COUNT, WIDTH, generator=generator), torch.randn(4 * COUNT, WIDTH, generator=generator)


class Block(nn.Module):
    """A layer with what may differ when it is computed again: random numbers and statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.dropout = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.dropout(torch.tanh(self.norm(self.linear(x)))) + x
        return out


class Carries(Block):
    """Hands a mask and a value with a gradient to the last layer."""

    def forward(self, x: torch.Tensor) -> Any:
        out = super().forward(x)
        return fastpipe.carry(out, mask=torch.ones(WIDTH), value=out.mean())


class Takes(nn.Module):
    """Takes what is carried, and scales by a keyword of the step, in place."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.in_place = in_place
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor, mask: torch.Tensor, value: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        x = x.mul_(scale) if self.in_place else x * scale
        fastpipe.add_loss(0.01 * x.square().mean())
        return self.linear(x) * mask + value


def awkward_layers(schedule: str, in_place: bool) -> list[nn.Module]:
    """The first and the last one share a weight."""
    first, last = Carries(), Takes(in_place)
    last.linear.weight = first.linear.weight
    return [first, *(Block() for _ in range(num_stages(schedule) - 2)), last]


def train(pipe: Pipeline, steps: int, between: Callable[[int], object] = lambda _: None, **kwargs: Any) -> list[float]:
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.05, foreach=False)
    losses = []
    for step in range(steps):
        x, target = batch(step)
        optimizer.zero_grad()
        losses.append(float(pipe.step(x, target=target, **kwargs).loss))
        optimizer.step()
        between(step)
    return losses


def losses_with_and_without(schedule: str, executor: str, transport: str, options: Any) -> tuple[Any, Any, int]:
    found = []
    for audit in (None, most(schedule)):
        torch.manual_seed(0)
        layers = awkward_layers(schedule, in_place="recompute" not in options)
        given = options | {"executor": executor, "transport": transport, "audit": audit}
        pipe = Pipeline(layers, schedule, COUNT, nn.functional.mse_loss, **given)
        scale = torch.linspace(0.5, 2, 4 * COUNT)[:, None]
        losses = train(pipe, 5, scale=scale)
        found.append((losses, [p.detach().double().sum().item() for p in pipe.parameters()]))
    audited = pipe._steps.audit
    assert audited is not None and f"{audited.num_computed} microbatches" in pipe.describe()
    return *found, audited.num_computed


@pytest.mark.parametrize(
    ("schedule", "way", "options"),
    [
        ("1f1b", WAYS[0], {}),
        ("1f1b", WAYS[2], {"recompute": "full", "rng": "per_microbatch"}),
        ("zbv", WAYS[0], {"recompute": "layers"}),
        ("zbv", WAYS[2], {}),
        ("dualpipev", WAYS[1], {"overlap": "always", "rng": "per_microbatch"}),
        ("dualpipe", WAYS[0], {"grad_dtype": torch.float64}),
    ],
    ids=str,
)
def test_nothing_is_found_and_no_bit_changes(
    schedule: str, way: tuple[str, str], options: Any, group_of: GroupOf
) -> None:
    if way[0] == "native":
        skip_without_native()
    answers = group_of(2).run(losses_with_and_without, schedule, *way, options)
    for without, audited, _ in answers:
        assert without == audited
    # all but the last step's, as a step audits one of the stages, and all microbatches of it
    assert sum(count for *_, count in answers) == 4 * (COUNT if schedule != "dualpipe" else COUNT // 2)


class Broken(nn.Module):
    """A layer that some ranks compute wrong: always, or in some steps.

    Args:
        ranks: which.
        steps: in which steps; None for all.
        where: "forward", "backward", or "weight" for the gradient of its weight alone.
    """

    def __init__(self, ranks: tuple[int, ...], where: str, steps: Any = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.ranks, self.where, self.steps = ranks, where, steps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight.clone()
        out = torch.tanh(x @ weight)
        current = fastpipe.current()
        assert current is not None
        if dist.get_rank() in self.ranks and (self.steps is None or current.step in self.steps):
            if self.where == "forward":
                flip_bit(out)
            else:
                (out if self.where == "backward" else weight).register_hook(flip_bit)
        return out


@dataclass
class Seen:
    """What a rank saw: in which call of step the error came, and what it says."""

    step: int
    rank: int | None
    stage: int | None
    microbatch: int | None
    text: str
    drawn: tuple[int, int]


def first_draw(schedule: str, stage: int, pipe: Pipeline) -> tuple[int, tuple[int, ...]]:
    """The first step in which the stage is audited, and its auditors."""
    program = pipe._steps.programs.program(COUNT, forward_only=False)
    for step in range(1000):
        drawn = draw(most(schedule), step, program)
        if drawn is not None and drawn.stage == stage:
            return step, tuple(drawn.again)
    raise AssertionError("no step audits it")


def seen(schedule: str, executor: str, where: str, ranks: tuple[int, ...], lasts: bool) -> Seen:
    """Stage 1 is computed wrong by some ranks, always or in the first step in which it is audited."""
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(num_stages(schedule))]
    options = {"executor": executor, "audit": most(schedule)}
    broken = Broken(ranks, where, None if lasts else ())
    pipe = Pipeline([*layers[:1], broken, *layers[2:]], schedule, COUNT, nn.functional.mse_loss, **options)
    drawn = first_draw(schedule, 1, pipe)
    if not lasts:
        broken.steps = [drawn[0]]  # in the stage, and not in the copies that compute it again
    count = -1

    def counted(step: int) -> None:
        nonlocal count
        count = step

    try:
        train(pipe, 50, counted)
    except CorruptionError as error:
        return Seen(count + 1, error.rank, error.stage, error.microbatch, str(error), drawn)
    raise AssertionError("nothing was found")


@pytest.mark.parametrize("where", ["forward", "backward", "weight"])
@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_a_stage_that_is_computed_wrong_once(where: str, schedule: str, executor: str, group_of: GroupOf) -> None:
    owner = 1
    for one in group_of(2).run(seen, schedule, executor, where, (owner,), False):
        assert one.step == one.drawn[0] + 1, "the step after the one that was audited"
        assert (one.rank, one.stage, one.microbatch) == (owner, 1, 0)
        assert "is wrong: 2 of 2 ranks compute other bits; this time rank 1 agrees" in one.text
        expected = {"forward": "output 0", "backward": "the gradient of", "weight": "the gradient of 1.weight"}
        assert expected[where] in one.text and "restart from an earlier checkpoint" in one.text


@pytest.mark.parametrize(
    ("size", "where", "wrong", "named", "text"),
    [
        (3, "forward", 1, 1, "it is wrong again"),
        (3, "backward", 2, 2, "rank 2 computes it wrong"),  # the auditor
        (2, "forward", 1, None, "one of them is wrong"),
    ],
)
def test_a_rank_that_is_always_wrong(
    size: int, where: str, wrong: int, named: int | None, text: str, group_of: GroupOf
) -> None:
    """Two ranks cannot tell which of them it is."""
    for one in group_of(size).run(seen, "1f1b", "auto", where, (wrong,), True):
        assert (one.rank, one.stage) == (named, 1) and text in one.text
        assert where == "forward" or wrong in one.drawn[1]


def refuse(*_: Any) -> None:
    raise ArithmeticError("on purpose")


def wrong_once(fails: bool) -> str:
    """The auditor computes a forward wrong, once, and perhaps the step in which it did so fails elsewhere."""
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(2)]
    pipe = Pipeline(layers, "1f1b", COUNT, nn.functional.mse_loss, audit=0.5)
    step, (auditor,) = first_draw("1f1b", 1, pipe)
    train(pipe, step + 1)
    audit = pipe._steps.audit
    assert audit is not None
    if dist.get_rank() == auditor:

        def flip(module: nn.Module, args: Any, output: torch.Tensor) -> None:
            flip_bit(output)
            hook.remove()

        hook = audit._copies[1].module.register_forward_hook(flip)
    x, target = batch(step + 1)
    if fails:
        hooks = [layers[1].register_forward_pre_hook(refuse)] if dist.get_rank() == 1 else []
        with pytest.raises((ArithmeticError, fastpipe.StepError)):
            pipe.step(x, target=target)
        for hook in hooks:
            hook.remove()
    with pytest.raises(CorruptionError) as caught:
        pipe.step(x, target=target)
    assert (caught.value.rank, caught.value.stage) == (auditor, 1)
    pipe.eval_step(x, target=target)
    return str(caught.value)


@pytest.mark.parametrize("fails", [False, True])
def test_an_auditor_that_is_wrong_once(fails: bool, group_of: GroupOf) -> None:
    for text in group_of(2).run(wrong_once, fails):
        assert "and now agrees with all ranks: it was wrong once" in text


def weight_flipped(schedule: str, when: str) -> Seen | str:
    """Rank 1's weight changes once, between two steps or within one."""
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(num_stages(schedule))]
    pipe = Pipeline(layers, schedule, COUNT, nn.functional.mse_loss, audit=0.01)
    count = -1

    def flips(module: nn.Module, *_: Any) -> None:
        current = fastpipe.current()
        if current is not None and (current.step, current.microbatch) == (5, 3):
            flip_bit(module.weight, element=WIDTH)

    if when == "within" and dist.get_rank() == 1:
        layers[1].register_forward_hook(flips)

    def between(step: int) -> None:
        nonlocal count
        count = step
        if step == 4 and dist.get_rank() == 1 and when == "between":
            flip_bit(layers[1].weight)
        if step == 4 and when == "written":
            with torch.no_grad():
                layers[1].weight[0, 0] += 1
            pipe.load_state_dict(pipe.state_dict())
        if step == 4 and when == "replaced":
            layers[1].weight = nn.Parameter(layers[1].weight.detach() + 1)

    try:
        train(pipe, 8, between)
    except CorruptionError as error:
        return Seen(count + 1, error.rank, error.stage, error.microbatch, str(error), (0, 0))
    return "nothing"


@pytest.mark.parametrize("when", ["between", "within"])
def test_a_weight_that_changes_in_memory_is_found_in_the_same_step(when: str, group_of: GroupOf) -> None:
    for one in group_of(2).run(weight_flipped, "1f1b", when):
        assert isinstance(one, Seen) and (one.step, one.rank) == (5, 1)
        assert "1.weight on rank 1 changed between" in one.text


@pytest.mark.parametrize("when", ["written", "replaced"])
def test_a_weight_that_the_script_changes(when: str, group_of: GroupOf) -> None:
    assert group_of(2).run(weight_flipped, "1f1b", when) == ["nothing"] * 2


@on_ranks(2)
def test_what_is_refused() -> None:
    rank, layers = dist.get_rank(), [nn.Linear(WIDTH, WIDTH) for _ in range(2)]
    made: list[tuple[Any, dict[str, Any], str]] = [
        (layers, {"audit": 0.6}, "audit = 0.6: a step audits one of the 2 stages that ranks hold; give at most 0.5"),
        (layers, {"audit": 0}, "audit = 0: give the share of the microbatches"),
        (lambda index: layers[index], {"audit": 0.1}, "give the list of the model's layers in every process"),
        (layers, {"data_parallel": dist.group.WORLD}, "audit and data_parallel: a stage cannot be computed again"),
        (layers, {"fused_weight_grad": True}, "audit and fused_weight_grad"),
        (layers, {"audit": 0.1 if rank else None}, "do not build the same pipeline: the default on ranks [0], 0.1 on "),
    ]
    for stages, options, expected in made:
        with pytest.raises(ValueError, match=re.escape(expected)):
            Pipeline(stages, "1f1b", COUNT, nn.functional.mse_loss, **{"audit": 0.1, **options})


def hooked() -> tuple[int, list[float]]:
    """Hooks of the user, on a weight and a module, and steps that fail."""
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(2)]
    layers[0].weight.register_hook(lambda grad: 2 * grad)
    layers[1].weight.register_post_accumulate_grad_hook(lambda weight: None)
    pipe = Pipeline(layers, "1f1b", COUNT, nn.functional.mse_loss, audit=0.5)
    losses = train(pipe, 4)
    x, target = batch(4)
    with pytest.raises((ValueError, fastpipe.StepError)):
        pipe.step(x, target=target[:, :3] if dist.get_rank() else target)
    pipe.eval_step(x, target=target)
    losses += train(pipe, 4)
    assert pipe._steps.audit is not None
    return pipe._steps.audit.num_computed, losses


def test_hooks_failed_steps_and_evaluation(group_of: GroupOf) -> None:
    first, second = group_of(2).run(hooked)
    assert first[1] == second[1] and first[0] + second[0] > 0


class InPlace(nn.Linear):
    """Changes the batch that it gets in place, by what requires a gradient."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mul_(self.weight[0]) + self.bias


def changes_in_place() -> int:
    torch.manual_seed(0)
    pipe = Pipeline([InPlace(WIDTH, WIDTH) for _ in range(2)], "1f1b", COUNT, nn.functional.mse_loss, audit=0.5)
    for step in range(4):
        x, target = batch(step)
        pipe.step([part.clone() for part in x.chunk(COUNT)], target=target)
    assert pipe._steps.audit is not None
    return pipe._steps.audit.num_computed


def test_inputs_that_are_changed_in_place(group_of: GroupOf) -> None:
    assert sum(group_of(2).run(changes_in_place)) == 3 * COUNT


class Scales(nn.Linear):
    """Takes an object that only its own process has."""

    def forward(self, x: torch.Tensor, scale: Any) -> torch.Tensor:
        out: torch.Tensor = super().forward(x) * scale()
        return out


@on_ranks(2)
def test_what_cannot_be_sent_is_an_error_on_all_ranks() -> None:
    pipe = Pipeline([Scales(WIDTH, WIDTH) for _ in range(2)], "1f1b", COUNT, nn.functional.mse_loss, audit=0.5)
    x, target = batch(0)
    expected = "is given cannot be sent to another rank; give it in another form, or leave audit out"
    with pytest.raises((ValueError, fastpipe.StepError), match=expected):
        pipe.step(x, target=target, scale=[partial(float, 2)] * COUNT)


def awkward_case(name: str, schedule: str) -> int:
    case = CASES[name]
    pipe = Pipeline(case.layers(4), schedule, 4, case.loss_fn, split=case.split, audit=most(schedule))
    for one in case.batches(3, rows_for(4)):
        pipe.step(*one.args, target=one.target, **one.kwargs)
        with torch.no_grad():
            for parameter in (p for p in pipe.parameters() if p.grad is not None):
                parameter.sub_(parameter.grad, alpha=0.01)
    assert pipe._steps.audit is not None
    return pipe._steps.audit.num_computed


@pytest.mark.parametrize("name", CASES)
def test_awkward_models(name: str, group_of: GroupOf) -> None:
    """Odd strides, and slices of a batch that are not aligned: kernels sum in another order by both."""
    for schedule in ("1f1b", "zbv"):
        assert sum(group_of(2).run(awkward_case, name, schedule)) == 2 * 4


def called_otherwise() -> list[int]:
    """How much was computed again where steps are called in other ways."""
    found = []

    def pipeline(layers: list[nn.Module], loss_fn: Any = nn.functional.mse_loss, **options: Any) -> Pipeline:
        return Pipeline(layers, "1f1b", COUNT, loss_fn, audit=0.5, **options)

    def note(pipe: Pipeline) -> None:
        assert pipe._steps.audit is not None
        found.append(pipe._steps.audit.num_computed)

    torch.manual_seed(0)
    pipe = pipeline([Block(), Block()])
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    for step in range(4):
        with torch.autocast("cpu", torch.bfloat16, enabled=step != 2):
            pipe.step(*batch(step)[:1], target=batch(step)[1])
        optimizer.step()
    note(pipe)
    pipe = pipeline([nn.Embedding(9, WIDTH), nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout())], None)
    for step in range(4):
        if step == 2 and 0 in pipe.stage_modules:  # what is trained, and how, may change between steps
            pipe.stage_modules[0].requires_grad_(False)
        if step == 3:
            pipe.eval()
        pipe.step(torch.arange(4 * COUNT) % 9, output_grad=batch(step)[0])
    note(pipe)
    pipe = pipeline([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)], loss_reduction="sum")
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    scaler = fastpipe.GradScaler(pipe)
    for step in range(4):
        pipe.step(*batch(step)[:1], target=batch(step)[1])
        scaler.step(optimizer)
        scaler.update()
    note(pipe)
    return found


def test_other_calls(group_of: GroupOf) -> None:
    first, second = group_of(2).run(called_otherwise)
    assert [a + b for a, b in zip(first, second, strict=True)] == [3 * COUNT] * 3


@on_ranks(2)
def test_a_dropped_pipeline_goes_at_once() -> None:
    """Without Python's collector, though its steps are audited; after a finding, too."""
    for steps in (4, 8):
        torch.manual_seed(0)
        layers = [nn.Linear(WIDTH, WIDTH) for _ in range(2)]
        pipe = Pipeline(layers, "1f1b", COUNT, nn.functional.mse_loss, audit=0.5)
        gc.disable()

        def between(step: int, weight: torch.Tensor = layers[1].weight) -> None:
            if step == 4:
                flip_bit(weight)

        with contextlib.suppress(CorruptionError):
            train(pipe, steps, between)
        known = weakref.ref(pipe), weakref.ref(pipe._steps.audit)
        del pipe
        assert [reference() for reference in known] == [None, None]
        gc.enable()


def test_draws() -> None:
    """Each microbatch of each stage as often as the share says, and each stage again and again: docs/reliability.md."""
    program = fastpipe.lower(fastpipe.make_schedule("1f1b", num_ranks=4, num_microbatches=8))
    drawn = [draw(0.05, step, program) for step in range(20_000)]
    counts = Counter((one.stage, i) for one in drawn if one is not None for i in one.microbatches)
    assert len(counts) == 32 and all(0.045 < count / len(drawn) < 0.055 for count in counts.values())
    steps = {stage: [k for k, one in enumerate(drawn) if one is not None and one.stage == stage] for stage in range(4)}
    gaps = [later - step for found in steps.values() for step, later in itertools.pairwise([-1, *found])]
    assert max(gaps) == 39 and round(sum(gaps) / len(gaps)) == 5
    # the ranks that wait longest; rank 3 has the time of two microbatches
    auditors = {(one.owner, *one.again) for one in drawn if one is not None}
    assert auditors == {(0, 3), (1, 3), (2, 3), (3, 2)}
    known = weakref.ref(program)
    del program
    assert known() is None


@pytest.mark.parametrize(
    ("schedule", "share", "again"),
    [
        # rank 3 has 3 forwards before, and 6 after its last action
        ("1f1b", 0.125, {3: ([0], [], [1, 2]), 2: ([], [3], [])}),
        ("1f1b", 0.05, {3: ([0], [], [1])}),
        ("1f1b", 0.25, {3: ([0], [], [1, 2, 7]), 2: ([], [3, 4], []), 1: ([], [5], [6])}),
        ("zb_h1", 0.05, {3: ([0], [], []), 1: ([], [1], [])}),
    ],
)
def test_ranks_compute_again_as_much_as_fits_where_they_wait(schedule: str, share: float, again: Any) -> None:
    program = fastpipe.lower(fastpipe.make_schedule(schedule, num_ranks=4, num_microbatches=8))
    one = next(one for step in range(100) if (one := draw(share, step, program)) is not None and one.owner == 0)
    numbers = {i: number for number, i in enumerate(one.microbatches)}
    found = {rank: tuple([numbers[i] for i in part] for part in parts) for rank, parts in one.again.items()}
    assert found == again


def test_where_ranks_wait() -> None:
    program = fastpipe.lower(fastpipe.make_schedule("1f1b", num_ranks=4, num_microbatches=8))
    waits = waits_of(program)
    assert [(one.before, one.longest) for one in waits] == [(0, 6), (1, 4), (2, 4), (3, 6)]
    assert [program[rank][one.position].op.name for rank, one in enumerate(waits)] == ["WAIT_RECV"] * 2 + [
        "WAIT_SEND"
    ] * 2
    whole = fastpipe.lower(fastpipe.make_schedule("1f1b", num_ranks=1, num_microbatches=2))
    assert waits_of(whole) == [(0, 0, len(whole[0]))]


def positions(executor: str, transport: str, fails: bool) -> list[int] | str:
    """Where in the program the rest is computed again; or the error if that fails once."""
    found: list[int] = []
    complete = Audit._complete

    def noting(self: Audit) -> None:
        if self._again is not None:
            (running,) = pipe._steps.ranks._current or [None]
            found.append(-1 if running is None else running.position())
            if fails and dist.get_rank() == 1 and len(found) == 1:
                raise ArithmeticError("on purpose")
        complete(self)

    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(2)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Audit, "_complete", noting)
        options: dict[str, Any] = {"executor": executor, "transport": transport, "audit": 0.5}
        pipe = Pipeline(layers, "1f1b", COUNT, nn.functional.mse_loss, **options)
        if not fails:
            train(pipe, 20)
            return found
        with pytest.raises((ArithmeticError, fastpipe.StepError)) as caught:
            train(pipe, 20)
        train(pipe, 20)
        return str(caught.value) if isinstance(caught.value, fastpipe.StepError) else "its own"


@pytest.mark.parametrize(("executor", "transport"), [("native", "auto"), ("python", "process_group")])
def test_ranks_compute_again_before_their_longest_wait(executor: str, transport: str, group_of: GroupOf) -> None:
    if executor == "native":
        skip_without_native()
    found = group_of(2).run(positions, executor, transport, False)
    program = fastpipe.lower(fastpipe.make_schedule("1f1b", num_ranks=2, num_microbatches=COUNT))
    assert [set(of_rank) for of_rank in found] == [{one.position} for one in waits_of(program)]


@pytest.mark.parametrize(("executor", "transport"), [("native", "auto"), ("python", "process_group")])
def test_an_error_in_what_is_computed_again(executor: str, transport: str, group_of: GroupOf) -> None:
    if executor == "native":
        skip_without_native()
    for text in group_of(2).run(positions, executor, transport, True):
        assert text == "its own" or ("rank" in text and "ArithmeticError: on purpose" in text)


class Counts(nn.Linear):
    """Depends on the number of its forwards, as spectral_norm does: a recompute sees those of later microbatches."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return super().forward(x) * self.count


def recomputes_with_buffers(schedule: str, recompute: str) -> int:
    layers = [Counts() for _ in range(num_stages(schedule))]
    options: Any = {"recompute": recompute, "audit": most(schedule)}
    pipe = Pipeline(layers, schedule, COUNT, nn.functional.mse_loss, **options)
    for step in range(4):
        x, target = batch(step)
        pipe.step(x, target=target)
    assert pipe._steps.audit is not None
    return pipe._steps.audit.num_computed


class Reads(Counts):
    """Its backward reads the number of its forwards, too; a buffer of its own never changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor([1.0, torch.nan]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x) * self.scale[0]
        out.register_hook(lambda grad: grad * self.count)
        return out


def test_an_unchanged_buffer_is_copied_once() -> None:
    """What is computed again may change it: here the first backward and the second forward start from the same one."""
    module, xs = Reads(), torch.randn(2, 4, WIDTH)
    stage, copy = (Stage(0, one, num_stages=2) for one in (module, deepcopy(module).to("meta")))
    recorder = Recorder(stage, {0: False, 1: False}, Generators(CPU))
    stage.begin(StageWork(args=[(x,) for x in xs]))
    with recorder.attached():
        for i in range(2):
            (out,) = stage.forward(i, ())
            stage.backward(i, (torch.ones_like(out),))
    drawn = Draw(0, 0, {0: False, 1: False}, (1, 1, 1), {})
    record = _record_in(block_of(to_tensors(recorder.record(CPU) | {"draw": drawn}, {}, 0), CPU))
    buffers = [given["buffers"][action] for given in record["microbatches"].values() for action in "FB"]
    counts, scales = zip(*buffers, strict=True)
    assert [float(count) for count in counts] == [0, 1, 1, 2]
    assert counts[1] is counts[2] and len(set(map(id, scales))) == 1
    again = Repetition(copy, record, [0, 1], Generators(CPU))
    again.compute([0, 1], ())
    assert again.results() == recorder.results


@pytest.mark.parametrize(("schedule", "recompute"), [("1f1b", "full"), ("zbv", "layers")])
def test_buffers_that_change_before_a_recompute(schedule: str, recompute: str, group_of: GroupOf) -> None:
    assert sum(group_of(2).run(recomputes_with_buffers, schedule, recompute)) == 3 * COUNT


@on_ranks(2)
def test_an_error_in_what_is_computed_again_is_of_its_step_alone() -> None:
    """The step after one that failed elsewhere does not raise it, and it does not keep the pipeline."""
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(2)]
    pipe = Pipeline(layers, "1f1b", COUNT, nn.functional.mse_loss, audit=0.5)
    audit = pipe._steps.audit
    assert audit is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Audit, "_complete", refuse)
        audit.while_waiting()
    train(pipe, 2)
    gc.disable()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Audit, "_complete", refuse)
        audit.while_waiting()
    with pytest.raises(ArithmeticError):
        audit.report()
    known = weakref.ref(pipe), weakref.ref(audit)
    del pipe, audit
    assert [reference() for reference in known] == [None, None]
    gc.enable()


@on_ranks(2)
def test_an_error_before_a_step_in_what_is_computed_again_fails_one_step() -> None:
    pipe = Pipeline([nn.Linear(WIDTH, WIDTH) for _ in range(2)], "1f1b", COUNT, nn.functional.mse_loss, audit=0.5)
    audit = pipe._steps.audit
    assert audit is not None
    (auditor,) = first_draw("1f1b", 0, pipe)[1]
    copy, failures, notes = audit._copies[0], 0, ""

    def fails_once(*args: Any) -> None:
        del copy.backward
        copy.backward(*args)
        raise ArithmeticError("on purpose")

    if dist.get_rank() == auditor:
        copy.backward = fails_once  # type: ignore[method-assign,assignment]
    x, target = batch(0)
    for _ in range(20):
        try:
            pipe.step(x, target=target)
        except (ArithmeticError, fastpipe.StepError) as error:
            failures += 1
            notes = "\n".join(getattr(error, "__notes__", []))
    assert failures == 1
    if dist.get_rank() == auditor:
        step = first_draw("1f1b", 0, pipe)[0]
        assert f"raised while an audit computed stage 0, microbatch 0 of step {step} again" in notes


def is_silent_in_an_audit(victim: int) -> tuple[int | None, str]:
    """Runs on every rank: one does not take its record, so its owner waits for it, and the third rank for the owner."""
    width, end = 1500, Audit.end  # larger than what a connection holds

    def never_ends(self: Audit, replies: Any) -> None:
        drawn = self._draw
        if dist.get_rank() == victim and drawn is not None and list(drawn.again)[:1] == [victim]:
            time.sleep(PATIENCE)
        end(self, replies)

    layers = [nn.Linear(width, width) for _ in range(3)]
    pipe = Pipeline(layers, "1f1b", COUNT, nn.functional.mse_loss, audit=1 / 3, timeout=5.0)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(fastpipe.StepError) as raised:
        patch.setattr(Audit, "end", never_ends)
        for _ in range(20):
            pipe.step(torch.ones(COUNT, width), target=torch.ones(COUNT, width))
    return raised.value.rank, str(raised.value)


def test_who_is_silent_in_an_audit_is_named_by_all() -> None:
    with ranks(3) as group:
        group.start(is_silent_in_an_audit, 1)
        for rank, text in group.results([0, 2]):
            assert rank == 1 and "rank 1 did not reach the end of call" in text, text


def test_one_flipped_bit_changes_a_sum() -> None:
    base = torch.randn(7, 5)
    odd = [base, base.t(), base[1:, 1:], base.bfloat16(), base[:, :1].expand(7, 5), torch.ones(3, dtype=torch.bool)]
    for tensor in [*odd, base.to(torch.complex64), torch.tensor(1.5), torch.zeros(0, 3)]:
        (total,) = bit_sums([tensor])
        assert bit_sums([None, tensor.clone()]) == [None, total]
        copy = tensor.clone(memory_format=torch.contiguous_format)
        if tensor.numel():
            copy.view(-1).view(torch.uint8)[-1] ^= 1
            assert bit_sums([copy]) != [total]


def test_a_sum_is_of_the_values_that_are_read() -> None:
    """Autograd gives a parameter that is used by conj() such a gradient."""
    turned = torch.randn(7, 5, dtype=torch.complex64).conj()
    for tensor in (turned, turned.imag, turned[:, 1:]):
        assert bit_sums([tensor]) == bit_sums([tensor.resolve_conj().resolve_neg()])


def test_what_an_exact_copy_is_of() -> None:
    base = torch.randn(4, 4)
    base[0, 0], base[0, 1] = torch.nan, 0.0
    for tensor in [base, base.t(), base[1:, 1:], base[:, :1].expand(4, 3), base[:0], base.to(torch.complex64).conj()]:
        assert packing.is_exact_copy(packing.exact_copy(tensor), tensor)
    other = base.clone()
    other[0, 1] = -0.0
    for tensor in [other, base.t(), base.double(), base[:2], base.clone().requires_grad_()]:
        assert not packing.is_exact_copy(packing.exact_copy(base), tensor)


def test_packed_tensors_keep_their_bits_and_lie_as_before() -> None:
    base = torch.randn(8, 6)
    base[0, 0] = torch.nan
    odd = [base, base.t(), base[1:, 1:], base[:, :1].expand(8, 5), base.bfloat16().view(-1)[3:], base[:0]]
    odd += [torch.arange(6, dtype=torch.uint8).view(torch.int4)]
    given = [*odd, torch.tensor(1.5, requires_grad=True), torch.ones(3, dtype=torch.bool), base.to(torch.complex64)]
    block = block_of(to_tensors({"tensors": given, "text": "x"}, {}, 0), CPU)
    tree = _record_in(block)
    assert tree["text"] == "x"
    for before, after in zip(given, tree["tensors"], strict=True):
        assert torch.equal(bytes_of(before), bytes_of(after)) and before.dtype == after.dtype
        assert (before.shape, before.stride()) == (after.shape, after.stride())
        assert before.requires_grad == after.requires_grad
        assert before.data_ptr() % 64 == after.data_ptr() % 64
    for place, tensor in enumerate(tree["tensors"][:3]):  # none shares memory, or a version counter, with another
        assert version_of(tensor) == 0, place
        tensor.zero_()
    assert torch.equal(bytes_of(_record_in(block)["tensors"][0]), bytes_of(base))


def many(steps: int, schedule: str) -> int:
    torch.manual_seed(0)
    layers = awkward_layers(schedule, in_place=True)
    pipe = Pipeline(layers, schedule, COUNT, nn.functional.mse_loss, audit=most(schedule))
    train(pipe, steps, scale=torch.ones(4 * COUNT, 1))
    assert pipe._steps.audit is not None
    return pipe._steps.audit.num_computed


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_no_false_alarm_in_many_steps(schedule: str, group_of: GroupOf) -> None:
    steps = 10_000
    answers = group_of(2).run(many, steps, schedule, timeout=3000)
    assert sum(answers) == (steps - 1) * COUNT


def test_a_single_process_is_refused() -> None:
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(2)]
    with pytest.raises(ValueError, match="audit = 0.1: a single process has no other rank"):
        Pipeline(layers, "1f1b", COUNT, nn.functional.mse_loss, num_ranks=2, audit=0.1)
