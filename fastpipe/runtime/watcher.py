"""Watcher: learns in the midst of a step that another process failed or died.

A thread that sleeps until a neighbour rings or dies, and costs nothing until then. Only where a process cannot be
reached by a bell, as on another host, does it look into the store from time to time, and keep up the lifeline.
"""

from __future__ import annotations

import contextlib
import json
import select
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from fastpipe.runtime.connections import connections_with, made_by
from fastpipe.runtime.failure import DIED, Failure, first_line, logged
from fastpipe.runtime.host import Neighbours
from fastpipe.runtime.lifeline import BEAT_SECONDS, GONE, Lifeline

_LOOK_SECONDS = 0.1
_GRACE_SECONDS = 1.0

OnFailure = Callable[[Failure], None]
OnDeath = Callable[[Any, Failure, int], None]
"""Called with the thread's store, a death and the step, from the watcher's thread; may raise what the store raises."""


class Watcher:
    """The thread, and the failures that it reads in the store.

    Args:
        store: that of the processes; the thread makes a connection of its own, as this one may be blocked.
        neighbours: the processes of this host.
        lifeline: the connections to those of other hosts.
        on_death: called for every dead process in every step.

    Attributes:
        polls: whether some process cannot ring, so that its failures have to be looked for.
        on_loss: called when a process has ended that had not closed the pipeline, in a step or between two, from the
            watcher's thread.
    """

    def __init__(self, store: Any, neighbours: Neighbours, lifeline: Lifeline, on_death: OnDeath) -> None:
        self.store = store
        self.neighbours = neighbours
        self.lifeline = lifeline
        self.on_death = on_death
        self.polls = True
        self.on_loss: Callable[[Failure], None] = lambda failure: None
        self.step = 0
        self._on_failure: OnFailure | None = None
        self._published: list[int] = []
        self._dead: dict[int, str] = {}
        self._lock = threading.Lock()
        self._stopping = False
        # the store's host may vanish, too
        self._connections = connections_with(store).ask()
        own, connections = made_by(store.clone)
        connections.end_after(lifeline.silence)
        self._thread = threading.Thread(target=self._watch, args=(own,), name="fastpipe-watch", daemon=True)

    def start(self, polls: bool) -> None:
        """From now on deaths are seen, and failures in steps reported."""
        self.polls = polls
        self._thread.start()

    def begin(self, step: int, on_failure: OnFailure) -> None:
        """A step begins: its failures are reported to ``on_failure``."""
        with self._lock:
            self.step = step
            self._on_failure = on_failure
        if self.polls or self._dead:
            self.neighbours.ring_own()

    def end(self) -> None:
        """The step is over."""
        with self._lock:
            self._on_failure = None
        # all have passed the step before this one, and a watcher may still look into that
        while self._published and self._published[0] < self.step - 1:
            with contextlib.suppress(RuntimeError):  # without the store there is nothing to delete
                self.store.delete_key(_key(self._published.pop(0)))

    def publish(self, failure: Failure) -> Failure:
        """Tell all others of a failure; the step's first one, which may be another's.

        Raises:
            RuntimeError: when the store is gone.
        """
        first = note_failure(self.store, failure, self.step)
        if first == failure:
            self._published.append(self.step)
        self.neighbours.ring()
        return first

    def store_gone(self, error: RuntimeError) -> Failure:
        """The store is gone, mostly because the process that held it died; the kernel may say so a little later."""
        deadline = time.monotonic() + _GRACE_SECONDS
        while not (died := self.find_dead(self.step)) and time.monotonic() < deadline:
            time.sleep(0.01)
        self._connections.end_silent()
        if died:
            return Failure(min(died), died[min(died)], dead=True)
        return Failure(None, f"the store of the process group is gone: {first_line(error)}", dead=True)

    def close(self) -> None:
        """End the thread."""
        self._stopping = True
        self.neighbours.ring_own()
        # a pipeline may be collected in any thread, this one too
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout=2)

    def _watch(self, store: Any) -> None:
        poll = self._poll()
        looking = False
        while True:
            ready = poll.poll(self._milliseconds(looking))
            self.lifeline.beat()
            for descriptor, _ in ready:
                if descriptor != self.neighbours.bell:
                    poll.unregister(descriptor)
            self._dead = self.find_dead(self.step)
            # in this order: whoever parts says so before it ends, and what is rung for is there before the ring
            self.neighbours.quiet()
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
            if failure.rank not in self.neighbours.parted:
                with logged("to let go of a lost rank"):
                    self.on_loss(failure)

    def _poll(self) -> select.poll:
        poll = select.poll()
        poll.register(self.neighbours.bell, select.POLLIN)
        for process in self.neighbours.processes.values():
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
        if self._dead:
            self._connections.end_silent()
        try:
            for death in self.dead():
                self._report(death, step)
                self.on_death(store, death, step)
            # nothing is there where it is deleted meanwhile: then the step is over
            if store.check([_key(step)]) and (text := store.get(_key(step))):
                self._report(Failure(**json.loads(text)), step)
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
        return found | dict.fromkeys(self.neighbours.ended(), DIED)

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
