"""Stages that sleep in their F, their I and their W, so that durations are known and nobody contends for the cores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

WIDTH = 4
KINDS = ("F", "I", "W")
Pause = Callable[[str], None]
"""Called with the kind of action it is in."""


class PauseInBackward(torch.autograd.Function):
    """Identity that pauses when its gradient comes: that of a weight comes in W, that of an output in I."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, pause: Pause, kind: str) -> Tensor:
        ctx.pause, ctx.kind = pause, kind
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        ctx.pause(ctx.kind)
        return grad, None, None


class SleepingStage(nn.Module):
    """A tiny linear between pauses. No hook makes one: an audit computes a stage again without its hooks."""

    def __init__(self, pause: Pause) -> None:
        super().__init__()
        self.pause = pause
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.pause("F")
        return self._paused(nn.functional.linear(x, self._paused(self.weight, "W")), "I")

    def _paused(self, x: Tensor, kind: str) -> Tensor:
        return PauseInBackward.apply(x, self.pause, kind)  # type: ignore[no-untyped-call,no-any-return]
