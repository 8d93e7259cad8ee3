"""Executor: runs one rank's program. The interface, and the native executor.

In the native executor C++ runs the program, and calls Python only for ``stage.run`` and, where used, the caller's
output gradients (``stage.losses.output_grads``), pairs in turns or by the modules' own method, the user's contexts, and
data-parallel collectives.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch

from fastpipe.action import NONE
from fastpipe.program import Instruction, Op, Program
from fastpipe.runtime import native
from fastpipe.runtime.common import CPU, Tensors
from fastpipe.runtime.stage import IN_ORDER, WAYS, PairCounts, Pairs, Stage, last_microbatches
from fastpipe.runtime.transport import Transport

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

    Attributes:
        is_native: whether C++ runs the program.
    """

    is_native: ClassVar[bool] = False
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

    def __post_init__(self) -> None:
        columns = self.program.columns[self.rank]
        self.last = {index: last_microbatches(columns, index) for index in self.stages}
        self._pairs = Pairs(self.pairs, self.num_threads)
        self._prepare()

    @abstractmethod
    def _prepare(self) -> None:
        """Create the state that all steps share."""

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
                placeholders for its messages.

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

    @property
    def checks(self) -> Sequence[Check]:
        """After the device has finished a step: functions that raise FailureError if the transport lost a peer in it.

        Empty on a CPU, where a step that ended has no open waits. They outlive the executor, and hold no stage.
        """
        return ()

    @abstractmethod
    def pair_counts(self) -> PairCounts:
        """Number of pairs run each way so far."""

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

    is_native: ClassVar[bool] = True

    def _prepare(self) -> None:
        runtime: Any = native.load()
        columns = np.ascontiguousarray(self.program[self.rank].columns)
        channels = [tuple(map(int, channel)) for channel in self.program.channels]
        places = [(i, stage.is_first, stage.is_last, stage.fused_weight_grad) for i, stage in self.stages.items()]
        self._last_backwards = last_backwards(list(self.program[self.rank]))
        self._splits = bool((columns[0] == Op.I).any())
        endpoint = self.transport.native(runtime, self.program, self.rank, self.timeout)
        self._native = runtime.Executor(
            self.rank,
            columns,
            channels,
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
            in_turns=self._pairs.in_turns,
        )
        if spans is None:
            return None
        for index, leaves, held in self._native.deferred() if self._splits else ():
            self.stages[index].deferred = frozenset(leaves)
            self.stages[index].peak_held_bytes = held
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
            None if parallel is None else stage.run_collective,
            parallel.fold if parallel is not None and parallel.folds else None,
            partial(self._fuse, stage) if stage.fuses else None,
            [index for index, pair in self.stages.items() if stage.fuses_with(pair)] if stage.fuses else (),
            self._last_backwards.get(stage.index, NONE),
            stage.context.around,
            (stage.context.step, self.last[stage.index]),
            stage.exchanges,
        )

    def _fuse(
        self, stage: Stage, microbatch: int, inputs: Tensors, pair: int, _: int, roots: Tensors, grads: Any
    ) -> Tensors:
        return stage.run_fused(microbatch, inputs, self.stages[pair], roots, grads)

    @property
    def checks(self) -> Sequence[Check]:
        """See `Executor.checks`."""
        return (self._native.check,)

    def pair_counts(self) -> PairCounts:
        """See `Executor.pair_counts`."""
        return PairCounts(*self._native.pair_counts())

    def position(self) -> int:
        """See `Executor.position`."""
        return int(self._native.position())

    def fail(self) -> None:
        """See `Executor.fail`."""
        self._native.fail()

    def forget_failure(self) -> None:
        """See `Executor.forget_failure`."""
        self._native.forget_failure()
