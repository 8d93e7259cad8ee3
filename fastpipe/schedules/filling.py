"""Filling: rounds spread over the ranks get their W, and the shortest of several orders is taken.

A *step* is ``(slot, kind, stage, microbatch)``. The slots are whole numbers in which every input is there in time:
sorted by them, the steps of all ranks can run one after the other. They decide the order, not the times.
csrc/plan/fill.cpp does the same sooner.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fastpipe import native_plan
from fastpipe.action import ActionKind
from fastpipe.placement import Placement
from fastpipe.schedule import Columns, Schedule
from fastpipe.schedules import native
from fastpipe.schedules.rounds import NEVER, Seconds
from fastpipe.schedules.words import columns_of

Step = tuple[int, ActionKind, int, int]
Orders = list[list[Step]]
"""Every rank's steps."""
Numbers = npt.NDArray[np.integer[Any]]

F, I, W = ActionKind.F, ActionKind.I, ActionKind.W


@dataclass(frozen=True, eq=False)
class Spread:
    """The F and I of every rank in the slots that their rounds give them.

    Attributes:
        placement: of the stages.
        num_microbatches: of a step.
        first: the first step of every rank, and the number of steps, which are sorted by rank and slot.
        columns: slots (int64), kinds, stages and microbatches of the steps.
    """

    placement: Placement
    num_microbatches: int
    first: npt.NDArray[np.int64]
    columns: tuple[Numbers, Numbers, Numbers, Numbers]

    def by_rank(self) -> Orders:
        """The steps as tuples."""
        slots, kinds, stages, mbs = (column.tolist() for column in self.columns)
        steps = list(zip(slots, map(ActionKind, kinds), stages, mbs, strict=True))
        ends = self.first.tolist()
        return [steps[begin:end] for begin, end in zip(ends, ends[1:], strict=False)]


def spread_of(
    placement: Placement, num_microbatches: int, slots: Numbers, kinds: Numbers, stages: Numbers, mbs: Numbers
) -> Spread:
    """A spread from steps in any order, as arrays that broadcast to one shape."""
    columns = [column.ravel() for column in np.broadcast_arrays(slots, kinds, stages, mbs)]
    ranks = np.array(placement.routes[0])[columns[2]]
    order = np.lexsort((columns[0], ranks))
    counts = np.bincount(ranks, minlength=placement.num_ranks)
    first = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    slot, *others = (column[order] for column in columns)
    kind, stage, mb = (other.astype(np.int32) for other in others)
    return Spread(placement, num_microbatches, first, (slot.astype(np.int64), kind, stage, mb))


@dataclass(frozen=True, eq=False)
class Filled:
    """The order of every rank with its W, and how long it takes."""

    columns: list[Columns]
    makespan: float


def filled(spread: Spread, limit: int, seconds: Seconds) -> Filled | None:
    """Put W into the slots that are left, the oldest first; None where a rank cannot keep the limit."""
    placement = spread.placement
    if native_plan.library() is None:
        ranks = fill_all(spread.by_rank(), limit)
        if ranks is None:
            return None
        columns = [columns_of([step[1:] for step in steps]) for steps in ranks]
        return Filled(columns, makespan(ranks, placement, seconds))
    times = seconds.forward, seconds.backward_input, seconds.backward_weight, seconds.comm
    found = native.fill(placement.routes[0], spread.num_microbatches, spread.first, spread.columns, limit, times)
    if found is None:
        return None
    rows, length = found
    ends = (spread.first * 3 // 2).tolist()
    return Filled([columns_of(rows[:, a:b].T) for a, b in zip(ends, ends[1:], strict=False)], length)


def fill_weights(steps: Sequence[Step], limit: int) -> list[Step] | None:
    """One rank's F and I, in order of slots, with its W: the oldest, in free slots, or before an F past ``limit``.

    Returns:
        None where an F finds ``limit`` activations alive, and no W that could release one.
    """
    filled: list[Step] = []
    waiting: list[Step] = []
    done = live = 0
    clock = steps[0][0]
    for step in steps:
        slot, kind, stage, microbatch = step
        must = kind is F and live >= limit
        while done < len(waiting) and (clock < slot or must):
            filled.append((clock, *waiting[done][1:]))
            done, clock, live = done + 1, clock + 1, live - 1
            must = kind is F and live >= limit
        if must:
            return None
        filled.append(step)
        clock = max(clock, slot) + 1
        if kind is F:
            live += 1
        else:
            waiting.append((0, W, stage, microbatch))
    filled += [(clock + late, *step[1:]) for late, step in enumerate(waiting[done:])]
    return filled


def fill_all(ranks: Sequence[Sequence[Step]], limit: int) -> list[list[Step]] | None:
    """`fill_weights` for every rank; None where one cannot keep the limit."""
    filled = []
    for steps in ranks:
        one = fill_weights(sorted(steps, key=lambda step: step[0]), limit)
        if one is None:
            return None
        filled.append(one)
    return filled


def makespan(ranks: Sequence[Sequence[Step]], placement: Placement, seconds: Seconds) -> float:
    """The makespan of filled orders, every action as early as its inputs allow."""
    last, route = placement.num_stages - 1, placement.routes[0]
    clock = [0.0] * placement.num_ranks
    arrived: dict[tuple[ActionKind, int, int], float] = {}
    for rank, (_, kind, stage, microbatch) in in_slot_order(ranks):
        if kind is W:
            clock[rank] += seconds.backward_weight
            continue
        forward = kind is F
        start = max(clock[rank], arrived.pop((kind, stage, microbatch), 0.0))
        clock[rank] = end = start + (seconds.forward if forward else seconds.backward_input)
        after = stage + 1 if forward else stage - 1
        if after > last:
            arrived[I, last, microbatch] = end
        elif after >= 0:
            arrived[kind, after, microbatch] = end + seconds.comm * (route[after] != rank)
    return max(clock)


def in_slot_order(ranks: Sequence[Sequence[Step]]) -> list[tuple[int, Step]]:
    """All steps so that inputs come before what needs them.

    A W that was forced before an F may have moved the slots of its rank: what counts there is the slot that the step
    had, or the one of the step behind it.
    """
    keyed = []
    for rank, steps in enumerate(ranks):
        behind = NEVER
        for place in range(len(steps) - 1, -1, -1):
            behind = min(behind, steps[place][0])
            keyed.append((behind, rank, place))
    keyed.sort()
    return [(rank, ranks[rank][place]) for _, rank, place in keyed]


def shortest(name: str, placement: Placement, num_microbatches: int, found: Iterable[Filled]) -> Schedule:
    """The schedule of the orders that are done first, the first of several."""
    best = min(found, key=lambda one: one.makespan)
    return Schedule(name, placement, num_microbatches, best.columns)
