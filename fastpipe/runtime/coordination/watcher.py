"""Watcher: learns in the midst of a step that another process failed or died.

A thread that sleeps until a neighbour rings or dies, and costs nothing until then. Only where a process cannot be
reached by a bell, as on another host, does it look into the store from time to time, and keep up the lifeline. A store
whose host is gone or stopped does not answer, so it is asked in yet another thread, which may be left alone.
"""

from __future__ import annotations

import json
import select
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import asdict
from typing import Any

from fastpipe.runtime.common import DIED, Failure, asked, first_line, logged
from fastpipe.runtime.coordination.host import LocalPeers
from fastpipe.runtime.coordination.lifeline import BEAT_SECONDS, GONE, LEFT, Lifeline

_LOOK_SECONDS = 0.1
_GRACE_SECONDS = 1.0

OnFailure = Callable[[Failure], None]


def _ignore(failure: Failure) -> None:
    """Nobody wants to know."""


class Watcher:
    """The thread, and the failures that it reads in the store.

    Args:
        store: that of the processes.
        local_peers: the processes of this host.
        lifeline: the connections to those of other hosts.

    Attributes:
        polls: whether some process cannot ring, so that its failures have to be looked for.
        published: the steps in which this process has published a failure that is still in the store.
        on_loss: called when a process has ended that had not closed the pipeline, in a step or between two, from the
            watcher's thread.
    """

    def __init__(self, store: Any, local_peers: LocalPeers, lifeline: Lifeline) -> None:
        self.store = store
        self.local_peers = local_peers
        self.lifeline = lifeline
        self.polls = True
        self.on_loss: Callable[[Failure], None] = _ignore
        self.step = 0
        self._on_failure: OnFailure | None = None
        self.published: list[int] = []
        self._dead: dict[int, str] = {}
        self._lock = threading.Lock()
        self._stopping = False
        self._answer: tuple[int, Future[Failure | None]] | None = None
        self._thread: threading.Thread | None = None

    def start(self, polls: bool, own: Any) -> None:
        """From now on deaths are seen, and failures in steps reported.

        Args:
            polls: see above.
            own: a connection to the store for this thread, as others may be blocked.
        """
        self.polls = polls
        self._thread = threading.Thread(target=self._watch, args=(own,), name="fastpipe-watch", daemon=True)
        self._thread.start()

    def begin(self, step: int, on_failure: OnFailure) -> None:
        """A step begins: its failures are reported to ``on_failure``."""
        with self._lock:
            self.step = step
            self._on_failure = on_failure
        if self.polls or self._dead:
            self.local_peers.ring_own()

    def end(self) -> None:
        """The step is over."""
        with self._lock:
            self._on_failure = None

    def forget(self) -> None:
        """Drop what this process has published in steps that all have passed, and no watcher looks into any more.

        Raises:
            RuntimeError: when the store is gone.
        """
        while self.published and self.published[0] < self.step - 1:
            self.store.delete_key(_key(self.published.pop(0)))

    def publish(self, failure: Failure) -> Failure:
        """Tell all others of a failure; the step's first one, which may be another's.

        Raises:
            RuntimeError: when the store is gone.
        """
        first = note_failure(self.store, failure, self.step)
        if first == failure:
            self.published.append(self.step)
        self.local_peers.ring()
        return first

    def store_gone(self, error: RuntimeError) -> Failure:
        """The store is gone, mostly because the process that held it died; the kernel may say so a little later."""
        deadline = time.monotonic() + _GRACE_SECONDS
        while not (died := self.find_dead(self.step)) and time.monotonic() < deadline:
            time.sleep(0.01)
        if died:
            return Failure(min(died), died[min(died)], dead=True)
        return Failure(None, f"the store of the process group is gone: {first_line(error)}", dead=True)

    def close(self) -> None:
        """End the thread."""
        self._stopping = True
        self.local_peers.ring_own()
        # a pipeline may be collected in any thread, this one too
        if self._thread is not None and threading.current_thread() is not self._thread:
            self._thread.join(timeout=2)
        # what is called belongs to the steps, which hold the control and so this: a dropped pipeline is freed at once
        self.on_loss, self._on_failure = _ignore, None

    def _watch(self, store: Any) -> None:
        poll = self._poll()
        looking = False
        while True:
            ready = poll.poll(self._milliseconds(looking))
            self.lifeline.beat()
            for descriptor, _ in ready:
                if descriptor != self.local_peers.wakeup.fileno():
                    poll.unregister(descriptor)
            self._dead = self.find_dead(self.step)
            if self._stopping:
                return
            with self._lock:
                step, active = self.step, self._on_failure is not None
            # told again until the step ends: a rank that has not begun its program yet would forget it
            looking = active
            # a step is told first, before it can end by what is let go on a loss
            seen = not active or self._look(store, step)
            self._tell_losses()
            if not seen:
                return

    def _tell_losses(self) -> None:
        for failure in self.dead():
            with logged("to let go of a lost rank"):
                self.on_loss(failure)

    def _poll(self) -> select.poll:
        poll = select.poll()
        poll.register(self.local_peers.wakeup, select.POLLIN)
        for process in self.local_peers.processes.values():
            poll.register(process, select.POLLIN)
        for connection in self.lifeline.descriptors:
            poll.register(connection, GONE)
        return poll

    def _milliseconds(self, looking: bool) -> float | None:
        """How long it may sleep."""
        if looking:
            return 1000 * _LOOK_SECONDS
        return 1000 * BEAT_SECONDS if self.lifeline.descriptors else None

    def _look(self, store: Any, step: int) -> bool:
        """Report what is wrong in a step; False when there is no store to look into."""
        deaths = self.dead()
        for death in deaths:
            self._report(death, step)

        def ask() -> Failure | None:
            for death in deaths if self.polls else ():
                note_failure(store, death, step)  # those of other hosts are told by the store alone
            # nothing is there where it is deleted meanwhile: then the step is over
            text = store.get(_key(step)) if store.check([_key(step)]) else ""
            return Failure(**json.loads(text)) if text else None

        if self._answer is None or self._answer[0] != step:
            self._answer = step, asked(ask, "fastpipe-look")
        answer = self._answer[1]
        if not wait([answer], _LOOK_SECONDS).done:
            return True
        self._answer = None
        try:
            if (failure := answer.result()) is not None:
                self._report(failure, step)
        except RuntimeError as error:
            self._report(self.store_gone(error), step)
            return False
        return True

    def dead(self) -> list[Failure]:
        """Who has been found to have ended, in order of the ranks."""
        return [Failure(rank, cause, dead=True) for rank, cause in sorted(self._dead.items())]

    def find_dead(self, step: int) -> dict[int, str]:
        """Who cannot take part in a step, and what became of it."""
        ended = self.lifeline.ended()
        found = {rank: cause for rank, (cause, last_step) in ended.items() if last_step < step}
        found |= dict.fromkeys(self.local_peers.ended(), DIED)
        # in this order: who closes its pipeline says so before it ends
        self.local_peers.quiet()
        for rank, last_step in list(self.local_peers.parted.items()):
            if last_step >= step:
                found.pop(rank, None)
            elif last_step:  # one that has given up building leaves word of why
                found[rank] = LEFT
        return found

    def _report(self, failure: Failure, step: int) -> None:
        # under the lock, or it might be told to the next step, which has nothing to do with it
        with self._lock:
            if self._on_failure is not None and self.step == step:
                with logged("to tell a step of its failure"):
                    self._on_failure(failure)


def note_failure(store: Any, failure: Failure, step: int) -> Failure:
    """Write down the first failure of a step; the one that stands there.

    Raises:
        RuntimeError: when the store is gone.
    """
    return Failure(**json.loads(store.compare_set(_key(step), "", json.dumps(asdict(failure)))))


def _key(step: int) -> str:
    return f"{step}/failure"
