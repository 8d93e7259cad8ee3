"""The planning library and the Python code say the same, bit for bit: on what is right and on what is not."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fastpipe
from fastpipe import CostModel, Program, Schedule, ScheduleError, native_plan, validate
from fastpipe.lower import lower
from fastpipe.simulate import simulate_program
from tests.conftest import native_expected
from tests.unit.planning import random_schedules, small_schedules, with_columns

pytestmark = pytest.mark.filterwarnings("ignore:.*come in another order")


@pytest.fixture(autouse=True)
def needs_the_library() -> None:
    """Skip without it; fail where it is expected to be."""
    if native_plan.library() is None:
        give_up = pytest.fail if native_expected() else pytest.skip
        give_up(native_plan.status())


COSTS = [
    CostModel(),
    CostModel(0.1, 0.7, 1 / 3, comm=0.05, backward=0.9, overlapped=1.1, bandwidth=3.0, activation_bytes=0.7),
    CostModel(0.3, 0.7, 0.4, recompute=0.75, activation_bytes=1.0, bandwidth=3.0),
    CostModel(comm={(0, 1): 0.3, (1, 0): 0.2}, bandwidth={(0, 1): 7.0}, activation_bytes=1.0),
]


def in_python(call: Callable[[], Any]) -> Any:
    """What the Python code alone says."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native_plan, "library", lambda: None)
        return call()


def outcome(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except ValueError as error:
        return type(error), str(error)


def same_program(a: Program, b: Program) -> bool:
    same = (a.channels, a.forward_only, a.num_microbatches) == (b.channels, b.forward_only, b.num_microbatches)
    return same and all(np.array_equal(x, y) for x, y in zip(a.columns, b.columns, strict=True))


def check_schedule(schedule: Schedule) -> None:
    assert native_plan.is_valid_schedule(schedule)
    for lookahead in (0, 1, 3, "all"):
        program = lower(schedule, recv_lookahead=lookahead)
        assert same_program(program, in_python(lambda n=lookahead: lower(schedule, recv_lookahead=n)))
        check_program(program)


def test_transfers_are_proved_beside_what_the_library_proves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only they are left to Python, and said of them is what Python alone says."""
    schedule = fastpipe.make_schedule("zbv", num_ranks=2, num_microbatches=3)
    loaded = Schedule.from_csv(fastpipe.lower(schedule, coalesce=True).to_csv())
    with monkeypatch.context() as patch:
        patch.setattr(validate, "_validate", lambda schedule: pytest.fail("it was proved in Python"))
        loaded.validate()
    for field in range(5):
        columns = [array.copy() for array in loaded.columns]
        position = int(np.flatnonzero(columns[0][0] == fastpipe.ActionKind.SEND_F)[0])
        columns[0][field, position] += 1
        wrong = Schedule("wrong", loaded.placement, 3, columns)
        refused = outcome(wrong.validate)
        assert isinstance(refused, tuple) and "rank 0, position" in refused[1]
        assert in_python(lambda wrong=wrong: outcome(wrong.validate)) == refused


def check_program(program: Program) -> None:
    channels = range(len(program.channels))
    assert native_plan.is_valid_program(program, list(channels))
    for cost in COSTS:
        for lanes in ("directed", "pair", "group"):
            times = outcome(lambda c=cost, n=lanes: simulate_program(program, c, lanes=n))
            expected = in_python(lambda c=cost, n=lanes: outcome(lambda: simulate_program(program, c, lanes=n)))
            if isinstance(times, tuple):
                assert times == expected
                continue
            for mine, theirs in zip((*times.starts, *times.ends), (*expected.starts, *expected.ends), strict=True):
                assert np.array_equal(mine, theirs)


@pytest.mark.without_torch
@pytest.mark.parametrize("schedule", small_schedules(), ids=repr)
def test_small_schedules(schedule: Schedule) -> None:
    check_schedule(schedule)


@given(random_schedules())
@settings(max_examples=40, deadline=None)
def test_random_schedules(schedule: Schedule) -> None:
    check_schedule(schedule)


def mutated_columns(columns: tuple[np.ndarray, ...], values: int, seed: int) -> list[np.ndarray]:
    """One to three changes: an entry of a column set, two instructions swapped, one dropped, one doubled."""
    generator = random.Random(seed)
    changed = [np.array(c) for c in columns]
    for _ in range(generator.randint(1, 3)):
        rank = generator.randrange(len(changed))
        rows, count = changed[rank].shape
        if not count:
            continue
        a, b = generator.randrange(count), generator.randrange(count)
        match generator.randrange(4):
            case 0:
                changed[rank][generator.randrange(rows), a] = generator.randint(-2, values)
            case 1:
                changed[rank][:, [a, b]] = changed[rank][:, [b, a]]
            case 2:
                changed[rank] = np.delete(changed[rank], a, axis=1)
            case _:
                changed[rank] = np.insert(changed[rank], b, changed[rank][:, a], axis=1)
    return [np.ascontiguousarray(c) for c in changed]


@given(st.sampled_from(small_schedules()), st.integers(0, 2**32))
@settings(max_examples=400, deadline=None)
def test_mutated_schedules(schedule: Schedule, seed: int) -> None:
    columns = mutated_columns(schedule.columns, 8, seed)
    try:
        mutated = Schedule("mutated", schedule.placement, schedule.num_microbatches, columns)
    except ScheduleError:
        return
    if mutated.without_transfers() is not mutated:
        assert not native_plan.is_valid_schedule(mutated)
        return
    verdict = in_python(lambda: outcome(mutated.validate))
    assert native_plan.is_valid_schedule(mutated) == (not isinstance(verdict, tuple)), verdict
    if not isinstance(verdict, tuple):
        check_schedule(mutated)


@given(st.sampled_from(small_schedules()), st.integers(0, 2**32))
@settings(max_examples=600, deadline=None)
def test_mutated_programs(schedule: Schedule, seed: int) -> None:
    program = lower(schedule)
    mutated = with_columns(program, mutated_columns(program.columns, 15, seed))
    lanes = list(range(len(program.channels)))
    verdict = in_python(lambda: outcome(lambda: fastpipe.validate_program(mutated)))
    native = native_plan.is_valid_program(mutated, lanes)
    assert native == (not isinstance(verdict, tuple)), verdict


def test_lowering_what_is_not_valid_is_left_to_python() -> None:
    incomplete = Schedule.from_actions("x", fastpipe.Placement.loop(2), 1, [["0F0"], ["1B0"]])
    assert native_plan.lower(incomplete, 1, 0) is None
    twice = Schedule.from_actions("x", fastpipe.Placement.loop(1), 1, [["0F0", "0F0", "0B0"]])
    assert native_plan.lower(twice, 1, 0) is not None  # a stage alone hands nothing on
    elsewhere = Schedule.from_actions("x", fastpipe.Placement.loop(2), 1, [["1F0"], ["0F0"]])
    assert native_plan.lower(elsewhere, 1, 0) is None


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    path = tmp_path / native_plan.PATH.name
    monkeypatch.setattr(native_plan, "PATH", path)
    native_plan.library.cache_clear()
    yield path
    monkeypatch.undo()
    native_plan.library.cache_clear()


def test_status(elsewhere: Path) -> None:
    assert native_plan.library() is None
    assert "was not built" in native_plan.status() and "without annealing" in native_plan.status()
    assert fastpipe.simulate(fastpipe.make_schedule("1f1b", num_ranks=2, num_microbatches=2)).makespan == 9


def test_a_library_that_does_not_fit_is_left_alone(elsewhere: Path) -> None:
    elsewhere.write_bytes(b"no library")
    assert native_plan.library() is None
    assert "is of another version of fastpipe" in native_plan.status()


@pytest.mark.without_torch
def test_the_library_is_loaded() -> None:
    assert native_plan.status() == f"{native_plan.PATH.name} is loaded: planning is native."
