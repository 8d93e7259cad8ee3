"""The turns of a pair whose halves meet at all-to-alls."""

import signal
import threading
import time
from collections.abc import Callable
from contextvars import ContextVar, copy_context
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastpipe.runtime.common import torch_private
from fastpipe.runtime.stage.pairs import BACKWARD, FORWARD, OtherHalfError, Turns, in_turns, make_helper
from tests.patience import PATIENCE

Half = Callable[[], None]


def halves(log: list[str], num_forward: int, num_backward: int) -> tuple[Half, Half]:
    """Each notes its pieces, between which it passes the turn."""

    def half(name: str, num_exchanges: int) -> None:
        for piece in range(num_exchanges + 1):
            log.append(f"{name}{piece}")
            if piece < num_exchanges:
                torch_private.find_in_thread("fastpipe.turns").pass_on()

    return partial(half, "F", num_forward), partial(half, "B", num_backward)


@given(num_forward=st.integers(0, 6), num_backward=st.integers(0, 6), backward_first=st.booleans())
def test_the_order_depends_on_the_numbers_of_pieces_alone(
    num_forward: int, num_backward: int, backward_first: bool
) -> None:
    log: list[str] = []
    in_turns(make_helper(1), *halves(log, num_forward, num_backward), backward_first)
    pieces = [
        (i, "FB".index(name) != backward_first, name)
        for name, number in (("F", num_forward), ("B", num_backward))
        for i in range(number + 1)
    ]
    assert log == [f"{name}{i}" for i, _, name in sorted(pieces)]
    assert torch_private.find_in_thread("fastpipe.turns") is None


def test_both_halves_have_the_ranks_context_variables() -> None:
    """A backward that recomputes a layer would otherwise compute another one."""
    variable, helper, found = ContextVar("variable", default=0), make_helper(1), []

    def half() -> None:
        found.append(variable.get())

    for value in (1, 2):
        context = copy_context()
        context.run(variable.set, value)
        context.run(in_turns, helper, half, half, False)
    assert found == [1, 1, 2, 2]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("fails", ["F", "B"])
@pytest.mark.parametrize("backward_first", [False, True])
def test_a_failing_half_ends_the_other_one(fails: str, backward_first: bool, error: type[BaseException]) -> None:
    log: list[str] = []
    forward, backward = halves(log, 3, 3)

    def failing(half: Half) -> None:
        torch_private.find_in_thread("fastpipe.turns").pass_on()
        raise error("on purpose")

    chosen = [partial(failing, half) if name == fails else half for name, half in (("F", forward), ("B", backward))]
    with pytest.raises(error, match="on purpose"):
        in_turns(make_helper(1), *chosen, backward_first)
    # the other one came to its second piece at most
    assert len(log) == (2 if backward_first == (fails == "F") else 1)


def test_an_interrupt_waits_for_the_other_half() -> None:
    """The backward uses tensors that the caller frees."""
    ended = threading.Event()

    def backward() -> None:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        time.sleep(0.1)
        ended.set()

    with pytest.raises(KeyboardInterrupt):
        in_turns(make_helper(1), lambda: None, backward, False)
    assert ended.is_set()


def test_an_interrupt_beside_a_failed_half_is_raised() -> None:
    turns = Turns(BACKWARD)
    turns._fail()
    turns.run(FORWARD, lambda: pytest.fail("must not run"))

    def interrupted() -> None:
        raise KeyboardInterrupt

    other = Turns(FORWARD)
    with pytest.raises(KeyboardInterrupt):
        other.run(FORWARD, interrupted)
    with pytest.raises(OtherHalfError):
        other.pass_on()


def test_the_turn_waits_for_the_other_half() -> None:
    """A half that has the turn is alone, however long it takes."""
    turns = Turns(FORWARD)
    began, ended = threading.Event(), threading.Event()
    other = threading.Thread(target=turns.run, args=(BACKWARD, began.set))
    other.start()

    def half() -> None:
        assert not began.wait(0.05)
        turns.pass_on()
        assert began.is_set()
        ended.set()

    turns.run(FORWARD, half)
    other.join(PATIENCE)
    assert ended.is_set()
