"""Executor: runs one rank's program. The interface."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from fastpipe.action import NONE
from fastpipe.program import Instruction, Op, Program
from fastpipe.runtime.common import CPU
from fastpipe.runtime.stage import IN_ORDER, PairCounts, Stage, last_microbatches
from fastpipe.runtime.transport import Transport

Seconds = npt.NDArray[np.float64]
OnFailure = Callable[[int, BaseException], None]
"""Called at once, with the position in the program and the exception, before the rank goes on draining."""


class Executor(ABC):
    """Runs the program of one rank, step by step.

    Args:
        program: the program of all ranks.
        rank: which one this is.
        stages: the stages of this rank, by index.
        transport: how it exchanges tensors with the others.
        on_failure: called when something fails here.
        timeout: seconds to wait for a peer.
        num_threads: intra-op threads, the same on every rank.
        pairs: how pairs of a forward and a backward are run; see `fastpipe.runtime.stage.pairs`.
        device: what the stages compute on.
        streams: those of the stages, by index; empty where all work goes into the caller's.
    """

    def __init__(
        self,
        program: Program,
        rank: int,
        stages: Mapping[int, Stage],
        transport: Transport,
        *,
        on_failure: OnFailure,
        timeout: float,
        num_threads: int,
        pairs: str = IN_ORDER,
        device: torch.device = CPU,
        streams: Mapping[int, torch.Stream] | None = None,
    ) -> None:
        self.program = program
        self.rank = rank
        self.stages = stages
        self.transport = transport
        self.on_failure = on_failure
        self.timeout = timeout
        self.num_threads = num_threads
        self.pairs = pairs
        self.device = device
        self.streams = streams or {}
        columns = program.columns[rank]
        self.last = {index: last_microbatches(columns, index) for index in stages}
        self._prepare()

    @abstractmethod
    def _prepare(self) -> None:
        """Make what every step needs, once."""

    @abstractmethod
    def run(
        self, signature: int, announce: bool, trace: bool = False, drain: bool = False
    ) -> tuple[Seconds, Seconds] | None:
        """Run one step.

        Args:
            signature: names the shapes of this step.
            announce: whether they are unknown yet, so that every message says what it is.
            trace: whether the times are wanted, and the host may wait for the device to have them.
            drain: whether the step has failed on this rank before its first instruction: nothing is computed, and the
                other ranks get stand-ins for its messages.

        Returns:
            The start and end of every instruction, on the monotonic clock: on a device with streams the times at which
            it was launched, or, with ``trace``, those at which the device did it. None when the step was drained: it
            failed elsewhere, or ``drain`` was set.

        Raises:
            BaseException: what was raised here, itself.
        """

    @abstractmethod
    def fail(self) -> None:
        """Drain the step that runs or is about to, as it failed elsewhere. May be called from any thread."""

    @abstractmethod
    def forget_failure(self) -> None:
        """Another step begins: forget a `fail` that came when the last one had ended."""

    def check(self) -> None:  # noqa: B027 - on a CPU all is known when a step has ended
        """After a step, when its device has finished: whether the transport has lost a peer since.

        Raises:
            FailureError: when it has.
        """

    @abstractmethod
    def pair_counts(self) -> PairCounts:
        """How many pairs went which way so far."""

    def close(self) -> None:
        """Drop everything; there is no run any more.

        An executor is part of cycles. Until Python collects these, which may be never, they would keep the stages'
        memory, the connections, and the threads of these.
        """
        vars(self).clear()


def last_backwards(instructions: Sequence[Instruction]) -> dict[int, int]:
    """Microbatch of each stage's last B or W, where the stage's REDUCE_GRAD comes right after it.

    Between the two the rank neither computes nor meets others, so a reduction may begin in the one or in the other: in
    the order of the rank's collectives it is in the same place.
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
    """Stage and microbatch of a B or W, or of a pair's B; ``NONE`` for other instructions."""
    if it.op is Op.OVERLAP_F_B:
        return it.pair_stage, it.pair_microbatch
    return (it.stage, it.microbatch) if it.op in (Op.B, Op.W) else (NONE, NONE)
