"""Control of several processes: all-gathers before and after a step, and a watcher for failures in between.

Processes of one host gather in shared memory. Others, and all at first, gather over the store of their process group.
The store also has the first failure of each step: the first process to write it wins.

The watcher is a thread. It sleeps until another process of this host wakes it or exits. Only where a process cannot
wake it, for example from another host, it polls the store, and sends on the lifeline. The store does not answer if its
host is lost or stopped. So a further thread asks it, which may be abandoned. Processes of one host watch each other;
processes of other hosts watch rank 0, and rank 0 watches them.
"""

from __future__ import annotations

import json
import logging
import os
import select
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import asdict, replace
from typing import Any

from fastpipe.runtime.common import (
    DIED,
    EXIT_SECONDS,
    MAX_TEXT,
    POLL_SECONDS,
    SHORT_EXIT_SECONDS,
    STORE_SECONDS,
    CircuitBreaker,
    Failure,
    FailureError,
    call_in_thread,
    cloned,
    end_child,
    first_line,
    listed,
    logged,
    pauses,
)
from fastpipe.runtime.coordination.control import Control, Replies, Reply
from fastpipe.runtime.coordination.deferred import DeferredResults
from fastpipe.runtime.coordination.gather import Gather, SharedMemoryGather, StoreGather
from fastpipe.runtime.coordination.host import Identity, RanksPerHost, same_host
from fastpipe.runtime.coordination.peers import BEAT_SECONDS, HANGUP, LEFT, Lifeline, LocalPeers

logger = logging.getLogger("fastpipe")
_UNWATCHED = "their exits are detected by connections to rank 0, or after the timeout"

OnFailure = Callable[[Failure], None]


class Processes(Control):
    """Control of several processes, one per rank; of one pipeline, or of all that share collectives within stages.

    A tensor-parallel stage, for example, is in one pipeline for every rank of the mesh's ``"tp"`` dimension. If one of
    them fails, the others wait for it within a stage, where nothing can be drained. So these pipelines begin and end
    their steps together, and share the watcher: a failure within a step is fatal for all of them.

    Args:
        number: of this process, pipeline after pipeline, each in the order of its ranks.
        size: the number of ranks of a pipeline.
        identity: returns the identity of a process; None if it is not available yet.
        pipelines: where each pipeline is in the mesh, as text.
        own_store: of this pipeline alone.
    """

    def __init__(
        self,
        store: Any,
        number: int,
        size: int,
        timeout: float,
        ranks_per_host: RanksPerHost,
        identity: Callable[[int], Identity | None] = lambda number: None,
        pipelines: Sequence[str] = ("",),
        own_store: Any = None,
    ) -> None:
        self.size, self.num_processes = size, size * len(pipelines)
        pipeline, self.rank = divmod(number, size)
        self.number, self._first = number, pipeline * size
        self.pipeline, self._pipelines = pipelines[pipeline], pipelines
        self._process = os.getpid()
        self._lost: Failure | None = None  # reported in this step
        self._store, self._identity, self._timeout = store, identity, timeout
        self._lifeline = Lifeline(number)
        self._local_peers = LocalPeers()
        self._watcher = Watcher(store, self._local_peers, self._lifeline, self._failure)
        among = number, self.num_processes, timeout, self.lost, self._failure
        self._store_gather = StoreGather(*among, store, self._watcher.store_gone)
        self._shared_gather = SharedMemoryGather(*among, ranks_per_host)
        self._gather: Gather = self._store_gather
        own_store = store if own_store is None else own_store
        self.deferred: DeferredResults = DeferredResults(own_store, self.rank, timeout, self._dead_here)
        self._breaker = CircuitBreaker(min(STORE_SECONDS, timeout / 4))
        self._place_breaker = CircuitBreaker(min(1.0, timeout / 4))

    def _failure(self, process: int | None, cause: str) -> Failure:
        """The fatal failure of a process."""
        if process is None:
            return Failure(None, cause, is_fatal=True)
        pipeline, rank = divmod(process, self.size)
        return Failure(rank, cause, is_fatal=True, pipeline=self._pipelines[pipeline])

    def _dead_here(self) -> list[Failure]:
        return [failure for failure in self.dead if failure.pipeline == self.pipeline]

    def setup(self, message: Reply) -> Replies:
        """Exchange identities, watch the processes that can be watched, and use shared memory if all can."""
        identity = self._local_peers.identity() | self._shared_gather.offer()
        replies = self._gather_all("setup", identity | message)
        near = [same_host(replies[0], reply) and replies[0]["can_watch"] and reply["can_watch"] for reply in replies]
        far = [number for number in range(1, self.num_processes) if not near[number]]
        own: Reply = {"connected": self._connect_hosts(far), "woken": self._local_peers.connect(self.number, replies)}
        answers = self._gather_all("connection", own | {"why": self._shared_gather.connect(replies)})
        self._lifeline.keep([number for number, answer in enumerate(answers) if self.number in answer["connected"]])
        missed = [n for n in far if n not in answers[0]["connected"] or 0 not in answers[n]["connected"]]
        if missed:
            names = listed(map(self.name_of, missed), None)
            logger.warning("%s cannot connect to rank 0: their exits are detected after the timeout", names)
        unwatched = [self.name_of(number) for number, reply in enumerate(replies) if not reply["can_watch"]]
        self.remark = f"pidfd_open is denied on {listed(unwatched, None)}: {_UNWATCHED}" if unwatched else ""
        others = [answer for process, answer in enumerate(answers) if process != self.number]
        polls = not all(self.number in answer["woken"] for answer in others)
        self._watcher.start(polls, cloned(self._store, self._timeout))
        why = next((f"{self.name_of(n)}: {answer['why']}" for n, answer in enumerate(answers) if answer["why"]), None)
        if why is None:
            self._gather = self._shared_gather
        else:
            logger.info("the ranks agree over the store, about a millisecond per step: %s", why)
            # a separate connection: a wait that has timed out leaves a thread blocked on it
            self._store_gather.waits = cloned(self._store, self._timeout)
        return self._by_pipeline(replies)

    def _connect_hosts(self, far: Sequence[int]) -> list[int]:
        """Connect rank 0 with the ranks of other hosts."""
        if not far:
            return []
        offers = self._gather_all("lifeline", self._lifeline.offer(self._store) if self.number == 0 else {})
        return self._lifeline.connect(offers[0], far)

    def lost(self, awaited: Sequence[int] | None = None) -> Failure | None:
        """A published failure, else the exit of an awaited process. Within steps, what the watcher detected."""
        if self.step:
            return self._lost or next(iter(self._watcher.causes), None)
        # before the published failure is read: a process that fails publishes that and then closes the pipeline
        dead = self._watcher.find_dead(1)
        # a lost store is reported where it is needed
        if (failure := self._breaker.call(self._find_published, None)) is not None:
            return failure
        return next((failure for process, failure in dead.items() if awaited is None or process in awaited), None)

    def _find_published(self) -> Failure | None:
        """The first failure while the pipeline is built; also watch processes that have started since."""
        if (failure := read_failure(self._store, self.step)) is not None:
            return failure
        for number in range(self.num_processes):
            unknown = number != self.number and number not in self._local_peers.processes
            if unknown and (identity := self._identity(number)) is not None:
                self._local_peers.watch(number, identity)
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
            self._shared_gather.choose_wait()

    @property
    def dead(self) -> list[Failure]:
        """See `Control.dead`."""
        return list(self._watcher.dead.values())

    def on_loss(self, report: OnFailure) -> None:
        """See `Control.on_loss`."""
        self._watcher.on_loss = report

    def _note(self, failure: Failure) -> None:
        """End this process's waits for the others in this step."""
        if _ends_waits(failure):
            self._lost = self._lost or failure
        elif failure.is_suspected:
            self._gather.suspected = self._gather.suspected or failure

    def end(self) -> None:
        """End a step; all processes have read what the step before it wrote."""
        self._watcher.end()
        if self._watcher.published and self.lost() is None:
            self._breaker.call(self._watcher.forget, None)

    def exchange(self, phase: str, message: Reply) -> Replies:
        """Send a message and return the messages of all processes."""
        return self._by_pipeline(self._gather_all(phase, message))

    def _gather_all(self, phase: str, message: Reply) -> list[Reply]:
        """The messages of all processes, by number."""
        end_child(self._process, message.get("failure", {}).get("cause", ""))
        failures = {key: Failure(**message[key]) for key in ("failure", "first") if key in message}
        message = message | {key: asdict(self._here(failure)) for key, failure in failures.items()}
        written = len(self._store_gather.written)
        try:
            replies = self._gather.exchange(self.step, phase, message)
        except FailureError as error:
            if self.step and self.lost() is None and error.failure.rank is not None:
                self.publish(error.failure)  # a rank that comes after that would wait for this one, and blame it
            raise
        if written:  # who has sent this message has read the earlier ones
            self._breaker.call(lambda: self._store_gather.forget(written), None)
        return replies

    def _by_pipeline(self, replies: Sequence[Reply]) -> Replies:
        end = self._first + self.size
        elsewhere = [
            reply | {"pipeline": self._pipelines[number // self.size]}
            for number, reply in enumerate(replies)
            if not self._first <= number < end
        ]
        return Replies(replies[self._first : end], elsewhere)

    def _here(self, failure: Failure) -> Failure:
        """With the place of its pipeline, if it is a rank of this one."""
        is_here = failure.rank is not None and not failure.pipeline
        return replace(failure, pipeline=self.pipeline) if is_here else failure

    def publish(self, failure: Failure) -> Failure:
        """Write a failure into the store, unless another process was faster, and wake the others."""
        end_child(self._process, failure.cause)
        failure = self._here(failure)
        ends_mesh = bool(self.pipeline and self.step)  # fatal for all its pipelines
        if ends_mesh:
            if not failure.is_fatal:
                # a collective may have raised because a process exits, which closes its connections first
                for pause in pauses(SHORT_EXIT_SECONDS):
                    if self.lost() is not None:
                        break
                    time.sleep(pause)
            failure = replace(self.lost() or failure, is_fatal=True)
        # without the store the others detect the failure themselves, and this rank drains
        first = self._breaker.call(lambda: self._watcher.publish(failure), failure)
        self._note(first)  # of which this one may be a consequence
        self._note(failure)
        if ends_mesh:  # for this process, too
            self._watcher.report(first, self.step)
        return first

    def put_place(self, step: int, is_active: bool, text: str, within: str = "step") -> None:
        """See `Control.put_place`."""
        content = json.dumps([step, is_active, text[:MAX_TEXT]])
        self._place_breaker.call(lambda: self._store.set(_place_key(within, self.number), content), None)

    def places(self, within: str = "step") -> dict[int, tuple[int, bool, str]]:
        """See `Control.places`."""

        def read() -> dict[int, tuple[int, bool, str]]:
            store, numbers = self._store, range(self.num_processes)
            keys = {number: key for number in numbers if store.check([key := _place_key(within, number)])}
            return {number: tuple(json.loads(store.get(key))) for number, key in keys.items()}

        return self._place_breaker.call(read, {})

    def name_of(self, number: int) -> str:
        """See `Control.name_of`."""
        return self._failure(number, "").place()

    def close(self) -> None:
        """Stop the watcher, and close what the processes share."""
        self.deferred.close()
        self._local_peers.report_close(self.number, self.step)
        self._watcher.close()
        self._lifeline.close(self.step)
        self._local_peers.close()


class Watcher:
    """The watcher thread, and the failures in the store.

    Attributes:
        polls: whether some process cannot wake this one, so that the store is polled.
        published: the steps whose failures this process has published and not yet deleted.
        on_loss: called from the watcher's thread if a process exits without closing the pipeline, in or between steps.
        dead: failures of the processes that have exited or closed the pipeline, by number.
        causes: the failures that are reported for them.
    """

    def __init__(
        self, store: Any, local_peers: LocalPeers, lifeline: Lifeline, failure: Callable[[int, str], Failure]
    ) -> None:
        self.store = store
        self._failure = failure
        self.local_peers = local_peers
        self.lifeline = lifeline
        self.polls = True
        self.on_loss: OnFailure | None = None
        self.step = 0
        self._on_failure: OnFailure | None = None
        self.published: list[int] = []
        self.dead: dict[int, Failure] = {}
        self.causes: list[Failure] = []
        self._breaker = CircuitBreaker(SHORT_EXIT_SECONDS)
        self._lock = threading.Lock()
        self._stopping = False
        self._answer: tuple[int, Future[Failure | None]] | None = None
        self._thread: threading.Thread | None = None

    def start(self, polls: bool, own: Any) -> None:
        """Start the thread, which reports exits, and failures within steps.

        Args:
            own: a connection to the store for this thread, as the others may be blocked.
        """
        self.polls = polls
        self.local_peers.drain()  # what the others have sent to learn whether they can
        self._thread = threading.Thread(target=self._watch, args=(own,), name="fastpipe-watch", daemon=True)
        self._thread.start()

    def begin(self, step: int, on_failure: OnFailure) -> None:
        """Start a step; its failures are passed to ``on_failure``."""
        with self._lock:
            self.step = step
            self._on_failure = on_failure
        # a process that has closed the pipeline is dead to the steps that follow; others may have given up this step,
        # or the one before when it had ended here
        if self.polls or self.dead or self.local_peers.closed or self.local_peers.failed >= step - 1:
            self.local_peers.wake_own()

    def end(self) -> None:
        """End the step."""
        with self._lock:
            self._on_failure = None

    def forget(self) -> None:
        """Delete published failures of steps that all have passed and no watcher reads.

        Raises:
            RuntimeError: if the store is gone.
        """
        while self.published and self.published[0] < self.step - 1:
            self.store.delete_key(_key(self.published.pop(0)))

    def publish(self, failure: Failure) -> Failure:
        """Publish a failure; returns the first failure of the step, which may be another rank's.

        Raises:
            RuntimeError: if the store is gone.
        """
        first = write_failure(self.store, failure, self.step)
        if first == failure:
            self.published.append(self.step)
        if _ends_waits(failure):  # others may have ended this step, and wait for this process in the next one
            write_failure(self.store, failure, self.step + 1)
        self.local_peers.wake(self.step)
        return first

    def store_gone(self, error: RuntimeError) -> Failure:
        """The failure for a lost store, usually because its process died; the kernel may report that a little later."""
        deadline = time.monotonic() + EXIT_SECONDS
        while not (dead := self.find_dead(self.step)) and time.monotonic() < deadline:
            time.sleep(0.01)
        if dead:
            return next(iter(dead.values()))
        return Failure(None, f"the store of the process group is gone: {first_line(error)}", is_fatal=True)

    def close(self) -> None:
        """End the thread."""
        self._stopping = True
        self.local_peers.wake_own()
        # the garbage collector may close a pipeline in any thread, this one included
        if self._thread is not None and threading.current_thread() is not self._thread:
            self._thread.join(timeout=2)
        # both belong to the steps, which hold the control: without this cycle a dropped pipeline is freed at once
        self.on_loss = self._on_failure = None

    def _watch(self, store: Any) -> None:
        poll = self._poll()
        looking = False
        while True:
            beats = 1000 * BEAT_SECONDS if self.lifeline.descriptors else None
            ready = poll.poll(1000 * POLL_SECONDS if looking else beats)
            self.lifeline.beat()
            for descriptor, _ in ready:
                if descriptor != self.local_peers.wakeup.fileno():
                    poll.unregister(descriptor)
            self.dead = self.find_dead(self.step)
            self.causes = [self._cause(number, failure, store) for number, failure in self.dead.items()]
            if self._stopping:
                return
            with self._lock:
                step, active = self.step, self._on_failure is not None
            # reported again until the step ends: a rank that has not started its program yet would lose it
            looking = active
            # before the losses: a rank unblocked by them may end the step, and needs the reason
            seen = not active or self._look(store, step)
            self._report_losses()
            if not seen:
                return

    def _report_losses(self) -> None:
        if (on_loss := self.on_loss) is not None:
            for failure in self.causes:
                with logged("to unblock what waits for a lost rank"):
                    on_loss(failure)

    def _poll(self) -> select.poll:
        poll = select.poll()
        poll.register(self.local_peers.wakeup, select.POLLIN)
        for process in self.local_peers.processes.values():
            poll.register(process, select.POLLIN)
        for connection in self.lifeline.descriptors:
            poll.register(connection, HANGUP)
        return poll

    def _look(self, store: Any, step: int) -> bool:
        """Report the failures of a step; returns False if the store is gone."""
        dead = self.causes
        for death in dead:
            self.report(death, step)

        def ask() -> Failure | None:
            for death in dead if self.polls else ():
                write_failure(store, death, step)  # processes of other hosts read it in the store
            return read_failure(store, step)

        if self._answer is None or self._answer[0] != step:
            self._answer = step, call_in_thread(ask, "fastpipe-look")
        answer = self._answer[1]
        if not wait([answer], POLL_SECONDS).done:
            return True
        self._answer = None
        try:
            if (failure := answer.result()) is not None:
                self.report(failure, step)
        except RuntimeError as error:
            self.report(self.store_gone(error), step)
            return False
        return True

    def find_dead(self, step: int) -> dict[int, Failure]:
        """Failures of the processes that cannot take part in a step: exited, or closed the pipeline; by number."""
        ended = self.lifeline.ended()
        found = {number: cause for number, (cause, last_step) in ended.items() if last_step < step}
        found |= dict.fromkeys(self.local_peers.ended(), DIED)
        # after the exits: a process that closes its pipeline reports that before it exits
        self.local_peers.drain()
        for number, last_step in list(self.local_peers.closed.items()):
            if last_step >= step:
                found.pop(number, None)
            else:  # a process that failed to build it has published why, which is read first
                found[number] = LEFT
        return {number: self._failure(number, cause) for number, cause in sorted(found.items())}

    def _cause(self, number: int, failure: Failure, store: Any) -> Failure:
        """The failure of a dead process; if it has closed the pipeline after a fatal failure, that one.

        This process may be a step further, as it could still read what the other one wrote for its last step.
        """
        if failure.cause != LEFT:
            return failure
        last_steps = {n: step for n, (_, step) in self.lifeline.ended().items()} | self.local_peers.closed
        found = self._breaker.call(lambda: read_failure(store, last_steps[number]), None)
        return failure if found is None or not _ends_waits(found) else found

    def report(self, failure: Failure, step: int) -> None:
        """Pass a failure to the step, unless it has ended."""
        # under the lock, or the next step might get the failure of this one
        with self._lock:
            if self._on_failure is not None and self.step == step:
                with logged("to report a failure to its step"):
                    self._on_failure(failure)


def write_failure(store: Any, failure: Failure, step: int) -> Failure:
    """Write the first failure of a step; returns the one that is stored.

    A lost rank replaces an exception or a suspicion, after which the others wait for that rank at the end of the step.

    Raises:
        RuntimeError: if the store is gone.
    """
    text = json.dumps(asdict(failure))
    stored = store.compare_set(_key(step), "", text)
    if _ends_waits(failure) and not _ends_waits(Failure(**json.loads(stored))):
        stored = store.compare_set(_key(step), stored.decode(), text)
    return Failure(**json.loads(stored))


def _ends_waits(failure: Failure) -> bool:
    return failure.is_fatal and not failure.is_suspected


def read_failure(store: Any, step: int) -> Failure | None:
    """The first failure of a step.

    Raises:
        RuntimeError: if the store is gone.
    """
    # a key deleted in between reads as empty: the step is over
    text = store.get(_key(step)) if store.check([_key(step)]) else ""
    return Failure(**json.loads(text)) if text else None


def _place_key(within: str, number: int) -> str:
    return f"place/{within}/{number}"


def _key(step: int) -> str:
    """The key of a step's failure; step 0 builds the pipeline."""
    return f"{step}/failure"
