"""`fastpipe.plan`: never worse than what is named, within memory, exactly what the simulator says, the same again."""

from __future__ import annotations

import json
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import fastpipe
from fastpipe import CostModel, LayerCosts, native_plan
from fastpipe.bounds import any_placement_bounds
from fastpipe.planner import result
from fastpipe.planner.budget import Memory, human, memory_of

pytestmark = pytest.mark.without_torch

COSTS = CostModel(1.0, 1.2, 0.8, comm=0.05)
UNEVEN = CostModel([1.0, 1.3, 0.9, 1.1], [1.2, 1.0, 1.4, 0.9], [0.7, 0.9, 0.8, 1.0], comm=0.15)
LAYERS = LayerCosts(
    num_layers=14,
    forward=[0.3, *[1.0] * 12, 1.5],
    backward_input=[0.1, *[1.1] * 12, 1.6],
    backward_weight=[0.2, *[0.9] * 12, 1.5],
    held_bytes=[2e6, *[10e6] * 12, 30e6],
    activation_bytes=1e6,
    parameter_bytes=[50e6, *[12e6] * 12, 50e6],
    comm=0.01,
    bandwidth=1e9,
    launch=0.02,
    microbatch_size=2,
    batch_size=16,
)


def small(costs: Any = COSTS, **options: Any) -> fastpipe.Plan:
    """A plan of a case so small that it takes no time."""
    numbers = {"num_ranks": 4, "num_microbatches": 8, "max_stages_per_rank": 2, "effort": 0.008, **options}
    return fastpipe.plan(costs, **numbers)


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


def plan_cost(plan: fastpipe.Plan) -> CostModel:
    depth = plan.schedule.num_stages / plan.schedule.num_ranks
    return CostModel(1.0 / depth, 1.2 / depth, 0.8 / depth, comm=0.05)


def test_a_plan_is_the_same_again_and_searches_with_its_seed() -> None:
    first, second = small(seed=3), small(seed=3)
    assert first.schedule == second.schedule and first.candidates == second.candidates
    assert not first.cut
    assert small(seed=3, time_limit=1000).schedule == first.schedule
    assert len({small(UNEVEN, seed=seed, effort=0.004).schedule for seed in range(3)}) > 1


def test_a_plan_is_the_same_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    if native_plan.library() is None:
        pytest.skip("there is no library to do without")
    options: dict[str, Any] = {"num_ranks": 2, "num_microbatches": 3, "max_stages_per_rank": 2, "effort": 0.0004}
    native = fastpipe.plan(COSTS, **options)
    monkeypatch.setattr(native_plan, "library", lambda: None)
    assert fastpipe.plan(COSTS, **options).schedule == native.schedule


def test_the_default_effort_is_less_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_plan, "library", lambda: None)
    options: dict[str, Any] = {"num_ranks": 2, "num_microbatches": 2, "max_stages_per_rank": 1}
    plan = fastpipe.plan(COSTS, **options)
    assert plan.candidates == fastpipe.plan(COSTS, effort=0.01, **options).candidates


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


@pytest.mark.skipif(native_plan.library() is None, reason="the planning library is not built")
def test_what_begins_long_may_end_short() -> None:
    """Loops and a wave of four are shorter than the V to begin with; what becomes of it is shorter than of them."""
    costs = CostModel(1.0, 2.0, 1.0, comm=0.1)
    assert fastpipe.plan(costs, num_ranks=8, num_microbatches=12, memory=0.5).makespan < 78


def test_costs_by_stage_fix_the_number_of_stages() -> None:
    plan = small(CostModel([1, 1, 1, 1, 1, 1, 1, 2], 1.0, 1.0))
    assert plan.schedule.num_stages == 8
    with pytest.raises(ValueError, match="costs name 6 stages, which num_ranks = 4 does not divide"):
        small(CostModel([1] * 6))


def test_layers_are_cut_and_bytes_are_kept() -> None:
    plan = small(LAYERS, memory="400MB")
    assert plan.partition is not None
    assert [layer for part in plan.partition for layer in part] == list(range(14))
    assert len(plan.partition) == plan.schedule.num_stages
    assert plan.chosen.peak_bytes <= 400e6
    peaks = fastpipe.simulate(plan.schedule, LAYERS.stages(plan.partition, 8)).peak_bytes
    parameters = LAYERS.parameters(plan.partition)
    stays = [sum(parameters[s] for s in plan.schedule.placement.stages_of(rank)) for rank in range(4)]
    assert max(a + b for a, b in zip(peaks, stays, strict=True)) == plan.chosen.peak_bytes


def test_recomputing_pays_where_memory_is_short() -> None:
    """Time against memory, stage by stage: with little of it, no plan that keeps all is as short."""
    plans = {way: small(memory=0.4, recompute=way, max_stages_per_rank=4) for way in ("none", "full", "auto")}
    assert plans["auto"].makespan <= min(plans["none"].makespan, plans["full"].makespan)
    assert plans["auto"].makespan < 0.9 * plans["none"].makespan
    assert plans["none"].recomputes is None and plans["none"].recompute(0) == "none"
    flags = plans["auto"].recomputes
    assert flags is not None and any(flags) and len(flags) == plans["auto"].schedule.num_stages
    assert [plans["auto"].recompute(stage) for stage in (0, 1)] == ["full" if flags[s] else "none" for s in (0, 1)]
    for plan in plans.values():
        assert plan.bound <= plan.value + 1e-9 and plan.chosen.peak_memory <= 0.4 * 4 + 1e-9
    assert "stages that recompute: " in str(plans["auto"])
    plenty = small(recompute="auto")
    assert plenty.value == small().value and plenty.recomputes in (None, (False,) * plenty.schedule.num_stages)


def test_recomputing_is_counted_in_bytes() -> None:
    """What the simulator says of the recomputing stages' time and memory is what the plan says."""
    plan = small(LAYERS, num_microbatches=8, memory="190MB", recompute="full", max_stages_per_rank=1)
    assert plan.recomputes is not None and plan.partition is not None
    costs = replace(LAYERS.stages(plan.partition, 8), recompute=[float(again) for again in plan.recomputes])
    timeline = fastpipe.simulate(plan.schedule, costs)
    assert timeline.makespan == plan.makespan
    parameters = LAYERS.parameters(plan.partition)
    held = [
        most + sum(parameters[s] for s in plan.schedule.placement.stages_of(rank))
        for rank, most in enumerate(timeline.peak_bytes)
    ]
    assert max(held) == plan.chosen.peak_bytes <= 190e6


@pytest.mark.parametrize("effort", [0.0, 0.02])
def test_received_messages_have_room_in_a_plan_in_bytes(effort: float) -> None:
    """They stay until a stage's W: an order that fills the memory with activations alone does not fit."""
    sizes = {"stage_bytes": 1e6, "activation_bytes": 2.5e5}
    for num_ranks, num_microbatches, memory in ((3, 4, 3.3e6), (5, 6, 3.3e6), (4, 8, 5.1e6)):
        plan = fastpipe.plan(
            CostModel(1.0, 1.2, 0.8, comm=0.05, **sizes),
            num_ranks=num_ranks,
            num_microbatches=num_microbatches,
            max_stages_per_rank=1,
            memory=memory,
            effort=effort,
        )
        named = [
            fastpipe.simulate(
                fastpipe.make_schedule(
                    "loop_zb",
                    num_ranks=num_ranks,
                    num_microbatches=num_microbatches,
                    stages_per_rank=1,
                    memory=limit,
                ),
                CostModel(1.0, 1.2, 0.8, comm=0.05, **sizes),
            )
            for limit in range(1, 2 * num_ranks)
        ]
        fitting = [one.makespan for one in named if max(one.peak_bytes) <= memory]
        assert fitting and plan.makespan <= min(fitting) + 1e-9
        assert max(plan.timeline.peak_bytes) <= memory


def test_list_scheduling_looks_at_the_memory_of_every_rank() -> None:
    """Rank 0's parameters leave less there than rank 1 holds of one microbatch, and has room for."""
    costs = LayerCosts(num_layers=2, held_bytes=[1e6, 3e6], parameter_bytes=[10e6, 1e6], activation_bytes=1e5)
    said: list[str] = []
    options = {"num_ranks": 2, "placement": fastpipe.Placement.loop(2), "memory": "12.3MB", "effort": 0.1}
    plan = small(costs, **options, progress=lambda text, best: said.append(text))
    assert plan.chosen.fits and any("began as list scheduling" in text for text in said)


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
    with pytest.raises(ValueError, match="num_microbatches: give it, or costs of layers with batch_size"):
        small(num_microbatches=None)


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
        with pytest.raises(ValueError, match=r"placement: no schedule of the registry.*effort = .* and memory = "):
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


def test_a_time_limit_cuts_and_says_so() -> None:
    started = time.monotonic()
    plan = small(num_ranks=8, num_microbatches=32, time_limit=1e-6, effort=100.0)
    assert plan.cut and "cut by its time limit" in str(plan)
    assert time.monotonic() - started < 60  # hours, had it not been cut


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
    pytest.importorskip("matplotlib")
    picture = plan.plot(tmp_path / "pareto.svg").read_text()
    assert picture.count('id="chosen"') == picture.count('id="limit"') == picture.count('id="name the plan"') == 1
    names = re.findall(r'id="name ([^"]*)"', picture)
    assert any("1f1b" in name for name in names) and not any("(" in name for name in names), "families, not options"


def test_a_picture_is_in_bytes_where_the_limit_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Microbatches of different sizes, too, are compared in bytes; the front passes what has no name."""
    pytest.importorskip("matplotlib")
    drawn: dict[str, Any] = {}
    monkeypatch.setattr(result, "pareto", lambda **options: drawn.update(options))
    plan = small(LAYERS, num_microbatches=None, memory="200MiB", effort=0.01)
    plan.plot(tmp_path / "bytes.svg")
    assert drawn["limit"] == 200 and "MiB" in drawn["memory_label"] and "(of 1 to 16)" in drawn["title"]
    ringed = next(row for row in drawn["rows"] if row.name == drawn["chosen"])
    assert ringed.peak_memory == plan.chosen.peak_bytes / 2**20
    assert max(row.peak_memory for row in (*drawn["rows"], *drawn["others"])) <= 400
    assert max(one.peak_bytes for one in plan.candidates) > 400 * 2**20, "there was something to leave out"
    small(LAYERS, memory=0.75, effort=0).plot(tmp_path / "fraction.svg")
    assert drawn["limit"] == 3


def test_a_plan_says_what_its_memory_leaves_out() -> None:
    """Bytes that the costs do not name, and a second copy of the model."""
    given = fastpipe.make_schedule("dualpipe", num_ranks=4, num_microbatches=8)
    plan = small(placement=given, effort=0, memory=1.5)
    assert plan.chosen.copies == 2 and not plan.counts_bytes
    assert "two copies of the model, of whose bytes the costs say nothing" in str(plan)
    assert "memory is counted in activations: the costs name no bytes" in str(plan)
    counted = small(LAYERS, placement=given, effort=0, memory="700MB")
    assert counted.counts_bytes and counted.counts_parameters and "two copies of the model\n" in str(counted)
    assert "counted in activations" not in str(counted)
    assert "two copies" not in str(small(effort=0, max_stages_per_rank=1, num_microbatches=3))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0.625, Memory("fraction", 0.625)),
        ("0.5", Memory("fraction", 0.5)),
        ("5 activations", Memory("activations", 5)),
        ("40GiB", Memory("bytes", 40 * 2**30)),
        ("1.5 gb", Memory("bytes", 1.5e9)),
        (4e9, Memory("bytes", 4e9)),
        (None, None),
    ],
)
def test_memory_is_read(value: Any, expected: Memory | None) -> None:
    assert memory_of(value) == expected


@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf"), True, [], "", "much", "3 parsecs", 5000, "0GiB"])
def test_memory_that_is_none_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="memory = "):
        memory_of(value)


def test_bytes_for_people() -> None:
    assert [human(x) for x in (12, 2048, 3 * 2**20, 40 * 2**30)] == ["12 B", "2 KiB", "3 MiB", "40 GiB"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_ranks": 0}, "num_ranks = 0"),
        ({"num_microbatches": 1.5}, "num_microbatches = 1.5"),
        ({"objective": "fun"}, "objective = 'fun': use one of makespan, span"),
        ({"max_stages_per_rank": 0}, "max_stages_per_rank = 0"),
        ({"effort": -1}, "effort = -1"),
        ({"time_limit": 0}, "time_limit = 0"),
        ({"seed": -1}, "seed = -1"),
        ({"recompute": "some"}, "recompute = 'some': use one of none, full, auto"),
        ({"costs": CostModel(recompute=0.5), "recompute": "auto"}, "the costs say already what is recomputed"),
        ({"placement": fastpipe.Placement.loop(3)}, "placement has 3 ranks and num_ranks = 4"),
        ({"placement": fastpipe.Placement.loop(4, 2), "costs": UNEVEN}, "placement has 8 stages and the costs name 4"),
        ({"placement": fastpipe.Placement.loop(4, 4), "costs": LAYERS}, "there are only 14 layers"),
        ({"memory": "1GiB"}, "the costs do not say how many bytes a stage holds"),
        ({"memory": 0.01}, r"nothing fits; the smallest, .*, needs 0\.25 of 1F1B's"),
        ({"time_limit": True}, "time_limit = True"),
        ({"costs": CostModel(comm={(0, 4): 1.0})}, "comm names the link 0->4, and num_ranks = 4: there are 0 to 3"),
        ({"costs": LayerCosts(8, batch_size=6)}, "num_microbatches = 8: a batch_size of 6 has too few rows"),
    ],
)
def test_wrong_arguments_are_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        small(**options)


@pytest.mark.parametrize("recompute", ["none", "auto"])
def test_what_is_said_to_be_the_smallest_is_the_smallest(recompute: str) -> None:
    """A plan with as many bytes as the message asks for, and none with clearly fewer: moving layers gains a little."""
    with pytest.raises(ValueError, match=r"needs .*, (\S+) bytes") as refusal:
        small(LAYERS, memory="1MB", effort=0, recompute=recompute)
    found = re.search(r"(\S+) bytes", str(refusal.value))
    assert found is not None
    least = float(found[1])
    plan = small(LAYERS, memory=least * 1.001, effort=0.01, recompute=recompute)
    assert plan.chosen.peak_bytes == pytest.approx(least, rel=1e-3)
    with pytest.raises(ValueError, match="nothing fits"):
        small(LAYERS, memory=least * 0.9, effort=0.01, recompute=recompute)


def test_numbers_of_numpy_are_numbers() -> None:
    numbers = {"memory": np.float32(0.5), "effort": np.float32(0), "num_microbatches": np.int64(8)}
    assert small(**numbers).schedule == small(memory=0.5, effort=0).schedule
    assert memory_of(np.int64(1)) == Memory("fraction", 1.0)


def test_a_placement_is_a_placement() -> None:
    with pytest.raises(TypeError, match="placement: expected a Placement or a Schedule, found str"):
        small(placement="loop")


def test_costs_are_read_from_files_and_dicts(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_text(json.dumps({"forward": 1.0, "backward_input": 1.2, "backward_weight": 0.8, "comm": 0.05}))
    assert small(path, effort=0).schedule == small(str(path), effort=0).schedule == small(effort=0).schedule
    layers = {"num_layers": 8, "forward": 0.5, "bandwidth": {"0->1": 5.0}, "activation_bytes": 1.0}
    path.write_text(json.dumps(layers))
    assert LayerCosts.from_json(path) == LayerCosts(8, 0.5, bandwidth={(0, 1): 5.0}, activation_bytes=1.0)
    assert small(layers, effort=0).partition is not None
    for text, message in (
        ("{", "no JSON"),
        ("[]", "give an object with"),
        ('{"num_layers": 8, "speed": 3}', "there is no 'speed'"),
        ('{"num_layers": 8, "comm": null}', "comm is or has a null"),
    ):
        path.write_text(text)
        for read in (small, LayerCosts.from_json):
            with pytest.raises(ValueError, match=rf"costs\.json: {message}"):
                read(path)
    path.write_text('{"forward": -1}')
    for reads in (small, CostModel.from_json):
        with pytest.raises(ValueError, match=r"costs\.json: forward = -1: costs are finite"):
            reads(path)
    with pytest.raises(TypeError, match="costs: expected a CostModel, LayerCosts, a dict or a file, found int"):
        small(3)
    with pytest.raises(ValueError, match="held_bytes is of layers; say num_layers too"):
        small({"held_bytes": 3})
    with pytest.raises(ValueError, match="there is no 'speed'"):
        small({"num_layers": 8, "speed": 3})


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"num_layers": 0}, "num_layers = 0"),
        ({"batch_size": 0}, "batch_size = 0"),
        ({"forward": [1.0]}, "forward = .*one for each of 2 layers"),
        ({"forward": [1.0, -1.0]}, r"forward\[1\] = -1.0"),
        ({"launch": float("nan")}, "launch = nan"),
        ({"comm": -1.0}, "comm = -1.0"),
    ],
)
def test_layers_costs_are_checked(attributes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LayerCosts(**{"num_layers": 2, **attributes})


def test_layers_grow_with_the_microbatch_and_launches_do_not() -> None:
    parts = [range(0, 7), range(7, 14)]
    measured, twice = LAYERS.stages(parts, 8), LAYERS.stages(parts, 4)
    for name in ("forward", "backward_input", "backward_weight", "backward"):
        old, new = measured.per_stage(name, 2), twice.per_stage(name, 2)
        assert (new - 0.02).tolist() == pytest.approx((2 * (old - 0.02)).tolist())
    assert twice.per_stage("stage_bytes", 2).tolist() == (2 * measured.per_stage("stage_bytes", 2)).tolist()
    assert LAYERS.parameters(parts) == [50e6 + 72e6, 50e6 + 72e6]
    fused = LayerCosts(4, 1.0, 1.0, 1.0, fused=0.75).stages([range(0, 2), range(2, 4)], 1)
    assert fused.per_stage("overlapped", 2).tolist() == [4.5, 4.5]


def test_a_bound_of_any_placement_does_not_depend_on_the_unit_of_memory() -> None:
    """Equal activations in bytes, and the same counted."""
    numbers: dict[str, Any] = {"num_ranks": 5, "num_stages": 20, "num_microbatches": 4}
    counted = any_placement_bounds(COSTS, memory=15.4, **numbers)
    assert counted == any_placement_bounds(replace(COSTS, stage_bytes=0.25), memory=15.4 / 4, in_bytes=True, **numbers)
