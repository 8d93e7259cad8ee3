"""Executor: runs one rank's program. The interface."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch

from fastpipe.action import NONE
from fastpipe.program import Instruction, Op, Program
from fastpipe.runtime.common import CPU
from fastpipe.runtime.executor.events import Check
from fastpipe.runtime.stage import IN_ORDER, PairCounts, Stage, last_microbatches
from fastpipe.runtime.transport import Transport

Seconds = npt.NDArray[np.float64]
OnFailure = Callable[[int, BaseException], None]
"""``(position in the program, exception)``; called at once, before the rank drains the rest."""


@dataclass(eq=False, repr=False)
class Executor(ABC):
    """Runs the program of one rank, step by step.

    Args:
        pairs: how pairs are run; see `fastpipe.runtime.stage.pairs`.
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
