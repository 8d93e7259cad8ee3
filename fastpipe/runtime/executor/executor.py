"""Executor: runs one rank's program. The interface, the native executor, and a reference in Python with the same bits.

In the native executor C++ runs the program, and calls Python only for ``stage.run`` and, where used, the caller's
output gradients (``stage.losses.output_grads``), pairs in turns or by the modules' own method, the user's contexts, and
data-parallel collectives.
"""

from __future__ import annotations

import contextlib
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fastpipe.action import NONE, ActionKind
from fastpipe.dependencies import feeds
from fastpipe.program import ChannelKind, Instruction, Op, Program
from fastpipe.runtime import native
from fastpipe.runtime.common import CPU, Tensors, handed_over, raised_by_handler, torch_private
from fastpipe.runtime.stage import (
    FUSED,
    IN_ORDER,
    IN_TURNS,
    TOGETHER,
    WAYS,
    Stage,
    in_turns,
    last_microbatches,
    make_helper,
)
from fastpipe.runtime.transport import Message, Transport

Seconds = npt.NDArray[np.float64]
OnFailure = Callable[[int, BaseException], None]
"""``(position in the program, exception)``; called at once, before the rank drains the rest."""
Check = Callable[[], None]
"""Raises FailureError if a stream was unblocked without its message."""


@dataclass(eq=False, repr=False)
class Executor(ABC):
    """Runs the program of one rank, step by step.

    Args:
        streams: streams of the stages, by index; empty if all work uses the caller's stream.
        leave_mesh: called in a failed step, before this rank joins a collective of a stage's replicas.
        while_waiting: called before the instruction at ``wait_at``, in a step that has not failed.
    """

    program: Program
    rank: int
    stages: Mapping[int, Stage]
    transport: Transport
    _: KW_ONLY
    on_failure: OnFailure
    timeout: float
    num_threads: int
    pairs: str = IN_ORDER
    device: torch.device = CPU
    streams: Mapping[int, torch.Stream] = field(default_factory=dict)
    leave_mesh: Callable[[], None] = lambda: None
    wait_at: int = 0
    while_waiting: Callable[[], None] | None = None

    def __post_init__(self) -> None:
        columns = self.program.columns[self.rank]
        self.last = {index: last_microbatches(columns, index) for index in self.stages}
        self._in_turns = partial(in_turns, make_helper(self.num_threads))

    @abstractmethod
    def run(
        self, signature: int, announce: bool, trace: bool = False, drain: bool = False
    ) -> tuple[Seconds, Seconds] | None:
        """Run one step.

        Args:
            signature: identifies the shapes of this step.
            announce: whether the signature is new, so that messages announce their shapes.
            trace: measure times on the device, for which the host may wait.
            drain: the step failed on this rank before its first instruction: nothing is computed, and other ranks get
                stand-ins for its messages.

        Returns:
            Start and end of every instruction in seconds of the monotonic clock; on a device with streams those of its
            launch or, with ``trace``, of its execution. None if the step was drained, because it failed on another
            rank or ``drain`` was set.

        Raises:
            BaseException: the original exception of this rank.
        """

    @abstractmethod
    def fail(self) -> None:
        """Drain the current or next step, which failed on another rank; from any thread."""

    @abstractmethod
    def position(self) -> int:
        """The position of the step in the program, from any thread; its length between steps."""

    @abstractmethod
    def forget_failure(self) -> None:
        """Before a step: clear a `fail` that came after the end of the last one."""

    def drop_memory(self) -> None:  # noqa: B027 - in Python every message has new memory
        """Between steps: release the memory for received messages, which may be kept from step to step."""

    @property
    def checks(self) -> Sequence[Check]:
        """After the device has finished a step: functions that raise FailureError if the transport lost a peer in it.

        Empty on a CPU, where a step that ended has no open waits. They outlive the executor, and hold no stage.
        """
        return ()

    @abstractmethod
    def pair_counts(self) -> Counter[str]:
        """Number of pairs run each way so far: `TOGETHER`, `IN_ORDER`, `IN_TURNS` or `FUSED`."""

    def run_collective(self, stage: Stage, op: int, failed: bool) -> None:
        """See `Stage.run_collective`."""
        if failed:
            self.leave_mesh()
        stage.run_collective(op, failed)

    def close(self) -> None:
        """Drop all references; `run` must not be called any more.

        An executor is part of reference cycles, which would keep the stages' memory, connections and threads until
        Python collects them.
        """
        vars(self).clear()


def last_backwards(instructions: Sequence[Instruction]) -> dict[int, int]:
    """Microbatch of each stage's last B or W, if the stage's REDUCE_GRAD follows it directly.

    Between the two the rank neither computes nor runs a collective, so the reduction may start in either without a
    change in the order of the rank's collectives.
    """
    found = {}
    last: Instruction | None = None
    for it in instructions:
        if it.op is Op.REDUCE_GRAD and last is not None:
            stage, microbatch = backward_of(last)
            if stage == it.stage:
                found[stage] = microbatch
        if it.op < Op.POST_RECV:
            last = it
    return found


def backward_of(it: Instruction) -> tuple[int, int]:
    """Stage and microbatch of a B or W, or of a pair's B; ``NONE`` for others."""
    if it.op is Op.OVERLAP_F_B:
        return it.pair_stage, it.pair_microbatch
    return (it.stage, it.microbatch) if it.op in (Op.B, Op.W) else (NONE, NONE)


class NativeExecutor(Executor):
    """Runs one rank's program in C++; see `Executor`.

    A run uses the calling thread's grad mode, autocast and inference mode.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        runtime: Any = native.load()
        columns = self.program.columns[self.rank]
        places = [(i, stage.is_first, stage.is_last, stage.fused_weight_grad) for i, stage in self.stages.items()]
        self._last_backwards = last_backwards(list(self.program[self.rank]))
        self._splits = bool((columns[0] == Op.I).any())
        endpoint = self.transport.native(runtime, self.program, self.rank, self.timeout)
        self._native = runtime.Executor(
            self.rank,
            columns,
            self.program.channels,
            places,
            endpoint,
            self.timeout,
            self.device,
            pairs=WAYS.index(self.pairs),
            streams=[self.streams[index] for index in self.stages] if self.streams else [],
        )

    def run(
        self, signature: int, announce: bool, trace: bool = False, drain: bool = False
    ) -> tuple[Seconds, Seconds] | None:
        """Run one step; see `Executor.run`."""
        spans = self._native.run(
            signature,
            announce,
            list(map(self._calls, self.stages.values())),
            self.on_failure,
            num_threads=self.num_threads,
            trace=trace,
            drain=drain,
            in_turns=self._in_turns,
            wait_at=self.wait_at,
            while_waiting=self.while_waiting,
        )
        if spans is None:
            return None
        for index, leaves, held in self._native.deferred() if self._splits else ():
            self.stages[index].add_deferred(leaves)
            self.stages[index].peak_held_bytes = held
        for index, reached in self._native.reached() if announce else ():
            self.stages[index].reaches_inputs = reached
        start, end = spans
        return start, end

    def _calls(self, stage: Stage) -> tuple[Any, ...]:
        """What C++ calls of a stage in this step, as ``csrc/torch/runner.h`` lists it; None for what is not needed.

        C++ keeps none of it between steps: a cycle through C++ is never collected.
        """
        parallel = stage.parallel
        return (
            stage.run,
            None if stage.work.output_grads is None else stage.losses.output_grads,
            None if stage.random is None else stage.random.guard,
            None if parallel is None else partial(self.run_collective, stage),
            parallel.fold if parallel is not None and parallel.folds else None,
            partial(self._fuse, stage) if stage.fuses else None,
            [index for index, pair in self.stages.items() if stage.fuses_with(pair)],
            self._last_backwards.get(stage.index, NONE),
            stage.context.around,
            (stage.context.step, self.last[stage.index]),
            stage.exchanges,
            stage.knows_deferred,
        )

    def _fuse(self, stage: Stage, microbatch: int, inputs: Tensors, pair: int, roots: Tensors, grads: Any) -> Tensors:
        return stage.run_fused(microbatch, inputs, self.stages[pair], roots, grads)

    @property
    def checks(self) -> Sequence[Check]:
        """See `Executor.checks`."""
        return (self._native.check,)

    def pair_counts(self) -> Counter[str]:
        """See `Executor.pair_counts`."""
        return Counter(dict(zip((TOGETHER, IN_ORDER, FUSED, IN_TURNS), self._native.pair_counts(), strict=True)))

    def position(self) -> int:
        """See `Executor.position`."""
        return int(self._native.position())

    def fail(self) -> None:
        """See `Executor.fail`."""
        self._native.fail()

    def forget_failure(self) -> None:
        """See `Executor.forget_failure`."""
        self._native.forget_failure()

    def drop_memory(self) -> None:
        """See `Executor.drop_memory`."""
        self._native.drop_memory()


class PythonExecutor(Executor):
    """Interprets one rank's program; see `Executor`.

    Attributes:
        slots: received tensors that are not freed, by slot.
        made: results of compute actions that are not sent or handed over.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self.endpoint = self.transport.endpoint(self.program, self.rank, self.timeout)
        self.slots: dict[int, Tensors] = {}
        self.made: dict[Message, Tensors] = {}
        self.failed = False
        self.error: BaseException | None = None
        self._counts = Counter[str]()
        self._instructions = list(self.program[self.rank])
        self._actions = [it.action for it in self._instructions]
        self._last_backwards = last_backwards(self._instructions)
        self._split = {(it.stage, it.microbatch) for it in self._instructions if it.op is Op.I}
        self._slot_of: dict[Message, int] = {}
        self._waits_of_sends = _waits_of_sends(self._instructions)
        self._position = len(self._instructions)

    def position(self) -> int:
        """See `Executor.position`."""
        return self._position

    def fail(self) -> None:
        """See `Executor.fail`."""
        self.failed = True

    def forget_failure(self) -> None:
        """See `Executor.forget_failure`."""
        self.failed = False

    def run(
        self, signature: int, announce: bool, trace: bool = False, drain: bool = False
    ) -> tuple[Seconds, Seconds] | None:
        """Run one step; see `Executor.run`."""
        self.failed, self.error = self.failed or drain, None
        for index, stage in self.stages.items():
            stage.context.last = self.last[index]
        self.endpoint.begin(signature, announce)
        # an instruction ends when the next one starts
        times = [time.perf_counter()]
        for position, (it, action) in enumerate(zip(self._instructions, self._actions, strict=True)):
            self._position = position
            if position == self.wait_at and self.while_waiting is not None and not self.failed:
                self._attempt(position, Op.WAIT_SEND, partial(_labelled, "waiting", self.while_waiting))
            if it.op >= Op.POST_RECV:
                self._attempt(position, it.op, partial(self._move, it))
            elif action is None:  # in a failed step, too, as the stage's replicas wait
                self._attempt(position, it.op, partial(self._collective, it.stage, it.op))
            elif not self.failed:
                self._attempt(position, it.op, partial(_labelled, action, partial(self._compute, it)))
            times.append(time.perf_counter())
        self._position = len(self._instructions)
        if self._drained():
            return None
        stamps = np.array(times)
        starts, ends = stamps[:-1], stamps[1:].copy()
        for send, wait in self._waits_of_sends:
            ends[send] = ends[wait]
        return starts, ends

    def _drained(self) -> bool:
        """At the end of a step: whether it failed on another rank; raises this rank's exception if there is one."""
        self.slots.clear()
        self.made.clear()
        failed, self.failed = self.failed, False
        if not failed:
            return False
        for stage in self.stages.values():
            stage.end()
        self.endpoint.end()
        error, self.error = self.error, None
        if error is None:
            return True
        try:
            raise error
        finally:
            del error  # avoids a cycle of exception and frame

    def _attempt(self, position: int, op: Op, call: Callable[[], None]) -> None:
        """Call a function. An exception is published, and raised at the end of the step."""
        try:
            call()
        except BaseException as error:  # see above
            self.failed = True
            if self.error is None:
                self.error = error
                self.on_failure(position, error)
            if op is Op.SEND and not abandons(op, error):
                # nothing was sent, and the receiver waits: send a stand-in
                with contextlib.suppress(BaseException):  # the first error is already published
                    call()

    def _collective(self, stage: int, op: Op) -> None:
        self.run_collective(self.stages[stage], op, self.failed)

    def _compute(self, it: Instruction) -> None:
        stage, microbatch = backward_of(it)
        if self._last_backwards.get(stage) == microbatch:  # the stage may start its reduction in it
            self._collective(stage, Op.W if it.op is Op.W else Op.B)
        match it.op:
            case Op.OVERLAP_F_B:
                self._overlapped(it)
            case Op.F:
                self._forward(it.stage, it.microbatch)
            case Op.W:
                self.stages[it.stage].backward_weight(it.microbatch)
            case _:
                self._backward(it.stage, it.microbatch, it.op)

    def _forward(self, stage: int, microbatch: int) -> None:
        inputs, splits = self._taken(ActionKind.F, stage, microbatch), (stage, microbatch) in self._split
        self._keep(ActionKind.F, stage, microbatch, self.stages[stage].forward(microbatch, inputs, splits=splits))

    def _backward(self, stage: int, microbatch: int, op: Op = Op.B) -> None:
        run = self.stages[stage].backward_input if op is Op.I else self.stages[stage].backward
        grads = run(microbatch, self._taken(ActionKind.B, stage, microbatch))
        self._keep(ActionKind.B, stage, microbatch, grads)

    def _taken(self, kind: ActionKind, stage: int, microbatch: int) -> Tensors:
        """What an action takes from another stage; nothing in the first stage's F and the last one's B."""
        slot = self._slot_of.get(Message(ChannelKind.of(kind), stage, microbatch), NONE)
        return self.slots.get(slot, ())

    def _keep(self, kind: ActionKind, stage: int, microbatch: int, tensors: Tensors) -> None:
        """Keep what an action makes for another stage."""
        target = feeds(kind, stage, self.program.num_stages)
        if target != NONE:
            self.made[Message(ChannelKind.of(kind), target, microbatch)] = tensors

    def _overlapped(self, it: Instruction) -> None:
        stage, pair = self.stages[it.stage], self.stages[it.pair_stage]
        if stage.fuses_with(pair) and self._fused(it):
            self._counts[FUSED] += 1
            return
        forward = partial(self._forward, it.stage, it.microbatch)
        backward = partial(self._backward, it.pair_stage, it.pair_microbatch)
        labelled = partial(_labelled, f"{it.pair_stage}B{it.pair_microbatch}", backward)
        if self.pairs == IN_TURNS and stage.can_alternate(pair):
            self._counts[IN_TURNS] += 1
            return self._in_turns(forward, labelled, pair.exchanges)
        self._counts[IN_ORDER] += 1
        forward()
        labelled()

    def _fused(self, it: Instruction) -> bool:
        """A pair by the modules' own method; False without roots."""
        forward, backward = (it.stage, it.microbatch), (it.pair_stage, it.pair_microbatch)
        inputs, grads = self._taken(ActionKind.F, *forward), self._taken(ActionKind.B, *backward)
        stage, pair = self.stages[it.stage], self.stages[it.pair_stage]
        found = stage.forward_backward(
            it.microbatch, inputs, pair, it.pair_microbatch, grads, splits=forward in self._split
        )
        if found is None:
            return False
        self._keep(ActionKind.F, *forward, found[0])
        self._keep(ActionKind.B, *backward, found[1])
        return True

    def pair_counts(self) -> Counter[str]:
        """See `Executor.pair_counts`."""
        return self._counts

    def _move(self, it: Instruction) -> None:
        kind = self.program.channels[it.channel].kind
        message = Message(kind, it.stage, it.microbatch)
        match it.op:
            case Op.POST_RECV:
                self._slot_of[message] = it.slot
                self.endpoint.post_recv(message, it.channel, it.slot)
            case Op.WAIT_RECV:
                tensors = self.endpoint.wait_recv(it.channel, it.slot)
                if tensors is None:
                    self.failed = True
                else:
                    self.slots[it.slot] = tensors
            case Op.SEND:
                # the instruction has the producing stage
                message = message._replace(stage=it.stage + kind.direction)
                tensors = self.made.pop(message, None)
                # in a failed step a stand-in
                self.endpoint.send(message, it.channel, it.slot, None if self.failed else tensors)
            case Op.WAIT_SEND:
                self.endpoint.wait_send(it.slot)
            case Op.HAND_OVER:
                self._slot_of[message] = it.slot
                tensors = self.made.pop(message, None)
                if tensors is not None and not self.failed:
                    self.slots[it.slot] = handed_over(tensors)
            case Op.FREE:
                self.slots.pop(it.slot, None)


def abandons(op: Op, error: BaseException) -> bool:
    """Whether an exception leaves a message that may still arrive, and would be taken for one of the next step: that of
    a signal's handler in a transfer."""
    if op in (Op.POST_RECV, Op.SEND):
        return not isinstance(error, Exception) or raised_by_handler(error)
    return op in (Op.WAIT_RECV, Op.WAIT_SEND)


def _labelled(label: object, call: Callable[[], None]) -> None:
    """Run a call with its label in a profile; the backward of a pair has its own, as another thread may run it.

    Labels are as in torch's pipelines. Without a prefix torch's profiler demangles "2F0" as a C++ name to "F0".
    """
    if not torch_private.is_profiling():
        return call()
    with torch.profiler.record_function(f"PP:{label}"):
        call()


def _waits_of_sends(instructions: list[Instruction]) -> list[tuple[int, int]]:
    """Positions of every SEND and its WAIT_SEND, where it ends."""
    found: list[tuple[int, int]] = []
    sends: dict[int, int] = {}
    for position, it in enumerate(instructions):
        if it.op is Op.SEND:
            sends[it.slot] = position
        elif it.op is Op.WAIT_SEND:
            found.append((sends[it.slot], position))
    return found
