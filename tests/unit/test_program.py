import json
from pathlib import Path

import numpy as np
import pytest

import fastpipe
from fastpipe import Instruction, Op, Program, ProgramError, Schedule, validate_program
from tests.unit.planning import hand, small_schedules, with_columns


def test_a_program_is_a_sequence_of_ranks_and_a_rank_one_of_instructions() -> None:
    program = fastpipe.lower(hand(["0F0 0B0", "1F0 1B0"], [0, 1], 1))
    assert len(program) == program.num_ranks == program.num_stages == 2
    assert program.num_instructions == sum(len(rank) for rank in program) == 14
    assert program[0][1] == program[0][-6] == Instruction(Op.F, 0, 0)
    assert program[1][2:4] == [Instruction(Op.F, 1, 0), Instruction(Op.B, 1, 0)]


def test_print_names_peer_channel_and_slot() -> None:
    program = fastpipe.lower(hand(["0F0 0B0", "1F0 1B0"], [0, 1], 1))
    text = str(program[1])
    assert text.splitlines()[0] == "rank 1: 7 instructions, 1 receive slots, 1 sends"
    assert "     0  POST_RECV   activation of stage 1 microbatch 0, peer 0, channel 0 (activation 0->1), slot 0" in text
    assert "     2  F           1F0" in text
    assert "     4  SEND        gradient of stage 1 microbatch 0, peer 0, channel 1 (gradient 1->0), send 0" in text
    assert "2 ranks, 2 stages, 1 microbatches, 14 instructions, 2 channels" in str(program)


def test_stage_actions_print() -> None:
    program = fastpipe.lower(hand(["0UNSHARD 0F0 0B0"], [0], 1))
    assert "UNSHARD     stage 0" in str(program[0])


def test_predicted_peaks() -> None:
    program = fastpipe.lower(fastpipe.make_schedule("1f1b", num_ranks=4, num_microbatches=8))
    assert program.peak_activations == (4, 3, 2, 1)
    split = fastpipe.lower(hand(["0F0 0I0 0F1 0I1 0W0 0W1"], [0], 2))[0]
    assert (split.peak_activations, split.peak_activations_released_at_input) == (2, 1)
    gpipe = fastpipe.lower(fastpipe.make_schedule("gpipe", num_ranks=2, num_microbatches=5))
    assert gpipe.peak_activations == (5, 5)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ([], "columns: 1 ranks need as many; found 0"),
        ([np.zeros((7, 1), dtype=np.int64)], r"columns of rank 0: int64 \(7, 1\); give int32"),
        ([np.zeros((6, 1), dtype=np.int32)], r"columns of rank 0: int32 \(6, 1\); give int32 \(7, instructions\)"),
    ],
)
def test_columns_that_are_none(columns: list, message: str) -> None:
    program = fastpipe.lower(hand(["0F0 0B0"], [0], 1))
    with pytest.raises(ProgramError, match=message):
        with_columns(program, columns)


@pytest.mark.parametrize("schedule", small_schedules(), ids=repr)
def test_json_both_ways(schedule: Schedule, tmp_path: Path) -> None:
    program = fastpipe.lower(schedule)
    path = tmp_path / "program.json"
    text = program.to_json(path)
    assert path.read_text() == text
    loaded = validate_program(Program.from_json(path))
    assert str(loaded) == str(program) and loaded.to_json() == text
    assert loaded.forward_only == program.forward_only and loaded.placement.routes == program.placement.routes


def _changed(**changes: object) -> str:
    data = json.loads(fastpipe.lower(hand(["0F0 0B0", "1F0 1B0"], [0, 1], 1)).to_json())
    return json.dumps({key: value for key, value in {**data, **changes}.items() if value is not ...}) + "\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{\n", "no JSON"),
        ("[]\n", "no program: give an object"),
        (_changed(format="other"), "format = 'other': this reads 'fastpipe program 1'"),
        (_changed(ranks=...), "ranks is missing"),
        (_changed(more=1), "more: there is no such entry"),
        (_changed(name=3), "name = 3: give a string"),
        (_changed(num_ranks=0), "num_ranks = 0: give a whole number of at least 1"),
        (_changed(num_microbatches=True), "num_microbatches = True"),
        (_changed(forward_only=1), "forward_only = 1: give true or false"),
        (_changed(routes=[[0, 5]]), "stage 1 is placed on rank 5"),
        (_changed(routes=[[0, "1"]]), r"routes = \[\[0, '1'\]\]: give lists of whole numbers"),
        (_changed(channels=[[0, 1]]), r"channels\[0\] = \[0, 1\]: give \[source, destination, 'activation' or"),
        (_changed(channels=[[0, 1, "weights"]]), r"channels\[0\]"),
        (_changed(ranks=[[]]), "columns: 2 ranks need as many; found 1"),
        (_changed(ranks=[[[0] * 6], []]), r"ranks\[0\]\[0\]: give 7 whole numbers"),
        (_changed(ranks=[[], [[0] * 6 + [1 << 40]]]), r"ranks\[1\]\[0\]: give 7 whole numbers"),
        (_changed(ranks=[[], [[0] * 6 + [0.5]]]), r"ranks\[1\]\[0\]: give 7 whole numbers"),
        (_changed(ranks=7), "ranks = 7: give a list of instructions a rank"),
    ],
)
def test_json_is_strict(text: str, message: str) -> None:
    with pytest.raises(ProgramError, match=message):
        Program.from_json(text)
