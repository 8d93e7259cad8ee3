"""The split backward of one stage: what waits for W, what is freed, and what traces and transforms see of it."""

import contextlib
import copy
import gc
import threading
from collections.abc import Callable, Iterator
from contextvars import copy_context
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils import parametrizations

from fastpipe import Pipeline, current
from fastpipe.runtime.stage.losses import StageWork
from fastpipe.runtime.stage.stage import Stage
from fastpipe.testing import reference_step
from tests import scripts
from tests.runtime.checks import same_bits
from tests.runtime.split_models import (
    WIDTH,
    Attention,
    Checkpointed,
    Mlp,
    Strided,
    Transformer,
    WithLinear,
    batch_of,
    layers_of,
    squared,
)

pytestmark = pytest.mark.usefixtures("extension")


@contextlib.contextmanager
def stage_of(module: nn.Module, microbatches: int = 1) -> Iterator[Stage]:
    """The only stage of a model, with its work begun."""
    stage = Stage(0, module, 1, squared)
    x, y = batch_of(4)
    stage.begin(StageWork(args=[(x,)] * microbatches, targets=[y] * microbatches))
    yield stage
    stage.end()


def grads_of(module: nn.Module) -> list[torch.Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in module.parameters()]


def test_w_has_the_weights_and_their_hooks() -> None:
    module = layers_of(Mlp, 1)[0]
    called: list[str] = []
    for name, parameter in module.named_parameters():
        parameter.register_hook(lambda grad, name=name: called.append(name))
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: called.append(f"{name}: after"))
    with stage_of(module) as stage:
        stage.forward(0, (), splits=True)
        stage.backward_input(0, ())
        before = set(called)
        assert not any(name.startswith(("up.weight", "down.weight")) for name in called)
        assert "up.bias" in called
        stage.backward_weight(0)
    assert sorted(set(called) - before) == sorted(
        name for weight in ("up.weight", "down.weight") for name in (weight, f"{weight}: after")
    )
    assert len(called) == len(set(called))


def test_without_a_split_everything_comes_at_once() -> None:
    module = layers_of(Mlp, 1)[0]
    with stage_of(module, 2) as stage:
        stage.forward(0, (), splits=True)
        stage.forward(1, (), splits=False)
        stage.backward(1, ())
    assert all(p.grad is not None for p in module.parameters())


def test_w_frees_what_waited() -> None:
    module = layers_of(Mlp, 1)[0]
    with stage_of(module, 3) as stage:
        for microbatch in range(3):
            stage.forward(microbatch, (), splits=True)
            stage.backward_input(microbatch, ())
            stage.backward_weight(microbatch)
            gc.collect()
            assert not stage._waiting and not stage._records
    one = stage.peak_held_bytes
    # up: its input (the norm's output) and its output's gradient; down: the same, twice as wide and back
    assert one == 4 * 4 * 5 * (WIDTH + 2 * WIDTH + 2 * WIDTH + WIDTH)


def test_what_w_needs_of_the_recompute_is_kept_for_it() -> None:
    """And nothing else; the other microbatches come in between."""

    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.gate = (nn.Parameter(torch.randn(WIDTH, WIDTH)) for _ in "wg")
            self.made: list[StorageWeakRef] = []

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            gate = torch.sigmoid(self.gate)
            y = torch.tanh(nn.functional.linear(x, self.weight * gate))
            self.made += [StorageWeakRef(t.untyped_storage()) for t in (gate, y)]
            return y.exp().sin()

    def alive() -> list[bool]:
        return [not ref.expired() for ref in gated.made[-6:]]

    gated = Gated()
    with stage_of(Checkpointed(gated, reentrant=False), 3) as stage:
        for microbatch in range(3):
            stage.forward(microbatch, (), splits=True)
        assert alive() == 3 * [False, False]
        for microbatch in range(3):
            stage.backward_input(microbatch, ())
        assert alive() == 3 * [True, False]
        for microbatch in range(3):
            stage.backward_weight(microbatch)
            assert alive() == (microbatch + 1) * [False, False] + (2 - microbatch) * [True, False]
    assert len(gated.made) == 2 * 2 * 3


@pytest.mark.parametrize("fused", [False, True])
def test_what_waits_must_not_be_changed(fused: bool) -> None:
    """A whole backward has read it before; here the weight's gradient would be a wrong one."""
    buffer = torch.zeros(4, 5, WIDTH)

    class Copies(WithLinear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.linear(buffer.copy_(x))
            return out

    module = Copies()
    with stage_of(module, 3) as stage:
        stage.fused_weight_grad = fused
        for microbatch in range(2):
            stage.forward(microbatch, (), splits=True)
            stage.backward_input(microbatch, ())
            stage.backward_weight(microbatch)
        stage.forward(2, (), splits=True)
        stage.backward_input(2, ())
        buffer.zero_()
        with pytest.raises(RuntimeError, match=r"linear.* in place .*I.* and W"):
            stage.backward_weight(2)


def test_a_failed_forward_leaves_nothing() -> None:
    module = layers_of(Mlp, 1)[0]
    with stage_of(module) as stage:
        hook = module.register_forward_hook(lambda *_: (_ for _ in ()).throw(KeyError("here")))
        with pytest.raises(KeyError):
            stage.forward(0, (), splits=True)
        hook.remove()
        module(batch_of(2)[0]).sum().backward()
    assert all(p.grad is not None for p in module.parameters()), "still armed"


@pytest.mark.parametrize("change", ["wrong shape", "wrong dtype"])
def test_torchs_own_messages(change: str, extension: Any) -> None:
    linear = nn.Linear(WIDTH, WIDTH)
    x = torch.randn(3, WIDTH + 1) if change == "wrong shape" else torch.randn(3, WIDTH).double()
    with pytest.raises(RuntimeError) as plain:
        linear(x)
    weights = extension.WeightGradients(False)
    with weights.armed(backward=False), pytest.raises(RuntimeError) as armed:
        linear(x)
    assert str(armed.value) == str(plain.value)


# --- tracing ----------------------------------------------------------------------------------------------------------


COMPILED = """
import os, sys, torch
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor import config
from fastpipe import Pipeline, current
from tests.runtime.split_models import WIDTH, Mlp
from tests.runtime.test_weight_grad_of_a_stage import grads_of, stage_of

config.compile_threads = 1

def grads(how):
    torch.manual_seed(1)
    # without anything between the linears there is no kernel to generate, and no C++ compiler to wait for
    block = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2)))
    module = nn.Sequential(Mlp(), torch.compile(block, backend="inductor"), Mlp())
    with stage_of(module, 2) as stage:
        for microbatch in range(2):
            stage.forward(microbatch, (), splits=how != "not split")
            if how == "not split":
                stage.backward(microbatch, ())
            else:
                stage.backward_input(microbatch, ())
                stage.backward_weight(microbatch)
    assert how == "not split" or stage.deferred and not stage.deferred & {p._cdata for p in block.parameters()}
    return grads_of(module)

found = []
for how, cache in zip(sys.argv[2::2], sys.argv[3::2], strict=True):
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
    torch.compiler.reset()
    found.append((grads(how), counters["aot_autograd"]["autograd_cache_hit"]))
torch.save(found, sys.argv[1])
"""


def compiled(folder: Path, *runs: tuple[str, Path]) -> list[tuple[list[torch.Tensor], int]]:
    """In a process of its own: for each run (how, and with which cache) the gradients of a stage with a compiled block,
    and how much came from the disk so far."""
    script, found = folder / "compiled.py", folder / "found"
    script.write_text(COMPILED)
    scripts.run(script, str(found), *(str(part) for run in runs for part in run))
    loaded: list[tuple[list[torch.Tensor], int]] = torch.load(found)
    return loaded


def test_compiling_while_armed(tmp_path: Path) -> None:
    """A damaged graph would lose the compiled block's gradients, and carry the loss into the next process."""
    ((armed, hits),) = compiled(tmp_path, ("split", tmp_path / "armed"))
    assert hits == 0, "it compiled nothing of its own"
    # the plain graph, and then what the process above left on the disk
    (expected, none), (cached, hits) = compiled(
        tmp_path, ("not split", tmp_path / "plain"), ("not split", tmp_path / "armed")
    )
    assert none == 0 and hits == 1, "nothing came from the disk"
    for grads in (armed, cached):
        assert len(grads) == len(expected) and all(map(same_bits, grads, expected))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiling_without_a_compiler(backend: str) -> None:
    torch._dynamo.reset()
    eager, compiled = layers_of(Transformer, 1)[0], layers_of(Transformer, 1)[0]
    for module, wrapped in ((eager, eager), (compiled, torch.compile(compiled, backend=backend))):
        with stage_of(nn.Sequential(wrapped)) as stage:
            stage.forward(0, (), splits=True)
            stage.backward_input(0, ())
            stage.backward_weight(0)
        assert all(p.grad is not None for p in module.parameters())
    assert all(torch.allclose(a, b) for a, b in zip(grads_of(eager), grads_of(compiled), strict=True))  # type: ignore[arg-type]


def test_a_thread_with_the_callers_context_is_left_alone(extension: Any) -> None:
    """Such as a rank of a pipeline that a layer runs."""
    linear, x = nn.Linear(WIDTH, WIDTH), torch.randn(2, WIDTH)
    nodes: list[str] = []

    def run() -> None:
        nodes.append(type(linear(x).grad_fn).__name__)

    weights = extension.WeightGradients(False)
    run()
    with weights.armed(backward=False):
        run()
        thread = threading.Thread(target=copy_context().run, args=(run,))
        thread.start()
        thread.join()
    plain, armed, other = nodes
    assert armed != plain == other


def test_a_transform_is_left_alone(extension: Any) -> None:
    weights = extension.WeightGradients(False)
    module = layers_of(Attention, 1)[0]
    x = batch_of(4)[0]
    parameters = dict(module.named_parameters())

    def loss(parameters: dict[str, Any]) -> torch.Tensor:
        return torch.func.functional_call(module, parameters, (x,)).square().sum()

    expected = torch.func.grad(loss)(parameters)
    with weights.armed(backward=False):
        found = torch.func.grad(loss)(parameters)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_forward_derivatives_are_left_alone(extension: Any) -> None:
    linear, x = layers_of(lambda: nn.Linear(WIDTH, WIDTH), 1)[0], batch_of(2)[0]
    weights = extension.WeightGradients(False)
    with weights.armed(backward=False), forward_ad.dual_level():
        found = forward_ad.unpack_dual(linear(forward_ad.make_dual(x, torch.ones_like(x)))).tangent
    assert torch.equal(found, nn.functional.linear(torch.ones_like(x), linear.weight))  # type: ignore[arg-type]


def test_the_extensions_linear_is_torchs() -> None:
    """Armed or not, forward and gradients of every form have the bits of torch's own."""
    plain = layers_of(Strided, 1)[0]
    armed = copy.deepcopy(plain)
    x, y = batch_of(4)
    squared(plain(x), y).backward()
    with stage_of(armed) as stage:
        stage.forward(0, (), splits=True)
        stage.backward_input(0, ())
        stage.backward_weight(0)
    assert all(map(same_bits, grads_of(plain), grads_of(armed)))  # type: ignore[arg-type]


@pytest.mark.parametrize("num_compiled", [1, 3])
def test_linears_that_do_not_wait_are_a_warning(
    executor: str, num_compiled: int, caplog: pytest.LogCaptureFixture
) -> None:
    layers: list[Any] = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)]
    layers[:num_compiled] = [torch.compile(layer, backend="aot_eager") for layer in layers[:num_compiled]]
    pipe = Pipeline(layers, "zbv", 4, squared, num_ranks=2, executor=executor)
    x, y = batch_of(4)
    with caplog.at_level("WARNING", "fastpipe"):
        for _ in range(2):
            pipe.step(x, target=y)
    texts = [record.getMessage() for record in caplog.records]
    assert [text.count("only 1 of 4 linears") for text in texts] == [1] * (num_compiled == 3)


def test_linears_of_stages_that_split_nothing_are_no_warning(executor: str, caplog: pytest.LogCaptureFixture) -> None:
    """The last rank of this schedule has no I; the others' linears are frozen."""
    layers = [nn.Linear(WIDTH, WIDTH).requires_grad_(number > 1) for number in range(4)]
    pipe = Pipeline(layers, "dualpipe", 4, squared, num_ranks=2, executor=executor)
    x, y = batch_of(4)
    with caplog.at_level("WARNING", "fastpipe"):
        pipe.step(x, target=y)
    assert not caplog.records


@pytest.mark.parametrize("parametrize", [parametrizations.weight_norm, parametrizations.spectral_norm])
def test_looking_for_linears_that_wait_runs_no_parametrization(
    executor: str, parametrize: Callable[[nn.Linear], nn.Module], caplog: pytest.LogCaptureFixture
) -> None:
    layers = [parametrize(nn.Linear(WIDTH, WIDTH)) for _ in range(4)]
    twins = copy.deepcopy(layers)
    pipe = Pipeline(layers, "zbv", 4, squared, num_ranks=2, executor=executor)
    batch = batch_of(4)
    with caplog.at_level("WARNING", "fastpipe"):
        pipe.step(batch[0], target=batch[1])
    assert not caplog.records, "their weights wait"
    reference_step(twins, batch, pipe.schedule, squared)
    for layer, twin in zip(layers, twins, strict=True):
        # spectral_norm improves its vectors whenever the weight is read
        assert all(map(torch.equal, layer.buffers(), twin.buffers()))


class Experts(nn.Module):
    """Each microbatch uses one expert, and none the last."""

    def __init__(self) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        at = current()
        return self.linears[0 if at is None else at.microbatch](x).tanh()  # type: ignore[no-any-return]


def test_experts_of_other_microbatches_wait_too(executor: str, caplog: pytest.LogCaptureFixture) -> None:
    layers = [Experts() for _ in range(4)]
    pipe = Pipeline(layers, "zbv", 4, squared, num_ranks=2, executor=executor)
    x, y = batch_of(4)
    with caplog.at_level("WARNING", "fastpipe"):
        pipe.step(x, target=y)
    assert "gradients of 16 of 40 parameters in W" in pipe.describe() and not caplog.records
