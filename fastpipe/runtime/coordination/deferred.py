"""Results of a step that are still on a device: other processes get them when they are there, and no host waits.

When a step ends, its work is queued and its losses are still to be computed. A rank that has some reports that, and a
thread of it waits for the device and puts them into the store, where the others read them. They stay as long as a
process may read them.
"""

from __future__ import annotations

import contextlib
import json
import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from dataclasses import asdict
from datetime import timedelta
from typing import Any

from fastpipe.errors import StepError
from fastpipe.runtime.common import LOOK_SECONDS, Failure, asked, attended, cause_text, first_line, pauses

_CLOSING_SECONDS = 10
_GRACE_SECONDS = 2.0
_LOST = "lost"
"""In place of what was found: the failure because of which it cannot be trusted."""

Contents = dict[str, Any]
"""As JSON has it."""

Ready = Callable[[], Contents]
"""Waits for the device, and gives its results; raises StepError when they cannot be trusted."""


class DeferredResult:
    """What one process found in one step, for another one; read when it is called."""

    def __init__(self, results: DeferredResults, step: int, rank: int) -> None:
        self.step = step
        self._results = results
        self._rank = rank
        self._found: Contents | None = None

    @property
    def is_read(self) -> bool:
        """Whether it is here."""
        return self._found is not None

    def __call__(self) -> Contents:
        """Wait until it is there.

        Raises:
            StepError: when it does not come.
        """
        if self._found is None:
            self._found = self._results.fetch(self.step, self._rank)
        return self._found


class DeferredResults:
    """One process's.

    Args:
        store: that of all processes; what waits makes a connection of its own.
        rank: this process.
        timeout: seconds to wait for a result.
        dead: the processes that have ended.
    """

    def __init__(
        self, store: Any, rank: int, timeout: float, dead: Callable[[], Sequence[Failure]] = lambda: ()
    ) -> None:
        self.store = store
        self.rank = rank
        self.timeout = timeout
        self._dead = dead
        self._given_out: weakref.WeakSet[DeferredResult] = weakref.WeakSet()
        self._reading: Any = None
        self._posted: list[int] = []
        self._jobs: queue.SimpleQueue[tuple[int, Ready | None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def post(self, step: int, ready: Ready) -> None:
        """Publish what this process found in a step, when it is there."""
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._work, args=(self._connect(),), name="fastpipe-deferred", daemon=True
            )
            self._thread.start()
        self._posted.append(step)
        self._jobs.put((step, ready))

    def _connect(self) -> Any:
        """A connection of its own to the store."""
        return attended(self.store.clone, lambda: None, timedelta(seconds=self.timeout))

    def result(self, step: int, rank: int) -> DeferredResult:
        """What another process reported that it would post."""
        if self._reading is None:
            # not when it is read: to connect takes minutes where the store is gone by then
            self._reading = self._connect()
        result = DeferredResult(self, step, rank)
        self._given_out.add(result)
        return result

    def wanted(self) -> int | None:
        """The first step of which this process may still read a result."""
        return min((result.step for result in self._given_out if not result.is_read), default=None)

    def forget(self, step: int, wanted: Sequence[int | None]) -> None:
        """Drop what no process will read.

        Args:
            step: the one that ends.
            wanted: `wanted` of each process.
        """
        first = min((number for number in wanted if number is not None), default=step)
        for old in [number for number in self._posted if number < min(first, step)]:
            self._posted.remove(old)
            self._jobs.put((old, None))

    def fetch(self, step: int, rank: int) -> Contents:
        """What a process found; waits for it.

        Raises:
            StepError: when it does not come.
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
                f"rank {rank} has not told the losses of a step within {self.timeout:g} s ({cause}); see what that "
                "rank's device is doing, or read them before the processes end",
                rank=rank,
                cause=cause,
            ) from error
        if _LOST in found:
            raise Failure(**found[_LOST]).error()
        return found

    def _read(self, key: str, rank: int) -> str:
        """What is there in the end. The store may not answer any more: so it is asked in another thread.

        Raises:
            RuntimeError: when it does not come in time, or the store is gone.
            StepError: when its sender has ended.
        """

        def read() -> str:
            self._await(key, rank)
            return bytes(self._reading.get(key)).decode()

        answer = asked(read, "fastpipe-fetch")
        until = time.monotonic() + self.timeout + _GRACE_SECONDS
        while not wait([answer], LOOK_SECONDS).done:
            if self._dead():
                until = min(until, time.monotonic() + _GRACE_SECONDS)
            if time.monotonic() > until:
                raise RuntimeError("the store does not answer")
        return answer.result()

    def _await(self, key: str, rank: int) -> None:
        """Wait until it is there, as long as its sender lives.

        Raises:
            RuntimeError: when it does not come in time, or the store is gone.
            StepError: when its sender has ended.
        """
        for pause in pauses(self.timeout):
            # before it is looked for: it may come in between, and then its sender end
            ended = next((failure for failure in self._dead() if failure.rank == rank), None)
            if self._reading.check([key]):
                return
            if ended is not None:
                raise ended.error()
            time.sleep(pause)
        if not self._reading.check([key]):
            raise RuntimeError("it is not in the store")

    def close(self) -> None:
        """Send what is still to be sent, and end the thread; one that waits for a device that hangs is left alone."""
        if self._thread is None:
            return
        self._jobs.put(None)
        # a pipeline may be collected in any thread, this one too
        if threading.current_thread() is not self._thread:
            self._thread.join(_CLOSING_SECONDS)

    def _work(self, store: Any) -> None:
        while (job := self._jobs.get()) is not None:
            step, ready = job
            contents = None if ready is None else self._contents(ready)
            # without the store nothing can be published; readers find that out
            with contextlib.suppress(RuntimeError):
                if contents is None:
                    store.delete_key(_key(step, self.rank))
                else:
                    store.set(_key(step, self.rank), contents)

    def _contents(self, ready: Ready) -> str:
        """What was found, or the failure in its place: the others do not wait for it."""
        try:
            return json.dumps(ready())
        except StepError as error:
            lost = Failure(error.rank, str(error.cause), is_fatal=True)
        except Exception as error:  # raised to all that read it
            lost = Failure(self.rank, cause_text(error), is_fatal=True)
        return json.dumps({_LOST: asdict(lost)})


def _key(step: int, rank: int) -> str:
    return f"{step}/found/{rank}"
