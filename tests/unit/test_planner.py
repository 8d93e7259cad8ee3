"""`fastpipe.plan`: never worse than what is named, within memory, exactly what the simulator says, the same again."""

import math
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import fastpipe
from fastpipe import CostModel, LayerCosts, native_plan
from fastpipe.planner import engine, search
from tests.patience import PATIENCE
from tests.unit.plans import LAYERS, UNEVEN, small

needs_library = pytest.mark.skipif(native_plan.library() is None, reason="the planning library is not built")


@pytest.mark.parametrize("objective", ["makespan", "span"])
@pytest.mark.parametrize("memory", [None, 0.75, 1.0])
def test_a_plan_is_no_worse_than_any_schedule_that_fits(objective: str, memory: float | None) -> None:
    plan = small(objective=objective, memory=memory)
    fitting = [one for one in plan.candidates if one.fits]
    assert plan.value == min(getattr(one, objective) for one in fitting)
    assert plan.chosen.fits and plan.candidates[0] is plan.chosen
    assert {"1f1b", "zb_h1", "v_half"} <= {one.name for one in plan.candidates}
    again = fastpipe.simulate(plan.schedule.validate(), plan_cost(plan))
    assert (again.makespan, again.span) == (plan.makespan, plan.span)
    assert plan.bound <= plan.value + 1e-9 and 0 <= plan.gap < 1
    if memory is not None:
        depth = plan.schedule.num_stages / 4
        assert max(fastpipe.lower(plan.schedule).peak_activations) / depth <= 4 * memory + 1e-9


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(["makespan", "span"]))
def test_nothing_is_below_its_bound(seed: int, objective: str) -> None:
    """Over random costs, memories and numbers: a result below a bound is a defect of the one or the other."""
    rng = np.random.default_rng(seed)
    seconds = rng.uniform(0.3, 2.0, 3).tolist()
    costs = CostModel(*seconds, comm=float(rng.choice([0.0, 0.05, 0.3])))
    memory = None if rng.random() < 0.3 else float(rng.uniform(0.6, 1.5))
    p, m = int(rng.integers(2, 5)), int(rng.integers(2, 9))
    plan = small(costs, num_ranks=p, num_microbatches=m, memory=memory, objective=objective, effort=0.002)
    assert plan.bound_anywhere <= plan.bound + 1e-9
    assert plan.bound <= plan.value * (1 + 1e-9)


@settings(max_examples=6, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(["makespan", "span"]))
@example(13714, "span")  # the default zbv needs less memory than it allows itself
def test_no_schedule_of_the_registry_is_shorter(seed: int, objective: str) -> None:
    """Made and measured apart from the planner: as they are by default, where they fit into the same memory."""
    rng = np.random.default_rng(seed)
    p, seconds = int(rng.integers(2, 7)), rng.uniform(0.5, 1.5, 3)
    m, comm = int(rng.choice([p, 2 * p + 1])), float(rng.choice([0.0, 0.02, 0.2]))
    memory = float(rng.choice([0.625, 0.75, 1.0, 1.5]))

    def costs(depth: float) -> CostModel:
        forward, inputs, weights = (seconds / depth).tolist()
        return CostModel(forward, inputs, weights, comm=comm)

    plan = small(costs(1), num_ranks=p, num_microbatches=m, memory=memory, objective=objective, effort=0.002)
    for family in fastpipe.list_schedules():
        try:
            schedule = fastpipe.make_schedule(family.name, num_ranks=p, num_microbatches=m)
        except ValueError:
            continue
        depth = schedule.num_stages / p
        if schedule.forward_only or depth > 2:
            continue
        timeline = fastpipe.simulate(schedule, costs(depth))
        if max(timeline.peak_activations) <= memory * p * depth + 1e-9:
            assert plan.value <= getattr(timeline, objective) + 1e-9, family.name


@pytest.mark.parametrize(("p", "m", "memory"), [(4, 16, 0.75), (8, 24, 0.75), (8, 24, 0.5)])
def test_one_stage_per_rank_in_less_memory_than_1f1b_is_no_longer_than_loop_zb(p: int, m: int, memory: float) -> None:
    """Where the search behind zb_auto, which is made for as many activations as ranks, takes up to twice as long."""
    alone = {"num_ranks": p, "num_microbatches": m}
    plan = small(CostModel(), **alone, max_stages_per_rank=1, memory=memory, effort=0)
    known = fastpipe.make_schedule("loop_zb", **alone, stages_per_rank=1, memory=memory)
    other = fastpipe.make_schedule("zb_auto", **alone, memory_limit=int(memory * p))
    assert plan.makespan <= fastpipe.simulate(known).makespan < fastpipe.simulate(other).makespan


def plan_cost(plan: fastpipe.Plan) -> CostModel:
    depth = plan.schedule.num_stages / plan.schedule.num_ranks
    return CostModel(1.0 / depth, 1.2 / depth, 0.8 / depth, comm=0.05)


STAGES = CostModel(forward=[0.25] * 4, backward_input=[1.0] * 4, backward_weight=[1.0] * 4)
"""Of stages that dualpipe is the best of the registry for."""


@pytest.mark.parametrize("count", [5, None])
def test_one_candidate_is_the_plan_and_none_is_there_twice(count: int | None) -> None:
    """Several orders that began alike are annealed to the same numbers."""
    costs = CostModel() if count else LayerCosts(num_layers=12, microbatch_size=1, batch_size=5)
    options = {"num_microbatches": count, "max_stages_per_rank": 3, "memory": 0.6, "seed": 5, "effort": 0.1}
    plan = small(costs, **options)
    assert [one.chosen for one in plan.candidates].count(True) == 1 and plan.candidates[0].chosen
    assert len(set(plan.candidates)) == len(plan.candidates)
    assert plan.chosen.makespan == plan.value and str(plan).count("the plan") == 1


@needs_library
def test_both_copies_of_the_model_are_planned_where_the_stages_are_named() -> None:
    """A rank holds two stages of them, and there are as many stages as ranks."""
    plan = small(STAGES, max_stages_per_rank=4, effort=0.1)
    assert {"dualpipe", "chimera"} <= {one.name for one in plan.candidates if one.fits}
    dualpipe = fastpipe.make_schedule("dualpipe", num_ranks=4, num_microbatches=8)
    assert plan.value < fastpipe.simulate(dualpipe, STAGES).makespan == 19
    # annealing has made an order over both routes: a schedule as any other
    assert plan.chosen.name.startswith("plan from") and plan.chosen.copies == 2
    assert fastpipe.simulate(plan.schedule.validate(), STAGES).makespan == plan.value
    fastpipe.validate_program(fastpipe.lower(plan.schedule))
    alone = small(STAGES, max_stages_per_rank=1, effort=0.1)
    assert alone.chosen.copies == 1 and all(one.copies == 1 for one in alone.candidates)


def test_both_copies_of_the_model_are_planned_where_the_placement_has_them() -> None:
    places = fastpipe.Placement.bidirectional(2)
    for depth in (1, 4):
        plan = small(CostModel(), num_ranks=2, num_microbatches=6, placement=places, max_stages_per_rank=depth)
        assert plan.schedule.placement.routes == places.routes
        assert {"dualpipe", "chimera"} <= {one.name for one in plan.candidates}
        assert {one.copies for one in plan.candidates} == {2}
    other = small(CostModel(), num_ranks=2, num_microbatches=6, placement=fastpipe.Placement.loop(2))
    assert not {"dualpipe", "chimera"} & {one.name for one in other.candidates}
    with pytest.raises(ValueError, match="even number"):
        small(CostModel(), num_ranks=2, num_microbatches=7, placement=places)


def test_both_copies_of_the_model_count_in_bytes() -> None:
    """Five layers are cut into four stages of a copy; with parameters of both ranks' copies they are too much."""
    layers = LayerCosts(num_layers=5, held_bytes=1e6, parameter_bytes=10e6)
    plenty, scarce = small(layers, memory="100MB", effort=0), small(layers, memory="32MB", effort=0)
    for plan, fits in ((plenty, True), (scarce, False)):
        both = [one for one in plan.candidates if one.copies == 2]
        assert {one.name for one in both} == {"dualpipe", "chimera"}
        assert all(one.fits == fits and one.peak_bytes > 30e6 for one in both)
    assert scarce.chosen.copies == 1


@needs_library
def test_a_plan_is_the_same_again_and_searches_with_its_seed() -> None:
    first, second = small(seed=3), small(seed=3)
    assert first.schedule == second.schedule and first.candidates == second.candidates
    assert not first.cut
    assert small(seed=3, time_limit=1000).schedule == first.schedule
    assert len({small(UNEVEN, seed=seed, effort=0.004).schedule for seed in range(3)}) > 1


def test_a_plan_without_the_library_is_listed_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_plan, "library", lambda: None)
    plan = small(UNEVEN, max_stages_per_rank=2, effort=1)
    assert not plan.annealed and "not annealed" in str(plan)
    assert any(one.name.startswith("plan from list scheduling") for one in plan.candidates)
    fastpipe.validate_program(fastpipe.lower(plan.schedule))


INTERRUPTED = """
import fastpipe
print("ready", flush=True)
while True:
    fastpipe.plan(fastpipe.CostModel(1, 1.3, 0.7, comm=0.05), num_ranks=8, num_microbatches=32, effort=20)
"""


@needs_library
@pytest.mark.parametrize("apart", [0.02, 0.15])
def test_interrupts_end_a_plan_without_a_crash(apart: float) -> None:
    """Three of them: the second and third come while threads of the search are joined, and at the interpreter's end."""
    with subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(1.5)
        for _ in range(3):
            process.send_signal(signal.SIGINT)
            time.sleep(apart)
        _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode in (1, 130, -signal.SIGINT) and b"KeyboardInterrupt" in errors


@needs_library
def test_the_search_gains_where_costs_are_not_those_of_the_books() -> None:
    plan = small(CostModel(1.0, 1.3, 0.7, comm=0.1), memory=0.75, effort=0.1)
    named = [one.makespan for one in plan.candidates if one.fits and not one.name.startswith("plan")]
    assert plan.makespan < min(named)


@pytest.mark.parametrize(("num_ranks", "num_microbatches"), [(2, 4), (4, 8)])
def test_the_optimum_is_reached_where_it_is_known(num_ranks: int, num_microbatches: int) -> None:
    """F = I = W and free transfers: no more is lost than the way to the last rank's first stage."""
    plan = small(CostModel(), num_ranks=num_ranks, num_microbatches=num_microbatches, memory=1.0, max_stages_per_rank=4)
    assert plan.makespan <= 3 * num_microbatches + (num_ranks - 1) / 4 + 1e-9
    spanning = small(CostModel(), objective="span", memory=1.0)
    assert spanning.span == pytest.approx(24)


@needs_library
def test_what_begins_long_may_end_short() -> None:
    """Loops and a wave of four are shorter than the V to begin with; what becomes of it is shorter than of them."""
    costs = CostModel(1.0, 2.0, 1.0, comm=0.1)
    assert fastpipe.plan(costs, num_ranks=8, num_microbatches=12, memory=0.5).makespan < 78


@needs_library
@pytest.mark.parametrize(("p", "m", "names"), [(3, 6, "list scheduling"), (4, 8, "list scheduling"), (2, 4, "chimera")])
def test_what_has_reached_its_bound_is_annealed_no_more(
    p: int, m: int, names: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shortest plan still comes of it, and less than a third of the attempts are made."""
    attempts: list[int] = []
    real = engine.Search.improve

    def counted(search: engine.Search, count: int, hot: float, cold: float) -> None:
        attempts.append(count * search.size)
        real(search, count, hot, cold)

    monkeypatch.setattr(engine.Search, "improve", counted)
    plan = fastpipe.plan(CostModel(1, 1.3, 0.7, comm=0.02), num_ranks=p, num_microbatches=m)
    assert plan.value == pytest.approx(plan.bound) and names in plan.chosen.name
    assert sum(attempts) < 1.6 * search.WORK / 3


def test_costs_by_stage_fix_the_number_of_stages() -> None:
    plan = small(CostModel([1, 1, 1, 1, 1, 1, 1, 2], 1.0, 1.0))
    assert plan.schedule.num_stages == 8
    with pytest.raises(ValueError, match="6 stages.* num_ranks = 4"):
        small(CostModel([1] * 6))


def test_moving_layers_helps_where_the_ends_differ() -> None:
    """The most even partition minimises the longest stage; a pipeline may want it elsewhere."""
    plan = small(LAYERS, max_stages_per_rank=1, effort=0.08)
    even = LAYERS.partition(4)
    schedules = [plan.schedule, fastpipe.make_schedule("zb_h2", num_ranks=4, num_microbatches=8)]
    assert plan.makespan <= min(fastpipe.simulate(s, LAYERS.stages(even, 8)).makespan for s in schedules)


def test_the_number_of_microbatches_is_chosen_from_the_batch() -> None:
    plan = small(LAYERS, num_microbatches=None, memory="500MB", effort=0.004)
    tried = {one.num_microbatches for one in plan.candidates}
    assert tried == {1, 2, 4, 8, 16}
    best = min((one for one in plan.candidates if one.fits), key=lambda one: one.makespan)
    assert plan.schedule.num_microbatches == best.num_microbatches
    with pytest.raises(ValueError, match="num_microbatches: .*batch_size"):
        small(num_microbatches=None)


@pytest.mark.parametrize("count", [1, 3, 8])
def test_of_equals_the_simplest_is_chosen(count: int) -> None:
    """Times are sums of thirds, and differ in the last bit: that of one stage per rank need not be the least."""
    plan = fastpipe.plan(CostModel(), num_ranks=1, num_microbatches=count)
    assert plan.schedule.num_stages == 1 and list(plan.timeline.peak_activations) == [1]


def test_of_equals_the_one_with_the_fewest_messages_is_chosen() -> None:
    plan = fastpipe.plan(CostModel(), num_ranks=4, num_microbatches=8, effort=0)
    (chosen,) = [one for one in plan.candidates if one.chosen]
    equal = [one for one in plan.candidates if math.isclose(one.makespan, chosen.makespan, rel_tol=1e-9)]
    equal = [one for one in equal if one.stages_per_rank == chosen.stages_per_rank and one.fits]
    assert len({one.messages for one in equal}) > 1 and chosen.messages == min(one.messages for one in equal)


def test_a_placement_that_is_given_is_kept() -> None:
    """And a schedule on it is a candidate, whatever its order."""
    for name in ("zbv", "1f1b", "dualpipe", "interleaved_zb"):
        given = fastpipe.make_schedule(name, num_ranks=4, num_microbatches=8)
        plan = small(placement=given, effort=0.002)
        assert plan.schedule.placement.routes == given.placement.routes
        depth = given.num_stages / 4
        ours = fastpipe.simulate(given, CostModel(1.0 / depth, 1.2 / depth, 0.8 / depth, comm=0.05)).makespan
        assert plan.makespan <= ours and f"{name}, as given" in {one.name for one in plan.candidates}
    odd = fastpipe.Placement.custom([0, 1, 1, 2, 0])
    uneven = CostModel([1.0, 2.0, 1.0, 1.0, 1.5], 1.0, 1.0)
    plan = fastpipe.plan(uneven, num_ranks=3, num_microbatches=4, placement=odd, effort=0.01)
    assert plan.schedule.placement.routes == odd.routes and plan.bound <= plan.value + 1e-9
    for little in ({"effort": 0}, {"memory": 0.01}):
        with pytest.raises(ValueError, match=r"placement: .*effort = .* and memory = "):
            fastpipe.plan(uneven, num_ranks=3, num_microbatches=4, placement=odd, **{"effort": 0.01, **little})


@pytest.mark.parametrize("effort", [0.0, 0.002])
def test_a_schedule_that_is_given_is_proved(effort: float) -> None:
    given = fastpipe.make_schedule("1f1b", num_ranks=4, num_microbatches=8)
    whole = [rows.copy() for rows in given.columns]

    def with_rank_0(rows: np.ndarray) -> fastpipe.Schedule:
        return fastpipe.Schedule("mine", given.placement, 8, [rows, *whole[1:]])

    for rows, message in (
        (whole[0][:, :-1], "stage 0, microbatch 7 has no B"),
        (whole[0][:, ::-1], "waits in a cycle"),
        (np.concatenate([whole[0], whole[0][:, :1]], axis=1), "0F0 was already done"),
    ):
        with pytest.raises(fastpipe.ScheduleError, match=f"placement: mine cannot run: .*{message}"):
            small(placement=with_rank_0(rows), effort=effort)
    passes = fastpipe.make_schedule("forward_only", num_ranks=4, num_microbatches=8)
    with pytest.raises(ValueError, match="placement: forward_only has no backward"):
        small(placement=passes, effort=effort)


def test_a_schedule_that_is_given_may_name_stages_alone(tmp_path: Path) -> None:
    """As torch's file does, with UNSHARD and REDUCE_GRAD."""
    rows = fastpipe.make_schedule("interleaved_1f1b", num_ranks=2, num_microbatches=4).to_csv().splitlines()
    text = [
        f"{rank}UNSHARD,{rank + 2}UNSHARD,{row},{rank}REDUCE_GRAD,{rank + 2}REDUCE_GRAD"
        for rank, row in enumerate(rows)
    ]
    (tmp_path / "mine.csv").write_text("\n".join(text) + "\n", encoding="utf-8")
    given = fastpipe.Schedule.from_csv(tmp_path / "mine.csv")
    plan = small(num_ranks=2, num_microbatches=4, placement=given)
    assert "mine, as given" in {one.name for one in plan.candidates}
    kept = small(CostModel(backward=0.5), num_ranks=2, num_microbatches=4, placement=given)
    assert kept.schedule == given  # with all that it says


def test_a_time_limit_ends_the_search_among_many_placements() -> None:
    started = time.process_time()
    plan = fastpipe.plan(CostModel(), num_ranks=2, num_microbatches=1, max_stages_per_rank=1000, time_limit=1)
    assert plan.cut and time.process_time() - started < 12


def test_a_time_limit_cuts_and_says_so() -> None:
    started = time.monotonic()
    plan = small(num_ranks=8, num_microbatches=32, time_limit=1e-6, effort=100.0)
    assert plan.cut and "time limit ended the search early" in str(plan)
    assert time.monotonic() - started < 60  # hours, had it not been cut


@needs_library
def test_progress_is_told() -> None:
    said: list[tuple[str, float]] = []
    plan = small(progress=lambda text, best: said.append((text, best)))
    assert said[0][1] == float("inf") and said[-1][1] >= plan.value
    assert {text.split()[0] for text, _ in said} == {"simulating", "list", "annealing"}


def test_a_plan_prints_what_matters(tmp_path: Path) -> None:
    plan = small(memory=0.75)
    text = str(plan)
    assert "memory 0.75 of 1F1B's" in text and "the plan" in text and f"{plan.bound:.6g}" in text
    assert plan.chosen.name in text
    assert f"peak activations {plan.chosen.peak_memory:.4g} (1F1B: {plan.schedule.num_ranks})" in text
    pytest.importorskip("matplotlib")
    picture = plan.plot(tmp_path / "pareto.svg").read_text()
    assert picture.count('id="chosen"') == picture.count('id="limit"') == picture.count('id="name the plan"') == 1
    names = re.findall(r'id="name ([^"]*)"', picture)
    assert any("1f1b" in name for name in names) and not any("(" in name for name in names), "families, not options"
