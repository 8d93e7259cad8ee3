"""Waiting for events that may never come: with pauses, in a thread that may be left behind, and for calls of c10d.

c10d's own waits neither handle signals nor notice that a peer has exited: a store whose host process is stopped does
not answer, and `store.wait` writes two warnings for every timeout. So the store is polled, and calls that may block
run in threads.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from datetime import timedelta
from typing import Any, TypeVar

from fastpipe.runtime.common.failure import Failure, FailureError, lost_peer

LOOK_SECONDS = 0.1
"""The longest pause."""
_PAUSE_SECONDS = 0.001


def pauses(seconds: float) -> Iterator[float]:
    """Pauses until the time is over: short ones at first, as most things come soon."""
    start = now = time.monotonic()
    while now < start + seconds:
        yield min(_PAUSE_SECONDS + (now - start) / 10, LOOK_SECONDS, start + seconds - now)
        now = time.monotonic()


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
        except BaseException as error:  # raised where the answer is read
            answer.set_exception(error)

    aside([put], name)
    return answer


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
        """The store's answer, or `otherwise` where it does not answer, or is gone.

        The question is put in a thread of its own, which is left alone if there is no answer. So is the store's client,
        that is not asked again: a further question would wait behind the first one.
        """
        if not self._answers:
            return otherwise
        answer = asked(question, "fastpipe-ask")
        self._answers = bool(wait([answer], self._seconds).done)
        try:
            return answer.result(0) if self._answers else otherwise
        except RuntimeError:
            return otherwise


def waiting(seconds: float, lost: Callable[[], Failure | None]) -> Iterator[float]:
    """Pauses in which to wait while a pipeline is built, until the time is over: short ones at first.

    Args:
        seconds: after which there are no more.
        lost: what keeps another process from coming, if anything does.

    Raises:
        FailureError: when a process will not come. One that is merely slow is waited for.
    """
    next_look = time.monotonic()
    for pause in pauses(seconds):
        if time.monotonic() >= next_look:
            if (failure := lost()) is not None:
                raise FailureError(failure)
            next_look = time.monotonic() + LOOK_SECONDS
        yield pause


def attended(
    connect: Callable[[], _T], lost: Callable[[], Failure | None], timeout: timedelta, peer: int | None = None
) -> _T:
    """Make connections with others, for which c10d waits deaf and blind: in a thread, while this one looks after them.

    If one of them will not come the thread is left alone.

    Args:
        connect: what makes them. It has nothing of the calling thread, its current device say.
        lost: what keeps another process from coming, as a `Membership` has it.
        timeout: for one that is slow, or of which it is not known that it will not come.
        peer: the rank that is connected, if it is one.

    Raises:
        FailureError: when a process is dead, does not build the pipeline, or is not there in time.
    """
    made = asked(connect, "fastpipe-connect")
    for pause in waiting(timeout.total_seconds(), lost):
        if wait([made], pause).done:
            return made.result()
    who = "the other ranks did not" if peer is None else f"rank {peer} did not"
    raise lost_peer(
        f"{who} connect within {timeout.total_seconds():g} s; see what they are doing, or set a longer timeout", peer
    )


def silent_store(seconds: float) -> str:
    """The cause of a failure where the store does not answer."""
    return f"the store of the process group did not answer within {seconds:g} s"


class PatientStore:
    """A store that is asked while a pipeline is built: an error where it does not answer within the timeout.

    Args:
        store: it.
        timeout: seconds.
    """

    def __init__(self, store: Any, timeout: float) -> None:
        self._store, self._timeout = store, timeout

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._store, name)

        def ask(*args: Any) -> Any:
            answer = asked(lambda: method(*args), "fastpipe-ask")
            if not wait([answer], self._timeout).done:
                text = f"{silent_store(self._timeout)}; see whether the process that holds it is stopped"
                raise lost_peer(text, None)
            return answer.result()

        return ask
