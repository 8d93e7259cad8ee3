"""V-Half and V-Min: a building block repeated, in half or a third of 1F1B's memory (arXiv 2405.15362, section 4).

Every rank of a V repeats one block of six slots: a forward down and up the V, I up and down, and two W in the holes.
Where the block puts them decides how long an activation lives. The repetition is then squeezed (every action as early
as its inputs allow, order kept), and warm-up and cool-down are reordered without more memory, as the reference
(sail-sg's zero-bubble repository) does it: once with the W in place, and once with the cool-down alone and the W
flowing into whatever holes are left.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator

import numpy as np

from fastpipe.placement import Placement
from fastpipe.schedule import Schedule
from fastpipe.schedules.family import IGNORED_COSTS, Family
from fastpipe.schedules.zbv import v_columns

F0, F1, I1, I0, W = range(5)
"""What a rank does for one microbatch, in the order of the V; W is of either stage."""
_FROM = (-1, 1, -1, 1)
"""Which neighbour F0, F1, I1 and I0 come from."""
PERIOD = 6
Offsets = list[tuple[int, int, int, int]]
Slots = list[list[int]]
"""Of one rank: for every kind, the slot of every microbatch."""


def v_half_offsets(num_ranks: int) -> Offsets:
    """The first slot of F0, F1, I1 and I0 on every rank, for half of 1F1B's memory."""
    p, gap = num_ranks, 0 if num_ranks % 2 else 3
    return [(2 * i, 3 * p - i - 2, 3 * p + gap + 2 * i - 1, 6 * p + gap - i - 2) for i in range(p)]


def v_min_offsets(num_ranks: int) -> Offsets:
    """The same for a third of 1F1B's memory."""
    p, gap = num_ranks, 0 if num_ranks % 3 else 2
    return [(i, 2 * p - i - 1, 2 * p + gap + i, 4 * p + gap - i - 1) for i in range(p)]


def repeat(offsets: Offsets, num_microbatches: int) -> list[list[tuple[int, int]]]:
    """Every rank's order of (kind, microbatch); W of I1 is kind 4 and W of I0 kind 5."""
    ranks = [[list(range(offset, offset + PERIOD * num_microbatches, PERIOD)) for offset in block] for block in offsets]
    ranks = [[*slots, _merged_holes(slots)] for slots in ranks]
    ranks = _squeeze(_Reorder(ranks, weights=True).run())
    ranks = _Reorder([slots[:W] for slots in ranks], weights=False).run()
    ranks = _squeeze([[*slots, _merged_holes(slots)] for slots in ranks])
    orders = []
    for slots in ranks:
        split = [*slots[:W], *_holes(slots[:W], split=True)]
        placed = sorted((slot, kind, mb) for kind, row in enumerate(split) for mb, slot in enumerate(row))
        orders.append([(kind, mb) for _, kind, mb in placed])
    return orders


def _holes(slots: Slots, split: bool) -> tuple[list[int], list[int]]:
    """The slots of W: the first holes after their I, those of I1 before those of I0 when they are split."""
    found: tuple[list[int], list[int]] = ([], [])
    filled = _row_of(slots)
    waiting, end = [0, 0], len(filled) - 1
    for slot, kind in enumerate(filled):
        if kind < 0:
            which = 0 if waiting[0] else 1
            if waiting[which]:
                found[which].append(slot)
                waiting[which] -= 1
        elif kind >= I1:
            waiting[kind - I1 if split else 0] += 1
    for which in (0, 1):
        found[which].extend(range(end + 1, end + 1 + waiting[which]))
        end += waiting[which]
    return found


def _row_of(slots: Slots) -> list[int]:
    """The kind in every slot, or -1."""
    row = [-1] * (max(row[-1] for row in slots) + 1)
    for kind, places in enumerate(slots):
        for slot in places:
            row[slot] = kind
    return row


def _merged_holes(slots: Slots) -> list[int]:
    return _holes(slots, split=False)[0]


def _in_time_order(ranks: list[Slots]) -> Iterator[tuple[int, int, int, int]]:
    """(slot, rank, kind, microbatch) of everything, ascending."""
    rows = [(rank, kind, len(row)) for rank, slots in enumerate(ranks) for kind, row in enumerate(slots)]
    lengths = [length for _, _, length in rows]
    rank, kind = np.repeat(np.array(rows, dtype=np.int64)[:, :2], lengths, axis=0).T
    mb = np.concatenate([np.arange(length) for length in lengths])
    slot = np.concatenate([row for slots in ranks for row in slots])
    order = np.lexsort((mb, kind, rank, slot))
    return zip(*(column[order].tolist() for column in (slot, rank, kind, mb)), strict=True)


def _earliest(ranks: list[Slots], rank: int, kind: int, mb: int) -> int:
    """The first slot after what an action waits for: its neighbour, its own last step, the microbatch before."""
    own = ranks[rank]
    last = own[kind][mb - 1] if mb else -1
    if kind == W:
        return last + 1
    neighbour = rank + _FROM[kind]
    if 0 <= neighbour < len(ranks):
        last = max(last, ranks[neighbour][kind][mb])
    return (max(last, own[kind - 1][mb]) if kind > F0 else last) + 1


def _squeeze(ranks: list[Slots]) -> list[Slots]:
    """Every action as early as its inputs allow, the order on every rank kept."""
    squeezed: list[Slots] = [[[] for _ in slots] for slots in ranks]
    free = [0] * len(ranks)
    for _, rank, kind, mb in _in_time_order(ranks):
        slot = max(free[rank], _earliest(squeezed, rank, kind, mb))
        squeezed[rank][kind].append(slot)
        free[rank] = slot + 1
    return squeezed


class _Rank:
    """What a rank does in every slot, and the activations it then holds: with W in slots of their own, or flowing.

    A W that flows takes the first slot after its I in which nothing else is done.
    """

    def __init__(self, slots: Slots, weights: bool) -> None:
        self.weights = weights
        self.kind = _row_of(slots)
        self.done = [False] * len(self.kind)
        self.live = [0] * len(self.kind)
        self.waiting = [0] * len(self.kind)
        for slot, (live, waiting) in enumerate(self._levels(0)):
            self.live[slot], self.waiting[slot] = live, waiting

    def _levels(self, first: int) -> Iterator[tuple[int, int]]:
        """Live activations, and W that wait for a hole, after every slot from ``first`` on."""
        live, waiting = (self.live[first - 1], self.waiting[first - 1]) if first else (0, 0)
        for kind in self.kind[first:]:
            if kind in (F0, F1):
                live += 1
            elif kind == W or (kind < 0 and waiting):
                live -= 1
                waiting -= not self.weights
            elif kind > 0:
                waiting += not self.weights
            yield live, waiting

    def move(self, slot: int, to: int, limit: int) -> bool:
        """Move an action to an earlier free slot, if no more than ``limit`` activations live then."""
        self.kind[to], self.kind[slot] = self.kind[slot], -1
        changed = []
        for at, level in enumerate(self._levels(to), to):
            if at >= slot and level == (self.live[at], self.waiting[at]):
                break
            if level[0] > limit:
                self.kind[to], self.kind[slot] = -1, self.kind[to]
                return False
            changed.append(level)
        for at, (live, waiting) in enumerate(changed, to):
            self.live[at], self.waiting[at] = live, waiting
        return True


class _Reorder:
    """Moves the actions of warm-up and cool-down into earlier holes, within the memory of the busiest rank.

    Args:
        ranks: the slots; W among them when ``weights``.
        weights: whether W stay where they are put, and the warm-up is reordered too.
    """

    def __init__(self, ranks: list[Slots], weights: bool) -> None:
        self.ranks = ranks
        self.weights = weights
        self.boards = [_Rank(slots, weights) for slots in ranks]
        self.limit = max(max(board.live) for board in self.boards)
        self.inputs: list[list[int]] = [[] for _ in ranks]

    def run(self) -> list[Slots]:
        steady = done = False
        last = len(self.ranks[0][F0]) - 1
        for slot, rank, kind, mb in _in_time_order(self.ranks):
            steady = steady or (rank == 0 and kind == I0)
            fixed = steady and not done
            done = done or (steady and kind == F0 and mb == last)
            if fixed or not (done or self.weights):
                self.boards[rank].done[slot] = True
            else:
                self._advance(slot, rank, kind, mb)
            if kind in (I1, I0):
                insort(self.inputs[rank], self.ranks[rank][kind][mb])
        return self.ranks

    def _advance(self, slot: int, rank: int, kind: int, mb: int) -> None:
        """Move one action to the earliest hole after its inputs that needs no more memory."""
        board = self.boards[rank]
        first = _earliest(self.ranks, rank, kind, mb)
        if kind == W:
            first = max(first, self.inputs[rank][mb] + 1)
        if self.weights and kind in (F0, F1):
            first = self._after_full(board, first, slot)
        for hole in range(first, slot):
            if not board.done[hole] and board.move(slot, hole, self.limit):
                slot = hole
                break
        self.ranks[rank][kind][mb] = slot
        board.done[slot] = True

    def _after_full(self, board: _Rank, first: int, slot: int) -> int:
        """The slot after the last one in which the memory is full: a forward cannot go past it."""
        while slot > first and board.live[slot - 1] < self.limit:
            slot -= 1
        return slot


def generate_half(num_ranks: int, num_microbatches: int, **costs: float) -> Schedule:
    """V-Half."""
    return _schedule("v_half", v_half_offsets(num_ranks), num_microbatches)


def generate_min(num_ranks: int, num_microbatches: int, **costs: float) -> Schedule:
    """V-Min."""
    return _schedule("v_min", v_min_offsets(num_ranks), num_microbatches)


def _schedule(name: str, offsets: Offsets, num_microbatches: int) -> Schedule:
    columns = v_columns(repeat(offsets, num_microbatches))
    return Schedule(name, Placement.v(len(offsets)), num_microbatches, columns)


V_HALF = Family(
    "v_half",
    "V placement, split backwards, about half of 1F1B's memory",
    "any ranks and microbatches",
    generate_half,
    IGNORED_COSTS,
    stages_per_rank=2,
)
V_MIN = Family(
    "v_min",
    "V placement, split backwards, about a third of 1F1B's memory",
    "any ranks and microbatches",
    generate_min,
    IGNORED_COSTS,
    stages_per_rank=2,
)
