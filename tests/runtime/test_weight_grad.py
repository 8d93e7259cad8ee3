"""The split backward: W has the weight gradients of linears, and the sum is the unsplit model's, bit for bit."""

import contextlib
import functools
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from fastpipe import Pipeline, list_schedules, make_schedule
from fastpipe.action import ActionKind
from fastpipe.runtime import native
from fastpipe.runtime.stage import Current
from fastpipe.runtime.stage.stage import Chain
from fastpipe.testing import reference_step
from tests.conftest import executors_in_turn
from tests.runtime.checks import same_bits, unequal
from tests.runtime.split_models import (
    MODELS,
    WIDTH,
    Checkpointed,
    Mlp,
    OneDimension,
    Parametrised,
    Transformer,
    WithLinear,
    batch_of,
    layers_of,
    squared,
)

SPLIT = [
    family.name
    for family in list_schedules()
    if any(
        part.kind is ActionKind.I
        for rank in make_schedule(family.name, num_ranks=2, num_microbatches=8)
        for action in rank
        for part in action.parts
    )
]


def model_of(make: Callable[[], nn.Module], count: int) -> list[nn.Module]:
    """The same behind a linear: reentrant checkpoints want an input that requires a gradient."""
    return [*layers_of(lambda: nn.Linear(WIDTH, WIDTH), 1), *layers_of(make, count)]


def compare(
    make: Callable[[], nn.Module],
    executor: str,
    schedule: str = "zb_h1",
    count: int = 5,
    num_ranks: int = 2,
    recompute: str = "none",
    grad_dtype: torch.dtype | None = None,
) -> Pipeline:
    """Two steps that accumulate, against the unsplit model's."""
    num_layers = len(make_schedule(schedule, num_ranks=num_ranks, num_microbatches=count).placement.routes[0])
    layers, unsplit = model_of(make, num_layers), Chain(dict(enumerate(model_of(make, num_layers))))
    options = {"num_ranks": num_ranks, "executor": executor, "recompute": recompute, "grad_dtype": grad_dtype}
    pipe = Pipeline(layers, schedule, count, squared, **options)
    for _ in range(2):
        x, y = batch_of(2 * count + 1)
        result = pipe.step(x, target=y)
        reference = reference_step(unsplit, (x, y), pipe.schedule, loss_fn=squared, grad_dtype=grad_dtype)
        assert result.loss is not None and same_bits(result.loss, reference.loss)
        assert not (wrong := unequal(pipe, unsplit)), f"the gradients of {wrong} differ"
    return pipe


def waiting(pipe: Pipeline) -> set[str]:
    """The names of the parameters of the last stage whose gradients wait for W."""
    stage = pipe._steps.stages[-1]
    return {name.partition(".")[2] for name, p in stage.module.named_parameters() if stage.waits(p)}


def assert_waiting(pipe: Pipeline, names: set[str]) -> None:
    """Without the extension nothing waits."""
    assert waiting(pipe) == (set() if native.load() is None else names)


@pytest.mark.parametrize("model", MODELS)
def test_every_model(model: str, executor: str) -> None:
    pipe = compare(MODELS[model], executor)
    if model in WAITING:
        assert_waiting(pipe, WAITING[model])


@executors_in_turn("schedule", SPLIT)
def test_every_schedule(schedule: str, executor: str) -> None:
    """Each with one executor: test_bits.py has them all with both, and with the same linears."""
    compare(MODELS["transformer" if executor == "native" else "twice"], executor, schedule, 8)


def test_autocast(executor: str) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        pipe = compare(Transformer, executor)
        # a bias is added before the product is rounded, also for a single row
        compare(OneDimension, executor)
    assert_waiting(pipe, {"attention.qkv", "attention.out.weight", "mlp.up.weight", "mlp.down.weight"})


@pytest.mark.usefixtures("without_extension")
class TestWithoutTheExtension:
    """I is the whole backward, and W computes nothing."""

    @pytest.mark.parametrize("schedule", SPLIT)
    def test_every_schedule(self, schedule: str) -> None:
        pipe = compare(MODELS["twice"], "auto", schedule, 8)
        assert not waiting(pipe)

    def test_i_computes_all(self) -> None:
        seen: list[tuple[str, int]] = []

        @contextlib.contextmanager
        def noted(current: Current) -> Iterator[None]:
            """The action, and how many gradients there are after it."""
            yield
            seen.append((current.action, sum(p.grad is not None for p in layer.parameters())))

        layer = layers_of(Mlp, 1)[0]
        pipe = Pipeline([layer], "zb_h1", 1, squared, num_ranks=1, backward_context=noted)
        x, y = batch_of(4)
        pipe.step(x, target=y)
        count = len(list(layer.parameters()))
        assert seen == [("I", count), ("W", count)]

    def test_it_is_said_once(self, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level("WARNING", "fastpipe"):
            pipe = Pipeline(layers_of(Mlp, 2), "zb_h1", 4, squared, num_ranks=2)
            pipe.step(batch_of(8)[0], target=batch_of(8)[1])
            Pipeline(layers_of(Mlp, 2), "1f1b", 4, squared, num_ranks=2)
        (text,) = [record.getMessage() for record in caplog.records]
        assert "schedule = 'zb_h1'" in text and "I computes all gradients, and W none" in text and "make build" in text
        assert "not split: without the native extension" in pipe.describe()


class InBf16(nn.Module):
    """A weight with two uses, and one with a bias that is not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.other = (nn.Linear(WIDTH, WIDTH).bfloat16() for _ in range(2))
        self.shift = nn.Parameter(torch.randn(()).bfloat16())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.linear(self.linear(x.bfloat16()).tanh())
        return nn.functional.linear(hidden, self.other.weight, self.shift.expand(WIDTH)).float()


@pytest.mark.parametrize("grad_dtype", [None, torch.float32])
def test_bf16(grad_dtype: torch.dtype | None, executor: str) -> None:
    """Torch adds such a bias after the product is rounded, and converts the gradient of each use to grad_dtype."""
    pipe = compare(InBf16, executor, grad_dtype=grad_dtype)
    assert_waiting(pipe, {"linear.weight"})


WAITING = {
    "mlp": {"up.weight", "down.weight"},
    "torch_attention": {
        *("attention.attention.in_proj_weight", "attention.attention.out_proj.weight"),
        *("mlp.up.weight", "mlp.down.weight"),
    },
    "twice": {"linear.weight"},
    "weight_norm": {f"linear.parametrizations.weight.original{i}" for i in (0, 1)},
    "convolution": {"first.weight", "last.weight"},
    "frozen": {"third.weight"},
    "made": {"maker.weight"},
    "strided": {"linear.weight", "other", "mixing.weight", "plain.weight"},
    "one_dimension": {"alone.weight", "also"},
    "maker": {"maker.weight", "second.weight"},
    "around_reentrant": {f"linear.parametrizations.weight.original{i}" for i in (0, 1)}
    | {"inner.inner.up.weight", "inner.inner.down.weight"},
    "checkpointed_reentrant": {f"inner.{n}" for n in ("attention.qkv", "attention.out.weight")}
    | {f"inner.mlp.{n}.weight" for n in ("up", "down")},
}


@pytest.mark.usefixtures("extension")
def test_describe_tells_what_is_whole_and_what_waited(executor: str) -> None:
    layers = layers_of(Mlp, 4)
    pipe = Pipeline(layers, "zb_h1", 4, squared, num_ranks=2, executor=executor)
    assert "the first step shows which" in pipe.describe()
    pipe.step(batch_of(8)[0], target=batch_of(8)[1])
    text = pipe.describe()
    assert "split: gradients of 8 of 20 parameters in W" in text and "*.*.norm.weight (4)" in text
    assert "held for W (MiB)" in text and all(stage.peak_held_bytes > 0 for stage in pipe._steps.stages)


@pytest.mark.usefixtures("extension")
def test_describe_tells_that_nothing_waits(executor: str) -> None:
    """Without linears there is nothing to split, which is known after a step."""
    layers: list[nn.Module] = [nn.Conv1d(5, 5, 3, padding=1) for _ in range(4)]
    pipe = Pipeline(layers, "zbv", 2, squared, num_ranks=2, executor=executor)
    pipe.step(batch_of(4)[0], target=batch_of(4)[1])
    text = pipe.describe()
    assert "split: gradients of 0 of 8 parameters in W; in I (stage.name): *.*.weight (4), *.*.bias (4)" in text
    assert text.endswith("by stage: 0: 0, 1: 0, 2: 0, 3: 0"), "in the order of stages, not of ranks"


@pytest.mark.parametrize(
    ("model", "recompute"),
    [("weight_norm", "full"), ("maker_checkpointed", "layers"), ("made_reentrant", "full"), ("slopes", "layers")],
)
def test_what_stages_recompute(model: str, recompute: str, executor: str) -> None:
    compare(MODELS[model], executor, recompute=recompute)


@pytest.mark.parametrize(
    ("inner", "reentrant"),
    [(Transformer, (False, True)), (Transformer, (True,)), (Parametrised, (True, False)), (Parametrised, (False,))],
)
def test_one_recompute(inner: Callable[[], nn.Module], reentrant: tuple[bool, ...], executor: str) -> None:
    """Of a checkpoint, and of one within another, which runs once more for that one."""
    pipe = compare(lambda: functools.reduce(Checkpointed, reentrant, inner()), executor)
    blocks = [m for module in pipe.stage_modules.values() for m in module.modules() if isinstance(m, Checkpointed)]
    assert {block.calls for block in blocks} == {2 * 5 * (2 + depth) for depth in range(len(reentrant))}


class Elsewhere(WithLinear):
    """A weight with a use that is no linear's."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + x * self.linear.weight.mean()


def test_what_is_frozen_at_first_may_thaw(executor: str) -> None:
    """What else a frozen weight is used for does not show in the graph: that must be looked at again."""
    layers, unsplit = (layers_of(Elsewhere, 2) for _ in "ab")
    pipe = Pipeline(layers, "zb_h1", 4, squared, num_ranks=2, executor=executor)
    x, y = batch_of(8)
    for trains in (False, True):
        for model in (layers, unsplit):
            model[1].linear.weight.requires_grad_(trains)  # type: ignore[union-attr, operator]
        pipe.step(x, target=y)
        reference_step(unsplit, (x, y), pipe.schedule, loss_fn=squared)
        assert not (wrong := unequal(pipe, Chain(dict(enumerate(unsplit))))), f"the gradients of {wrong} differ"


def test_a_gradient_inside_the_forward(executor: str) -> None:
    """A penalty on the input's gradient differentiates the linears twice, within F."""

    class Penalised(WithLinear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x if x.requires_grad else x.detach().requires_grad_()
            y = torch.tanh(self.linear(x))
            (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
            return y + slope

    compare(Penalised, executor)


class View(nn.Module):
    """Returns a view made under no_grad of a tensor with a graph; it has ``requires_grad``, but no gradient passes it.

    Args:
        of: what it is a view of: the output or the weight.
    """

    def __init__(self, of: str) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.of = of

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.linear.weight
        if self.of == "weight":
            with torch.no_grad():
                weight = weight.view(weight.shape)
        output = nn.functional.linear(x, weight, self.linear.bias)
        if self.of == "output":
            with torch.no_grad():
                return output.view(output.shape)
        return output


@pytest.mark.parametrize("of", ["output", "weight"])
@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_a_view_without_a_graph_gets_no_gradient(schedule: str, of: str, executor: str) -> None:
    def model() -> list[nn.Module]:
        torch.manual_seed(0)
        return [nn.Linear(WIDTH, WIDTH), View(of), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)]

    layers, unsplit = model(), Chain(dict(enumerate(model())))
    pipe = Pipeline(layers, schedule, 5, squared, num_ranks=2, executor=executor)
    x, y = batch_of(11)
    result = pipe.step(x, target=y)
    reference = reference_step(unsplit, (x, y), pipe.schedule, loss_fn=squared)
    assert result.loss is not None and same_bits(result.loss, reference.loss)
    grads = [[p.grad for p in module.parameters()] for module in (nn.ModuleList(layers), unsplit)]
    # where stages exchange gradients, one that no backward reaches is zeros
    assert all(same_bits(g, e) if e is not None else g is None or not g.any() for g, e in zip(*grads, strict=True))


def test_a_loss_without_a_graph_is_refused(executor: str) -> None:
    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        loss = squared(output, target)
        with torch.no_grad():
            return loss.view(())

    x, y = batch_of(4)
    pipe = Pipeline([nn.Linear(WIDTH, WIDTH)], "gpipe", 1, loss_fn, num_ranks=1, executor=executor)
    with pytest.raises(ValueError, match="loss_fn returned a loss that requires no gradient"):
        pipe.step(x, target=y)
