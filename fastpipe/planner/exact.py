"""Proved optima of small cases, by OR-Tools' CP-SAT (`pip install 'fastpipe[exact]'`).

Every F, I and W is an interval, those of a rank do not overlap, and what a rank holds between the start of an F and the
end of its W is bounded. The microbatches of a stage keep their order, which loses nothing, since they cost the same.
Transfers are taken to start when their message is there, so a bound found here holds for every transport.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import lcm
from typing import Any

import numpy as np

from fastpipe.planner.clock import Clock
from fastpipe.planner.keys import unordered
from fastpipe.planner.model import Problem, Setting
from fastpipe.planner.tasks import NOBODY, Ints, Tasks, tasks_of
from fastpipe.schedule import Schedule

MOST_TASKS = 700
SECONDS = 60.0
"""For one placement, where no time limit says otherwise."""
_DENOMINATOR, _UNITS = 10_000, 10**9


@dataclass(frozen=True)
class Outcome:
    """What the solver found out about one placement.

    Attributes:
        schedule: a shorter one than what was known; None if it found none.
        least: seconds; what is proved that no order is shorter than: its own objective, or what was known. 0 where
            that is not settled.
    """

    schedule: Schedule | None
    least: float


def solve(problem: Problem, setting: Setting, known: float, clock: Clock) -> Outcome:
    """Look for an order of the placement that is shorter than what is known.

    Raises:
        ImportError: without OR-Tools.
        ValueError: for a case that is too large, or costs without a common unit.
    """
    model_of = _imported()
    if setting.kept != setting.held:
        raise ValueError("exact = True: what stages recompute cannot be proved; leave exact or recompute out")
    size = 3 * setting.placement.num_stages * setting.num_microbatches
    if size > MOST_TASKS:
        raise ValueError(
            f"exact = True: {size} actions on {setting.placement.num_stages} stages are too many, at most {MOST_TASKS} "
            "can be proved: set fewer microbatches or max_stages_per_rank, or leave exact out"
        )
    work = unordered(setting.placement, setting.num_microbatches)
    tasks = tasks_of(work, setting.cost, setting.held, setting.limit, setting.kept)
    unit = common_unit([*tasks.seconds.tolist(), *tasks.transfer.ravel().tolist()])
    builder = _Builder(model_of, tasks, unit, problem.span)
    seconds = SECONDS if clock.limit is None else max(0.1, clock.limit - clock.elapsed())
    order, least = builder.solve(known, min(seconds, SECONDS))
    return Outcome(None if order is None else tasks.ordered(order, "plan"), least)


def _imported() -> Any:
    try:
        from ortools.sat.python import cp_model
    except ImportError:
        raise ImportError(
            "exact = True needs OR-Tools, which is not installed: pip install 'fastpipe[exact]'"
        ) from None
    return cp_model


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


class _Builder:
    """The constraints of one placement."""

    def __init__(self, cp_model: Any, tasks: Tasks, unit: Fraction, span: bool) -> None:
        self.cp, self.tasks, self.unit, self.span = cp_model, tasks, unit, span
        self.model = cp_model.CpModel()
        self.length = [self._whole(value) for value in tasks.seconds.tolist()]
        self.transfer = [[self._whole(value) for value in row] for row in tasks.transfer.tolist()]
        horizon = sum(self.length) + sum(map(sum, self.transfer))
        new, fixed = self.model.new_int_var, self.model.new_fixed_size_interval_var
        self.starts = [new(0, horizon, f"start {task}") for task in range(len(tasks))]
        self.intervals = [fixed(s, n, "") for s, n in zip(self.starts, self.length, strict=True)]
        self.objective = new(0, horizon, "objective")
        self._order()
        self._memory(horizon)
        self._measure()

    def _whole(self, seconds: float) -> int:
        return round(Fraction(seconds).limit_denominator(_DENOMINATOR) / self.unit)

    def _end(self, task: int) -> Any:
        return self.starts[task] + self.length[task]

    def _order(self) -> None:
        for earlier, later in self.tasks.local.tolist():
            self.model.add(self.starts[later] >= self._end(earlier))
        for task, sources in enumerate(self.tasks.source.tolist()):
            for part, source in enumerate(sources):
                if source != NOBODY:
                    self.model.add(self.starts[task] >= self._end(source) + self.transfer[task][part])
        for rank in range(self.tasks.num_ranks):
            self.model.add_no_overlap([self.intervals[task] for task in self._tasks(rank)])

    def _tasks(self, rank: int) -> range:
        return range(*self.tasks.first[rank : rank + 2].tolist())

    def _memory(self, horizon: int) -> None:
        """From the start of F to the end of its W, in billionths of the limit."""
        rows = np.concatenate(self.tasks.schedule.columns, axis=1)
        ends = {(int(rows[1, t]), int(rows[2, t])): t for t in np.flatnonzero(self.tasks.give > 0).tolist()}
        for rank in range(self.tasks.num_ranks):
            limit = float(self.tasks.limit[rank])
            if limit == float("inf"):
                continue
            lives, sizes = [], []
            for task in self._tasks(rank):
                if self.tasks.take[task] > 0:
                    end = self._end(ends[int(rows[1, task]), int(rows[2, task])])
                    length = self.model.new_int_var(0, horizon, "")
                    lives.append(self.model.new_interval_var(self.starts[task], length, end, ""))
                    sizes.append(int(self.tasks.take[task] / limit * _UNITS * (1 - 1e-12)))
            self.model.add_cumulative(lives, sizes, _UNITS)

    def _measure(self) -> None:
        """The objective is at least every rank's measure."""
        for rank in range(self.tasks.num_ranks):
            mine = self._tasks(rank)
            begin = self.model.new_int_var(0, 0 if not self.span else sum(self.length), "")
            if self.span:
                self.model.add_min_equality(begin, [self.starts[task] for task in mine])
            for task in mine:
                self.model.add(self.objective >= self._end(task) - begin)
        self.model.minimize(self.objective)

    def solve(self, known: float, seconds: float) -> tuple[Ints | None, float]:
        """An order shorter than what is known, and the seconds that none is below; 0 where that is not settled."""
        most = round(known / float(self.unit)) - 1
        self.model.add(self.objective <= most)
        solver = self.cp.CpSolver()
        solver.parameters.max_time_in_seconds = seconds
        solver.parameters.num_workers = 8
        status = solver.solve(self.model)
        if status in (self.cp.OPTIMAL, self.cp.FEASIBLE):
            starts = np.array([solver.value(start) for start in self.starts])
            least = solver.value(self.objective) if status == self.cp.OPTIMAL else 0
            return self._read(starts), float(least * self.unit)
        return None, known if status == self.cp.INFEASIBLE else 0.0

    def _read(self, starts: Any) -> Ints:
        """Each rank's tasks by start; of those without length, what comes first in its line first."""
        found = []
        for rank in range(self.tasks.num_ranks):
            mine = list(self._tasks(rank))
            found.append(sorted(mine, key=lambda task: (starts[task], self.length[task], task)))
        return np.concatenate(found).astype(np.int32)
