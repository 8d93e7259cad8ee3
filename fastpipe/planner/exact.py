"""The exact solver, OR-Tools' CP-SAT (`pip install ortools`): small cases are proved, larger ones improved by windows.

*Proof.* Every F, I and W is an interval, those of a rank do not overlap, and what a rank holds between the start of an
F and the end of its W is bounded. The microbatches of a stage keep their order, which loses nothing, since they cost
the same.

*Windows* (large-neighbourhood search). A window is every task that starts in [a, b): of each rank a piece of its order.
All else keeps its order, though not its times. A task of the window cannot start before its release, the longest way to
its start through tasks before the window; its tail is the longest way from its end through tasks behind the window. So
the makespan is the largest sum of an end and a tail in the window, or the longest way that avoids the window.

In both, transfers start when their message is there, so a bound found here holds for every transport. The plan's may
wait for their receive to be posted, so an order is kept only if it is shorter as the search measures it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from math import inf, lcm
from typing import Any

import numpy as np

from fastpipe.action import ActionKind
from fastpipe.placement import Placement
from fastpipe.planner import engine
from fastpipe.planner.engine import Clock
from fastpipe.planner.problem import Problem, Setting, bound_of
from fastpipe.planner.search import Member, unordered
from fastpipe.planner.tasks import NO_TASK, Ints, Tasks, fits, tasks_of
from fastpipe.schedule import Schedule

FULL = 10**9
"""What a rank may hold, in the solver's unit."""
_DENOMINATOR, _UNITS = 10_000, 10**9
_PAIR = int(ActionKind.OVERLAP_F_B)
MOST_TASKS = 700
"""Of a case that is proved; the plan of a larger one is improved in windows."""
SECONDS = 60.0
"""For one placement, where no time limit says otherwise."""
WINDOW_SIZE = 150
"""Tasks of a window."""
WINDOW_WORK = 6.0
"""How long the solver works on all windows, in its deterministic seconds, which count steps: about ten of the
clock's each. So what comes out does not depend on the machine, unless time ends it."""
_WINDOW_EACH = 0.4
"""The same for one window."""
WINDOW_SECONDS = 120.0
"""Of the clock for all windows, where no time limit says otherwise: a step in thousands of tasks takes longer."""

Edge = tuple[int, int]
"""A task, and how long its message or another's to it takes."""


def import_cp_model() -> Any:
    """OR-Tools' model of constraints.

    Raises:
        ImportError: without OR-Tools.
    """
    try:
        from ortools.sat.python import cp_model
    except ImportError:
        raise ImportError("exact = True needs OR-Tools, which is not installed: pip install ortools") from None
    return cp_model


def refuse_recompute(setting: Setting) -> None:
    """The solver knows one size of what a microbatch holds, from F to W.

    Raises:
        ValueError: where stages recompute.
    """
    if setting.kept != setting.held:
        raise ValueError("exact = True: what stages recompute cannot be proved; leave exact or recompute out")


def common_unit(seconds: Sequence[float]) -> Fraction:
    """The largest duration of which all of these are whole multiples.

    Raises:
        ValueError: when there is none of a reasonable size.
    """
    parts = [Fraction(value).limit_denominator(_DENOMINATOR) for value in set(seconds)]
    scale = lcm(*(part.denominator for part in parts))
    wrong = [v for v, part in zip(set(seconds), parts, strict=True) if abs(float(part) - v) > 1e-9 * max(1.0, v)]
    if wrong or scale > _UNITS:
        value = wrong[0] if wrong else max(seconds)
        raise ValueError(f"exact = True: {value!r} seconds; round the costs, so that all are multiples of one unit")
    return Fraction(1, scale)


def lifetimes(tasks: Tasks) -> list[list[tuple[int, int, int]]]:
    """By rank with a limit: the task that takes memory, the one whose end releases it, and how much of `FULL`."""
    rows = np.concatenate(tasks.schedule.columns, axis=1)
    released = np.where(rows[0] == _PAIR, rows[3:5], rows[1:3])  # a fused pair releases what its backward is of
    ends = {(int(released[0, t]), int(released[1, t])): t for t in np.flatnonzero(tasks.give > 0).tolist()}
    found: list[list[tuple[int, int, int]]] = []
    for rank, limit in enumerate(tasks.limit.tolist()):
        mine = [task for task in range(*tasks.first[rank : rank + 2].tolist()) if tasks.take[task] > 0]
        found.append([])
        for task in mine if limit < inf else ():
            size = int(tasks.take[task] / limit * FULL * (1 - 1e-12)) if limit > 0 else FULL + 1
            found[rank].append((task, ends[int(rows[1, task]), int(rows[2, task])], size))
    return found


def by_start(mine: Sequence[int], starts: Mapping[int, int], length: Sequence[int]) -> list[int]:
    """Tasks of a rank in the order of their starts; of those without length, what comes first in its line first."""
    return sorted(mine, key=lambda task: (starts[task], length[task], task))


def is_small(placement: Placement, num_microbatches: int) -> bool:
    """Whether so many actions can be proved."""
    return 3 * placement.num_stages * num_microbatches <= MOST_TASKS


def solve(problem: Problem, setting: Setting, known: float, seconds: float = SECONDS) -> tuple[Schedule | None, float]:
    """Look for so many seconds for an order of the placement that is shorter than what is known.

    Returns:
        It, or None if it found none; and the seconds that no order is below, 0 where that is not settled.

    Raises:
        ImportError: without OR-Tools.
        ValueError: for costs without a common unit, or stages that recompute.
    """
    cp_model = import_cp_model()
    refuse_recompute(setting)
    work = unordered(setting.placement, setting.num_microbatches)
    tasks = tasks_of(work, setting.cost, setting.counted, setting.limit, setting.begun)
    case = IntegerTasks(tasks, problem.span)
    model, starts, objective = _whole_model(cp_model, case)
    model.add(objective <= round(known / float(case.unit)) - 1)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = 8
    status = solver.solve(model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return None, known if status == cp_model.INFEASIBLE else 0.0
    values = {task: solver.value(start) for task, start in starts.items()}
    order = [task for mine in case.ranks(tasks.start) for task in by_start(mine, values, case.length)]
    least = solver.value(objective) if status == cp_model.OPTIMAL else 0
    return tasks.ordered(np.array(order, dtype=np.int32), "plan"), float(least * case.unit)


class IntegerTasks:
    """Tasks in whole numbers of a unit of seconds, and their messages both ways."""

    def __init__(self, tasks: Tasks, span: bool) -> None:
        self.tasks, self.span, self.lifetimes = tasks, span, lifetimes(tasks)
        self.unit = common_unit([*tasks.seconds.tolist(), *tasks.transfer.ravel().tolist()])
        self.length = [self._whole(value) for value in tasks.seconds.tolist()]
        self.sources: list[list[Edge]] = [[] for _ in range(len(tasks))]
        self.consumers: list[list[Edge]] = [[] for _ in range(len(tasks))]
        for task, (sources, transfers) in enumerate(zip(tasks.source.tolist(), tasks.transfer.tolist(), strict=True)):
            for source, seconds in zip(sources, map(self._whole, transfers), strict=True):
                if source != NO_TASK:
                    self.sources[task].append((source, seconds))
                    self.consumers[source].append((task, seconds))

    def _whole(self, seconds: float) -> int:
        return round(Fraction(seconds).limit_denominator(_DENOMINATOR) / self.unit)

    def ranks(self, order: Ints) -> Iterator[list[int]]:
        """Every rank's tasks in an order."""
        for rank in range(self.tasks.num_ranks):
            yield order[slice(*self.tasks.first[rank : rank + 2])].tolist()


def _whole_model(cp_model: Any, case: IntegerTasks) -> tuple[Any, dict[int, Any], Any]:
    """The constraints of one placement, with the start of every task and the objective."""
    model, ranks = cp_model.CpModel(), list(case.ranks(case.tasks.start))
    horizon = sum(case.length) + sum(seconds for edges in case.sources for _, seconds in edges)
    starts = {task: model.new_int_var(0, horizon, f"start {task}") for task in range(len(case.tasks))}
    objective = model.new_int_var(0, horizon, "objective")
    _add_order(model, case, ranks, starts)
    none = [False] * len(starts)
    _add_memory(model, case, starts, none, none, horizon)
    for mine in ranks:
        begin = model.new_int_var(0, 0 if not case.span else sum(case.length), "")
        if case.span:
            model.add_min_equality(begin, [starts[task] for task in mine])
        for task in mine:
            model.add(objective >= starts[task] + case.length[task] - begin)
    model.minimize(objective)
    return model, starts, objective


def _add_order(model: Any, case: IntegerTasks, ranks: Sequence[Sequence[int]], starts: Mapping[int, Any]) -> None:
    """Each task comes after what it waits for among those that have a start, and a rank runs one at a time."""
    for earlier, later in case.tasks.local.tolist():
        if earlier in starts and later in starts:
            model.add(starts[later] >= starts[earlier] + case.length[earlier])
    for task in starts:
        for source, seconds in case.sources[task]:
            if source in starts:
                model.add(starts[task] >= starts[source] + case.length[source] + seconds)
    for mine in ranks:
        model.add_no_overlap([model.new_fixed_size_interval_var(starts[task], case.length[task], "") for task in mine])


def _add_memory(
    model: Any,
    case: IntegerTasks,
    starts: Mapping[int, Any],
    before: Sequence[bool],
    behind: Sequence[bool],
    never: int,
) -> None:
    """From the start of F to the end of its W; what begins before the tasks with a start, or ends behind them, is held
    to their edge."""
    for lives_of_rank in case.lifetimes:
        held, intervals, sizes = 0, [], []
        for taker, giver, size in lives_of_rank:
            if behind[taker] or before[giver]:
                continue
            if before[taker] and behind[giver]:
                held += size
                continue
            begin = starts.get(taker, 0)
            end = starts[giver] + case.length[giver] if giver in starts else never
            intervals.append(model.new_interval_var(begin, model.new_int_var(0, never, ""), end, ""))
            sizes.append(size)
        if held + sum(sizes) > FULL:
            model.add_cumulative(intervals, sizes, FULL - held)


def improve_by_windows(
    problem: Problem, one: Member, clock: Clock, say: Callable[[str], None], size: int = WINDOW_SIZE
) -> Member:
    """The order after passes over all windows, each half a window behind the one before, until none is of use.

    Args:
        one: the order to begin with; no stage recomputes.

    Raises:
        ImportError: without OR-Tools.
        ValueError: for costs without a common unit.
    """
    cp_model = import_cp_model()
    case, work, better = IntegerTasks(one.tasks, problem.span), WINDOW_WORK, True
    least = bound_of(problem, one.setting) * (1 + 1e-9)
    while better:
        better = False
        for first in range(0, max(1, len(one.tasks) - size // 2), max(1, size // 2)):
            if one.value <= least or work <= 0 or clock.is_over():
                return one
            say(f"ordering actions {first} to {min(first + size, len(one.tasks))} of {len(one.tasks)} anew")
            window = Window(Timing(case, one.order), first, size)
            order, spent = solve_window(cp_model, window, min(work, _WINDOW_EACH), clock)
            work -= spent
            if order is None or not fits(one.tasks.peaks(order), one.tasks.limit.tolist()):
                continue
            value = engine.measure(one.tasks, order, problem.span)
            if value < one.value * (1 - 1e-9):
                one, better = replace(one, order=order, value=value), True
    return one


class Timing:
    """An order whose tasks start as soon as they can.

    Attributes:
        before: of every task what it waits for, the one before it on its rank too.
        behind: what waits for it.
        sequence: all tasks, each after what it waits for.
        begins: what is taken off every rank's end: its first start, where the span is the objective.
    """

    def __init__(self, case: IntegerTasks, order: Ints) -> None:
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
        first: about how many tasks start before the window.
        size: about how many are in it: what starts at one time is not parted.

    Attributes:
        tasks: of the window, rank by rank, in the old order.
        release: before which they cannot start.
        tail: how long after their end the end of all is, at least.
        least: the longest way that avoids the window.
        most: the old objective.
    """

    def __init__(self, timing: Timing, first: int, size: int) -> None:
        self.timing, starts = timing, timing.starts
        ranked = sorted(starts)
        begin = max(ranked[first], 1 + max(timing.begins)) if timing.case.span else ranked[first]
        end = ranked[first + size] if first + size < len(ranked) else inf
        self.before, self.behind = [start < begin for start in starts], [start >= end for start in starts]
        outside = [before or behind for before, behind in zip(self.before, self.behind, strict=True)]
        self.tasks = [[task for task in mine if not outside[task]] for mine in timing.ranks]
        self.least = timing.longest(timing.ready(outside), outside)
        self.most = timing.longest(starts, [True] * len(starts))
        self.release, self.tail = timing.ready(self.before), self._tails()
        self._follow_ranks()

    def _tails(self) -> list[int]:
        timing = self.timing
        tails = [-begin for mine, begin in zip(timing.ranks, timing.begins, strict=True) for _ in mine]
        for task in reversed(timing.sequence):
            for later, seconds in timing.behind[task]:
                if self.behind[later]:
                    tails[task] = max(tails[task], seconds + timing.case.length[later] + tails[later])
        return tails

    def _follow_ranks(self) -> None:
        """Any task of the window may become its rank's first there, and any its last."""
        starts, length = self.timing.starts, self.timing.case.length
        for line, mine in zip(self.timing.ranks, self.tasks, strict=True):
            ends = [starts[task] + length[task] for task in line if self.before[task]]
            rests = [length[task] + self.tail[task] for task in line if self.behind[task]]
            for task in mine:
                self.release[task] = max([self.release[task], *ends[-1:]])
                self.tail[task] = max([self.tail[task], *rests[:1]])

    def order(self, starts: dict[int, int]) -> Ints:
        """The whole order, the window's tasks by these starts."""
        found: list[int] = []
        for line, mine in zip(self.timing.ranks, self.tasks, strict=True):
            found += [task for task in line if self.before[task]]
            found += by_start(mine, starts, self.timing.case.length)
            found += [task for task in line if self.behind[task]]
        return np.array(found, dtype=np.int32)


def solve_window(cp_model: Any, window: Window, work: float, clock: Clock) -> tuple[Ints | None, float]:
    """A shorter order, or None, and the work that it took."""
    length = window.timing.case.length
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
    _add_order(model, window.timing.case, window.tasks, starts)
    never = window.most + max(map(abs, window.tail), default=0)
    _add_memory(model, window.timing.case, starts, window.before, window.behind, never)
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
