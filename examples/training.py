"""What a training loop over several ranks needs beside the pipeline: a common clock, a common norm, a progress line."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fastpipe


def over_ranks(value: Tensor) -> Tensor:
    """Replace every entry by the largest that any process has; alone there is nothing to do."""
    if dist.is_initialized():
        dist.all_reduce(value, dist.ReduceOp.MAX)
    return value


class Budget:
    """How much of the training is behind us, from 0 to 1, the same on every rank: steps if given, else seconds."""

    def __init__(self, steps: int | None, seconds: float) -> None:
        self.steps = steps
        self.seconds = seconds
        self.start = time.monotonic()

    def elapsed(self) -> float:
        return time.monotonic() - self.start

    def spent(self, step: int) -> float:
        if self.steps is not None:
            return min(1.0, step / self.steps)
        # If one rank's clock stopped it a step before the others, they would wait for it for ever.
        latest = over_ranks(torch.tensor(self.elapsed()))
        return min(1.0, latest.item() / self.seconds)


def learning_rate(highest: float, spent: float, warm_up: float = 0.05) -> float:
    """Up in a straight line, then down along a cosine to a twentieth."""
    if spent < warm_up:
        return highest * (0.05 + 0.95 * spent / warm_up)
    return highest * (0.525 + 0.475 * math.cos(math.pi * (spent - warm_up) / (1 - warm_up)))


class GradientClipper:
    """Scales the gradients of all ranks so that their norm, taken together, is at most ``largest``.

    Every parameter's own norm goes to its place in the whole model before they are combined. So the result has the
    same bits however many ranks there are, which a sum of the ranks' own norms would not have. (A rank that has
    nothing for a place says 0, and two that hold the same parameter say the same: the largest is the one to take.)
    """

    def __init__(self, model: nn.Module, largest: float) -> None:
        self.places = {name: place for place, (name, _) in enumerate(model.named_parameters())}
        self.largest = largest

    def clip(self, pipe: fastpipe.Pipeline) -> None:
        norms = torch.zeros(len(self.places))
        for name, parameter in pipe.named_parameters():
            norms[self.places[name]] = parameter.grad.norm()
        total = over_ranks(norms).norm()
        scale = (self.largest / total).clamp(max=1.0)
        for parameter in pipe.parameters():
            parameter.grad.mul_(scale)


@dataclass
class Meter:
    """What the progress line shows."""

    started: float = field(default_factory=time.monotonic)
    tokens: int = 0
    loss: float = math.nan
    bubble: float = math.nan

    def update(self, result: fastpipe.StepResult, tokens: int, traced: bool) -> None:
        self.tokens += tokens
        loss = result.loss.item()
        self.loss = loss if math.isnan(self.loss) else 0.95 * self.loss + 0.05 * loss
        if traced:
            self.bubble = result.timeline.bubble_fraction

    def line(self, step: int, spent: float) -> str:
        rate = self.tokens / (time.monotonic() - self.started)
        return (
            f"{spent:>4.0%}   step {step:>5}   loss {self.loss:.3f}   {rate:>6,.0f} tokens/s   "
            f"measured bubble {self.bubble:.0%}"
        )
