"""When every task of an order starts and ends: longest ways, without lowering. csrc/plan/retime.cpp does it sooner.

The times are those of `fastpipe.simulate` with lanes of their own for every channel, receives posted one task ahead
and taken in the order in which they were sent; a message that has to wait for another of its lane comes later there.
The two languages add and compare the same numbers in the same order, so that a search takes the same way in both.
"""

from __future__ import annotations

from collections.abc import Sequence

from fastpipe.planner.stale import NEVER, Stale
from fastpipe.planner.tasks import NOBODY, Ints, Tasks

TINY = 1e-9
"""Of the longest task's seconds: less may be lost when it is added to a time."""
MOST_RENEWALS = 8
"""Of a task in a trial: what waits for itself would be renewed for ever."""
Windows = dict[int, tuple[int, int]]
"""By rank: the first and the last position whose tasks changed."""
SLOPE = 0.1
"""How much of the mean of all ranks' measures the score has, so that a plateau has a slope."""


class Lines:
    """The tasks' columns as Python's own numbers, and their lists of neighbours."""

    def __init__(self, tasks: Tasks) -> None:
        self.num_ranks, self.size = tasks.num_ranks, len(tasks)
        self.first: list[int] = tasks.first.tolist()
        self.seconds: list[float] = tasks.seconds.tolist()
        self.next: list[int] = tasks.next.tolist()
        self.take: list[float] = tasks.take.tolist()
        self.give: list[float] = tasks.give.tolist()
        self.limit: list[float] = tasks.limit.tolist()
        self.rank_of = [rank for rank in range(self.num_ranks) for _ in range(*self.first[rank : rank + 2])]
        self.sources: list[list[tuple[int, float]]] = [[] for _ in range(self.size)]
        self.consumers: list[list[int]] = [[] for _ in range(self.size)]
        self.before: list[list[int]] = [[] for _ in range(self.size)]
        self.after: list[list[int]] = [[] for _ in range(self.size)]
        for task, (sources, seconds) in enumerate(zip(tasks.source.tolist(), tasks.transfer.tolist(), strict=True)):
            for source, transfer in zip(sources, seconds, strict=True):
                if source != NOBODY:
                    self.sources[task].append((source, transfer))
                    self.consumers[source].append(task)
        for earlier, later in tasks.local.tolist():
            self.before[later].append(earlier)
            self.after[earlier].append(later)


class Retimer:
    """Starts and ends by task of an order that changes.

    Args:
        lines: the tasks.
        order: position by position, the ranks one after the other; the caller's.
        place: the position of every task; the caller's.
        span: whether what is measured of a rank begins with its own start.
    """

    def __init__(self, lines: Lines, order: list[int], place: list[int], span: bool) -> None:
        self.lines, self.order, self.place, self.span = lines, order, place, span
        size, ranks = lines.size, lines.num_ranks
        self.starts, self.ends = [0.0] * size, [0.0] * size
        self.trial_starts, self.trial_ends = [0.0] * size, [0.0] * size
        self.tails = [0.0] * size
        self.stale, self.changed, self.renewals = Stale(ranks, size), list[int](), [0] * size
        self.lag = max(lines.seconds, default=0.0)
        """For so long a rank's are renewed before another's."""
        sends = [seconds for task, seconds in enumerate(lines.seconds) if lines.consumers[task]]
        self.rings_hide = min(sends, default=1.0) <= TINY * self.lag
        """Tasks take no time, so renewing what waits for itself may come to an end."""
        self.position, self.blocked_on = [0] * ranks, [NOBODY] * ranks
        self.ready: list[int] = []
        self.objective = self.score = self.trial_objective = self.trial_score = 0.0

    def run(self) -> bool:
        """Time the whole order; False if it cannot run."""
        if not self._sweep():
            return False
        self._judge()
        self.starts[:], self.ends[:] = self.trial_starts, self.trial_ends
        self.objective, self.score = self.trial_objective, self.trial_score
        self.stale.times[:] = [self.starts[task] for task in self.order]
        return True

    def attempt(self, windows: Windows, settled: float, most: float) -> bool:
        """Time the order after a change.

        By the time at which the task of a position started before, what a task depends on is settled before it, or
        nearly: what comes after it makes it stale again. In an order that cannot run that would never end.

        Args:
            windows: the positions that changed.
            settled: the old end of the last task that moved.
            most: a bound of the score.

        Returns:
            False, and nothing has changed, if it cannot run or its score is above the bound.
        """
        for rank, (low, high) in windows.items():
            self._mark(low, high + 2, rank)
        # A bound of the objective that goes with the bound of the score, as if the slope's part of it stayed.
        if self._settle(settled, most - (self.score - self.objective)) and (not self.rings_hide or self._sweep()):
            self._judge()
            if self.trial_score <= most:
                return True
        self._restore()
        return False

    def keep(self, windows: Windows) -> None:
        """Make the last attempt, at these positions, what holds."""
        for task in self.changed:
            self.starts[task], self.ends[task] = self.trial_starts[task], self.trial_ends[task]
            self.renewals[task] = 0
            self.stale.times[self.place[task]] = self.starts[task]
        for low, high in windows.values():
            for position in range(low, high + 1):
                self.stale.times[position] = self.starts[self.order[position]]
        self.changed.clear()
        self.objective, self.score = self.trial_objective, self.trial_score

    def _restore(self) -> None:
        for task in self.changed:
            self.trial_starts[task], self.trial_ends[task] = self.starts[task], self.ends[task]
            self.renewals[task] = 0
        self.changed.clear()
        self.stale.clear()

    def _settle(self, settled: float, most: float) -> bool:
        stale = self.stale
        while (rank := stale.earliest_rank()) is not None:
            until = stale.time(rank) + self.lag
            while stale.time(rank) <= until:
                if not self._renew(stale.take(rank), rank, settled, most):
                    return False
        return True

    def _renew(self, position: int, rank: int, settled: float, most: float) -> bool:
        """What started after the change had settled has the tail it had: a delay that reaches it is a delay of the
        end."""
        task = self.order[position]
        start = self._start(task, position, self.lines.first[rank])
        if start == self.trial_starts[task]:
            return True
        end = start + self.lines.seconds[task]
        if self.starts[task] >= settled and end + self.tails[task] > most:
            return False
        self.renewals[task] += 1
        if self.renewals[task] > MOST_RENEWALS:
            return False
        self.changed.append(task)
        self.trial_starts[task], self.trial_ends[task] = start, end
        self._mark(position + 1, position + 2, rank)
        for consumer in self.lines.consumers[task]:
            self.stale.mark(self.place[consumer], self.lines.rank_of[consumer])
        return True

    def _mark(self, low: int, high: int, rank: int) -> None:
        for position in range(low, min(high + 1, self.lines.first[rank + 1])):
            self.stale.mark(position, rank)

    def _sweep(self) -> bool:
        ranks = range(self.lines.num_ranks)
        self.position[:] = self.lines.first[:-1]
        self.blocked_on[:] = [NOBODY for _ in ranks]
        self.ready[:] = ranks
        while self.ready:
            self._advance(self.ready.pop())
        return all(self.position[rank] == self.lines.first[rank + 1] for rank in ranks)

    def _advance(self, rank: int) -> None:
        """Time a rank until it waits."""
        first, last = self.lines.first[rank : rank + 2]
        for position in range(self.position[rank], last):
            task = self.order[position]
            self.position[rank] = position
            if self._waits(task):
                return
            start = self._start(task, position, first)
            self.trial_starts[task], self.trial_ends[task] = start, start + self.lines.seconds[task]
            for consumer in self.lines.consumers[task]:
                other = self.lines.rank_of[consumer]
                if self.blocked_on[other] == task:
                    self.blocked_on[other] = NOBODY
                    self.ready.append(other)
        self.position[rank] = last

    def _waits(self, task: int) -> bool:
        for source, _ in self.lines.sources[task]:
            if self.place[source] >= self.position[self.lines.rank_of[source]]:
                self.blocked_on[self.lines.rank_of[task]] = source
                return True
        return False

    def _start(self, task: int, position: int, first: int) -> float:
        """A receive is posted when the task before the one before has ended; a transfer starts when both ends are
        there."""
        ends, order = self.trial_ends, self.order
        start = ends[order[position - 1]] if position > first else 0.0
        for source, transfer in self.lines.sources[task]:
            posted = ends[order[position - 2]] if position - first >= 2 else 0.0
            start = max(start, max(ends[source], posted) + transfer)
        return start

    def _judge(self) -> None:
        worst = total = 0.0
        for rank in range(self.lines.num_ranks):
            first, last = self.lines.first[rank : rank + 2]
            if first == last:
                continue
            begin = self.trial_starts[self.order[first]] if self.span else 0.0
            measure = self.trial_ends[self.order[last - 1]] - begin
            worst = max(worst, measure)
            total += measure
        self.trial_objective = worst
        self.trial_score = worst + SLOPE * (total / self.lines.num_ranks)

    def _base(self, rank: int) -> float:
        return self.starts[self.order[self.lines.first[rank]]] if self.span else 0.0

    def find_tails(self) -> None:
        """The longest way from the end of every task to the end of all: what a delay of it does."""
        first, ranks = self.lines.first, range(self.lines.num_ranks)
        self.tails[:] = [-NEVER] * self.lines.size
        self.position[:] = [last - 1 for last in first[1:]]
        self.blocked_on[:] = [NOBODY for _ in ranks]
        ready = list(ranks)
        while ready:
            rank = ready.pop()
            while self.position[rank] >= first[rank] and self._retreat(rank, ready):
                self.position[rank] -= 1

    def _retreat(self, rank: int, ready: list[int]) -> bool:
        position, tails, lines = self.position[rank], self.tails, self.lines
        task = self.order[position]
        if position + 1 < lines.first[rank + 1]:
            after = self.order[position + 1]
            tail = lines.seconds[after] + tails[after]
        else:
            tail = -self._base(rank)
        for consumer in lines.consumers[task]:
            if tails[consumer] == -NEVER:
                self.blocked_on[rank] = consumer
                return False
            sources = lines.sources[consumer]
            transfer = sources[0][1] if sources[0][0] == task else sources[1][1]
            tail = max(tail, transfer + lines.seconds[consumer] + tails[consumer])
        tails[task] = tail
        for source, _ in lines.sources[task]:
            other = lines.rank_of[source]
            if self.blocked_on[other] == task:
                self.blocked_on[other] = NOBODY
                ready.append(other)
        return True

    def path(self) -> list[int]:
        """The tasks of the longest way, last to first."""
        task, worst = NOBODY, -1.0
        for rank in range(self.lines.num_ranks):
            first, last = self.lines.first[rank : rank + 2]
            if first == last:
                continue
            end = self.order[last - 1]
            measure = self.ends[end] - self._base(rank)
            if measure > worst:
                worst, task = measure, end
        found = []
        while task != NOBODY:
            found.append(task)
            task = self._reason(task)
        return found

    def _reason(self, task: int) -> int:
        """What it waited for last: the task before it on its rank, a message, or the room for one."""
        position, first, start = self.place[task], self.lines.first[self.lines.rank_of[task]], self.starts[task]
        if position > first and self.ends[self.order[position - 1]] == start:
            return self.order[position - 1]
        for source, transfer in self.lines.sources[task]:
            if self.ends[source] + transfer == start:
                return source
        return self.order[position - 2] if position - first >= 2 and start > 0.0 else NOBODY


def places(order: list[int]) -> list[int]:
    """The position of every task."""
    place = [0] * len(order)
    for position, task in enumerate(order):
        place[task] = position
    return place


def retime(tasks: Tasks, order: Ints) -> tuple[Sequence[float], Sequence[float]] | None:
    """Starts and ends of every task, or None if the order cannot run."""
    lines = Lines(tasks)
    as_list = order.tolist()
    retimer = Retimer(lines, as_list, places(as_list), span=False)
    return (retimer.starts, retimer.ends) if retimer.run() else None
