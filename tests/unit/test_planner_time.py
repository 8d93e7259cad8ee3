"""What a time limit does to a plan's search, told by clocks that tests set."""

import math
from typing import Any

import pytest

import fastpipe
from fastpipe import CostModel, Placement, native_plan
from fastpipe.planner import candidates, engine, exact, planner, search
from fastpipe.planner.engine import Clock
from fastpipe.planner.planner import plan
from fastpipe.planner.problem import Problem, memory_of
from fastpipe.planner.search import Member

COSTS = CostModel(1.0, 1.5, 0.5, comm=0.1)


class SetClock(Clock):
    """Time goes on by one step whenever it is looked at."""

    def __init__(self, limit: float | None, step: float) -> None:
        super().__init__(limit)
        self.now, self.step = 0.0, step

    def elapsed(self) -> float:
        self.now += self.step
        return self.now


def start() -> tuple[Problem, Member]:
    problem = Problem(COSTS, 3, None, "makespan", 2)
    schedule = fastpipe.make_schedule("zb_h1", num_ranks=3, num_microbatches=9)
    found = search.member(problem, "zb_h1", problem.setting(schedule.placement, 9), schedule)
    assert found is not None
    return problem, found


def heats(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> list[tuple[float, float]]:
    """The heats of every slice of one round of one annealing."""
    seen: list[tuple[float, float]] = []
    real = engine.search

    def spied(*args: Any, **options: Any) -> Any:
        begun = real(*args, **options)
        assert begun is not None
        improve = begun.improve

        def noted(attempts: int, hot: float, cold: float) -> None:
            seen.append((hot, cold))
            improve(attempts, hot, cold)

        monkeypatch.setattr(begun, "improve", noted)
        return begun

    monkeypatch.setattr(engine, "search", spied)
    monkeypatch.setattr(search, "_ROUNDS_OF_FEW", ((1, 1.0, 1.0),))
    problem, one = start()
    list(search.anneal(problem, [one], 2e5, 0, clock, lambda setting: 0.0))
    return list(seen)


@pytest.mark.skipif(native_plan.library() is None, reason="the planning library is not built")
@pytest.mark.parametrize("limit", [None, 1e6])
def test_with_time_enough_it_cools_down_step_by_step(monkeypatch: pytest.MonkeyPatch, limit: float | None) -> None:
    clock = SetClock(limit, 1.0)
    seen = heats(monkeypatch, clock)
    assert len(seen) == search._SLICES and not clock.cut
    assert all(before[1] == pytest.approx(after[0]) for before, after in zip(seen, seen[1:], strict=False))
    assert seen[0][0] == pytest.approx(seen[-1][1] / search._COLD)


@pytest.mark.skipif(native_plan.library() is None, reason="the planning library is not built")
def test_what_is_late_cools_down_sooner(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half the time that all slices would take: about half of them, from the same heat to nearly the same cold."""
    whole = heats(monkeypatch, SetClock(None, 1.0))
    clock = SetClock(2.0 * search._SLICES, 2.0)  # a slice looks twice
    seen = heats(monkeypatch, clock)
    assert clock.cut
    assert search._SLICES / 5 < len(seen) < search._SLICES * 2 / 3
    assert seen[0] == whole[0] and seen[-1][1] < whole[len(whole) * 2 // 3][1]


def test_what_is_cut_has_looked_at_what_is_nearly_the_best_first() -> None:
    """Of much, most of a time limit goes to simulating; what came first was a plan of ten times the length."""
    found = [
        label for label, _ in candidates.from_registry(Problem(COSTS, 4, memory_of(0.75), "makespan", 4), 8, [2, 4])
    ]
    families = list(dict.fromkeys(label.split("(")[0] for label in found))
    assert families[0] == "wave_zb" and families[-1] == "loop_zb"


def test_a_limit_that_does_not_cut_changes_nothing() -> None:
    options: dict[str, Any] = {"num_ranks": 4, "num_microbatches": 8, "effort": 0.02}
    free, limited = plan(COSTS, **options), plan(COSTS, **options, time_limit=1e4)
    assert free.schedule == limited.schedule and not limited.cut


def test_the_placements_share_what_the_exact_solver_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[float] = []

    def solve(problem: Problem, setting: Any, known: float, seconds: float) -> tuple[None, float]:
        given.append(seconds)
        return None, 0.0

    monkeypatch.setattr(planner, "solve", solve)
    options: dict[str, Any] = {
        "num_ranks": 2,
        "num_microbatches": 2,
        "max_stages_per_rank": 2,
        "effort": 0,
        "exact": True,
    }
    plan(COSTS, **options)
    assert given == [exact.SECONDS] * 3  # a loop of one and of two stages per rank, and a V
    given.clear()
    monkeypatch.setattr(Clock, "left", lambda clock: math.inf if clock.limit is None else clock.limit)
    plan(COSTS, **options, time_limit=600.0)
    assert given == [200.0, 300.0, 600.0]


def test_a_schedule_that_recomputes_is_a_start_where_it_would_not_fit_otherwise() -> None:
    """What its stages keep counts, not what they would hold without recomputing."""
    problem = Problem(COSTS, 4, memory_of(0.5), "makespan", 1, recompute="full")
    schedule = fastpipe.make_schedule("1f1b", num_ranks=4, num_microbatches=8)
    setting = problem.setting(Placement.loop(4), 8)
    assert search.member(problem, "1f1b", setting, schedule) is not None
    plain = Problem(COSTS, 4, memory_of(0.5), "makespan", 1)
    assert search.member(plain, "1f1b", plain.setting(Placement.loop(4), 8), schedule) is None
