"""Layers for tests of the meta device: buffers of both kinds, and a weight of two layers."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from fastpipe import Pipeline, StepResult
from fastpipe.testing import Reference, reference_step
from tests.runtime.checks import same_bits, unequal

WIDTH, WORDS, COUNT = 8, 11, 8


class Rotated(nn.Module):
    """Has a buffer that no checkpoint has, and one that it has."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("angles", torch.empty(WIDTH), persistent=False)
        self.register_buffer("calls", torch.empty((), dtype=torch.long))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.linear.reset_parameters()
        self.calls.fill_(3)
        self.compute_angles()

    def compute_angles(self) -> None:
        self.angles.copy_(torch.arange(1.0, WIDTH + 1) / 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x)) * self.angles * self.calls


def layers(*, tied: bool = True) -> list[nn.Module]:
    made = [nn.Embedding(WORDS, WIDTH), *(Rotated() for _ in range(8)), nn.Linear(WIDTH, WORDS, bias=False)]
    if tied:
        made[-1].weight = made[0].weight  # type: ignore[assignment]
    return made


def on_meta(make: Callable[[], list[nn.Module]] = layers) -> list[nn.Module]:
    with torch.device("meta"):
        return make()


def initialise(named: Iterable[tuple[str, nn.Module]]) -> None:
    """Each layer with a seed of its own, by its name in the model."""
    for name, layer in named:
        torch.manual_seed(int(name))
        for module in layer.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()


def initialise_stages(pipe: Pipeline) -> None:
    for _, stage in sorted(pipe.stage_modules.items()):
        initialise(stage.named_children())


def whole_model(**options: Any) -> nn.Sequential:
    made = nn.Sequential(*layers(**options))
    initialise(made.named_children())
    return made


def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def batch(seed: int = 0) -> torch.Tensor:
    return torch.randint(WORDS, (2 * COUNT, 5), generator=torch.Generator().manual_seed(seed))


def step(pipe: Pipeline, x: torch.Tensor) -> StepResult:
    return pipe.step(x, target=x)


def reference(pipe: Pipeline, whole: nn.Module, x: torch.Tensor) -> Reference:
    return reference_step(whole, (x, x), pipe.schedule, loss_fn, ties=pipe._local.ties)


def assert_trains_like(pipe: Pipeline, whole: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Two steps with an optimizer, as the unsplit model does them, to the last bit."""
    own = torch.optim.SGD(whole.parameters(), lr=0.1)
    for seed in range(2):
        result, expected = step(pipe, batch(seed)), reference(pipe, whole, batch(seed))
        assert result.loss is not None and same_bits(result.loss, expected.loss), (result.loss, expected.loss)
        assert not (wrong := unequal(pipe, whole)), wrong
        for one in (optimizer, own):
            one.step()
            one.zero_grad()


def num_bytes(modules: Iterable[nn.Module]) -> int:
    """Of parameters that have memory."""
    found = {id(p): p for module in modules for p in module.parameters() if not p.is_meta}
    return sum(parameter.nbytes for parameter in found.values())
