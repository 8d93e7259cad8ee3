from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings

import fastpipe
from fastpipe import CostModel, ProgramError, Schedule, simulate
from fastpipe.dependencies import Play
from tests.unit.planning import hand, random_schedules, rebuilt, small_schedules

pytestmark = pytest.mark.filterwarnings("ignore:.*come in another order")

UNIT = CostModel(forward=1, backward_input=1, backward_weight=1, backward=1, overlapped=1)


@pytest.mark.parametrize(("p", "m"), [(1, 1), (2, 2), (4, 4), (4, 11), (8, 8)])
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_the_bubble_of_gpipe_and_1f1b_is_p_minus_1_forwards_and_backwards(name: str, p: int, m: int) -> None:
    # GPipe, arXiv 1811.06965 and Megatron, arXiv 2104.04473: (p - 1)(F + B)
    timeline = simulate(fastpipe.make_schedule(name, num_ranks=p, num_microbatches=m), CostModel(2, 3, 4))
    assert timeline.makespan == (m + p - 1) * 9
    assert timeline.busy == (m * 9,) * p
    assert timeline.bubble_fraction == pytest.approx((p - 1) / (m + p - 1))


@given(random_schedules())
@settings(max_examples=50, deadline=None)
def test_without_transfer_times_it_is_the_play_of_the_orders(schedule: Schedule) -> None:
    timeline = simulate(schedule, UNIT)
    played = Play([list(rank) for rank in schedule], schedule.placement, schedule.num_microbatches)
    for rank, starts in enumerate(played.starts):
        assert [span.start for span in timeline.compute_spans(rank)] == starts


@given(random_schedules())
@settings(max_examples=30, deadline=None)
def test_receiving_ahead_is_never_later(schedule: Schedule) -> None:
    cost = CostModel(comm=0.75)
    spans = [simulate(fastpipe.lower(schedule, recv_lookahead=n), cost).makespan for n in (0, 1, "all")]
    assert spans == sorted(spans, reverse=True)


@given(random_schedules())
@settings(max_examples=30, deadline=None)
def test_coalescing_is_never_faster_than_a_lane_for_each_channel(schedule: Schedule) -> None:
    assert simulate(schedule, lanes="coalesced").makespan >= simulate(schedule).makespan


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved_1f1b", "zbv", "dualpipe", "dualpipev"])
def test_coalescing_costs_nothing_where_all_takes_its_usual_time(name: str) -> None:
    schedule = fastpipe.make_schedule(name, num_ranks=4, num_microbatches=8)
    assert simulate(schedule, lanes="coalesced").makespan == simulate(schedule).makespan


def test_latency_and_bandwidth_by_link() -> None:
    schedule = hand(["0F0", "1F0", "2F0"], [0, 1, 2], 1)
    cost = CostModel(comm={(0, 1): 3.0, (1, 2): 1.0}, bandwidth={(0, 1): 10.0}, activation_bytes=(20.0, 50.0, 0.0))
    timeline = simulate(schedule, cost)
    assert [timeline.compute_spans(rank)[0].start for rank in range(3)] == [0.0, 1 + 3 + 2, 7 + 1]


def test_gradients_have_the_bytes_of_their_boundary() -> None:
    schedule = hand(["0F0 0B0", "1F0 1B0"], [0, 1], 1)
    timeline = simulate(schedule, CostModel(bandwidth=1.0, activation_bytes=(4.0, 100.0)))
    assert timeline.makespan == 1 + 4 + 1 + 2 + 4 + 2


def test_exposed_communication() -> None:
    timeline = simulate(hand(["0F0 0B0", "1F0 1B0"], [0, 1], 1), CostModel(comm=2.0))
    # each rank waits once for a transfer; rank 0 also at the end of its own send, by then over
    assert timeline.exposed_communication == (2.0, 2.0 + 2.0)
    assert simulate(hand(["0F0 0B0", "1F0 1B0"], [0, 1], 1)).exposed_communication == (0.0, 0.0)


def test_recomputation_takes_time_and_saves_memory() -> None:
    schedule = fastpipe.make_schedule("1f1b", num_ranks=4, num_microbatches=8)
    plain = CostModel(backward_input=1, backward_weight=1, stage_bytes=100, activation_bytes=10)
    full = replace(plain, recompute=1)
    before, after = simulate(schedule, plain), simulate(schedule, full)
    # B takes 3 seconds instead of 2, and 1F1B (8 + 3) of each of F and B
    assert (before.makespan, after.makespan) == (11 * 3, 11 * 4)
    # rank 1 holds three microbatches; of the two that are not in their backward, the inputs alone, which are in slots
    assert before.peak_bytes[1] - after.peak_bytes[1] == 2 * 100
    assert before.peak_activations == after.peak_activations


def test_bytes_of_a_recompute_from_action_to_action() -> None:
    cost = CostModel(stage_bytes=100, activation_bytes=0, recompute=1, kept_bytes=7)
    one = "0F0 0F1 {} 0F2 0I1 0W1 0I2 0W2"
    between = simulate(hand([one.format("0I0 0W0")], [0], 3), cost)
    assert between.peak_bytes == (100 + 7,)
    # between I and W everything is held
    waiting = simulate(hand(["0F0 0F1 0I0 0I1 0W0 0W1"], [0], 2), cost)
    assert waiting.peak_bytes == (200,)
    whole = simulate(hand(["0F0 0F1 0B0 0B1"], [0], 2), cost)
    assert whole.peak_bytes == (107,)
    assert simulate(hand(["0F0 0F1"], [0], 2), cost).peak_bytes == (100,)


def test_the_input_of_a_recompute_stays_where_it_is_handed_over() -> None:
    cost = CostModel(stage_bytes=(0, 50), activation_bytes=(8, 3), recompute=(0, 1))
    schedule = hand(["0F0 1F0 0F1 1F1 1B0 0B0 1B1 0B1"], [0, 0], 2)
    assert simulate(schedule, cost).peak_bytes == (2 * 8 + 50,)
    assert simulate(schedule, replace(cost, recompute=0)).peak_bytes == (100,)


def test_bytes_of_a_recompute_in_a_pair() -> None:
    cost = CostModel(stage_bytes=100, recompute=1, kept_bytes=7)
    schedule = fastpipe.make_schedule("1f1b_overlap", num_ranks=2, num_microbatches=6)
    assert any(action.kind is fastpipe.ActionKind.OVERLAP_F_B for rank in schedule for action in rank)
    plain = simulate(schedule, replace(cost, recompute=0, kept_bytes=None))
    assert simulate(schedule, cost).peak_bytes == tuple(
        100 + 7 * (count - 1) for count in (round(held / 100) for held in plain.peak_bytes)
    )


def test_peak_bytes() -> None:
    schedule = fastpipe.make_schedule("1f1b", num_ranks=2, num_microbatches=4)
    timeline = simulate(
        fastpipe.lower(schedule, recv_lookahead=0), CostModel(stage_bytes=(100, 10), activation_bytes=1)
    )
    # rank 0: two live activations and a gradient; rank 1: one live activation and what it was made of
    assert timeline.peak_bytes == (2 * 100 + 1, 10 + 1)
    local = simulate(hand(["0F0 1F0 1B0 0B0"], [0, 0], 1), CostModel(stage_bytes=(100, 10), activation_bytes=1))
    assert local.peak_bytes == (110,)
    stream = simulate(hand(["0F0 0F1", "1F0 1F1"], [0, 1], 2), CostModel(stage_bytes=7))
    assert stream.peak_bytes == (7, 7)


@pytest.mark.parametrize("schedule", small_schedules(), ids=repr)
def test_the_critical_path_adds_up_to_the_makespan(schedule: Schedule) -> None:
    cost = CostModel(forward=2.0, backward_input=3.0, backward_weight=1.5, comm=0.25)
    timeline = simulate(schedule, cost)
    path = timeline.critical_path()
    assert path[0].start == timeline.start and path[-1].end == timeline.start + timeline.makespan
    for before, after in zip(path, path[1:], strict=False):
        assert before.end == after.start
    assert [span.instruction for span in path] == [span.instruction for span in timeline.critical_path()]


def test_the_critical_path_of_two_ranks() -> None:
    timeline = simulate(hand(["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"], [0, 1], 2), CostModel(comm=0.5))
    path = [str(span.instruction.action or span.lane) for span in timeline.critical_path()]
    assert path == ["0F0", "activation 0->1", "1F0", "1B0", "1F1", "1B1", "gradient 1->0", "0B1"]


def test_the_critical_path_through_a_shared_lane() -> None:
    program = fastpipe.lower(hand(["0F0 0F1", "1F0 1F1"], [0, 1], 2), recv_lookahead="all")
    path = simulate(program, CostModel(comm=5.0), lanes="group").critical_path()
    assert [str(span.instruction.action or span.lane) for span in path] == [
        "0F0",
        "activation 0->1",
        "activation 0->1",
        "1F1",
    ]


def test_same_again() -> None:
    schedule = fastpipe.make_schedule("dualpipev", num_ranks=4, num_microbatches=10)
    a, b = (simulate(schedule, CostModel(1.1, 0.7, 0.3, comm=0.1)) for _ in range(2))
    assert all(np.array_equal(x, y) for x, y in zip((*a.starts, *a.ends), (*b.starts, *b.ends), strict=True))


def test_sharing_a_lane_costs_time() -> None:
    program = fastpipe.lower(fastpipe.make_schedule("gpipe", num_ranks=4, num_microbatches=6), recv_lookahead=0)
    directed, group = (simulate(program, CostModel(comm=0.5), lanes=lanes) for lanes in ("directed", "group"))
    assert group.makespan > directed.makespan


def test_a_program_that_cannot_end_is_refused() -> None:
    program = fastpipe.lower(fastpipe.make_schedule("dualpipev", num_ranks=4, num_microbatches=8))
    with pytest.raises(ProgramError, match="validate_program .*cycle"):
        simulate(program, lanes="pair")


def test_what_is_no_program_is_refused() -> None:
    program = fastpipe.lower(hand(["0F0 0B0", "1F0 1B0"], [0, 1], 1))
    unposted = rebuilt(program, 1, lambda rows: rows.pop(0))
    nowhere = rebuilt(program, 1, lambda rows: rows.__setitem__(0, rows[0]._replace(channel=9)))
    unknown = rebuilt(program, 1, lambda rows: rows.__setitem__(2, rows[2]._replace(stage=9)))
    for wrong in (unposted, nowhere, unknown):
        with pytest.raises(ProgramError, match="validate_program .*wrong"):
            simulate(wrong, CostModel(forward=(1, 1)))


def test_costs_for_another_number_of_stages() -> None:
    with pytest.raises(ValueError, match="forward has 2 values for 1 stage"):
        simulate(hand(["0F0"], [0], 1), CostModel(forward=(1, 2)))
