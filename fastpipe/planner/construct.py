"""List scheduling by keys: every rank that is free starts the task of the lowest key among those that may run, or waits
a little for a better one. csrc/plan/construct.cpp does the same sooner."""

from __future__ import annotations

import heapq

from fastpipe.planner.retime import Lines
from fastpipe.planner.search import SLACK
from fastpipe.planner.stale import NEVER
from fastpipe.planner.tasks import NOBODY, Floats, Tasks


class Constructor:
    """Builds one order.

    Args:
        tasks: what is ordered.
        key: of every task; the lowest goes first.
        reserve: what has to stay free behind every task that takes memory, in the unit of the limit.
        patience: how long a better task is waited for, in durations of the one that could run now.
    """

    def __init__(self, tasks: Tasks, key: Floats, reserve: Floats, patience: float) -> None:
        self.lines = Lines(tasks)
        self.key: list[float] = key.tolist()
        self.reserve: list[float] = reserve.tolist()
        self.patience = patience
        ranks = range(self.lines.num_ranks)
        self.ends = [-1.0] * self.lines.size
        self.clock, self.held = [0.0 for _ in ranks], [0.0 for _ in ranks]
        self.orders: list[list[int]] = [[] for _ in ranks]
        self.heads: list[list[int]] = [[] for _ in ranks]
        self.events: list[tuple[float, int]] = [(0.0, rank) for rank in ranks]

    def run(self) -> list[int] | None:
        """The order, rank by rank; None if it came to a stop."""
        follows = set(self.lines.next)
        for task in range(self.lines.size):
            if task not in follows:
                self.heads[self.lines.rank_of[task]].append(task)
        while self.events:
            now, rank = heapq.heappop(self.events)
            if self.clock[rank] <= now:
                self._decide(now, rank)
        order = [task for tasks in self.orders for task in tasks]
        return order if len(order) == self.lines.size else None

    def _decide(self, now: float, rank: int) -> None:
        heads, key = self.heads[rank], self.key
        best = soon = NOBODY
        soon_arrival = NEVER
        for line, task in enumerate(heads):
            if task == NOBODY or not self._may_run(task, rank):
                continue
            arrival = self._arrival(task)
            if arrival <= now:
                if best < 0 or key[task] < key[heads[best]]:
                    best = line
            elif arrival < NEVER and (soon < 0 or key[task] < key[heads[soon]]):
                soon, soon_arrival = line, arrival
        if best < 0:
            return
        wait = self.patience * self.lines.seconds[heads[best]]
        if soon >= 0 and key[heads[soon]] < key[heads[best]] and soon_arrival <= now + wait:
            return
        self._begin(now, rank, heads[best])
        heads[best] = self.lines.next[heads[best]]

    def _may_run(self, task: int, rank: int) -> bool:
        if self.ends[task] >= 0.0:  # a fused pair stands in two lines
            return False
        take = self.lines.take[task]
        if take > 0.0 and self.held[rank] + take + self.reserve[task] > self.lines.limit[rank] + SLACK:
            return False
        return all(self.ends[other] >= 0.0 for other in self.lines.before[task])

    def _arrival(self, task: int) -> float:
        arrival = 0.0
        for source, transfer in self.lines.sources[task]:
            if self.ends[source] < 0.0:
                return NEVER
            arrival = max(arrival, self.ends[source] + transfer)
        return arrival

    def _begin(self, now: float, rank: int, task: int) -> None:
        end = now + self.lines.seconds[task]
        self.ends[task] = self.clock[rank] = end
        self.held[rank] = self.held[rank] + self.lines.take[task] - self.lines.give[task]
        self.orders[rank].append(task)
        heapq.heappush(self.events, (end, rank))
        for consumer in self.lines.consumers[task]:
            arrival = self._arrival(consumer)
            if arrival < NEVER:
                heapq.heappush(self.events, (arrival, self.lines.rank_of[consumer]))
