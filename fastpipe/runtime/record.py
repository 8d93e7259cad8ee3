"""What a forward leaves for its backward, for the Python executor, and where tensors enter a stage's graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from fastpipe.runtime.tensors import Tensors
from fastpipe.runtime.weight_grad import WeightGradients


class _Entry(torch.autograd.Function):
    """Where a received tensor enters a stage's graph: catches the gradient as autograd made it.

    The gradient of a leaf would be laid out like the leaf, and with it what the previous stage computes.
    """

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, caught: dict[int, torch.Tensor], index: int) -> torch.Tensor:
        ctx.caught, ctx.index = caught, index
        # not a view: a stage may change its input in place
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[None, None, None]:
        ctx.caught[ctx.index] = grads[0]
        return None, None, None


def enter(tensor: torch.Tensor, caught: dict[int, torch.Tensor], index: int) -> torch.Tensor:
    """A received tensor as the stage sees it; its gradient goes to ``caught[index]``."""
    entered: torch.Tensor = _Entry.apply(tensor, caught, index)  # type: ignore[no-untyped-call]
    return entered


@dataclass
class Record:
    """What a forward leaves for its backward."""

    inputs: Tensors
    outputs: Tensors
    caught: dict[int, torch.Tensor]
    weights: WeightGradients | None

    def input_grads(self) -> Tensors:
        """After the backward: the gradients of the inputs that require one."""
        needing = [(i, t) for i, t in enumerate(self.inputs) if t.requires_grad]
        return tuple(self.caught[i] if i in self.caught else torch.zeros_like(t) for i, t in needing)
