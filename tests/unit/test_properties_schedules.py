"""Every generator over its whole parameter space: what it accepts validates, lowers, simulates, peaks as it should."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastpipe import CostModel, Placement, formulas, list_schedules, lower, make_schedule, simulate, validate_program
from fastpipe.theory.closed_forms import PEAKS

FAMILIES = {family.name: family for family in list_schedules()}
SECONDS = st.sampled_from([0.25, 0.5, 1.0, 1.5, 2.0, 3.0])


def options_of(name, p, m, draw):
    """Options of every kind that the family has."""
    family, options = FAMILIES[name], {}
    if "reverse_backward" in family.options:
        options["reverse_backward"] = draw(st.booleans())
    if "stages_per_rank" in family.options:
        options["stages_per_rank"] = draw(st.integers(1, 4))
    if "microbatch_group_size" in family.options and draw(st.booleans()):
        options["microbatch_group_size"] = draw(st.integers(1, m + 2))
    if "waves" in family.options:
        options["waves"] = draw(st.integers(1, 3))
    if "placement" in family.options:
        ranks = draw(st.lists(st.integers(0, p - 1), max_size=4))
        custom = Placement.custom([*ranks, *range(p)])
        options["placement"] = draw(st.sampled_from(["loop", "wave", "bidirectional", custom]))
    if "forward" in family.options and draw(st.booleans()):
        options |= {key: draw(SECONDS) for key in ("forward", "backward_input", "backward_weight")}
        options["comm"] = draw(st.sampled_from([0.0, 0.1, 1.0]))
    if "memory_limit" in family.options and draw(st.booleans()):
        options["memory_limit"] = draw(st.integers(1, 3 * p))
    return options | capped(family, p, draw)


def capped(family, p, draw):
    """The options of the families that are built within a memory."""
    options = {}
    if "memory" in family.options and draw(st.booleans()):
        options["memory"] = draw(st.one_of(st.integers(1, 4 * p), st.sampled_from([0.3, 0.5, 0.625, 0.9, 1.5])))
    if "form" in family.options:
        options["form"] = draw(st.sampled_from(["auto", "compact", "slack"]))
        options["stages_per_rank"] = draw(st.sampled_from([2, 4, 6, 3]))
    return options


@st.composite
def requests(draw, name):
    p, m = draw(st.integers(1, 7)), draw(st.integers(1, 24))
    if name in ("dualpipe", "chimera") and draw(st.integers(0, 7)):
        p, m = p + p % 2, m + m % 2
    if name in ("dualpipe", "dualpipev") and draw(st.integers(0, 7)):
        m = 2 * p + m - (p + m) % 2 if name == "dualpipev" else 2 * p + m
    return p, m, options_of(name, p, m, draw)


def generate(name, p, m, options):
    """The schedule, or None where it is refused with one of the numbers that were asked for."""
    try:
        return make_schedule(name, num_ranks=p, num_microbatches=m, **options)
    except ValueError as error:
        named = [f"{key} = " in str(error) or f"{key} has" in str(error) for key in options]
        assert "num_ranks = " in str(error) or "num_microbatches = " in str(error) or any(named), error
        return None


@pytest.mark.parametrize("name", sorted(FAMILIES))
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_what_is_generated_runs(name, data):
    p, m, options = data.draw(requests(name))
    schedule = generate(name, p, m, options)
    if schedule is None:
        return
    schedule.validate()
    program = lower(schedule)
    validate_program(program, lanes="directed")
    found = simulate(program, CostModel(1, 2, 1.5, comm=0.25))
    assert 0 <= found.bubble_fraction < 1
    assert found.span <= found.makespan
    if starts_on_every_rank(schedule.placement):
        routes = schedule.placement.num_routes
        busy = max(found.busy) if routes == 2 else found.busy[schedule.placement.rank_of(p - 1)]
        ramp = formulas.ramp_bound(busy, num_ranks=p, comm=0.25, num_routes=routes)
        assert found.makespan >= ramp - 1e-9
    check_peaks(name, p, m, options, found)


def starts_on_every_rank(placement):
    """Whether the first p stages are on p ranks, which the bound on the ramp asks for."""
    return placement.num_routes == 2 or len(set(placement.routes[0][: placement.num_ranks])) == placement.num_ranks


def check_peaks(name, p, m, options, found):
    """The table's peaks, exactly where there is a formula, and the limit that was asked for."""
    if "memory_limit" in FAMILIES[name].options:
        default = p if name == "zb_auto" else 2 * p
        assert max(found.peak_activations) <= options.get("memory_limit", default)
    if "memory" in FAMILIES[name].options:
        memory, held = options.get("memory", 1.0), found.program.num_stages
        assert max(found.peak_activations) <= (memory if isinstance(memory, int) else memory * held + 1e-9)
    if name not in PEAKS or options.get("microbatch_group_size") or {"waves", "forward", "memory_limit"} & set(options):
        return
    numbers = {"stages_per_rank": options["stages_per_rank"]} if "stages_per_rank" in options else {}
    try:
        peak = formulas.peak_activations(name, num_ranks=p, num_microbatches=m, **numbers)
    except ValueError:
        return
    assert max(found.peak_activations) == peak


@pytest.mark.parametrize("name", ["1f1b", "zb_h1"])
def test_peak_of_every_rank(name):
    """1F1B holds p-r on rank r; ZB-H1 holds p everywhere."""
    for p in (1, 2, 5):
        peaks = simulate(make_schedule(name, num_ranks=p, num_microbatches=3 * p)).peak_activations
        assert list(peaks) == ([p - rank for rank in range(p)] if name == "1f1b" else [p] * p)


@settings(max_examples=25, deadline=None)
@given(p=st.integers(1, 6), m=st.integers(1, 16), costs=st.tuples(SECONDS, SECONDS, SECONDS))
def test_more_memory_never_slows_the_search_down_much(p, m, costs):
    """Both are heuristics: ZB-2P may lose to ZB-1P, but never by more than one microbatch's work."""
    names = ("forward", "backward_input", "backward_weight")
    options = dict(zip(names, costs, strict=True))
    spans = [
        simulate(
            make_schedule("zb_auto", num_ranks=p, num_microbatches=m, memory_limit=limit, **options), CostModel(*costs)
        ).span
        for limit in (p, 2 * p)
    ]
    assert spans[1] <= spans[0] + sum(costs)
