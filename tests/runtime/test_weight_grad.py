"""The split backward: W has the weight gradients of linears, and the sum is the unsplit model's, bit for bit."""

import contextlib
import copy
import gc
import io
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

from fastpipe import Pipeline, list_schedules, make_schedule
from fastpipe.action import ActionKind
from fastpipe.runtime import native, weight_grad
from fastpipe.runtime.stage import Chain, Stage
from fastpipe.runtime.stage_work import StageWork
from fastpipe.testing import reference_step
from tests.conftest import skip_without_native
from tests.promptly import PATIENCE
from tests.runtime.checks import same_bits, unequal
from tests.runtime.split_models import MODELS, WIDTH, Attention, Checkpointed, Mlp, Strided, Transformer

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


@pytest.fixture(params=["native", "python with the extension", "python alone"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Each executor with each kernel; yields the executor's name."""
    if request.param == "python alone":
        monkeypatch.setattr(native, "load", lambda: None)
        yield "python"
        unregister()
        return
    skip_without_native()
    yield request.param.split()[0]


def unregister() -> None:
    """Take the pure-Python kernel away again: other tests are about the extension's."""
    while weight_grad._libraries:
        weight_grad._libraries.pop()._destroy()


def squared(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return ((output - target) ** 2).mean()


def layers_of(make: Callable[[], nn.Module], count: int) -> list[nn.Module]:
    torch.manual_seed(3)
    return [make() for _ in range(count)]


def model_of(make: Callable[[], nn.Module], count: int) -> list[nn.Module]:
    """The same behind a linear: reentrant checkpoints want an input that requires a gradient."""
    return [*layers_of(lambda: nn.Linear(WIDTH, WIDTH), 1), *layers_of(make, count)]


def batch_of(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(5)
    return torch.randn(rows, 5, WIDTH), torch.randn(rows, 5, WIDTH)


def compare(
    make: Callable[[], nn.Module], executor: str, schedule: str = "zb_h1", count: int = 5, num_ranks: int = 2
) -> Pipeline:
    """Two steps that accumulate, against the unsplit model's."""
    num_layers = len(make_schedule(schedule, num_ranks=num_ranks, num_microbatches=count).placement.routes[0])
    layers, unsplit = model_of(make, num_layers), Chain(dict(enumerate(model_of(make, num_layers))))
    pipe = Pipeline(layers, schedule, count, squared, num_ranks=num_ranks, executor=executor)
    for _ in range(2):
        x, y = batch_of(2 * count + 1)
        result = pipe.step(x, target=y)
        reference = reference_step(unsplit, (x, y), pipe.schedule, loss_fn=squared)
        assert result.loss is not None and same_bits(result.loss, reference.loss)
        assert not (wrong := unequal(pipe, unsplit)), f"the gradients of {wrong} differ"
    return pipe


def waiting(pipe: Pipeline) -> set[str]:
    """The names of the parameters of the last stage whose gradients wait for W."""
    stage = pipe._stages[-1]
    return {name.partition(".")[2] for name, p in stage.module.named_parameters() if p._cdata in stage.deferred}


@pytest.mark.parametrize("model", MODELS)
def test_every_model(model: str, kernel: str) -> None:
    compare(MODELS[model], kernel)


@pytest.mark.parametrize("schedule", SPLIT)
@pytest.mark.parametrize(
    ("model", "kernel"),
    [("transformer", "native"), ("twice", "python with the extension"), ("twice", "python alone")],
    indirect=["kernel"],
)
def test_every_schedule(model: str, schedule: str, kernel: str) -> None:
    compare(MODELS[model], kernel, schedule, 8)


def test_autocast(kernel: str) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        pipe = compare(Transformer, kernel)
    assert waiting(pipe) == {"attention.qkv", "attention.out.weight", "mlp.up.weight", "mlp.down.weight"}


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


@pytest.mark.parametrize("model", WAITING)
def test_what_waits(model: str, kernel: str) -> None:
    assert waiting(compare(MODELS[model], kernel)) == WAITING[model]


def test_describe_tells_what_is_whole_and_what_waited(kernel: str) -> None:
    layers = layers_of(Mlp, 4)
    pipe = Pipeline(layers, "zb_h1", 4, squared, num_ranks=2, executor=kernel)
    assert "found at the first step" in pipe.describe()
    pipe.step(batch_of(8)[0], target=batch_of(8)[1])
    text = pipe.describe()
    assert "split: 8 of 20 parameters wait for W" in text and "*.*.norm.weight (4)" in text
    assert "at most waiting (MiB)" in text and all(stage.peak_held_bytes > 0 for stage in pipe._stages)


def test_describe_tells_that_nothing_waits(kernel: str) -> None:
    """Without linears there is nothing to split, which is known after a step."""
    layers: list[nn.Module] = [nn.Conv1d(5, 5, 3, padding=1) for _ in range(2)]
    pipe = Pipeline(layers, "zb_h1", 2, squared, num_ranks=2, executor=kernel)
    pipe.step(batch_of(4)[0], target=batch_of(4)[1])
    assert (
        "split: 0 of 4 parameters wait for W; whole in I (stage.name): *.*.weight (2), *.*.bias (2)" in pipe.describe()
    )


@pytest.mark.parametrize("reentrant", [False, True])
def test_one_recompute(reentrant: bool, kernel: str) -> None:
    pipe = compare(lambda: Checkpointed(Transformer(), reentrant), kernel)
    blocks = [m for module in pipe.stage_modules.values() for m in module.modules() if isinstance(m, Checkpointed)]
    assert blocks and {block.calls for block in blocks} == {2 * 2 * 5}


class Elsewhere(nn.Module):
    """A weight with a use that is no linear's."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + x * self.linear.weight.mean()


def test_what_is_frozen_at_first_may_thaw(kernel: str) -> None:
    """What else a frozen weight is used for does not show in the graph: that must be looked at again."""
    layers, unsplit = (layers_of(Elsewhere, 2) for _ in "ab")
    pipe = Pipeline(layers, "zb_h1", 4, squared, num_ranks=2, executor=kernel)
    x, y = batch_of(8)
    for trains in (False, True):
        for model in (layers, unsplit):
            model[1].linear.weight.requires_grad_(trains)  # type: ignore[union-attr, operator]
        pipe.step(x, target=y)
        reference_step(unsplit, (x, y), pipe.schedule, loss_fn=squared)
        assert not (wrong := unequal(pipe, Chain(dict(enumerate(unsplit))))), f"the gradients of {wrong} differ"


# --- one stage by itself ----------------------------------------------------------------------------------------------


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


def test_w_has_the_weights_and_their_hooks(kernel: str) -> None:
    module = layers_of(Mlp, 1)[0]
    called: list[str] = []
    for name, parameter in module.named_parameters():
        parameter.register_hook(lambda grad, name=name: called.append(name))
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: called.append(f"{name}: after"))
    with stage_of(module, 2) as stage:
        # the pure-Python kernel looks at the first one
        stage.forward(0, (), splits=True)
        stage.backward(0, ())
        module.zero_grad()
        called.clear()
        stage.forward(1, (), splits=True)
        stage.backward_input(1, ())
        before = set(called)
        assert not any(name.startswith(("up.weight", "down.weight")) for name in called)
        assert "up.bias" in called
        stage.backward_weight(1)
    assert sorted(set(called) - before) == sorted(
        name for weight in ("up.weight", "down.weight") for name in (weight, f"{weight}: after")
    )
    assert len(called) == len(set(called))


def test_without_a_split_everything_comes_at_once(kernel: str) -> None:
    module = layers_of(Mlp, 1)[0]
    with stage_of(module, 2) as stage:
        stage.forward(0, (), splits=True)
        stage.forward(1, (), splits=False)
        stage.backward(1, ())
    assert all(p.grad is not None for p in module.parameters())


def test_w_frees_what_waited(kernel: str) -> None:
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


@pytest.mark.parametrize("fused", [False, True])
def test_what_waits_must_not_be_changed(fused: bool, kernel: str) -> None:
    """A whole backward has read it before; here the weight's gradient would be a wrong one."""
    buffer = torch.zeros(4, 5, WIDTH)

    class Copies(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

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
        with pytest.raises(RuntimeError, match=r"input of a linear.* changed in place between I.* and W"):
            stage.backward_weight(2)


def test_a_failed_forward_leaves_nothing(kernel: str) -> None:
    module = layers_of(Mlp, 1)[0]
    with stage_of(module) as stage:
        hook = module.register_forward_hook(lambda *_: (_ for _ in ()).throw(KeyError("here")))
        with pytest.raises(KeyError):
            stage.forward(0, (), splits=True)
        hook.remove()
        module(batch_of(2)[0]).sum().backward()
    assert all(p.grad is not None for p in module.parameters()), "still armed"


def test_a_gradient_inside_the_forward(kernel: str) -> None:
    """A penalty on the input's gradient differentiates the linears twice, within F."""

    class Penalised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x if x.requires_grad else x.detach().requires_grad_()
            y = torch.tanh(self.linear(x))
            (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
            return y + slope

    compare(Penalised, kernel)


@pytest.mark.parametrize("change", ["wrong shape", "wrong dtype"])
def test_torchs_own_messages(change: str, kernel: str) -> None:
    linear = nn.Linear(WIDTH, WIDTH)
    x = torch.randn(3, WIDTH + 1) if change == "wrong shape" else torch.randn(3, WIDTH).double()
    with pytest.raises(RuntimeError) as plain:
        linear(x)
    weights = weight_grad.make_weight_gradients(weight_grad.Survey())
    with weights.armed(backward=False), pytest.raises(RuntimeError) as armed:
        linear(x)
    assert str(armed.value) == str(plain.value)


# --- tracing ----------------------------------------------------------------------------------------------------------


COMPILED = """
import os, sys, torch
from torch import nn
from torch._dynamo.utils import counters
from fastpipe.runtime import native
from tests.runtime.split_models import WIDTH, Mlp
from tests.runtime.test_weight_grad import grads_of, stage_of

how, *caches = sys.argv[1:]
if how == "python alone":
    native.load = lambda: None

def grads():
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
for cache in caches:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
    torch.compiler.reset()
    found.append((grads(), counters["aot_autograd"]["autograd_cache_hit"]))
torch.save(found, sys.stdout.buffer)
"""


def compiling(how: str, *caches: Path) -> subprocess.Popen[bytes]:
    """A process of its own that prints, for each cache, the gradients of a stage with a compiled block."""
    root = Path(__file__).parents[2]
    paths = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"TORCHINDUCTOR_COMPILE_THREADS": "1", "PYTHONPATH": paths}
    command = [sys.executable, "-c", COMPILED, how, *map(str, caches)]
    return subprocess.Popen(command, env=environment, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def printed(process: subprocess.Popen[bytes]) -> list[tuple[list[torch.Tensor], int]]:
    output, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, errors.decode()[-3000:]
    loaded: list[tuple[list[torch.Tensor], int]] = torch.load(io.BytesIO(output))
    return loaded


def test_compiling_while_armed(tmp_path: Path) -> None:
    """A damaged graph would lose the compiled block's gradients, and carry the loss into the next process."""
    armed = ["python alone"] if native.load() is None else ["python alone", "native"]
    processes = [compiling(how, tmp_path / how) for how in armed]
    found = [grads for process in processes for grads, _ in printed(process)]
    # the plain graph, and then what the processes above left on the disk
    (expected, none), *cached = printed(compiling("not split", tmp_path / "plain", *(tmp_path / how for how in armed)))
    assert none == 0 and [hits for _, hits in cached] == [*range(1, len(armed) + 1)], "nothing came from the disk"
    for grads in [*found, *(grads for grads, _ in cached)]:
        assert len(grads) == len(expected) and all(map(same_bits, grads, expected))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiling_without_a_compiler(backend: str, kernel: str) -> None:
    torch._dynamo.reset()
    eager, compiled = layers_of(Transformer, 1)[0], layers_of(Transformer, 1)[0]
    for module, wrapped in ((eager, eager), (compiled, torch.compile(compiled, backend=backend))):
        with stage_of(nn.Sequential(wrapped)) as stage:
            stage.forward(0, (), splits=True)
            stage.backward_input(0, ())
            stage.backward_weight(0)
        assert all(p.grad is not None for p in module.parameters())
    assert all(torch.allclose(a, b) for a, b in zip(grads_of(eager), grads_of(compiled), strict=True))  # type: ignore[arg-type]


def test_a_transform_is_left_alone(kernel: str) -> None:
    weights = weight_grad.make_weight_gradients(weight_grad.Survey(done=True))
    module = layers_of(Attention, 1)[0]
    x = batch_of(4)[0]
    parameters = dict(module.named_parameters())

    def loss(parameters: dict[str, Any]) -> torch.Tensor:
        return torch.func.functional_call(module, parameters, (x,)).square().sum()

    expected = torch.func.grad(loss)(parameters)
    with weights.armed(backward=False):
        found = torch.func.grad(loss)(parameters)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_forward_derivatives_are_left_alone(kernel: str) -> None:
    linear, x = layers_of(lambda: nn.Linear(WIDTH, WIDTH), 1)[0], batch_of(2)[0]
    weights = weight_grad.make_weight_gradients(weight_grad.Survey())
    with weights.armed(backward=False), forward_ad.dual_level():
        found = forward_ad.unpack_dual(linear(forward_ad.make_dual(x, torch.ones_like(x)))).tangent
    assert torch.equal(found, nn.functional.linear(torch.ones_like(x), linear.weight))  # type: ignore[arg-type]


def test_the_kernel_is_torchs_linear(kernel: str) -> None:
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
