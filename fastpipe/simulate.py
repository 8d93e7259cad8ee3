"""Simulation: a program and costs in, a timeline and the predicted memory out."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from fastpipe import native_plan
from fastpipe.checks import check_type
from fastpipe.cost import CostModel, check_links
from fastpipe.errors import ProgramError
from fastpipe.machine import COALESCED, Lanes, Machine, lane_numbers
from fastpipe.program import Op, Program, RankProgram
from fastpipe.timeline import Seconds, Timeline


def simulate_program(program: Program, cost: CostModel | None = None, *, lanes: Lanes = "directed") -> Timeline:
    """When every instruction starts and ends under the given costs.

    Args:
        program: what to run.
        cost: seconds per stage action and transfer; one second for F, I and W each unless given.
        lanes: which channels share an in-order lane; see `fastpipe.machine.lane_numbers`.

    Raises:
        ProgramError: when the program is none, or does not finish.
        ValueError: for costs of other stages or ranks.
    """
    cost = CostModel() if cost is None else cost
    check_type(CostModel, cost=cost)
    cost.check(program.num_stages)
    check_links(cost, program.num_ranks)
    numbers = lane_numbers(lanes, program.channels)
    native = None if lanes == COALESCED else native_plan.simulate(program, numbers, cost)
    times = native or _times(program, cost, lanes)
    return Timeline(program, *times, lanes=numbers, memory=partial(peak_bytes, program, cost))


def _times(program: Program, cost: CostModel, lanes: Lanes) -> tuple[Sequence[Seconds], Sequence[Seconds]]:
    """The run in Python: what csrc/plan does too, and where the error comes from."""
    channels = program.channels
    seconds = cost.compute_seconds, lambda channel, stage, _: cost.transfer_seconds(channels[channel], stage)
    try:
        outcome = Machine(program, lanes, *seconds).run()
    except (LookupError, ValueError):  # a slot that was never posted, a channel or a stage that there is not
        raise ProgramError(f"{program.name} is no valid program; validate_program names what is wrong") from None
    if outcome.blocked:
        raise ProgramError(f"{program.name} does not finish; validate_program names the cycle")
    return outcome.starts, outcome.ends


def peak_bytes(program: Program, cost: CostModel) -> tuple[float, ...]:
    """The bytes that a rank holds at most at one time, one number per rank.

    That is what its stages hold from F to the end of W or B, and what is received and not yet freed.

    A stage that recomputes holds its ``kept_bytes`` and its input until its backward begins. What its forward holds for
    a moment and lets go again, the most that one recomputed part of it needs, is not counted.

    Sends add nothing (they read what a stage holds), nor do hand-overs (no copy is made), but for the input of a stage
    that recomputes, which nothing else holds.
    """
    memory = _Memory(program, cost)
    return tuple(memory.peak(rank) for rank in program)


class _Memory:
    """What the stages and channels of a program hold, in bytes."""

    def __init__(self, program: Program, cost: CostModel) -> None:
        count = program.num_stages
        self.whole, kept = (cost.per_stage(name, count) for name in ("stage_bytes", "kept_bytes"))
        self.kept = self.whole if program.forward_only else kept
        self.forward_only = program.forward_only
        # the activation that stage s receives is what stage s-1 hands on; its gradient is as large as what s hands on
        boundary = cost.per_stage("activation_bytes", count)
        self.received = np.stack([np.roll(boundary, 1), boundary])
        recomputed = np.divide(self.whole - self.kept, self.whole, out=np.zeros(count), where=self.whole > 0)
        self.handed_over = self.received * np.stack([recomputed, np.zeros(count)])
        self.kinds = np.array([c.kind for c in program.channels], dtype=np.int64)
        self.is_remote = np.array([c.source != c.destination for c in program.channels], dtype=np.bool_)

    def peak(self, rank: RankProgram) -> float:
        """The most that a rank holds at one time."""
        ops, stages, pairs = rank.columns[0], rank.columns[1], rank.columns[3]
        steps = np.zeros((2, len(ops)))  # what an instruction takes, then what its end gives back
        fused = ops == Op.OVERLAP_F_B
        forwards = (ops == Op.F) | fused
        steps[0, forwards] = self.kept[stages[forwards]]
        recomputed, begun = self.whole - self.kept, (ops == Op.I) | (ops == Op.B)
        steps[0, begun] = recomputed[stages[begun]]
        steps[0, fused] += recomputed[pairs[fused]]
        releases = ops == Op.F if self.forward_only else (ops == Op.W) | (ops == Op.B)
        steps[1, releases] = -self.whole[stages[releases]]
        steps[1, fused] = -self.whole[pairs[fused]]
        for op, row, sign in ((Op.POST_RECV, 0, 1.0), (Op.HAND_OVER, 0, 1.0), (Op.FREE, 1, -1.0)):
            moves = ops == op
            steps[row, moves] = sign * self._moved(rank.columns[5, moves], stages[moves])
        return float(np.cumsum(steps.T.ravel()).max(initial=0.0))

    def _moved(self, channels: npt.NDArray[np.int32], stages: npt.NDArray[np.int32]) -> npt.NDArray[np.float64]:
        """The bytes of messages that arrive at stages."""
        places = self.kinds[channels], stages
        found: npt.NDArray[np.float64] = np.where(
            self.is_remote[channels], self.received[places], self.handed_over[places]
        )
        return found
