"""Waits for events that may never happen: with pauses, in threads that may be abandoned, and around calls of c10d.

c10d's waits neither handle signals nor detect that a peer has exited: a store does not answer if its process is
stopped, and `store.wait` logs two warnings per timeout. So the store is polled, and calls that may block run in
threads.
"""

from __future__ import annotations

import errno
import os
import resource
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from datetime import timedelta
from typing import Any, TypeVar

from fastpipe.runtime.common.failure import Failure, FailureError, lost_peer

POLL_SECONDS = 0.1
"""The longest pause between two checks, in seconds."""
_PAUSE_SECONDS = 0.001
EXIT_SECONDS = 1.0
"""How long to wait for the exit that may explain a lost connection or store: the kernel reports it a little later."""
SHORT_EXIT_SECONDS = 0.5
"""The same where the other ranks wait meanwhile: in the construction of a pipeline, and within a mesh's stages."""


def pauses(seconds: float) -> Iterator[float]:
    """Yield pauses until the time is over; the first are short, as most events happen soon."""
    start = now = time.monotonic()
    while now < start + seconds:
        yield min(_PAUSE_SECONDS + (now - start) / 10, POLL_SECONDS, start + seconds - now)
        now = time.monotonic()


_T = TypeVar("_T")

Work = Callable[[], None]


def aside(works: Iterable[Work], name: str) -> list[threading.Thread]:
    """Start each function in its own daemon thread, which may be abandoned.

    If no thread can be started, as in an exiting interpreter (Python 3.12), run the rest here after all threads have
    started.
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


def call_in_thread(question: Callable[[], _T], name: str) -> Future[_T]:
    """Call a function in a thread as `aside` does; returns a future of its result or exception."""
    answer: Future[_T] = Future()

    def put() -> None:
        try:
            answer.set_result(question())
        except BaseException as error:  # raised where the result is read
            answer.set_exception(error)

    aside([put], name)
    return answer


STORE_SECONDS = 10.0
"""Timeout of a store's answer. It usually takes less than a millisecond, on a busy machine a hundred times as long."""


class CircuitBreaker:
    """A circuit breaker for a store: if it fails to answer in time, it is not asked again before that answer comes."""

    def __init__(self, seconds: float = STORE_SECONDS) -> None:
        self._seconds = seconds
        self._late: Future[Any] | None = None

    def call(self, question: Callable[[], _T], otherwise: _T) -> _T:
        """The store's answer, or `otherwise` if it does not answer or is gone.

        A thread asks; on a timeout it is abandoned, and so is the store's client, unless its answer comes later:
        another request would wait behind the first.
        """
        late = self._late
        if late is not None and not (late.done() and late.exception() is None):
            return otherwise
        answer = call_in_thread(question, "fastpipe-ask")
        if not wait([answer], self._seconds).done:
            self._late = answer
            return otherwise
        try:
            return answer.result()
        except RuntimeError:
            return otherwise


def waiting(seconds: float, lost: Callable[[], Failure | None]) -> Iterator[float]:
    """`pauses` in which a loss is detected.

    Args:
        lost: returns the failure that keeps another process from answering, if any.

    Raises:
        FailureError: if there is one. Slow processes are waited for.
    """
    next_look = time.monotonic()
    for pause in pauses(seconds):
        if time.monotonic() >= next_look:
            if (failure := lost()) is not None:
                raise FailureError(failure)
            next_look = time.monotonic() + POLL_SECONDS
        yield pause


def check_descriptors(count: int = 1) -> None:
    """Raise OSError if this process cannot open ``count`` more files."""
    opened = []
    try:
        for _ in range(count):
            opened.append(os.open("/", os.O_RDONLY))
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        raise OSError(
            error.errno,
            f"{os.strerror(error.errno)}: the limit of this process is {limit}, and it needs {count} more; raise the "
            "limit (ulimit -n), or close files",
        ) from None
    finally:
        for descriptor in opened:
            os.close(descriptor)


def attended(
    connect: Callable[[], _T],
    lost: Callable[[], Failure | None],
    timeout: timedelta,
    peer: int | None = None,
    *,
    opens: bool = True,
) -> _T:
    """Connect to other ranks in a thread, as c10d blocks, while this thread checks for lost processes.

    The thread is abandoned if a process is lost.

    Args:
        connect: connects. It gets no state of the calling thread, such as its current device.
        lost: returns the failure that keeps another process from connecting, if any; see `Control.lost`.
        timeout: for slow processes, and for losses that are not detected.
        opens: whether it opens connections, which c10d attempts until a timeout if there is no free descriptor.

    Raises:
        FailureError: if a process is dead, fails to build the pipeline, or does not connect in time.
        OSError: if this process has no free descriptor for a connection.
    """
    made = call_in_thread(connect, "fastpipe-connect")
    for pause in waiting(timeout.total_seconds(), lost):
        if wait([made], pause).done:
            return made.result()
        if opens:
            check_descriptors()
    who = "the other ranks did not" if peer is None else f"rank {peer} did not"
    raise lost_peer(
        f"{who} connect within {timeout.total_seconds():g} s; see what they are doing, or set a longer timeout", peer
    )


def silent_store(seconds: float) -> str:
    """The cause of a failure if the store does not answer."""
    return f"the store of the process group did not answer within {seconds:g} s"


class StoreWithTimeout:
    """A store that raises if it does not answer within the timeout; asked in a thread, which is then abandoned."""

    def __init__(self, store: Any, timeout: float) -> None:
        self._store, self._timeout = store, timeout

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._store, name)

        def ask(*args: Any) -> Any:
            answer = call_in_thread(lambda: method(*args), "fastpipe-ask")
            if not wait([answer], self._timeout).done:
                text = f"{silent_store(self._timeout)}; see whether the process that holds it is stopped"
                raise lost_peer(text, None)
            return answer.result()

        return ask


def cloned(store: Any, timeout: float) -> Any:
    """Another connection to a store.

    Raises:
        FailureError: if the store does not answer within ``timeout`` seconds.
        OSError: if this process has no free descriptor, for lack of which c10d tries until a timeout.
    """
    check_descriptors()
    return StoreWithTimeout(store, timeout).clone()
