import math

import numpy as np
import pytest

import fastpipe
from fastpipe import Channel, ChannelKind, Op
from fastpipe.machine import Machine, lane_numbers
from tests.unit.planning import hand, small_schedules

CHANNELS = [
    Channel(0, 1, ChannelKind.ACTIVATION),
    Channel(1, 0, ChannelKind.GRADIENT),
    Channel(1, 2, ChannelKind.ACTIVATION),
    Channel(0, 1, ChannelKind.GRADIENT),
]


def test_lanes() -> None:
    assert lane_numbers("directed", CHANNELS) == [0, 1, 2, 3]
    assert lane_numbers("pair", CHANNELS) == [0, 0, 1, 0]
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


@pytest.mark.parametrize("lanes", ["directed", "pair", "group"])
def test_fewer_lanes_are_never_faster(lanes: str) -> None:
    program = fastpipe.lower(fastpipe.make_schedule("gpipe", num_ranks=4, num_microbatches=4), recv_lookahead=0)
    cost = fastpipe.CostModel(comm=0.5)
    assert fastpipe.simulate(program, cost, lanes=lanes).makespan >= fastpipe.simulate(program, cost).makespan
