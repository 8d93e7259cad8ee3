"""Program: what every rank executes, with nothing left to decide.

Compute, post-receive, wait, send, free, same-rank hand-over; each with its channel and its slot. The simulator, the
Python executor and the C++ executor interpret the same program. Like a schedule it is columns of int32.
"""

from __future__ import annotations

import hashlib
import json
import reprlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fastpipe.action import NONE, Action, ActionKind
from fastpipe.checks import as_path, check_counts, check_type
from fastpipe.errors import ProgramError
from fastpipe.placement import Placement
from fastpipe.schedule import Rows

Columns = npt.NDArray[np.int32]
"""Seven rows (the fields of `Instruction`), one column an instruction."""


class Op(IntEnum):
    """What an instruction does. The first eight are those of `ActionKind`; the numbers are shared with C++."""

    F = 0
    B = 1
    I = 2
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

    @classmethod
    def of(cls, kind: ActionKind) -> ChannelKind:
        """What an action of this kind takes from another stage, and makes for the next."""
        return cls.ACTIVATION if kind is ActionKind.F else cls.GRADIENT

    @property
    def direction(self) -> int:
        """The consuming stage minus the producing one: 1 for activations, -1 for gradients."""
        return 1 if self is ChannelKind.ACTIVATION else -1


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

    def peer_of(self, rank: int) -> int:
        """The rank at the other end; ValueError for a rank at neither."""
        if rank == self.source:
            return self.destination
        if rank == self.destination:
            return self.source
        raise ValueError(f"rank = {rank!r}: {self} has the ranks {self.source} and {self.destination}; give one")


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


FIELDS = Instruction._fields
_OPS = tuple(Op)


def columns_of(rows: Sequence[Sequence[int]]) -> Columns:
    """Instructions, or their numbers, as columns that nobody can write to."""
    columns = np.ascontiguousarray(np.array(rows, dtype=np.int32).reshape(-1, len(FIELDS)).T)
    columns.setflags(write=False)
    return columns


class RankProgram(Rows[Instruction]):
    """What one rank executes.

    Attributes:
        columns: int32 array of shape ``(7, number of instructions)``, rows as in `Instruction`.
    """

    def __init__(self, rank: int, columns: Columns, channels: tuple[Channel, ...]) -> None:
        super().__init__(columns)
        self.rank = rank
        self.channels = channels

    def _row(self, *numbers: int) -> Instruction:
        return Instruction(_OPS[numbers[0]], *numbers[1:])

    @property
    def num_slots(self) -> int:
        """The receive slots of this rank, hand-overs included."""
        ops = self.columns[0]
        return int(self.columns[6][(ops == Op.POST_RECV) | (ops == Op.HAND_OVER)].max(initial=-1)) + 1

    @property
    def num_sends(self) -> int:
        """The sends that are under way at one time, at most."""
        return int(self.columns[6][self.columns[0] == Op.SEND].max(initial=-1)) + 1

    @property
    def peak_activations_released_at_input(self) -> int:
        """The same if the end of I released them, as some papers count."""
        return self._peak(Op.I)

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


def _transfer_or_compute(instruction: Instruction, channels: tuple[Channel, ...]) -> Action | None:
    """The action that torch's format has for it; waits, frees and hand-overs have none."""
    if instruction.op < Op.POST_RECV:
        return Action(ActionKind(instruction.op), *instruction[1:5])
    if instruction.op not in (Op.SEND, Op.POST_RECV):
        return None
    verb = "SEND" if instruction.op == Op.SEND else "RECV"
    letter = "F" if channels[instruction.channel].kind == ChannelKind.ACTIVATION else "B"
    return Action(ActionKind[f"{verb}_{letter}"], instruction.stage, instruction.microbatch)


@dataclass(frozen=True, eq=False)
class Program:
    """The programs of all ranks.

    Attributes:
        name: the schedule's name.
        placement: the rank of every stage.
        num_microbatches: the number of microbatches of a step.
        channels: every channel; an instruction names one by its index.
        columns: for each rank an int32 array of shape ``(7, n)``, with a row for each field of `Instruction`.
        forward_only: whether there is no backward.
    """

    name: str
    placement: Placement
    num_microbatches: int
    channels: tuple[Channel, ...]
    columns: tuple[Columns, ...]
    forward_only: bool = False

    def __post_init__(self) -> None:
        check_type(Placement, placement=self.placement)
        check_type(Sequence, channels=self.channels, columns=self.columns)
        check_counts(num_microbatches=self.num_microbatches)
        if len(self.columns) != self.placement.num_ranks:
            raise ProgramError(f"columns: {self.placement.num_ranks} ranks need as many; found {len(self.columns)}")
        for rank, columns in enumerate(self.columns):
            check_type(np.ndarray, **{f"columns of rank {rank}": columns})
            if columns.dtype != np.int32 or columns.ndim != 2 or len(columns) != len(FIELDS):
                found = f"{columns.dtype} {columns.shape}"
                raise ProgramError(f"columns of rank {rank}: {found}; give int32 ({len(FIELDS)}, instructions)")

    def digest(self) -> str:
        """Twelve hexadecimal digits that say what runs where in which order: the same for equal programs."""
        routes = [list(map(int, route)) for route in self.placement.routes]
        channels = [list(map(int, channel)) for channel in self.channels]
        found = hashlib.sha256(repr([routes, int(self.num_microbatches), channels]).encode())
        for columns in self.columns:
            found.update(str(columns.shape).encode() + np.ascontiguousarray(columns, dtype="<i4").tobytes())
        return found.hexdigest()[:12]

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

    @property
    def peak_activations(self) -> tuple[int, ...]:
        """Live stage activations at most, one number per rank; released at the end of W or B."""
        return tuple(rank.peak_activations for rank in self)

    @property
    def num_slots(self) -> tuple[int, ...]:
        """Receive slots, hand-overs included, one number per rank."""
        return tuple(rank.num_slots for rank in self)

    def to_csv(self, path: str | Path | None = None) -> str:
        """Write one row per rank, in torch's format of compute with communication; see `Schedule.from_csv`.

        For a file that torch can run use ``fastpipe convert --to comms``. The format has no waits: in torch a receive
        blocks its rank until the message arrives, so receives that are posted early can make ranks wait for each
        other. ``convert`` therefore lowers with ``coalesce=True``. It also adds UNSHARD, RESHARD, and the REDUCE_GRAD
        at which torch divides a stage's gradients by the number of microbatches.

        Args:
            path: a file to write; nothing is written without it.

        Returns:
            The text.
        """
        rows = (",".join(str(a) for i in rank if (a := _transfer_or_compute(i, self.channels))) for rank in self)
        text = "".join(row + "\n" for row in rows)
        if path is not None:
            as_path(path).write_text(text, encoding="utf-8")
        return text

    def to_json(self, path: str | Path | None = None) -> str:
        """Write it as JSON; into a file, if a path is given.

        Returns:
            The text.
        """
        text = _write_json(
            {
                "name": self.name,
                "num_ranks": self.num_ranks,
                "routes": self.placement.routes,
                "num_microbatches": self.num_microbatches,
                "forward_only": self.forward_only,
                "channels": [(c.source, c.destination, c.kind.name.lower()) for c in self.channels],
                "ranks": [columns.T.tolist() for columns in self.columns],
            }
        )
        if path is not None:
            as_path(path).write_text(text, encoding="utf-8")
        return text

    @classmethod
    def from_json(cls, path: str | Path) -> Program:
        """Read it from a file, or from the text itself when it has a line break. Prove it before it is run.

        Raises:
            ProgramError: naming the entry that is not what `to_json` writes.
        """
        text = str(path)
        if "\n" not in text:
            text = as_path(path).read_text(encoding="utf-8-sig")
        data = _read_json(text)
        channels = tuple(Channel(s, d, ChannelKind[kind.upper()]) for s, d, kind in data["channels"])
        try:
            placement = Placement(data["num_ranks"], data["routes"], "loaded")
        except ValueError as error:
            raise ProgramError(f"routes: {error}") from None
        return cls(
            data["name"], placement, data["num_microbatches"], channels, tuple(data["ranks"]), data["forward_only"]
        )

    def __getitem__(self, rank: int) -> RankProgram:
        rank = range(self.num_ranks)[rank]  # -1 is the last
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


_FORMAT = "fastpipe program 1"
_LIMIT = 2**31


def _write_json(entries: dict[str, Any]) -> str:
    """The text: one entry a line, one rank a line."""
    ranks = ",\n".join("  " + json.dumps(rows) for rows in entries["ranks"])
    head = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in entries.items() if key != "ranks"]
    return "{" + ",\n ".join([f'"format": "{_FORMAT}"', *head, f'"ranks": [\n{ranks}\n]']) + "}\n"


def _read_json(text: str) -> dict[str, Any]:
    """The entries, each of the right form; ``ranks`` as int32 columns.

    Raises:
        ProgramError: naming the entry that is wrong.
    """
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ProgramError(f"no JSON: {error}") from None
    if not isinstance(data, dict):
        raise ProgramError("no program: give an object with the entries that Program.to_json writes")
    if (found := data.pop("format", None)) != _FORMAT:
        raise ProgramError(f"format = {found!r}: this reads {_FORMAT!r}")
    for name in data:
        if name not in _ENTRIES:
            raise ProgramError(f"{name}: there is no such entry; there are {', '.join(_ENTRIES)}")
    for name, (is_right, what) in _ENTRIES.items():
        if name not in data:
            raise ProgramError(f"{name} is missing")
        if not is_right(data[name]):
            raise ProgramError(f"{name} = {reprlib.repr(data[name])}: give {what}")
    _check_items(data["channels"], data["ranks"])
    return {**data, "ranks": list(map(columns_of, data["ranks"]))}


def _check_items(channels: list[Any], ranks: list[list[Any]]) -> None:
    for number, channel in enumerate(channels):
        if not _is_channel(channel):
            what = "[source, destination, 'activation' or 'gradient']"
            raise ProgramError(f"channels[{number}] = {channel!r}: give {what}")
    for rank, rows in enumerate(ranks):
        for position, row in enumerate(rows):
            if not _is_list(row, _is_whole) or len(row) != len(FIELDS):
                raise ProgramError(f"ranks[{rank}][{position}]: give {len(FIELDS)} whole numbers of 32 bits")


def _is_whole(value: Any) -> bool:
    return type(value) is int and -_LIMIT <= value < _LIMIT


def _is_count(value: Any) -> bool:
    return _is_whole(value) and value > 0


def _is_list(value: Any, check: Callable[[Any], bool]) -> bool:
    return isinstance(value, list) and all(map(check, value))


def _is_channel(value: Any) -> bool:
    has_three = isinstance(value, list) and len(value) == 3 and _is_list(value[:2], _is_whole)
    return has_three and value[2] in ("activation", "gradient")


_ENTRIES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "name": (lambda value: isinstance(value, str), "a string"),
    "num_ranks": (_is_count, "a whole number of at least 1"),
    "routes": (
        lambda value: _is_list(value, lambda route: _is_list(route, _is_whole)),
        "lists of whole numbers, the rank of every stage for each route",
    ),
    "num_microbatches": (_is_count, "a whole number of at least 1"),
    "forward_only": (lambda value: isinstance(value, bool), "true or false"),
    "channels": (lambda value: isinstance(value, list), "a list of channels"),
    "ranks": (lambda value: _is_list(value, lambda rows: isinstance(rows, list)), "a list of instructions a rank"),
}
"""What `_read_json` asks of each, and what to give."""
