"""Results of a step that are published when the device has computed them, without blocking a host.

When a step ends, its work is queued and its losses are still to be computed. The rank reports that a result will
follow. A thread of that rank waits for the device and writes the result into the store, where the others read it. It
stays there as long as a process may read it.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from dataclasses import asdict
from functools import cache, partial
from typing import Any

from fastpipe.errors import StepError
from fastpipe.runtime.common import (
    POLL_SECONDS,
    Failure,
    call_in_thread,
    cause_text,
    cloned,
    first_line,
    pauses,
)

_CLOSING_SECONDS = 10
_LATE_SECONDS = 2.0
"""How long a result that is already on its way is awaited, after its deadline or its sender's exit."""
_LOST = "lost"
"""The key of a failure that makes a result invalid; it replaces the contents."""

Contents = dict[str, Any]
"""JSON."""

Ready = Callable[[], Contents]
"""Waits for the device and returns its results; raises StepError if they are invalid."""


class DeferredResults:
    """The deferred results of one process.

    Args:
        store: shared by all processes; threads that wait clone it.
        dead: returns the processes that have exited.
    """

    def __init__(
        self, store: Any, rank: int, timeout: float, dead: Callable[[], Sequence[Failure]] = lambda: ()
    ) -> None:
        self.store = store
        self.rank = rank
        self.timeout = timeout
        self._dead = dead
        self._given_out: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        """The steps of results, by the cached function that reads each."""
        self._reading: Any = None
        self._posted: list[int] = []
        self._jobs: queue.SimpleQueue[tuple[int, Ready | None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def post(self, step: int, ready: Ready) -> None:
        """Publish this process's result of a step once it is computed."""
        if self._thread is None:
            own = cloned(self.store, self.timeout)
            self._thread = threading.Thread(target=self._work, args=(own,), name="fastpipe-deferred", daemon=True)
            self._thread.start()
        self._posted.append(step)
        self._jobs.put((step, ready))

    def result(self, step: int, rank: int) -> Callable[[], Contents]:
        """A function that waits for the result that another process has announced, and keeps it; see `fetch`."""
        if self._reading is None:
            # connect now: once the store is gone, connecting takes minutes
            self._reading = cloned(self.store, self.timeout)
        read = cache(partial(self.fetch, step, rank))
        self._given_out[read] = step
        return read

    def wanted(self) -> int | None:
        """The first step whose result this process may still read."""
        return min((step for read, step in self._given_out.items() if not read.cache_info().currsize), default=None)

    def forget(self, step: int, wanted: Sequence[int | None]) -> None:
        """Delete the results that no process will read.

        Args:
            wanted: `wanted` of each process.
        """
        first = min((number for number in wanted if number is not None), default=step)
        for old in [number for number in self._posted if number < min(first, step)]:
            self._posted.remove(old)
            self._jobs.put((old, None))

    def fetch(self, step: int, rank: int) -> Contents:
        """Wait for the result of a process.

        Raises:
            StepError: if it does not arrive.
        """
        try:
            found: Contents = json.loads(self._read(_key(step, rank), rank))
        except StepError:
            raise
        except RuntimeError as error:
            for failure in self._dead():
                raise failure.error() from error
            cause = first_line(error)
            raise StepError(
                f"rank {rank} has not published the losses of a step within {self.timeout:g} s ({cause}); see "
                "what that rank's device is doing, or read them before the processes end",
                rank=rank,
                cause=cause,
            ) from error
        if _LOST in found:
            raise Failure(**found[_LOST]).error()
        return found

    def _read(self, key: str, rank: int) -> bytes:
        """Wait for a key, while its sender runs, and read it. Another thread asks the store, which may not answer.

        Raises:
            RuntimeError: on a timeout, or if the store is gone.
            StepError: if the sender has exited.
        """

        def read() -> bytes:
            for pause in itertools.chain(pauses(self.timeout), [0]):
                # before the key is checked: the sender may write the key and exit in between
                ended = next((failure for failure in self._dead() if failure.rank == rank), None)
                if self._reading.check([key]):
                    return bytes(self._reading.get(key))
                if ended is not None:
                    raise ended.error()
                time.sleep(pause)
            raise RuntimeError("it is not in the store")

        answer = call_in_thread(read, "fastpipe-fetch")
        until = time.monotonic() + self.timeout + _LATE_SECONDS
        while not wait([answer], POLL_SECONDS).done:
            if self._dead():
                until = min(until, time.monotonic() + _LATE_SECONDS)
            if time.monotonic() > until:
                raise RuntimeError("the store does not answer")
        return answer.result()

    def close(self) -> None:
        """Send what is pending and end the thread; a thread blocked on a hung device is abandoned."""
        if self._thread is None:
            return
        self._jobs.put(None)
        # the garbage collector may close a pipeline in any thread, this one included
        if threading.current_thread() is not self._thread:
            self._thread.join(_CLOSING_SECONDS)

    def _work(self, store: Any) -> None:
        while (job := self._jobs.get()) is not None:
            step, ready = job
            contents = None if ready is None else self._contents(ready)
            # without the store nothing can be published; readers detect that
            with contextlib.suppress(RuntimeError):
                if contents is None:
                    store.delete_key(_key(step, self.rank))
                else:
                    store.set(_key(step, self.rank), contents)

    def _contents(self, ready: Ready) -> str:
        """The result as text, or the failure, so that other ranks do not wait."""
        try:
            return json.dumps(ready())
        except StepError as error:
            lost = Failure(error.rank, str(error.cause), is_fatal=True)
        except Exception as error:  # raised on all readers
            lost = Failure(self.rank, cause_text(error), is_fatal=True)
        return json.dumps({_LOST: asdict(lost)})


def _key(step: int, rank: int) -> str:
    return f"{step}/found/{rank}"
