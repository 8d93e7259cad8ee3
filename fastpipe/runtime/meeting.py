"""Meeting: every process gives a message and gets those of all. The interface, and the way over a store.

`fastpipe.runtime.board` is the way through the memory of one host.
"""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

from fastpipe.runtime.control import DEAD, Reply
from fastpipe.runtime.failure import Failure, LostError
from fastpipe.runtime.pauses import LOOK_SECONDS, pauses

Lost = Callable[[Sequence[int]], Failure | None]
"""What keeps awaited ranks from coming while the pipeline is built, as `Control.lost` has it."""


class Meeting(ABC):
    """How the processes of a pipeline exchange messages.

    Args:
        rank: this process.
        size: how many there are.
        timeout: seconds to wait for the others.
    """

    def __init__(self, rank: int, size: int, timeout: float) -> None:
        self.rank = rank
        self.size = size
        self.timeout = timeout

    @abstractmethod
    def exchange(self, step: int, phase: str, message: Reply) -> list[Reply]:
        """Give a message and get those of all, in order; a process that died first is there as `DEAD`.

        Raises:
            LostError: when a process does not come, or nothing can be exchanged any more.
        """

    def late(self, missing: Sequence[int], step: int, phase: str) -> LostError:
        """The error for processes that live and do not come."""
        ranks = ", ".join(map(str, missing))
        place, advice = f"the {phase} of step {step}", "call step and eval_step on every rank"
        if step == 0:
            place, advice = "the building of the pipeline", "build it on every rank, all with the same group"
        cause = f"rank {ranks} did not come to {place} within {self.timeout:g} s; {advice}, or set a longer timeout"
        return LostError(Failure(missing[0], cause, dead=True))


def waiting(seconds: float, lost: Callable[[], Failure | None]) -> Iterator[float]:
    """Pauses in which to wait while a pipeline is built, until the time is over: short ones at first.

    Args:
        seconds: after which there are no more.
        lost: what keeps another process from coming, if anything does.

    Raises:
        LostError: when somebody is waited for who will not come. Who is merely slow is waited for.
    """
    next_look = time.monotonic()
    for pause in pauses(seconds):
        if time.monotonic() >= next_look:
            if (failure := lost()) is not None:
                raise LostError(failure)
            next_look = time.monotonic() + LOOK_SECONDS
        yield pause


def patiently(wait: Callable[[], Sequence[int]]) -> Sequence[int]:
    """Wait again while several are missing, since who has waited for a silent one comes late.

    Args:
        wait: waits for the timeout, and returns who is missing.

    Returns:
        Who is missing in the end.
    """
    missing = wait()
    while len(missing) > 1:
        before, missing = missing, wait()
        if len(missing) >= len(before):
            break
    return missing


class StoreMeeting(Meeting):
    """Over the store of a process group, wherever the processes are.

    Args:
        store: one that all of them share, with a prefix of its own.
        rank: this process.
        size: how many there are.
        timeout: seconds to wait for the others.
        gone: the failure behind a store that does not answer.
        lost: see `Control.lost`.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        timeout: float,
        gone: Callable[[RuntimeError], Failure],
        lost: Lost,
    ) -> None:
        super().__init__(rank, size, timeout)
        self.store = store
        self.gone = gone
        self.lost = lost
        self.said: list[tuple[int, str]] = []

    def exchange(self, step: int, phase: str, message: Reply) -> list[Reply]:
        """One key a process, step and phase."""
        keys = [_key(step, phase, rank) for rank in range(self.size)]
        self.said.append((step, keys[self.rank]))
        try:
            self.store.set(keys[self.rank], json.dumps(message))
            missing = patiently(lambda: self._wait(keys) if step else self._wait_watching(keys))
            if not missing:
                return [json.loads(reply) for reply in self.store.multi_get(keys)]
        except RuntimeError as error:
            raise LostError(self.gone(error)) from error
        raise self.late(missing, step, phase)

    def _wait(self, keys: list[str]) -> list[int]:
        try:
            self.store.wait(keys, timedelta(seconds=self.timeout))
        except RuntimeError:
            return [rank for rank, key in enumerate(keys) if not self.store.check([key])]
        return []

    def _wait_watching(self, keys: list[str]) -> list[int]:
        """The same while nobody else watches: the pipeline is being built. (The store warns of each wait in vain.)"""

        def missing() -> list[int]:
            return [rank for rank, key in enumerate(keys) if not self.store.check([key])]

        def lost() -> Failure | None:
            # whoever has come may have given up since, for what all are about to read
            failure = self.lost(missing())
            return failure if missing() else None

        for pause in waiting(self.timeout, lost):
            if self.store.check(keys):
                return []
            time.sleep(pause)
        return missing()

    def speak_for(self, store: Any, failure: Failure, step: int) -> None:
        """Say on behalf of a dead process what became of it, where it has said nothing.

        Args:
            store: a connection that is free: this one's own is blocked while it waits for what is said here.
            failure: its death.
            step: the step in which it is missing.
        """
        for phase in ("start", "program", "end"):
            store.compare_set(_key(step, phase, failure.rank), "", json.dumps({DEAD: failure.cause}))

    def forget(self, step: int) -> None:
        """Drop what this process has said up to a step that all have passed; step 0 is the building of the pipeline."""
        self.forget_first(sum(said <= step for said, _ in self.said))

    def forget_first(self, count: int) -> None:
        """Drop the first messages of this process, which all have read."""
        for _ in range(count):
            self.store.delete_key(self.said.pop(0)[1])


def _key(step: int, phase: str, rank: int | None) -> str:
    return f"{step}/{phase}/{rank}"
