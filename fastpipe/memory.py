"""Predicted memory: the bytes that a rank holds at most at one time."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fastpipe.cost import CostModel
from fastpipe.program import Op, Program, RankProgram


def peak_bytes(program: Program, cost: CostModel) -> tuple[float, ...]:
    """One number a rank: what its stages hold from F to the end of W or B, and what is received and not yet freed.

    Sends add nothing (they read what a stage holds), nor do hand-overs (no copy is made).
    """
    held = cost.per_stage("stage_bytes", program.num_stages)
    # the activation that stage s receives is what stage s-1 hands on; its gradient is as large as what s hands on
    boundary = cost.per_stage("activation_bytes", program.num_stages)
    received = np.stack([np.roll(boundary, 1), boundary])
    kinds = np.array([c.kind for c in program.channels], dtype=np.int64)
    remote = np.array([c.source != c.destination for c in program.channels], dtype=np.float64)
    return tuple(_peak(rank, program.forward_only, held, received, kinds, remote) for rank in program)


Floats = npt.NDArray[np.float64]


def _peak(
    rank: RankProgram, forward_only: bool, held: Floats, received: Floats, kinds: npt.NDArray[np.int64], remote: Floats
) -> float:
    ops, stages = rank.columns[0], rank.columns[1]
    steps = np.zeros((2, len(ops)))  # what an instruction takes, then what its end gives back
    forwards = np.isin(ops, (Op.F, Op.OVERLAP_F_B))
    steps[0, forwards] = held[stages[forwards]]
    releases = ops == Op.F if forward_only else np.isin(ops, (Op.W, Op.B))
    steps[1, releases] = -held[stages[releases]]
    fused = ops == Op.OVERLAP_F_B
    steps[1, fused] = -held[rank.columns[3, fused]]
    for op, row, sign in ((Op.POST_RECV, 0, 1.0), (Op.FREE, 1, -1.0)):
        moves = ops == op
        channels = rank.columns[5, moves]
        steps[row, moves] = sign * received[kinds[channels], stages[moves]] * remote[channels]
    return float(np.cumsum(steps.T.ravel()).max(initial=0.0))
