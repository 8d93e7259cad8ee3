import math

import numpy as np
import pytest

import fastpipe
from fastpipe import Channel, ChannelKind, Instruction, Op, Placement, Program
from fastpipe.machine import Machine, batches, lane_numbers
from tests.unit.planning import hand, small_schedules

CHANNELS = [
    Channel(0, 1, ChannelKind.ACTIVATION),
    Channel(1, 0, ChannelKind.GRADIENT),
    Channel(1, 2, ChannelKind.ACTIVATION),
    Channel(0, 1, ChannelKind.GRADIENT),
]


def test_lanes() -> None:
    assert lane_numbers("directed", CHANNELS) == [0, 1, 2, 3]
    assert lane_numbers("pair", CHANNELS) == lane_numbers("coalesced", CHANNELS) == [0, 0, 1, 0]
    assert lane_numbers("group", CHANNELS) == [0, 0, 0, 0]
    assert lane_numbers([4, 4, 0, 1], CHANNELS) == [4, 4, 0, 1]


def test_a_run_to_the_end_leaves_nothing_behind() -> None:
    for schedule in small_schedules():
        outcome = Machine(fastpipe.lower(schedule)).run()
        assert outcome.blocked == {} and not any(outcome.queues.values())
        assert not any(np.isnan(times).any() for times in (*outcome.starts, *outcome.ends))


def test_a_transfer_starts_when_both_ends_have_posted_it() -> None:
    program = fastpipe.lower(hand(["0F0 0F1", "1F0 1F1"], [0, 1], 2), recv_lookahead=0)
    seconds = {0: 1.0, 1: 3.0}  # stage 1 is slow: the second receive is posted late
    outcome = Machine(program, "directed", lambda op, stage, pair: seconds[stage], lambda *_: 0.5).run()
    sends = [p for p, i in enumerate(program[0]) if i.op is Op.SEND]
    assert outcome.starts[0][sends].tolist() == [1.0, 4.5]
    assert outcome.ends[0][sends].tolist() == [1.5, 5.0]


def test_one_lane_carries_one_transfer_at_a_time() -> None:
    program = fastpipe.lower(hand(["0F0 0F1", "1F0 1F1"], [0, 1], 2), recv_lookahead="all")
    outcome = Machine(program, "directed", lambda op, stage, pair: 1.0, lambda *_: 5.0).run()
    sends = [p for p, i in enumerate(program[0]) if i.op is Op.SEND]
    assert outcome.starts[0][sends].tolist() == [1.0, 6.0]


def test_a_rank_that_waits_for_ever_is_named() -> None:
    program = fastpipe.lower(fastpipe.make_schedule("1f1b", num_ranks=2, num_microbatches=3))
    outcome = Machine(program, "pair").run()
    assert set(outcome.blocked) == {0, 1}
    assert all(transfer.done is None for transfer in outcome.blocked.values())
    assert math.isnan(outcome.ends[0][-1])


ACROSS = [Channel(0, 1, ChannelKind.ACTIVATION), Channel(1, 0, ChannelKind.ACTIVATION)]


def both_ways() -> Program:
    """Each of two ranks computes, sends the other what it has, receives as much, and computes with that."""
    rows = [
        [
            Instruction(Op.F, rank, rank),
            Instruction(Op.SEND, rank, rank, channel=rank, slot=0),
            Instruction(Op.POST_RECV, 2 + rank, 1 - rank, channel=1 - rank, slot=0),
            Instruction(Op.WAIT_RECV, 2 + rank, 1 - rank, channel=1 - rank, slot=0),
            Instruction(Op.F, 2 + rank, 1 - rank),
            Instruction(Op.WAIT_SEND, rank, rank, channel=rank, slot=0),
        ]
        for rank in range(2)
    ]
    columns = tuple(np.array(own, dtype=np.int32).T for own in rows)
    return Program("both ways", Placement.custom([0, 1, 0, 1]), 2, tuple(ACROSS), columns, True)


def test_what_is_begun_side_by_side_is_one_operation() -> None:
    program = both_ways()
    assert batches(program) == [[[[1, 2]]], [[[1, 2]]]]
    assert set(Machine(program, "pair").run().blocked) == {0, 1}, "each sends before it receives"
    seconds = {0: 1.0, 1: 4.0, 2: 1.0, 3: 1.0}
    costs = (lambda op, stage, pair: seconds[stage], lambda channel, *_: (0.5, 2.0)[channel])
    outcome = Machine(program, "coalesced", *costs).run()
    assert not outcome.blocked
    # both are under way at 4, when the later rank comes to them, and are done when the longer one is
    assert outcome.starts[0].tolist() == [0.0, 4.0, 1.0, 1.0, 6.0, 7.0]
    assert outcome.ends[1].tolist() == [4.0, 6.0, 4.0, 6.0, 7.0, 7.0]


def test_a_wait_or_an_action_ends_an_operation() -> None:
    program = fastpipe.lower(fastpipe.make_schedule("zbv", num_ranks=3, num_microbatches=7), coalesce=True)
    for rank, own in zip(program, batches(program), strict=True):
        found = [sorted(sum(batch, [])) for batch in own]
        assert sorted(sum(found, [])) == [p for p, it in enumerate(rank) if it.op in (Op.SEND, Op.POST_RECV)]
        for batch in found:
            between = {it.op for it in rank[batch[0] : batch[-1]]}
            assert between <= {Op.SEND, Op.POST_RECV, Op.FREE, Op.HAND_OVER}
            assert len({frozenset(rank.channels[rank[position].channel][:2]) for position in batch}) == 1


@pytest.mark.parametrize("lanes", ["directed", "pair", "group"])
def test_fewer_lanes_are_never_faster(lanes: str) -> None:
    program = fastpipe.lower(fastpipe.make_schedule("gpipe", num_ranks=4, num_microbatches=4), recv_lookahead=0)
    cost = fastpipe.CostModel(comm=0.5)
    assert fastpipe.simulate(program, cost, lanes=lanes).makespan >= fastpipe.simulate(program, cost).makespan
