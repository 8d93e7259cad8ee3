"""A model for the tests on a GPU: blocks whose kernels are deterministic."""

import torch
from torch import nn

import fastpipe

SCHEDULES = [family.name for family in fastpipe.list_schedules() if family.name != "forward_only"]
"""All that train."""


class Block(nn.Module):
    """A block of a transformer, without attention."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def layers(count: int, dtype: torch.dtype, width: int = 64) -> list[nn.Module]:
    """The same weights in every process."""
    torch.manual_seed(0)
    return [Block(width).to("cuda", dtype) for _ in range(count)]


def batch(rows: int, dtype: torch.dtype, width: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    """Input and target, the same in every process."""
    torch.manual_seed(1)
    x, target = torch.randn(rows, width), torch.randn(rows, width)
    return x.to("cuda", dtype), target.to("cuda", dtype)


def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return ((output - target) ** 2).mean()
