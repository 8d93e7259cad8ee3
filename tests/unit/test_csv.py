from pathlib import Path

import pytest

import fastpipe
from fastpipe import Schedule, ScheduleError
from tests.unit.planning import hand, small_schedules


@pytest.mark.parametrize("schedule", small_schedules(), ids=repr)
def test_csv_both_ways(schedule: Schedule, tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    text = schedule.to_csv(path)
    assert path.read_text() == text
    loaded = Schedule.from_csv(path)
    assert loaded == schedule and loaded.name == "mine" and loaded.to_csv() == text
    assert Schedule.from_csv(text, name="other").name == "other"


@pytest.mark.parametrize("schedule", small_schedules(), ids=repr)
def test_aligned_columns_are_time_steps(schedule: Schedule) -> None:
    text = schedule.to_csv(aligned=True)
    rows = [row.split(",") for row in text.splitlines()]
    assert len({len(row) for row in rows}) == 1
    assert len(rows[0]) == max(map(len, schedule.time_steps()))
    assert Schedule.from_csv(text) == schedule


@pytest.mark.parametrize(
    "text",
    [
        "0F0,,0B0,\r\n,1F0,1B0\r\n",
        "0F0,0B0\n1F0,1B0",
        "0F0, 0B0\n\t1F0 ,   ,1B0 \n",
        '"0F0","0B0",""\n"1F0",1B0\n',
    ],
)
def test_idle_cells_spaces_quotes_and_line_ends(text: str) -> None:
    assert Schedule.from_csv(text).to_csv() == "0F0,0B0\n1F0,1B0\n"


def test_spaces_within_a_pair() -> None:
    loaded = Schedule.from_csv("0F0, ( 0F1; 0B0 )OVERLAP_F_B ,0B1\n")
    assert loaded.to_csv() == "0F0,(0F1;0B0)OVERLAP_F_B,0B1\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0B0x\n1F0,1B0\n", "row 1, column 2: not an action: '0B0x'"),
        ("0F0,0B0\n1F0,,1Q0\n", "row 2, column 3: not an action: '1Q0'"),
        ("0F0,0 B0\n", "row 1, column 2: not an action: '0 B0'"),
        ('"0F0,0B0\n1F0,1B0\n', "row 1, column 1: not an action"),
        ("0F0,()OVERLAP_F_B\n", "row 1, column 2: not an action"),
        ("0F0,0UNSHARD1\n", "row 1, column 2: .* UNSHARD takes a stage and no microbatch"),
        ("0F0,0B\n", "row 1, column 2: .* B takes a stage and a microbatch"),
        ("0F0,(0B0;0F1)OVERLAP_F_B\n", "row 1, column 2: OVERLAP_F_B takes an F and a B"),
        ("\n", "there is no forward on any rank"),
        ("0B0\n", "there is no forward on any rank"),
        ("0F0,0B0\n\n", "row 2 is blank: a row is a rank"),
        ("0F0,0B0\n,,\r\n\n", "row 2 is blank: a row is a rank"),
        ("\n0F0,0B0\n", "row 1 is blank: a row is a rank"),
        ("0F0,2F0\n", "microbatch 0 has no forward of stage 1"),
        ("0F1\n", "microbatch 0 has no forward of stage 0"),
        ("999999999F999999999\n", "microbatch 0 has no forward of stage 0"),
        ("0F0,1F0,1F1\n", "microbatch 1 has no forward of stage 0"),
    ],
)
def test_strict(text: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        Schedule.from_csv(text)


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ScheduleError, match="is no text"):
        Schedule.from_csv(path)


def test_a_file_of_a_spreadsheet(tmp_path: Path) -> None:
    path = tmp_path / "marked.csv"
    path.write_text("0F0,0B0\n1F0,1B0\n", encoding="utf-8-sig")
    assert Schedule.from_csv(path).to_csv() == "0F0,0B0\n1F0,1B0\n"


def test_an_error_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text("0F0,0B0\n1F0,1Q0\n")
    with pytest.raises(ScheduleError, match=r"^\S*mine\.csv: row 2, column 2: not an action: '1Q0'"):
        Schedule.from_csv(path)
    path.write_text("0F0,0B0\n1F0,1B0\n\n")
    with pytest.raises(ScheduleError, match=r"^\S*mine\.csv: row 3 is blank"):
        Schedule.from_csv(path)


def test_two_routes_are_read_off_the_first_and_the_last_microbatch() -> None:
    loaded = Schedule.from_csv("0F0,1F1,0B0,1B1\n1F0,0F1,1B0,0B1\n")
    assert loaded.placement.routes == ((0, 1), (1, 0))


def test_a_program_prints_as_compute_with_transfers() -> None:
    s = fastpipe.make_schedule("1f1b", num_ranks=2, num_microbatches=1)
    program = fastpipe.lower(s)
    assert program.to_csv() == "0RECV_B0,0F0,0SEND_F0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n"


@pytest.mark.parametrize("schedule", small_schedules(), ids=repr)
def test_compute_with_transfers_both_ways(schedule: Schedule, tmp_path: Path) -> None:
    path = tmp_path / "comms.csv"
    text = fastpipe.lower(schedule, coalesce=True).to_csv(path)
    loaded = Schedule.from_csv(path).validate()
    assert loaded.to_csv() == text
    assert loaded.without_transfers() == schedule
    assert fastpipe.lower(loaded, coalesce=True).to_csv() == text


@pytest.mark.parametrize("name", ["dualpipev", "zbv", "hanayo"])
def test_activations_and_gradients_between_two_ranks_have_one_order(name: str) -> None:
    """Programs with a lane for each of them post receives in another order than torch would need."""
    schedule = fastpipe.make_schedule(name, num_ranks=4, num_microbatches=8)
    loaded = Schedule.from_csv(fastpipe.lower(schedule).to_csv())
    with pytest.raises(ScheduleError, match="receives the gradient .* sends the activation"):
        loaded.validate()


@pytest.mark.parametrize(
    ("orders", "message"),
    [
        (["0F0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0"], "rank 0, position 0: the activation for stage 1 .* is never sent"),
        (["0F0 0SEND_F0 0RECV_B0 0B0", "1F0 1B0 1SEND_B0"], "rank 1, position 0: .* is never received"),
        (["0SEND_F0 0F0 0RECV_B0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0"], "rank 0, position 0, 0SEND_F0: .* position 1"),
        (["0F0 0SEND_F0 0B0 0RECV_B0", "1RECV_F0 1F0 1B0 1SEND_B0"], "rank 0, position 3, 0RECV_B0: .* position 2"),
        (["0F0 0SEND_F0 0SEND_F0 0RECV_B0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0"], "rank 0, position 2, .* already done"),
        (["0F0 0SEND_F0 0RECV_B0 0B0", "1RECV_F0 1F0 1SEND_F0 1B0 1SEND_B0"], "rank 1, position 2, .* nothing goes"),
        (["0F0 0SEND_F0 1RECV_F0 0RECV_B0 0B0", "1F0 1B0 1SEND_B0"], "rank 0, position 2, .* belongs to rank 1"),
    ],
)
def test_transfers_that_were_loaded_are_proved(orders: list[str], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        hand(orders, [0, 1], 1).validate()


def test_transfers_that_cross_are_refused() -> None:
    good = [
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0RECV_B1 0B0 0B1",
        "1RECV_F0 1RECV_F1 1F0 1F1 1B0 1SEND_B0 1B1 1SEND_B1",
    ]
    hand(good, [0, 1], 2).validate()
    crossed = [good[0], good[1].replace("1RECV_F0 1RECV_F1", "1RECV_F1 1RECV_F0")]
    with pytest.raises(ScheduleError, match="rank 1, position 0: .* microbatch 1, .*rank 0"):
        hand(crossed, [0, 1], 2).validate()
