"""Models as users of torch.distributed.pipelining write them, to be traced by its ``pipeline()``."""

import torch
from torch import nn
from torch.distributed.pipelining import Pipe, pipe_split, pipeline

WIDTH = 6


class Skipping(nn.Module):
    """Four stages: a value that skips two, an input that only the last one uses, a buffer, two values at once."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        first = self.layers[0](x).tanh()
        pipe_split()
        second, third = self.layers[1](first).chunk(2, dim=1)
        pipe_split()
        middle = self.norm(self.layers[2](torch.cat([third, second], dim=1)))
        pipe_split()
        return self.layers[3](middle) + first + shift


class Sharing(nn.Module):
    """The same as `Skipping` would be with two stages, of which both use one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.layers[0](x).tanh() * self.scale
        pipe_split()
        return self.layers[1](first) * self.scale


def traced(model: nn.Module, *inputs: torch.Tensor) -> Pipe:
    """The model, traced with a microbatch like these."""
    return pipeline(model, inputs)
