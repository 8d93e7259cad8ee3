"""CostModel: seconds per stage action and per transfer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import numpy as np

from fastpipe.program import Channel, ChannelKind, Op

if TYPE_CHECKING:
    from fastpipe.timeline import Timeline

PerStage = float | Sequence[float]


@dataclass(frozen=True)
class CostModel:
    """What an action of one *stage* and one microbatch costs. A number holds for every stage, a sequence names each.

    Attributes:
        forward: seconds of F.
        backward_input: seconds of I.
        backward_weight: seconds of W.
        comm: seconds of latency of a transfer between two ranks; hand-overs within a rank are free.
        backward: seconds of B; I + W unless given.
        overlapped: seconds of a fused F and B, by the stage of its forward; the sum of the two unless given.
        bandwidth: bytes a second of a link; infinite unless given.
        activation_bytes: bytes of the tensor that a stage hands to the next one; its gradient has as many.
    """

    forward: PerStage = 1.0
    backward_input: PerStage = 1.0
    backward_weight: PerStage = 1.0
    comm: float = 0.0
    backward: PerStage | None = None
    overlapped: PerStage | None = None
    bandwidth: float = math.inf
    activation_bytes: PerStage = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None:
                continue
            if isinstance(value, Sequence) and not isinstance(value, tuple):
                object.__setattr__(self, field.name, tuple(value))
            numbers = value if isinstance(value, Sequence) else (value,)
            for number in numbers:
                if not isinstance(number, int | float) or math.isnan(number) or number < 0:
                    raise ValueError(f"{field.name} = {number!r}: costs are numbers of at least 0")
        if self.bandwidth == 0:
            raise ValueError("bandwidth = 0: give bytes a second, or leave it out for an infinite one")

    def check(self, num_stages: int) -> None:
        """Refuse a sequence that does not name every stage."""
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, tuple) and len(value) != num_stages:
                raise ValueError(f"{field.name} has {len(value)} values for {num_stages} stages: give one a stage")

    def compute_seconds(self, op: int, stage: int, pair_stage: int = -1) -> float:
        """Seconds of a compute action."""
        if op == Op.F:
            return _of(self.forward, stage)
        if op == Op.I:
            return _of(self.backward_input, stage)
        if op == Op.W:
            return _of(self.backward_weight, stage)
        if op == Op.B:
            return self._backward(stage)
        if op == Op.OVERLAP_F_B:
            if self.overlapped is not None:
                return _of(self.overlapped, stage)
            return _of(self.forward, stage) + self._backward(pair_stage)
        return 0.0

    def _backward(self, stage: int) -> float:
        if self.backward is not None:
            return _of(self.backward, stage)
        return _of(self.backward_input, stage) + _of(self.backward_weight, stage)

    def message_bytes(self, channel: Channel, consumer_stage: int) -> float:
        """Bytes of the message that ``consumer_stage`` receives over ``channel``."""
        boundary = consumer_stage - 1 if channel.kind == ChannelKind.ACTIVATION else consumer_stage
        return _of(self.activation_bytes, boundary)

    def transfer_seconds(self, channel: Channel, consumer_stage: int) -> float:
        """Seconds of that message on its link."""
        if channel.source == channel.destination:
            return 0.0
        return self.comm + self.message_bytes(channel, consumer_stage) / self.bandwidth

    @classmethod
    def from_timeline(cls, timeline: Timeline) -> CostModel:
        """Medians per stage and kind of a measured (or simulated) timeline.

        A kind that never ran takes its cost from what did: B is I + W, I and W are halves of B. Transfers are counted
        as free: on one host a measured send lasts until its receiver comes, so its length is no cost.
        """
        seconds = timeline.median_seconds()
        num_stages = timeline.program.num_stages
        ran = {op for op, _ in seconds}
        forward = [seconds.get((Op.F, s), math.nan) for s in range(num_stages)]
        inputs = [seconds.get((Op.I, s), math.nan) for s in range(num_stages)]
        weights = [seconds.get((Op.W, s), math.nan) for s in range(num_stages)]
        both = [seconds.get((Op.B, s), math.nan) for s in range(num_stages)]
        fused = [seconds.get((Op.OVERLAP_F_B, s), math.nan) for s in range(num_stages)]
        inputs = [b / 2 if math.isnan(i) else i for i, b in zip(inputs, both, strict=True)]
        weights = [b / 2 if math.isnan(w) else w for w, b in zip(weights, both, strict=True)]
        both = [i + w if math.isnan(b) else b for i, w, b in zip(inputs, weights, both, strict=True)]
        return cls(
            forward=_filled(forward),
            backward_input=_filled(inputs),
            backward_weight=_filled(weights),
            backward=_filled(both),
            overlapped=_filled(fused) if Op.OVERLAP_F_B in ran else None,
        )


def _of(value: PerStage, stage: int) -> float:
    return value if isinstance(value, int | float) else value[stage]


def _filled(values: list[float]) -> tuple[float, ...]:
    """Stages that were not seen cost the mean of those that were."""
    known = [value for value in values if not math.isnan(value)]
    mean = float(np.mean(known)) if known else 0.0
    return tuple(mean if math.isnan(value) else value for value in values)
