import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import fastpipe
from fastpipe import Channel, ChannelKind, CostModel, Op, Timeline, simulate
from tests.unit.planning import hand

DOWN = Channel(0, 1, ChannelKind.ACTIVATION)
UP = Channel(1, 0, ChannelKind.GRADIENT)


def test_seconds_of_every_kind() -> None:
    cost = CostModel(forward=(1, 2), backward_input=3, backward_weight=(4, 5))
    found = [cost.compute_seconds(op, 1) for op in (Op.F, Op.I, Op.W, Op.B, Op.UNSHARD)]
    assert found == [2, 3, 5, 8, 0]
    assert cost.compute_seconds(Op.OVERLAP_F_B, 1, 0) == 2 + 7
    given = CostModel(backward=1.5, overlapped=(1.75, 9))
    assert given.compute_seconds(Op.B, 0) == 1.5 and given.compute_seconds(Op.OVERLAP_F_B, 0, 1) == 1.75
    assert cost.per_stage("backward", 2).tolist() == [7, 8]
    assert cost.per_stage("forward", 2).tolist() == [1, 2]


def test_what_is_recomputed_takes_time_in_the_backward() -> None:
    cost = CostModel(forward=(4, 2), backward_input=3, backward_weight=(1, 5), recompute=(0.5, 0))
    assert [cost.compute_seconds(op, 0) for op in (Op.F, Op.I, Op.W, Op.B)] == [4, 3 + 2, 1, 3 + 2 + 1]
    assert cost.compute_seconds(Op.OVERLAP_F_B, 1, 0) == 2 + 6
    assert cost.per_stage("backward_input", 2).tolist() == [5, 3] and cost.per_stage("backward", 2).tolist() == [6, 8]
    given = CostModel(forward=4, backward=2.5, overlapped=7, recompute=1)
    assert given.compute_seconds(Op.B, 0) == 6.5
    assert given.compute_seconds(Op.OVERLAP_F_B, 0, 1) == 7


def test_what_is_kept_for_a_recompute() -> None:
    stages = {"stage_bytes": (100, 80, 60), "activation_bytes": (8, 16, 4)}
    assert CostModel(**stages).per_stage("kept_bytes", 3).tolist() == [100, 80, 60]
    assert CostModel(**stages, recompute=1).per_stage("kept_bytes", 3).tolist() == [0, 0, 0]
    assert CostModel(**stages, recompute=(0, 0.5, 1)).per_stage("kept_bytes", 3).tolist() == [100, 40, 0]
    assert CostModel(**stages, recompute=1, kept_bytes=70).per_stage("kept_bytes", 3).tolist() == [70, 70, 60]


def test_seconds_of_a_transfer() -> None:
    cost = CostModel(comm=0.5, bandwidth=10, activation_bytes=(20, 40))
    assert cost.transfer_seconds(DOWN, 1) == 0.5 + 2
    assert cost.transfer_seconds(UP, 0) == 0.5 + 2
    assert cost.transfer_seconds(UP, 1) == 0.5 + 4
    assert cost.transfer_seconds(Channel(1, 1, ChannelKind.ACTIVATION), 1) == 0
    assert CostModel(comm=0.5, activation_bytes=1e12).transfer_seconds(DOWN, 1) == 0.5


def test_links() -> None:
    cost = CostModel(comm={(0, 1): 2.0}, bandwidth={(1, 0): 4.0})
    assert cost.link(0, 1) == (2.0, math.inf)
    assert cost.link(1, 0) == (0.0, 4.0)


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"forward": []}, "forward is empty: give a number, or a sequence"),
        ({"forward": -1}, "forward = -1: give numbers from 0 to"),
        ({"forward": math.nan}, "forward = nan"),
        ({"forward": math.inf}, "forward = inf"),
        ({"forward": 1e101}, "forward = 1e.101: give numbers from 0 to"),
        ({"bandwidth": 1e-101}, "bandwidth = 1e-101: give bytes per second"),
        ({"forward": "1"}, "forward = '1'"),
        ({"forward": True}, "forward = True"),
        ({"backward_input": [1, -2]}, "backward_input = -2"),
        ({"recompute": (0.5, 1.5)}, "recompute = 1.5: give the part of a forward"),
        ({"recompute": -0.5}, "recompute = -0.5"),
        ({"kept_bytes": -1}, "kept_bytes = -1"),
        ({"bandwidth": 0}, "bandwidth = 0: give bytes per second"),
        ({"bandwidth": {(0, 1): 0}}, "bandwidth = 0"),
        ({"comm": [1, 2]}, r"comm: give a number, or one for each link as \{\(source, destination\): number\}"),
        ({"comm": {0: 1.0}}, "comm: 0 is no link"),
        ({"forward": {(0, 1): 1.0}}, "forward: give a number, or a sequence with one for each stage"),
    ],
)
def test_what_is_no_cost(attributes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CostModel(**attributes)


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda cost: cost.per_stage("nonsense", 2), "name = 'nonsense': use one of forward, backward_input"),
        (lambda cost: cost.per_stage("comm", 2), "name = 'comm': use one of forward"),
        (lambda cost: cost.per_stage("overlapped", 2), "name = 'overlapped': it was not given"),
        (lambda cost: cost.per_stage("forward", "2"), "num_stages = '2'"),
        (lambda cost: cost.compute_seconds(Op.OVERLAP_F_B, 0), "pair_stage = -1: give the stage of the pair's"),
    ],
)
def test_what_is_not_asked(ask: Callable[[CostModel], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ask(CostModel())


def test_sequences_are_kept_as_tuples() -> None:
    costs = [1.0, 2.0]
    cost = CostModel(forward=costs, backward_input=np.array([1.0, 2.0]))
    costs[0] = 7
    assert CostModel.from_json(CostModel(forward=np.array([1, 2]), comm=np.float32(0.5)).to_json()).forward == (1, 2)
    assert cost.forward == cost.backward_input == (1.0, 2.0)
    assert hash(cost) == hash(CostModel(forward=(1.0, 2.0), backward_input=(1.0, 2.0)))
    assert hash(CostModel(comm={(0, 1): 1.0})) == hash(CostModel(comm={(0, 1): 1.0}))


@pytest.mark.parametrize(
    "cost",
    [
        CostModel(),
        CostModel(forward=(1.5, 2), backward=3, overlapped=(1, 2), activation_bytes=7, stage_bytes=(1, 2)),
        CostModel(comm={(0, 1): 0.5, (1, 0): 1.0}, bandwidth={(0, 1): 1e9}),
        CostModel(comm=1e-5, bandwidth=1e10),
        CostModel(recompute=(0.25, 1), kept_bytes=(3, 4)),
    ],
)
def test_json_both_ways(cost: CostModel, tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    text = cost.to_json(path)
    assert path.read_text() == text
    assert CostModel.from_json(path) == CostModel.from_json(text) == cost


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{\n", "costs: no JSON"),
        ("3\n", "costs: give an object"),
        ('{"forwards": 1}\n', "costs: there is no 'forwards'; there are forward, backward_input"),
        ('{"forward": null}\n', "costs: forward is or has a null: give numbers, or leave forward out"),
        ('{"comm": {"0->1": null}}\n', "comm is or has a null"),
        ('{"overlapped": [1, null]}\n', "overlapped is or has a null"),
        ('{"forward": "1"}\n', "forward = '1'"),
        ('{"comm": {"0-1": 1}}\n', "comm: '0-1' is no link; write 0->1"),
        ('{"forward": {"0->1": 1}}\n', "forward: give a number, or a sequence"),
        ('{"comm": [1]}\n', "comm: give a number, or one for each link"),
        ('{"forward": 1, "forward": 2}\n', "costs: 'forward' is there twice"),
        ('{"comm": {"0->1": 1, "00->1": 2}}\n', "comm: the link '00->1' is there twice"),
    ],
)
def test_json_is_strict(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CostModel.from_json(text)


def test_from_timeline_finds_what_was_put_in() -> None:
    cost = CostModel(forward=(1, 2, 3, 4), backward_input=(2, 2, 3, 3), backward_weight=1, backward=5, comm=0.25)
    schedule = fastpipe.make_schedule("dualpipev", num_ranks=2, num_microbatches=6)
    found = CostModel.from_timeline(simulate(schedule, cost))
    assert found.forward == cost.forward and found.backward_input == cost.backward_input
    # stage 0 has no B outside of a fused pair: it is taken for I + W
    assert found.backward_weight == (1, 1, 1, 1) and found.backward == (3, 5, 5, 5)
    assert found.overlapped is not None and found.comm == pytest.approx(0.25)
    again = simulate(schedule, found)
    assert again.makespan == pytest.approx(simulate(schedule, cost).makespan, rel=0.05)


def test_from_timeline_where_kinds_are_missing() -> None:
    full = CostModel.from_timeline(simulate(hand(["0F0 0B0"], [0], 1), CostModel(1, 3, 5)))
    assert (full.backward, full.backward_input, full.backward_weight) == ((8,), (4,), (4,))
    split = CostModel.from_timeline(simulate(hand(["0F0 0I0 0W0"], [0], 1), CostModel(1, 3, 5)))
    assert (split.backward, split.overlapped) == ((8,), None)


def test_a_send_that_waits_for_its_receiver_is_no_latency() -> None:
    timeline = simulate(hand(["0F0 0F1", "1F0 1F1"], [0, 1], 2), CostModel(forward=(1, 10)))
    measured = Timeline(timeline.program, timeline.starts, timeline.ends, measured=True)
    assert CostModel.from_timeline(measured).comm == 0
