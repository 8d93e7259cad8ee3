"""The abstract machine that a program runs on: ranks, lanes, messages. Validation and simulation both run it.

Every rank executes its instructions in order. SEND and POST_RECV enter a lane's queue at their end and go on; the
heads of the two ends of a lane match when one sends what the other receives; WAIT_SEND and WAIT_RECV block until
their operation has matched. Because every queue is in program order, the outcome does not depend on timing: one run
in any order decides whether the program can hang (the machine is monotone), and times are sums and maxima.

With coalesced lanes the transfers that two ranks both begin side by side are one operation (`batches`): they enter the
lane's queue together, each way is matched in order by itself, and all are done, and the queue moves on, when the last
of them is.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fastpipe.action import NONE
from fastpipe.checks import is_whole
from fastpipe.program import Channel, Op, Program, RankProgram

Lanes = str | Sequence[int]
"""``"directed"`` (one per channel), ``"pair"`` (one for each two ranks), ``"coalesced"`` (the same, and what
both begin side by side is one operation), ``"group"`` (one), or a number per channel."""
COALESCED = "coalesced"
_BETWEEN = (Op.FREE, Op.HAND_OVER)
"""What may stand between two transfers that are begun side by side."""
_MOST = 2**31 - 1
"""The largest number of a lane: csrc/plan reads 32 bits."""
Batch = list[list[int]]
"""Operations, in the order in which they begin; of each the positions of its transfers."""


def lane_numbers(lanes: Lanes, channels: Sequence[Channel]) -> list[int]:
    """The lane of every channel."""
    if not isinstance(lanes, Sequence):
        raise _no_lanes(lanes)
    if lanes == "directed":
        return list(range(len(channels)))
    if lanes in ("pair", COALESCED):
        pairs = {frozenset((c.source, c.destination)): None for c in channels}
        number = {pair: index for index, pair in enumerate(pairs)}
        return [number[frozenset((c.source, c.destination))] for c in channels]
    if lanes == "group":
        return [0] * len(channels)
    if isinstance(lanes, str):
        raise _no_lanes(lanes)
    if len(lanes) != len(channels):
        raise ValueError(f"lanes names {len(lanes)} channels of {len(channels)}: give a lane for each")
    for lane in lanes:
        if not (is_whole(lane) and lane <= _MOST):
            raise ValueError(f"lanes names {lane!r}: lanes are whole numbers from 0 to {_MOST}")
    return [int(lane) for lane in lanes]


def _no_lanes(lanes: object) -> ValueError:
    known = "'directed', 'pair', 'coalesced' or 'group'"
    return ValueError(f"lanes = {lanes!r}: use {known}, or give a list with the lane of every channel")


class Turn(NamedTuple):
    """When a transfer begins, where lanes are coalesced.

    Attributes:
        operation: the one that it is part of; a rank begins those with one peer in the order of their numbers.
        last: whether it is its batch's last transfer, with which all operations of the batch begin.
    """

    operation: int
    last: bool


def turns(batches: Sequence[Batch]) -> dict[int, Turn]:
    """By position: the turn of each transfer in a rank's batches."""
    found: dict[int, Turn] = {}
    number = itertools.count()
    for batch in batches:
        last = max(operation[-1] for operation in batch)
        for operation in batch:
            turn = next(number)
            found |= {position: Turn(turn, position == last) for position in operation}
    return found


def batches(program: Program) -> list[list[Batch]]:
    """What each rank begins side by side, where lanes are coalesced, and which of that are one operation.

    A batch is SENDs and POST_RECVs to and from one peer with nothing between them that computes or waits. Those that
    are in one batch at the other end too are one operation, so that an operation consists of the same messages at both
    ends. NCCL needs that: what an operation moves between two ranks goes in rounds of a send and a receive each, and a
    round waits for the one before it. If one end had a receive in an operation whose message the other end sends after
    it, then the sends in later rounds would wait for ever.
    """
    side_by_side = [_side_by_side(rank) for rank in program]
    end_at = [[(channel, op == Op.SEND) for op, channel in rank.columns[[0, 5]].T.tolist()] for rank in program]
    number_of: dict[tuple[int, bool], list[int]] = {}
    for end, found in zip(end_at, side_by_side, strict=True):
        for number, batch in enumerate(found):
            for position in batch:
                number_of.setdefault(end[position], []).append(number)
    followed = {end: iter(number_of.get((end[0], not end[1]), ())) for end in number_of}
    return [
        [_operations(batch, [next(followed[end[position]], NONE) for position in batch]) for batch in found]
        for end, found in zip(end_at, side_by_side, strict=True)
    ]


def _operations(batch: list[int], others: list[int]) -> Batch:
    """A batch's operations, in the order in which the other end comes to them; `others` are its batches."""
    return [[at for at, it in zip(batch, others, strict=True) if it == other] for other in sorted(set(others))]


def _side_by_side(program: RankProgram) -> list[list[int]]:
    found: list[list[int]] = []
    side_by_side: dict[int, list[int]] = {}
    for position, (op, channel) in enumerate(program.columns[[0, 5]].T.tolist()):
        if op in (Op.SEND, Op.POST_RECV):
            peer = program.channels[channel].peer_of(program.rank)
            if peer not in side_by_side:
                found.append(side_by_side.setdefault(peer, []))
            side_by_side[peer].append(position)
        elif op not in _BETWEEN:
            side_by_side.clear()
    return found


@dataclass(slots=True)
class Transfer:
    """A SEND or a POST_RECV in its queue.

    Attributes:
        over: when the message is across.
        done: when the operation that it is part of is.
    """

    rank: int
    position: int
    channel: int
    sends: bool
    posted: float
    over: float | None = None
    done: float | None = None
    queued: bool = True


@dataclass
class Outcome:
    """What came of a run.

    Attributes:
        starts: per rank, the start of every instruction (of a SEND: of its transfer); NaN where it was not reached.
        blocked: ``{rank: transfer}`` for ranks that wait for ever; empty when all came to their end.
        queues: what is left in every lane's queues, by (lane, rank); of an operation what is not across.
    """

    starts: list[npt.NDArray[np.float64]]
    ends: list[npt.NDArray[np.float64]]
    blocked: dict[int, Transfer]
    queues: dict[tuple[int, int], deque[Transfer]] = field(default_factory=dict)


Seconds = Callable[[int, int, int], float]


class Machine:
    """Runs a program.

    Args:
        program: what to run; its slots must be used rightly (see `validate_program`).
        compute_seconds: ``(op, stage, pair_stage)`` to seconds; nothing costs time unless given.
        transfer_seconds: ``(channel, consumer stage, unused)`` to seconds.
        late: whether a receive enters its lane only when it, or a later one of its channel, is waited for, as in a
            step whose messages are announced by headers, so that nobody knows yet how large they are.
    """

    def __init__(
        self,
        program: Program,
        lanes: Lanes = "directed",
        compute_seconds: Seconds | None = None,
        transfer_seconds: Seconds | None = None,
        late: bool = False,
    ) -> None:
        self.program = program
        self.lane_of = lane_numbers(lanes, program.channels)
        self.compute_seconds = compute_seconds or (lambda op, stage, pair_stage: 0.0)
        self.transfer_seconds = transfer_seconds or (lambda channel, stage, _: 0.0)
        self.late = late
        self.held: dict[int, deque[Transfer]] = {}
        self.rows = [list(zip(*columns.tolist(), strict=True)) for columns in program.columns]
        self.clock = [0.0] * program.num_ranks
        self.position = [0] * program.num_ranks
        self.starts = [np.full(len(rows), np.nan) for rows in self.rows]
        self.ends = [np.full(len(rows), np.nan) for rows in self.rows]
        self.queues: dict[tuple[int, int], deque[list[Transfer]]] = {}
        self.batch_at = [_batch_at(own) for own in batches(program)] if lanes == COALESCED else [{} for _ in self.rows]
        self.begun: list[dict[int, Transfer]] = [{} for _ in self.rows]
        self.lane_free: dict[tuple[int, int], float] = {}
        self.receives: list[dict[int, Transfer]] = [{} for _ in self.rows]
        self.sends: list[dict[int, Transfer]] = [{} for _ in self.rows]
        self.blocked: dict[int, Transfer] = {}
        self.woken: list[int] = []

    def run(self) -> Outcome:
        """Run to the end, or until nothing can go on."""
        ready = list(range(self.program.num_ranks))
        while ready:
            self._advance(ready.pop())
            ready.extend(self.woken)
            self.woken.clear()
        left = {
            end: deque(transfer for operation in queue for transfer in operation if transfer.over is None)
            for end, queue in self.queues.items()
        }
        return Outcome(self.starts, self.ends, self.blocked, left)

    def _advance(self, rank: int) -> None:
        rows = self.rows[rank]
        starts, ends = self.starts[rank], self.ends[rank]
        while self.position[rank] < len(rows):
            position = self.position[rank]
            op, stage, _, pair_stage, _, channel, slot = rows[position]
            start = self.clock[rank]
            if op in (Op.WAIT_RECV, Op.WAIT_SEND):
                transfer = (self.receives if op == Op.WAIT_RECV else self.sends)[rank][slot]
                self._release(transfer)
                if transfer.done is None:
                    self.blocked[rank] = transfer
                    return
                self.clock[rank] = max(start, transfer.done)
            elif op in (Op.SEND, Op.POST_RECV):
                self._post(Transfer(rank, position, channel, op == Op.SEND, start), slot)
            elif channel == NONE:
                self.clock[rank] = start + self.compute_seconds(op, stage, pair_stage)
            if op != Op.SEND:
                starts[position], ends[position] = start, self.clock[rank]
            self.position[rank] = position + 1

    def _post(self, transfer: Transfer, slot: int) -> None:
        (self.sends if transfer.sends else self.receives)[transfer.rank][slot] = transfer
        if self.late and not transfer.sends:
            transfer.queued = False
            self.held.setdefault(transfer.channel, deque()).append(transfer)
        elif transfer.position in self.batch_at[transfer.rank]:
            self._begin(transfer)
        else:
            self._enqueue([transfer])

    def _begin(self, transfer: Transfer) -> None:
        """Note a part of a batch; with the last one its operations are begun."""
        batch = self.batch_at[transfer.rank][transfer.position]
        begun = self.begun[transfer.rank]
        begun[transfer.position] = transfer
        if all(position in begun for operation in batch for position in operation):
            for operation in batch:
                self._enqueue([begun.pop(position) for position in operation])

    def _release(self, transfer: Transfer) -> None:
        """Let a held receive into its lane, after those of its channel that were posted before it."""
        while not transfer.queued:
            first = self.held[transfer.channel].popleft()
            first.queued = True
            self._enqueue([first])

    def _enqueue(self, operation: list[Transfer]) -> None:
        lane, rank = self.lane_of[operation[0].channel], operation[0].rank
        self.queues.setdefault((lane, rank), deque()).append(operation)
        self._match(lane, rank)

    def _match(self, lane: int, rank: int) -> None:
        """Complete what now stands at both heads; each completion may bring up the next, at either end."""
        pending = [rank]
        while pending:
            end = pending.pop()
            queue = self.queues.get((lane, end))
            if not queue:
                continue
            peer = self.program.channels[queue[0][0].channel].peer_of(end)
            other = self.queues.get((lane, peer))
            met = other and _met(queue[0], other[0])
            if met:
                self._complete(lane, *met)
                pending += [end, peer]

    def _complete(self, lane: int, send: Transfer, receive: Transfer) -> None:
        ends = ((lane, send.rank), (lane, receive.rank))
        start = max(send.posted, receive.posted, *(self.lane_free.get(end, 0.0) for end in ends))
        stage = self.rows[receive.rank][receive.position][1]
        over = start + self.transfer_seconds(send.channel, stage, NONE)
        send.over = receive.over = over
        self.starts[send.rank][send.position], self.ends[send.rank][send.position] = start, over
        for end in ends:
            times = [transfer.over for transfer in self.queues[end][0]]
            if None not in times:
                self.lane_free[end] = max(time for time in times if time is not None)
                self._done(self.queues[end].popleft(), self.lane_free[end])

    def _done(self, operation: list[Transfer], time: float) -> None:
        for transfer in operation:
            transfer.done = time
            if self.blocked.get(transfer.rank) is transfer:
                del self.blocked[transfer.rank]
                self.woken.append(transfer.rank)


def _batch_at(batches: Sequence[Batch]) -> dict[int, Batch]:
    """By position: the batch of every transfer."""
    return {position: batch for batch in batches for operation in batch for position in operation}


def _met(own: list[Transfer], others: list[Transfer]) -> tuple[Transfer, Transfer] | None:
    """A send and a receive that match: of each way the first that is not across."""
    for out, into in ((own, others), (others, own)):
        send = next((transfer for transfer in out if transfer.sends and transfer.over is None), None)
        receive = next((transfer for transfer in into if not transfer.sends and transfer.over is None), None)
        if send is not None and receive is not None and send.channel == receive.channel:
            return send, receive
    return None
