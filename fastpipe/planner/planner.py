"""`plan`: the best known partition, placement and order for given costs and memory."""

from __future__ import annotations

import contextlib
import gc
import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from fastpipe.checks import check_counts, check_flags, check_type, is_whole, plain
from fastpipe.cost import CostModel, check_links
from fastpipe.errors import ScheduleError
from fastpipe.placement import Placement
from fastpipe.planner import candidates, engine, search
from fastpipe.planner.candidates import evaluate
from fastpipe.planner.engine import Clock
from fastpipe.planner.exact import SECONDS, WINDOW_SECONDS, improve_by_windows, is_small, refuse_recompute, solve
from fastpipe.planner.layer_costs import LayerCosts
from fastpipe.planner.problem import (
    OBJECTIVES,
    RECOMPUTE,
    SHARES,
    Memory,
    Problem,
    Setting,
    bound_anywhere,
    bound_of,
    is_number,
    memory_of,
    read_costs,
)
from fastpipe.planner.result import Candidate, Plan
from fastpipe.planner.search import Construction, Member
from fastpipe.schedule import Schedule
from fastpipe.schedules import check_size
from fastpipe.timeline import Timeline
from fastpipe.validate import validate_schedule
from fastpipe.validate_program import validate_program

Progress = Callable[[str, float], None]
"""Called with the current activity, and the best objective so far (infinite before there is one)."""

_TRIES = 30
"""Orders that are made by list scheduling on a placement of a few hundred tasks; fewer of large ones. Four times as
many brought nothing in 80 cases."""
_TRIES_WORK, _TRIES_WORK_PYTHON = 5e4, 5e3
_KEPT = 4
_NAMED = 0.7
"""Of a time limit: then the search begins with what there is."""
_FINALISTS = 4
_SEARCHED_COUNTS = 2
"""Numbers of microbatches that are searched in depth, where the planner may choose."""
_ROUNDING = 1e-9
"""Times of the same actions differ so much by the order in which they are added up."""
_MOST_EFFORT = 1e6
"""Already days for a small case."""


def plan(
    costs: CostModel | LayerCosts | dict[str, Any] | str | Path,
    *,
    num_ranks: int,
    num_microbatches: int | None = None,
    memory: float | str | Memory | None = None,
    objective: str = "makespan",
    max_stages_per_rank: int = 4,
    placement: Placement | Schedule | None = None,
    recompute: str = "none",
    effort: float = 1.0,
    time_limit: float | None = None,
    seed: int = 0,
    exact: bool = False,
    progress: Progress | None = None,
) -> Plan:
    """Find a schedule for these costs that fits into this memory.

    The candidates are all schedules of the registry, with every allowed number of stages per rank, and orders made by
    list scheduling. The best are improved by annealing, if the planning library is installed
    (``fastpipe.native_plan.status()``). So the plan is no worse than any schedule of the registry that fits. Its times
    are those of `fastpipe.simulate` for the lowered and proved program.

    Args:
        costs: of a rank's whole share of the model (a `CostModel` of numbers; a stage of a schedule with two stages
            per rank costs half), of every stage (one with sequences), or of layers (`LayerCosts`); or a dict or JSON
            file of either's attributes.
        num_ranks: the number of ranks.
        num_microbatches: the number of microbatches of a step. None lets the planner choose it, which needs
            `LayerCosts.batch_size`.
        memory: the limit of a rank. A number up to 1000 is a fraction of 1F1B's; ``"5 activations"`` are those of a
            rank's share of the model; ``"40GiB"`` or a number of at least a million are bytes, with parameters and
            receive buffers. None for no limit.
        objective: ``"makespan"``, or ``"span"`` if ranks do not wait for each other between steps.
        max_stages_per_rank: the most stages per rank, if the costs are not by stage. For two copies of the model
            (dualpipe, chimera) a rank holds two stages: 1 excludes them, any other number allows them.
        placement: the rank of every stage; None lets the planner choose it. A schedule gives its placement and, if it
            has as many microbatches, is a candidate: ``pipe.schedule`` for `Pipeline.replan`, which between processes
            can change only the order. UNSHARD, RESHARD and REDUCE_GRAD in it are ignored.
        recompute: ``"none"``: stages keep the activations of their forward. ``"full"``: they keep their input, and
            their backward runs the forward again. ``"auto"``: some stages do, if memory requires it and the step is
            shorter; ``plan.recomputes`` says which, for ``Pipeline(recompute=plan.recompute)``.
        effort: a factor of the length of the search, at most 1e6; 1 anneals for half a second to a second. Without the
            planning library nothing is annealed, and ``plan.annealed`` is False.
        time_limit: seconds after which the search ends. Unless it ends the search early, the same seed gives the same
            plan.
        seed: the seed of the search.
        exact: for up to 700 actions (three times stages times microbatches), search until OR-Tools has proved that no
            order over any loop or wave of these depths with split backwards is shorter (``plan.optimal``), for a minute
            for each placement, or for `time_limit` in all. For more actions, improve the plan in windows, for two
            minutes or `time_limit`, without a proof. Needs OR-Tools (``pip install ortools``). Costs must be multiples
            of a common unit.
        progress: called during the search.

    Raises:
        ValueError: for invalid numbers or costs, or if nothing fits into the memory; it says what would.
        ScheduleError: for a schedule as `placement` that is not complete or cannot run.
    """
    first = _proved(placement) if isinstance(placement, Schedule) else None
    places = placement.placement if isinstance(placement, Schedule) else placement
    problem = _problem(costs, num_ranks, memory, objective, max_stages_per_rank, places, recompute)
    effort, time_limit = plain(effort), plain(time_limit)
    _check_search(effort, time_limit, seed, exact, progress)
    planner = _Planner(problem, Clock(time_limit), int(seed), float(effort), progress, first)
    with _no_collections():
        return planner.run(_microbatch_counts(problem, num_microbatches), exact)


def _check_search(effort: Any, time_limit: Any, seed: Any, exact: Any, progress: Any) -> None:
    """How far the search goes."""
    if not is_number(effort) or not 0 <= effort <= _MOST_EFFORT:
        raise ValueError(f"effort = {effort!r}: give a number from 0 to {_MOST_EFFORT:g}")
    if time_limit is not None and (not is_number(time_limit) or not 0 < time_limit <= threading.TIMEOUT_MAX):
        most = f"{threading.TIMEOUT_MAX:.0f}"
        raise ValueError(f"time_limit = {time_limit!r}: give seconds above 0, at most {most}, or None")
    if not is_whole(seed):
        raise ValueError(f"seed = {seed!r}: give a whole number of at least 0")
    check_flags(exact=exact)
    if progress is not None and not callable(progress):
        raise ValueError(f"progress = {progress!r}: give a function (activity, best objective so far), or None")


def _microbatch_counts(problem: Problem, num_microbatches: Any) -> list[int]:
    """What was given, or every number that divides the batch."""
    costs = problem.costs
    batch = costs.batch_size if isinstance(costs, LayerCosts) else None
    if num_microbatches is not None:
        (num_microbatches,) = check_counts(num_microbatches=num_microbatches)
        if batch is not None and num_microbatches > batch:
            raise ValueError(
                f"num_microbatches = {num_microbatches}: a batch_size of {batch} has too few rows; give at most "
                f"{batch}, or the batch_size of a step"
            )
        check_size(problem.num_ranks, num_microbatches)
        return [num_microbatches]
    if batch is None:
        raise ValueError("num_microbatches: give it, or costs of layers with batch_size, from which it can be chosen")
    return [count for count in range(1, min(batch, 16 * problem.num_ranks) + 1) if batch % count == 0]


def _proved(given: Schedule) -> Schedule:
    """The user's own schedule: it is simulated before anything else proves it."""
    if given.forward_only:
        raise ValueError(
            f"placement: {given.name} has no backward, and a plan is for steps that train; give its .placement to keep "
            "its stages where they are"
        )
    try:
        return validate_schedule(given).without_transfers()
    except ScheduleError as error:
        raise ScheduleError(f"placement: {given.name} cannot run: {error}") from error


@contextlib.contextmanager
def _no_collections() -> Iterator[None]:
    """Without Python's search for cycles: orders are millions of tuples, which it would go through over and over."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _problem(
    costs: Any,
    num_ranks: Any,
    memory: Any,
    objective: Any,
    max_stages_per_rank: Any,
    placement: Any,
    recompute: Any,
) -> Problem:
    num_ranks, most = check_counts(num_ranks=num_ranks, max_stages_per_rank=max_stages_per_rank)
    if objective not in OBJECTIVES:
        raise ValueError(f"objective = {objective!r}: use one of {', '.join(OBJECTIVES)}")
    check_type(Placement | Schedule | None, placement=placement)
    if recompute not in RECOMPUTE:
        raise ValueError(f"recompute = {recompute!r}: use one of {', '.join(RECOMPUTE)}")
    numbers = num_ranks, memory_of(memory), objective, most, placement, recompute
    problem = Problem(read_costs(costs), *numbers)
    if recompute != "none" and not isinstance(problem.costs, LayerCosts) and problem.costs.per_stage("recompute", 1)[0]:
        raise ValueError("recompute: the costs say already what is recomputed; leave it out of one of them")
    check_links(problem.costs, problem.num_ranks)
    if problem.memory is not None and problem.memory.unit == "bytes" and not problem.knows_bytes:
        raise ValueError(
            f"memory = {problem.memory}: the costs do not say how many bytes a stage holds; give held_bytes of layers, "
            "or stage_bytes, or the memory as a fraction of 1F1B's"
        )
    return problem


@dataclass
class _Planner:
    """The steps of a plan, and what they have found."""

    problem: Problem
    clock: Clock
    seed: int
    effort: float
    progress: Progress | None
    first: Schedule | None = None
    rows: list[Candidate] = field(default_factory=list)
    members: list[Member] = field(default_factory=list)
    bounds: dict[Setting, float] = field(default_factory=dict)
    best: tuple[float, Candidate, Setting, Timeline, Schedule] | None = None

    def run(self, counts: list[int], exact: bool) -> Plan:
        depths, asked = self.problem.stages_per_rank(), self.problem.recompute
        for choice in SHARES if asked == "auto" else (asked,):
            self.problem, self.members = replace(self.problem, recompute=choice), []
            for count in counts:
                self._named(count, depths)
                if self.best is not None and self.clock.is_past(_NAMED):
                    break
            if self.effort > 0 and not self.clock.is_over():
                self._search(self._promising(counts), depths)
        for count in counts if self.best is None else ():
            # what needs the least memory: it may fit, and if it does not, it says how much would do
            for name, schedule in candidates.least_memory(self.problem, count, depths):
                self._consider(name, self.problem.setting(schedule.placement, count), schedule)
        if self.best is None:
            raise ValueError(self._nothing_fits())
        return self._plan(exact and self._exact(depths))

    def _say(self, text: str) -> None:
        if self.progress is not None:
            self.progress(text, math.inf if self.best is None else self.best[0])

    def _named(self, num_microbatches: int, depths: list[int]) -> None:
        """Simulate every schedule of the registry."""
        seen: set[Schedule] = set()
        for name, schedule in self._starts(num_microbatches, depths):
            if isinstance(schedule, str):
                self.rows.append(Candidate(name, num_microbatches, refused=schedule))
                continue
            if schedule in seen:
                continue
            seen.add(schedule)
            self._say(f"simulating {name}")
            setting = self.problem.setting(schedule.placement, num_microbatches)
            name += {"none": "", "half": ", half recomputing", "full": ", recomputing"}[self.problem.recompute]
            self._consider(name, setting, schedule)
            found = search.member(self.problem, name, setting, schedule)
            if found is not None:
                self.members.append(found)
            if self.best is not None and self.clock.is_past(_NAMED):
                return

    def _starts(self, num_microbatches: int, depths: list[int]) -> Iterator[tuple[str, Schedule | str]]:
        """What the user gave, and the registry."""
        if self.first is not None and self.first.num_microbatches == num_microbatches:
            yield f"{self.first.name}, as given", self.first
        yield from candidates.from_registry(self.problem, num_microbatches, depths)

    def _consider(self, name: str, setting: Setting, schedule: Schedule) -> Candidate:
        """Lower and simulate; prove and keep it if it is the best that fits."""
        row, timeline = evaluate(self.problem, name, setting, schedule)
        self.rows.append(row)
        if row.fits and (self.best is None or self._is_better(row, self.best[1])):
            validate_program(timeline.program)
            validate_schedule(schedule)
            self.best = (self._value(row), row, setting, timeline, schedule)
        return row

    def _is_better(self, row: Candidate, best: Candidate) -> bool:
        """Whether it is shorter; or as short up to rounding, and simpler, smaller or with fewer messages."""
        value, shortest = self._value(row), self._value(best)
        if not math.isclose(value, shortest, rel_tol=_ROUNDING):
            return value < shortest
        one, other = ((c.copies, c.stages_per_rank, round(c.peak_memory, 9), c.messages) for c in (row, best))
        return one < other

    def _promising(self, counts: list[int]) -> list[int]:
        """The numbers of microbatches whose best schedule of the registry is shortest."""
        shortest = {count: math.inf for count in counts}
        for one in self.members:
            count = one.setting.num_microbatches
            shortest[count] = min(shortest[count], one.value)
        return sorted(counts, key=lambda count: (shortest[count], count))[:_SEARCHED_COUNTS]

    def _search(self, counts: list[int], depths: list[int]) -> None:
        members = [
            one for one in self.members if one.setting.num_microbatches in counts and self._may_gain(one.setting)
        ]
        listed: list[Member] = []
        constructions = self._constructions(counts, depths, least=0 if members else 2)
        calls = [partial(search.constructed, self.problem, one, _KEPT, self.clock) for one in constructions]
        with engine.in_parallel(calls, self.clock) as answers:
            for one, made in zip(constructions, answers, strict=True):
                self._say(f"list scheduling on {search.describe(one.setting.placement)}")
                listed += made
        members += listed
        improved = [] if engine.is_native() else listed
        work = search.WORK * self.effort
        for better in search.anneal(self.problem, members, work, self.seed, self.clock, self._bound_of):
            improved.append(better)
            self._say(f"annealing what began as {better.name}")
        for better in sorted(improved, key=lambda one: one.value)[:_FINALISTS]:
            less = search.recompute_less(self.problem, better, self.clock)
            moved = search.move_layers(self.problem, less, self.clock)
            row = self._consider(f"plan from {better.name}", moved.setting, moved.schedule())
            if moved is not better and not row.fits:
                self._consider(f"plan from {better.name}, not moved", better.setting, better.schedule())
            if moved.setting.cost.backward is not None:
                whole = candidates.join_backwards(moved.schedule())
                self._consider(f"plan from {better.name}, whole backwards", moved.setting, whole)

    def _constructions(self, counts: list[int], depths: list[int], least: int) -> list[Construction]:
        """What list scheduling is asked for: orders on every placement that may gain, at least so many."""
        found: list[Construction] = []
        work = _TRIES_WORK if engine.is_native() else _TRIES_WORK_PYTHON
        for number, (count, placement) in enumerate(_placements(self.problem, counts, depths)):
            tries = int(min(_TRIES * min(1.0, self.effort), work / (3 * placement.num_stages * count)))
            if found and self.clock.is_over():
                break
            setting = self.problem.setting(placement, count)
            if self._may_gain(setting):
                found.append(Construction(setting, self.seed * 31 + number, max(least, tries)))
        return found

    def _may_gain(self, setting: Setting) -> bool:
        """Whether the placement's bound lets an order of it be shorter than the best so far."""
        return self.best is None or not search.reaches_bound(self.best[0], self._bound_of(setting))

    def _bound_of(self, setting: Setting) -> float:
        """What no order of a setting is shorter than; 0 where layers may be cut otherwise, which has another bound."""
        if setting.parts is not None:
            return 0.0
        if setting not in self.bounds:
            self.bounds[setting] = bound_of(self.problem, setting)
        return self.bounds[setting]

    def _exact(self, depths: list[int]) -> bool:
        """Ask the solver about every placement for something shorter; whether all that is settled.

        Where one of them is too large to prove, nothing can be settled: the time goes to the best plan's windows.
        """
        assert self.best is not None
        count = self.best[2].num_microbatches
        placements = [placement for _, placement in _placements(self.problem, [count], depths)]
        possible = [self.best[2].placement, *placements]
        if not all(is_small(placement, count) for placement in possible):
            self._by_windows()
            return False
        settled = self.problem.placement is None or self.problem.placement.num_routes == 1
        least = math.inf
        for number, placement in enumerate(placements):
            self._say(f"solving {search.describe(placement)} exactly")
            setting = self.problem.setting(placement, count)
            share = max(0.1, self.clock.left() / (len(placements) - number))
            seconds = SECONDS if self.clock.limit is None else share
            schedule, bound = solve(self.problem, setting, self.best[0], seconds)
            if schedule is not None:
                self._consider(f"exact on {search.describe(placement)}", setting, schedule)
            whole = setting.cost.backward is None and setting.cost.overlapped is None
            settled = settled and whole
            least = min(least, bound)
        # The solver's transfers never wait for their receive to be posted; the plan's may.
        return settled and self.best[0] <= least * (1 + _ROUNDING)

    def _by_windows(self) -> None:
        """Have the solver order pieces of the best plan anew."""
        assert self.best is not None
        _, row, setting, _, schedule = self.best
        refuse_recompute(setting)
        found = search.member(self.problem, row.name, setting, schedule)
        if found is not None:
            clock = Clock(WINDOW_SECONDS) if self.clock.limit is None else self.clock
            better = improve_by_windows(self.problem, found, clock, self._say)
            if better is not found:
                name = f"plan by windows from {row.name.removeprefix('plan from ')}"
                self._consider(name, better.setting, better.schedule())

    def _plan(self, optimal: bool) -> Plan:
        assert self.best is not None
        _, chosen, setting, timeline, schedule = self.best
        # orders that began as one family may end with the same numbers: a row for all of them
        rows = [row._replace(chosen=row == chosen) for row in dict.fromkeys(self.rows)]
        rows.sort(key=lambda row: (row.refused is not None, not row.fits, not row.chosen, self._value(row)))
        return Plan(
            schedule=schedule,
            partition=None if setting.parts is None else list(setting.parts),
            timeline=timeline,
            objective=self.problem.objective,
            memory=self.problem.memory,
            bound=bound_of(self.problem, setting),
            bound_anywhere=bound_anywhere(self.problem, setting),
            candidates=rows,
            cut=self.clock.cut,
            optimal=optimal,
            recomputes=setting.recomputes,
            counts_bytes=self.problem.knows_bytes,
            counts_parameters=any(setting.parameters),
            annealed=engine.is_native() and self.effort > 0,
        )

    def _value(self, row: Candidate) -> float:
        return row.span if self.problem.span else row.makespan

    def _nothing_fits(self) -> str:
        if not self.rows:
            return (
                f"placement: no schedule of the registry has these stages there, and none was found with effort = "
                f"{self.effort:g} and memory = {self.problem.memory}; give more of what is little"
            )
        possible = [row for row in self.rows if row.refused is None]
        if not possible:
            return f"num_ranks = {self.problem.num_ranks}: no schedule takes these numbers: {self.rows[0].refused}"
        by_bytes = self.problem.memory is not None and self.problem.memory.unit == "bytes"
        least = min(possible, key=lambda row: row.peak_bytes if by_bytes else row.peak_memory)
        needs = f"{least.peak_memory / self.problem.num_ranks:.4g} of 1F1B's"
        if least.peak_bytes:
            needs += f", {math.ceil(least.peak_bytes)} bytes"
        return f"memory = {self.problem.memory}: nothing fits; the smallest, {least.name}, needs {needs}"


def _placements(problem: Problem, counts: list[int], depths: list[int]) -> Iterator[tuple[int, Placement]]:
    """Loops and waves of every depth, or where the stages have to be: those of one route."""
    num_ranks = problem.num_ranks
    for count in counts:
        if problem.placement is not None:
            if problem.placement.num_routes == 1:
                yield count, problem.placement
            continue
        for depth in depths:
            yield count, Placement.loop(num_ranks, depth)
            if depth > 1 and num_ranks > 1:
                yield count, Placement.wave(num_ranks, depth)
