"""What an action waits for: the only copy of that rule, and what plays orders by it.

For one microbatch, the forward of stage s waits for the forward of stage s-1; the backward (B or I) of stage s waits
for its own forward and for the backward of stage s+1; W waits for its I. A rank runs its actions in order.
"""

from __future__ import annotations

from collections.abc import Sequence
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


class Play:
    """Orders run in steps of time, each action as early as what it waits for allows; every action takes one step.

    The orders must be complete only as far as they are wanted to run: an event that never happens leaves the rank
    that waits for it in ``stuck``.

    Attributes:
        starts: per rank, the start of every action that could run, in order; shorter than the order when stuck.
        stuck: ``{rank: (position, event, stage, microbatch)}`` for ranks that never finish: the action at
            ``position`` waits for an event that never comes.
    """

    def __init__(self, orders: Sequence[Sequence[Action]], placement: Placement, num_microbatches: int) -> None:
        self.starts: list[list[int]] = [[] for _ in orders]
        self.stuck: dict[int, tuple[int, Event, int, int]] = {}
        self._orders = orders
        self._num_stages = placement.num_stages
        self._num_microbatches = num_microbatches
        self._done: dict[int, int] = {}
        self._waiting: dict[int, list[int]] = {}
        ready = list(range(len(orders)))
        while ready:
            ready.extend(self._advance(ready.pop()))

    def _key(self, event: Event, stage: int, microbatch: int) -> int:
        return (event * self._num_stages + stage) * self._num_microbatches + microbatch

    def _advance(self, rank: int) -> list[int]:
        """Run a rank until it has to wait; the ranks that its actions woke."""
        woken: list[int] = []
        order, starts = self._orders[rank], self.starts[rank]
        self.stuck.pop(rank, None)
        while len(starts) < len(order):
            parts = order[len(starts)].parts
            start = self._start(rank, parts)
            if start is None:
                break
            starts.append(start)
            for part in parts:
                for event in produces(part.kind):
                    key = self._key(event, part.stage, part.microbatch)
                    self._done[key] = start + 1
                    woken.extend(self._waiting.pop(key, ()))
        return woken

    def _start(self, rank: int, parts: tuple[Action, ...]) -> int | None:
        """The earliest start, or None after noting what is waited for."""
        starts = self.starts[rank]
        start = starts[-1] + 1 if starts else 0
        for part in parts:
            for event, stage in needs(part.kind, part.stage, self._num_stages):
                key = self._key(event, stage, part.microbatch)
                time = self._done.get(key)
                if time is None:
                    self._waiting.setdefault(key, []).append(rank)
                    self.stuck[rank] = (len(starts), event, stage, part.microbatch)
                    return None
                start = max(start, time)
        return start
