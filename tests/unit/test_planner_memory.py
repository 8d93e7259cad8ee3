"""`fastpipe.plan` under a limit of memory: in activations, in bytes, with recomputation."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import fastpipe
from fastpipe import CostModel, LayerCosts, native_plan
from fastpipe.bounds import any_placement_bounds
from fastpipe.planner.problem import Memory, human, memory_of
from tests.unit.plans import COSTS, LAYERS, small


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
                    "loop_zb", num_ranks=num_ranks, num_microbatches=num_microbatches, stages_per_rank=1, memory=limit
                ),
                CostModel(1.0, 1.2, 0.8, comm=0.05, **sizes),
            )
            for limit in range(1, 2 * num_ranks)
        ]
        fitting = [one.makespan for one in named if max(one.peak_bytes) <= memory]
        assert fitting and plan.makespan <= min(fitting) + 1e-9
        assert max(plan.timeline.peak_bytes) <= memory


@pytest.mark.parametrize("native", [True, False])
def test_one_rank_with_one_stage_is_planned_in_bytes(native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no boundary of stages at all, over which a message could come."""
    if not native:
        monkeypatch.setattr(native_plan, "library", lambda: None)
    plan = small(CostModel(stage_bytes=1e9), num_ranks=1, num_microbatches=2, memory="40GiB")
    assert plan.value == 6 and plan.chosen.peak_bytes <= 2e9
    one = small(CostModel(stage_bytes=1e9), num_ranks=1, num_microbatches=2, memory="1GB", max_stages_per_rank=1)
    assert one.value == 6 and one.chosen.peak_bytes == 1e9


def test_list_scheduling_looks_at_the_memory_of_every_rank() -> None:
    """Rank 0's parameters leave less there than rank 1 holds of one microbatch, and has room for."""
    costs = LayerCosts(num_layers=2, held_bytes=[1e6, 3e6], parameter_bytes=[10e6, 1e6], activation_bytes=1e5)
    said: list[str] = []
    options = {"num_ranks": 2, "placement": fastpipe.Placement.loop(2), "memory": "12.3MB", "effort": 0.1}
    plan = small(costs, **options, progress=lambda text, best: said.append(text))
    assert plan.chosen.fits and any("list scheduling on loop" in text for text in said)


def test_a_picture_is_in_bytes_where_the_limit_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Microbatches of different sizes, too, are compared in bytes; the front passes what has no name."""
    pytest.importorskip("matplotlib")
    drawn: dict[str, Any] = {}
    monkeypatch.setattr(fastpipe.visualize, "pareto", lambda **options: drawn.update(options))
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
    assert "two copies of the model, which is not counted" in str(plan)
    assert f"lower bound {plan.bound:.6g} on this placement (" in str(plan)
    assert "memory is counted in activations, as the costs have no bytes" in str(plan)
    counted = small(LAYERS, placement=given, effort=0, memory="700MB")
    assert counted.counts_bytes and counted.counts_parameters and "two copies of the model\n" in str(counted)
    assert "counted in activations" not in str(counted)
    assert "two copies" not in str(small(effort=0, max_stages_per_rank=1, num_microbatches=3))


@pytest.mark.parametrize("recompute", ["none", "auto"])
def test_what_is_said_to_be_the_smallest_is_the_smallest(recompute: str) -> None:
    """A plan with as many bytes as the message asks for, and none with clearly fewer: moving layers gains a little."""
    with pytest.raises(ValueError, match=r"needs .*, (\S+) bytes") as refusal:
        small(LAYERS, memory="1MB", effort=0, recompute=recompute)
    found = re.search(r"(\S+) bytes", str(refusal.value))
    assert found is not None
    least = float(found[1])
    plan = small(LAYERS, memory=least, effort=0.01, recompute=recompute)
    assert plan.chosen.peak_bytes == pytest.approx(least, rel=1e-3)
    with pytest.raises(ValueError, match="nothing fits"):
        small(LAYERS, memory=least * 0.9, effort=0.01, recompute=recompute)


def test_a_bound_of_any_placement_does_not_depend_on_the_unit_of_memory() -> None:
    """Equal activations in bytes, and the same counted."""
    numbers: dict[str, Any] = {"num_ranks": 5, "num_stages": 20, "num_microbatches": 4}
    counted = any_placement_bounds(COSTS, memory=15.4, **numbers)
    assert counted == any_placement_bounds(replace(COSTS, stage_bytes=0.25), memory=15.4 / 4, in_bytes=True, **numbers)


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
