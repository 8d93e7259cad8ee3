"""Proved optima of small cases, by OR-Tools' CP-SAT (`pip install ortools`).

Every F, I and W is an interval, those of a rank do not overlap, and what a rank holds between the start of an F and the
end of its W is bounded. The microbatches of a stage keep their order, which loses nothing, since they cost the same.
Transfers are taken to start when their message is there, so a bound found here holds for every transport.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from fastpipe.placement import Placement
from fastpipe.planner.keys import unordered
from fastpipe.planner.model import Problem, Setting
from fastpipe.planner.solver import FULL, Durations, by_start, imported, lives, refuse_recompute
from fastpipe.planner.tasks import NOBODY, Ints, Tasks, tasks_of
from fastpipe.schedule import Schedule

MOST_TASKS = 700
"""Of a case that is proved; the plan of a larger one is improved in windows."""
SECONDS = 60.0
"""For one placement, where no time limit says otherwise."""


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


def is_small(placement: Placement, num_microbatches: int) -> bool:
    """Whether so many actions can be proved."""
    return 3 * placement.num_stages * num_microbatches <= MOST_TASKS


def solve(problem: Problem, setting: Setting, known: float, seconds: float = SECONDS) -> Outcome:
    """Look for so many seconds for an order of the placement that is shorter than what is known.

    Raises:
        ImportError: without OR-Tools.
        ValueError: for costs without a common unit, or stages that recompute.
    """
    model_of = imported()
    refuse_recompute(setting)
    work = unordered(setting.placement, setting.num_microbatches)
    tasks = tasks_of(work, setting.cost, setting.counted, setting.limit, setting.begun)
    builder = _Builder(model_of, tasks, problem.span)
    order, least = builder.solve(known, seconds)
    return Outcome(None if order is None else tasks.ordered(order, "plan"), least)


class _Builder:
    """The constraints of one placement."""

    def __init__(self, cp_model: Any, tasks: Tasks, span: bool) -> None:
        self.cp, self.tasks, self.span = cp_model, tasks, span
        self.model = cp_model.CpModel()
        whole = Durations(tasks)
        self.unit, self.length, self.transfer = whole.unit, whole.length, whole.transfer
        horizon = sum(self.length) + sum(map(sum, self.transfer))
        new, fixed = self.model.new_int_var, self.model.new_fixed_size_interval_var
        self.starts = [new(0, horizon, f"start {task}") for task in range(len(tasks))]
        self.intervals = [fixed(s, n, "") for s, n in zip(self.starts, self.length, strict=True)]
        self.objective = new(0, horizon, "objective")
        self._order()
        self._memory(horizon)
        self._measure()

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
        """From the start of F to the end of its W."""
        for held in lives(self.tasks):
            intervals = []
            for first, last, _ in held:
                length = self.model.new_int_var(0, horizon, "")
                intervals.append(self.model.new_interval_var(self.starts[first], length, self._end(last), ""))
            self.model.add_cumulative(intervals, [size for *_, size in held], FULL)

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
        ranks = range(self.tasks.num_ranks)
        order = [task for rank in ranks for task in by_start(self._tasks(rank), starts, self.length)]
        return np.array(order, dtype=np.int32)
