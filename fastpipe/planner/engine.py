"""The engine of a plan's search: times of orders, list scheduling, annealing, and the clock that ends them.

The planning library (csrc/plan) does the work. Without it there are list scheduling and times in Python, which are the
same numbers, and nothing is annealed. An order's times are those of `fastpipe.simulate` with a lane for every channel
and receives posted one task ahead, found without lowering it.
"""

from __future__ import annotations

import ctypes
import heapq
import math
import os
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import numpy as np

from fastpipe import native_plan
from fastpipe.native_plan import View, function
from fastpipe.planner.tasks import NO_TASK, SLACK, Floats, Ints, Tasks

R = TypeVar("R")
_NEVER = float("inf")


def is_native() -> bool:
    """Whether the library is there."""
    return native_plan.library() is not None


class Clock:
    """Runs from when it is made."""

    def __init__(self, limit: float | None) -> None:
        self.limit, self.start = limit, time.monotonic()
        self.cut = False

    def stop(self) -> None:
        """End the time now."""
        self.limit = 0.0

    def elapsed(self) -> float:
        """Seconds since it was made."""
        return time.monotonic() - self.start

    def is_over(self) -> bool:
        """Whether the time is over; what asks then stops, and the plan says that it was cut."""
        return self.is_past(1.0)

    def is_past(self, part: float) -> bool:
        """Whether more than a part of a limit is over; what asks then leaves out what is left of it."""
        past = self.limit is not None and self.elapsed() >= part * self.limit
        self.cut |= past
        return past

    def left(self) -> float:
        """Seconds that are left; infinite without a limit."""
        return math.inf if self.limit is None else max(0.0, self.limit - self.elapsed())


def _workers() -> int:
    """Threads that are of use: one where Python does the work."""
    return (os.cpu_count() or 1) if is_native() else 1


def items_a_worker(count: int) -> int:
    """One after the other, how many items a thread has of so many."""
    return -(-count // _workers())


@contextmanager
def in_parallel(calls: Sequence[Callable[[], R]], clock: Clock) -> Iterator[Iterator[R]]:
    """The answers of all calls, in their order: by several threads where the library, which releases the GIL, does
    the work. What an answer is does not depend on it. An exception here, Ctrl-C among them, stops the clock, so that
    the calls end soon."""
    workers = min(len(calls), _workers())
    if workers < 2:
        yield (call() for call in calls)
        return
    with ThreadPoolExecutor(workers, "fastpipe-plan") as threads:
        futures = [threads.submit(call) for call in calls]
        try:
            yield (future.result() for future in futures)
        except BaseException:  # raised again
            clock.stop()
            raise
        finally:
            for future in futures:
                future.cancel()


def retime(tasks: Tasks, order: Ints) -> tuple[Floats, Floats] | None:
    """Starts and ends of every task, or None if the order cannot run.

    Args:
        order: the tasks position by position, the ranks one after the other.
    """
    if not is_native():
        return retime_in_python(tasks, order)
    starts, ends = np.empty(len(tasks)), np.empty(len(tasks))
    found = function("retime")(_view(tasks), np.ascontiguousarray(order, dtype=np.int32), starts, ends)
    return (starts, ends) if found else None


def measure(tasks: Tasks, order: Ints, span: bool) -> float:
    """The makespan or the span of an order; infinite if it cannot run."""
    times = retime(tasks, order)
    if times is None:
        return float("inf")
    starts, ends = times
    last = ends[order[tasks.first[1:] - 1]]
    begin = starts[order[tasks.first[:-1]]] if span else 0.0
    return float((last - begin).max())


def construct(
    tasks: Tasks, keys: Sequence[Floats], reserves: Sequence[Floats], patience: Sequence[float], span: bool
) -> list[tuple[Ints, float]]:
    """The orders that list scheduling gives, and their objectives: infinite where it came to a stop."""
    if not is_native():
        made = []
        for one in zip(keys, reserves, patience, strict=True):
            order = np.array(ListScheduling(tasks, *one).run() or (), dtype=np.int32)
            made.append((order, measure(tasks, order, span) if len(order) else float("inf")))
        return made
    count = len(patience)
    given = [np.ascontiguousarray(array, dtype=np.float64) for array in (keys, reserves, patience)]
    orders, objectives = np.empty((count, len(tasks)), dtype=np.int32), np.empty(count)
    if not function("construct")(_view(tasks), span, count, *given, orders, objectives):
        raise MemoryError("no memory for list scheduling")
    return list(zip(orders, objectives.tolist(), strict=True))


def search(tasks: Tasks, order: Ints, *, span: bool, seed: int) -> Search | None:
    """An annealing that has begun; None if the order cannot run or fit into memory. The library must be there."""
    made = Search(tasks, order, span, seed)
    return made if made.handle else None


class Search:
    """Annealing over the orders of tasks (csrc/plan/search.h); the library must be there."""

    def __init__(self, tasks: Tasks, order: Ints, span: bool, seed: int) -> None:
        self.view, self.size = _view(tasks), len(tasks)
        self.handle = function("search")(self.view, np.array(order, dtype=np.int32), span, seed)
        if self.handle:
            # not at exit, when a thread of a plan that was interrupted may still be in `improve`
            weakref.finalize(self, function("end_search"), self.handle).atexit = False

    def improve(self, attempts: int, hot: float, cold: float) -> None:
        """Try so many changes, while the heat falls from the first to the second."""
        if not function("improve")(self.handle, attempts, hot, cold):
            raise MemoryError("no memory for a search")

    def found(self) -> tuple[Ints, float]:
        """The best order so far, and its objective."""
        best, objective = np.empty(self.size, dtype=np.int32), ctypes.c_double()
        if not function("best")(self.handle, best, objective):
            raise MemoryError("no memory for a search")
        return best, objective.value


class _Tasks(View):
    _fields_ = [
        *((name, ctypes.c_int32) for name in ("num_ranks", "num_tasks")),
        *((name, ctypes.c_void_p) for name in ("first", "seconds", "source", "transfer")),
        ("num_local", ctypes.c_int32),
        *((name, ctypes.c_void_p) for name in ("local", "next", "take", "give", "limit")),
    ]


def _view(tasks: Tasks) -> _Tasks:
    given = (getattr(tasks, name) for name in ("first", "seconds", "source", "transfer"))
    rest = (getattr(tasks, name) for name in ("local", "next", "take", "give", "limit"))
    return _Tasks(tasks.num_ranks, len(tasks), *given, len(tasks.local), *rest)


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
                if source != NO_TASK:
                    self.sources[task].append((source, transfer))
                    self.consumers[source].append(task)


def retime_in_python(tasks: Tasks, order: Ints) -> tuple[Floats, Floats] | None:
    """What `retime` does without the library."""
    lists, placed = _Lists(tasks), order.tolist()
    starts, ends = [0.0] * lists.size, [_NEVER] * lists.size
    position, waits_for = lists.first[:-1], [NO_TASK] * lists.num_ranks
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
                    waits_for[other] = NO_TASK
                    ready.append(other)
    return (np.array(starts), np.array(ends)) if position == lists.first[1:] else None


class ListScheduling:
    """Builds one order: a rank that is free starts the task of the lowest key among those that may run.

    Args:
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
        best = soon = NO_TASK
        soon_arrival = _NEVER
        for line, task in enumerate(heads):
            if task == NO_TASK or not self._may_run(task, rank):
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
