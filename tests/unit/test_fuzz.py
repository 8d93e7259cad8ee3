"""Fuzz of the readers: never a crash, never a silent acceptance; what is accepted prints back to itself."""

import copy
import csv
import io
import json
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

import fastpipe
from fastpipe import Action, CostModel, Program, ProgramError, Schedule, ScheduleError, validate_program
from tests.unit.planning import hand

PIECES = st.sampled_from(
    [
        *"0123456789FBIW();,\n\r \t-+\"'٣é",
        "SEND_F",
        "RECV_B",
        "UNSHARD",
        "REDUCE_GRAD",
        "OVERLAP_F_B",
        "0F0",
        "0B0",
        "1F0",
    ]
)
TEXTS = st.lists(PIECES, max_size=14).map("".join) | st.text(max_size=12)
CELLS = st.sampled_from(
    ["", "0F0", "0B0", "1F0", "1B0", "0F1", "0B1", "0I0", "0W0", "(0F1;0B0)OVERLAP_F_B", "0UNSHARD"]
)
CSVS = st.lists(st.lists(CELLS | TEXTS, max_size=5).map(",".join), max_size=4).map("\n".join)


@given(TEXTS)
@settings(max_examples=400, deadline=None)
@example("(0F0;1B0)OVERLAP_F_B")
def test_action_text(text: str) -> None:
    try:
        action = Action.parse(text)
    except ValueError:
        return
    assert str(action) == text


@given(CSVS)
@settings(max_examples=400, deadline=None)
@example("0F0,,0B0")
@example('"0F0", 0B0')
@example('"' + "0" * 2**17)
@example("0F999999999")
def test_csv(text: str) -> None:
    text += "\n"
    try:
        schedule = Schedule.from_csv(text)
    except ScheduleError:
        return
    rows = [["".join(cell.split()) for cell in row] for row in csv.reader(io.StringIO(text, newline=None))]
    assert schedule.to_csv() == "".join(",".join(filter(None, row)) + "\n" for row in rows)
    try:
        program = fastpipe.lower(schedule)
    except ScheduleError:
        return
    assert Schedule.from_csv(program.to_csv()).without_transfers() == schedule.without_transfers()


PROGRAM = json.loads(
    fastpipe.lower(hand(["0F0 1F0 1B0 0B0 0F1 1F1 1B1 0B1", "2F0 2B0 2F1 2B1"], [0, 0, 1], 2)).to_json()
)
VALUES = (
    st.none() | st.booleans() | st.integers(-3, 20) | st.sampled_from([2**31, 0.5, "", "activation", [], {}, [[0]]])
)


def _places(data: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path] if path else []
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in items:
        found += _places(value, (*path, key))
    return found


PLACES = _places(PROGRAM)


@given(st.lists(st.tuples(st.sampled_from(PLACES), VALUES), min_size=1, max_size=3))
@settings(max_examples=400, deadline=None)
def test_program_json(changes: list[tuple[tuple[Any, ...], Any]]) -> None:
    data = json.loads(json.dumps(PROGRAM))
    for path, value in changes:
        target = data
        for key in path[:-1]:
            target = target[key] if isinstance(target, list | dict) and _has(target, key) else {}
        if isinstance(target, dict) or (isinstance(target, list) and _has(target, path[-1])):
            target[path[-1]] = copy.deepcopy(value)  # a strategy returns the same list or dict again
    try:
        program = Program.from_json(json.dumps(data) + "\n")
    except ProgramError:
        return
    assert json.loads(program.to_json()) == data
    try:
        validate_program(program)
    except ProgramError:
        return
    fastpipe.simulate(program)  # what was proved comes to its end


def _has(target: Any, key: Any) -> bool:
    return key in target if isinstance(target, dict) else isinstance(key, int) and key < len(target)


@given(
    st.dictionaries(st.sampled_from(["forward", "comm", "bandwidth", "overlapped", "x"]), VALUES, max_size=3) | VALUES
)
@settings(max_examples=200, deadline=None)
def test_costs_json(data: Any) -> None:
    try:
        cost = CostModel.from_json(json.dumps(data) + "\n")
    except ValueError:
        return
    assert CostModel.from_json(cost.to_json()) == cost
