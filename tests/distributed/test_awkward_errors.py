"""Exceptions whose own text, construction or pickling fails, and long ones: they reach all ranks like any other."""

from typing import Any, NoReturn

import pytest
import torch

from fastpipe.runtime.common.failure import MAX_TEXT, cause_text, first_line
from fastpipe.testing import Fault
from tests.conftest import paired
from tests.distributed.ranks import GroupOf
from tests.distributed.test_step import batch, caught, pipeline
from tests.patience import PATIENCE
from tests.runtime.models import CASES


class TextRaises(Exception):  # noqa: N818
    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


class TextExits(Exception):  # noqa: N818
    def __str__(self) -> str:
        raise SystemExit("no text")


class TextIsNone(Exception):  # noqa: N818
    def __str__(self) -> str:
        return None  # type: ignore[return-value]


class TakesTwo(Exception):  # noqa: N818
    def __init__(self, one: int, other: int) -> None:
        super().__init__("made of two")
        if one != 1 or other != 2:
            raise TypeError("give 1 and 2")


class NotPickled(Exception):  # noqa: N818
    def __reduce__(self) -> NoReturn:
        raise TypeError("it stays here")


class NoNotes(Exception):  # noqa: N818
    def add_note(self, note: str) -> NoReturn:
        raise TypeError("no notes")


ERRORS = {
    "TextRaises": TextRaises(),
    "TextExits": TextExits(),
    "TextIsNone": TextIsNone(),
    "TakesTwo": TakesTwo(1, 2),
    "NotPickled": NotPickled("here"),
    "NoNotes": NoNotes("here"),
    "ValueError": ValueError("x" * 3_000_000),
    "UnicodeError": UnicodeError("a lone surrogate \udc80"),
}


def raise_it(name: str, executor: str, *, backward: bool) -> dict[str, Any]:
    """Runs on every rank: the second step fails on rank 1, the third works."""
    layers = CASES["plain"].layers(8)
    at_call = 5 if torch.distributed.get_rank() == 1 else -1
    layers[6] = Fault(layers[6], at_call, ERRORS[name], backward=backward)
    pipe = pipeline(executor, stages=layers, timeout=PATIENCE)
    x, y = batch()
    pipe.step(x, target=y)
    try:
        pipe.step(x, target=y)
    except BaseException as error:
        found = {"type": type(error).__name__, "cause": getattr(error, "cause", ""), "mine": error is ERRORS[name]}
    ERRORS[name].with_traceback(None)  # which holds the pipeline
    return found | {"next": caught(lambda: pipe.step(x, target=y))[0]}


@pytest.mark.parametrize(
    ("name", "backward", "executor"),
    [(name, number // 2 % 2 == 1, executor) for number, (name, executor) in enumerate(paired(ERRORS))],
    indirect=["executor"],
)
def test_it_is_told_like_any_other(name: str, backward: bool, executor: str, group_of: GroupOf) -> None:
    zero, one = group_of(2).run(raise_it, name, executor, backward=backward)
    assert one["mine"] and zero["type"] == "StepError"
    assert zero["cause"].startswith(name) and len(zero["cause"]) < MAX_TEXT + 100
    assert zero["next"] == one["next"] == "nothing"


def test_texts_are_safe_and_short() -> None:
    assert cause_text(TextRaises()) == first_line(TextRaises()) == "TextRaises"
    assert cause_text(TextExits()) == first_line(TextExits()) == "TextExits"
    assert len(cause_text(ERRORS["ValueError"])) < MAX_TEXT + 100
    assert cause_text(ValueError("one\ntwo")) == "ValueError: one"
