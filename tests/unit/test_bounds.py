"""Lower bounds: never beaten by what is simulated, and met where that is possible."""

from collections import Counter
from dataclasses import replace
from functools import cache
from math import isclose
from time import process_time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastpipe import CostModel, Placement, Schedule, formulas, list_schedules, make_schedule, simulate
from fastpipe.bounds import MEASURES, any_placement_bounds, best, bounds
from tests.unit.planning import random_schedules

FAMILIES = {family.name: family for family in list_schedules()}
SECONDS = st.sampled_from([0.1, 0.5, 1.0, 2.0, 3.0])


@cache
def made(name, p, m, stages=None, memory=None):
    """The schedule, or None where the family refuses the numbers."""
    given = {"stages_per_rank": stages, "memory": memory}
    options = {key: value for key, value in given.items() if key in FAMILIES[name].options and value is not None}
    try:
        return make_schedule(name, num_ranks=p, num_microbatches=m, **options)
    except ValueError:
        return None


@st.composite
def schedules(draw):
    name = draw(st.sampled_from(sorted(FAMILIES)))
    p, m = draw(st.integers(1, 6)), draw(st.integers(1, 13))
    even = 2 if name == "wave_zb" else 1
    found = made(name, p, m, even * draw(st.integers(1, 3)), draw(st.sampled_from([0.4, 0.5, 0.75, 1.0])))
    return found or made("zb_h1", p, m)


@st.composite
def costs(draw, p, num_stages):
    """By stage or not, with links of their own or not, fused pairs and whole backwards that cost what they like."""
    stage = st.one_of(SECONDS, st.lists(SECONDS, min_size=num_stages, max_size=num_stages))
    names = ["forward", "backward_input", "backward_weight"]
    names += [name for name in ("overlapped", "backward") if draw(st.booleans())]
    values = {name: draw(stage) for name in names}
    links = {(a, b): draw(st.sampled_from([0.0, 0.2, 1.5])) for a in range(p) for b in range(p)}
    values["comm"] = draw(st.sampled_from([0.0, 0.1, links]))
    if draw(st.booleans()):
        values |= {"bandwidth": 2.0, "activation_bytes": draw(stage)}
    values["recompute"] = draw(st.sampled_from([0.0, 0.0, 0.5, 1.0]))
    return CostModel(**values)


def all_bounds(schedule, cost, measure):
    """Every bound that there is for what is simulated."""
    found = [("schedule", bound) for bound in bounds(schedule, cost, measure=measure)]
    if schedule.forward_only:
        return found
    placement, peak = schedule.placement, max(simulate(schedule).peak_activations)
    numbers = {"num_microbatches": schedule.num_microbatches, "memory": peak, "measure": measure}
    found += [("placement", bound) for bound in bounds(placement, cost, **numbers)]
    if placement.num_routes == 1:
        numbers |= {"num_ranks": placement.num_ranks, "num_stages": placement.num_stages}
        even = len({len(stages) for stages in placement.stages_by_rank()}) == 1
        found += [("any", bound) for bound in any_placement_bounds(cost, even=even, **numbers)]
    return found


def check_bounds(data, schedule):
    """Under costs that are drawn, by every measure."""
    cost = data.draw(costs(schedule.num_ranks, schedule.num_stages))
    found = simulate(schedule, cost)
    for measure in MEASURES:
        seconds = getattr(found, measure)
        for where, bound in all_bounds(schedule, cost, measure):
            assert bound.seconds <= seconds * (1 + 1e-9), (where, measure, bound, schedule)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_nothing_beats_the_bounds(data):
    check_bounds(data, data.draw(schedules()))


@pytest.mark.filterwarnings("ignore:.*come in another order")
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_nothing_beats_the_bounds_of_whole_and_split_backwards_mixed(data):
    """A schedule where some backwards are B and others are I and W, in any order that can run."""
    check_bounds(data, data.draw(random_schedules()))


def test_a_whole_backward_that_comes_last_leaves_no_weights_for_later():
    orders = [["0F0", "0B0"], ["1F0", "1I0", "1W0"]]
    mixed = Schedule.from_actions("mixed", Placement.loop(2), 1, orders)
    assert of("drain", bounds(mixed)) == simulate(mixed).makespan == 5
    # where the last stages' backwards are whole, what stage 0 leaves for later counts as before
    orders = [["0F0", "0I0", "0W0"], ["1F0", "1B0"]]
    mixed = Schedule.from_actions("mixed", Placement.loop(2), 1, orders)
    assert of("drain", bounds(mixed)) == simulate(mixed).makespan == 6


def test_every_bound_is_met_by_some_schedule():
    """So none of them is idle, and a bound that were too high by a little would be found out above."""
    met = Counter()
    for name in FAMILIES:
        for p, m, memory in ((1, 2, 1.0), (3, 1, 1.0), (2, 4, 0.5), (4, 8, 1.0)):
            schedule = made(name, p, m, memory=memory)
            if schedule is None or schedule.forward_only:
                continue
            for cost in (CostModel(), CostModel(1, 1, 0.1), CostModel(comm=3.0), CostModel(1, 1, 8)):
                found = simulate(schedule, cost)
                for measure in MEASURES:
                    for where, bound in all_bounds(schedule, cost, measure):
                        met[where, measure, bound.name] += isclose(bound.seconds, getattr(found, measure))
    assert [key for key, count in met.items() if count == 0] == []
    assert len(met) >= 25


# --- against what is known --------------------------------------------------------------------------------------------


def of(name, found):
    return next(bound.seconds for bound in found if bound.name == name)


@pytest.mark.parametrize("measure", MEASURES)
@pytest.mark.parametrize("v", [2, 4, 6])
@pytest.mark.parametrize("p", [1, 2, 5, 8])
def test_closed_form_of_the_wave(p, v, measure):
    for k in range(v, p * v + 1):
        m = p + 3
        found = best(bounds(Placement.wave(p, v), num_microbatches=m, memory=k, measure=measure)).seconds
        closed = 3 * m * v + formulas.wave_bubble_bound(k, num_ranks=p, stages_per_rank=v, measure=measure)
        held = of("activation time", bounds(Placement.wave(p, v), num_microbatches=m, memory=k, measure=measure))
        assert found == pytest.approx(max(closed, held))


def test_closed_form_of_one_stage_a_rank():
    cost = {"forward": 2.0, "backward_input": 3.0, "backward_weight": 1.5, "comm": 0.25}
    for p in (1, 2, 4):
        for k in range(1, 2 * p):
            closed = formulas.single_stage_bound(num_ranks=p, num_microbatches=3 * p, live=k, **cost)
            found = bounds(Placement.loop(p), CostModel(**cost), num_microbatches=3 * p, memory=k, measure="span")
            assert max(of("memory", found), of("warm-up", found)) == pytest.approx(closed)


def test_closed_form_for_any_placement():
    for kappa in (0.25, 0.5, 1.0):
        numbers = {"num_ranks": 4, "num_stages": 8, "num_microbatches": 16, "memory": 8 * kappa}
        found = any_placement_bounds(CostModel(0.5, 0.5, 0.5), **numbers)
        assert of("warm-up", found) == 48 + formulas.memory_bubble_bound(kappa, num_ranks=4)


def test_less_than_a_third_of_the_memory_slows_every_microbatch():
    """arXiv 2405.15362: (F + I) / 2(F + I + W) of 1F1B's memory for full throughput; with less, more by microbatch."""
    assert formulas.full_throughput_memory() == pytest.approx(1 / 3)
    growth = {}
    for kappa in (0.2, 0.25, 1 / 3, 0.5):
        numbers = {"num_ranks": 60, "num_stages": 240, "memory": 240 * kappa}  # whole ones at every kappa
        ends = [best(any_placement_bounds(num_microbatches=m, **numbers)).seconds for m in (100_000, 200_000)]
        growth[kappa] = (ends[1] - ends[0]) / 100_000 / 12
    assert growth == pytest.approx({0.2: 1 / 0.6, 0.25: 1 / 0.75, 1 / 3: 1, 0.5: 1}, rel=0.02)


def test_ramp_is_of_the_rank_that_starts_late_not_of_the_busiest():
    """Fused pairs that save time make early ranks work longer; work and ramp are of the same rank."""
    cost = CostModel(2, 0.5, 0.5, overlapped=2.4)
    schedule = made("1f1b_overlap", 8, 24)
    found = simulate(schedule, cost)
    assert found.makespan == pytest.approx(79.2)
    assert max(found.busy) + 7 * 2 > 79.2
    assert of("ramp", bounds(schedule, cost)) <= 79.2


def test_plain_schedules_are_optimal_among_their_own():
    """GPipe and 1F1B: no order with one stage per rank and whole backwards is shorter, whatever the memory."""
    for name in ("gpipe", "1f1b"):
        schedule = made(name, 4, 8)
        assert best(bounds(schedule)).seconds == simulate(schedule).makespan
        assert best(bounds(schedule)).name == "drain"


def test_memory_in_bytes_counts_as_activations_do():
    cost = CostModel(2, 3, 1, comm=0.5, stage_bytes=7.0)
    numbers = {"num_microbatches": 12, "measure": "makespan"}
    counted = bounds(Placement.wave(4, 4), cost, memory=9, **numbers)
    assert bounds(Placement.wave(4, 4), cost, memory=9.5, **numbers) == counted
    assert bounds(Placement.wave(4, 4), cost, memory=69.9, in_bytes=True, **numbers) == counted
    uneven = replace(cost, stage_bytes=[7.0] * 15 + [7.0001])
    for bound, same in zip(
        bounds(Placement.wave(4, 4), uneven, memory=63, in_bytes=True, **numbers), counted, strict=True
    ):
        if bound.name != "activation time":  # by number it knows the ramps as well
            assert bound.seconds == pytest.approx(same.seconds, rel=1e-3)
        assert bound.seconds <= same.seconds


@pytest.mark.parametrize("name", ["1f1b", "zb_h1", "dualpipev", "interleaved_1f1b"])
@pytest.mark.parametrize("recompute", [0.5, 1.0])
def test_recomputed_activations_take_what_is_kept_of_them(name, recompute):
    schedule = made(name, 4, 8)
    kept = CostModel(comm=0.1, stage_bytes=10.0, activation_bytes=2.0, recompute=recompute, kept_bytes=3.0)
    for cost in (kept, replace(kept, kept_bytes=None)):
        timeline = simulate(schedule, cost)
        numbers = {"num_microbatches": 8, "memory": timeline.peak_bytes, "in_bytes": True}
        assert best(bounds(schedule.placement, cost, **numbers)).seconds <= timeline.makespan
    # by what is held during a backward, less would seem to fit, and more be known than is true
    wrong = replace(kept, backward_input=1 + recompute, recompute=0, kept_bytes=None)
    tight = {"num_microbatches": 8, "memory": 12.0, "in_bytes": True}
    assert (
        best(bounds(Placement.loop(4), wrong, **tight)).seconds > best(bounds(Placement.loop(4), kept, **tight)).seconds
    )


def test_memory_by_rank():
    cost = CostModel()
    same = bounds(Placement.wave(4, 2), cost, num_microbatches=9, memory=[5] * 4)
    assert same == bounds(Placement.wave(4, 2), cost, num_microbatches=9, memory=5)
    first = bounds(Placement.wave(4, 2), cost, num_microbatches=9, memory=[5, 8, 8, 8])
    assert of("memory", first) < of("memory", same)


def test_without_fused_pairs_more_is_known():
    cost = CostModel(overlapped=2.0)
    fused = best(bounds(Placement.v(4), cost, num_microbatches=9)).seconds
    plain = best(bounds(Placement.v(4), cost, num_microbatches=9, fused=False)).seconds
    assert plain == best(bounds(Placement.v(4), num_microbatches=9)).seconds
    assert fused < plain


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: bounds(Placement.v(4)), "num_microbatches = None"),
        (lambda: bounds(Placement.v(4), num_microbatches=4, memory=0), "memory = 0"),
        (lambda: bounds(Placement.v(4), num_microbatches=4, memory=[1, 2]), "give one number above 0, or 4"),
        (lambda: bounds(Placement.v(4), num_microbatches=4, measure="time"), "measure = 'time'"),
        (lambda: bounds(Placement.v(4), num_microbatches=4, memory=9, in_bytes=True), "stage_bytes"),
        (
            lambda: bounds(Placement.loop(2), num_microbatches=4, memory=0.5),
            "memory = 0.5: less than one .*at least 1$",
        ),
        (lambda: bounds(Placement.v(2), num_microbatches=4, memory=[2, 0.9]), "memory = 0.9: less than one activation"),
        (
            lambda: bounds(
                Placement.loop(2), CostModel(stage_bytes=[50, 100]), num_microbatches=4, memory=60, in_bytes=True
            ),
            "memory = 60.0: less than one activation of stage 1; give at least 100",
        ),
        (lambda: any_placement_bounds(num_ranks=2, num_stages=2, num_microbatches=4, memory=0.5), "memory = 0.5: less"),
        (
            lambda: any_placement_bounds(
                CostModel(stage_bytes=9), num_ranks=2, num_stages=2, num_microbatches=4, memory=8, in_bytes=True
            ),
            "memory = 8.0: less than one activation of stage 0; give at least 9",
        ),
        (lambda: bounds(Placement.v(4), num_microbatches=4, memory="x"), "memory = 'x': give one number above 0, or 4"),
        (lambda: bounds(Placement.v(4), num_microbatches=4, memory=[1, 2, 3, "4"]), "give one number above 0, or 4"),
        (lambda: bounds(Placement.v(4), num_microbatches=4, memory=float("nan")), "memory = nan: give one number"),
        (
            lambda: any_placement_bounds(num_ranks=2, num_stages=2, num_microbatches=4, memory=True),
            "memory = True: give one number",
        ),
        (lambda: bounds(made("1f1b", 2, 2), memory=3), "a schedule has its own"),
        (lambda: bounds(made("1f1b", 2, 2), CostModel([1, 2, 3])), "forward has 3 values for 2 stages"),
        (lambda: any_placement_bounds(num_ranks=3, num_stages=2, num_microbatches=1), "num_stages = 2"),
        (lambda: any_placement_bounds(num_ranks=2, num_stages=3, num_microbatches=1, even=True), "even: 3 stages"),
        (lambda: formulas.wave_bubble_bound(4, num_ranks=2, stages_per_rank=3), "stages_per_rank = 3"),
        (lambda: formulas.wave_bubble_bound(4, num_ranks=2, stages_per_rank=2, measure="x"), "measure = 'x'"),
    ],
)
def test_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: bounds(None, num_microbatches=2), "work: expected a Schedule or a Placement, found NoneType"),
        (lambda: bounds(Placement.v(2), "x", num_microbatches=2), "cost: expected a CostModel, found str"),
        (lambda: best([3]), r"found = \[3\]: give what bounds"),
        (
            lambda: any_placement_bounds("x", num_ranks=2, num_stages=2, num_microbatches=4),
            "cost: expected a CostModel, found str",
        ),
    ],
)
def test_other_types_are_refused_by_name(call, message):
    with pytest.raises(TypeError, match=message):
        call()


def test_one_activation_is_enough_memory():
    """The least that is not refused, also where it was computed and is a last bit below."""
    for memory in (1, 1 - 1e-12, np.float32(1)):
        assert best(bounds(Placement.loop(2), num_microbatches=4, memory=memory)).seconds == 20
        found = any_placement_bounds(num_ranks=2, num_stages=2, num_microbatches=4, memory=memory)
        assert 0 < best(found).seconds <= 20


def test_the_time_is_proportional_to_the_ranks():
    def seconds(num_ranks):
        placement, begin = Placement.loop(num_ranks), process_time()
        bounds(placement, num_microbatches=4, memory=2)
        return process_time() - begin

    assert seconds(20_000) < 80 * max(seconds(1000), 0.05)
