"""List scheduling, and the times of an order, where there is no planning library: what `plan` needs at least.

The library does both sooner, and anneals (csrc/plan/construct.cpp, retime.cpp, search.cpp). An order's times are those
of `fastpipe.simulate` with a lane for every channel and receives posted one task ahead, found without lowering it.
"""

from __future__ import annotations

import heapq

import numpy as np

from fastpipe.planner.tasks import NOBODY, SLACK, Floats, Ints, Tasks

_NEVER = float("inf")


class _Lists:
    """The tasks' columns as Python's own numbers, and the neighbours of every task."""

    def __init__(self, tasks: Tasks) -> None:
        self.num_ranks, self.size = tasks.num_ranks, len(tasks)
        self.first: list[int] = tasks.first.tolist()
        self.seconds: list[float] = tasks.seconds.tolist()
        self.rank_of = [rank for rank in range(self.num_ranks) for _ in range(*self.first[rank : rank + 2])]
        self.sources: list[list[tuple[int, float]]] = [[] for _ in range(self.size)]
        self.consumers: list[list[int]] = [[] for _ in range(self.size)]
        for task, (sources, seconds) in enumerate(zip(tasks.source.tolist(), tasks.transfer.tolist(), strict=True)):
            for source, transfer in zip(sources, seconds, strict=True):
                if source != NOBODY:
                    self.sources[task].append((source, transfer))
                    self.consumers[source].append(task)


def retime(tasks: Tasks, order: Ints) -> tuple[Floats, Floats] | None:
    """Starts and ends of every task, or None if the order cannot run.

    Args:
        tasks: what is ordered.
        order: the tasks position by position, the ranks one after the other.
    """
    lists, placed = _Lists(tasks), order.tolist()
    starts, ends = [0.0] * lists.size, [_NEVER] * lists.size
    position, waits_for = lists.first[:-1], [NOBODY] * lists.num_ranks
    ready = list(range(lists.num_ranks))
    while ready:
        rank = ready.pop()
        first, last = lists.first[rank : rank + 2]
        while position[rank] < last:
            at, task = position[rank], placed[position[rank]]
            missing = [source for source, _ in lists.sources[task] if ends[source] == _NEVER]
            if missing:
                waits_for[rank] = missing[0]
                break
            # a receive is posted when the task before the one before has ended
            posted = ends[placed[at - 2]] if at - first >= 2 else 0.0
            start = ends[placed[at - 1]] if at > first else 0.0
            for source, transfer in lists.sources[task]:
                start = max(start, max(ends[source], posted) + transfer)
            starts[task], ends[task] = start, start + lists.seconds[task]
            position[rank] += 1
            for other in {lists.rank_of[consumer] for consumer in lists.consumers[task]}:
                if waits_for[other] == task:
                    waits_for[other] = NOBODY
                    ready.append(other)
    return (np.array(starts), np.array(ends)) if position == lists.first[1:] else None


class Listing:
    """Builds one order: a rank that is free starts the task of the lowest key among those that may run.

    Args:
        tasks: what is ordered.
        key: of every task; the lowest goes first.
        reserve: what has to stay free behind every task that takes memory, in the unit of the limit.
        patience: how long a better task is waited for, in durations of the one that could run now.
    """

    def __init__(self, tasks: Tasks, key: Floats, reserve: Floats, patience: float) -> None:
        self.lists, self.patience = _Lists(tasks), patience
        self.key: list[float] = key.tolist()
        self.reserve: list[float] = reserve.tolist()
        self.next: list[int] = tasks.next.tolist()
        self.take: list[float] = tasks.take.tolist()
        self.give: list[float] = tasks.give.tolist()
        self.limit: list[float] = tasks.limit.tolist()
        self.before: list[list[int]] = [[] for _ in range(len(tasks))]
        for earlier, later in tasks.local.tolist():
            self.before[later].append(earlier)
        ranks = range(tasks.num_ranks)
        self.ends = [-1.0] * len(tasks)
        self.clock, self.held = [0.0 for _ in ranks], [0.0 for _ in ranks]
        self.orders: list[list[int]] = [[] for _ in ranks]
        self.heads: list[list[int]] = [[] for _ in ranks]
        self.events: list[tuple[float, int]] = [(0.0, rank) for rank in ranks]

    def run(self) -> list[int] | None:
        """The order, rank by rank; None if it came to a stop."""
        follows = set(self.next)
        for task in range(self.lists.size):
            if task not in follows:
                self.heads[self.lists.rank_of[task]].append(task)
        while self.events:
            now, rank = heapq.heappop(self.events)
            if self.clock[rank] <= now:
                self._decide(now, rank)
        order = [task for tasks in self.orders for task in tasks]
        return order if len(order) == self.lists.size else None

    def _decide(self, now: float, rank: int) -> None:
        heads, key = self.heads[rank], self.key
        best = soon = NOBODY
        soon_arrival = _NEVER
        for line, task in enumerate(heads):
            if task == NOBODY or not self._may_run(task, rank):
                continue
            arrival = self._arrival(task)
            if arrival <= now:
                if best < 0 or key[task] < key[heads[best]]:
                    best = line
            elif arrival < _NEVER and (soon < 0 or key[task] < key[heads[soon]]):
                soon, soon_arrival = line, arrival
        if best < 0:
            return
        wait = self.patience * self.lists.seconds[heads[best]]
        if soon >= 0 and key[heads[soon]] < key[heads[best]] and soon_arrival <= now + wait:
            return
        self._begin(now, rank, heads[best])
        heads[best] = self.next[heads[best]]

    def _may_run(self, task: int, rank: int) -> bool:
        if self.ends[task] >= 0.0:  # a fused pair stands in two lines
            return False
        take = self.take[task]
        if take > 0.0 and self.held[rank] + take + self.reserve[task] > self.limit[rank] + SLACK:
            return False
        return all(self.ends[other] >= 0.0 for other in self.before[task])

    def _arrival(self, task: int) -> float:
        arrival = 0.0
        for source, transfer in self.lists.sources[task]:
            if self.ends[source] < 0.0:
                return _NEVER
            arrival = max(arrival, self.ends[source] + transfer)
        return arrival

    def _begin(self, now: float, rank: int, task: int) -> None:
        end = now + self.lists.seconds[task]
        self.ends[task] = self.clock[rank] = end
        self.held[rank] = self.held[rank] + self.take[task] - self.give[task]
        self.orders[rank].append(task)
        heapq.heappush(self.events, (end, rank))
        for consumer in self.lists.consumers[task]:
            arrival = self._arrival(consumer)
            if arrival < _NEVER:
                heapq.heappush(self.events, (arrival, self.lists.rank_of[consumer]))
