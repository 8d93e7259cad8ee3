"""Aside: what may never come to its end is done in a thread of its own, which may be left alone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import TypeVar

_T = TypeVar("_T")

Work = Callable[[], None]


def aside(works: Iterable[Work], name: str) -> list[threading.Thread]:
    """Begin each in a thread of its own, which may be left alone.

    Where there can be no more threads, as in an interpreter that is about to exit (Python 3.12), the rest is done here
    and now, when all threads have begun.
    """
    threads, left = [], []
    for work in works:
        thread = threading.Thread(target=work, name=name, daemon=True)
        try:
            thread.start()
        except RuntimeError:
            left.append(work)
        else:
            threads.append(thread)
    for work in left:
        work()
    return threads


def asked(question: Callable[[], _T], name: str) -> Future[_T]:
    """The same for what gives or raises something."""
    answer: Future[_T] = Future()

    def put() -> None:
        try:
            answer.set_result(question())
        except BaseException as error:  # raised by whoever asks for the answer
            answer.set_exception(error)

    aside([put], name)
    return answer
