"""Control of several processes: gathers before and after a step, and a watcher for failures in between.

Processes of one host gather in shared memory; all others, and to find each other in the first place, over the store
of their process group. There the first failure of each step stands, too: the first process to write it wins.

The watcher is a thread that sleeps until another process of this host wakes it or exits, and costs nothing until then.
Only where a process cannot wake it, as on another host, does it look into the store from time to time, and keep up the
lifeline. A store whose host is lost or stopped does not answer, so it is asked in yet another thread, which may be
left alone. Processes of one host watch each other; those of other hosts watch rank 0, and rank 0 watches them.
"""

from __future__ import annotations

import json
import logging
import select
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import asdict
from datetime import timedelta
from typing import Any

from fastpipe.runtime.common import DIED, SECONDS, Failure, Patience, asked, attended, first_line, logged
from fastpipe.runtime.coordination.control import Control, Reply
from fastpipe.runtime.coordination.deferred import DeferredResults
from fastpipe.runtime.coordination.gather import Gather, SharedMemoryGather, StoreGather
from fastpipe.runtime.coordination.host import Identity, LocalPeers, RanksPerHost, same_host
from fastpipe.runtime.coordination.lifeline import BEAT_SECONDS, GONE, LEFT, Lifeline

logger = logging.getLogger("fastpipe")
_UNWATCHED = "their deaths are noticed by their connections with rank 0, or after the timeout"
_LOOK_SECONDS = 0.1
_GRACE_SECONDS = 1.0

OnFailure = Callable[[Failure], None]


class Processes(Control):
    """Several processes, one a rank.

    Args:
        store: a store that all of them share, with a prefix of its own.
        rank: this process.
        size: how many there are.
        timeout: seconds to wait for the others.
        ranks_per_host: the ranks of this host.
        identity: who a rank is; None if that is not known yet.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        timeout: float,
        ranks_per_host: RanksPerHost,
        identity: Callable[[int], Identity | None] = lambda rank: None,
    ) -> None:
        self.rank = rank
        self.size = size
        self.step = 0
        self._lost: Failure | None = None  # reported in this step
        self._store, self._identity, self._timeout = store, identity, timeout
        self._lifeline = Lifeline(rank)
        self._local_peers = LocalPeers()
        self._watcher = watcher = Watcher(store, self._local_peers, self._lifeline)
        self._store_gather = StoreGather(store, rank, size, timeout, self._watcher.store_gone, self.lost)
        self._shared_gather = SharedMemoryGather(rank, size, timeout, ranks_per_host, self.lost)
        self._gather: Gather = self._store_gather
        self.deferred: DeferredResults = DeferredResults(store, rank, timeout, lambda: watcher.dead)
        self._patience = Patience(min(SECONDS, timeout / 4))

    def setup(self, message: Reply) -> list[Reply]:
        """Find the others, watch those that can be watched, and gather in shared memory if all can."""
        identity = self._local_peers.identity() | self._shared_gather.offer()
        replies = self.exchange("setup", identity | message)
        far = [rank for rank, reply in enumerate(replies) if rank and not _can_watch(replies[0], reply)]
        own: Reply = {"tied": self._tie(far), "rings": self._local_peers.meet(self.rank, replies)}
        answers = self.exchange("connection", own | {"why": self._shared_gather.connect(replies)})
        self._lifeline.keep([rank for rank, answer in enumerate(answers) if self.rank in answer["tied"]])
        if untied := [rank for rank in far if rank not in answers[0]["tied"] or 0 not in answers[rank]["tied"]]:
            logger.warning("ranks %s cannot connect to rank 0: if they die, that is noticed after the timeout", untied)
        unwatched = [rank for rank, reply in enumerate(replies) if not reply["can_watch"]]
        self.remark = f"pidfd_open is denied on ranks {unwatched}: {_UNWATCHED}" if unwatched else ""
        polls = not all(self.rank in answer["rings"] for answer in self._others(answers))
        self._watcher.start(polls, self._connect())
        why = next((f"rank {rank}: {answer['why']}" for rank, answer in enumerate(answers) if answer["why"]), None)
        if why is None:
            self._gather = self._shared_gather
        else:
            logger.info("the ranks agree over the store, which costs each step about a millisecond: %s", why)
            # of its own: a wait that has timed out leaves a thread that waits there
            self._store_gather.waits = self._connect()
        return replies

    def _connect(self) -> Any:
        """Another connection to the store."""
        # a process that failed before this has answered: what is wrong is found in the answers, on every rank alike
        return attended(self._store.clone, lambda: None, timedelta(seconds=self._timeout))

    def _tie(self, far: Sequence[int]) -> list[int]:
        """Connect those that are on other hosts than rank 0 with it."""
        if not far:
            return []
        offers = self.exchange("lifeline", self._lifeline.offer(self._store) if self.rank == 0 else {})
        return self._lifeline.tie(offers[0], far)

    def _others(self, answers: Sequence[Reply]) -> list[Reply]:
        return [answer for rank, answer in enumerate(answers) if rank != self.rank]

    def lost(self, awaited: Sequence[int] | None = None) -> Failure | None:
        """A published failure, or else the end of one of those awaited. In steps, what the watcher has found."""
        if self.step:
            return self._lost or next(iter(self._watcher.dead), None)
        # in this order: a process that fails publishes that before it closes the pipeline
        dead = self._watcher.find_dead(self.step + 1)
        # a store that is gone is reported where it is needed
        if (failure := self._patience.ask(self._find_published, None)) is not None:
            return failure
        return next((failure for failure in dead if awaited is None or failure.rank in awaited), None)

    def _find_published(self) -> Failure | None:
        """The first failure while the pipeline is built; processes that have come since are watched."""
        if (failure := read_failure(self._store, self.step)) is not None:
            return failure
        for rank in range(self.size):
            unknown = rank != self.rank and rank not in self._local_peers.processes
            if unknown and (identity := self._identity(rank)) is not None:
                self._local_peers.watch(rank, identity)
        return None

    def begin(self, on_failure: Callable[[Failure], None]) -> None:
        """Start a step."""
        self.step += 1
        self._lost = self._gather.suspected = None

        def report(failure: Failure) -> None:
            self._note(failure)
            on_failure(failure)

        self._watcher.begin(self.step, report)
        if self.step == 1 and self._gather is self._shared_gather:
            self._shared_gather.look_around()

    def on_loss(self, report: OnFailure) -> None:
        """See `Control.on_loss`."""
        self._watcher.on_loss = report

    def _note(self, failure: Failure) -> None:
        """End this process's waits for the others in this step."""
        if failure.is_suspected:
            self._gather.suspected = self._gather.suspected or failure
        elif failure.is_fatal:
            self._lost = self._lost or failure

    def end(self) -> None:
        """The step is over; what was written in the one before it has been read by all."""
        self._watcher.end()
        wrote = bool(self._watcher.published) or self._gather is self._store_gather
        if wrote and self.lost() is None:
            self._patience.ask(self._forget, None)

    def _forget(self) -> None:
        self._watcher.forget()
        if self._gather is self._store_gather:
            self._store_gather.forget(self.step - 2)

    def exchange(self, phase: str, message: Reply) -> list[Reply]:
        """Give a message and get those of all processes."""
        written = len(self._store_gather.written)
        replies = self._gather.exchange(self.step, phase, message)
        if self.step == 0:
            # all have read what came before
            self._patience.ask(lambda: self._store_gather.forget_first(written), None)
        return replies

    def publish(self, failure: Failure) -> Failure:
        """Write a failure into the store, unless another process was faster, and wake the others."""
        self._note(failure)
        # without the store the others find out for themselves, and this rank goes on draining
        return self._patience.ask(lambda: self._watcher.publish(failure), failure)

    def close(self) -> None:
        """Stop watching, and close what the processes share."""
        self.deferred.close()
        self._local_peers.part(self.rank, self.step)
        self._watcher.close()
        self._lifeline.close(self.step)
        self._local_peers.close()


def _can_watch(one: Reply, other: Reply) -> bool:
    """Whether two processes see each other's end by a process descriptor."""
    return same_host(one, other) and bool(one["can_watch"] and other["can_watch"])


def _ignore(failure: Failure) -> None:
    """Nothing is to be done."""


class Watcher:
    """The thread, and the failures that it reads in the store.

    Args:
        store: that of the processes.
        local_peers: the processes of this host.
        lifeline: the connections to those of other hosts.

    Attributes:
        polls: whether some process cannot wake this one, so that its failures have to be looked for.
        published: the steps in which this process has published a failure that is still in the store.
        on_loss: called when a process has ended that had not closed the pipeline, in a step or between two, from the
            watcher's thread.
        dead: the processes that were found to have ended, in order of the ranks.
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
        self.dead: list[Failure] = []
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
        if self.polls or self.dead:
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
        """Report a failure to all others; the step's first one, which may be another's.

        Raises:
            RuntimeError: when the store is gone.
        """
        first = write_failure(self.store, failure, self.step)
        if first == failure:
            self.published.append(self.step)
        self.local_peers.ring()
        return first

    def store_gone(self, error: RuntimeError) -> Failure:
        """The store is gone, mostly because the process that held it died; the kernel may say so a little later."""
        deadline = time.monotonic() + _GRACE_SECONDS
        while not (dead := self.find_dead(self.step)) and time.monotonic() < deadline:
            time.sleep(0.01)
        if dead:
            return dead[0]
        return Failure(None, f"the store of the process group is gone: {first_line(error)}", is_fatal=True)

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
            self.dead = self.find_dead(self.step)
            if self._stopping:
                return
            with self._lock:
                step, active = self.step, self._on_failure is not None
            # reported again until the step ends: a rank that has not begun its program yet would forget it
            looking = active
            # in this order: what is unblocked on a loss may end the step, which must know the reason by then
            seen = not active or self._look(store, step)
            self._report_losses()
            if not seen:
                return

    def _report_losses(self) -> None:
        for failure in self.dead:
            with logged("to unblock what waits for a lost rank"):
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
        dead = self.dead
        for death in dead:
            self._report(death, step)

        def ask() -> Failure | None:
            for death in dead if self.polls else ():
                write_failure(store, death, step)  # processes of other hosts learn of it by the store alone
            return read_failure(store, step)

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

    def find_dead(self, step: int) -> list[Failure]:
        """The processes that cannot take part in a step, as they have ended, in order of the ranks."""
        ended = self.lifeline.ended()
        found = {rank: cause for rank, (cause, last_step) in ended.items() if last_step < step}
        found |= dict.fromkeys(self.local_peers.ended(), DIED)
        # in this order: a process that closes its pipeline reports that before it ends
        self.local_peers.quiet()
        for rank, last_step in list(self.local_peers.parted.items()):
            if last_step >= step:
                found.pop(rank, None)
            elif last_step:  # one that failed to build it has published why
                found[rank] = LEFT
        return [Failure(rank, cause, is_fatal=True) for rank, cause in sorted(found.items())]

    def _report(self, failure: Failure, step: int) -> None:
        # under the lock, or it might be reported to the next step, which has nothing to do with it
        with self._lock:
            if self._on_failure is not None and self.step == step:
                with logged("to report a failure to its step"):
                    self._on_failure(failure)


def write_failure(store: Any, failure: Failure, step: int) -> Failure:
    """Write the first failure of a step; the one that stands there.

    Raises:
        RuntimeError: when the store is gone.
    """
    return Failure(**json.loads(store.compare_set(_key(step), "", json.dumps(asdict(failure)))))


def read_failure(store: Any, step: int) -> Failure | None:
    """The first failure of a step.

    Raises:
        RuntimeError: when the store is gone.
    """
    # nothing is there where it is deleted meanwhile: then the step is over
    text = store.get(_key(step)) if store.check([_key(step)]) else ""
    return Failure(**json.loads(text)) if text else None


def _key(step: int) -> str:
    """Step 0 is the building of the pipeline."""
    return f"{step}/failure"
