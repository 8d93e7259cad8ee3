"""Mutations of schedules: each refused with an error that names rank, position and action."""

import contextlib
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fastpipe
from fastpipe import Placement, Schedule, ScheduleError, validate_schedule
from tests.unit.planning import hand, random_schedules, small_schedules

pytestmark = pytest.mark.filterwarnings("ignore:.*come in another order")


@pytest.mark.parametrize("schedule", small_schedules(), ids=repr)
def test_what_is_right_is_accepted(schedule: Schedule) -> None:
    assert validate_schedule(schedule) is schedule
    assert schedule.validate() is schedule


@given(random_schedules())
@settings(max_examples=40, deadline=None)
def test_every_order_that_can_run_is_accepted(schedule: Schedule) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        validate_schedule(schedule)


def _refused(orders: list[str], stage_to_rank: list[int], num_microbatches: int, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        validate_schedule(hand(orders, stage_to_rank, num_microbatches))


def test_dropped() -> None:
    _refused(["0F0 0B0", "1F0"], [0, 1], 1, "rank 1: stage 1, microbatch 0 has no B: add 1B0 to the order of rank 1")
    _refused(["0F0 0B0", "1B0"], [0, 1], 1, "rank 1: stage 1, microbatch 0 has no F: add 1F0")
    _refused(["0F0 0I0"], [0], 1, "has no W: add 0W0")
    _refused(["0F0 0W0"], [0], 1, "has no I: add 0I0")


def test_doubled() -> None:
    _refused(["0F0 0F0 0B0"], [0], 1, "rank 0, position 1, 0F0: 0F0 was already done at rank 0, position 0")
    _refused(["0F0 (0F0;0B0)OVERLAP_F_B"], [0], 1, r"rank 0, position 1, \(0F0;0B0\)OVERLAP_F_B: 0F0 was already done")


def test_misplaced() -> None:
    _refused(["0F0 1F0 0B0", "1B0"], [0, 1], 1, "rank 0, position 1, 1F0: stage 1 of microbatch 0 belongs to rank 1")
    _refused(["0F0 0B0 1UNSHARD", "1F0 1B0"], [0, 1], 1, "rank 0, position 2, 1UNSHARD: rank 0 does not hold stage 1")


def test_foreign_indices() -> None:
    _refused(["0F0 0B0 1F0"], [0], 1, "rank 0, position 2, 1F0: stage 1 is not one of 0 to 0")
    _refused(["0F0 0B0 0F1"], [0], 1, "rank 0, position 2, 0F1: microbatch 1 is not one of 0 to 0")


def test_mixed_backwards() -> None:
    _refused(["0F0 0B0 0W0"], [0], 1, r"rank 0: stage 0, microbatch 0 mixes B with W \(positions \[1, 2\]\)")
    _refused(["0F0 0I0 0B0 0W0"], [0], 1, "mixes B with I and W")


def test_swapped_names_the_cycle() -> None:
    message = (
        r"it waits in a cycle: rank 0 at position 1 \(0B0\) waits for 1B0 at position 2 of rank 1; "
        r"rank 1 at position 0 \(1F1\) waits for 0F1 at position 2 of rank 0"
    )
    _refused(["0F0 0B0 0F1 0B1", "1F1 1F0 1B0 1B1"], [0, 1], 2, message)
    _refused(["0B0 0F0"], [0], 1, r"rank 0 at position 0 \(0B0\) waits for 0F0 at position 1 of rank 0")
    _refused(["0F0 0W0 0I0"], [0], 1, r"rank 0 at position 1 \(0W0\) waits for 0I0")
    _refused(["(0F0;0B0)OVERLAP_F_B"], [0], 1, "waits in a cycle: rank 0 at position 0")


@given(random_schedules(), st.data())
@settings(max_examples=60, deadline=None)
def test_a_dropped_or_doubled_action_is_never_accepted(schedule: Schedule, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, schedule.num_ranks - 1))
    orders = [list(order) for order in schedule]
    position = data.draw(st.integers(0, len(orders[rank]) - 1))
    action = orders[rank][position]
    if data.draw(st.booleans()):
        orders[rank].insert(data.draw(st.integers(0, len(orders[rank]))), action)
        message = "already done"
    else:
        del orders[rank][position]
        message = f"rank {rank}: stage {action.stage}, microbatch {action.microbatch} "
    mutated = Schedule.from_actions("mutated", schedule.placement, schedule.num_microbatches, orders)
    if mutated.forward_only:
        return
    with pytest.raises(ScheduleError, match=message):
        validate_schedule(mutated)


@given(random_schedules(), st.data())
@settings(max_examples=60, deadline=None)
def test_a_swap_is_accepted_only_if_it_can_run(schedule: Schedule, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, schedule.num_ranks - 1))
    orders = [list(order) for order in schedule]
    a, b = (data.draw(st.integers(0, len(orders[rank]) - 1)) for _ in range(2))
    orders[rank][a], orders[rank][b] = orders[rank][b], orders[rank][a]
    mutated = Schedule.from_actions("mutated", schedule.placement, schedule.num_microbatches, orders)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            validate_schedule(mutated)
    except ScheduleError as error:
        assert "waits in a cycle: rank " in str(error)
    else:
        fastpipe.simulate(fastpipe.lower(mutated))


def test_two_routes_by_halves() -> None:
    placement = Placement.bidirectional(2)
    with pytest.raises(ScheduleError, match="rank 0, position 1, 0F1: .* rank 1"):
        validate_schedule(Schedule.from_actions("x", placement, 2, [["0F0", "0F1"], ["1F0", "1F1"]]))


def test_unused_fields_must_be_unused() -> None:
    columns = np.array([[0, 1], [0, 0], [0, 0], [-1, 0], [-1, -1]])
    with pytest.raises(ScheduleError, match=r"position 1, 0B0: \(1, 0, 0, 0, -1\)"):
        validate_schedule(Schedule("x", Placement.loop(1), 1, [columns]))


SUMS = [
    (["0F0 0F1 0I0 0I1 0W1 0W0"], [0], "rank 0, stage 0: its I come in another order than stage 0's W"),
    (["0F0 0F1 0I0 0I1 0W0 0W1", "1F0 1F1 1I0 1I1 1W1 1W0"], [0, 1], "rank 1, stage 1: its W come in another order"),
    (["0F0 0F1 0B0 0B1", "1F0 1F1 1B1 1B0"], [0, 1], "rank 1, stage 1: its B come in another order than stage 0's B"),
    (["0F0 0F1 0B0 0B1", "1F0 1F1 1I0 1I1 1W1 1W0"], [0, 1], "rank 1, stage 1: its W come in another order"),
    (["0F0 0F1 0B0 0B1", "1F0 (1F1;1B0)OVERLAP_F_B 1B1"], [0, 1], None),
    (["0F0 0F1 0I0 0I1 0W0 0W1"], [0], None),
    (["0F0 0F1 0B1 0B0", "1F0 1F1 1B1 1B0", "2F0 2F1 2B0 2B1"], [0, 1, 2], "rank 2, stage 2: its B come in another"),
    (["0F0 0F1 0B0 0B1", "1F0 1F1 1B1 1B0", "2F0 2F1 2B1 2B0"], [0, 1, 2], "rank 1, stage 1: its B come in another"),
]


@pytest.mark.parametrize(("orders", "stage_to_rank", "message"), SUMS)
def test_a_stage_that_sums_in_another_order_than_the_reference_is_a_warning(
    orders: list[str], stage_to_rank: list[int], message: str | None
) -> None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        validate_schedule(hand(orders, stage_to_rank, 2))
    assert [str(one.message)[: len(message or "")] for one in said] == ([] if message is None else [message])


@pytest.mark.parametrize("name", [family.name for family in fastpipe.list_schedules()])
def test_no_generated_schedule_sums_in_another_order(name: str) -> None:
    for p, m in ((1, 2), (2, 4), (3, 7), (4, 8)):
        with contextlib.suppress(ValueError):
            schedule = fastpipe.make_schedule(name, num_ranks=p, num_microbatches=m)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                schedule.validate()


def test_a_reduction_comes_once_and_last() -> None:
    validate_schedule(hand(["0F0 0I0 0W0 0REDUCE_GRAD"], [0], 1))
    _refused(["0F0 0I0 0REDUCE_GRAD 0W0"], [0], 1, "rank 0, position 2, 0REDUCE_GRAD: 0W0 comes after it; put it after")
    _refused(["0F0 0F1 0B0 0REDUCE_GRAD 0B1"], [0], 2, "rank 0, position 3, 0REDUCE_GRAD: 0B1 comes after it")
    overlapped = "0F0 0REDUCE_GRAD (0F1;0B0)OVERLAP_F_B 0B1"
    _refused([overlapped], [0], 2, r"position 1, 0REDUCE_GRAD: \(0F1;0B0\)OVERLAP_F_B comes after it")
    twice = "0F0 0B0 0REDUCE_GRAD 0REDUCE_GRAD"
    _refused([twice], [0], 1, "position 2, 0REDUCE_GRAD: it comes again at position 3; leave one")
