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
    """Belongs to I, as it has no weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, pause: Pause) -> Tensor:
        ctx.pause = pause
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        ctx.pause("I")
        return grad, None


class SleepingStage(nn.Module):
    """A tiny linear between pauses: a hook of its weight makes one when the weight's gradient comes, which is in W."""

    def __init__(self, pause: Pause) -> None:
        super().__init__()
        self.pause = pause
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)
        self.linear.weight.register_hook(lambda _: pause("W"))

    def forward(self, x: Tensor) -> Tensor:
        self.pause("F")
        return PauseInBackward.apply(self.linear(x), self.pause)  # type: ignore[no-untyped-call,no-any-return]
