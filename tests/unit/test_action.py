import pytest

from fastpipe import Action, ActionKind
from fastpipe.action import NONE
from fastpipe.program import Op

TEXTS = ["2F0", "0B17", "3I1", "3W1", "1SEND_F3", "12RECV_F0", "4SEND_B5", "0RECV_B9", "(0F7;3B0)OVERLAP_F_B"]
STAGE_TEXTS = ["0UNSHARD", "7RESHARD", "1REDUCE_GRAD"]
WRONG = [
    "",
    " 2F0",
    "2F0 ",
    "2F0x",
    "2F",
    "F0",
    "2F-1",
    "-2F0",
    "02F0",
    "2F00",
    "2f0",
    "2X0",
    "2F0\n",
    "1٣F0",  # digits of another script
    "2F1000000000",
    "0UNSHARD3",
    "UNSHARD",
    "()OVERLAP_F_B",
    "(;)OVERLAP_F_B",
    "(0F7)OVERLAP_F_B",
    "(0F7;)OVERLAP_F_B",
    "(0F7;3B0;1F1)OVERLAP_F_B",
    "(3B0;0F7)OVERLAP_F_B",
    "(0F7;3I0)OVERLAP_F_B",
    "((0F7;3B0)OVERLAP_F_B;3B0)OVERLAP_F_B",
    "(0F7; 3B0)OVERLAP_F_B",
    "(0F7;3B0)OVERLAP",
]


@pytest.mark.parametrize("text", TEXTS + STAGE_TEXTS)
def test_text_both_ways(text: str) -> None:
    assert str(Action.parse(text)) == text


@pytest.mark.parametrize("text", WRONG)
def test_the_whole_text_or_nothing(text: str) -> None:
    with pytest.raises(ValueError, match="OVERLAP_F_B takes|not an action"):
        Action.parse(text)


def test_an_action_is_a_str() -> None:
    with pytest.raises(TypeError, match="int"):
        Action.parse(3)  # type: ignore[arg-type]


def test_fields() -> None:
    assert Action.parse("2F5") == (ActionKind.F, 2, 5, NONE, NONE)
    assert Action.parse("2UNSHARD") == (ActionKind.UNSHARD, 2, NONE, NONE, NONE)
    assert Action.parse("(0F7;3B1)OVERLAP_F_B") == (ActionKind.OVERLAP_F_B, 0, 7, 3, 1)


def test_parts() -> None:
    assert list(map(str, Action.parse("(0F7;3B1)OVERLAP_F_B").parts)) == ["0F7", "3B1"]
    assert Action.parse("2F5").parts == (Action.parse("2F5"),)


def test_an_overlap_takes_a_forward_and_a_full_backward() -> None:
    with pytest.raises(ValueError, match="an F and a B, .*0B0 and 0F0"):
        Action.overlap(Action.parse("0B0"), Action.parse("0F0"))


def test_compute_has_the_same_numbers_in_schedules_and_programs() -> None:
    # the C++ side has one table for both
    for kind in list(ActionKind)[: ActionKind.SEND_F]:
        assert Op[kind.name] == kind
