"""What an action waits for: the only copy of that rule, and the loop that plays orders by it.

For one microbatch, the forward of stage s waits for the forward of stage s-1; the backward (B or I) of stage s waits
for its own forward and for the backward of stage s+1; W waits for its I. A rank runs its actions in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from fastpipe.action import NONE, Action, ActionKind
from fastpipe.placement import Placement


class Event(IntEnum):
    """What the end of an action makes available to others."""

    FORWARD = 0
    """the stage's output exists (after F)"""
    BACKWARD = 1
    """the gradient of the stage's input exists (after B or I)"""
    WEIGHT = 2
    """the stage's weight gradients are complete for this microbatch (after B or W)"""


_PRODUCES: dict[ActionKind, tuple[Event, ...]] = {
    ActionKind.F: (Event.FORWARD,),
    ActionKind.B: (Event.BACKWARD, Event.WEIGHT),
    ActionKind.I: (Event.BACKWARD,),
    ActionKind.W: (Event.WEIGHT,),
}


def produces(kind: ActionKind) -> tuple[Event, ...]:
    """The events that the end of an F, B, I or W brings about, for its own stage and microbatch."""
    return _PRODUCES.get(kind, ())


def needs(kind: ActionKind, stage: int, num_stages: int) -> tuple[tuple[Event, int], ...]:
    """The events, each with the stage it belongs to, that an F, B, I or W waits for; all of its own microbatch."""
    if kind is ActionKind.F:
        return ((Event.FORWARD, stage - 1),) if stage > 0 else ()
    if kind in (ActionKind.B, ActionKind.I):
        own = (Event.FORWARD, stage)
        return (own, (Event.BACKWARD, stage + 1)) if stage + 1 < num_stages else (own,)
    if kind is ActionKind.W:
        return ((Event.BACKWARD, stage),)
    return ()


def feeds(kind: ActionKind, stage: int, num_stages: int) -> int:
    """The stage that the result of an F, B or I is handed to, or ``NONE`` where it ends."""
    if kind is ActionKind.F:
        return stage + 1 if stage + 1 < num_stages else NONE
    if kind in (ActionKind.B, ActionKind.I):
        return stage - 1
    return NONE


@dataclass
class Play:
    """The outcome of playing orders: when every action starts and which ones never do.

    Attributes:
        starts: per rank, the start of every action that could run, in order; shorter than the order when stuck.
        ends: the same for the ends.
        stuck: ``{rank: (position, event, stage, microbatch)}`` for ranks that never finish: the action at
            ``position`` waits for an event that never comes.
    """

    starts: list[list[float]]
    ends: list[list[float]]
    stuck: dict[int, tuple[int, Event, int, int]]


def play(
    orders: Sequence[Sequence[Action]],
    placement: Placement,
    num_microbatches: int,
    durations: dict[ActionKind, float] | None = None,
) -> Play:
    """Run every rank's order, each action as early as what it waits for allows.

    The orders must be complete only as far as they are wanted to run: an event that never happens leaves the rank
    that waits for it in ``stuck``.
    """
    return _Player(orders, placement, num_microbatches, durations).run()


class _Player:
    """The state of `play`: one clock per rank, one time per event, and the ranks that wait for each event."""

    def __init__(
        self,
        orders: Sequence[Sequence[Action]],
        placement: Placement,
        num_microbatches: int,
        durations: dict[ActionKind, float] | None,
    ) -> None:
        self.orders = orders
        self.num_stages = placement.num_stages
        self.num_microbatches = num_microbatches
        self.durations = durations
        self.done: dict[int, float] = {}
        self.waiting: dict[int, list[int]] = {}
        self.position = [0] * len(orders)
        self.clock = [0.0] * len(orders)
        self.starts: list[list[float]] = [[] for _ in orders]
        self.ends: list[list[float]] = [[] for _ in orders]
        self.stuck: dict[int, tuple[int, Event, int, int]] = {}

    def run(self) -> Play:
        ready = list(range(len(self.orders)))
        while ready:
            ready.extend(self._advance(ready.pop()))
        return Play(self.starts, self.ends, self.stuck)

    def _key(self, event: Event, stage: int, microbatch: int) -> int:
        return (event * self.num_stages + stage) * self.num_microbatches + microbatch

    def _advance(self, rank: int) -> list[int]:
        """Run a rank until it has to wait; the ranks that its actions woke."""
        woken: list[int] = []
        order = self.orders[rank]
        self.stuck.pop(rank, None)
        while self.position[rank] < len(order):
            parts = order[self.position[rank]].parts
            start = self._start(rank, parts)
            if start is None:
                break
            end = start + self._duration(order[self.position[rank]])
            self.starts[rank].append(start)
            self.ends[rank].append(end)
            self.clock[rank] = end
            self.position[rank] += 1
            for part in parts:
                for event in produces(part.kind):
                    key = self._key(event, part.stage, part.microbatch)
                    self.done[key] = end
                    woken.extend(self.waiting.pop(key, ()))
        return woken

    def _start(self, rank: int, parts: tuple[Action, ...]) -> float | None:
        """The earliest start, or None after noting what is waited for."""
        start = self.clock[rank]
        for part in parts:
            for event, stage in needs(part.kind, part.stage, self.num_stages):
                key = self._key(event, stage, part.microbatch)
                time = self.done.get(key)
                if time is None:
                    self.waiting.setdefault(key, []).append(rank)
                    self.stuck[rank] = (self.position[rank], event, stage, part.microbatch)
                    return None
                start = max(start, time)
        return start

    def _duration(self, action: Action) -> float:
        if self.durations is None:
            return 1.0
        if action.kind is ActionKind.OVERLAP_F_B and action.kind not in self.durations:
            return self.durations[ActionKind.F] + self.durations[ActionKind.B]
        return self.durations.get(action.kind, 0.0)
