"""Proved optima of small cases: the solver agrees with what is known, and the search with the solver."""

from __future__ import annotations

import sys
from fractions import Fraction
from typing import Any

import pytest

import fastpipe
from fastpipe import CostModel
from fastpipe.planner.exact import common_unit
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


def test_a_case_that_is_too_large_is_refused() -> None:
    pytest.importorskip("ortools", reason=UNCHECKED)
    with pytest.raises(ValueError, match="exact = True: 768 actions on 8 stages are too many"):
        fastpipe.plan(CostModel(), num_ranks=8, num_microbatches=32, effort=0, exact=True)


def test_without_the_solver_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ortools", "ortools.sat", "ortools.sat.python"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=r"pip install 'fastpipe\[exact\]'"):
        fastpipe.plan(CostModel(), num_ranks=2, num_microbatches=2, effort=0, exact=True)


def test_the_common_unit_of_durations() -> None:
    assert common_unit([1.0, 0.75, 0.1]) == Fraction(1, 20)
    assert common_unit([1 / 3, 0.5]) == Fraction(1, 6)
    with pytest.raises(ValueError, match="round the costs"):
        common_unit([2**0.5])
