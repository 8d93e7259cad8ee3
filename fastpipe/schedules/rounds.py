"""Rounds: schedules whose microbatches travel over the ranks without ever waiting, as docs/waves.md explains.

A *round* is one trip of a microbatch over the ranks: through p stages of a loop, or through 2p stages of a wave, to the
last rank and back. Once a round has started, every stage of it has its slot. So an order is found by deciding when
rounds start, on one machine instead of p, and W fills the slots that are left.

A *step* is ``(slot, kind, stage, microbatch)``. The slots are whole numbers in which every input is there in time:
sorted by them, the steps of all ranks can run one after the other. They decide the order, not the times.
csrc/plan/rounds.cpp does the same sooner.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, product
from typing import Any

import numpy as np
import numpy.typing as npt

from fastpipe import native_plan
from fastpipe.action import ActionKind
from fastpipe.placement import Placement
from fastpipe.schedule import Columns, Schedule
from fastpipe.schedules.words import Ints, columns_of

Groups = tuple[int, ...]
"""Sizes of groups of microbatches, in order: a whole group starts its first rounds, then its second ones, and so on."""

Longs = npt.NDArray[np.int64]
Rounds = list[tuple[int, int]] | Longs
"""When rounds start, and which: pairs."""

NEVER = 1 << 60
_PLACES = 3
"""Where among the groups the odd one stands: so many places from the front, and from the back."""
_EVEN_STEPS = 400_000
"""Steps that are filled with W in the search for even rounds at most, some tenth of a second; but twelve orders."""


@dataclass(frozen=True)
class Seconds:
    """What an order is looked for: seconds of F, I and W of a stage and of a hop."""

    forward: float = 1.0
    backward_input: float = 1.0
    backward_weight: float = 1.0
    comm: float = 0.0

    @property
    def equal(self) -> bool:
        """Whether F = I = W and hops are free: the slots are then the times."""
        return self.forward == self.backward_input == self.backward_weight and self.comm == 0


def all_groupings(num_microbatches: int, likely: Sequence[int], longest: int) -> Iterator[Groups]:
    """Groups to try, none twice: of the likely sizes first, then of all up to ``longest``, the nearest first."""
    sizes = [size for size in range(1, longest + 1) if size <= num_microbatches]
    sizes.sort(key=lambda size: (size not in likely, abs(size - likely[0])))
    yield from dict.fromkeys(chain.from_iterable(groupings(num_microbatches, size) for size in sizes))


def groupings(num_microbatches: int, size: int) -> Iterator[Groups]:
    """Groups of ``size``; a remainder is a group of its own or enlarges one, here or there, or all differ by one."""
    full, rest = divmod(num_microbatches, size)
    if not rest or not full:
        yield (size,) * full + (rest,) * (rest > 0)
        return
    for place in _places(full + 1):
        yield (size,) * place + (rest,) + (size,) * (full - place)
    for place in _places(full):
        yield (size,) * place + (size + rest,) + (size,) * (full - 1 - place)
    for count in (full + 1, full):
        small, larger = divmod(num_microbatches, count)
        yield (small + 1,) * larger + (small,) * (count - larger)
        yield (small,) * (count - larger) + (small + 1,) * larger


def _places(count: int) -> list[int]:
    return sorted({*range(min(count, _PLACES)), *range(max(0, count - _PLACES), count)})


class RoundsView(native_plan.View):
    """The rounds of F and of I in the order in which they start, as the library reads them."""

    _fields_ = [
        *((name, ctypes.c_int32) for name in ("num_ranks", "num_microbatches")),
        *((name, ctypes.c_int64) for name in ("count", "num_keys")),
        *((name, ctypes.c_void_p) for name in ("forward", "backward")),
        ("limit", ctypes.c_int64),
    ]

    @classmethod
    def of(cls, num_ranks: int, num_rounds: int, groups: Groups, limit: int) -> RoundsView:
        """Of `streams`; ``limit`` in stage activations of a rank."""
        forward, backward = streams(num_rounds, groups)
        return cls(num_ranks, sum(groups), len(forward), 2 * len(forward), forward, backward, limit)


def is_found(length: int) -> bool:
    """Whether the library has found what takes so long: 0 says no."""
    if length < 0:
        raise MemoryError("no memory for the rounds of a schedule")
    return length > 0


@lru_cache(maxsize=4)
def streams(num_rounds: int, groups: Groups) -> tuple[Ints, Ints]:
    """The rounds of F and of I in the order in which they start, each as ``round * m + microbatch``.

    That is group by group, round by round; the numbers of the rounds of I follow those of F.
    """
    group = np.repeat(np.arange(len(groups)), groups)
    forward = np.argsort(np.tile(group, num_rounds), kind="stable").astype(np.int32)
    return forward, forward + np.int32(num_rounds * sum(groups))


def num_timed(placement: Placement, num_microbatches: int) -> int:
    """How many candidates are timed: six of a small step, one of a large one."""
    return max(1, min(6, 8_000 // (placement.num_stages * num_microbatches)))


Step = tuple[int, ActionKind, int, int]
Orders = list[list[Step]]
"""Every rank's steps."""
Numbers = npt.NDArray[np.integer[Any]]

F, I, W = ActionKind.F, ActionKind.I, ActionKind.W


@dataclass(frozen=True, eq=False)
class Spread:
    """The F and I of every rank in the slots that their rounds give them.

    Attributes:
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


class _Steps(native_plan.View):
    _fields_ = [
        *((name, ctypes.c_int32) for name in ("num_ranks", "num_stages", "num_microbatches")),
        *((name, ctypes.c_void_p) for name in ("route", "first", "slot", "kind", "stage", "microbatch")),
        ("limit", ctypes.c_int64),
        *((name, ctypes.c_double) for name in ("forward", "backward_input", "backward_weight", "comm")),
    ]


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
    route = np.array(placement.routes[0], dtype=np.int32)
    arrays = route, spread.first, *spread.columns
    given = _Steps(placement.num_ranks, len(route), spread.num_microbatches, *arrays, limit, *times)
    rows, length = np.empty((3, len(spread.columns[0]) * 3 // 2), dtype=np.int32), ctypes.c_double()
    if not is_found(native_plan.function("fill")(given, rows, length)):
        return None
    ends = (spread.first * 3 // 2).tolist()
    return Filled([columns_of(rows[:, a:b].T) for a, b in zip(ends, ends[1:], strict=False)], length.value)


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


def even(placement: Placement, num_microbatches: int, hops: int, limit: int, seconds: Seconds) -> Iterator[Filled]:
    """The orders of even rounds that keep the limit: every round takes one and a half slots a hop, there and back.

    Within a group of microbatches the rounds of F start three slots apart (six in a wave, where a round visits every
    rank twice), and those of I between them, so that a rank has an F, an I and a W in three slots. Every hop has half a
    slot to spare, in both directions, which hides transfers and what I takes longer than W. What is tried is how far
    groups, the rounds of a microbatch, and its F and I are apart.

    Args:
        hops: stages of a round: as many as ranks in a loop, twice as many in a wave.
    """
    p, stages = placement.num_ranks, placement.num_stages
    rounds, last = stages // hops, _even_offsets(hops)[-1]
    # a wave's next round begins on the rank where the one before ended
    sooner_by = range(2 if hops > p else 1)
    choices = []
    for group in sorted({max(1, p // 2), (p + 1) // 2}):
        apart = max((3 * hops + 1) // 2, 3 * hops // p * group)  # a round, and a group's first rounds before its second
        for more, sooner, later in product(range(5), sooner_by, range(7)):
            backward = (apart - sooner) * (rounds - 1) + last + 1 + later
            period = max(3 * stages // p * group, rounds * apart) + more
            choices.append((later, group, period, apart - sooner, backward))
    choices.sort()
    most = max(12, _EVEN_STEPS // (2 * num_microbatches * stages))
    for _, *choice in choices[:most]:
        order = filled(_even_spread(placement, num_microbatches, hops, *choice), limit, seconds)
        if order is not None:
            yield order


def _even_offsets(hops: int) -> list[int]:
    """Of a round's stages: one and a half slots a hop, rounded up."""
    return [(3 * hop + 1) // 2 for hop in range(hops)]


def _even_spread(
    placement: Placement, num_microbatches: int, hops: int, group: int, period: int, apart: int, backward: int
) -> Spread:
    """The F and I of every rank.

    Args:
        group: microbatches of a group.
        period: slots from a group's first start to the next one's.
        apart: slots between the starts of two rounds of a microbatch, of F or of I.
        backward: slots from the start of a microbatch's first round of F to that of its first round of I.
    """
    microbatch = np.arange(num_microbatches, dtype=np.int64).reshape(-1, 1)
    number = np.arange(placement.num_stages // hops).reshape(-1, 1, 1)
    within = microbatch % group * (3 * hops // placement.num_ranks)
    start = microbatch // group * period + within + number * apart
    slots = np.stack([start, start + backward]) + np.array(_even_offsets(hops))
    stages = np.broadcast_to(hops * number + np.arange(hops), slots.shape[1:])
    kinds = np.array([int(F), int(I)]).reshape(2, 1, 1, 1)
    stages = np.stack([stages, placement.num_stages - 1 - stages])
    return spread_of(placement, num_microbatches, slots, kinds, stages, microbatch)


def shortest(name: str, placement: Placement, num_microbatches: int, found: Iterable[Filled]) -> Schedule:
    """The schedule of the orders that are done first, the first of several."""
    best = min(found, key=lambda one: one.makespan)
    return Schedule(name, placement, num_microbatches, best.columns)
