"""Control: what the processes of a pipeline tell each other beside the tensors.

Before a step they agree that every one has good inputs and whether shapes are known; after it, that it went well
everywhere, and the losses. In between a watcher learns of a failure on another rank, or of the death of a process,
so that everybody can stop computing. All of it goes through the store of the process group, on the host.
"""

from __future__ import annotations

import json
import os
import select
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from fastpipe.errors import StepError

_POLL_SECONDS = 0.1
DEAD = "dead"
"""The key of a reply made on behalf of a dead process."""

Reply = dict[str, Any]


@dataclass(frozen=True)
class Failure:
    """What went wrong first, and where.

    Attributes:
        rank: the rank on which it happened.
        cause: the exception as text, or what else became of the rank.
        stage: the stage that was computed, if any.
        action: the text of the action or instruction.
        microbatch: the microbatch, if any.
        dead: whether the rank is dead or silent, so that the pipeline cannot go on.
    """

    rank: int
    cause: str
    stage: int | None = None
    action: str | None = None
    microbatch: int | None = None
    dead: bool = False

    def place(self) -> str:
        """Where, as a user reads it."""
        parts = [f"rank {self.rank}"]
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


class Control(ABC):
    """The exchange between the processes of a pipeline."""

    @abstractmethod
    def begin(self, on_failure: Callable[[Failure], None]) -> None:
        """Start a step: from now on a failure elsewhere is reported to ``on_failure``, from another thread."""

    @abstractmethod
    def exchange(self, phase: str, message: Reply) -> list[Reply]:
        """Give a message and get those of all processes, in order; a dead one's says so (see `dead_among`)."""

    @abstractmethod
    def publish(self, failure: Failure) -> None:
        """Tell the others at once that this process failed."""

    @abstractmethod
    def end(self) -> None:
        """The step is over."""

    def close(self) -> None:  # noqa: B027 - a control without threads has nothing to stop
        """Stop watching."""


class Alone(Control):
    """One process: nobody to tell."""

    def begin(self, on_failure: Callable[[Failure], None]) -> None:
        """Nothing to watch."""

    def exchange(self, phase: str, message: Reply) -> list[Reply]:
        """Its own message."""
        return [message]

    def publish(self, failure: Failure) -> None:
        """Nobody to tell."""

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

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: float) -> None:
        self.store = store
        self.rank = rank
        self.size = size
        self.timeout = timedelta(seconds=timeout)
        self.step = 0
        self.on_failure: Callable[[Failure], None] | None = None
        self.dead: set[int] = set()
        self._pidfds: dict[int, int] = {}
        self._seen_failure = False
        self._active = threading.Event()
        self._lock = threading.Lock()
        self._stopping = False
        self._watch_peers(self.exchange("setup", _identity()))
        # a connection of its own: the main one may be blocked in an exchange
        self._watcher = threading.Thread(target=self._watch, args=(store.clone(),), name="fastpipe-watch", daemon=True)
        self._watcher.start()

    def _watch_peers(self, identities: Sequence[Reply]) -> None:
        own = identities[self.rank]
        for rank, identity in enumerate(identities):
            if rank != self.rank and own["host"] and identity["host"] == own["host"]:
                self._pidfds[rank] = os.pidfd_open(identity["pid"])

    def begin(self, on_failure: Callable[[Failure], None]) -> None:
        """Start watching."""
        with self._lock:
            self.step += 1
            self._seen_failure = False
            self.on_failure = on_failure
        self._active.set()

    def end(self) -> None:
        """Stop watching, and drop what everybody has read: all have passed the step before this one."""
        self._active.clear()
        with self._lock:
            self.on_failure = None
        for phase in ("start", "end"):
            self.store.delete_key(self._key(self.step - 1, phase, self.rank))

    def exchange(self, phase: str, message: Reply) -> list[Reply]:
        """Give a message and get those of all processes."""
        self.store.set(self._key(self.step, phase, self.rank), json.dumps(message))
        keys = [self._key(self.step, phase, rank) for rank in range(self.size)]
        try:
            self.store.wait(keys, self.timeout)
        except RuntimeError as error:
            missing = [rank for rank, key in enumerate(keys) if not self._has(key)]
            raise StepError(
                f"rank {missing or 'unknown'} did not come to the {phase} of step {self.step} within "
                f"{self.timeout.total_seconds():g} s: call step and eval_step on every rank ({_first_line(error)})",
                rank=missing[0] if missing else None,
            ) from error
        return [json.loads(reply) for reply in self.store.multi_get(keys)]

    def _has(self, key: str) -> bool:
        try:
            return bool(self.store.check([key]))
        except RuntimeError:
            return False

    def publish(self, failure: Failure) -> None:
        """Set the step's failure, unless somebody was faster."""
        self.store.compare_set(self._failure_key(self.step), "", json.dumps(asdict(failure)))

    def close(self) -> None:
        """End the watcher."""
        self._stopping = True
        self._active.set()
        self._watcher.join(timeout=2)
        for descriptor in self._pidfds.values():
            os.close(descriptor)
        self._pidfds.clear()

    def _key(self, step: int, phase: str, rank: int) -> str:
        return f"{step}/{phase}/{rank}"

    def _failure_key(self, step: int) -> str:
        return f"{step}/failure"

    def _watch(self, store: dist.Store) -> None:
        while True:
            self._active.wait()
            if self._stopping:
                return
            try:
                self._look(store)
            except RuntimeError as error:
                self._report(Failure(self.rank, f"the store is gone: {_first_line(error)}", dead=True))
                return
            threading.Event().wait(_POLL_SECONDS)

    def _look(self, store: dist.Store) -> None:
        step = self.step
        for rank in self._died():
            self.dead.add(rank)
            failure = Failure(rank, "its process died", dead=True)
            reply = json.dumps({DEAD: failure.cause})
            for phase in ("start", "end"):
                store.compare_set(self._key(step, phase, rank), "", reply)
            self._report(failure)
        if not self._seen_failure and store.check([self._failure_key(step)]):
            self._seen_failure = True
            self._report(Failure(**json.loads(store.get(self._failure_key(step)))))

    def _died(self) -> list[int]:
        """Peers of this host that are dead: their descriptors become readable. Told again in every step."""
        ready, _, _ = select.select(list(self._pidfds.values()), [], [], 0) if self._pidfds else ([], [], [])
        return [rank for rank, descriptor in self._pidfds.items() if descriptor in ready]

    def _report(self, failure: Failure) -> None:
        with self._lock:
            callback = self.on_failure
        if callback is not None:
            callback(failure)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def cause_text(error: BaseException) -> str:
    """An exception in one line: its type and its message."""
    return f"{type(error).__name__}: {_first_line(error)}" if str(error) else type(error).__name__
