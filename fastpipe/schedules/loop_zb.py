"""loop_zb: interleaved zero bubble within any memory from one microbatch's on, found by rounds (docs/waves.md).

In a loop a round is one trip from rank to rank, through p stages. A round of F that starts in slot 2a is on rank r in
slot 2a + r. A round of I goes the other way: started on the last rank in slot 2b + (p mod 2), it is on rank r in slot
2b + (p mod 2) + p - 1 - r, which is never of the parity of r. So rounds of F never meet rounds of I, and W takes what
either leaves free. Unlike in a wave, the two cross at another place on every rank: rank 0 has its I last, so memory is
counted there.

Where hops take time, or I and W differ, even rounds (`rounds.even`) are tried too. They want (v + 1) / 2v of 1F1B's
memory, where these want (v + 1) / 3v.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fastpipe import native_plan
from fastpipe.placement import Placement
from fastpipe.schedule import Schedule
from fastpipe.schedules.family import MEMORY, UNIFORM_COSTS, Family, Option, is_count, live_limit
from fastpipe.schedules.rounds import (
    NEVER,
    F,
    Groups,
    I,
    Rounds,
    RoundsView,
    Seconds,
    Spread,
    all_groupings,
    even,
    filled,
    groupings,
    is_found,
    num_timed,
    shortest,
    spread_of,
    streams,
)

_SLOTS = 100_000
"""Slots that a search plays at most, which takes about a tenth of a second; the likely groups come first."""


@dataclass(frozen=True)
class _Starts:
    """The slots in which rounds start, each with ``round * m + microbatch``; and when rank 0 is done."""

    forward: Rounds
    backward: Rounds
    length: int


class _Slots:
    """Slot by slot: a round of F starts where there is memory for it, and a round of I where there is one to start."""

    def __init__(self, num_ranks: int, stages_per_rank: int, groups: Groups, limit: int) -> None:
        self.p, self.limit, self.total = num_ranks, limit, sum(groups)
        self.forward, self.backward = (keys.tolist() for keys in streams(stages_per_rank, groups))
        self.ready = [0] * self.total + [NEVER] * (self.total * 2 * stages_per_rank)
        self.forwards: list[tuple[int, int]] = []
        self.backwards: list[tuple[int, int]] = []
        self.arrived = self.weights = 0

    def run(self, give_up: int) -> _Starts | None:
        """Play; None where it gets stuck, or takes as many slots as ``give_up``."""
        slot, lane, count = 0, self.p % 2, len(self.forward)
        while self.weights < count:
            if slot % 2 == lane:
                self._start(slot, self.backward, self.backwards, True)
            if slot % 2 == 0:
                if not self._start(slot, self.forward, self.forwards, len(self.forwards) - self.weights < self.limit):
                    self._weight()
            elif self.arrived < len(self.backwards) and self.backwards[self.arrived][0] + self.p - 1 == slot:
                self.arrived += 1
            else:
                self._weight()
            slot += 1
            if slot >= give_up or self._stuck():
                return None
        return _Starts(self.forwards, self.backwards, slot)

    def _start(self, slot: int, keys: list[int], started: list[tuple[int, int]], room: bool) -> bool:
        """Start the next round of a stream, if it can; p slots later the next of its microbatch can."""
        if len(started) == len(keys) or not room or self.ready[keys[len(started)]] > slot:
            return False
        key = keys[len(started)]
        started.append((slot, key))
        self.ready[key + self.total] = slot + self.p
        return True

    def _weight(self) -> None:
        self.weights += self.weights < self.arrived

    def _stuck(self) -> bool:
        """Whether memory is full for good: all I have arrived, all W are done, and no I can start."""
        f, i = len(self.forwards), len(self.backwards)
        full = f == len(self.forward) or f - self.weights >= self.limit or self.ready[self.forward[f]] == NEVER
        idle = i == len(self.backward) or self.ready[self.backward[i]] == NEVER
        return full and idle and self.weights == i < len(self.backward)


def _played(p: int, v: int, groups: Groups, limit: int, give_up: int) -> _Starts | None:
    """One candidate, by the library (csrc/plan/rounds.cpp) where it is there."""
    if native_plan.library() is None:
        return _Slots(p, v, groups, limit).run(give_up)
    keys = streams(v, groups)
    slots = [np.empty(len(each), dtype=np.int64) for each in keys]
    length = native_plan.function("loop")(RoundsView.of(p, v, groups, limit), give_up, *slots)
    if not is_found(length):
        return None
    forward, backward = (np.column_stack([at, each]) for at, each in zip(slots, keys, strict=True))
    return _Starts(forward, backward, length)


def generate(
    num_ranks: int,
    num_microbatches: int,
    stages_per_rank: int,
    memory: float | int,
    forward: float,
    backward_input: float,
    backward_weight: float,
    comm: float,
) -> Schedule:
    """The best order found within the memory, for the costs.

    Raises:
        ValueError: for less memory than one microbatch takes.
    """
    limit = live_limit("loop_zb", memory, num_ranks, stages_per_rank, num_microbatches)
    placement = Placement.loop(num_ranks, stages_per_rank)
    seconds = Seconds(forward, backward_input, backward_weight, comm)
    found = _search(num_ranks, stages_per_rank, num_microbatches, limit, num_timed(placement, num_microbatches))
    orders = [filled(_spread(placement, num_microbatches, starts), limit, seconds) for starts in found]
    orders += () if seconds.equal else even(placement, num_microbatches, num_ranks, limit, seconds)
    return shortest("loop_zb", placement, num_microbatches, (order for order in orders if order is not None))


def _search(p: int, v: int, m: int, limit: int, count: int) -> list[_Starts]:
    """Play groups until the time is up: the ``count`` shortest, and those of p microbatches.

    Groups of p leave waits in their slots that are none once every action starts as early as it can.
    """
    left, shortest = _SLOTS, [NEVER]
    found: list[_Starts] = []
    for groups in all_groupings(m, (max(1, p // 2), p), 2 * p):
        starts = _played(p, v, groups, limit, shortest[-1])
        left -= 3 * v * m
        if starts is not None:
            found.append(starts)
            shortest = sorted([*shortest, starts.length])[:count]
        if left < 0 and found:
            break
    whole = _played(p, v, next(groupings(m, min(m, p))), limit, NEVER)
    return [*sorted(found, key=lambda starts: starts.length)[:count], *([] if whole is None else [whole])]


def _spread(placement: Placement, m: int, starts: _Starts) -> Spread:
    """The F and I of every rank: stage after stage of a round, slot after slot."""
    p, last = placement.num_ranks, placement.num_stages - 1
    hops, rounds = np.arange(p), np.concatenate([starts.forward, starts.backward]).astype(np.int64)
    slots, keys = rounds.reshape(-1, 2, 1).swapaxes(0, 1)
    backward = np.arange(len(rounds)).reshape(-1, 1) >= len(starts.forward)
    number, microbatch = np.divmod(keys - placement.num_stages // p * m * backward, m)
    place = number * p + hops
    stages = np.where(backward, last - place, place)
    return spread_of(placement, m, slots + hops, np.where(backward, int(I), int(F)), stages, microbatch)


LOOP_ZB = Family(
    "loop_zb",
    "interleaved stages with split backwards within any memory",
    "any ranks and microbatches",
    generate,
    {
        "stages_per_rank": Option(4, "the number of stages a rank holds, at least 1", is_count),
        "memory": MEMORY,
        **UNIFORM_COSTS,
    },
    stages_per_rank=4,
)
