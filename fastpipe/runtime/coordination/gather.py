"""All-gather of small messages: over a store, or in the shared memory of one host.

An exchange over the store takes about a millisecond. In shared memory every process has a page that only it writes and
all others read; waiting processes sleep on a futex. That part is C++ (``csrc/core/shared_memory_exchange.h``). This
module defines the messages, and the failure that is reported if a process does not answer.
"""

from __future__ import annotations

import contextlib
import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

from fastpipe.runtime import native
from fastpipe.runtime.common import (
    DIED,
    POLL_SECONDS,
    STORE_SECONDS,
    CircuitBreaker,
    Failure,
    FailureError,
    call_in_thread,
    first_line,
    raised_by_handler,
    silent_store,
    waiting,
)
from fastpipe.runtime.coordination.control import Reply
from fastpipe.runtime.coordination.host import RanksPerHost

_MORE_SECONDS = 5.0
"""Time for processes that are delayed."""


@dataclass(eq=False, repr=False)
class Gather(ABC):
    """All-gather of messages between the processes that a control reaches, which have numbers.

    Args:
        lost: returns why awaited processes cannot take part; see `Control.lost`.
        failure: makes the fatal failure of a process, None if unknown, of its cause.

    Attributes:
        suspected: a reported failure that makes a rank suspect in this step; any thread may set it.
    """

    number: int
    size: int
    timeout: float
    lost: Callable[[Sequence[int]], Failure | None]
    failure: Callable[[int | None, str], Failure]

    def __post_init__(self) -> None:
        self.suspected: Failure | None = None
        self._deadline, self._is_last = 0.0, False

    @abstractmethod
    def exchange(self, step: int, phase: str, message: Reply) -> list[Reply]:
        """Send a message and return the messages of all processes, by number.

        Raises:
            FailureError: if a process is dead or silent, or the exchange is no longer possible.
        """

    def _begin(self) -> None:
        """Start the time of an exchange."""
        self._deadline, self._is_last = time.monotonic() + self.timeout, False

    def _overdue(self, missing: Callable[[], Sequence[int]]) -> Sequence[int]:
        """The missing processes to report as lost now, of those that a function returns, which may raise.

        This is after the timeout, or soon after a process is suspected to be silent: all others learn of the suspicion
        and answer at once.
        """
        now, more = time.monotonic(), min(self.timeout / 4, _MORE_SECONDS)
        if self.suspected is not None and not self._is_last:
            self._deadline, self._is_last = min(self._deadline, now + more), True
        if now < self._deadline:
            return []
        found = missing()
        if len(found) < 2 or self._is_last:
            return found
        # ranks that waited for a silent rank in the step report it now
        self._deadline, self._is_last = now + more, True
        return []

    def late(self, missing: Sequence[int], step: int, phase: str, message: Reply) -> FailureError:
        """The error for processes that run and do not answer a message."""
        places = [self.failure(process, "") for process in missing]
        ranks = ", ".join(f.place().removeprefix("rank ") for f in places)
        advice = "make the same calls on every rank" if step else "build it on every rank, all with the same group"
        place = _phase_text(step, phase) + (f" ({message['call']})" if "call" in message else "")
        cause = f"rank {ranks} did not reach {place} within {self.timeout:g} s; {advice}, or set a longer timeout"
        suspected = self.suspected and (self.suspected.rank, self.suspected.pipeline)
        late = next((f for f in places if (f.rank, f.pipeline) == suspected), places[0])
        return FailureError(replace(late, cause=cause))


@dataclass(eq=False, repr=False)
class StoreGather(Gather):
    """All-gather over the store of a process group, on any hosts.

    Args:
        gone: returns the failure that explains why the store does not answer.

    Attributes:
        waits: the connection used for waiting.
        written: the keys of this process's messages that others may still read.
    """

    store: Any
    gone: Callable[[RuntimeError], Failure]

    def __post_init__(self) -> None:
        super().__post_init__()
        self.waits = self.store
        self.written: list[str] = []

    def exchange(self, step: int, phase: str, message: Reply) -> list[Reply]:
        """Use one key per process, step and phase. Another thread asks the store, which may have stopped answering."""
        keys = [_key(step, phase, number) for number in range(self.size)]
        self.written.append(keys[self.number])
        answer = call_in_thread(lambda: self._gather(keys, message, step), "fastpipe-gather")
        breaker = CircuitBreaker(min(STORE_SECONDS, self.timeout))

        def find_missing() -> Sequence[int]:
            if (found := breaker.call(lambda: self._missing(keys), None)) is None:
                raise FailureError(Failure(None, silent_store(self.timeout), is_fatal=True))
            return found

        self._begin()
        while not wait([answer], POLL_SECONDS).done:
            if step and (failure := self.lost(())) is not None:
                raise FailureError(failure)
            if missing := self._overdue(find_missing):
                raise self.late(missing, step, phase, message)
        try:
            return answer.result()
        except FailureError:
            raise
        except RuntimeError as error:
            raise FailureError(self.gone(error)) from error

    def _gather(self, keys: list[str], message: Reply, step: int) -> list[Reply]:
        self.waits.set(keys[self.number], json.dumps(message))
        if step:
            self.waits.wait(keys, timedelta(seconds=2 * self.timeout))
        else:
            self._wait_watching(keys)
        return [json.loads(reply) for reply in self.waits.multi_get(keys)]

    def _missing(self, keys: list[str]) -> list[int]:
        return [number for number, key in enumerate(keys) if not self.store.check([key])]

    def _wait_watching(self, keys: list[str]) -> None:
        """Wait for the keys while the pipeline is built and no watcher runs. (`store.wait` warns at each timeout.)"""

        def lost() -> Failure | None:
            # a process that has answered may have failed since, which explains the missing keys
            failure = self.lost(self._missing(keys))
            return failure if self._missing(keys) else None

        for pause in waiting(2 * self.timeout, lost):
            if self.waits.check(keys):
                return
            time.sleep(pause)

    def forget(self, count: int) -> None:
        """Delete the first messages of this process, which all have read."""
        for _ in range(count):
            self.store.delete_key(self.written.pop(0))


def _phase_text(step: int, phase: str) -> str:
    """A phase in words."""
    if step == 0:
        return "the construction of the pipeline"
    part = phase.partition(" ")[0]
    return f"the {part if part in ('start', 'end') else 'preparation'} of call {step}"


def _key(step: int, phase: str, number: int) -> str:
    return f"{step}/{phase}/{number}"


@dataclass(eq=False, repr=False)
class SharedMemoryGather(Gather):
    """All-gather through shared memory; call `offer` and `connect` before the first exchange."""

    ranks_per_host: RanksPerHost

    def __post_init__(self) -> None:
        super().__post_init__()
        self._native: Any = None

    def offer(self) -> Reply:
        """The address of this process's page, or why there is none."""
        runtime: Any = native.load()
        if runtime is None:
            return {"no_board": native.native_status()}
        try:
            self._native = runtime.SharedMemoryExchange(self.number, self.size)
        except RuntimeError as error:
            return {"no_board": first_line(error)}
        return {"board": self._native.address()}

    def connect(self, offers: Sequence[Reply]) -> str:
        """Open the pages of the others; returns why that is impossible, or an empty string."""
        for number, offer in enumerate(offers):
            if offer["host"] != offers[0]["host"] or not offer["host"]:
                return "the processes are not all on one host"
            if "no_board" in offer:
                return f"{self.failure(number, '').place()}: {offer['no_board']}"
        try:
            for number, offer in enumerate(offers):
                if number != self.number:
                    self._native.connect(number, *offer["board"])
        except RuntimeError as error:
            return first_line(error)
        return ""

    def choose_wait(self) -> None:
        """Choose how to wait by the number of ranks on this host, once other pipelines have been built."""
        with contextlib.suppress(RuntimeError):  # a lost store is reported elsewhere
            self._native.share_host(self.ranks_per_host.count())

    def exchange(self, step: int, phase: str, message: Reply) -> list[Reply]:
        """Exchange messages. Each begins with its process's step and phase, which must be equal on all."""
        self._native.post(f"{step} {phase}\n{json.dumps(message)}".encode())
        try:
            self._wait(step, phase, message)
            return [self._read(number, step, phase, text) for number, text in enumerate(self._native.messages())]
        except FailureError:
            raise
        except RuntimeError as error:
            if raised_by_handler(error):
                raise
            raise FailureError(Failure(None, first_line(error), is_fatal=True)) from error

    def _wait(self, step: int, phase: str, message: Reply) -> None:
        self._begin()
        while not self._native.wait(min(self.timeout, POLL_SECONDS)):
            # signals are handled and lost processes noticed between two of these waits
            failure = self.lost(self._native.missing())
            if failure is not None and self._native.missing():
                raise FailureError(failure)
            if missing := self._overdue(self._native.missing):
                raise self.late(missing, step, phase, message)

    def _read(self, number: int, step: int, phase: str, text: bytes | None) -> Reply:
        if text is None:
            raise FailureError(self.failure(number, DIED))
        found, _, content = text.decode().partition("\n")
        if found != f"{step} {phase}":
            their_step, _, their_phase = found.partition(" ")
            who, there = self.failure(number, "").place(), _phase_text(int(their_step), their_phase)
            cause = (
                f"{who} did not reach {_phase_text(step, phase)}: it is at {there}; build pipelines, and make the same "
                "calls, in the same order on every rank"
            )
            raise FailureError(self.failure(number, cause))
        reply: Reply = json.loads(content)
        return reply
