"""Searched zero bubble with one stage per rank: ZB-1P, ZB-2P and what lies between (arXiv 2401.10241, section 3).

The search is the paper's heuristic as sail-sg's zero-bubble repository runs it: as many forwards before the first I as
time and memory allow, then one F and one I a rank in turn, with a W wherever it fits into a wait or memory asks for it.
Three yes-or-no choices give eight orders; the one with the shortest span is taken, the first of equals.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from fastpipe.action import ActionKind
from fastpipe.checks import is_number
from fastpipe.placement import Placement
from fastpipe.schedule import Schedule
from fastpipe.schedules.family import COSTS, Family, Option, PerRank, per_rank
from fastpipe.schedules.words import columns_of

F, I, W = range(3)
KINDS = (ActionKind.F, ActionKind.I, ActionKind.W)


@dataclass(frozen=True)
class Problem:
    """What an order is searched for.

    Attributes:
        seconds: of F, I and W, each one per rank.
        limit: the activations that a rank may hold, one per rank.
        freed_by_input: the part of an activation that I frees; W frees the rest.
    """

    num_microbatches: int
    seconds: tuple[Sequence[float], Sequence[float], Sequence[float]]
    comm: float
    limit: Sequence[float]
    freed_by_input: float = 0.0

    @property
    def num_ranks(self) -> int:
        """How many ranks take part."""
        return len(self.limit)


class Attempt:
    """One order, built by appending to the ranks; every rank's clock runs along.

    Args:
        overshoot: whether the warm-up may delay the first I. No: the last forward must end before the I could start.
        backward_first: whether a rank that is two forwards ahead of the next may leave its forward out.
        fill: whether a wait shorter than a W is filled although a longer bubble exists elsewhere.
    """

    def __init__(self, problem: Problem, overshoot: bool, backward_first: bool, fill: bool) -> None:
        self.problem = problem
        self.overshoot, self.backward_first, self.fill = overshoot, backward_first, fill
        ranks = range(problem.num_ranks)
        self.orders: list[list[int]] = [[] for _ in ranks]
        self.ends: list[list[list[float]]] = [[[] for _ in ranks] for _ in KINDS]
        self.clock = [0.0 for _ in ranks]
        self.bubble = [0.0 for _ in ranks]
        self.longest = 0.0

    def run(self) -> float:
        """Build the order; its span, the longest time from a rank's first start to its last end."""
        self._warm_up()
        for mb in range(1, self.problem.num_microbatches):
            self._forwards()
            self._backwards(mb)
        ranks = range(self.problem.num_ranks)
        for rank in ranks:
            while self._count(W, rank) < self.problem.num_microbatches:
                self._put(W, rank)
        forward = self.problem.seconds[F]
        return max(self.ends[W][rank][-1] - self.ends[F][rank][0] + forward[rank] for rank in ranks)

    def _count(self, kind: int, rank: int) -> int:
        return len(self.ends[kind][rank])

    def _excess(self, rank: int) -> float:
        """What a further F would hold above the limit."""
        freed = self.problem.freed_by_input
        live = self._count(F, rank) - freed * self._count(I, rank) - (1 - freed) * self._count(W, rank)
        return live + 1 - self.problem.limit[rank]

    def _arrival(self, kind: int, rank: int) -> float:
        """When the input of the rank's next F or I is there; before everything where nothing is waited for."""
        source = rank - 1 if kind == F else rank + 1
        if kind == W or not 0 <= source < self.problem.num_ranks:
            return float("-inf")
        return self.ends[kind][source][self._count(kind, rank)] + self.problem.comm

    def _put(self, kind: int, rank: int) -> None:
        seconds = self.problem.seconds[kind][rank]
        busy = self.clock[rank] + seconds
        end = max(busy, self._arrival(kind, rank) + seconds)
        if self._count(F, rank):
            self.bubble[rank] += end - busy
            self.longest = max(self.longest, self.bubble[rank])
        self.clock[rank] = end
        self.ends[kind][rank].append(end)
        self.orders[rank].append(kind)

    def _warm_up(self) -> None:
        """One F on every rank, those that fit before its first I, and that I."""
        ranks = range(self.problem.num_ranks)
        for rank in ranks:
            self._put(F, rank)
        extra = self._warm_up_counts()
        for rank in ranks:
            for _ in range(extra[rank]):
                self._put(F, rank)
        for rank in reversed(ranks):
            self._put(I, rank)

    def _warm_up_counts(self) -> list[int]:
        """How many more F each rank starts with: fewer than the rank before it, unless both take all there are."""
        problem, last = self.problem, self.problem.num_ranks - 1
        extra = [0] * problem.num_ranks
        time = self.ends[F][last][0] + problem.seconds[I][last]
        for rank in reversed(range(last)):
            clock, seconds = self.clock[rank], problem.seconds[F][rank]
            while (
                1 + extra[rank] < problem.num_microbatches
                and 2 + extra[rank] <= problem.limit[rank]
                and not self._too_late(clock, seconds, time + problem.comm)
            ):
                clock += seconds
                extra[rank] += 1
            time = max(clock, time + problem.comm) + problem.seconds[I][rank]
        for rank in range(1, problem.num_ranks):
            if extra[rank] + 1 < problem.num_microbatches or extra[rank] > extra[rank - 1]:
                extra[rank] = max(0, min(extra[rank], extra[rank - 1] - 1))
        return extra

    def _too_late(self, clock: float, seconds: float, first_input: float) -> bool:
        return clock + seconds > first_input if self.overshoot else clock >= first_input

    def _forwards(self) -> None:
        """One F on every rank that wants one, unless a later rank leaves it out."""
        wanted = [self._wants_forward(rank) for rank in range(self.problem.num_ranks)]
        for rank in reversed(range(self.problem.num_ranks - 1)):
            wanted[rank] = wanted[rank] and wanted[rank + 1]
        for rank, wants in enumerate(wanted):
            if wants:
                while self._excess(rank) > 0:
                    self._put(W, rank)
                self._fill_wait(F, rank)
                self._put(F, rank)

    def _wants_forward(self, rank: int) -> bool:
        ahead = self._count(F, rank)
        if ahead >= self.problem.num_microbatches:
            return False
        after = rank + 1
        if not self.backward_first or after == self.problem.num_ranks or ahead < self._count(F, after) + 2:
            return True
        forward, backward, weight = self.problem.seconds
        back = self.clock[after] + forward[after] + backward[after] + self.problem.comm
        if self.clock[rank] >= back:
            return False
        needed = max(0, math.ceil(self._excess(rank) / (1 - self.problem.freed_by_input)))
        freeing = 0.0
        for _ in range(min(self._count(I, rank) - self._count(W, rank), needed)):
            freeing += weight[rank]
        if self.clock[rank] + forward[rank] + freeing <= back:
            return True
        return back - self.clock[rank] > self.longest - self.bubble[rank]

    def _backwards(self, mb: int) -> None:
        for rank in reversed(range(self.problem.num_ranks)):
            self._fill_wait(I, rank)
            if rank == 0 and self._count(F, rank) == self.problem.num_microbatches:
                while self._count(W, rank) < mb:
                    self._put(W, rank)
            self._put(I, rank)

    def _fill_wait(self, kind: int, rank: int) -> None:
        """Put W where the rank would wait: those that fit, and one more where a longer bubble does not hide it."""
        arrival, seconds = self._arrival(kind, rank), self.problem.seconds[W][rank]
        while self._has_weight(rank) and self.clock[rank] + seconds <= arrival:
            self._put(W, rank)
        if self._has_weight(rank) and self.clock[rank] < arrival:
            hidden = arrival - self.clock[rank] <= self.longest - self.bubble[rank]
            if self.fill or not hidden:
                self._put(W, rank)

    def _has_weight(self, rank: int) -> bool:
        return self._count(W, rank) < self._count(I, rank)


def search(problem: Problem) -> list[list[int]]:
    """Every rank's order of kinds."""
    attempts = [Attempt(problem, *choices) for choices in product((True, False), repeat=3)]
    return min(attempts, key=Attempt.run).orders


def generate(
    num_ranks: int,
    num_microbatches: int,
    forward: PerRank,
    backward_input: PerRank,
    backward_weight: PerRank,
    comm: float,
    memory_limit: PerRank | None,
    freed_by_input: float,
) -> Schedule:
    """The best of the eight orders.

    Raises:
        ValueError: for a sequence of costs that does not name every rank.
    """
    costs = {"forward": forward, "backward_input": backward_input, "backward_weight": backward_weight}
    seconds = [per_rank(name, value, num_ranks) for name, value in costs.items()]
    limit = per_rank("memory_limit", num_ranks if memory_limit is None else memory_limit, num_ranks)
    problem = Problem(num_microbatches, (seconds[F], seconds[I], seconds[W]), float(comm), limit, freed_by_input)
    columns = []
    for rank, order in enumerate(search(problem)):
        counts = [0, 0, 0]
        rows = []
        for kind in order:
            rows.append((KINDS[kind], rank, counts[kind]))
            counts[kind] += 1
        columns.append(columns_of(rows))
    return Schedule("zb_auto", Placement.loop(num_ranks), num_microbatches, columns)


def _is_limit(value: Any) -> bool:
    numbers = value if isinstance(value, Sequence) and not isinstance(value, str) else (value,)
    return value is None or (len(numbers) > 0 and all(is_number(number) and number >= 1 for number in numbers))


_LIMIT = Option(
    None,
    "live stage activations that a rank may hold until their W, at least 1, or one per rank; the number of ranks by "
    "default, and with less than that loop_zb with stages_per_rank=1 is far shorter",
    _is_limit,
)

_FREED = Option(
    0.0,
    "part of an activation that I frees, from 0 to less than 1, for memory_limit; 0.5 gives the paper's ZB-2P, and "
    "simulations count all of it until W",
    lambda value: is_number(value) and 0 <= value < 1,
)

ZB_AUTO = Family(
    "zb_auto",
    "zero bubble searched for given costs within a limit of the activations held until W (ZB-1P: as many as ranks)",
    "any ranks and microbatches",
    generate,
    COSTS | {"memory_limit": _LIMIT, "freed_by_input": _FREED},
)
