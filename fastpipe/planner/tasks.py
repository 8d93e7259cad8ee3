"""Tasks: the actions of a schedule as the search sees them, columns that Python and csrc/plan read alike.

A task is an action; what it waits for is a message of another rank (`source`), or a task of its own rank that comes
before it in every order (`local`): for the k-th microbatch of a stage the one before, the stage's own forward, and
what is handed over within the rank. That the microbatches of a stage keep their order loses nothing, as all cost the
same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fastpipe.action import ActionKind
from fastpipe.cost import CostModel
from fastpipe.placement import Placement
from fastpipe.program import Channel, ChannelKind, Op
from fastpipe.schedule import Schedule

Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float64]

NO_TASK = -1
SLACK = 1e-9
"""Of sums of bytes or of activations."""
_F, _B, _I, _W, _PAIR = (int(ActionKind[name]) for name in ("F", "B", "I", "W", "OVERLAP_F_B"))
_BACKWARD = 1
"""Of a part: B and I are one class, since what waits for the one waits for the other."""


@dataclass(frozen=True, eq=False)
class Tasks:
    """The tasks of a schedule, numbered rank by rank in its order.

    Attributes:
        first: the first task of every rank, and the number of tasks.
        source: ``(tasks, 2)``: the tasks of other ranks whose messages it waits for, or -1.
        transfer: ``(tasks, 2)``: the seconds that those take.
        local: ``(pairs, 2)``: tasks of one rank of which the first comes before the second.
        next: the task that does the same for the following microbatch, or -1.
        take: what a task holds from its start on, in the unit of `limit`.
        give: what its end releases.
    """

    schedule: Schedule
    first: Ints
    seconds: Floats
    source: Ints
    transfer: Floats
    local: Ints
    next: Ints
    take: Floats
    give: Floats
    limit: Floats

    @property
    def num_ranks(self) -> int:
        """How many ranks there are."""
        return len(self.first) - 1

    def __len__(self) -> int:
        return len(self.seconds)

    @property
    def start(self) -> Ints:
        """The schedule's own order."""
        return np.arange(len(self), dtype=np.int32)

    def ordered(self, order: Ints, name: str) -> Schedule:
        """The schedule whose ranks run their tasks in the given order."""
        old, columns = self.schedule, []
        for rank, rows in enumerate(old.columns):
            first, last = self.first[rank : rank + 2]
            columns.append(rows[:, order[first:last] - first])
        return Schedule(name, old.placement, old.num_microbatches, columns, old.options)

    def peaks(self, order: Ints) -> list[float]:
        """What every rank holds at most."""
        return _peaks(self.take[order], self.give[order], self.first)


def tasks_of(
    schedule: Schedule,
    cost: CostModel,
    held: Sequence[float],
    limit: Sequence[float],
    kept: Sequence[float] | None = None,
) -> Tasks:
    """The tasks of a schedule of F, B, I, W and fused pairs.

    Args:
        held: what a stage holds of one microbatch from the start of F to the end of W or B.
        kept: what a stage holds up to its backward, where it recomputes the rest; all unless given.
    """
    first = _first(schedule)
    rank_of = np.repeat(np.arange(schedule.num_ranks, dtype=np.int32), np.diff(first))
    rows = np.concatenate(schedule.columns, axis=1)
    parts = _Parts(rows, schedule.placement, schedule.num_microbatches)
    source, transfer, handed = _messages(parts, rank_of, schedule.placement, cost)
    local, following = _local(parts, rank_of, schedule.placement.num_routes == 1)
    take, give = _memory(rows, *_as_arrays(held, kept))
    return Tasks(
        schedule,
        first,
        _seconds(rows, cost, schedule.num_stages),
        source,
        transfer,
        np.ascontiguousarray(np.concatenate([handed, local]), dtype=np.int32),
        following,
        take,
        give,
        np.asarray(limit, dtype=np.float64),
    )


class _Parts:
    """The F, B, I and W of all tasks: which task does which, by (stage, microbatch)."""

    def __init__(self, rows: Ints, placement: Placement, num_microbatches: int) -> None:
        self.num_stages, self.shape = placement.num_stages, (placement.num_stages, num_microbatches)
        fused = rows[0] == _PAIR
        self.forward = self._table(rows, (rows[0] == _F) | fused)
        self.backward = self._table(rows, (rows[0] == _B) | (rows[0] == _I))
        numbers = np.flatnonzero(fused)
        self.backward[rows[3, numbers], rows[4, numbers]] = numbers
        self.weight = self._table(rows, rows[0] == _W)
        self.is_weight = rows[0] == _W

    def _table(self, rows: Ints, mask: npt.NDArray[np.bool_]) -> Ints:
        table = np.full(self.shape, NO_TASK, dtype=np.int32)
        numbers = np.flatnonzero(mask)
        table[rows[1, numbers], rows[2, numbers]] = numbers
        return table


def _seconds(rows: Ints, cost: CostModel, num_stages: int) -> Floats:
    table = np.stack(
        [cost.per_stage(n, num_stages) for n in ("forward", "backward", "backward_input", "backward_weight")]
    )
    fused = rows[0] == _PAIR
    seconds = table[np.where(fused, 0, rows[0]), rows[1]]
    if fused.any():
        pairs, which = np.unique(rows[[1, 3]][:, fused], axis=1, return_inverse=True)
        each = np.array([cost.compute_seconds(Op.OVERLAP_F_B, *pair) for pair in pairs.T.tolist()])
        seconds[fused] = each[which.ravel()]
    return np.ascontiguousarray(seconds)


def _messages(parts: _Parts, rank_of: Ints, placement: Placement, cost: CostModel) -> tuple[Ints, Floats, Ints]:
    """Sources and transfers by task, and the pairs of those that hand over within a rank."""
    source = np.full((len(rank_of), 2), NO_TASK, dtype=np.int32)
    transfer = np.zeros((len(rank_of), 2))
    handed: list[Ints] = []
    edges = []
    for stage in range(placement.num_stages - 1):
        edges.append((stage, stage + 1, ChannelKind.ACTIVATION, parts.forward))
        edges.append((stage + 1, stage, ChannelKind.GRADIENT, parts.backward))
    half = parts.shape[1] // placement.num_routes
    for number, route in enumerate(placement.routes):
        mine = slice(number * half, None if number + 1 == placement.num_routes else half)
        for maker, taker, kind, table in edges:
            makers, takers = table[maker, mine], table[taker, mine]
            known = (makers != NO_TASK) & (takers != NO_TASK)
            makers, takers = makers[known], takers[known]
            if route[maker] == route[taker]:
                handed.append(np.stack([makers, takers], axis=1))
                continue
            slot = (source[takers, 0] != NO_TASK).astype(np.int32)
            source[takers, slot] = makers
            transfer[takers, slot] = cost.transfer_seconds(Channel(route[maker], route[taker], kind), taker)
    return source, transfer, np.concatenate(handed) if handed else np.zeros((0, 2), dtype=np.int32)


def _local(parts: _Parts, rank_of: Ints, one_route: bool) -> tuple[Ints, Ints]:
    """Pairs of tasks of one rank that keep their order; and the next task of the same class."""
    pairs: list[Ints] = []
    following = np.full(len(rank_of), NO_TASK, dtype=np.int32)
    for table in (parts.weight, parts.backward, parts.forward):  # a fused pair follows its forward's line
        if one_route and not (table == NO_TASK).any():  # every line is of one rank and complete
            lines = np.sort(table, axis=1)
            pairs.append(np.stack([lines[:, :-1].ravel(), lines[:, 1:].ravel()], axis=1))
            following[lines[:, :-1]] = lines[:, 1:]
            continue
        for mine in _lines(table, rank_of):
            pairs.append(np.stack([mine[:-1], mine[1:]], axis=1))
            following[mine[:-1]] = mine[1:]
    # What adds to weights keeps its order, a B among the W too: the last bits of a gradient depend on it.
    mixes = bool((parts.weight != NO_TASK).any() and (parts.weight == NO_TASK).any())
    adding = np.where(parts.weight != NO_TASK, parts.weight, parts.backward)
    for mine in _lines(adding, rank_of) if mixes else ():
        mixed = parts.is_weight[mine[:-1]] != parts.is_weight[mine[1:]]
        pairs.append(np.stack([mine[:-1], mine[1:]], axis=1)[mixed])
    for before, after in ((parts.forward, parts.backward), (parts.backward, parts.weight)):
        known = (before != NO_TASK) & (after != NO_TASK)
        pairs.append(np.stack([before[known], after[known]], axis=1))
    return np.concatenate(pairs), following


def _lines(table: Ints, rank_of: Ints) -> Iterator[Ints]:
    """Of every stage and rank, the tasks of a table in the order of the rank."""
    for line in table:
        tasks = line[line != NO_TASK]
        for rank in np.unique(rank_of[tasks]).tolist():
            yield np.sort(tasks[rank_of[tasks] == rank])


def held_peaks(schedule: Schedule, held: Sequence[float], kept: Sequence[float] | None = None) -> list[float]:
    """What every rank holds at most, given what its stages hold of one microbatch, and what up to the backward."""
    take, give = _memory(np.concatenate(schedule.columns, axis=1), *_as_arrays(held, kept))
    return _peaks(take, give, _first(schedule))


def _peaks(take: Floats, give: Floats, first: Ints) -> list[float]:
    """The most that is held on every rank."""
    steps, ends = np.stack([take, -give], axis=1), first.tolist()
    return [float(np.cumsum(steps[a:b].ravel()).max(initial=0.0)) for a, b in zip(ends, ends[1:], strict=False)]


def _first(schedule: Schedule) -> Ints:
    """The first action of every rank, and the number of all."""
    counts = [rows.shape[1] for rows in schedule.columns]
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)


def fits(peaks: Sequence[float], limits: Sequence[float]) -> bool:
    """Whether every rank holds no more than it may."""
    return all(peak <= limit + SLACK * max(1.0, limit) for peak, limit in zip(peaks, limits, strict=True))


def _as_arrays(held: Sequence[float], kept: Sequence[float] | None) -> tuple[Floats, Floats]:
    whole = np.asarray(held, dtype=np.float64)
    return whole, whole if kept is None else np.asarray(kept, dtype=np.float64)


def _memory(rows: Ints, held: Floats, kept: Floats) -> tuple[Floats, Floats]:
    """What is taken at every start, and given back at every end: the rest of what is kept comes with I or B."""
    take, give = np.zeros(rows.shape[1]), np.zeros(rows.shape[1])
    fused = rows[0] == _PAIR
    forwards, ends = (rows[0] == _F) | fused, (rows[0] == _B) | (rows[0] == _W)
    begun = (rows[0] == _B) | (rows[0] == _I)
    take[forwards] = kept[rows[1, forwards]]
    take[begun] = (held - kept)[rows[1, begun]]
    take[fused] += (held - kept)[rows[3, fused]]
    give[ends] = held[rows[1, ends]]
    give[fused] = held[rows[3, fused]]
    return take, give
