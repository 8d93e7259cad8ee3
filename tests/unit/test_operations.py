"""Coalesced operations under NCCL's own rule, played apart from the abstract machine.

Between two ranks NCCL moves an operation in rounds: the n-th tensor that it sends with the n-th that it receives, both
at once, and the next round when both are across. Operations of one communicator go one after the other.
"""

from collections import deque
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings

import fastpipe
from fastpipe import ChannelKind, Op, Program, ProgramError, Schedule
from fastpipe.machine import batches, turns
from fastpipe.validate_program import validate_program
from tests.unit.planning import hand, random_schedules, small_schedules

Tensor = tuple[int, int, int]
"""(channel, message, number of the tensor in the message)"""
Count = Callable[[ChannelKind], int]
"""How many tensors a message has."""


class Rank:
    """What one rank has begun."""

    def __init__(self, program: Program, rank: int, count: Count) -> None:
        self.instructions = program[rank]
        self.channels = program.channels
        self.count = count
        self.turns = turns(batches(program)[rank])
        self.position = 0
        self.messages: dict[tuple[Op, int], int] = {}
        self.waits_for: dict[tuple[Op, int], int] = {}
        self.done: set[int] = set()
        self.held: dict[int, dict[int, dict[Op, list[Tensor]]]] = {}
        self.stream: dict[int, deque[tuple[int, deque[list[Tensor | None]]]]] = {}

    def advance(self) -> bool:
        """Go on until a wait blocks; whether it got any further."""
        before = self.position
        while self.position < len(self.instructions):
            it = self.instructions[self.position]
            awaited = {Op.WAIT_SEND: Op.SEND, Op.WAIT_RECV: Op.POST_RECV}.get(it.op)
            if awaited is not None and self.waits_for[awaited, it.slot] not in self.done:
                break
            if it.op in (Op.SEND, Op.POST_RECV):
                self._post(it.op, it.channel, it.slot)
            self.position += 1
        return self.position > before

    def _post(self, op: Op, channel: int, slot: int) -> None:
        turn = self.turns[self.position]
        message = self.messages[op, channel] = self.messages.get((op, channel), -1) + 1
        self.waits_for[op, slot] = turn.operation
        tensors = [(channel, message, number) for number in range(self.count(self.channels[channel].kind))]
        peer = self.channels[channel].peer_of(self.instructions.rank)
        held = self.held.setdefault(peer, {})
        held.setdefault(turn.operation, {Op.SEND: [], Op.POST_RECV: []})[op] += tensors
        if turn.last:
            stream = self.stream.setdefault(peer, deque())
            for operation, parts in sorted(self.held.pop(peer).items()):
                stream.append((operation, deque(rounds(parts[Op.SEND], parts[Op.POST_RECV]))))

    def round(self, peer: int) -> list[Tensor | None] | None:
        """What moves now: a tensor to send and one to receive."""
        stream = self.stream.get(peer, deque())
        while stream:
            operation, left = stream[0]
            while left and left[0] == [None, None]:
                left.popleft()
            if left:
                return left[0]
            self.done.add(operation)
            stream.popleft()
        return None


def rounds(sends: list[Tensor], receives: list[Tensor]) -> Iterator[list[Tensor | None]]:
    """The n-th of either together."""
    for number in range(max(len(sends), len(receives))):
        yield [own[number] if number < len(own) else None for own in (sends, receives)]


def hangs(program: Program, count: Count) -> bool:
    """Play it to the end, or until nothing moves."""
    ranks = [Rank(program, rank, count) for rank in range(program.num_ranks)]
    pairs = {(channel.source, channel.destination) for channel in program.channels}
    moves = True
    while moves:
        moves = any([rank.advance() for rank in ranks])
        for one, other in pairs:
            source, destination = ranks[one].round(other), ranks[other].round(one)
            if source and destination and source[0] is not None and destination[1] is not None:
                assert source[0] == destination[1], "one tensor is received as another"
                source[0] = destination[1] = None
                moves = True
        for one, other in pairs:  # what is complete now lets a wait go on
            moves |= ranks[one].round(other) is None and ranks[one].advance()
            moves |= ranks[other].round(one) is None and ranks[other].advance()
    return any(rank.position < len(rank.instructions) for rank in ranks)


COUNTS: list[Count] = [lambda kind: 1, lambda kind: 3 - 2 * kind, lambda kind: 1 + 2 * kind]
"""One tensor a message; several activations a gradient; and the other way round."""


@pytest.mark.parametrize("count", COUNTS)
def test_no_operation_waits_for_its_own_rounds(count: Count) -> None:
    for schedule in small_schedules():
        assert not hangs(fastpipe.lower(schedule, coalesce=True), count), schedule


@given(random_schedules())
@settings(max_examples=30, deadline=None)
def test_so_it_is_with_any_order(schedule: Schedule) -> None:
    program = fastpipe.lower(schedule, coalesce=True)
    for count in COUNTS:
        assert not hangs(program, count)


def test_a_program_that_hangs_is_refused() -> None:
    """The rule can fail: receives that are posted ahead close cycles, and the proof knows."""
    program = fastpipe.lower(fastpipe.make_schedule("1f1b", num_ranks=4, num_microbatches=8))
    assert hangs(program, COUNTS[0])
    with pytest.raises(ProgramError, match="the program can hang"):
        validate_program(program, lanes="coalesced")


def test_an_operation_is_of_the_same_messages_at_both_ends() -> None:
    for schedule in small_schedules():
        program = fastpipe.lower(schedule, coalesce=True)
        ends: list[set[frozenset[tuple[int, int]]]] = [set(), set()]
        for rank, own in zip(program, batches(program), strict=True):
            number: dict[tuple[Op, int], int] = {}
            message = {}
            for position in sorted(turns(own)):
                it = rank[position]
                message[position] = (it.channel, number.setdefault((it.op, it.channel), 0))
                number[it.op, it.channel] += 1
            for operation in (operation for batch in own for operation in batch):
                channel = program.channels[rank[operation[0]].channel]
                ends[rank.rank < channel.peer_of(rank.rank)].add(frozenset(message[at] for at in operation))
        assert ends[0] == ends[1], schedule


def test_actions_that_take_no_time_stand_behind_what_is_exchanged() -> None:
    """Both ranks make a message at one time, and then gather weights."""
    orders = ["0F0 0F1 0F2 0F3 0UNSHARD 0B0 0B1 0B2 0B3", "1F0 1B0 1UNSHARD 1F1 1B1 1F2 1B2 1F3 1B3"]
    program = fastpipe.lower(hand(orders, [0, 1], 4), coalesce=True)
    assert not hangs(program, COUNTS[0])
    assert max(len(it) for own in batches(program) for batch in own for it in batch) == 2
