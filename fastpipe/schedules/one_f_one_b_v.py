"""1F1B-V: V-Min's memory without split backwards (arXiv 2405.15362, appendix; sail-sg's zero-bubble repository).

Every rank of the V repeats a block of six slots: F down, F up, then two backwards of two slots each. What comes before
the first full repetition and after the last is moved into earlier holes, forwards only where the memory of the
busiest rank allows it.
"""

from __future__ import annotations

from collections.abc import Iterator

from fastpipe.action import ActionKind
from fastpipe.placement import Placement
from fastpipe.schedule import Schedule
from fastpipe.schedules.family import IGNORED_COSTS, Family
from fastpipe.schedules.words import columns_of

F_DOWN, F_UP, B_UP, B_DOWN, END_UP, END_DOWN = range(6)
"""What a rank does for one microbatch; a backward is two slots, its beginning and its end."""
PERIOD = 6
FREE = -1


def block_slots(num_ranks: int) -> list[list[int]]:
    """The first slot of everything on every rank.

    Backwards follow one another in runs of three ranks, so that no two kinds meet in a slot modulo the period.
    """
    p = num_ranks
    slots = [[PERIOD + 1 + i, PERIOD + 2 * p - i] + 4 * [0] for i in range(p)]
    now = PERIOD + 2 * p + (4 if p % 3 == 0 else 1)
    run = -(p + 2) % 3
    for kind, ranks in ((B_UP, range(p)), (B_DOWN, reversed(range(p)))):
        for rank in ranks:
            slots[rank][kind], slots[rank][kind + 2] = now, now + 1
            run = (run + 1) % 3
            now += 2 if run else 5
    return slots


class _Board:
    """What every rank does in every slot, and how many activations it then holds."""

    def __init__(self, num_ranks: int, num_microbatches: int) -> None:
        self.num_ranks = num_ranks
        times = [PERIOD * mb for mb in range(num_microbatches)]
        self.at = [[[first + time for time in times] for first in rank] for rank in block_slots(num_ranks)]
        length = 2 + max(row[-1] for rank in self.at for row in rank)
        self.kind = [[FREE] * length for _ in self.at]
        for rank, _, kind, slot in self._placed():
            self.kind[rank][slot] = kind
        self.live = [list(self._levels(row)) for row in self.kind]
        self.limit = max(map(max, self.live))

    def _placed(self) -> Iterator[tuple[int, int, int, int]]:
        for rank, rows in enumerate(self.at):
            for kind, row in enumerate(rows):
                for mb, slot in enumerate(row):
                    yield rank, mb, kind, slot

    def _levels(self, row: list[int]) -> Iterator[int]:
        live = 0
        for kind in row:
            live += (kind in (F_DOWN, F_UP)) - (kind in (END_UP, END_DOWN))
            yield live

    def squeeze(self) -> None:
        """Move everything to the earliest holes, in the order of slots."""
        for slot, rank, kind, mb in sorted((slot, rank, kind, mb) for rank, mb, kind, slot in self._placed()):
            to = self._hole(slot, rank, kind, self._earliest(rank, kind, mb))
            if to < slot:
                self._move(slot, to, rank, kind)
                self.at[rank][kind][mb] = to

    def _earliest(self, rank: int, kind: int, mb: int) -> int:
        """The slot after what it waits for: the microbatch before, its own last step, its neighbour."""
        at, last = self.at, self.num_ranks - 1
        after = at[rank][kind][mb - 1] if mb else FREE
        if kind in (END_UP, END_DOWN):
            after = max(after, at[rank][kind - 2][mb])
        elif kind == F_DOWN:
            after = max(after, at[rank - 1][F_DOWN][mb] if rank else FREE)
        elif kind == F_UP:
            after = max(after, at[rank][F_DOWN][mb] if rank == last else at[rank + 1][F_UP][mb])
        elif kind == B_UP:
            after = max(after, at[rank - 1][END_UP][mb] if rank else at[rank][F_UP][mb])
        else:
            after = max(after, at[rank][END_UP][mb] if rank == last else at[rank + 1][END_DOWN][mb])
        return after + 1

    def _hole(self, slot: int, rank: int, kind: int, first: int) -> int:
        """The first hole from ``first`` on (two slots for a backward), or ``slot`` when there is none before it."""
        row, live = self.kind[rank], self.live[rank]
        hole = first
        while hole < slot and (row[hole] != FREE or (kind in (B_UP, B_DOWN) and row[hole + 1] != FREE)):
            hole += 1
        if kind in (F_DOWN, F_UP):
            first, hole = hole, slot
            while hole > first and live[hole - 1] < self.limit:
                hole -= 1
            while hole < slot and row[hole] != FREE:
                hole += 1
        return hole

    def _move(self, slot: int, to: int, rank: int, kind: int) -> None:
        self.kind[rank][slot], self.kind[rank][to] = FREE, kind
        change = (kind in (F_DOWN, F_UP)) - (kind in (END_UP, END_DOWN))
        if change:
            live = self.live[rank]
            live[to:slot] = [level + change for level in live[to:slot]]


def generate(num_ranks: int, num_microbatches: int, **costs: float) -> Schedule:
    """The squeezed repetition of the block."""
    board = _Board(num_ranks, num_microbatches)
    board.squeeze()
    columns = []
    for rank, rows in enumerate(board.at):
        up = 2 * num_ranks - 1 - rank
        what = ((ActionKind.F, rank), (ActionKind.F, up), (ActionKind.B, up), (ActionKind.B, rank))
        placed = sorted((slot, kind, mb) for kind, row in enumerate(rows[:4]) for mb, slot in enumerate(row))
        columns.append(columns_of([(*what[kind], mb) for _, kind, mb in placed]))
    return Schedule("1f1b_v", Placement.v(num_ranks), num_microbatches, columns)


ONE_F_ONE_B_V = Family(
    "1f1b_v",
    "V placement, full backwards, about two thirds of 1F1B's memory",
    "any ranks and microbatches",
    generate,
    IGNORED_COSTS,
    stages_per_rank=2,
)
