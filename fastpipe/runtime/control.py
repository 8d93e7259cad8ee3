"""Control: what the processes of a pipeline tell each other beside the tensors.

Before a step they agree that every one has good inputs and whether shapes are known; after it, that it went well
everywhere, and the losses. In between a watcher learns of a failure on another rank, or of the death of a process,
so that everybody can stop computing. All of it goes through the store of the process group, on the host.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from fastpipe.errors import StepError

_POLL_SECONDS = 0.1
_GRACE_SECONDS = 0.5
_DIED = "its process died"
DEAD = "dead"
"""The key of a reply made on behalf of a dead process."""

Reply = dict[str, Any]


@dataclass(frozen=True)
class Failure:
    """What went wrong first, and where.

    Attributes:
        rank: the rank on which it happened; None where that is not known.
        cause: the exception as text, or what else became of the rank.
        stage: the stage that was computed, if any.
        action: the text of the action or instruction.
        microbatch: the microbatch, if any.
        dead: whether the rank is dead or silent, so that the pipeline cannot go on.
    """

    rank: int | None
    cause: str
    stage: int | None = None
    action: str | None = None
    microbatch: int | None = None
    dead: bool = False

    def place(self) -> str:
        """Where, as a user reads it."""
        parts = ["an unknown rank" if self.rank is None else f"rank {self.rank}"]
        if self.stage is not None:
            parts.append(f"stage {self.stage}")
        if self.action is not None:
            parts.append(f"action {self.action}")
        if self.microbatch is not None:
            parts.append(f"microbatch {self.microbatch}")
        return ", ".join(parts)

    def error(self) -> StepError:
        """The exception for the ranks on which it did not happen."""
        again = "; the pipeline cannot go on: build it again" if self.dead else ""
        return StepError(
            f"the step failed on {self.place()}: {self.cause}{again}",
            rank=self.rank,
            stage=self.stage,
            action=self.action,
            microbatch=self.microbatch,
            cause=self.cause,
        )


class LostError(Exception):
    """Nothing can be exchanged any more: a process is dead or silent, or the store is gone.

    Attributes:
        failure: which, and what became of it.
    """

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.cause)
        self.failure = failure


class Control(ABC):
    """The exchange between the processes of a pipeline."""

    @abstractmethod
    def setup(self, message: Reply) -> list[Reply]:
        """The first exchange.

        Raises:
            LostError: when a process does not come, or the store is gone.
        """

    @abstractmethod
    def begin(self, on_failure: Callable[[Failure], None]) -> None:
        """Start a step: from now on a failure elsewhere is reported to ``on_failure``, from another thread."""

    @abstractmethod
    def exchange(self, phase: str, message: Reply) -> list[Reply]:
        """Give a message and get those of all processes, in order; a dead one's says so (see `dead_among`).

        Raises:
            LostError: when a process does not come, or the store is gone.
        """

    @abstractmethod
    def publish(self, failure: Failure) -> Failure:
        """Tell the others at once that this process failed.

        Returns:
            The step's first failure: this one, or that of a process which was faster.
        """

    @abstractmethod
    def end(self) -> None:
        """The step is over."""

    def close(self) -> None:  # noqa: B027 - a control without threads has nothing to stop
        """Stop watching."""


class Alone(Control):
    """One process: nobody to tell."""

    def setup(self, message: Reply) -> list[Reply]:
        """Its own message."""
        return [message]

    def begin(self, on_failure: Callable[[Failure], None]) -> None:
        """Nothing to watch."""

    def exchange(self, phase: str, message: Reply) -> list[Reply]:
        """Its own message."""
        return [message]

    def publish(self, failure: Failure) -> Failure:
        """Nobody to tell."""
        return failure

    def end(self) -> None:
        """Nothing to stop."""


def dead_among(replies: Sequence[Reply]) -> Failure | None:
    """The first process that is dead."""
    for rank, reply in enumerate(replies):
        if DEAD in reply:
            return Failure(rank, reply[DEAD], dead=True)
    return None


def _identity() -> Reply:
    """Which host and process this is; processes can watch those with the same host."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    host = boot.read_text().strip() + os.readlink("/proc/self/ns/pid") if boot.exists() else ""
    return {"host": host, "pid": os.getpid()}


class StoreControl(Control):
    """Several processes, over the store of their process group.

    Args:
        store: a store that all of them share, with a prefix of its own.
        rank: this process.
        size: how many there are.
        timeout: seconds to wait for the others.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: float) -> None:
        self.store = store
        self.rank = rank
        self.size = size
        self.timeout = timedelta(seconds=timeout)
        self.step = 0
        self.on_failure: Callable[[Failure], None] | None = None
        self._pidfds: dict[int, int] = {}
        self._active = threading.Event()
        self._lock = threading.Lock()
        self._stopping = False
        # a connection of its own: the main one may be blocked in an exchange
        self._watcher = threading.Thread(target=self._watch, args=(store.clone(),), name="fastpipe-watch", daemon=True)
        self._watcher.start()

    def setup(self, message: Reply) -> list[Reply]:
        """Meet the others, and watch those of this host from now on."""
        replies = self.exchange("setup", _identity() | message)
        self._watch_peers(replies)
        return replies

    def _watch_peers(self, identities: Sequence[Reply]) -> None:
        own = identities[self.rank]
        for rank, identity in enumerate(identities):
            if rank != self.rank and own["host"] and identity["host"] == own["host"]:
                self._pidfds[rank] = os.pidfd_open(identity["pid"])

    def begin(self, on_failure: Callable[[Failure], None]) -> None:
        """Start watching."""
        with self._lock:
            self.step += 1
            self.on_failure = on_failure
        self._active.set()

    def end(self) -> None:
        """Stop watching, and drop what everybody has read: all have passed the step before this one."""
        self._active.clear()
        with self._lock:
            self.on_failure = None
        with contextlib.suppress(RuntimeError):
            for phase in ("start", "end"):
                self.store.delete_key(self._key(self.step - 1, phase, self.rank))
            if self.rank == 0:
                self.store.delete_key(self._failure_key(self.step - 1))

    def exchange(self, phase: str, message: Reply) -> list[Reply]:
        """Give a message and get those of all processes."""
        keys = [self._key(self.step, phase, rank) for rank in range(self.size)]
        try:
            self.store.set(keys[self.rank], json.dumps(message))
            self._await(keys)
            return [json.loads(reply) for reply in self.store.multi_get(keys)]
        except RuntimeError as error:
            raise LostError(self._lost(phase, keys, error)) from error

    def _await(self, keys: Sequence[str]) -> None:
        """Wait for all keys: again while several are missing, since who has waited for a silent one comes late."""
        missing = len(keys) + 1
        while True:
            try:
                self.store.wait(list(keys), self.timeout)
                return
            except RuntimeError:
                now_missing = len(self._missing(keys))
                if now_missing == 1 or now_missing >= missing:
                    raise
                missing = now_missing

    def _lost(self, phase: str, keys: Sequence[str], error: RuntimeError) -> Failure:
        try:
            missing = self._missing(keys)
        except RuntimeError:
            return self._store_gone(error)
        if not missing:
            return Failure(None, _first_line(error), dead=True)
        ranks = ", ".join(map(str, missing))
        return Failure(
            missing[0],
            f"rank {ranks} did not come to the {phase} of step {self.step} within {self.timeout.total_seconds():g} s; "
            "call step and eval_step on every rank, or set a longer timeout",
            dead=True,
        )

    def _store_gone(self, error: RuntimeError) -> Failure:
        """The store is gone, mostly because the process that held it died; the kernel may say so a little later."""
        deadline = time.monotonic() + _GRACE_SECONDS
        while not (died := self._died()) and time.monotonic() < deadline:
            time.sleep(0.01)
        if died:
            return Failure(died[0], _DIED, dead=True)
        return Failure(None, f"the store of the process group is gone: {_first_line(error)}", dead=True)

    def _missing(self, keys: Sequence[str]) -> list[int]:
        return [rank for rank, key in enumerate(keys) if not self.store.check([key])]

    def publish(self, failure: Failure) -> Failure:
        """Set the step's failure, unless somebody was faster."""
        # without the store nobody can be told; the others find out for themselves, and this rank goes on draining
        with contextlib.suppress(RuntimeError):
            first = self.store.compare_set(self._failure_key(self.step), "", json.dumps(asdict(failure)))
            return Failure(**json.loads(first))
        return failure

    def close(self) -> None:
        """End the watcher."""
        self._stopping = True
        self._active.set()
        # a pipeline may be collected in any thread, the watcher's too
        if threading.current_thread() is not self._watcher:
            self._watcher.join(timeout=2)
        for descriptor in self._pidfds.values():
            os.close(descriptor)
        self._pidfds.clear()

    def _key(self, step: int, phase: str, rank: int) -> str:
        return f"{step}/{phase}/{rank}"

    def _failure_key(self, step: int) -> str:
        return f"{step}/failure"

    def _watch(self, store: Any) -> None:
        while True:
            self._active.wait()
            if self._stopping:
                return
            step = self.step
            try:
                self._look(store, step)
            except RuntimeError as error:
                self._report(self._store_gone(error), step)
                return
            threading.Event().wait(_POLL_SECONDS)

    def _look(self, store: Any, step: int) -> None:
        for rank in self._died():
            failure = Failure(rank, _DIED, dead=True)
            reply = json.dumps({DEAD: failure.cause})
            for phase in ("start", "end"):
                store.compare_set(self._key(step, phase, rank), "", reply)
            self._report(failure, step)
        if store.check([self._failure_key(step)]):
            # told at every look: a rank that has not begun its program yet would forget it
            self._report(Failure(**json.loads(store.get(self._failure_key(step)))), step)

    def _died(self) -> list[int]:
        """Peers of this host that are dead: their descriptors become readable. Told again in every step."""
        ready, _, _ = select.select(list(self._pidfds.values()), [], [], 0) if self._pidfds else ([], [], [])
        return [rank for rank, descriptor in self._pidfds.items() if descriptor in ready]

    def _report(self, failure: Failure, step: int) -> None:
        # under the lock, or it might be told to the next step, which has nothing to do with it
        with self._lock:
            if self.on_failure is not None and self.step == step:
                self.on_failure(failure)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def cause_text(error: BaseException) -> str:
    """An exception in one line: its type and its message."""
    return f"{type(error).__name__}: {_first_line(error)}" if str(error) else type(error).__name__
