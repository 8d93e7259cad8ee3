"""Data parallelism in a program: where a stage's replicas meet.

UNSHARD stands before a stage is used first, and after a RESHARD before it is used again; REDUCE_GRAD after the stage's
last backward for weights (B or W). Both are collectives: every replica of the pipeline executes the same program, so
that the replicas of a rank come to them in the same order, and a rank that drains a failed step still comes to them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from fastpipe.program import Columns, Instruction, Op, Program, RankProgram, columns_of

_USES = (Op.F, Op.B, Op.I, Op.OVERLAP_F_B)
_BEFORE = (Op.POST_RECV, Op.WAIT_RECV, Op.WAIT_SEND)
"""What lowering puts before a compute action."""
_AFTER = (Op.SEND, Op.HAND_OVER, Op.FREE)
"""What it puts after one."""


def with_collectives(program: Program, *, reshards: bool = False) -> Program:
    """The same program with the UNSHARD and REDUCE_GRAD that it lacks.

    Nothing else moves. An UNSHARD comes before the waits of the action that needs it, so that it is under way while
    the rank waits; a REDUCE_GRAD after the sends of the last backward, so that other ranks need not wait for it.

    Args:
        program: a lowered program. What its schedule has of the two already is kept: a stage with a REDUCE_GRAD of
            its own gets no other.
        reshards: whether to end every stage with a RESHARD. Here a REDUCE_GRAD includes it, for torch it does not.
    """
    return replace(program, columns=tuple(_completed(program[rank], reshards) for rank in range(program.num_ranks)))


def _completed(program: RankProgram, reshards: bool) -> Columns:
    instructions = list(program)
    added = defaultdict(list)
    for position, stage in _missing_unshards(instructions):
        added[position].append(Instruction(Op.UNSHARD, stage))
    for position, stage in _missing_reductions(instructions):
        added[position].append(Instruction(Op.REDUCE_GRAD, stage))
    for position, stage in _missing_reshards(instructions) if reshards else ():
        added[position].append(Instruction(Op.RESHARD, stage))
    return columns_of(
        [it for position in range(len(instructions) + 1) for it in (*added[position], *instructions[position:][:1])]
    )


def _stages_used(it: Instruction) -> tuple[int, ...]:
    if it.op not in _USES:
        return ()
    return (it.stage, it.pair_stage) if it.op is Op.OVERLAP_F_B else (it.stage,)


def _missing_unshards(instructions: Sequence[Instruction]) -> list[tuple[int, int]]:
    """(position before which to put it, stage)."""
    missing = []
    ready: set[int] = set()
    for position, it in enumerate(instructions):
        if it.op is Op.UNSHARD:
            ready.add(it.stage)
        elif it.op is Op.RESHARD:
            ready.discard(it.stage)
        for stage in _stages_used(it):
            if stage not in ready:
                ready.add(stage)
                missing.append((_first_of(instructions, position), stage))
    return missing


def _missing_reductions(instructions: Sequence[Instruction]) -> list[tuple[int, int]]:
    """(position before which to put it, stage)."""
    last: dict[int, int] = {}
    for position, it in enumerate(instructions):
        if it.op in (Op.B, Op.W):
            last[it.stage] = position
        elif it.op is Op.OVERLAP_F_B:
            last[it.pair_stage] = position
    present = {it.stage for it in instructions if it.op is Op.REDUCE_GRAD}
    return [
        (_end_of(instructions, at), stage)
        for stage, at in sorted(last.items(), key=lambda it: it[1])
        if stage not in present
    ]


def _missing_reshards(instructions: Sequence[Instruction]) -> list[tuple[int, int]]:
    """(position before which to put it, stage)."""
    last: dict[int, int] = {}
    for position, it in enumerate(instructions):
        last |= dict.fromkeys(_stages_used(it), position)
        if it.op is Op.RESHARD:
            last.pop(it.stage, None)
        elif it.op in (Op.W, Op.REDUCE_GRAD) and it.stage in last:
            last[it.stage] = position
    return [(_end_of(instructions, at), stage) for stage, at in sorted(last.items(), key=lambda it: it[1])]


def _first_of(instructions: Sequence[Instruction], position: int) -> int:
    """Where the instructions that belong to a compute action begin."""
    while position and instructions[position - 1].op in _BEFORE:
        position -= 1
    return position


def _end_of(instructions: Sequence[Instruction], position: int) -> int:
    """Where they end."""
    position += 1
    while position < len(instructions) and instructions[position].op in _AFTER:
        position += 1
    return position
