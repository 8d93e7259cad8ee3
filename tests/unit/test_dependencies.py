import pytest

from fastpipe import Action, ActionKind, Placement
from fastpipe.action import NONE
from fastpipe.dependencies import Event, Play, feeds, needs, produces


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0F0", ()),
        ("2F0", ((Event.FORWARD, 1),)),
        ("2B0", ((Event.FORWARD, 2), (Event.BACKWARD, 3))),
        ("2I0", ((Event.FORWARD, 2), (Event.BACKWARD, 3))),
        ("3B0", ((Event.FORWARD, 3),)),
        ("3I0", ((Event.FORWARD, 3),)),
        ("2W0", ((Event.BACKWARD, 2),)),
        ("2UNSHARD", ()),
    ],
)
def test_what_an_action_waits_for(text: str, expected: tuple) -> None:
    action = Action.parse(text)
    assert needs(action.kind, action.stage, 4) == expected


def test_what_an_action_brings_about() -> None:
    assert produces(ActionKind.F) == (Event.FORWARD,)
    assert produces(ActionKind.B) == (Event.BACKWARD, Event.WEIGHT)
    assert produces(ActionKind.I) == (Event.BACKWARD,)
    assert produces(ActionKind.W) == (Event.WEIGHT,)
    assert produces(ActionKind.UNSHARD) == ()


def test_where_results_go() -> None:
    assert [feeds(ActionKind.F, s, 3) for s in range(3)] == [1, 2, NONE]
    assert [feeds(ActionKind.B, s, 3) for s in range(3)] == [NONE, 0, 1]
    assert [feeds(ActionKind.I, s, 3) for s in range(3)] == [NONE, 0, 1]
    assert feeds(ActionKind.W, 1, 3) == NONE


def _orders(*texts: str) -> list[list[Action]]:
    return [[Action.parse(text) for text in order.split()] for order in texts]


def test_play_runs_everything_as_early_as_it_can() -> None:
    played = Play(_orders("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"), Placement.loop(2), 2)
    assert played.starts == [[0, 1, 3, 5], [1, 2, 3, 4]]
    assert not played.stuck


def test_play_runs_a_fused_pair_when_both_halves_can() -> None:
    played = Play(_orders("0F0 (0F1;0B0)OVERLAP_F_B", "1F0 1B0 1F1"), Placement.loop(2), 2)
    assert played.starts == [[0, 3], [1, 2, 4]]


def test_play_says_who_is_stuck_on_what() -> None:
    played = Play(_orders("0F0 0B0 0F1", "1F1 1F0"), Placement.loop(2), 2)
    assert played.stuck == {0: (1, Event.BACKWARD, 1, 0), 1: (0, Event.FORWARD, 0, 1)}
    assert played.starts == [[0], []]
