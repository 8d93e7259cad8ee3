"""The abstract machine that a program runs on: ranks, lanes, messages. Validation and simulation both run it.

Every rank executes its instructions in order. SEND and POST_RECV enter a lane's queue at their end and go on; the
heads of the two ends of a lane match when one sends what the other receives; WAIT_SEND and WAIT_RECV block until
their operation has matched. Because every queue is in program order, the outcome does not depend on timing: one run
in any order decides whether the program can hang (the machine is monotone), and times are sums and maxima.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from fastpipe.action import NONE
from fastpipe.program import Channel, Op, Program

Lanes = str | Sequence[int]
"""``"directed"`` (one a channel), ``"pair"`` (one for each two ranks), ``"group"`` (one), or a number a channel."""


def lane_numbers(lanes: Lanes, channels: Sequence[Channel]) -> list[int]:
    """The lane of every channel."""
    if lanes == "directed":
        return list(range(len(channels)))
    if lanes == "pair":
        pairs = {frozenset((c.source, c.destination)): None for c in channels}
        number = {pair: index for index, pair in enumerate(pairs)}
        return [number[frozenset((c.source, c.destination))] for c in channels]
    if lanes == "group":
        return [0] * len(channels)
    if lanes is None or isinstance(lanes, str):
        raise ValueError(f"lanes = {lanes!r}: use 'directed', 'pair', 'group', or give the lane of every channel")
    if len(lanes) != len(channels):
        raise ValueError(f"lanes names {len(lanes)} channels of {len(channels)}: give a lane for each")
    return list(lanes)


@dataclass(slots=True)
class Transfer:
    """A SEND or a POST_RECV in its queue."""

    rank: int
    position: int
    channel: int
    sends: bool
    posted: float
    done: float | None = None
    queued: bool = True


@dataclass
class Outcome:
    """What came of a run.

    Attributes:
        starts: per rank, the start of every instruction (of a SEND: of its transfer); NaN where it was not reached.
        ends: the same for the ends.
        blocked: ``{rank: transfer}`` for ranks that wait for ever; empty when all came to their end.
        queues: what is left in every lane's queues, by (lane, rank).
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
        lanes: which channels share an in-order lane.
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
        self.queues: dict[tuple[int, int], deque[Transfer]] = {}
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
        return Outcome(self.starts, self.ends, self.blocked, self.queues)

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
        else:
            self._enqueue(transfer)

    def _release(self, transfer: Transfer) -> None:
        """Let a held receive into its lane, after those of its channel that were posted before it."""
        while not transfer.queued:
            first = self.held[transfer.channel].popleft()
            first.queued = True
            self._enqueue(first)

    def _enqueue(self, transfer: Transfer) -> None:
        lane = self.lane_of[transfer.channel]
        self.queues.setdefault((lane, transfer.rank), deque()).append(transfer)
        self._match(lane, transfer.rank)

    def _match(self, lane: int, rank: int) -> None:
        """Complete what now stands at both heads; each completion may bring up the next, at either end."""
        pending = [rank]
        while pending:
            end = pending.pop()
            queue = self.queues.get((lane, end))
            if not queue:
                continue
            head = queue[0]
            peer = self.peer(head)
            other = self.queues.get((lane, peer))
            if not other or other[0].channel != head.channel or other[0].sends == head.sends:
                continue
            mate = other[0]
            queue.popleft()
            other.popleft()
            self._complete(lane, *((head, mate) if head.sends else (mate, head)))
            pending += [end, peer]

    def peer(self, transfer: Transfer) -> int:
        """The rank at the other end of a transfer."""
        channel = self.program.channels[transfer.channel]
        return channel.destination if transfer.sends else channel.source

    def _complete(self, lane: int, send: Transfer, receive: Transfer) -> None:
        ends = ((lane, send.rank), (lane, receive.rank))
        start = max(send.posted, receive.posted, *(self.lane_free.get(end, 0.0) for end in ends))
        stage = self.rows[receive.rank][receive.position][1]
        done = start + self.transfer_seconds(send.channel, stage, NONE)
        for end in ends:
            self.lane_free[end] = done
        send.done = receive.done = done
        self.starts[send.rank][send.position], self.ends[send.rank][send.position] = start, done
        for transfer in (send, receive):
            if self.blocked.get(transfer.rank) is transfer:
                del self.blocked[transfer.rank]
                self.woken.append(transfer.rank)
