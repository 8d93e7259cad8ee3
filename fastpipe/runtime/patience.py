"""Patience with a store: who holds it may have been stopped, and then c10d waits for its answer without an end."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import wait
from typing import TypeVar

from fastpipe.runtime.aside import asked

_T = TypeVar("_T")

SECONDS = 10.0
"""An answer takes less than a millisecond, and on a machine that does much else a hundred times as long."""


class Patience:
    """Asks a store where nothing may hang, until it has not answered once.

    Args:
        seconds: how long an answer is waited for.
    """

    def __init__(self, seconds: float = SECONDS) -> None:
        self._seconds, self._answers = seconds, True

    def ask(self, question: Callable[[], _T], otherwise: _T) -> _T:
        """What the store says, or `otherwise` where it does not answer, or is gone.

        The question is put in a thread of its own, which is left alone if there is no answer. So is the store's client,
        that is not asked again: who asks while another one waits waits behind it.
        """
        if not self._answers:
            return otherwise
        answer = asked(question, "fastpipe-ask")
        self._answers = bool(wait([answer], self._seconds).done)
        try:
            return answer.result(0) if self._answers else otherwise
        except RuntimeError:
            return otherwise
