"""What a step is trained on: accumulation, and losses that stages add. Metrics are in test_metrics.py."""

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointError, checkpoint

import fastpipe
from fastpipe import AddedLosses, Pipeline, add_loss, make_schedule
from fastpipe.runtime.stage.stage import Chain
from fastpipe.runtime.step.result import StepResult
from fastpipe.testing import reference_step
from tests.conftest import executors_in_turn, overlap_of, skip_without_native
from tests.runtime.checks import assert_same, reference_of, same_bits, train_and_compare
from tests.runtime.models import CASES, WIDTH, Balanced, Block, Case, measured, squared
from tests.runtime.paired import PAIRED, Own
from tests.runtime.test_bits import COMBINATIONS, OF_A_KIND

# For what depends neither on how many ranks there are nor on the order, but on its kind; test_bits has every one.
TWO = [combination for combination in COMBINATIONS if combination[1] == 2 and combination[0] in OF_A_KIND]
ADDED = CASES["added_losses"]


def whole(case: Case, count: int) -> Chain:
    return Chain(dict(enumerate(case.layers(count))))


def grads(module: nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in module.parameters() if p.grad is not None]


@executors_in_turn("schedule, num_ranks, num_microbatches", TWO)
def test_added_losses_with_schedules_of_each_kind(
    schedule: str, num_ranks: int, num_microbatches: int, executor: str
) -> None:
    train_and_compare("added_losses", schedule, num_microbatches, num_ranks=num_ranks, executor=executor, steps=2)


@executors_in_turn("schedule, case", itertools.product(PAIRED, ["added_losses", "added_and_recomputed"]))
def test_added_losses_in_pairs(schedule: str, case: str, executor: str) -> None:
    train_and_compare(case, schedule, 8, num_ranks=2, executor=executor, overlap=overlap_of(executor))


class OwnBalanced(Own):
    """A layer for DualPipe that adds a loss."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        add_loss(0.1 * y.square().mean(), "size")
        return y


def train_by_own_method(case: Case, executor: str) -> StepResult:
    """A step of DualPipeV by the layers' own method, with the bits of the unsplit model."""
    unsplit, batch = whole(case, 4), case.batches(1, 17)[0]
    pipe = Pipeline(case.layers(4), "dualpipev", 8, squared, num_ranks=2, executor=executor)
    before = Own.calls
    result = pipe.step(*batch.args, target=batch.target)
    assert Own.calls > before
    assert_same(pipe, result, unsplit, reference_of(unsplit, batch, pipe, case))
    return result


@pytest.mark.parametrize("recomputes", [False, True])
def test_added_losses_where_pairs_are_the_modules_own(recomputes: bool, executor: str) -> None:
    case = Case(lambda n: [OwnBalanced(recomputes=recomputes) for _ in range(n)])
    result = train_by_own_method(case, executor)
    assert result.added_losses["size"] > 0


class OwnRecomputed(OwnBalanced):
    """All of it is in a checkpoint, also what it adds."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = checkpoint(super().forward, x, use_reentrant=False)
        return y


class Within(OwnBalanced):
    """Runs the forward within the backward of the other microbatch."""

    @classmethod
    def overlapped_forward_backward(
        cls, module0: Any, inputs0: Any, criterion0: Any, labels0: Any, module1: Any, loss1: Any, *backward: Any
    ) -> Any:
        Own.calls += 1
        outputs1, grads1 = (loss1,), None
        if loss1 is None:
            outputs1, grads1 = backward
        found = []

        def run(grads: Any) -> None:
            with torch.enable_grad():
                output = module0(*inputs0)
                found.append(([output], None if criterion0 is None else criterion0(output, *labels0)))

        outputs1[0].grad_fn.register_prehook(run)
        torch.autograd.backward(outputs1, grads1)
        return found[0]


@pytest.mark.parametrize("kind", [Within, OwnRecomputed])
def test_added_losses_where_forward_and_backward_mix(kind: type[nn.Module], executor: str) -> None:
    case = Case(lambda n: [kind() for _ in range(n)])
    train_by_own_method(case, executor)


class WithinCheckpointed(Within):
    """And with a checkpoint in that forward, whose linears wait for no W, while those of the recompute in I would."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = checkpoint(self.body, x, use_reentrant=False)
        return y


def test_a_checkpoint_in_a_forward_within_a_backward_is_no_silent_error(executor: str) -> None:
    skip_without_native()  # nothing waits for W
    case = Case(lambda n: [WithinCheckpointed() for _ in range(n)])
    batch = case.batches(1, 17)[0]
    pipe = Pipeline(case.layers(4), "dualpipev", 8, squared, num_ranks=2, executor=executor)
    with pytest.raises(CheckpointError, match="different metadata"):
        pipe.step(*batch.args, target=batch.target)
    unsplit = whole(case, 4)
    pipe = Pipeline(case.layers(4), "1f1b_overlap", 8, squared, num_ranks=4, executor=executor)  # nothing waits here
    result = pipe.step(*batch.args, target=batch.target)
    assert_same(pipe, result, unsplit, reference_of(unsplit, batch, pipe, case))


def test_an_added_loss_makes_a_difference_and_is_added_once(executor: str) -> None:
    """By itself, with nothing of the code of a pipeline: the mean over rows of both losses."""
    for case in (CASES["added_losses"], CASES["added_and_recomputed"]):
        unsplit, batch = whole(case, 4), case.batches(1, 12)[0]
        pipe = Pipeline(case.layers(4), "zbv", 4, squared, num_ranks=2, executor=executor)
        result = pipe.step(*batch.args, target=batch.target)
        losses = []
        for x, y in zip(batch.args[0].tensor_split(4), batch.target.tensor_split(4), strict=True):
            with AddedLosses() as added:
                output = unsplit(x)
            losses.append((squared(output, y) / 4, added.total / 4))
        sum(loss + added for loss, added in losses).backward()
        expected = {name: p.grad for name, p in unsplit.named_parameters()}
        for name, p in pipe.named_parameters():
            torch.testing.assert_close(p.grad, expected[name])
        torch.testing.assert_close(result.loss, sum(loss for loss, _ in losses))
        torch.testing.assert_close(sum(result.added_losses.values()), sum(added for _, added in losses))
        assert set(result.added_losses) == {"balance", "size"}
        router = next(name for name in expected if "router" in name)
        assert expected[router].abs().max() > 0  # which only the added loss trains


REDUCTIONS: dict[str, Any] = {"mean": "mean", "sum": "sum", "weight": lambda target: float(target.abs().sum())}


@executors_in_turn("reduction, schedule", itertools.product(REDUCTIONS, ["1f1b", "dualpipe", "zbv"]))
def test_everything_weighs_like_the_loss(reduction: str, schedule: str, executor: str) -> None:
    """Over microbatches of 1, 5, 2 and 4 rows."""
    layers = [Balanced(), Block(), Balanced(), Balanced()]
    parts = [[torch.randn(n, WIDTH) for n in (1, 5, 2, 4)] for _ in "xy"]
    case = Case(lambda n: copy.deepcopy(layers), loss_fn=measured)
    unsplit = whole(case, 4)
    options = {
        "loss_reduction": REDUCTIONS[reduction],
        "metrics": {"hits": "sum", "rows": "list", "by_column": torch.stack},
    }
    pipe = Pipeline(case.layers(4), schedule, 4, measured, num_ranks=2, executor=executor, **options)
    result = pipe.step(parts[0], target=parts[1])
    reference = reference_step(unsplit, tuple(parts), pipe.schedule, measured, **options)
    assert_same(pipe, result, unsplit, reference)
    weights = {"mean": [1, 5, 2, 4], "sum": None, "weight": [float(y.abs().sum()) for y in parts[1]]}[reduction]
    rows = torch.tensor([1, 5, 2, 4] if weights is None else weights, dtype=torch.float64)
    errors = torch.stack(
        [(pipe.eval_step([x] * 4).outputs[: len(x)] - y).abs().mean() for x, y in zip(*parts, strict=True)]
    )
    torch.testing.assert_close(result.metrics["error"].double(), (errors * rows).sum() / rows.sum())
    assert [int(count) for count in result.metrics["rows"]] == [1, 5, 2, 4]
    assert result.metrics["by_column"].shape == (4, WIDTH) and result.metrics["hits"].dtype == torch.int64


def stepped_with_weights_of_0(
    layers: list[nn.Module], loss_fn: Any, schedule: str, executor: str
) -> tuple[Pipeline, nn.Module, tuple[torch.Tensor, torch.Tensor], Any]:
    """A step, equal to the reference, in which two of four microbatches have no tokens: rows of a positive target."""
    unsplit = nn.Sequential(*copy.deepcopy(layers))
    x, y = torch.randn(8, WIDTH), torch.randn(8, WIDTH)
    y[:, 0] = torch.tensor([-1, -1, 1, 1, -1, -1, 1, -1])
    options = {"loss_reduction": lambda target: (target[:, 0] > 0).sum()}
    pipe = Pipeline(layers, schedule, 4, loss_fn, num_ranks=2, executor=executor, **options)
    result = pipe.step(x, target=y)
    assert_same(pipe, result, unsplit, reference_step(unsplit, (x, y), pipe.schedule, loss_fn, **options))
    return pipe, unsplit, (x, y), result


@pytest.mark.parametrize("schedule", ["1f1b", "zbv", "dualpipe"])
def test_a_microbatch_of_weight_0_counts_for_nothing(schedule: str, executor: str) -> None:
    """Its loss is a mean over no tokens, which is NaN, as are that one's gradients."""

    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        counts = target[:, 0] > 0
        error = ((output - target) ** 2).mean(1)
        return (error * counts).sum() / counts.sum(), {"error": error[counts].mean()}

    layers = [Balanced(), Block(), Balanced(), Balanced()]
    pipe, unsplit, (x, y), result = stepped_with_weights_of_0(layers, loss_fn, schedule, executor)
    with fastpipe.AddedLosses():
        expected, metrics = loss_fn(unsplit(x), y)
    assert all(grad.isfinite().all() for grad in grads(unsplit))
    torch.testing.assert_close(result.loss, expected.detach())
    torch.testing.assert_close(result.metrics["error"], metrics["error"].detach())
    evaluated = pipe.eval_step(x, target=y)
    assert evaluated.loss is not None and same_bits(evaluated.loss, result.loss)
    assert [bool(loss.isnan()) for loss in result.losses or ()] == [True, False, True, False]


@pytest.mark.parametrize("schedule", ["1f1b", "zbv", "dualpipe"])
def test_a_microbatch_of_weight_0_may_have_a_constant_loss(schedule: str, executor: str) -> None:
    """Zero, say, where there are no tokens to predict; of another weight it is refused."""

    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        counts = target[:, 0] > 0
        return nn.functional.mse_loss(output[counts], target[counts]) if counts.any() else torch.zeros(())

    layers = [Block() for _ in range(4)]
    _, unsplit, (x, y), result = stepped_with_weights_of_0(layers, loss_fn, schedule, executor)
    torch.testing.assert_close(result.loss, loss_fn(unsplit(x), y).detach())
    by_rows = Pipeline(copy.deepcopy(layers), schedule, 4, loss_fn, num_ranks=2, executor=executor)
    with pytest.raises(ValueError, match="loss_fn returned a loss that requires no gradient"):
        by_rows.step(x, target=y)


def test_a_microbatch_without_rows_counts_for_nothing(executor: str) -> None:
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(2)]
    pipe = Pipeline(layers, "1f1b", 2, nn.functional.mse_loss, num_ranks=2, executor=executor)
    x, y = torch.randn(4, WIDTH), torch.randn(4, WIDTH)
    result = pipe.step([x, x[:0]], target=[y, y[:0]])
    assert result.loss is not None and same_bits(result.loss, nn.functional.mse_loss(nn.Sequential(*layers)(x), y))


def whole_numbers(*shape: int) -> torch.Tensor:
    return torch.randint(-1, 2, shape).double()


@executors_in_turn("schedule, num_ranks, num_microbatches", TWO)
def test_n_steps_give_n_times_the_gradient(schedule: str, num_ranks: int, num_microbatches: int, executor: str) -> None:
    """Of whole numbers, of which every sum is exact in any order; evaluations in between change nothing."""
    num_stages = make_schedule(schedule, num_ranks=num_ranks, num_microbatches=num_microbatches).num_stages
    layers = [nn.Linear(4, 4).double() for _ in range(num_stages)]
    for p in nn.ModuleList(layers).parameters():
        p.data = whole_numbers(*p.shape)

    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (output * target).sum()

    options = {"num_ranks": num_ranks, "loss_reduction": "sum", "executor": executor}
    pipe = Pipeline(layers, schedule, num_microbatches, loss_fn, **options)
    x, y = whole_numbers(2 * num_microbatches, 4), whole_numbers(2 * num_microbatches, 4)
    loss_fn(nn.Sequential(*layers)(x), y).backward()
    once = [p.grad for p in nn.Sequential(*layers).parameters()]
    assert all(grad.abs().max() < 2**40 for grad in once) and any(grad.any() for grad in once)
    for p in pipe.parameters():
        p.grad = None
    for number in range(1, 4):
        pipe.step(x, target=y)
        pipe.eval_step(x, target=y)
        assert all(torch.equal(p.grad, number * grad) for p, grad in zip(pipe.parameters(), once, strict=True))


@pytest.mark.parametrize("target", [True, False])
def test_an_evaluation_reports_what_is_added(target: bool, executor: str) -> None:
    batch = ADDED.batches(1, 9)[0]
    pipe = Pipeline(ADDED.layers(4), "1f1b", 4, measured, num_ranks=2, executor=executor)
    trained = pipe.step(*batch.args, target=batch.target)
    before = grads(Chain(pipe.stage_modules))
    result = pipe.eval_step(*batch.args, target=batch.target if target else None)
    assert all(map(same_bits, grads(Chain(pipe.stage_modules)), before))
    assert all(same_bits(result.added_losses[name], value) for name, value in trained.added_losses.items())
    assert (result.loss is not None) == bool(result.metrics) == target
    if target:
        assert all(same_bits(result.metrics[name], value) for name, value in trained.metrics.items())


def test_with_the_gradients_of_the_outputs(executor: str) -> None:
    x, grad = torch.randn(8, WIDTH), torch.randn(8, WIDTH)
    layers = [Balanced() for _ in range(4)]
    unsplit = whole(Case(lambda n: copy.deepcopy(layers)), 4)
    pipe = Pipeline(layers, "1f1b", 4, num_ranks=2, executor=executor)
    result = pipe.step(x, output_grad=grad)
    for part, given in zip(x.tensor_split(4), grad.tensor_split(4), strict=True):
        with AddedLosses() as added:
            output = unsplit(part)
        torch.autograd.backward([output, added.total / 4], [given, torch.ones(())])
    torch.testing.assert_close([p.grad for p in pipe.parameters()], grads(unsplit))
    assert result.loss is None and set(result.added_losses) == {"balance", "size"}


def test_the_last_stage_returns_the_loss_and_adds_another(executor: str) -> None:
    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.balanced = Balanced()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.balanced(x).square().mean()

    case = Case(lambda n: [Block(), Balanced(), Block(), Head()])
    unsplit, batch = whole(case, 4), case.batches(1, 9)[0]
    pipe = Pipeline(case.layers(4), "zb_h1", 4, num_ranks=2, executor=executor)
    result = pipe.step(*batch.args)
    assert_same(pipe, result, unsplit, reference_step(unsplit, (batch.args, None), pipe.schedule))


class Adds(nn.Module):
    """Adds what it is told to."""

    def __init__(self, value: Callable[[torch.Tensor], Any], **options: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.value, self.options = value, options

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        add_loss(self.value(y), **self.options)
        return y


class Reentrant(nn.Module):
    """A checkpoint whose forward has no graph."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Adds(torch.mean)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = checkpoint(self.inner, x, use_reentrant=True)
        return out


class Detached(Adds):
    """Hands on nothing that requires a gradient."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).detach()


@pytest.mark.parametrize(
    ("layer", "kind", "text"),
    [
        (lambda: Adds(lambda y: 1.0), ValueError, r"add_loss\('added'\): give a floating-point tensor .* not a float"),
        (lambda: Adds(lambda y: y), ValueError, r"not a tensor of shape \(2, 6\)"),
        (lambda: Adds(lambda y: y.argmax()), ValueError, "and torch.int64"),
        (lambda: Adds(torch.mean, name=3), TypeError, "name = 3: pass a str"),
        (lambda: Detached(torch.mean), ValueError, "stage 1 adds a loss .* no output of the stage requires one"),
        (lambda: Reentrant(), ValueError, "use use_reentrant=False"),
    ],
)
def test_what_cannot_be_added(layer: Callable[[], nn.Module], kind: type, text: str, executor: str) -> None:
    layers = [Block(), layer(), Block(), Block()]
    pipe = Pipeline(layers, "1f1b", 4, squared, num_ranks=4, executor=executor)
    with pytest.raises(kind, match=text):
        pipe.step(torch.randn(8, WIDTH), target=torch.randn(8, WIDTH))


def test_without_a_pipeline_it_has_to_be_collected() -> None:
    layer, x = Balanced(), torch.randn(4, WIDTH)
    with pytest.raises(RuntimeError, match="with fastpipe.AddedLosses"):
        layer(x)
    with torch.no_grad():
        layer(x)
    with AddedLosses() as outer:
        layer(x)
        with AddedLosses() as inner:
            layer(x)
        layer(x)
    assert (len(outer.values), len(inner.values)) == (4, 2)
    assert outer.total.requires_grad and [name for name, _ in inner.values] == ["balance", "size"]
    assert AddedLosses().total == 0.0


def test_a_loss_without_gradient_is_reported_only(executor: str) -> None:
    case = Case(lambda n: [Adds(lambda y: y.detach().abs().max(), name="largest"), Block()])
    unsplit, batch = whole(case, 2), case.batches(1, 9)[0]
    pipe = Pipeline(case.layers(2), "1f1b", 4, squared, num_ranks=2, executor=executor)
    result = pipe.step(*batch.args, target=batch.target)
    assert_same(pipe, result, unsplit, reference_of(unsplit, batch, pipe, case))
    plain = Case(lambda n: [layer.linear if isinstance(layer, Adds) else layer for layer in case.layers(2)])
    other = Pipeline(plain.layers(2), "1f1b", 4, squared, num_ranks=2, executor=executor)
    other.step(*batch.args, target=batch.target)
    assert all(same_bits(a.grad, b.grad) for a, b in zip(pipe.parameters(), other.parameters(), strict=True))


def test_parity_compares_what_is_added_and_measured(executor: str) -> None:
    layers, batch = ADDED.layers(4), ADDED.batches(1, 9)[0]
    calls = iter(range(100))

    def wrong_once(output: torch.Tensor, target: torch.Tensor) -> Any:
        loss, metrics = measured(output, target)
        return loss, {**metrics, "hits": metrics["hits"] + (next(calls) == 1)}

    pipe = Pipeline(layers, "dualpipev", 4, measured, num_ranks=2, executor=executor)
    assert fastpipe.check_parity(pipe, layers, (batch.args, batch.target)).ok
    pipe = Pipeline(layers, "dualpipev", 4, wrong_once, num_ranks=2, executor=executor)
    found = fastpipe.check_parity(pipe, layers, (batch.args, batch.target))
    assert [(d.what, d.name) for d in found.differences] == [("metric", "hits")]


def test_parity_misses_no_added_loss() -> None:
    layers, batch = ADDED.layers(4), ADDED.batches(1, 9)[0]
    pipe = Pipeline(layers, "1f1b", 4, squared, num_ranks=2)
    model = [layer.block if isinstance(layer, Balanced) else layer for layer in ADDED.layers(4)]
    for balanced, block in zip(layers, model, strict=True):
        if isinstance(balanced, Balanced):
            block.router = balanced.router  # so that there are as many parameters
    listed = {(d.what, d.name) for d in fastpipe.check_parity(pipe, model, (batch.args, batch.target)).differences}
    assert {("added loss", "balance"), ("added loss", "size")} <= listed


class Weighted(nn.Module):
    """A loss that learns."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (self.weight * (output - target).square()).mean()


@pytest.mark.parametrize("schedule", ["1f1b", "zbv", "dualpipev"])
def test_a_loss_with_parameters_has_their_gradients(schedule: str, executor: str) -> None:
    torch.manual_seed(0)
    layers: list[nn.Module] = [Block() for _ in range(4)]
    loss_fn = Weighted()
    twin, twins_loss = copy.deepcopy((layers, loss_fn))
    pipe = fastpipe.Pipeline(layers, schedule, 4, loss_fn, num_ranks=2, executor=executor)
    x, y = torch.randn(2, 8, WIDTH)
    for _ in range(2):
        pipe.step(x, target=y)
        reference_step(twin, (x, y), pipe.schedule, twins_loss)
    assert same_bits(loss_fn.weight.grad, twins_loss.weight.grad)
    assert all(p is not loss_fn.weight for p in pipe.parameters())  # as the guide says
