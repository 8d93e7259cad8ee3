"""The search's own times are those of the simulator; list scheduling does the same in Python and in C++."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fastpipe
from fastpipe import CostModel, Schedule, native_plan
from fastpipe.planner import engine
from fastpipe.planner.candidates import join_backwards, split_backwards
from fastpipe.planner.search import Keys, unordered
from fastpipe.planner.tasks import Tasks, fits, held_peaks, tasks_of
from tests.unit.planning import improved, random_schedules

NAMED = [
    ("1f1b", 3, 5, {}),
    ("zbv", 3, 6, {}),
    ("v_half", 4, 8, {}),
    ("dualpipe", 4, 8, {}),
    ("dualpipev", 2, 5, {}),
    ("interleaved_zb", 3, 7, {"stages_per_rank": 3}),
    ("1f1b_overlap", 4, 8, {}),
    ("hanayo", 3, 4, {"waves": 2}),
]


def made(name: str, num_ranks: int, num_microbatches: int, options: dict[str, int]) -> Schedule:
    return fastpipe.make_schedule(name, num_ranks=num_ranks, num_microbatches=num_microbatches, **options)


def uneven(num_stages: int, comm: float = 0.13) -> CostModel:
    """Costs by stage; no transfer takes longer than an action, so that lanes are always free."""
    forward = [1 + 0.1 * stage for stage in range(num_stages)]
    sizes = [0.3 * (stage % 3) for stage in range(num_stages)]
    return CostModel(forward, 1.1, 0.7, comm=comm, activation_bytes=sizes, bandwidth={(0, 1): 20.0, (1, 0): 9.0})


def tight(schedule: Schedule, cost: CostModel) -> Tasks:
    """Its tasks, with just the memory that it needs."""
    held = [1.0 + 0.5 * (stage % 2) for stage in range(schedule.num_stages)]
    return tasks_of(schedule, cost, held, held_peaks(schedule, held))


@pytest.mark.parametrize("case", NAMED, ids=str)
@pytest.mark.parametrize("comm", [0.0, 0.13, 0.6])
def test_an_orders_times_are_the_simulators(case: tuple[str, int, int, dict[str, int]], comm: float) -> None:
    schedule = made(*case)
    cost = uneven(schedule.num_stages, comm)
    tasks = tight(schedule, cost)
    timeline = fastpipe.simulate(schedule, cost)
    assert engine.measure(tasks, tasks.start, span=False) == timeline.makespan
    assert engine.measure(tasks, tasks.start, span=True) == timeline.span
    times, python = engine.retime(tasks, tasks.start), engine.retime_in_python(tasks, tasks.start)
    assert times is not None and python is not None
    assert [column.tolist() for column in python] == [column.tolist() for column in times]
    for rank in range(schedule.num_ranks):
        mine = slice(tasks.first[rank], tasks.first[rank + 1])
        assert [span.start for span in timeline.compute_spans(rank)] == times[0][mine].tolist()


@pytest.mark.filterwarnings("ignore:.*come in another order")
@settings(max_examples=30, deadline=None)
@given(random_schedules(), st.integers(0, 1000))
def test_no_search_time_is_above_the_simulators(schedule: Schedule, seed: int) -> None:
    """Where orders cross, a message may also wait for its lane: never less, with transfers no longer than an action."""
    rng = np.random.default_rng(seed)
    cost = CostModel(rng.uniform(0.5, 2, schedule.num_stages).tolist(), comm=float(rng.uniform(0, 0.5)))
    tasks = tight(schedule, cost)
    assert engine.measure(tasks, tasks.start, span=False) <= fastpipe.simulate(schedule, cost).makespan + 1e-9


def test_an_order_that_cannot_run_has_no_times() -> None:
    schedule = made("1f1b", 2, 2, {})
    tasks = tight(schedule, CostModel())
    order = tasks.start.copy()
    order[: tasks.first[1]] = order[: tasks.first[1]][::-1]  # the first rank begins with a backward
    assert engine.retime(tasks, order) is None
    assert engine.measure(tasks, order, span=False) == float("inf")
    assert engine.retime_in_python(tasks, order) is None
    arguments = {"span": False, "seed": 0, "attempts": 10, "hot": 1.0, "cold": 0.0}
    assert improved(tasks, order, **arguments) is None  # type: ignore[arg-type]


def test_peaks_are_counted_by_stage_and_released_at_the_end_of_w() -> None:
    schedule = made("zb_h1", 4, 8, {})
    assert held_peaks(schedule, [1.0] * 4) == list(fastpipe.lower(schedule).peak_activations)
    tasks = tasks_of(schedule, CostModel(), [2.0, 1.0, 1.0, 1.0], [8.0, 4.0, 4.0, 4.0])
    assert tasks.peaks(tasks.start) == [8.0, 4.0, 4.0, 4.0]
    assert fits([8.0, 4.0], [8.0, 4.0]) and not fits([8.0, 4.0], [7.5, 4.0])


@pytest.mark.parametrize("case", NAMED, ids=str)
@pytest.mark.parametrize("span", [False, True])
def test_the_search_keeps_what_must_be_kept(case: tuple[str, int, int, dict[str, int]], span: bool) -> None:
    schedule = split_backwards(made(*case))
    cost = uneven(schedule.num_stages)
    tasks = tight(schedule, cost)
    before = engine.measure(tasks, tasks.start, span)
    found = improved(tasks, tasks.start, span=span, seed=3, attempts=3000, hot=0.5, cold=0.01)
    assert found is not None
    order, value = found
    better = tasks.ordered(order, "better").validate()
    timeline = fastpipe.simulate(better, cost)
    assert value == (timeline.span if span else timeline.makespan) <= before
    assert fits(tasks.peaks(order), tasks.limit.tolist())
    for rank in range(schedule.num_ranks):
        mine = slice(tasks.first[rank], tasks.first[rank + 1])
        assert sorted(order[mine].tolist()) == tasks.start[mine].tolist()


@pytest.mark.parametrize("seed", range(4))
def test_what_adds_to_weights_keeps_its_order(seed: int) -> None:
    """Also where B and W are mixed: a B that overtakes a W would change the last bits of a gradient."""
    schedule = made("dualpipev", 2, 8, {})
    cost = CostModel([0.4, 0.4, 0.4, 2.2], [0.3, 0.3, 0.3, 1.6], [0.3, 0.3, 0.3, 1.2])
    tasks = tasks_of(schedule, cost, [1.0] * 4, [100.0, 100.0])
    found = improved(tasks, tasks.start, span=False, seed=seed, attempts=4000, hot=1.0, cold=0.05)
    assert found is not None
    for rank in tasks.ordered(found[0], "better"):
        done: dict[int, list[int]] = {}
        for action in rank:
            for part in action.parts:
                if part.kind in (fastpipe.ActionKind.B, fastpipe.ActionKind.W):
                    done.setdefault(part.stage, []).append(part.microbatch)
        assert all(numbers == sorted(numbers) for numbers in done.values())


def test_the_search_finds_what_a_bad_order_wastes() -> None:
    """GPipe's backwards wait for all forwards; 1F1B's memory allows better, and the search gets nearly there."""
    tasks = tight(split_backwards(made("gpipe", 3, 6, {})), CostModel())
    found = improved(tasks, tasks.start, span=False, seed=0, attempts=20000, hot=0.5, cold=0.01)
    assert found is not None and found[1] < engine.measure(tasks, tasks.start, span=False)
    assert found[1] <= 3 * 6 + 2  # the optimum: work and the way to the last rank


def test_what_does_not_fit_is_no_start() -> None:
    schedule = made("zb_h1", 4, 8, {})
    tasks = tasks_of(schedule, CostModel(), [1.0] * 4, [3.0] * 4)
    assert improved(tasks, tasks.start, span=False, seed=0, attempts=5, hot=1.0, cold=0.0) is None


@pytest.mark.parametrize("span", [False, True])
def test_what_takes_no_time_is_no_way_round_a_ring(span: bool) -> None:
    """Tasks of no duration may wait for each other in a ring that costs nothing: such an order is not taken."""
    schedule = made("interleaved_zb", 3, 4, {"stages_per_rank": 2})
    cost = CostModel([0.0, 1.0, 0.0, 0.0, 1.0, 0.0], [0.0, 0.0, 1.0, 0.0, 0.0, 1.0], [1.0, 0.0] * 3)
    tasks = tasks_of(schedule, cost, [1.0] * 6, [100.0] * 3)
    for seed in range(3):
        found = improved(tasks, tasks.start, span=span, seed=seed, attempts=2000, hot=2.0, cold=0.1)
        assert found is not None and engine.measure(tasks, found[0], span) == found[1]
        tasks.ordered(found[0], "better").validate()


@pytest.mark.parametrize("forward", [0.0, 1e-30])
def test_a_ring_that_takes_no_time_is_found(forward: float) -> None:
    """Nothing grows in it from one renewal to the next, so it would look like an order that can run."""
    schedule = made("interleaved_zb", 2, 4, {"stages_per_rank": 2})
    tasks = tasks_of(schedule, CostModel(forward, forward, 1.0), [1.0] * 4, [100.0] * 2)
    for seed in range(3):
        found = improved(tasks, tasks.start, span=False, seed=seed, attempts=3000, hot=2.0, cold=0.5)
        assert found is not None and engine.measure(tasks, found[0], False) == found[1]


@pytest.mark.skipif(native_plan.library() is None, reason="compares the library with Python")
@pytest.mark.parametrize("limit", [3.0, 4.0])
def test_both_languages_construct_the_same(limit: float) -> None:
    placement = fastpipe.Placement.v(4)
    tasks = tasks_of(unordered(placement, 6), uneven(8), [0.5] * 8, [limit] * 4)
    rng = np.random.default_rng(1)
    keys, reserves = rng.random((20, len(tasks))), 0.5 * rng.integers(0, 2, (20, len(tasks)))
    patience = rng.random(20)
    found = engine.construct(tasks, list(keys), list(reserves), patience.tolist(), span=True)
    for key, reserve, wait, (order, objective) in zip(keys, reserves, patience, found, strict=True):
        python = engine.ListScheduling(tasks, key, reserve, wait).run()
        if python is None:
            assert objective == math.inf
        else:
            assert python == order.tolist()
            assert objective == engine.measure(tasks, order, span=True)
    assert sum(objective < math.inf for _, objective in found) > 0


@pytest.mark.parametrize("placement", [fastpipe.Placement.loop(3, 3), fastpipe.Placement.wave(3, 4)], ids=str)
@pytest.mark.parametrize("spare", [1, 2, 6])
def test_list_scheduling_never_stops_with_its_ladder(placement: fastpipe.Placement, spare: int) -> None:
    depth = placement.num_stages // 3
    limit = (depth - 1 + spare) / depth
    tasks = tasks_of(unordered(placement, 5), uneven(placement.num_stages), [1 / depth] * 3 * depth, [limit] * 3)
    keys = Keys(tasks, seed=spare)
    for _ in range(25):
        [(order, objective)] = engine.construct(tasks, [keys.draw()], [keys.ladder], [0.5], False)
        assert objective < math.inf
        assert fits(tasks.peaks(order), tasks.limit.tolist())
        tasks.ordered(order, "listed").validate()


def test_backwards_are_split_and_joined() -> None:
    schedule = made("1f1b", 3, 5, {})
    apart = split_backwards(schedule).validate()
    assert apart.splits_backward and join_backwards(apart) == schedule
    assert join_backwards(made("zbv", 3, 5, {})).num_actions < made("zbv", 3, 5, {}).num_actions
