"""Small stages drawn at random: what is inside them, and what crosses the boundaries between them."""

import copy
from collections.abc import Callable

import torch
from hypothesis import strategies as st
from torch import nn

from tests.runtime.split_models import WIDTH, Checkpointed, Mlp, Twice

BODIES: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "nested": lambda: nn.Sequential(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), nn.LayerNorm(WIDTH)),
    "mlp": Mlp,
    "checkpointed": lambda: Checkpointed(Mlp(), reentrant=False),
    "shared": lambda: (lambda layer: nn.Sequential(layer, nn.Tanh(), layer))(nn.Linear(WIDTH, WIDTH)),
    "twice": Twice,
    "frozen": lambda: nn.Linear(WIDTH, WIDTH).requires_grad_(False),
    "half frozen": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH).requires_grad_(False), nn.Linear(WIDTH, WIDTH)),
    "nothing": nn.Identity,
}

OUTPUTS: dict[str, Callable[[torch.Tensor], torch.Tensor | tuple[torch.Tensor, ...]]] = {
    "one": lambda x: x,
    "two": lambda x: (x, torch.sin(x)),
    "same twice": lambda x: (x, x),
    "a mask": lambda x: (x, x.detach() > 0),
    "without gradient": lambda x: (x, x.detach() * 2, torch.arange(len(x))[:, None]),
    "a view": lambda x: (x[:, ::2].repeat_interleave(2, 1), x.t().contiguous().t()),
}


class Drawn(nn.Module):
    """A body, whatever it is given; and one of the outputs above."""

    def __init__(self, body: str, output: str) -> None:
        super().__init__()
        self.body = BODIES[body]()
        self.output = output

    def forward(self, x: torch.Tensor, *others: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        for other in others:
            x = x + 0.3 * other
        return OUTPUTS[self.output](self.body(x))

    def extra_repr(self) -> str:
        return self.output


@st.composite
def random_stages(draw: st.DrawFn, num_stages: int) -> list[nn.Module]:
    """So many stages. The first has weights to train, so that there is something to compare."""
    bodies = [draw(st.sampled_from(["linear", "mlp"]))]
    bodies += draw(st.lists(st.sampled_from(sorted(BODIES)), min_size=num_stages - 1, max_size=num_stages - 1))
    outputs = draw(st.lists(st.sampled_from(sorted(OUTPUTS)), min_size=num_stages, max_size=num_stages))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(draw(st.integers(0, 1000)))
        return [Drawn(body, output) for body, output in zip(bodies, outputs, strict=True)]


def twins(stages: list[nn.Module]) -> list[nn.Module]:
    """The same stages, with parameters of their own."""
    return copy.deepcopy(stages)
