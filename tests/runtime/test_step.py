"""The forms of a step: how inputs come in, what a loss may be, how losses are weighed, what comes out."""

import copy
import logging
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from fastpipe import Pipeline, make_schedule
from fastpipe.runtime.common import pytree
from fastpipe.runtime.stage.stage import Chain
from fastpipe.testing import check_parity, reference_step
from tests.conftest import executors_in_turn, overlap_of
from tests.runtime.checks import same_bits, unequal
from tests.runtime.models import CASES, WIDTH, Batch, Block, squared
from tests.runtime.tree_models import WithLinear

CASE = CASES["plain"]


def pipeline(layers: list[nn.Module] | None = None, schedule: str = "1f1b", count: int = 4, **options: Any) -> Pipeline:
    options = {"loss_fn": squared, "num_ranks": 2, "executor": "auto", **options}
    return Pipeline(CASE.layers(4) if layers is None else layers, schedule, count, **options)


def batch_of(rows: int = 9) -> Batch:
    return CASE.batches(1, rows)[0]


def grads(pipe: Pipeline) -> dict[str, torch.Tensor]:
    return {name: p.grad for name, p in pipe.named_parameters() if p.grad is not None}


def test_a_batch_a_list_and_an_iterator_are_the_same(executor: str) -> None:
    batch = batch_of()
    x, y = batch.args[0], batch.target
    forms: list[tuple[Any, Any]] = [
        (x, y),
        (list(x.tensor_split(4)), list(y.tensor_split(4))),
        (iter(x.tensor_split(4)), (part for part in y.tensor_split(4))),
        ([(part,) for part in x.tensor_split(4)], y),
    ]
    found = []
    for inputs, target in forms:
        pipe = pipeline(executor=executor)
        found.append((pipe.step(inputs, target=target), grads(pipe)))
    for result, gradients in found[1:]:
        assert same_bits(result.loss, found[0][0].loss)
        assert all(same_bits(gradients[name], found[0][1][name]) for name in gradients)


class Sums(WithLinear):
    def forward(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + other


class Pair(NamedTuple):
    x: torch.Tensor
    other: torch.Tensor


class SumsPair(WithLinear):
    def forward(self, pair: Pair) -> torch.Tensor:
        return self.linear(pair.x) + pair.other


@pytest.mark.parametrize("first, inputs", [(Sums, lambda *parts: parts), (SumsPair, Pair)])
def test_a_tuple_is_several_inputs_and_a_named_tuple_one(
    first: type[nn.Module], inputs: Callable[[Any, Any], Any], executor: str
) -> None:
    """As a whole batch, and as a list of microbatches."""
    torch.manual_seed(1)
    layers = [first(), Block(), Block(), Block()]
    x, other, y = torch.randn(3, 8, WIDTH)
    parts = [inputs(*part) for part in zip(x.chunk(4), other.chunk(4), strict=True)]
    pipe = pipeline(layers, executor=executor)
    losses = [pipe.step(batch, target=y).loss for batch in (inputs(x, other), parts, iter(parts))]
    assert torch.equal(losses[0], losses[1]) and torch.equal(losses[0], losses[2])
    for batch in (inputs(x, other), parts):
        assert check_parity(pipe, layers, (batch, y)).ok


class Attends(WithLinear):
    """Takes a batch in its second dimension, a table for all, and two keywords."""

    def forward(self, x: torch.Tensor, table: torch.Tensor, *, every: Any, pairs: Any) -> torch.Tensor:
        return self.linear(x) + table + sum(every).sum() + sum(pairs)


def test_each_argument_is_split_its_own_way(executor: str) -> None:
    def in_pairs(value: list[float], count: int) -> list[tuple[float, ...]]:
        return [tuple(value[2 * i : 2 * i + 2]) for i in range(count)]

    torch.manual_seed(1)
    rules = {0: 1, 1: "replicate", "every": "replicate", "pairs": in_pairs, "target": 1}
    layers = [Attends(), Block(), Block(), Block()]
    unsplit = Chain(dict(enumerate([*map(copy.deepcopy, layers)])))
    x, y, table = torch.randn(3, 9, WIDTH), torch.randn(3, 9, WIDTH), torch.randn(WIDTH)
    # a list of as many as there are microbatches
    kwargs: dict[str, Any] = {"every": [torch.randn(2) for _ in range(4)], "pairs": [float(i) for i in range(8)]}
    pipe = pipeline(layers, split=rules, merge={0: 1}, executor=executor)
    result = pipe.step(x, table, target=y, **kwargs)
    reference = reference_step(
        unsplit, ((x, table), y), pipe.schedule, loss_fn=squared, split_rules=rules, kwargs=kwargs
    )
    assert same_bits(result.loss, reference.loss) and not unequal(pipe, unsplit)
    assert result.outputs.shape == x.shape
    kwargs["every"] = [part.requires_grad_() * 2 for part in kwargs["every"]]
    with pytest.raises(ValueError, match="every is the output of MulBackward0, shared by the backwards of all"):
        pipe.step(x, table, target=y, **kwargs)


def test_outputs_are_merged_by_rule() -> None:
    class Several(nn.Module):
        def forward(self, x: torch.Tensor) -> dict[str, Any]:
            return {"rows": x, "same": torch.tensor([5]), "count": len(x), "scalar": x.sum(), "listed": x}

    rules = {"same": "replicate", "listed": lambda parts: [len(part) for part in parts]}
    layers = [*CASE.layers(3), Several()]
    pipe = pipeline(layers, loss_fn=lambda output, target: squared(output["rows"], target), merge=rules)
    batch = batch_of()
    outputs = pipe.step(batch.args[0], target=batch.target).outputs
    assert outputs["rows"].shape == (9, WIDTH) and outputs["same"].tolist() == [5]
    assert outputs["count"] == [3, 2, 2, 2] == outputs["listed"] and outputs["scalar"].shape == (4,)
    assert not outputs["rows"].requires_grad


def test_outputs_are_not_kept_if_not_wanted() -> None:
    batch = batch_of()
    assert pipeline(merge=False).step(batch.args[0], target=batch.target).outputs is None


def test_modules_that_torch_has_traced(executor: str) -> None:
    """They have no signature to look at."""
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(2)]
    traced = [torch.jit.trace(layer, torch.randn(2, WIDTH)) for layer in layers]
    pipe = Pipeline(traced, "zb_h1", 2, squared, num_ranks=2, executor=executor)
    x, y = torch.randn(4, WIDTH), torch.randn(4, WIDTH)
    result = pipe.step(x, target=y)
    reference = reference_step(nn.Sequential(*layers), (x, y), pipe.schedule, loss_fn=squared)
    assert result.loss is not None and torch.equal(result.loss, reference.loss)


class LossInside(nn.Module):
    """A last stage that returns its loss, alone or in a dict."""

    def __init__(self, in_dict: bool) -> None:
        super().__init__()
        self.block = Block()
        self.in_dict = in_dict

    def forward(self, x: torch.Tensor) -> Any:
        x = self.block(x)
        loss = x.square().mean()
        return {"logits": x, "loss": loss} if self.in_dict else loss


@pytest.mark.parametrize("in_dict", [False, True], ids=["alone", "in a dict"])
def test_the_last_stage_returns_the_loss(in_dict: bool, executor: str) -> None:
    layers = [*CASE.layers(3), LossInside(in_dict)]
    unsplit = Chain(dict(enumerate(map(copy.deepcopy, layers))))
    batch = batch_of()
    pipe = pipeline(layers, loss_fn=None, executor=executor)
    result = pipe.step(batch.args[0])

    def its_loss(output: Any, target: Any) -> torch.Tensor:
        return output["loss"] if in_dict else output

    reference = reference_step(unsplit, (batch.args, batch.target), pipe.schedule, loss_fn=its_loss)
    assert same_bits(result.loss, reference.loss) and not unequal(pipe, unsplit)
    if in_dict:
        assert result.outputs["logits"].shape == (9, WIDTH)


def test_neither_loss_nor_gradient_is_forward_only(executor: str) -> None:
    batch = batch_of()
    pipe = pipeline(loss_fn=None, executor=executor)
    unsplit = Chain(dict(enumerate(CASE.layers(4))))
    for inputs in (batch.args[0], iter(batch.args[0].tensor_split(4)), batch.args[0]):
        result = pipe.step(inputs)
        assert result.loss is None and not grads(pipe)
        assert same_bits(result.outputs, torch.cat([unsplit(x).detach() for x in batch.args[0].tensor_split(4)]))
    pipe.step(batch.args[0], output_grad=torch.ones(9, WIDTH))
    assert grads(pipe)


class TwoHeads(nn.Module):
    """Returns outputs by name."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        return {"first": self.first(x), "more": (self.second(x), len(x))}


def test_gradients_of_outputs_go_by_their_names(executor: str) -> None:
    batch = batch_of(8)
    x, first, second = batch.args[0], torch.randn(8, WIDTH), torch.randn(8, WIDTH)
    layers = [*CASE.layers(3), TwoHeads()]
    pipe, unsplit = pipeline(layers, loss_fn=None, executor=executor), Chain(dict(enumerate(copy.deepcopy(layers))))
    for rows in torch.arange(8).tensor_split(4):
        output = unsplit(x[rows])
        torch.autograd.backward([output["first"], output["more"][0]], [first[rows], second[rows]])
    pipe.step(x, output_grad={"more": (second, None), "first": first})
    assert not unequal(pipe, unsplit)
    for given, says in (
        ({"other": (second, None), "first": first}, "no 'more'"),
        ({"more": (second, None), "first": first, "other": first}, "no output has the name 'other'"),
        (({"first": first}, second), "a tuple for a dict"),
    ):
        with pytest.raises(ValueError, match=rf"output_grad has another structure.*\({says}\)"):
            pipe.step(x, output_grad=given)


class Answer(OrderedDict[str, Any]):
    """A dict that pytree knows as a class of its own, such as a ModelOutput of Hugging Face."""


pytree.register_pytree_node(
    Answer, lambda it: (list(it.values()), list(it)), lambda values, names: Answer(zip(names, values, strict=True))
)


class Answers(TwoHeads):
    """Returns more than tensors by name."""

    def forward(self, x: torch.Tensor) -> Any:
        return Answer(first=self.first(x), rows=len(x), nothing=None, more={"second": self.second(x)})


def test_gradients_by_name_leave_out_what_is_no_tensor(executor: str) -> None:
    x, first, second = torch.randn(3, 8, WIDTH)
    found = []
    for given in (
        (first, second),
        {"more": {"second": second}, "first": first},
        {"rows": None, "more": {"second": second}, "first": first},
    ):
        torch.manual_seed(0)
        pipe = pipeline([*CASE.layers(3), Answers()], loss_fn=None, executor=executor)
        pipe.step(x, output_grad=given)
        found.append(grads(pipe))
    for other in found[1:]:
        assert all(same_bits(other[name], grad) for name, grad in found[0].items())


class WithLabels(nn.Module):
    """Returns a loss where it is given labels, as models of Hugging Face do."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        return x if labels is None else squared(x, labels)


def test_a_step_without_labels_is_forward_only_and_the_next_ones_train(executor: str) -> None:
    batch = batch_of()
    pipe, other = (pipeline([*CASE.layers(4), WithLabels()], loss_fn=None, executor=executor) for _ in range(2))
    expected = other.step(*batch.args, labels=batch.target).loss
    for _ in range(2):
        assert pipe.step(*batch.args).loss is None and not grads(pipe)
    for _ in range(2):
        assert same_bits(pipe.step(*batch.args, labels=batch.target).loss, expected)
        assert grads(pipe).keys() == grads(other).keys()
        assert all(same_bits(grads(pipe)[name], grad) for name, grad in grads(other).items())
        for parameter in pipe.parameters():
            parameter.grad = None
        assert pipe.step(*batch.args).loss is None and not grads(pipe)


def test_a_forward_only_schedule(executor: str) -> None:
    batch = batch_of()
    pipe = pipeline(schedule="forward_only", executor=executor)
    for given in ({"target": batch.target}, {"output_grad": torch.ones(9, WIDTH)}, {}):
        with pytest.raises(ValueError, match="schedule = 'forward_only': it has no backward.*call eval_step"):
            pipe.step(batch.args[0], **given)
    result = pipe.eval_step(batch.args[0], target=batch.target)
    expected = squared(Chain(dict(enumerate(CASE.layers(4))))(batch.args[0]), batch.target)
    assert torch.allclose(result.loss, expected) and not result.loss.requires_grad and not grads(pipe)
    costs = pipe.profile(batch.args[0], target=batch.target, num_steps=1)
    assert min(costs.forward) > 0 and not any(costs.backward_input)


def summed(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().sum()


def weighed(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A mean over the tokens that count: those whose target is above 0."""
    keep = (target[:, 0] > 0).float()
    return ((output - target).square().mean(1) * keep).sum() / keep.sum().clamp(min=1)


def weight(target: torch.Tensor) -> float:
    return float((target[:, 0] > 0).sum())


@pytest.mark.parametrize(
    ("reduction", "loss_fn"),
    [("mean", squared), ("sum", summed), (weight, weighed), (torch.Tensor.numel, squared)],
    ids=["mean", "sum", "tokens", "method"],
)
def test_uneven_microbatches_weigh_as_the_whole_batch(reduction: Any, loss_fn: Any, executor: str) -> None:
    batch = batch_of(11)
    batch.target[0:3, 0] = -1.0  # the whole first microbatch counts nothing
    pipe = pipeline(loss_fn=loss_fn, loss_reduction=reduction, executor=executor)
    result = pipe.step(batch.args[0], target=batch.target)
    unsplit = Chain(dict(enumerate(CASE.layers(4)))).double()
    whole = loss_fn(unsplit(batch.args[0].double()), batch.target.double())
    whole.backward()
    assert torch.allclose(result.loss.double(), whole, rtol=1e-5)
    for (_, mine), theirs in zip(pipe.named_parameters(), unsplit.parameters(), strict=True):
        assert torch.allclose(mine.grad.double(), theirs.grad, rtol=1e-4, atol=1e-6)


def test_many_shapes_do_not_pile_up() -> None:
    pipe = pipeline()
    for rows in range(4, 204):
        pipe.step(torch.zeros(rows, WIDTH), target=torch.zeros(rows, WIDTH))
    assert len(pipe._steps.announced) <= 64


def test_the_state_has_the_whole_models_keys() -> None:
    layers = CASE.layers(10)
    whole = nn.Sequential(*CASE.layers(10))
    pipe = pipeline(layers, schedule="dualpipev")
    assert set(pipe.state_dict()) == set(whole.state_dict())
    assert [name for name, _ in pipe.named_parameters()] == [name for name, _ in whole.named_parameters()]
    state = {key: torch.full_like(value, 0.25) for key, value in whole.state_dict().items()}
    pipe.load_state_dict(state)
    assert all((value == 0.25).all() for value in pipe.state_dict().values())
    with pytest.raises(KeyError):
        pipe.load_state_dict({})


def test_the_timeline_is_measured(executor: str) -> None:
    batch = batch_of()
    pipe = pipeline(schedule="dualpipev", executor=executor)
    timeline = pipe.step(batch.args[0], target=batch.target).timeline
    assert timeline.measured and timeline.makespan > 0
    spans = list(timeline)
    assert {span.rank for span in spans} == {0, 1} and all(span.end >= span.start for span in spans)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_every_action_has_a_label_for_the_profiler(num_ranks: int, executor: str) -> None:
    """Ranks that are threads are seen by a profiler of all threads, as any thread is; and the halves of a pair."""
    batch = batch_of()
    pipe = pipeline(schedule="dualpipev", executor=executor, num_ranks=num_ranks, overlap=overlap_of(executor))
    pipe.step(batch.args[0], target=batch.target)
    all_threads = torch._C._profiler._ExperimentalConfig(profile_all_threads=num_ranks > 1)
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, acc_events=True, experimental_config=all_threads) as profile:
        pipe.step(batch.args[0], target=batch.target)
    names = {event.name for event in profile.events()}
    actions = [action for rank in pipe.schedule for action in rank]
    expected = {f"PP:{action}" for action in actions}
    assert expected <= names, expected - names
    if num_ranks > 1:  # the native executor runs the backwards of pairs in a helper thread
        halves = {f"PP:{a.pair_stage}B{a.pair_microbatch}" for a in actions if a.pair_stage >= 0}
        assert halves and halves <= names


def test_without_a_profiler_there_are_no_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    """A range costs more than all else that the Python executor does for an action."""
    monkeypatch.setattr(torch.profiler, "record_function", lambda label: pytest.fail(f"{label} was opened"))
    batch = batch_of()
    pipeline(executor="python").step(batch.args[0], target=batch.target)


def test_one_logger(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        pipe = pipeline()
        batch = batch_of()
        pipe.step(batch.args[0], target=batch.target)
    assert {record.name for record in caplog.records} == {"fastpipe"}
    assert pipe.describe() in caplog.text
    for word in ("1f1b", "4 microbatches", "loopback", "rank 0: "):
        assert word in pipe.describe()


def test_copies_follow_the_optimizer_into_an_evaluation(executor: str) -> None:
    """A stage that two ranks hold has one set of weights, also between a step and the next."""
    layers = CASE.layers(4)
    pipe = pipeline(layers, schedule="dualpipe", count=8, num_ranks=4, executor=executor)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.5)
    batch = batch_of(16)
    pipe.step(batch.args[0], target=batch.target)
    optimizer.step()
    losses = pipe.eval_step(batch.args[0], target=batch.target).losses
    parts = zip(batch.args[0].tensor_split(8), batch.target.tensor_split(8), strict=True)
    whole = Chain(dict(enumerate(layers)))
    with torch.no_grad():
        expected = [squared(whole(x), y) for x, y in parts]
    assert losses is not None
    assert all(same_bits(a, b) for a, b in zip(losses, expected, strict=True))


def test_copies_have_the_memory_of_the_parameters() -> None:
    """Also of frozen ones, of any dtype, and of values that were assigned."""
    layers = CASE.layers(4)
    layers[1].register_parameter("shift", nn.Parameter(torch.tensor([3]), requires_grad=False))
    pipe = pipeline(layers, schedule="dualpipe", count=8, num_ranks=4)
    batch = batch_of(16)
    for state in (None, {key: value.clone() for key, value in pipe.state_dict().items()}):
        if state is not None:
            pipe.load_state_dict(state, assign=True)
        pipe.step(batch.args[0], target=batch.target)
        for stage in pipe._steps.stages:
            held = pipe.stage_modules[stage.index].named_parameters()
            for (name, own), (_, parameter) in zip(stage.module.named_parameters(), held, strict=True):
                assert own.data_ptr() == parameter.data_ptr(), name
                assert own.requires_grad == parameter.requires_grad == (name != "1.shift"), name


def test_a_forward_only_schedule_has_no_reference_step() -> None:
    schedule = make_schedule("forward_only", num_ranks=2, num_microbatches=4)
    with pytest.raises(ValueError, match="no backward"):
        reference_step(CASE.layers(4), (batch_of().args[0], batch_of().target), schedule, squared)


@executors_in_turn("schedule", ["1f1b", "zbv", "dualpipe", "dualpipev"])
def test_gradients_are_added_to_in_place(schedule: str, executor: str) -> None:
    """As by `backward()`: they may be parts of one buffer, which is reduced or clipped as a whole."""
    pipe = pipeline([Block() for _ in range(4)], schedule, 4, executor=executor)
    batch = batch_of(8)
    pipe.step(batch.args[0], target=batch.target)
    first = grads(pipe)
    before = {name: grad.clone() for name, grad in first.items()}
    pipe.step(batch.args[0], target=batch.target)
    for name, grad in grads(pipe).items():
        assert grad is first[name] and not torch.equal(grad, before[name])


def test_an_input_that_is_cut_from_its_history(executor: str) -> None:
    """The recipe of the error: what comes before the pipeline gets the unsplit model's gradient."""
    embed, layers = Block(), CASES["plain"].layers(4)
    x, y = torch.randn(9, WIDTH), torch.randn(9, WIDTH)
    nn.functional.mse_loss(nn.Sequential(embed, *copy.deepcopy(layers))(x), y).backward()
    expected, embed.linear.weight.grad = embed.linear.weight.grad, None
    pipe = Pipeline(layers, "zbv", 4, nn.functional.mse_loss, num_ranks=2, executor=executor)
    whole = embed(x)
    cut = whole.detach().requires_grad_()
    pipe.step(cut, target=y)
    whole.backward(cut.grad)
    torch.testing.assert_close(embed.linear.weight.grad, expected)


class Detaching(Block):
    """Trains neither what comes before it, nor what it makes of that for the layers after it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.detach())


@executors_in_turn("schedule", ["1f1b", "zbv", "dualpipev"])
def test_weights_that_the_loss_does_not_depend_on_are_named(
    schedule: str, executor: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Once: they get gradients of zeros, where the unsplit model's get none."""
    layers = [Block(), Block(), Detaching(), Block(), Block()]
    options = {"num_ranks": 4} if schedule == "1f1b" else {}
    pipe = pipeline(layers, schedule, 4, partition=[1, 1, 1, 2], executor=executor, **options)
    batch = batch_of(8)
    pipe.eval_step(batch.args[0], target=batch.target)
    for rows in (8, 8, 4):
        pipe.step(batch.args[0][:rows], target=batch.target[:rows])
    found = [record.getMessage() for record in caplog.records if "gradients of zeros" in record.getMessage()]
    assert len(found) == 1 and "does not depend on what stage 2 gets" in found[0], found


def test_a_loss_that_depends_on_everything_is_no_cause_for_a_warning(
    executor: str, caplog: pytest.LogCaptureFixture
) -> None:
    pipe = pipeline(schedule="zbv", executor=executor)
    caplog.clear()
    x = batch_of().args[0].clone().requires_grad_()
    pipe.step(x, target=batch_of().target)
    assert x.grad is not None and not caplog.records
