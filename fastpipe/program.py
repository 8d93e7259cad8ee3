"""Program: what every rank executes, with nothing left to decide.

Compute, post-receive, wait, send, free, same-rank hand-over; each with its channel and its slot. The simulator, the
Python executor and the C++ executor interpret the same program. Like a schedule it is columns of int32.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fastpipe.action import NONE, Action, ActionKind
from fastpipe.placement import Placement

Columns = npt.NDArray[np.int32]
"""Seven rows (the fields of `Instruction`), one column an instruction."""


class Op(IntEnum):
    """What an instruction does. The first eight are those of `ActionKind`; the numbers are shared with C++."""

    F = 0
    B = 1
    I = 2  # noqa: E741 - the field's own name
    W = 3
    OVERLAP_F_B = 4
    UNSHARD = 5
    RESHARD = 6
    REDUCE_GRAD = 7
    POST_RECV = 8
    """give the transport the slot that the channel's next message is to be put into"""
    WAIT_RECV = 9
    """wait until the message is in its slot"""
    SEND = 10
    """hand what the last compute produced to the transport; ``slot`` numbers the send until its WAIT_SEND"""
    WAIT_SEND = 11
    """wait until a send no longer reads its tensors, and let go of them"""
    HAND_OVER = 12
    """give what the last compute produced to another stage of the same rank, as its slot"""
    FREE = 13
    """let go of a slot: nothing reads it any more"""


COMPUTE_OPS = frozenset({Op.F, Op.B, Op.I, Op.W, Op.OVERLAP_F_B})


class ChannelKind(IntEnum):
    """What a channel carries."""

    ACTIVATION = 0
    GRADIENT = 1


class Channel(NamedTuple):
    """A FIFO from one rank to another; source and destination are the same for hand-overs.

    Attributes:
        source: the rank that sends.
        destination: the rank that receives.
        kind: activations or gradients.
    """

    source: int
    destination: int
    kind: ChannelKind

    def __str__(self) -> str:
        return f"{self.kind.name.lower()} {self.source}->{self.destination}"


class Instruction(NamedTuple):
    """One step of a rank's program.

    Attributes:
        op: what is done.
        stage: the local stage that computes, produces what is sent, or consumes what is received.
        microbatch: the microbatch.
        pair_stage: the backward's stage of an ``OVERLAP_F_B``, else ``NONE``.
        pair_microbatch: the backward's microbatch of an ``OVERLAP_F_B``, else ``NONE``.
        channel: index into ``program.channels``, or ``NONE`` for compute.
        slot: the receive slot, or the number of the send; counted from 0 on each rank, each of the two by itself.
    """

    op: Op
    stage: int = NONE
    microbatch: int = NONE
    pair_stage: int = NONE
    pair_microbatch: int = NONE
    channel: int = NONE
    slot: int = NONE

    @property
    def action(self) -> Action | None:
        """The compute action, or None for an instruction that only moves or frees."""
        if self.op not in COMPUTE_OPS:
            return None
        return Action(ActionKind(self.op), self.stage, self.microbatch, self.pair_stage, self.pair_microbatch)


_OPS = tuple(Op)


class RankProgram(Sequence[Instruction]):
    """What one rank executes.

    Attributes:
        rank: which one.
        columns: int32 array of shape ``(7, number of instructions)``, rows as in `Instruction`.
        channels: all channels of the program.
        num_slots: how many receive slots this rank needs at most at one time.
        num_sends: how many sends are under way at most at one time.
    """

    def __init__(self, rank: int, columns: Columns, channels: tuple[Channel, ...]) -> None:
        self.rank = rank
        self.columns = columns
        self.channels = channels

    @property
    def num_slots(self) -> int:
        """The receive slots of this rank, hand-overs included."""
        ops = self.columns[0]
        return int(self.columns[6][(ops == Op.POST_RECV) | (ops == Op.HAND_OVER)].max(initial=-1)) + 1

    @property
    def num_sends(self) -> int:
        """The sends that are under way at one time, at most."""
        return int(self.columns[6][self.columns[0] == Op.SEND].max(initial=-1)) + 1

    def __len__(self) -> int:
        return int(self.columns.shape[1])

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return list(_instructions(self.columns[:, index]))
        return next(_instructions(self.columns[:, [index]]))

    def __iter__(self) -> Iterator[Instruction]:
        return _instructions(self.columns)

    def __str__(self) -> str:
        lines = [f"rank {self.rank}: {len(self)} instructions, {self.num_slots} receive slots, {self.num_sends} sends"]
        for position, instruction in enumerate(self):
            lines.append(f"{position:>6}  {self.text(instruction)}")
        return "\n".join(lines)

    def text(self, instruction: Instruction) -> str:
        """One instruction as a line: what, with whom, over which channel, in which slot."""
        if instruction.action is not None:
            return f"{instruction.op.name:<11} {instruction.action}"
        if instruction.channel == NONE:
            return f"{instruction.op.name:<11} stage {instruction.stage}"
        channel = self.channels[instruction.channel]
        peer = channel.source if channel.source != self.rank else channel.destination
        what = f"{channel.kind.name.lower()} of stage {instruction.stage} microbatch {instruction.microbatch}"
        number = "send" if instruction.op in (Op.SEND, Op.WAIT_SEND) else "slot"
        return (
            f"{instruction.op.name:<11} {what}, peer {peer}, channel {instruction.channel} ({channel}), "
            f"{number} {instruction.slot}"
        )


def _instructions(columns: Columns) -> Iterator[Instruction]:
    for op, *rest in zip(*columns.tolist(), strict=True):
        yield Instruction(_OPS[op], *rest)


@dataclass(frozen=True, eq=False)
class Program:
    """The programs of all ranks.

    Attributes:
        name: the schedule's name.
        placement: the stages' ranks.
        num_microbatches: how many microbatches one step has.
        channels: every channel; an instruction names one by its index.
        columns: one int32 array of shape ``(7, n)`` a rank.
        forward_only: whether there is no backward.
    """

    name: str
    placement: Placement
    num_microbatches: int
    channels: tuple[Channel, ...]
    columns: tuple[Columns, ...]
    forward_only: bool = False

    @property
    def num_ranks(self) -> int:
        """How many ranks take part."""
        return self.placement.num_ranks

    @property
    def num_stages(self) -> int:
        """How many stages the model is cut into."""
        return self.placement.num_stages

    @property
    def num_instructions(self) -> int:
        """How many instructions there are on all ranks together."""
        return sum(int(columns.shape[1]) for columns in self.columns)

    def __getitem__(self, rank: int) -> RankProgram:
        return RankProgram(rank, self.columns[rank], self.channels)

    def __len__(self) -> int:
        return self.num_ranks

    def __iter__(self) -> Iterator[RankProgram]:
        return (self[rank] for rank in range(self.num_ranks))

    def __repr__(self) -> str:
        return (
            f"<Program {self.name}: {self.num_ranks} ranks, {self.num_stages} stages, {self.num_microbatches} "
            f"microbatches, {self.num_instructions} instructions, {len(self.channels)} channels>"
        )

    def __str__(self) -> str:
        return "\n\n".join([repr(self), *map(str, self)])
