"""Proved optima of small cases agree with what is known, and the search with them; windows of larger cases."""

import sys
from fractions import Fraction
from operator import add
from typing import Any

import pytest

import fastpipe
from fastpipe import CostModel
from fastpipe.placement import Placement
from fastpipe.planner import exact
from fastpipe.planner.candidates import evaluate
from fastpipe.planner.engine import Clock
from fastpipe.planner.exact import common_unit, solve
from fastpipe.planner.problem import Problem, memory_of
from fastpipe.planner.search import Construction, Member, constructed, member
from fastpipe.simulate import simulate_program

UNCHECKED = "OR-Tools is not installed: what the exact solver proves, and that the search agrees, is not checked"


def solved(costs: CostModel, **options: Any) -> fastpipe.Plan:
    pytest.importorskip("ortools", reason=UNCHECKED)
    settings = {"num_ranks": 2, "num_microbatches": 3, "max_stages_per_rank": 1, "effort": 0.01, "exact": True}
    return fastpipe.plan(costs, **{**settings, **options})


@pytest.mark.parametrize(("objective", "expected"), [("makespan", 10.0), ("span", 9.0)])
def test_the_optimum_of_a_small_case_is_proved(objective: str, expected: float) -> None:
    """Two ranks of one stage: the second starts one F late, and nothing else is lost."""
    plan = solved(CostModel(), objective=objective, memory=1.5, num_microbatches=3)
    assert plan.optimal and plan.value == pytest.approx(expected)
    assert "proved optimal" in str(plan)


def test_the_solver_finds_what_no_search_has_found() -> None:
    costs = CostModel(1.0, 1.5, 0.5, comm=0.25)
    plan = solved(costs, effort=0, memory=1.0, max_stages_per_rank=2)
    searched = fastpipe.plan(costs, num_ranks=2, num_microbatches=3, memory=1.0, max_stages_per_rank=2)
    assert plan.optimal and plan.bound <= plan.makespan <= searched.makespan <= plan.makespan + 1e-9


def test_nothing_is_proved_where_transfers_wait_for_their_receives() -> None:
    """The solver's transfers do not: it proves 5.2, which the same order takes with all receives posted at once."""
    costs = CostModel(0.2, 0.2, 0.2, comm=0.5)
    plan = solved(costs, memory=1.5, num_microbatches=6)
    at_once = simulate_program(fastpipe.lower(plan.schedule, recv_lookahead="all"), costs)
    assert at_once.makespan == pytest.approx(5.2) and plan.makespan > 6
    assert not plan.optimal and "proved" not in str(plan)


def listed(costs: CostModel, placement: Placement, num_microbatches: int, **options: Any) -> tuple[Problem, Member]:
    """The worst of the orders that list scheduling makes, for windows to improve."""
    pytest.importorskip("ortools", reason=UNCHECKED)
    settings = {"memory": None, "objective": "makespan", "max_stages_per_rank": 4, **options}
    settings["memory"] = memory_of(settings["memory"])
    problem = Problem(costs, placement.num_ranks, **settings)
    setting = problem.setting(placement, num_microbatches)
    return problem, constructed(problem, Construction(setting, seed=1, tries=20), keep=20, clock=Clock(None))[-1]


def checked(problem: Problem, better: Member) -> float:
    """What the simulation says of an order that is valid and fits."""
    row, _ = evaluate(problem, "plan", better.setting, better.schedule())
    assert row.fits
    return row.span if problem.span else row.makespan


@pytest.mark.parametrize("objective", ["makespan", "span"])
@pytest.mark.parametrize(("memory", "depth"), [(None, 1), (0.75, 2)])
def test_windows_make_a_bad_order_shorter(objective: str, memory: float | None, depth: int) -> None:
    """Windows of a seventh of the tasks, so that there is something before and behind most of them."""
    placement = Placement.loop(3, depth)
    options = {"memory": memory, "objective": objective}
    problem, bad = listed(CostModel(1.0, 1.5, 0.5, comm=0.25), placement, 12, **options)
    said: list[str] = []
    better = exact.improve_by_windows(problem, bad, Clock(None), said.append, size=len(bad.tasks) // 7)
    assert checked(problem, better) == pytest.approx(better.value) and better.value < bad.value
    assert said[0] == f"ordering actions 0 to {len(bad.tasks) // 7} of {len(bad.tasks)} anew"
    again = exact.improve_by_windows(problem, bad, Clock(None), said.append, size=len(bad.tasks) // 7)
    assert (again.order == better.order).all()


@pytest.mark.parametrize(("memory", "comm"), [(None, 0.25), (0.75, 0.0), (1.0, 0.25)])
def test_one_window_over_everything_is_the_whole_problem(memory: float | None, comm: float) -> None:
    problem, bad = listed(CostModel(1.0, 1.5, 0.5, comm=comm), Placement.wave(2, 2), 4, memory=memory)
    better = exact.improve_by_windows(problem, bad, Clock(None), lambda text: None)
    proved = solve(problem, bad.setting, bad.value)
    assert bad.value > better.value == pytest.approx(proved[1])


def test_releases_and_tails_say_the_makespan() -> None:
    """Wherever the window is, its ends and tails, or what avoids it, are the makespan that the order has."""
    problem, bad = listed(CostModel(1.0, 1.5, 0.5, comm=0.25), Placement.loop(3, 2), 6, memory=1.0)
    line = exact.Timing(exact.IntegerTasks(bad.tasks, problem.span), bad.order)
    size, sizes = len(bad.tasks) // 4, []
    for first in range(0, len(bad.tasks) - size):
        window = exact.Window(line, first, size)
        inside = [task for mine in window.tasks for task in mine]
        length = line.case.length
        longest = max(line.starts[task] + length[task] + window.tail[task] for task in inside)
        assert all(window.release[task] <= line.starts[task] for task in inside)
        assert max(longest, window.least) == window.most == max(map(add, line.starts, length))
        sizes.append(len(inside))
    assert size / 2 < min(sizes) and max(sizes) < len(bad.tasks)


@pytest.mark.parametrize("name", ["dualpipe", "1f1b"])
def test_windows_keep_fused_pairs_and_whole_backwards(name: str) -> None:
    pytest.importorskip("ortools", reason=UNCHECKED)
    costs = CostModel(1.0, 1.5, 0.5, backward=1.75, comm=0.25)
    schedule = fastpipe.make_schedule(name, num_ranks=4, num_microbatches=16)
    problem = Problem(costs, 4, memory_of(None), "makespan", 2, schedule.placement)
    begin = member(problem, name, problem.setting(schedule.placement, 16), schedule)
    assert begin is not None
    better = exact.improve_by_windows(problem, begin, Clock(None), lambda text: None, size=40)
    assert checked(problem, better) <= begin.value


def test_a_case_that_is_too_large_is_ordered_window_by_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact, "WINDOW_WORK", 0.5)
    costs = CostModel(1.0, 1.5, 0.5, comm=0.25)
    options = {"num_ranks": 8, "num_microbatches": 32, "memory": 0.75, "effort": 0.01, "max_stages_per_rank": 1}
    said: list[str] = []
    plan = solved(costs, **options, progress=lambda text, best: said.append(text))
    assert plan.value < fastpipe.plan(costs, **options).value
    assert plan.chosen.name.startswith("plan by windows from") and "plan from" not in plan.chosen.name
    assert not plan.optimal and plan.chosen.fits and not plan.cut
    assert "ordering actions 0 to 150 of 768 anew" in said


def test_windows_end_with_the_time_limit() -> None:
    costs = CostModel(1.0, 1.5, 0.5, comm=0.25)
    options = {"num_ranks": 8, "num_microbatches": 32, "memory": 0.75, "effort": 0, "max_stages_per_rank": 1}
    plan = solved(costs, **options, time_limit=0.3)
    assert plan.cut and not plan.optimal


@pytest.mark.parametrize("num_microbatches", [3, 32])
def test_the_solver_says_what_it_cannot_do(num_microbatches: int) -> None:
    options = {"num_ranks": 8, "effort": 0, "memory": 0.5, "num_microbatches": num_microbatches}
    with pytest.raises(ValueError, match="leave exact or recompute out"):
        solved(CostModel(), **options, recompute="full")
    with pytest.raises(ValueError, match="round the costs"):
        solved(CostModel(2**0.5), **options)


def test_without_the_solver_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ortools", "ortools.sat", "ortools.sat.python"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=r"pip install ortools"):
        fastpipe.plan(CostModel(), num_ranks=2, num_microbatches=2, effort=0, exact=True)


def test_the_common_unit_of_durations() -> None:
    assert common_unit([1.0, 0.75, 0.1]) == Fraction(1, 20)
    assert common_unit([1 / 3, 0.5]) == Fraction(1, 6)
    with pytest.raises(ValueError, match="round the costs"):
        common_unit([2**0.5])
