"""Windows: what is too large to prove, ordered anew piece by piece by OR-Tools' CP-SAT (large-neighbourhood search).

A window is every task that starts in [a, b): of each rank a piece of its order. All else keeps its order, though not
its times. A task of the window cannot start before its release, the longest way to its start through tasks before the
window; its tail is the longest way from its end through tasks behind the window. So the makespan is the largest sum of
an end and a tail in the window, or the longest way that avoids the window.

As in `exact`, transfers start when their message is there. The plan's may wait for their receive to be posted, so an
order is kept only if it is shorter as the search measures it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from math import inf
from typing import Any

import numpy as np

from fastpipe.planner import bound, engine
from fastpipe.planner.clock import Clock
from fastpipe.planner.model import Problem
from fastpipe.planner.pool import Member
from fastpipe.planner.solver import FULL, Durations, by_start, imported, lives
from fastpipe.planner.tasks import NOBODY, Ints, Tasks, fits

SIZE = 150
"""Tasks of a window."""
WORK = 6.0
"""How long the solver works on all windows, in its deterministic seconds, which count steps: about ten of the
clock's each. So what comes out does not depend on the machine, unless time ends it."""
_EACH = 0.4
"""The same for one window."""
SECONDS = 120.0
"""Of the clock, where no time limit says otherwise: in a model of thousands of tasks a step takes longer."""

Edge = tuple[int, int]
"""A task, and how long its message or another's to it takes."""


def improve(problem: Problem, one: Member, clock: Clock, say: Callable[[str], None], size: int = SIZE) -> Member:
    """The order after passes over all windows, each half a window behind the one before, until none is of use.

    Args:
        problem: what is planned for.
        one: the order to begin with; no stage recomputes.
        clock: of the plan.
        say: called with what is done next.
        size: tasks of a window.

    Raises:
        ImportError: without OR-Tools.
        ValueError: for costs without a common unit.
    """
    cp_model = imported()
    case, work, better = Case(one.tasks, problem.span), WORK, True
    least = bound.of_placement(problem, one.setting) * (1 + 1e-9)
    while better:
        better = False
        for first in range(0, max(1, len(one.tasks) - size // 2), max(1, size // 2)):
            if one.value <= least or work <= 0 or clock.is_over():
                return one
            say(f"ordering actions {first} to {min(first + size, len(one.tasks))} of {len(one.tasks)} anew")
            window = Window(Line(case, one.order), first, size)
            order, spent = solved(cp_model, window, min(work, _EACH), clock)
            work -= spent
            if order is None or not fits(one.tasks.peaks(order), one.tasks.limit.tolist()):
                continue
            value = engine.measure(one.tasks, order, problem.span)
            if value < one.value * (1 - 1e-9):
                one, better = replace(one, order=order, value=value), True
    return one


class Case:
    """Tasks in the solver's unit, and their messages both ways."""

    def __init__(self, tasks: Tasks, span: bool) -> None:
        self.tasks, self.span = tasks, span
        whole = Durations(tasks)
        self.length, self.lives = whole.length, lives(tasks)
        self.sources: list[list[Edge]] = [[] for _ in range(len(tasks))]
        self.consumers: list[list[Edge]] = [[] for _ in range(len(tasks))]
        for task, sources in enumerate(tasks.source.tolist()):
            for source, seconds in zip(sources, whole.transfer[task], strict=True):
                if source != NOBODY:
                    self.sources[task].append((source, seconds))
                    self.consumers[source].append((task, seconds))

    def ranks(self, order: Ints) -> Iterator[list[int]]:
        """Every rank's tasks in an order."""
        for rank in range(self.tasks.num_ranks):
            yield order[slice(*self.tasks.first[rank : rank + 2])].tolist()


class Line:
    """An order whose tasks start as soon as they can.

    Attributes:
        case: the tasks.
        ranks: every rank's, in the order.
        before: of every task what it waits for, the one before it on its rank too.
        behind: what waits for it.
        sequence: all tasks, each after what it waits for.
        starts: of every task.
        begins: what is taken off every rank's end: its first start, where the span is the objective.
    """

    def __init__(self, case: Case, order: Ints) -> None:
        self.case, self.ranks = case, list(case.ranks(order))
        self.before, self.behind = [list(edges) for edges in case.sources], [list(edges) for edges in case.consumers]
        for mine in self.ranks:
            for earlier, later in zip(mine, mine[1:], strict=False):
                self.before[later].append((earlier, 0))
                self.behind[earlier].append((later, 0))
        self.sequence = self._sequence()
        self.starts = self.ready([True] * len(order))
        self.begins = [self.starts[mine[0]] if case.span and mine else 0 for mine in self.ranks]

    def _sequence(self) -> list[int]:
        waits = [len(edges) for edges in self.before]
        found = [task for task, count in enumerate(waits) if count == 0]
        for task in found:  # which grows
            for later, _ in self.behind[task]:
                waits[later] -= 1
                if waits[later] == 0:
                    found.append(later)
        return found

    def ready(self, counts: list[bool]) -> list[int]:
        """When every task could start for what it waits for of the tasks that count."""
        starts = [0] * len(counts)
        for task in self.sequence:
            ends = (starts[one] + self.case.length[one] + seconds for one, seconds in self.before[task] if counts[one])
            starts[task] = max(ends, default=0)
        return starts

    def longest(self, starts: list[int], counts: list[bool]) -> int:
        """The objective of the tasks that count, with these starts."""
        ends = [
            starts[task] + self.case.length[task] - begin
            for mine, begin in zip(self.ranks, self.begins, strict=True)
            for task in mine
            if counts[task]
        ]
        return max(ends, default=0)


class Window:
    """Tasks to order anew, and what the others ask of them.

    For the span it begins behind every rank's first start, which so stays as it is.

    Args:
        line: the order.
        first: about how many tasks start before the window.
        size: about how many are in it: what starts at one time is not parted.

    Attributes:
        tasks: of the window, rank by rank, in the old order.
        release: before which they cannot start.
        tail: how long after their end the end of all is, at least.
        least: the longest way that avoids the window.
        most: the old objective.
    """

    def __init__(self, line: Line, first: int, size: int) -> None:
        self.line, starts = line, line.starts
        ranked = sorted(starts)
        begin = max(ranked[first], 1 + max(line.begins)) if line.case.span else ranked[first]
        end = ranked[first + size] if first + size < len(ranked) else inf
        self.before, self.behind = [start < begin for start in starts], [start >= end for start in starts]
        outside = [before or behind for before, behind in zip(self.before, self.behind, strict=True)]
        self.tasks = [[task for task in mine if not outside[task]] for mine in line.ranks]
        self.least = line.longest(line.ready(outside), outside)
        self.most = line.longest(starts, [True] * len(starts))
        self.release, self.tail = line.ready(self.before), self._tails()
        self._follow_ranks()

    def _tails(self) -> list[int]:
        line = self.line
        tails = [-begin for mine, begin in zip(line.ranks, line.begins, strict=True) for _ in mine]
        for task in reversed(line.sequence):
            for later, seconds in line.behind[task]:
                if self.behind[later]:
                    tails[task] = max(tails[task], seconds + line.case.length[later] + tails[later])
        return tails

    def _follow_ranks(self) -> None:
        """Any task of the window may become its rank's first there, and any its last."""
        starts, length = self.line.starts, self.line.case.length
        for line, mine in zip(self.line.ranks, self.tasks, strict=True):
            ends = [starts[task] + length[task] for task in line if self.before[task]]
            rests = [length[task] + self.tail[task] for task in line if self.behind[task]]
            for task in mine:
                self.release[task] = max([self.release[task], *ends[-1:]])
                self.tail[task] = max([self.tail[task], *rests[:1]])

    def order(self, starts: dict[int, int]) -> Ints:
        """The whole order, the window's tasks by these starts."""
        found: list[int] = []
        for line, mine in zip(self.line.ranks, self.tasks, strict=True):
            found += [task for task in line if self.before[task]]
            found += by_start(mine, starts, self.line.case.length)
            found += [task for task in line if self.behind[task]]
        return np.array(found, dtype=np.int32)


def solved(cp_model: Any, window: Window, work: float, clock: Clock) -> tuple[Ints | None, float]:
    """A shorter order, or None, and the work that it took."""
    length = window.line.case.length
    inside = [task for mine in window.tasks for task in mine]
    most = window.most - 1
    slack = [most - window.tail[task] - length[task] - window.release[task] for task in inside]
    if window.least > most or min(slack, default=-1) < 0:
        return None, 0.0
    model = cp_model.CpModel()
    starts = {
        task: model.new_int_var(window.release[task], window.release[task] + room, "")
        for task, room in zip(inside, slack, strict=True)
    }
    _order(model, window, starts)
    _memory(model, window, starts)
    objective = model.new_int_var(window.least, most, "objective")
    for task in inside:
        model.add(objective >= starts[task] + length[task] + window.tail[task])
    model.minimize(objective)
    solver = _solver(cp_model, work, clock)
    status = solver.solve(model)
    found = status in (cp_model.OPTIMAL, cp_model.FEASIBLE)
    values = {task: solver.value(start) for task, start in starts.items()} if found else {}
    return window.order(values) if found else None, float(solver.response_proto.deterministic_time)


def _solver(cp_model: Any, work: float, clock: Clock) -> Any:
    """One worker, which finds the same each time. Several that take turns would too, but end the process in 9.15."""
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.max_deterministic_time = work
    if clock.limit is not None:
        solver.parameters.max_time_in_seconds = max(0.1, clock.limit - clock.elapsed())
    return solver


def _order(model: Any, window: Window, starts: dict[int, Any]) -> None:
    case, length = window.line.case, window.line.case.length
    for earlier, later in case.tasks.local.tolist():
        if earlier in starts and later in starts:
            model.add(starts[later] >= starts[earlier] + length[earlier])
    for task in starts:
        for source, seconds in case.sources[task]:
            if source in starts:
                model.add(starts[task] >= starts[source] + length[source] + seconds)
    for mine in window.tasks:
        model.add_no_overlap([model.new_fixed_size_interval_var(starts[task], length[task], "") for task in mine])


def _memory(model: Any, window: Window, starts: dict[int, Any]) -> None:
    """From the start of F to the end of its W; what begins before the window or ends behind it is held to its edge."""
    length, never = window.line.case.length, window.most + max(map(abs, window.tail), default=0)
    for lives_of_rank in window.line.case.lives:
        held, intervals, sizes = 0, [], []
        for taker, giver, size in lives_of_rank:
            if window.behind[taker] or window.before[giver]:
                continue
            if window.before[taker] and window.behind[giver]:
                held += size
                continue
            begin = starts.get(taker, 0)
            end = starts[giver] + length[giver] if giver in starts else never
            intervals.append(model.new_interval_var(begin, model.new_int_var(0, never, ""), end, ""))
            sizes.append(size)
        if held + sum(sizes) > FULL:
            model.add_cumulative(intervals, sizes, FULL - held)
