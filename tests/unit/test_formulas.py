"""The closed forms against simulated orders: equal inside their range, refused outside; lower bounds never undercut."""

import re
from functools import cache

import pytest

from fastpipe import CostModel, formulas, list_schedules, lower, make_schedule, simulate
from fastpipe.theory.closed_forms import BUBBLES, PEAKS

COSTS = [(1, 1, 1), (1, 2, 2), (3, 1, 2), (4, 3, 2)]
BY_NAME = {family.name: family for family in list_schedules()}


NAN = float("nan")


@cache
def program(name, p, m, **options):
    return lower(make_schedule(name, num_ranks=p, num_microbatches=m, **options), recv_lookahead="all")


@cache
def timeline(name, p, m, costs=(1, 1, 1), comm=0.0, overlapped=None, **options):
    """Simulate with the costs of a rank's share of the model."""
    lowered = program(name, p, m, **options)
    v = lowered.num_stages // p
    forward, backward_input, backward_weight = (cost / v for cost in costs)
    cost = CostModel(
        forward, backward_input, backward_weight, comm, overlapped=None if overlapped is None else overlapped / v
    )
    return simulate(lowered, cost)


def expected(name, p, m, costs=(1, 1, 1), **more):
    names = ("forward", "backward_input", "backward_weight")
    return formulas.bubble(
        name, num_ranks=p, num_microbatches=m, **dict(zip(names, costs, strict=True)), as_="total", **more
    )


def stages(name):
    return [{"stages_per_rank": v} for v in (1, 2, 3)] if "stages_per_rank" in BY_NAME[name].options else [{}]


def in_range(name, measure, sizes, costs):
    """Every case of the formula's range among those given, with its total."""
    for p, m in sizes:
        for options in stages(name):
            for triple in costs:
                try:
                    yield p, m, options, triple, expected(name, p, m, triple, measure=measure, **options)
                except ValueError as error:
                    assert "holds for" in str(error)


@pytest.mark.parametrize(("name", "measure"), sorted(BUBBLES))
def test_simulation_gives_the_formula(name, measure):
    sizes = [(p, m) for p in (1, 2, 3, 4) for m in (p, p + 1, 2 * p, 2 * p + 1, 3 * p)]
    checked = 0
    for p, m, options, costs, total in in_range(name, measure, sizes, COSTS):
        found = getattr(timeline(name, p, m, costs, **options), measure)
        assert found == pytest.approx(total, abs=1e-9), (p, m, options, costs)
        checked += 1
    assert checked >= 3


@pytest.mark.parametrize("p", [5, 7, 8, 10])
@pytest.mark.parametrize("name", ["v_half", "v_min", "1f1b_v", "zbv", "zb_h2", "dualpipev"])
def test_formulas_of_the_v_hold_on_more_ranks(name, p):
    assert timeline(name, p, 2 * p).makespan == pytest.approx(expected(name, p, 2 * p), abs=1e-9)


@pytest.mark.parametrize(
    ("p", "idle"), [(2, 2), (4, 7.5), (6, 11), (8, 16.5), (16, 37.5)], ids=lambda value: str(value)
)
def test_1f1b_v_idles_as_measured(p, idle):
    """schedules.md, the table: in units of a rank's share."""
    assert timeline("1f1b_v", p, 2 * p, (2, 2, 2)).makespan - 12 * p == pytest.approx(2 * idle)


@pytest.mark.parametrize("overlapped", [2, 2.5, 3])
@pytest.mark.parametrize("name", ["1f1b_overlap", "interleaved_overlap", "dualpipe", "dualpipev"])
def test_fused_pairs_may_be_shorter(name, overlapped):
    for p, m in [(2, 4), (2, 6), (4, 8), (4, 12)]:
        for options in stages(name):
            found = timeline(name, p, m, overlapped=overlapped, **options)
            assert found.makespan == pytest.approx(expected(name, p, m, overlapped=overlapped, **options))
            fraction = formulas.bubble(name, num_ranks=p, num_microbatches=m, overlapped=overlapped, **options)
            assert found.bubble_fraction == pytest.approx(fraction, abs=1e-12)


@pytest.mark.parametrize("name", ["1f1b_overlap", "interleaved_overlap", "dualpipe", "dualpipev"])
def test_fused_pairs_shorter_than_a_part_have_no_closed_form(name):
    """With a pair shorter than the backwards of other ranks these hold it up, which no formula counts."""
    numbers = {"num_ranks": 8, "num_microbatches": 24, "overlapped": 0.9}
    for measure in ("makespan", "span"):
        assert "max(F, B) <= F&B <= F + B" in formulas.bubble_formula(name, measure).range
        with pytest.raises(ValueError, match=re.escape("max(F, B) <= F&B <= F + B")):
            formulas.bubble(name, measure=measure, **numbers)
    assert timeline(name, 8, 24, overlapped=0.9).bubble_fraction > 0


@pytest.mark.parametrize("costs", [(3, 0.5, 0.5), (0.5, 2, 1), (0.1, 0.2, 0.3)])
@pytest.mark.parametrize("name", ["1f1b_overlap", "interleaved_overlap"])
def test_fused_pairs_may_take_from_the_longer_part_to_the_sum(name, costs):
    longer = max(costs[0], costs[1] + costs[2])
    for overlapped in (longer, (longer + sum(costs)) / 2, None):
        for options in stages(name):
            found = timeline(name, 3, 9, costs, overlapped=overlapped, **options)
            assert found.makespan == pytest.approx(expected(name, 3, 9, costs, overlapped=overlapped, **options))


@pytest.mark.parametrize("p", [2, 4, 6])
def test_dualpipe_idles_as_its_repository_says(p):
    """README of deepseek-ai/DualPipe: (PP/2-1)(F&B+B-3W), and for the V (PP-1)(F&B+B-3W) of one stage."""
    for overlapped in (2.0, 3.0):
        two, vee = (timeline(name, p, 2 * p, overlapped=overlapped) for name in ("dualpipe", "dualpipev"))
        assert two.makespan - min(two.busy) == pytest.approx((p / 2 - 1) * (overlapped + 2 - 3))
        assert vee.makespan - min(vee.busy) == pytest.approx((p - 1) * (overlapped + 2 - 3) / 2)


@pytest.mark.parametrize(("name", "measure"), [("gpipe", "makespan"), ("zb_h1", "span"), ("zb_h2", "span")])
@pytest.mark.parametrize("comm", [0.25, 0.5, 1.0])
def test_formulas_with_transfers(name, measure, comm):
    checked = 0
    for p in (2, 3, 4):
        for m in (2 * p, 4 * p):
            for costs in [(1, 1, 1), (2, 2, 1), (2, 3, 2), (3, 2, 2), (1, 1, 0.5), (1, 1, 0)]:
                try:
                    total = expected(name, p, m, costs, comm=comm, measure=measure)
                except ValueError:
                    continue
                assert getattr(timeline(name, p, m, costs, comm), measure) == pytest.approx(total)
                checked += 1
    assert checked


@pytest.mark.parametrize("p", [2, 4, 8])
@pytest.mark.parametrize(("backward", "divisor"), [(2, 1.5), (1, 2)])
def test_chimera_idles_as_its_paper_says(p, backward, divisor):
    """Chimera, table 2, for a unit of as many microbatches as ranks."""
    found = timeline("chimera", p, p, (1, backward / 2, backward / 2))
    assert found.bubble_fraction == pytest.approx((p - 2) / (divisor * p + p - 2))


@pytest.mark.parametrize("waves", [1, 2, 3])
def test_simulation_gives_the_peak_of_every_number_of_waves(waves):
    for p in (1, 2, 4):
        peak = formulas.peak_activations("hanayo", num_ranks=p, num_microbatches=p, stages_per_rank=2 * waves)
        assert max(timeline("hanayo", p, p, waves=waves).peak_activations) == peak


@pytest.mark.parametrize("name", sorted(PEAKS))
def test_simulation_gives_the_peak(name):
    checked = 0
    for p in (1, 2, 3, 4):
        for m in (1, p, p + 1, 2 * p, 3 * p):
            for options in stages(name):
                try:
                    peak = formulas.peak_activations(name, num_ranks=p, num_microbatches=m, **options)
                except ValueError:
                    continue
                assert max(timeline(name, p, m, **options).peak_activations) == peak, (p, m, options)
                checked += 1
    assert checked >= 2


def test_1f1b_on_four_ranks():
    """(p-1)/(m+p-1) = 3/11; the form (p-1)/(2(m-1)+p) that is in circulation gives 1/6."""
    assert formulas.bubble("1f1b", num_ranks=4, num_microbatches=8) == pytest.approx(3 / 11)
    assert timeline("1f1b", 4, 8).bubble_fraction == pytest.approx(3 / 11)
    assert formulas.bubble("1f1b", num_ranks=4, num_microbatches=8, as_="seconds") == 9
    assert formulas.bubble("1f1b", num_ranks=4, num_microbatches=8, as_="total") == 33


def test_memory_ratios():
    numbers = {"num_ranks": 8, "num_microbatches": 32}
    assert formulas.memory_ratio("v_half", "1f1b", **numbers) == 5 / 8
    assert formulas.memory_ratio("v_min", "zb_h1", **numbers) == 4 / 8
    assert formulas.memory_ratio("interleaved_1f1b", "1f1b", stages_per_rank=4, **numbers) == 1 + 7 / 32
    assert formulas.memory_ratio("gpipe", "1f1b", **numbers) == 4


@pytest.mark.parametrize("name", sorted({name for name, measure in BUBBLES if measure == "makespan"} - {"chimera"}))
@pytest.mark.parametrize("fraction", [0.3, 0.1, 0.02])
def test_smallest_number_of_microbatches(name, fraction):
    m = formulas.smallest_num_microbatches(name, fraction, num_ranks=4)
    assert formulas.bubble(name, num_ranks=4, num_microbatches=m) <= fraction
    for fewer in range(max(1, m - 8), m):
        try:
            assert formulas.bubble(name, num_ranks=4, num_microbatches=fewer) > fraction
        except ValueError as error:
            assert "holds for" in str(error)


def test_smallest_number_of_microbatches_of_chimera():
    assert formulas.smallest_num_microbatches("chimera", 0.3, num_ranks=4, backward_input=0.5, backward_weight=0.5) == 4
    with pytest.raises(ValueError, match="m = p = 4"):
        formulas.smallest_num_microbatches("chimera", 0.1, num_ranks=4)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: formulas.bubble("zb_auto", num_ranks=4, num_microbatches=8), "no closed form of its bubble"),
        (lambda: formulas.bubble("1f1b", num_ranks=4, num_microbatches=8, comm=1), "holds for comm = 0"),
        (lambda: formulas.bubble("zbv", num_ranks=4, num_microbatches=7), "m >= 2p"),
        (lambda: formulas.bubble("zbv", num_ranks=4, num_microbatches=8, forward=2), "F = I = W"),
        (lambda: formulas.bubble("1f1b", num_ranks=0, num_microbatches=8), "num_ranks = 0"),
        (lambda: formulas.bubble("1f1b", num_ranks=4, num_microbatches=8, measure="time"), "measure = 'time'"),
        (lambda: formulas.bubble("1f1b", num_ranks=4, num_microbatches=8, as_="percent"), "as_ = 'percent'"),
        (lambda: formulas.bubble("zbv", num_ranks=4, num_microbatches=8, stages_per_rank=3), "stages_per_rank = 3"),
        (lambda: formulas.bubble("dualpipe", num_ranks=3, num_microbatches=8), "p and m even"),
        (lambda: formulas.peak_activations("forward_only", num_ranks=4, num_microbatches=8), "no closed form"),
        (lambda: formulas.peak_activations("dualpipev", num_ranks=4, num_microbatches=7), "m >= 2p"),
        (lambda: formulas.peak_activations("1f1b", num_ranks=4, num_microbatches=7, as_="x"), "as_ = 'x'"),
        (lambda: formulas.smallest_num_microbatches("1f1b", 1.5, num_ranks=4), "fraction = 1.5"),
        (
            lambda: formulas.peak_activations("hanayo", num_ranks=4, num_microbatches=4, stages_per_rank=3),
            "v twice the number of waves",
        ),
        (lambda: formulas.smallest_num_microbatches("1f1b", "x", num_ranks=4), "fraction = 'x'"),
        (lambda: formulas.smallest_num_microbatches("1f1b", 0.1, num_ranks=2.5), "num_ranks = 2.5"),
        (lambda: formulas.bubble("1f1b", num_ranks=4, num_microbatches=2.5), "num_microbatches = 2.5"),
        (lambda: formulas.bubble("1f1b", num_ranks="4", num_microbatches=8), "num_ranks = '4'"),
        (lambda: formulas.bubble("1f1b", num_ranks=4, num_microbatches=8, forward=-1), "forward = -1: costs are"),
        (lambda: formulas.bubble("1f1b", num_ranks=4, num_microbatches=8, backward_input="1"), "backward_input = '1'"),
        (lambda: formulas.peak_activations("1f1b", num_ranks=2.5, num_microbatches=8), "num_ranks = 2.5"),
        (lambda: formulas.single_stage_bound(num_ranks=4, num_microbatches=4, live=4), "more than live = 4"),
        (lambda: formulas.single_stage_bound(num_ranks=4, num_microbatches=8, live=-1), "live = -1: give a whole"),
        (lambda: formulas.single_stage_bound(num_ranks=4, num_microbatches=8, live=2, comm=NAN), "comm = nan: costs"),
        (lambda: formulas.wave_bubble_bound(4, num_ranks=-1, stages_per_rank=4), "num_ranks = -1: give a whole"),
        (lambda: formulas.wave_bubble_bound(NAN, num_ranks=2, stages_per_rank=4), "live = nan: give a whole number"),
        (lambda: formulas.wave_bubble_bound(4, num_ranks=2, stages_per_rank=0), "stages_per_rank = 0: give a whole"),
        (lambda: formulas.v_bubble_bound(4, num_ranks=2, unit=-1), "unit = -1: costs are finite"),
        (lambda: formulas.memory_bubble_bound(NAN, num_ranks=4), "live_fraction = nan: give a finite fraction"),
        (lambda: formulas.memory_bubble_bound(-0.1, num_ranks=4), "live_fraction = -0.1"),
        (lambda: formulas.ramp_bound(NAN, num_ranks=2), "busiest = nan: give the seconds"),
        (lambda: formulas.ramp_bound(1, num_ranks=0), "num_ranks = 0: give a whole"),
        (lambda: formulas.ramp_bound(1, num_ranks=4, num_routes=3), "num_routes = 3: give 1, or 2"),
        (
            lambda: formulas.full_throughput_memory(forward=0, backward_input=0, backward_weight=0),
            "one of them above 0",
        ),
        (lambda: formulas.full_throughput_memory(forward="1"), "forward = '1': costs are finite"),
        (lambda: formulas.full_throughput_memory(forward=10**400), "forward = 1000"),
        (lambda: formulas.smallest_num_microbatches("1f1b", 0.5, num_ranks=2, as_="seconds"), "leave as_ out"),
    ],
)
def test_refused(call, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        call()


@pytest.mark.parametrize("name", sorted(set(BY_NAME) - {"forward_only"}))
def test_no_schedule_beats_the_lower_bounds(name):
    """schedules.md, lower bounds: work, ramp, one stage per rank, memory."""
    for costs in [(1, 1, 1), (2, 3, 1), (1, 2, 2)]:
        for comm in (0.0, 0.5):
            p, m = 4, 12
            found = timeline(name, p, m, costs, comm)
            placement = found.program.placement
            v = 1 if placement.num_routes == 2 else found.program.num_stages // p
            ramp = formulas.ramp_bound(
                max(found.busy),
                num_ranks=p,
                stages_per_rank=v,
                forward=costs[0],
                comm=comm,
                num_routes=placement.num_routes,
            )
            assert found.makespan >= ramp - 1e-9
            live = max(found.peak_activations)
            if v == 1 and placement.num_routes == 1 and m > live:
                forward, backward_input, backward_weight = costs
                assert found.span >= -1e-9 + formulas.single_stage_bound(
                    num_ranks=p,
                    num_microbatches=m,
                    live=live,
                    forward=forward,
                    backward_input=backward_input,
                    backward_weight=backward_weight,
                    comm=comm,
                )


@pytest.mark.parametrize("name", ["1f1b_overlap", "interleaved_overlap", "dualpipe", "dualpipev"])
def test_no_schedule_of_fused_pairs_beats_the_ramp(name):
    """A rank with fewer fused pairs may work longer than the one that starts last."""
    p, m = 6, 18
    found = timeline(name, p, m, overlapped=2.4)
    routes = found.program.placement.num_routes
    v = 1 if routes == 2 else found.program.num_stages // p
    last = found.busy[p // 2 - 1 if routes == 2 else p - 1]
    assert last < max(found.busy)
    assert found.makespan >= formulas.ramp_bound(last, num_ranks=p, stages_per_rank=v, num_routes=routes) - 1e-9


@pytest.mark.parametrize("name", ["v_half", "v_min", "zbv"])
def test_no_v_beats_the_bounds_of_its_memory(name):
    """arXiv 2405.15362, section 4; the order for V-Half and V-Min is optimal on four ranks."""
    for p in (2, 4, 5, 8):
        found = timeline(name, p, 3 * p, (2, 2, 2))
        live = max(found.peak_activations)
        idle = found.span - 3 * p * 6
        assert idle >= formulas.v_bubble_bound(live, num_ranks=p)
        assert idle >= formulas.memory_bubble_bound(live / (2 * p), num_ranks=p, forward=2)
    assert formulas.v_bubble_bound(6, num_ranks=4) == 5


def test_memory_for_full_throughput():
    assert formulas.full_throughput_memory() == pytest.approx(1 / 3)
    assert formulas.full_throughput_memory(backward_weight=0) == 0.5


@pytest.mark.parametrize("formula", [*BUBBLES.values(), *PEAKS.values()], ids=lambda f: f.range[:20])
def test_every_formula_names_its_source(formula):
    assert formula.source
    assert formula.range
