"""The proof of the sends and receives that a loaded schedule brings along (torch's "compute with comms" format).

`fastpipe.lower` places its own transfers and ignores these; they are proved because a schedule that states them wrongly
is not the one its author meant.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple

from fastpipe.action import COMMUNICATION_KINDS, NONE, Action, ActionKind
from fastpipe.dependencies import feeds
from fastpipe.errors import ScheduleError
from fastpipe.schedule import Schedule

_SENDS = (ActionKind.SEND_F, ActionKind.SEND_B)
_FORWARD = (ActionKind.F, ActionKind.SEND_F, ActionKind.RECV_F)


class Message(NamedTuple):
    """What one stage hands to the next: forward or backward, the consumer's stage, the microbatch."""

    forward: bool
    stage: int
    microbatch: int


class Place(NamedTuple):
    """Where an action stands."""

    rank: int
    position: int


@dataclass
class _Transfers:
    """Where every message is made, sent, received and used, and the order between each two ranks, either way apart."""

    made: dict[Message, Place] = field(default_factory=dict)
    used: dict[Message, Place] = field(default_factory=dict)
    sent: dict[Message, Place] = field(default_factory=dict)
    received: dict[Message, Place] = field(default_factory=dict)
    sends: dict[tuple[int, int], list[Message]] = field(default_factory=lambda: defaultdict(list))
    receives: dict[tuple[int, int], list[Message]] = field(default_factory=lambda: defaultdict(list))


def check_transfers(schedule: Schedule) -> None:
    """Prove the sends and receives of a schedule whose compute is complete; does nothing when it has none.

    Torch sends a message without a name, so the receives of a rank from another one must come in the order of that
    one's sends, activations and gradients together.

    Raises:
        ScheduleError: naming rank, position and action of a transfer that is missing, doubled, misplaced or out of
            order.
    """
    if schedule.without_transfers() is schedule:
        return
    transfers = _Transfers()
    for rank, order in enumerate(schedule):
        for position, action in enumerate(order):
            for part in action.parts:
                _note_compute(transfers, schedule, part, Place(rank, position))
    for rank, order in enumerate(schedule):
        for position, action in enumerate(order):
            if action.kind in COMMUNICATION_KINDS:
                _note_transfer(transfers, action, Place(rank, position))
    _check_missing(transfers)
    _check_order(transfers)


def _note_compute(transfers: _Transfers, schedule: Schedule, part: Action, place: Place) -> None:
    if part.kind not in (ActionKind.F, ActionKind.B, ActionKind.I):
        return
    forward = part.kind in _FORWARD
    transfers.used[Message(forward, part.stage, part.microbatch)] = place
    target = feeds(part.kind, part.stage, schedule.num_stages)
    if target != NONE:
        transfers.made[Message(forward, target, part.microbatch)] = place


def _note_transfer(transfers: _Transfers, action: Action, place: Place) -> None:
    forward, sends = action.kind in _FORWARD, action.kind in _SENDS
    stage = action.stage + (1 if forward else -1) if sends else action.stage
    message = Message(forward, stage, action.microbatch)
    where = f"rank {place.rank}, position {place.position}, {action}"
    made, used = transfers.made.get(message), transfers.used.get(message)
    if made is None or used is None or made.rank == used.rank:
        raise ScheduleError(f"{where}: nothing goes from one rank to another there")
    mine, noted = (made, transfers.sent) if sends else (used, transfers.received)
    if mine.rank != place.rank:
        raise ScheduleError(f"{where}: that belongs to rank {mine.rank}")
    if message in noted:
        raise ScheduleError(f"{where}: it was already done at position {noted[message].position}")
    if sends and place.position < mine.position:
        raise ScheduleError(f"{where}: what it sends is computed at position {mine.position}, after it")
    if not sends and place.position > mine.position:
        raise ScheduleError(f"{where}: what it receives is used at position {mine.position}, before it")
    noted[message] = place
    (transfers.sends if sends else transfers.receives)[made.rank, used.rank].append(message)


def _check_missing(transfers: _Transfers) -> None:
    for message, made in transfers.made.items():
        used = transfers.used[message]
        if made.rank == used.rank:
            continue
        if message not in transfers.sent:
            raise ScheduleError(f"rank {made.rank}, position {made.position}: {_text(message)} is never sent")
        if message not in transfers.received:
            raise ScheduleError(f"rank {used.rank}, position {used.position}: {_text(message)} is never received")


def _check_order(transfers: _Transfers) -> None:
    for (source, destination), sent in transfers.sends.items():
        received = transfers.receives[source, destination]
        for out, into in zip(sent, received, strict=True):
            if out != into:
                raise ScheduleError(
                    f"rank {destination}, position {transfers.received[into].position}: it receives {_text(into)}, "
                    f"while rank {source} sends {_text(out)} at position {transfers.sent[out].position}: a message has "
                    "no name, so it would be taken for the other"
                )


def _text(message: Message) -> str:
    what = "activation" if message.forward else "gradient"
    return f"the {what} for stage {message.stage} of microbatch {message.microbatch}"
