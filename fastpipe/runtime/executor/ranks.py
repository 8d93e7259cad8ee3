"""The ranks of this process: an executor for each, threads if there are several, their failures, and what their device
has done.

A device may run far behind its host. If a process is lost meanwhile, streams of this process or of one upstream may
wait for its messages; they are unblocked, and continue on whatever is in their buffers. So events (`DeviceEvents`) that
are not done by then are invalidated first. Each event gets one verdict, the same for all waiting threads.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from contextvars import copy_context
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from fastpipe.errors import StepError
from fastpipe.program import Op, Program
from fastpipe.runtime import native
from fastpipe.runtime.common import (
    CPU,
    SHORT_EXIT_SECONDS,
    Failure,
    FailureError,
    call_in_thread,
    cause_text,
    end_child,
    failure_of,
    pauses,
    recorded,
    thread_state,
    torch_private,
)
from fastpipe.runtime.data_parallel import DataParallel
from fastpipe.runtime.executor.executor import Check, Executor, NativeExecutor, PythonExecutor, Seconds, abandons
from fastpipe.runtime.stage import Stage
from fastpipe.runtime.transport import MeshGroups, Transport, leave_groups

Spans = dict[int, tuple[Seconds, Seconds]]
"""Start and end of every instruction, by rank."""

_CLOSING_SECONDS = 10
"""Seconds to wait for a device when a pipeline is closed, besides the waits for deferred results."""


@dataclass
class Outcome:
    """Result of a step on the local ranks.

    Attributes:
        spans: times of the instructions, by rank.
        failure: the first failure of a local rank.
        first: the step's first failure on any rank, as of the publication of `failure`.
    """

    spans: Spans = field(default_factory=dict)
    failure: Failure | None = None
    error: BaseException | None = None
    first: Failure | None = None

    def fail(self, error: BaseException, rank: int) -> None:
        """Set a failure of this process after the end of the program; ``rank`` is one of its ranks."""
        self.failure = self.first = failure_of(error, rank)
        self.error = error


_PAUSE = 1e-3


class DeviceEvent:
    """An event with a verdict; made by `DeviceEvents`. ``check`` checks all messages so far."""

    def __init__(self, device: torch.device, check: Check) -> None:
        self._check, self._event = check, recorded(device)
        # reentrant: garbage collection under it may close a pipeline
        self._lock = threading.RLock()
        self._has_verdict = False
        self._lost: Failure | None = None

    @property
    def is_over(self) -> bool:
        """Whether `wait` would return at once."""
        return self._has_verdict or self._is_done()

    def invalidate(self, failure: Failure, *, even_if_done: bool = False) -> None:
        """Before streams are unblocked: an event that is not done gets this failure."""
        with self._lock:
            if not self._has_verdict:
                self._decide(failure if even_if_done or not self._is_done() else None)

    def wait(self) -> None:
        """Wait for the event; from any thread.

        Raises:
            StepError: if it was invalidated, or a message never came.
        """
        if not self._has_verdict:
            # not under the lock, as `invalidate` must not wait
            self._event.synchronize()
        with self._lock:
            if not self._has_verdict:
                self._decide(None)
            lost = self._lost
        if lost is not None:
            raise lost.error()

    def _is_done(self) -> bool:
        try:
            return self._event.query()
        except RuntimeError:  # a lost device has no valid results
            return False

    def _decide(self, lost: Failure | None) -> None:
        if lost is None:
            try:
                self._check()
            except FailureError as error:
                lost = error.failure
        self._has_verdict, self._lost = True, lost


class DeviceEvents:
    """Events of one process, and the checks of its messages. Thread-safe except where noted."""

    def __init__(self) -> None:
        # reentrant, as above; never taken while holding an event's lock
        self._lock = threading.RLock()
        self._made: weakref.WeakSet[DeviceEvent] = weakref.WeakSet()
        self._checks: tuple[Check, ...] = ()
        self._lost: Failure | None = None

    def add_checks(self, checks: Iterable[Check]) -> None:
        """Add checks; only from the thread that runs steps."""
        self._checks = (*self._checks, *checks)

    def drop_checks(self) -> None:
        """Wait for all events, then drop all checks; only from the thread that runs steps."""
        for event in self._open():
            try:
                event.wait()
            except StepError:
                pass  # raised in the threads that wait for it
            except RuntimeError as error:
                event.invalidate(Failure(None, cause_text(error), is_fatal=True))
        self._checks = ()

    def make(self, device: torch.device) -> DeviceEvent:
        """Record an event after all work enqueued on a device so far."""
        event = DeviceEvent(device, self.check)
        with self._lock:
            self._made.add(event)
            lost = self._lost
        if lost is not None:
            # it may be done only because its streams were unblocked
            event.invalidate(lost, even_if_done=True)
        return event

    def check(self) -> None:
        """Check that the devices received every message.

        Raises:
            FailureError: if one never came, or streams have been unblocked.
        """
        for check in self._checks:
            check()
        if self._lost is not None:
            raise FailureError(self._lost)

    def invalidate(self, failure: Failure) -> None:
        """Before streams are unblocked: invalidate all events that are not done, and all later ones."""
        with self._lock:
            for event in self._open():
                event.invalidate(failure)
            # set afterwards, as done events are still checked
            self._lost = self._lost or failure

    def close(self, failure: Failure, seconds: float) -> bool:
        """For a pipeline that closes: invalidate after at most ``seconds``; returns whether the device was done."""
        until = time.monotonic() + seconds
        while not (done := all(event.is_over for event in self._open())) and time.monotonic() < until:
            time.sleep(_PAUSE)
        self.invalidate(failure)
        return done

    def _open(self) -> list[DeviceEvent]:
        """Events without a verdict."""
        with self._lock:
            return [event for event in self._made if not event._has_verdict]


@dataclass(eq=False, repr=False)
class LocalRanks:
    """Runs the program on the ranks of this process.

    Args:
        publish: called at once with a failure of a local rank; returns the step's first failure.
        pairs: how pairs are run; see `pair_policy`.
        several_streams: whether each stage has a stream.
        why_not_recorded: why no step is recorded as a CUDA graph.
        mesh_groups: groups of the stages' own collectives.
        wait_at: ``(program, rank) -> position``, called if there is a `while_waiting`; see `Executor`.
        while_waiting: see `Executor`.

    Attributes:
        all_stages: the stages of all local ranks.
        first: the lowest local rank, which represents the process.
        device_events: events of the work that these ranks enqueue on the device.
        failed_at: as `places`, when the failure of the last step became known here; empty if it did not fail.
        reported: the first failure that another process reported in this step, or that this one was interrupted;
            `Steps` resets it.
        interrupted: the failure of the last interrupt of this process.
        abandoned: why threads may still run a step that has been left.
    """

    stages: Mapping[int, Mapping[int, Stage]]
    executor: type[Executor]
    transport: Transport
    timeout: float
    publish: Callable[[Failure], Failure]
    pairs: str
    why_pairs: str = ""
    device: torch.device = CPU
    several_streams: bool = False
    why_not_recorded: str = ""
    mesh_groups: MeshGroups = field(default_factory=MeshGroups)
    wait_at: Callable[[Program, int], int] = lambda program, rank: 0
    while_waiting: Callable[[], None] | None = None

    def __post_init__(self) -> None:
        self.device_events = DeviceEvents()
        self.all_stages = [stage for held in self.stages.values() for stage in held.values()]
        self._of_replicas = {group: None for s in self.all_stages if s.parallel for group in s.parallel.groups}
        # over which stages run collectives: of the mesh, and of their replicas
        self._groups = dict.fromkeys([*self.mesh_groups.groups, *self._of_replicas])
        self._recorded: dict[Any, Any] = {}  # steps as CUDA graphs, which must be dropped before the transport ends
        self.first = min(self.stages)
        # shared by all programs, as the allocator reuses freed memory only on the same stream
        self._streams = {
            rank: {index: torch.Stream(device=self.device) for index in held} if self.several_streams else {}
            for rank, held in self.stages.items()
        }
        self.num_threads = torch.get_num_threads()
        self._executors: dict[Program, list[Executor]] = {}
        self._current: Sequence[Executor] = ()
        self.failed_at: list[tuple[int, Program, int]] = []
        self._outcome = Outcome()
        self.reported: Failure | None = None
        self.interrupted: Failure | None = None
        self.abandoned: Failure | None = None
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(len(self.stages), "fastpipe-rank") if len(self.stages) > 1 else None
        if self._pool is not None:
            torch_private.keep_fake_guard()

    def has(self, program: Program) -> bool:
        """Whether a program is prepared."""
        return program in self._executors

    def prepare(self, program: Program) -> None:
        """Create a program's executors."""
        self._executors[program] = executors = [self._make_executor(program, rank) for rank in self.stages]
        self.device_events.add_checks(check for executor in executors for check in executor.checks)

    def _make_executor(self, program: Program, rank: int) -> Executor:
        return self.executor(
            program,
            rank,
            self.stages[rank],
            self.transport,
            on_failure=partial(self._failed, program, rank),
            timeout=self.timeout,
            num_threads=self.num_threads,
            pairs=self.pairs,
            device=self.device,
            streams=self._streams[rank],
            leave_mesh=self.mesh_groups.end,
            wait_at=0 if self.while_waiting is None else self.wait_at(program, rank),
            while_waiting=self.while_waiting,
        )

    def check_modes(self) -> None:
        """Refuse a mode of the caller that the threads of the ranks cannot share."""
        if self._pool is not None:
            torch_private.check_shared_modes()

    def run(
        self, program: Program, signature: int, announce: bool, trace: bool = False, error: BaseException | None = None
    ) -> Outcome:
        """Run one step on every local rank; see `Executor.run`.

        ``error`` is a failure of this process before the step: it is published, and the program is drained.
        """
        with self._lock:
            self._outcome, self.failed_at = Outcome(), []
            executors = self._executors[program]
            for executor in executors:
                executor.forget_failure()
            self._current = executors
        try:
            if error is not None:
                self._publish(failure_of(error, self.first), error)
            # a silent rank ends no collective, and those of the script's groups wait for half an hour; twice, as the
            # waits of the pipeline say more
            with torch_private.bounded(self._groups, self.device, 2 * self.timeout):
                if self._pool is None:
                    self._run_one(self._current[0], signature, announce, trace, error is not None)
                else:
                    self._run_all(self._pool, signature, announce, trace, error is not None)
        finally:
            # the caller's region may go on over the optimizer's step, which changes weights
            torch.clear_autocast_cache()
            outcome = self._taken()
        return outcome

    def _taken(self) -> Outcome:
        """The outcome, which is not kept: an exception references its frames, and these the pipeline."""
        with self._lock:
            self._current = ()
            outcome, self._outcome = self._outcome, Outcome()
        return outcome

    def run_collectives(self, program: Program, refusal: str = "", *, reduces: bool = True) -> Outcome:
        """Run only the collectives of a program, in which replicas report missing parameters.

        Args:
            refusal: report this instead: why this pipeline does not run the step.
            reduces: whether the step reduces gradients.
        """
        self._outcome = Outcome()
        for rank, held in self.stages.items():
            found = [(stage.index, stage.parallel) for stage in held.values() if stage.parallel is not None]
            for _, parallel in found:
                parallel.begin(reduces, program.num_microbatches, self.timeout)
                if not refusal:
                    parallel.skip_step()
            try:
                for instruction in program[rank]:
                    if instruction.op in (Op.UNSHARD, Op.RESHARD, Op.REDUCE_GRAD):
                        held[instruction.stage].run_collective(instruction.op, True)
            except Exception as error:  # published, and the step's outcome
                self._publish(Failure(rank, cause_text(error), is_fatal=True), error)
            self._await_replicas(rank, found, refusal)
        return self._taken()  # no frame that an exception went through holds it

    def pair_counts(self) -> Counter[str]:
        """Number of pairs run each way so far, on all local ranks; see `Executor.pair_counts`."""
        each = (executor.pair_counts() for found in self._executors.values() for executor in found)
        return sum(each, Counter())

    def recording_text(self) -> str:
        """One line about recorded and replayed steps."""
        return f"no: {self.why_not_recorded}"

    def fail(self, failure: Failure) -> None:
        """Drain the current step, which failed on another rank; from any thread."""
        with self._lock:  # for the whole loop, as otherwise the next step could begin
            self.reported = self.reported or failure
            self._note_positions()
            for executor in self._current:
                executor.fail()

    def places(self) -> list[tuple[int, Program, int]]:
        """The local ranks that run a step, with its program and their positions."""
        return [(executor.rank, executor.program, executor.position()) for executor in tuple(self._current)]

    def _note_positions(self) -> None:
        """Note where the local ranks are, before the rest of the step is drained. With the lock held."""
        self.failed_at = self.failed_at or self.places()

    def interrupt(self) -> None:
        """`fail` from a signal handler: without the lock, which the interrupted thread may hold.

        In a mesh all must learn of it at once, as a peer may wait in a collective that a drained step leaves out.
        """
        is_fatal = bool(self._current and self.mesh_groups.groups)
        self.interrupted = failure = Failure(self.first, "KeyboardInterrupt", is_fatal=is_fatal)
        self.reported = self.reported or failure
        for executor in tuple(self._current):
            executor.fail()
        if is_fatal:
            call_in_thread(partial(self.publish, failure), "fastpipe-interrupt")

    def abort(self, failure: Failure) -> None:
        """After the last step: end the connections, so that peers waiting for this process are unblocked."""
        self.mesh_groups.end()
        # the default group is the script's, too
        groups = [group for group in self._of_replicas if group is not dist.group.WORLD]
        for group in groups:
            DataParallel.broken.setdefault(group, f"the pipeline of this process was closed: {failure.cause}")
        leave_groups(groups, self.device)
        self.device_events.invalidate(failure)
        self.forget()
        self.transport.abort()

    def forget(self) -> None:
        """Drop all programs, after their open device events."""
        self.device_events.drop_checks()
        for executor in [executor for executors in self._executors.values() for executor in executors]:
            executor.close()
        self._executors.clear()
        self.failed_at = []

    def retire(self) -> None:
        """Drop all programs and end the threads; the transport stays open."""
        self.forget()
        if self._pool is not None:
            self._pool.shutdown(wait=False)

    def closer(self) -> Callable[[], None]:
        """A function that ends the threads and the transport.

        It does not hold the stages: a layer may hold the pipeline, for example by an exception that it raised and kept.
        If Python collects such a cycle, the executors go with it; otherwise the function drops them.
        """
        own = weakref.ref(self), self.device_events, self._pool, self.transport, self.first, self._recorded
        return partial(_close, *own)

    def _run_all(self, pool: ThreadPoolExecutor, *how: Any) -> None:
        state = thread_state(self.device)
        # each thread has its own copy of the caller's context variables, as only one may be in a context
        calls = [partial(copy_context().run, self._in_thread, state, executor, *how) for executor in self._current]
        try:
            for future in [pool.submit(call) for call in calls]:
                future.result()
        except BaseException as error:  # raised again: of a signal's handler, in this thread alone
            self.abandoned = Failure(self.first, cause_text(error), is_fatal=True)
            self.interrupt()
            raise

    def _in_thread(self, state: Callable[[], AbstractContextManager[None]], executor: Executor, *how: Any) -> None:
        # OpenMP has a number of threads per thread, and bits depend on it
        torch.set_num_threads(self.num_threads)
        with state():
            self._run_one(executor, *how)

    def _run_one(self, executor: Executor, *how: Any) -> None:
        stages = executor.stages.values()
        replicated = [(stage.index, stage.parallel) for stage in stages if stage.parallel is not None]
        for index, parallel in replicated:
            reduces = executor.stages[index].work.reduces and torch.is_grad_enabled()
            parallel.begin(reduces, executor.program.num_microbatches, self.timeout)
        spans = self._run_program(executor, *how)
        if replicated:
            self._await_replicas(executor.rank, replicated, self._failure_text() if spans is None else None)

    def _run_program(self, executor: Executor, *how: Any) -> tuple[Seconds, Seconds] | None:
        """The times, or None if the step failed on any rank."""
        try:
            spans: tuple[Seconds, Seconds] | None = executor.run(*how)
        except BaseException as error:  # the step's outcome
            failure = failure_of(error, executor.rank)
            with self._lock:
                is_published = self._outcome.failure is not None
            if is_published or isinstance(error, FailureError):
                self._note(failure, error, failure)
            else:  # not of an instruction: nothing was drained, and other ranks wait for messages
                self._publish(replace(failure, is_fatal=True), error)
            return None
        if spans is not None:
            with self._lock:
                self._outcome.spans[executor.rank] = spans
        return spans

    def _failure_text(self) -> str:
        """Of a failed step, where and why; empty if other ranks have not told within a short time."""
        for pause in pauses(SHORT_EXIT_SECONDS):
            if (failure := self._outcome.first or self.reported) is not None:
                return f"{failure.place()}: {failure.cause}"
            time.sleep(pause)
        return ""

    def _await_replicas(self, rank: int, replicated: Sequence[tuple[int, DataParallel]], failure: str | None) -> None:
        """Wait for the reductions of stages, given by index; if they fail, the pipeline cannot continue."""
        deadline = time.monotonic() + self.timeout
        for stage, parallel in replicated:
            try:
                parallel.finish(failure, deadline)
            except Exception as error:  # published, and the step's outcome
                is_fatal = isinstance(error, FailureError) and error.failure.is_fatal
                action = f"{stage}{Op.REDUCE_GRAD.name}"
                self._publish(Failure(rank, cause_text(error), stage, action, is_fatal=is_fatal), error)
        # in a ring some replicas wait for this one, and not for the process that is lost
        leave_groups(dict.fromkeys(group for _, parallel in replicated for group in parallel.lost()), self.device)

    def _failed(self, program: Program, rank: int, position: int, error: BaseException) -> None:
        """Called by an executor at once, before it drains."""
        self._publish(failure_at(program, self.stages[rank], rank, position, error), error)
        with self._lock:
            for executor in self._current:
                if executor.rank != rank:
                    executor.fail()

    def _publish(self, failure: Failure, error: BaseException) -> None:
        end_child(self._process, failure.cause)
        self._note(failure, error, self.publish(failure))
        self.mesh_groups.leave()

    def _note(self, failure: Failure, error: BaseException, first: Failure) -> None:
        with self._lock:
            self._note_positions()
            # a peer lost while a failed step is drained replaces its failure, as it is fatal; but in a mesh the failure
            # itself was published as fatal, and the drain only fails because of that
            previous = self._outcome.first
            if previous is None or (failure.is_fatal and not previous.is_fatal):
                self._outcome.failure, self._outcome.error, self._outcome.first = failure, error, first


def _close(
    ranks: weakref.ref[LocalRanks],
    events: DeviceEvents,
    pool: ThreadPoolExecutor | None,
    transport: Transport,
    first: int,
    recorded_steps: dict[Any, Any],
) -> None:
    # first of all, as ending the transport unblocks waiting streams
    cause = "the pipeline was closed before its device was done; read the loss before that"
    done = events.close(Failure(first, cause), _CLOSING_SECONDS)
    events.drop_checks()
    recorded_steps.clear()
    here = ranks()
    if here is not None:
        here.forget()
    if pool is not None:
        pool.shutdown(wait=False)
    if done:
        transport.close()
    else:
        transport.abort()


def failure_at(
    program: Program, stages: Mapping[int, Stage], rank: int, position: int, error: BaseException
) -> Failure:
    """The failure for an exception at a position of a program; see `failure_of`."""
    if isinstance(error, FailureError):
        return error.failure
    instruction = program[rank][position]
    action = instruction.action
    text = str(action) if action is not None else instruction.op.name
    stage, microbatch = instruction.stage, instruction.microbatch
    if instruction.op is Op.OVERLAP_F_B and stages[stage].running != microbatch:
        stage, microbatch = instruction.pair_stage, instruction.pair_microbatch
    found = None if microbatch < 0 else microbatch  # collectives have none
    return Failure(rank, cause_text(error), stage, text, found, is_fatal=abandons(instruction.op, error))


def executor_class(choice: str, device: torch.device = CPU, overlap: str = "auto") -> type[Executor]:
    """The executor class for "auto", "native" or "python", with stages on a device and the Pipeline's ``overlap``.

    Raises:
        ValueError: for another choice, "native" without the extension, or the Python executor with a device other than
            a CPU, or with ``overlap="always"``.
    """
    if choice not in ("auto", "native", "python"):
        raise ValueError(f"executor = {choice!r}: use 'auto', 'native' or 'python'")
    if choice == "native" and native.load() is None:
        raise ValueError(f"executor = 'native': {native.native_status()} Use executor='auto' or 'python' instead.")
    if choice != "python" and native.load() is not None:
        return NativeExecutor
    why = "" if choice == "python" else f" {native.native_status()}"
    if device.type != "cpu":
        raise ValueError(
            f"executor = {choice!r}: the stages are on {device}, and the Python executor supports only CPUs; set "
            f"executor='native', or device='cpu'.{why}"
        )
    if overlap == "always":
        raise ValueError(
            f"overlap = 'always' with executor = {choice!r}: the Python executor runs one half of a pair at a time; "
            f"set overlap='auto' or 'never', or executor='native'.{why}"
        )
    return PythonExecutor
