"""Lowering: from a schedule to a program, in small passes.

1. `_compute_actions` - every rank's compute, and where each stage's output and gradient go.
2. `_receive_positions` - where each receive is posted: ahead of its consumer, never out of the sender's order. Or, for
   lanes in which a send and a receive are one operation, `_positions_in_turn`.
3. `_send_waits` - where each send is waited for: as soon as a message from the receiver proves that it took it.
4. `_RankEmitter` - the instructions, with slots and sends numbered by lifetime.
"""

from __future__ import annotations

import bisect
import heapq
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from fastpipe import native_plan
from fastpipe.action import NONE, STAGE_ONLY_KINDS, Action, ActionKind
from fastpipe.checks import check_flags, is_whole
from fastpipe.dependencies import feeds
from fastpipe.program import Channel, ChannelKind, Columns, Instruction, Op, Program, columns_of
from fastpipe.schedule import Schedule

ALL = "all"
SENDS_UNDER_WAY = 2
"""How many sends of a forward-only program are under way on a rank with one stage: enough to hide one's latency."""
_BACKWARD = (ActionKind.B, ActionKind.I)
_USUAL_TIME = {ActionKind.F: 1, ActionKind.I: 1, ActionKind.W: 1, ActionKind.B: 2}


@dataclass(slots=True, eq=False)
class _Message:
    """What one compute action hands to another; over a channel, or within the rank."""

    channel: int
    stage: int
    """the consumer's stage"""
    microbatch: int
    producer: int
    """position among the source's compute actions"""
    producer_stage: int
    consumer: int = NONE
    """position among the destination's compute actions"""


@dataclass
class _Flow:
    """All messages of a schedule, by producer and consumer."""

    channels: dict[Channel, int] = field(default_factory=dict)
    made: dict[tuple[int, int], list[_Message]] = field(default_factory=lambda: defaultdict(list))
    taken: dict[tuple[int, int], list[_Message]] = field(default_factory=lambda: defaultdict(list))
    by_channel: dict[int, list[_Message]] = field(default_factory=lambda: defaultdict(list))


def lower(schedule: Schedule, *, recv_lookahead: int | str = 1, coalesce: bool = False) -> Program:
    """Turn a valid schedule into a program.

    Args:
        schedule: what to lower; it must be valid (`validate_schedule`). Sends and receives that it was loaded with
            are left aside: the program gets its own.
        recv_lookahead: how many compute actions before its consumer a receive is posted: 0 is just in time,
            ``"all"`` posts everything at the start of the step.
        coalesce: post receives when their messages are made instead, if all actions take their usual time: then the
            two ranks of a pair begin their transfers in one order, and those of one time side by side, as coalesced
            lanes need it. ``recv_lookahead`` says nothing then.

    Raises:
        ValueError: for a ``recv_lookahead`` that is neither a number of at least 0 nor ``"all"``.
    """
    if recv_lookahead != ALL and not is_whole(recv_lookahead):
        raise ValueError(f"recv_lookahead = {recv_lookahead!r}: give a whole number of at least 0, or 'all'")
    check_flags(coalesce=coalesce)
    schedule = schedule.without_transfers()
    if coalesce:
        return _lower(schedule)
    ahead = max(map(len, schedule), default=0) if recv_lookahead == ALL else int(recv_lookahead)
    lowered = native_plan.lower(schedule, ahead, SENDS_UNDER_WAY if _streams(schedule) else 0)
    if lowered is None:
        return _lower(schedule, ahead)
    channels = tuple(Channel(source, destination, ChannelKind(kind)) for source, destination, kind in lowered[0])
    return _program(schedule, channels, lowered[1])


def _program(schedule: Schedule, channels: tuple[Channel, ...], columns: Sequence[Columns]) -> Program:
    return Program(
        schedule.name,
        schedule.placement,
        schedule.num_microbatches,
        channels,
        tuple(columns),
        schedule.forward_only,
    )


def _lower(schedule: Schedule, ahead: int | None = None) -> Program:
    """The passes in Python: what csrc/plan does too (but for coalesced lanes), and what it is compared with."""
    orders = [list(rank) for rank in schedule]
    flow = _flow(schedule, orders)
    posts = _positions_in_turn(flow, orders) if ahead is None else _receive_positions(flow, ahead)
    waits = _bounded_waits(flow) if _streams(schedule) else _send_waits(flow)
    last_use = _last_uses(orders)
    channels = tuple(flow.channels)
    columns = []
    for rank, order in enumerate(orders):
        emitter = _RankEmitter(rank, channels, flow, posts[rank], waits[rank], last_use[rank])
        columns.append(columns_of(emitter.emit(order)))
    return _program(schedule, channels, columns)


def _flow(schedule: Schedule, orders: Sequence[Sequence[Action]]) -> _Flow:
    """Every message, in the order in which its source produces it."""
    flow = _Flow()
    placement, num_stages, num_microbatches = schedule.placement, schedule.num_stages, schedule.num_microbatches
    pending: dict[tuple[ChannelKind, int, int], _Message] = {}
    for rank, order in enumerate(orders):
        for position, action in enumerate(order):
            for part in action.parts:
                target = feeds(part.kind, part.stage, num_stages)
                if target == NONE:
                    continue
                kind = ChannelKind.of(part.kind)
                destination = placement.rank_of(target, placement.route_of(part.microbatch, num_microbatches))
                channel = flow.channels.setdefault(Channel(rank, destination, kind), len(flow.channels))
                message = _Message(channel, target, part.microbatch, position, part.stage)
                pending[kind, target, part.microbatch] = message
                flow.made[rank, position].append(message)
                flow.by_channel[channel].append(message)
    for rank, order in enumerate(orders):
        for position, action in enumerate(order):
            for part in action.parts:
                if part.kind is ActionKind.F or part.kind in _BACKWARD:
                    found = pending.get((ChannelKind.of(part.kind), part.stage, part.microbatch))
                    if found is not None:
                        found.consumer = position
                        flow.taken[rank, position].append(found)
    return flow


def _receive_positions(flow: _Flow, ahead: int) -> dict[int, dict[int, list[_Message]]]:
    """``[rank][position]``: the receives to post before that compute action.

    On each channel the posts follow the sender's order: a message that is wanted late but sent early is posted with
    the earliest of those behind it.
    """
    posts: dict[int, dict[int, list[_Message]]] = defaultdict(lambda: defaultdict(list))
    for channel, number in flow.channels.items():
        if channel.source == channel.destination:
            continue
        position = None
        planned: list[tuple[int, _Message]] = []
        for message in reversed(flow.by_channel[number]):
            wanted = max(0, message.consumer - ahead)
            position = wanted if position is None else min(position, wanted)
            planned.append((position, message))
        for at, message in reversed(planned):
            posts[channel.destination][at].append(message)
    return posts


def _positions_in_turn(flow: _Flow, orders: Sequence[Sequence[Action]]) -> dict[int, dict[int, list[_Message]]]:
    """``[rank][position]``: the receives to post before that compute action, of messages made while the last one ran.

    Times are those of `_usual_ends`. A rank sends at the ends of its actions; so both ranks of a pair have all that
    they exchange in the order of the times at which it is made, and what is made at one time side by side.
    """
    ends = _usual_ends(flow, orders)
    posts: dict[int, dict[int, list[_Message]]] = defaultdict(lambda: defaultdict(list))
    arriving: list[tuple[int, int, int, int, int, _Message]] = []
    for channel, number in flow.channels.items():
        for message in flow.by_channel[number] if channel.source != channel.destination else ():
            made = ends[channel.source][message.producer]
            turn = flow.made[channel.source, message.producer].index(message)
            position = bisect.bisect_left(ends[channel.destination], made)
            # what ends at that time may send, so behind it; but not behind actions that take no time: those of the
            # sender come after the message
            position += made in ends[channel.destination][position : position + 1]
            arriving.append((made, channel.source, turn, position, channel.destination, message))
    for *_, position, destination, message in sorted(arriving, key=lambda it: it[:3]):
        posts[destination][position].append(message)
    return posts


def _usual_ends(flow: _Flow, orders: Sequence[Sequence[Action]]) -> list[list[int]]:
    """``[rank][position]``: when each compute action ends where F, I and W take 1, B 2 and messages no time."""
    ends: list[list[int]] = [[] for _ in orders]
    sources = [channel.source for channel in flow.channels]
    moves = True
    while moves:
        moves = False
        for rank, order in enumerate(orders):
            while len(ends[rank]) < len(order):
                position = len(ends[rank])
                needed = [(sources[it.channel], it.producer) for it in flow.taken.get((rank, position), ())]
                if any(len(ends[source]) <= producer for source, producer in needed):
                    break
                start = max([ends[rank][-1] if position else 0, *(ends[source][at] for source, at in needed)])
                ends[rank].append(start + sum(_USUAL_TIME.get(part.kind, 0) for part in order[position].parts))
                moves = True
    return ends


def _streams(schedule: Schedule) -> bool:
    """Whether messages only ever go down a line of ranks, a stage each, so that waiting for one can close no cycle."""
    placement = schedule.placement
    return schedule.forward_only and placement.num_routes == 1 and placement.num_stages == placement.num_ranks


def _bounded_waits(flow: _Flow) -> dict[int, dict[int, list[_Message]]]:
    """``[rank][position]``: without a backward nothing ever proves a send complete, so wait for the last but one.

    The receiver waits for ranks behind it alone, and the sender for those ahead of it: no cycle.
    """
    waits: dict[int, dict[int, list[_Message]]] = defaultdict(lambda: defaultdict(list))
    for channel, number in flow.channels.items():
        messages = flow.by_channel[number]
        for message, later in zip(messages, messages[SENDS_UNDER_WAY:], strict=False):
            waits[channel.source][later.producer].append(message)
    return waits


def _send_waits(flow: _Flow) -> dict[int, dict[int, list[_Message]]]:
    """``[rank][position]``: the sends that are proven complete once that compute action has its inputs.

    Rank b took message n before the compute action c that consumes it. Any message that b made in c or later, and
    that has arrived here, proves it: waiting for the send then blocks nobody.
    """
    waits: dict[int, dict[int, list[_Message]]] = defaultdict(lambda: defaultdict(list))
    heard: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for channel, number in flow.channels.items():
        for message in flow.by_channel[number]:
            heard[channel.destination, channel.source].append((message.consumer, message.producer))
    for channel, number in flow.channels.items():
        if channel.source == channel.destination:
            continue
        news = sorted(heard[channel.source, channel.destination])
        outstanding: list[tuple[int, int]] = []
        messages = flow.by_channel[number]
        sent = 0
        for position, known in news:
            while sent < len(messages) and messages[sent].producer < position:
                heapq.heappush(outstanding, (messages[sent].consumer, sent))
                sent += 1
            while outstanding and outstanding[0][0] <= known:
                waits[channel.source][position].append(messages[heapq.heappop(outstanding)[1]])
    return waits


def _last_uses(orders: Sequence[Sequence[Action]]) -> list[dict[tuple[int, int], int]]:
    """``[rank][(stage, microbatch)]``: the last compute action that may read the pair's input or gradient."""
    uses: list[dict[tuple[int, int], int]] = []
    for order in orders:
        last: dict[tuple[int, int], int] = {}
        for position, action in enumerate(order):
            for part in action.parts:
                last[part.stage, part.microbatch] = position
        uses.append(last)
    return uses


class _Numbers:
    """Hands out the lowest number that is free, in pools: a pool never takes over another's number."""

    def __init__(self) -> None:
        self.free: dict[int, list[int]] = defaultdict(list)
        self.count = 0

    def take(self, pool: int) -> int:
        if self.free[pool]:
            return heapq.heappop(self.free[pool])
        self.count += 1
        return self.count - 1

    def give(self, pool: int, number: int) -> None:
        heapq.heappush(self.free[pool], number)


class _RankEmitter:
    """Writes one rank's instructions."""

    def __init__(
        self,
        rank: int,
        channels: Sequence[Channel],
        flow: _Flow,
        posts: dict[int, list[_Message]],
        waits: dict[int, list[_Message]],
        last_use: dict[tuple[int, int], int],
    ) -> None:
        self.rank = rank
        self.channels = channels
        self.flow = flow
        self.posts = posts
        self.waits = waits
        self.last_use = last_use
        self.slots = _Numbers()
        self.sends = _Numbers()
        # slots by channel: a slot's memory belongs to the channel that fills it
        self.slot_of: dict[_Message, int] = {}
        self.send_of: dict[_Message, int] = {}
        self.frees: dict[int, list[_Message]] = defaultdict(list)
        self.out: list[Instruction] = []

    def emit(self, order: Sequence[Action]) -> list[Instruction]:
        """All instructions, in order; every send is waited for at the end at the latest."""
        for position, action in enumerate(order):
            self._before(position)
            self._compute(action)
            self._after(position)
        for message, number in list(self.send_of.items()):
            self._wait_send(number, message)
        return self.out

    def _before(self, position: int) -> None:
        for message in self.posts.get(position, ()):
            self._move(Op.POST_RECV, message, self._take_slot(message))
        for message in self.flow.taken.get((self.rank, position), ()):
            if message not in self.slot_of:
                continue
            slot = self.slot_of[message]
            if not self._is_local(message):
                self._move(Op.WAIT_RECV, message, slot)
            self.frees[self.last_use[message.stage, message.microbatch]].append(message)
        for message in self.waits.get(position, ()):
            self._wait_send(self.send_of[message], message)

    def _compute(self, action: Action) -> None:
        stage_only = action.kind in STAGE_ONLY_KINDS
        microbatch = NONE if stage_only else action.microbatch
        op = Op(int(action.kind))
        self.out.append(Instruction(op, action.stage, microbatch, action.pair_stage, action.pair_microbatch))

    def _after(self, position: int) -> None:
        for message in self.flow.made.get((self.rank, position), ()):
            if self._is_local(message):
                self._move(Op.HAND_OVER, message, self._take_slot(message))
                continue
            number = self.sends.take(0)
            self.send_of[message] = number
            self._move(Op.SEND, message, number, message.producer_stage)
        for message in self.frees.pop(position, ()):
            slot = self.slot_of.pop(message)
            self.slots.give(message.channel, slot)
            self._move(Op.FREE, message, slot)

    def _is_local(self, message: _Message) -> bool:
        channel = self.channels[message.channel]
        return channel.source == channel.destination

    def _take_slot(self, message: _Message) -> int:
        slot = self.slots.take(message.channel)
        self.slot_of[message] = slot
        return slot

    def _wait_send(self, number: int, message: _Message) -> None:
        del self.send_of[message]
        self.sends.give(0, number)
        self._move(Op.WAIT_SEND, message, number, message.producer_stage)

    def _move(self, op: Op, message: _Message, number: int, stage: int | None = None) -> None:
        stage = message.stage if stage is None else stage
        self.out.append(Instruction(op, stage, message.microbatch, channel=message.channel, slot=number))
