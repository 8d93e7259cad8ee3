import numpy as np
import pytest

import fastpipe
from fastpipe import Placement, Schedule, ScheduleError
from fastpipe.action import Action
from tests.unit.planning import hand, small_schedules


def test_a_schedule_is_a_sequence_of_ranks_and_a_rank_one_of_actions() -> None:
    s = fastpipe.make_schedule("1f1b", num_ranks=2, num_microbatches=3)
    assert len(s) == s.num_ranks == s.num_stages == 2
    assert s.num_actions == 12 and len(s[0]) == 6
    assert str(s[0]) == "0F0 0F1 0B0 0F2 0B1 0B2"
    assert s[0][0] == s[0][-6] == Action.parse("0F0")
    assert list(map(str, s[1][1:3])) == ["1B0", "1F1"]
    assert [str(rank) for rank in s] == [str(s[0]), str(s[1])]


def test_it_is_immutable_and_keeps_no_array_of_the_caller() -> None:
    mine = np.array([[0, 1], [0, 0], [0, 0], [-1, -1], [-1, -1]], dtype=np.int32)
    s = Schedule("mine", Placement.loop(1), 1, [mine])
    mine[0, 0] = 3
    assert str(s[0]) == "0F0 0B0"
    with pytest.raises(ValueError, match="read-only"):
        s.columns[0][0, 0] = 1


def test_equality_is_that_of_the_orders() -> None:
    a = fastpipe.make_schedule("1f1b", num_ranks=2, num_microbatches=3)
    b = Schedule.from_actions("other name", a.placement, 3, [list(rank) for rank in a])
    assert a == b and hash(a) == hash(b)
    assert a != fastpipe.make_schedule("gpipe", num_ranks=2, num_microbatches=3)
    assert a != fastpipe.make_schedule("1f1b", num_ranks=2, num_microbatches=4)
    assert a != "1f1b"


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ([], "1 ranks need as many arrays; found 0"),
        ([np.zeros((4, 2))], r"columns of rank 0: shape \(4, 2\); give \(5, number of actions\)"),
        ([np.zeros(5)], r"columns of rank 0: shape \(5,\)"),
        ([[[0, 12], [0, 0], [0, 0], [-1, -1], [-1, -1]]], "rank 0, position 1: 12 is no kind of action"),
        ([[[-1], [0], [0], [-1], [-1]]], "rank 0, position 0: -1 is no kind of action"),
    ],
)
def test_columns_that_are_none(columns: list, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        Schedule("mine", Placement.loop(1), 1, columns)


def test_no_microbatches() -> None:
    with pytest.raises(ValueError, match="num_microbatches = 0: give a whole number from 1"):
        Schedule.from_actions("mine", Placement.loop(1), 0, [[]])


def test_what_a_schedule_has() -> None:
    kinds = {s.name: (s.forward_only, s.splits_backward) for s in small_schedules()}
    assert kinds["stream"] == (True, False)
    assert kinds["1f1b"] == (False, False)
    assert kinds["dualpipev"] == (False, True)


def test_print_is_a_grid_of_time_steps() -> None:
    text = str(fastpipe.make_schedule("1f1b", num_ranks=2, num_microbatches=2))
    assert text.splitlines()[1:] == ["rank 0  0F0 0F1 .   0B0 .   0B1", "rank 1  .   1F0 1B0 1F1 1B1"]


def test_print_of_an_order_that_cannot_run_is_the_bare_order() -> None:
    assert "rank 0  0B0 0F0" in str(hand(["0B0 0F0"], [0], 1))


def test_time_steps_put_every_action_after_its_inputs() -> None:
    for s in small_schedules():
        at = {
            (part.kind, part.stage, part.microbatch): step
            for row in s.time_steps()
            for step, action in enumerate(row)
            if action is not None
            for part in action.parts
        }
        for (kind, stage, microbatch), step in at.items():
            if kind.name == "F" and stage:
                assert at[kind, stage - 1, microbatch] < step


def test_time_steps_and_rows_of_a_csv_are_orders() -> None:
    s = fastpipe.make_schedule("1f1b", num_ranks=2, num_microbatches=3)
    rows = [row.split(",") for row in s.to_csv(aligned=True).splitlines()]
    blank = [[cell or "   " for cell in row] for row in rows]
    for orders in (s.time_steps(), rows, blank):
        assert Schedule.from_actions("mine", s.placement, 3, orders) == s


def test_time_steps_show_stage_actions_too() -> None:
    rows = hand(["0UNSHARD 0F0 0B0 0REDUCE_GRAD"], [0], 1).time_steps()
    assert [str(action) for action in rows[0]] == ["0UNSHARD", "0F0", "0B0", "0REDUCE_GRAD"]


def test_chunk_order_is_that_of_make_graphed_callables() -> None:
    s = fastpipe.make_schedule("interleaved_1f1b", num_ranks=2, num_microbatches=2, stages_per_rank=2)
    assert s.chunk_order(1) == [1, 1, 2, -2, 2, -2, -1, -1]
    # W is part of no graph of its own
    assert hand(["0F0 0I0 0W0"], [0], 1).chunk_order(0) == [1, -1]


def test_without_transfers() -> None:
    s = hand(["0F0 0SEND_F0 0RECV_B0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0"], [0, 1], 1)
    assert [str(rank) for rank in s.without_transfers()] == ["0F0 0B0", "1F0 1B0"]
    compute = s.without_transfers()
    assert compute.without_transfers() is compute
