"""Programs where the streams of a rank share a hardware queue: the proof, against a machine with that rule."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fastpipe
from fastpipe import Channel, ChannelKind, Op, Placement, Program, ProgramError, Schedule, validate_program
from fastpipe.lower import lower
from fastpipe.machine import COALESCED, Machine
from fastpipe.shared_queue import check_one_queue, streams_share
from tests.unit.planning import forward_only, hand, random_schedules, small_schedules

QUEUES = [1, 2, 8, 32, None]
SIZES = [(2, 4), (4, 8)]


class OneQueue(Machine):
    """The abstract machine, with the rule applied to it: what is begun while the transfer before it in its stream is
    not done holds up the rank until it is."""

    def _advance(self, rank: int) -> None:
        rows = self.rows[rank]
        while self.position[rank] < len(rows):
            position = self.position[rank]
            op, *_, channel, _ = rows[position]
            last = len(rows)
            self.rows[rank] = rows[: position + 1]  # one instruction at a time
            super()._advance(rank)
            self.rows[rank] = rows[:last]
            if self.position[rank] == position:
                return
            queue = self.queues.get((self.lane_of[channel], rank), ()) if op in (Op.SEND, Op.POST_RECV) else ()
            if len(queue) > 1:
                self.blocked[rank] = queue[-2][-1]
                return


def hangs(program: Program, coalesced: bool) -> bool:
    known = OneQueue(program, COALESCED if coalesced else "directed").run()
    announced = OneQueue(program, late=True).run()
    return bool(known.blocked or announced.blocked)


def is_refused(program: Program, coalesced: bool, queues: int | None) -> bool:
    try:
        validate_program(program, lanes=COALESCED if coalesced else "directed", queues=queues)
    except ProgramError as error:
        assert "streams of a rank share a hardware queue, ranks wait in a cycle: rank" in str(error)
        return True
    return False


@pytest.mark.parametrize("lookahead", [0, 1, 2, "all", None], ids=str)
def test_every_schedule_is_proved_or_refused_as_the_machine_says(lookahead: int | str | None) -> None:
    refused = 0
    coalesced = lookahead is None
    for family in fastpipe.list_schedules():
        for num_ranks, num_microbatches in SIZES:
            schedule = fastpipe.make_schedule(family.name, num_ranks=num_ranks, num_microbatches=num_microbatches)
            program = lower(schedule, recv_lookahead=1 if lookahead is None else lookahead, coalesce=coalesced)
            verdict = hangs(program, coalesced)
            found = [is_refused(program, coalesced, queues) for queues in QUEUES]
            assert found == [verdict, verdict, verdict, False, False], schedule
            refused += verdict
    assert refused == {0: 6, 1: 6, 2: 16, "all": 40, None: 6}[lookahead]


@given(random_schedules(), st.sampled_from([0, 1, 2, "all", None]))
@settings(max_examples=60, deadline=None)
def test_so_it_is_with_any_order(schedule: Schedule, lookahead: int | str | None) -> None:
    coalesced = lookahead is None
    program = lower(schedule, recv_lookahead=1 if lookahead is None else lookahead, coalesce=coalesced)
    assert is_refused(program, coalesced, 1) == hangs(program, coalesced)


def test_what_is_posted_ahead_of_two_computations_holds_up_what_its_message_waits_for() -> None:
    """Rank 1 posts both receives; the second cannot begin before the first message, which waits for a gradient."""
    schedule = hand(["0F0 0B0 0F1 0B1", "1F0 1B0 1F1 1B1"], [0, 1], 2)
    check_one_queue(lower(schedule))
    with pytest.raises(ProgramError) as caught:
        check_one_queue(lower(schedule, recv_lookahead="all"))
    assert str(caught.value) == (
        "the program can hang, where the streams of a rank share a hardware queue, ranks wait in a cycle: rank 0 at "
        "position 1, POST_RECV   gradient of stage 0 microbatch 1, peer 1, channel 1 (gradient 1->0), slot 1 waits for "
        "rank 1 to come to position 5, SEND        gradient of stage 1 microbatch 0, peer 0, channel 1 (gradient "
        "1->0), send 0; rank 1 at position 1, POST_RECV   activation of stage 1 microbatch 1, peer 0, channel 0 "
        "(activation 0->1), slot 1 waits for rank 0 to come to position 3, SEND        activation of stage 0 "
        "microbatch 0, peer 1, channel 0 (activation 0->1), send 0"
    )


def test_a_rank_without_transfers_and_one_that_only_receives() -> None:
    for schedule in small_schedules():
        program = lower(schedule, recv_lookahead=0)
        assert is_refused(program, False, 1) == hangs(program, False), schedule
    check_one_queue(lower(forward_only(4, 64)))


def test_more_streams_than_there_are_queues_may_share_however_many_these_are() -> None:
    assert not streams_share(star(7), 32) and streams_share(star(8), 32)
    assert not streams_share(star(8), 33) and not streams_share(star(8), None)


def star(num_peers: int) -> Program:
    """Channels of rank 0 with so many others, four each."""
    kinds = list(ChannelKind)
    channels = [
        Channel(*ends, kind) for peer in range(1, num_peers + 1) for ends in ((0, peer), (peer, 0)) for kind in kinds
    ]
    nothing = tuple(np.empty((7, 0), dtype=np.int32) for _ in range(num_peers + 1))
    return Program("star", Placement.loop(num_peers + 1), 1, tuple(channels), nothing)


@pytest.mark.parametrize("queues", [0, -1, 1.5, "8", True])
def test_a_number_of_queues_that_is_none_is_refused(queues: object) -> None:
    program = lower(forward_only(2, 1))
    with pytest.raises(ValueError, match=r"queues = .*: give a whole number of at least 1"):
        validate_program(program, queues=queues)  # type: ignore[arg-type]


def test_lanes_that_no_streams_are_like_are_refused() -> None:
    program = lower(hand(["0F0 0B0", "1F0 1B0"], [0, 1], 1), recv_lookahead=0)
    with pytest.raises(ValueError, match="queues = 1: lanes must be 'directed' or 'coalesced'"):
        validate_program(program, lanes="pair", queues=1)
