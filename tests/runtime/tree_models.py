"""Layers that hand on more than tensors: trees, None, numbers, and values that skip stages."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils import _pytree as pytree

import fastpipe

WIDTH = 6


class WithLinear(nn.Module):
    """What layers have in common that have one linear."""

    width = WIDTH

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(self.width, self.width)


class Pair(NamedTuple):
    """Two tensors under names."""

    left: torch.Tensor
    right: torch.Tensor


@dataclass
class State:
    """What a layer knows: a tensor, and what is no tensor."""

    hidden: torch.Tensor
    depth: int
    note: str | None = None


pytree.register_dataclass(State)


class Tree(WithLinear):
    """Takes and gives nested trees with everything in them: integers and bools without gradients, None, numbers."""

    def forward(
        self, x: Any, state: State | None = None, extra: dict[str, Any] | None = None, nothing: None = None
    ) -> Any:
        if state is None or extra is None:
            state = State(x, 0)
            extra = {
                "mask": x > 0,
                "deep": [torch.arange(len(x), device=x.device), {"scale": 0.5, "pair": Pair(x, 2 * x)}, None],
            }
        positions, inner, none = extra["deep"]
        assert nothing is none is None and state.note == (f"after {state.depth}" if state.depth else None)
        assert type(inner["pair"]) is Pair and type(state.depth) is int and positions.dtype is torch.int64
        hidden = torch.tanh(self.linear(x)) + inner["scale"] * inner["pair"].right + 0.1 * state.hidden
        hidden = torch.where(extra["mask"], hidden, x) + 0.01 * positions[:, None] + 0.1 * state.depth
        depth = state.depth + 1
        deep = [positions + 1, {"scale": inner["scale"] / 2, "pair": Pair(hidden * 0.5, inner["pair"].left)}, None]
        return hidden, State(x * 0.3, depth, f"after {depth}"), {"mask": ~extra["mask"], "deep": deep}, None


class OneDict(WithLinear):
    """Takes and gives one dict, which is one argument."""

    def forward(self, x: Any) -> dict[str, Any]:
        given = x if isinstance(x, dict) else {"hidden": x, "layers": 0}
        hidden = torch.tanh(self.linear(given["hidden"])) + 0.1 * given["layers"]
        return {"hidden": hidden, "layers": given["layers"] + 1}


class BytesFirst(WithLinear):
    """A line of bytes before everything else, which looks like what describes a tree."""

    def forward(self, line: torch.Tensor, x: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        if x is None:
            x, line = line, torch.arange(len(line), dtype=torch.uint8, device=line.device)
        return line + 1, torch.tanh(self.linear(x)) + 0.01 * line[:, None]


class Rotary(nn.Module):
    """A first layer that computes what some later ones need: a mask, angles, a learned bias, and a tuple of both."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.bias = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: torch.Tensor) -> Any:
        angles = torch.arange(WIDTH, device=x.device) * 0.1
        hidden = self.linear(x)
        return fastpipe.carry(hidden, mask=hidden > 0, rotary=(angles.cos(), self.bias.exp()), memory=hidden)


class Attends(WithLinear):
    """Takes some of it by name."""

    def forward(self, x: torch.Tensor, *, mask: torch.Tensor, rotary: Any, memory: torch.Tensor) -> torch.Tensor:
        cosine, bias = rotary
        return torch.where(mask, torch.tanh(self.linear(x)) * cosine + bias, 0.5 * x) + 0.2 * memory


class Down(WithLinear):
    """The first half of a U: keeps what it computes for the layer opposite."""

    def forward(self, x: torch.Tensor, skips: tuple[torch.Tensor, ...] = ()) -> Any:
        x = torch.tanh(self.linear(x))
        return fastpipe.carry(x, skips=(*skips, x))


class Up(WithLinear):
    """The second half: takes the last that was kept."""

    def forward(self, x: torch.Tensor, skips: tuple[torch.Tensor, ...]) -> Any:
        *others, last = skips
        x = torch.tanh(self.linear(x)) + last
        return fastpipe.carry(x, skips=tuple(others)) if others else x


def u_net(num_layers: int, between: type[nn.Module]) -> list[nn.Module]:
    """As many layers down as up, and the others between them."""
    half = (num_layers - 1) // 2
    middle = [between() for _ in range(num_layers - 2 * half)]
    return [*(Down() for _ in range(half)), *middle, *(Up() for _ in range(half))]


def decoder(num_layers: int, between: type[nn.Module]) -> list[nn.Module]:
    """Every second layer after the first takes what that one carries."""
    return [Rotary(), *(Attends() if i % 2 else between() for i in range(num_layers - 1))]
