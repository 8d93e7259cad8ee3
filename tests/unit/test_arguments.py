"""Wrong arguments of the planning functions: one line that names the argument and the value."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fastpipe
from fastpipe import CostModel, Placement, Schedule

SCHEDULE: Any = fastpipe.make_schedule("1f1b", num_ranks=2, num_microbatches=3)
PROGRAM: Any = fastpipe.lower(SCHEDULE)
ANY: Any = fastpipe
"""The public functions, called with types that they do not take."""

CASES: list[tuple[Callable[[], Any], str]] = [
    (lambda: ANY.simulate(None), "work: expected a Schedule or a Program, found NoneType"),
    (lambda: ANY.simulate(SCHEDULE, {"forward": 1}), "cost: expected a CostModel, found dict"),
    (lambda: ANY.simulate(SCHEDULE, 0), "cost: expected a CostModel, found int"),
    (lambda: ANY.simulate(SCHEDULE, lanes=None), "lanes = None"),
    (lambda: ANY.lower(PROGRAM), "schedule: expected a Schedule, found Program"),
    (lambda: ANY.validate_schedule("1f1b"), "schedule: expected a Schedule, found str"),
    (lambda: ANY.validate_program(SCHEDULE), "program: expected a Program, found Schedule"),
    (lambda: ANY.plot(SCHEDULE, "x.png"), "timeline: expected a Timeline, found Schedule"),
    (lambda: ANY.plot(ANY.simulate(SCHEDULE), "x.png", width="a"), "width = 'a'"),
    (lambda: ANY.plot(ANY.simulate(SCHEDULE), "x.png", width=1), "width = 1"),
    (lambda: ANY.compare("1f1b", num_ranks=2, num_microbatches=3), "schedules: expected a list"),
    (lambda: ANY.compare(["1f1b"], num_ranks=2, num_microbatches=3, cost=1), "cost: expected a CostModel, found int"),
    (lambda: CostModel(forward=None), "forward = None"),  # type: ignore[arg-type]
    (lambda: CostModel(comm=10**400), "comm = 1000"),
    (lambda: ANY.make_schedule("zbv", num_ranks=2, num_microbatches=3, forward=10**400), "forward = 1000"),
    (lambda: ANY.partition("123", 2), "costs = '123'"),
    (lambda: ANY.partition(2.5, 2), "costs = 2.5"),
    (lambda: ANY.partition(-1, 1), "costs = -1"),
    (lambda: ANY.partition([1, "2"], 1), "costs[1] = '2'"),
    (lambda: ANY.partition([10**400], 1), "costs[0] = 1000"),
    (lambda: ANY.partition([1, 2], 1.0), "num_stages = 1.0"),
    (lambda: Placement(2.0, ((0, 1),)), "num_ranks = 2.0"),  # type: ignore[arg-type]
    (lambda: Placement(1, (("0",),)), "stage 0 is placed on rank '0'"),  # type: ignore[arg-type]
    (lambda: Schedule.from_actions("x", Placement.loop(1), ANY.action.NONE, [[]]), "num_microbatches = -1"),
    (lambda: Schedule.from_actions("x", Placement.loop(1), float("inf"), [[]]), "num_microbatches = inf"),  # type: ignore[arg-type]
    (lambda: Schedule.from_actions(["x"], Placement.loop(1), 1, [[]]), "name: expected a str"),  # type: ignore[arg-type]
    (lambda: Schedule.from_actions("x", Placement.loop(1), 1, [[0]]), "rank 0: give each action"),  # type: ignore[list-item]
    (lambda: SCHEDULE.chunk_order(-1), "rank = -1: ranks are 0 to 1"),
    (lambda: SCHEDULE.chunk_order(2), "rank = 2: ranks are 0 to 1"),
]


@pytest.mark.parametrize(("call", "message"), CASES, ids=[message for _, message in CASES])
def test_wrong_arguments_are_refused_by_name(call: Callable[[], Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError)) as refused:
        call()
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_file_of_costs_that_is_no_text_is_named(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"costs\.json: .*invalid start byte"):
        CostModel.from_json(path)


def test_whole_numbers_of_numpy_are_numbers() -> None:
    numbers: Any = {"num_ranks": np.int64(2), "num_microbatches": np.int32(3)}
    assert fastpipe.make_schedule("1f1b", **numbers) == SCHEDULE
    assert repr(fastpipe.make_schedule("1f1b", **numbers)) == repr(SCHEDULE)
