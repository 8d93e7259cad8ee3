"""Models and pipelines for the tests of pairs of a forward and a backward, and of random numbers."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fastpipe import Pipeline
from fastpipe.runtime.stage.stage import Chain
from fastpipe.testing import reference_step
from tests.runtime.checks import same_bits, unequal

WIDTH = 6
SEED = 5
PAIRED = ["dualpipev", "dualpipe", "1f1b_overlap", "interleaved_overlap"]


class Layer(nn.Module):
    """A layer, with a dropout if asked for, in a checkpoint or not: True, or "reentrant" for the other kind."""

    def __init__(self, p: float = 0.0, recomputes: bool | str = False) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(p)
        self.recomputes = recomputes

    def body(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.dropout(self.linear(x)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.recomputes:
            return self.body(x)
        out: torch.Tensor = checkpoint(self.body, x, use_reentrant=self.recomputes == "reentrant")
        return out


class Own(Layer):
    """As one would write a layer for DualPipe."""

    calls = 0

    @classmethod
    def overlapped_forward_backward(
        cls,
        module0: nn.Module,
        inputs0: list[torch.Tensor],
        criterion0: Callable[..., torch.Tensor] | None,
        labels0: list[torch.Tensor],
        module1: nn.Module,
        loss1: torch.Tensor | None,
        outputs1: Sequence[torch.Tensor],
        output_grads1: Sequence[torch.Tensor],
    ) -> Any:
        assert isinstance(inputs0, list) and isinstance(labels0, list) and (criterion0 is None) == (not labels0)
        assert (loss1 is None) == bool(outputs1) and len(outputs1) == len(output_grads1)
        assert loss1 is not None or (isinstance(outputs1, tuple) and isinstance(output_grads1, tuple))
        Own.calls += 1
        outputs0 = [module0(*inputs0)]
        loss0 = None if criterion0 is None else criterion0(*outputs0, *labels0)
        if loss1 is not None:
            loss1.backward()
            loss1.detach_()
        else:
            options = {"keep_graph": False, "create_graph": False, "allow_unreachable": True, "accumulate_grad": True}
            engine = torch.autograd.Variable._execution_engine
            engine.run_backward(outputs1, output_grads1, **options)  # which takes tuples alone
        return outputs0, loss0


def layers_of(make: Callable[[], nn.Module], count: int) -> list[nn.Module]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return [make() for _ in range(count)]


def batch(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Reentrant checkpoints want an input that requires a gradient."""
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(17, WIDTH, generator=generator) for _ in "xy")
    return x.requires_grad_(), y


def make(layers: Sequence[nn.Module], schedule: str, executor: str, **options: Any) -> Pipeline:
    options = {"num_ranks": 2, "num_microbatches": 8, "loss_fn": nn.functional.mse_loss} | options
    torch.manual_seed(SEED)
    return Pipeline(layers, schedule, executor=executor, **options)


def num_stages(schedule: str, num_ranks: int) -> int:
    return num_ranks * (1 if schedule in ("dualpipe", "1f1b_overlap") else 2)


def compare(pipe: Pipeline, unsplit: Sequence[nn.Module], steps: int = 3, **options: Any) -> None:
    """Steps that accumulate against the unsplit model, and the generator as it was before."""
    for step in range(steps):
        before = torch.get_rng_state()
        x, y = batch(step)
        result = pipe.step(x, target=y)
        numbers = options | ({"seed": SEED, "step_count": step} if options else {})
        reference = reference_step(unsplit, batch(step), pipe.schedule, nn.functional.mse_loss, **numbers)
        assert result.loss is not None and same_bits(result.loss, reference.loss)
        assert all(map(same_bits, result.losses or [], reference.losses))
        assert not pipe.is_last or torch.equal(result.outputs, torch.cat(reference.outputs))
        assert not (wrong := unequal(pipe, Chain(dict(enumerate(unsplit))))), wrong
        assert torch.equal(before, torch.get_rng_state())


def run(pipe: Pipeline, steps: int) -> None:
    """Steps with a batch each."""
    for step in range(steps):
        x, y = batch(step)
        pipe.step(x, target=y)


def model_of(pipe: Pipeline) -> Chain:
    """The layers of a pipeline with one layer a stage."""
    return Chain({stage.index: stage.modules[0] for stage in sorted(pipe._steps.stages, key=lambda stage: stage.index)})
