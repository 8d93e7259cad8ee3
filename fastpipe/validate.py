"""The proof that a schedule is complete and can run.

Sends and receives, which a loaded schedule may bring along (torch's "compute with comms" format), are proved too:
`fastpipe.lower` places its own and ignores these, but a schedule that states them wrongly is not the one its author
meant.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fastpipe import native_plan
from fastpipe.action import COMMUNICATION_KINDS, COMPUTE_KINDS, NONE, STAGE_ONLY_KINDS, Action, ActionKind
from fastpipe.checks import check_type
from fastpipe.dependencies import Event, Play, feeds, produces
from fastpipe.errors import ScheduleError
from fastpipe.schedule import Schedule

Done = dict[tuple[ActionKind, int, int], tuple[int, int]]
"""(kind, stage, microbatch) to (rank, position)."""


def validate_schedule(schedule: Schedule) -> Schedule:
    """Prove that a schedule is complete and can run.

    Every microbatch goes through every stage exactly once, forward and backward (B, or I and W; or no backward at all
    in the whole schedule), on the ranks of its route, in an order that can run. Sends and receives, which only a
    loaded schedule has, must be all there, in an order that matches. A REDUCE_GRAD comes once, after its stage's last
    backward. Warns when a stage's B, or I and W, come in another order than stage 0's: its weight gradients are then
    summed in another order than the unsplit model's.

    Returns:
        The schedule.

    Raises:
        ScheduleError: naming rank, position and action; for an order that cannot run, the cycle.
    """
    check_type(Schedule, "see make_schedule", schedule=schedule)
    if native_plan.is_valid_schedule(schedule.without_transfers()):
        _check_transfers(schedule)
    else:
        _validate(schedule)
    _warn_about_sums(schedule)
    return schedule


def _validate(schedule: Schedule) -> None:
    """The proof in Python: what csrc/plan does too, and where the errors come from."""
    done = _collect(schedule)
    _check_complete(schedule, done)
    orders = [[a for a in rank if a.kind in COMPUTE_KINDS] for rank in schedule]
    played = Play(orders, schedule.placement, schedule.num_microbatches)
    if played.stuck:
        raise ScheduleError(_describe_cycle(orders, played))
    _check_reductions(schedule)
    _check_transfers(schedule)


def _collect(schedule: Schedule) -> Done:
    done: Done = {}
    for rank, order in enumerate(schedule):
        for position, action in enumerate(order):
            where = f"rank {rank}, position {position}, {action}"
            _check_kind(schedule, rank, action, where)
            for part in action.parts if action.kind in COMPUTE_KINDS else ():
                _check_indices(schedule, rank, part, where)
                key = (part.kind, part.stage, part.microbatch)
                if key in done:
                    first = "rank {}, position {}".format(*done[key])
                    raise ScheduleError(f"{where}: {part} was already done at {first}")
                done[key] = (rank, position)
    return done


def _check_kind(schedule: Schedule, rank: int, action: Action, where: str) -> None:
    stage_only = action.kind in STAGE_ONLY_KINDS
    unused = () if action.kind is ActionKind.OVERLAP_F_B else (action.pair_stage, action.pair_microbatch)
    if any(value != NONE for value in (*unused, *((action.microbatch,) if stage_only else ()))):
        fields = tuple(map(int, action))
        raise ScheduleError(f"{where}: {fields} sets a field that {action.kind.name} does not use; leave it {NONE}")
    if stage_only and action.stage not in schedule.placement.stages_of(rank):
        raise ScheduleError(f"{where}: rank {rank} does not hold stage {action.stage}")


def _check_indices(schedule: Schedule, rank: int, part: Action, where: str) -> None:
    if not 0 <= part.stage < schedule.num_stages:
        raise ScheduleError(f"{where}: stage {part.stage} is not one of 0 to {schedule.num_stages - 1}")
    if not 0 <= part.microbatch < schedule.num_microbatches:
        raise ScheduleError(f"{where}: microbatch {part.microbatch} is not one of 0 to {schedule.num_microbatches - 1}")
    placement = schedule.placement
    owner = placement.rank_of(part.stage, placement.route_of(part.microbatch, schedule.num_microbatches))
    if owner != rank:
        raise ScheduleError(f"{where}: stage {part.stage} of microbatch {part.microbatch} belongs to rank {owner}")


def _check_complete(schedule: Schedule, done: Done) -> None:
    forward_only = schedule.forward_only
    for stage in range(schedule.num_stages):
        for microbatch in range(schedule.num_microbatches):
            _check_pair(schedule, done, stage, microbatch, forward_only)


def _check_pair(schedule: Schedule, done: Done, stage: int, microbatch: int, forward_only: bool) -> None:
    have = {
        kind for kind in (ActionKind.F, ActionKind.B, ActionKind.I, ActionKind.W) if (kind, stage, microbatch) in done
    }
    names = {kind.name for kind in have}
    if names in ({"F"} if forward_only else {"F", "B"}, {"F", "I", "W"}):
        return
    placement = schedule.placement
    rank = placement.rank_of(stage, placement.route_of(microbatch, schedule.num_microbatches))
    whose = f"rank {rank}: stage {stage}, microbatch {microbatch}"
    if "B" in names and names & {"I", "W"}:
        kinds = " and ".join(sorted(names & {"I", "W"}))
        at = [done[kind, stage, microbatch][1] for kind in have if kind is not ActionKind.F]
        raise ScheduleError(f"{whose} mixes B with {kinds} (positions {sorted(at)}): use B, or I and W")
    if "F" not in names:
        missing = Action(ActionKind.F, stage, microbatch)
    elif "I" in names or "W" in names:
        missing = Action(ActionKind.W if "I" in names else ActionKind.I, stage, microbatch)
    else:
        missing = Action(ActionKind.B, stage, microbatch)
    raise ScheduleError(f"{whose} has no {missing.kind.name}: add {missing} to the order of rank {rank}")


def _describe_cycle(orders: Sequence[Sequence[Action]], played: Play) -> str:
    """Follow the waits from any stuck rank until one comes again."""
    producers: dict[tuple[Event, int, int], tuple[int, int]] = {}
    for rank, order in enumerate(orders):
        for position, action in enumerate(order):
            for part in action.parts:
                for event in produces(part.kind):
                    producers[event, part.stage, part.microbatch] = (rank, position)
    path: list[int] = []
    rank = min(played.stuck)
    while rank not in path:
        path.append(rank)
        _, event, stage, microbatch = played.stuck[rank]
        rank = producers[event, stage, microbatch][0]
    lines = []
    for waiting in path[path.index(rank) :]:
        position, event, stage, microbatch = played.stuck[waiting]
        owner, at = producers[event, stage, microbatch]
        lines.append(
            f"rank {waiting} at position {position} ({orders[waiting][position]}) waits for "
            f"{orders[owner][at]} at position {at} of rank {owner}"
        )
    return "the order cannot run, it waits in a cycle: " + "; ".join(lines)


def _check_reductions(schedule: Schedule) -> None:
    """What comes after a stage's gradients are reduced would stay as it is on one replica."""
    for rank, (kinds, stages, _, pair_stages, *_) in enumerate(schedule.columns):
        for stage in np.unique(stages[kinds == ActionKind.REDUCE_GRAD]).tolist():
            positions = np.flatnonzero((kinds == ActionKind.REDUCE_GRAD) & (stages == stage))
            where = f"rank {rank}, position {positions[0]}, {stage}REDUCE_GRAD"
            if len(positions) > 1:
                raise ScheduleError(f"{where}: it comes again at position {positions[1]}; leave one, the last")
            own = np.isin(kinds, (ActionKind.B, ActionKind.I, ActionKind.W)) & (stages == stage)
            paired = (kinds == ActionKind.OVERLAP_F_B) & (pair_stages == stage)
            late = np.flatnonzero((own | paired)[positions[0] :])
            if len(late):
                action = schedule[rank][positions[0] + int(late[0])]
                raise ScheduleError(f"{where}: {action} comes after it; put it after the stage's last backward")


def _warn_about_sums(schedule: Schedule) -> None:
    """The reference adds every weight's gradients up in the order of stage 0's W or B, on each route by itself.

    W adds those of linears, I the others, B both.
    """
    kinds = {"W": ActionKind.W, "I": ActionKind.I} if schedule.splits_backward else {"B": ActionKind.B}
    added = {name: _backward_orders(schedule, kind) for name, kind in kinds.items()}
    first = next(iter(added))
    reference = {route: order for (_, stage, route), order in added[first].items() if stage == 0}
    wrong = [
        f"rank {place[0]}, stage {place[1]}: its {name}"
        for place in added[first]
        for name, orders in added.items()
        if not np.array_equal(orders[place], reference[place[2]])
    ]
    if wrong:
        more = f" (the first of {len(wrong)} such orders)" if len(wrong) > 1 else ""
        warnings.warn(
            f"{wrong[0]} come in another order than stage 0's {first}, in which the reference sums, so that last bits "
            f"of weight gradients differ{more}",
            stacklevel=3,
        )


def _backward_orders(schedule: Schedule, kind: ActionKind) -> dict[tuple[int, int, int], npt.NDArray[np.int32]]:
    """By rank, stage and route, the microbatches in the order of their B or ``kind``."""
    count = schedule.num_microbatches
    second = count // 2 if schedule.placement.num_routes == 2 else count
    found = {}
    for rank, columns in enumerate(schedule.columns):
        fused = columns[0] == ActionKind.OVERLAP_F_B
        mine = fused | (columns[0] == ActionKind.B) | (columns[0] == kind)
        stages, microbatches = np.where(fused, columns[3:5], columns[1:3])[:, mine]
        keys = 2 * stages + (microbatches >= second)
        for key in np.unique(keys).tolist():
            found[(rank, *divmod(key, 2))] = microbatches[keys == key]
    return found


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


def _check_transfers(schedule: Schedule) -> None:
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
                _note_transfer(transfers, schedule, action, Place(rank, position))
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


def _note_transfer(transfers: _Transfers, schedule: Schedule, action: Action, place: Place) -> None:
    forward, sends = action.kind in _FORWARD, action.kind in _SENDS
    stage = action.stage + (1 if forward else -1) if sends else action.stage
    message = Message(forward, stage, action.microbatch)
    where = f"rank {place.rank}, position {place.position}, {action}"
    _check_kind(schedule, place.rank, action, where)
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
                    f"while rank {source} sends {_text(out)} at position {transfers.sent[out].position}: "
                    "messages have no tag, so the receiver would take one for the other"
                )


def _text(message: Message) -> str:
    what = "activation" if message.forward else "gradient"
    return f"the {what} for stage {message.stage} of microbatch {message.microbatch}"
