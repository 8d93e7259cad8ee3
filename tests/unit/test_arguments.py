"""Wrong arguments of the planning functions: one line that names the argument and the value."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fastpipe
from fastpipe import Action, CostModel, Op, Placement, Program, Schedule, formulas
from fastpipe.bounds import any_placement_bounds, bounds
from fastpipe.visualize import grid, pareto, to_chrome_trace, to_html

SCHEDULE: Any = fastpipe.make_schedule("1f1b", num_ranks=2, num_microbatches=3)
PROGRAM: Any = fastpipe.lower(SCHEDULE)
TIMELINE: Any = fastpipe.simulate(PROGRAM)
PLAN = fastpipe.plan(CostModel(), num_ranks=2, num_microbatches=2, effort=0, placement=Placement.loop(2))
ROWS = fastpipe.compare(["1f1b"], num_ranks=2, num_microbatches=3)
ANY: Any = fastpipe
"""The public functions, called with types that they do not take."""

CASES: list[tuple[Callable[[], Any], str]] = [
    (lambda: ANY.simulate(None), "work: expected a Schedule or a Program, found NoneType"),
    (lambda: ANY.simulate(SCHEDULE, {"forward": 1}), "cost: expected a CostModel, found dict"),
    (lambda: ANY.simulate(SCHEDULE, 0), "cost: expected a CostModel, found int"),
    (lambda: ANY.simulate(SCHEDULE, lanes=None), "lanes = None"),
    (lambda: ANY.lower(PROGRAM), "schedule: expected a Schedule, found Program"),
    (lambda: ANY.validate_schedule("1f1b"), "schedule: expected a Schedule, found str"),
    (lambda: ANY.validate_program(SCHEDULE), "program: expected a Program, found Schedule"),
    (lambda: ANY.plot(SCHEDULE, "x.png"), "timeline: expected a Timeline, found Schedule"),
    (lambda: ANY.plot(ANY.simulate(SCHEDULE), "x.png", width="a"), "width = 'a'"),
    (lambda: ANY.plot(ANY.simulate(SCHEDULE), "x.png", width=1), "width = 1"),
    (lambda: ANY.plot(ANY.simulate(SCHEDULE), "x.png", width=10**400), "width = 1000"),
    (lambda: ANY.compare("1f1b", num_ranks=2, num_microbatches=3), "schedules: expected a list"),
    (lambda: ANY.compare(["1f1b"], num_ranks=2, num_microbatches=3, cost=1), "cost: expected a CostModel, found int"),
    (lambda: ANY.simulate(SCHEDULE, lanes=5), "lanes = 5: use 'directed'"),
    (lambda: ANY.simulate(SCHEDULE, lanes=[0.5, 1]), "lanes names 0.5: lanes are whole numbers"),
    (lambda: ANY.simulate(SCHEDULE, lanes=[0, -1]), "lanes names -1: lanes are whole numbers"),
    (lambda: ANY.simulate(SCHEDULE, lanes=[0, 2**31]), "lanes names 2147483648: lanes are whole numbers from 0 to"),
    (lambda: ANY.simulate(SCHEDULE, CostModel(comm={(0, 5): 9.0})), "comm names the link 0->5, and num_ranks = 2"),
    (lambda: ANY.simulate(SCHEDULE, CostModel(bandwidth={(2, 0): 9.0})), "bandwidth names the link 2->0"),
    (lambda: bounds(SCHEDULE, CostModel(comm={(0, 5): 9.0})), "comm names the link 0->5, and num_ranks = 2"),
    (
        lambda: any_placement_bounds(CostModel(comm={(0, 5): 9.0}), num_ranks=2, num_stages=2, num_microbatches=1),
        "comm names the link 0->5, and num_ranks = 2",
    ),
    (
        lambda: fastpipe.plan(CostModel(comm={(0, 5): 9.0}), num_ranks=2, num_microbatches=1),
        "comm names the link 0->5, and num_ranks = 2",
    ),
    (lambda: CostModel(comm={(-1, 0): 9.0}), "comm: (-1, 0) is no link"),
    (lambda: CostModel(comm={(True, 0): 9.0}), "comm: (True, 0) is no link"),
    (lambda: CostModel(comm=1e305), "comm = 1e+305: give numbers from 0 to 1e+100, larger ones in a larger unit"),
    (lambda: Schedule.from_actions("x", Placement.loop(1), 2**32 + 1, [["0F0"]]), "num_microbatches = 4294967297"),
    (lambda: Schedule.from_actions("x", Placement.loop(1), 1, {0: ["0F0"]}), "orders is a dict: give a list"),  # type: ignore[arg-type]
    (lambda: Schedule.from_actions("x", Placement.loop(2), 1, [["0F0"]]), "orders: the placement has 2 ranks; found 1"),
    (lambda: Schedule.from_actions("x", Placement.loop(1), 1, [[(0, 0.9, 0, -1, -1)]]), "its fields are whole numbers"),
    (lambda: Placement(5 * 10**5, ((0, 1),)), "no stage is placed on rank 2"),
    (lambda: Placement.loop(10**9), "num_ranks = 1000000000: there are at most 1,000,000; ask for fewer"),
    (lambda: Placement(10**9, ((0, 1),)), "num_ranks = 1000000000: there are at most 1,000,000"),
    (lambda: Placement.wave(4, 10**9), "num_ranks * stages_per_rank = 4000000000: there are at most 10,000,000"),
    (lambda: fastpipe.LayerCosts(10**12), "num_layers = 1000000000000: there are at most 1,000,000"),
    (lambda: ANY.partition([1, 2], 10**9), "num_stages = 1000000000: there are at most 10,000,000"),
    (lambda: ANY.partition(10**12, 10**9), "num_stages = 1000000000: there are at most 10,000,000"),
    (
        lambda: any_placement_bounds(num_ranks=2, num_stages=10**9, num_microbatches=2),
        "num_stages = 1000000000: there are at most 10,000,000",
    ),
    (lambda: bounds(Placement.loop(2), num_microbatches=10**400), "num_microbatches = 1000"),
    (lambda: bounds(Placement.loop(2), num_microbatches=2, memory=10**400), "memory = 1000"),
    (
        lambda: ANY.plan(CostModel(), num_ranks=2, num_microbatches=1, max_stages_per_rank=10**9),
        "max_stages_per_rank = 1000000000: there are at most 1,000; ask for fewer",
    ),
    (lambda: ANY.plan(CostModel(), num_ranks=2, num_microbatches=1, exact="no"), "exact = 'no': give True or False"),
    (lambda: ANY.plan(CostModel(), num_ranks=2, num_microbatches=1, progress=-1), "progress = -1: give a function"),
    (lambda: bounds(Placement.loop(2), num_microbatches=2, fused="no"), "fused = 'no': give True or False"),  # type: ignore[arg-type]
    (
        lambda: any_placement_bounds(num_ranks=2, num_stages=2, num_microbatches=2, even="no"),  # type: ignore[arg-type]
        "even = 'no': give True or False",
    ),
    (lambda: ANY.compare(["1f1b"], num_ranks=2, num_microbatches=2, skip_impossible=2), "skip_impossible = 2: give"),
    (lambda: ANY.compare(5, num_ranks=2, num_microbatches=2), "schedules: expected a list of names, found the int 5"),
    (lambda: SCHEDULE.to_csv(aligned="no"), "aligned = 'no': give True or False"),
    (lambda: ANY.plot(ANY.simulate(SCHEDULE), "x.png", labels="no"), "labels = 'no': give True or False"),
    (lambda: ANY.plot(ANY.simulate(SCHEDULE), "x.png", transfers="no"), "transfers = 'no': give True or False"),
    (lambda: ANY.plot(ANY.simulate(SCHEDULE), "x.png", dpi=0), "dpi = 0: give 10 to 2400 pixels an inch"),
    (lambda: ANY.plot(ANY.simulate(SCHEDULE), "x.png", row_height=-1), "row_height = -1: give 0.01 to 20 inches"),
    (lambda: Placement(1, ((0,),), 5), "name: expected a str, found int"),  # type: ignore[arg-type]
    (lambda: fastpipe.LayerCosts(2, microbatch_size=None), "microbatch_size = None: give a whole"),  # type: ignore[arg-type]
    (lambda: fastpipe.LayerCosts(2, batch_size=4).rows(0), "num_microbatches = 0: give a whole number"),
    (lambda: formulas.bubble("1f1b", num_ranks=2, num_microbatches=2, stages_per_rank=True), "stages_per_rank = True"),
    (lambda: ANY.lower(SCHEDULE, coalesce="no"), "coalesce = 'no': give True or False"),
    (lambda: ANY.lower(SCHEDULE, recv_lookahead=True), "recv_lookahead = True: give a whole number of at least 0"),
    (lambda: Placement.custom([0, 1.7]), "stage_to_rank[1] = 1.7: ranks are whole numbers"),  # type: ignore[list-item]
    (lambda: Placement.custom("01"), "stage_to_rank[0] = '0': ranks are whole numbers"),  # type: ignore[arg-type]
    (lambda: Placement.custom([0, -1]), "stage_to_rank[1] = -1: ranks are whole numbers of at least 0"),
    (lambda: Placement.custom(3), "stage_to_rank = 3: give the rank of every stage"),  # type: ignore[arg-type]
    (lambda: Placement.loop(1.5), "num_ranks = 1.5: give a whole number"),  # type: ignore[arg-type]
    (lambda: Placement.loop("2"), "num_ranks = '2': give a whole number"),  # type: ignore[arg-type]
    (lambda: Placement.loop(2, 0), "stages_per_rank = 0: give a whole number of at least 1"),
    (lambda: Placement.wave(2, 1.5), "stages_per_rank = 1.5: give a whole number"),  # type: ignore[arg-type]
    (lambda: Placement.v(0), "num_ranks = 0: give a whole number"),
    (lambda: Placement.bidirectional("2"), "num_ranks = '2': give a whole number"),  # type: ignore[arg-type]
    (lambda: CostModel(forward=None), "forward = None"),  # type: ignore[arg-type]
    (lambda: CostModel(comm=10**400), "comm = 1000"),
    (lambda: ANY.make_schedule("zbv", num_ranks=2, num_microbatches=3, forward=10**400), "forward = 1000"),
    (lambda: ANY.partition("123", 2), "costs = '123'"),
    (lambda: ANY.partition(2.5, 2), "costs = 2.5"),
    (lambda: ANY.partition(-1, 1), "costs = -1"),
    (lambda: ANY.partition(True, 1), "costs = True: give a whole number"),
    (lambda: ANY.partition(3, True), "num_stages = True: give a whole number"),
    (lambda: ANY.partition({1: 2.0, 2: 3.0}, 1), "costs = {1: 2.0, 2: 3.0}: give the cost of every layer"),
    (lambda: ANY.partition([1, b"2"], 1), "costs[1] = b'2'"),
    (lambda: ANY.partition([1, "2"], 1), "costs[1] = '2'"),
    (lambda: ANY.partition([10**400], 1), "costs[0] = 1000"),
    (lambda: ANY.partition([1, 2], 1.0), "num_stages = 1.0"),
    (lambda: Placement(2.0, ((0, 1),)), "num_ranks = 2.0"),  # type: ignore[arg-type]
    (lambda: Placement(1, (("0",),)), "stage 0 is placed on rank '0'"),  # type: ignore[arg-type]
    (lambda: Placement(1, 0), "routes = 0: give for each route the rank of every stage"),  # type: ignore[arg-type]
    (lambda: Placement(1, (0,)), "routes = (0,): give for each route"),  # type: ignore[arg-type]
    (lambda: Schedule.from_actions("x", [0], 1, [[]]), "placement: expected a Placement, found list"),  # type: ignore[arg-type]
    (lambda: Schedule.from_actions("x", Placement.loop(1), ANY.action.NONE, [[]]), "num_microbatches = -1"),
    (lambda: Schedule.from_actions("x", Placement.loop(1), float("inf"), [[]]), "num_microbatches = inf"),  # type: ignore[arg-type]
    (lambda: Schedule.from_actions(["x"], Placement.loop(1), 1, [[]]), "name: expected a str"),  # type: ignore[arg-type]
    (lambda: Schedule.from_actions("x", Placement.loop(1), 1, [[0]]), "rank 0: give each action"),  # type: ignore[list-item]
    (lambda: Placement.loop(2).rank_of(-1), "stage = -1: give a whole number from 0 to 1"),
    (lambda: Placement.loop(2).rank_of(0, 1), "route = 1: give a whole number from 0 to 0"),
    (lambda: Placement.bidirectional(2).route_of(4, 4), "microbatch = 4: give a whole number from 0 to 3"),
    (lambda: Placement.loop(2).route_of(0, None), "num_microbatches = None: give a whole number"),  # type: ignore[arg-type]
    (lambda: Placement.loop(2).stages_of(2), "rank = 2: give a whole number from 0 to 1"),
    (lambda: PROGRAM.channels[0].peer_of(2), "rank = 2: activation 0->1 has the ranks 0 and 1"),
    (lambda: TIMELINE.compute_spans(-1), "rank = -1: give a whole number from 0 to 1"),
    (lambda: TIMELINE.difference(SCHEDULE), "other: expected a Timeline, found Schedule"),
    (lambda: TIMELINE.to_html(5), "path = 5: give the name of a file"),
    (lambda: TIMELINE.to_chrome_trace(""), "path = '': give the name of a file"),
    (lambda: TIMELINE.plot(b"x.png"), "path = b'x.png': give the name of a file"),
    (lambda: ANY.Timeline(SCHEDULE, [], []), "program: expected a Program, found Schedule"),
    (lambda: ANY.Timeline(PROGRAM, TIMELINE.starts, TIMELINE.ends[:1]), "ends: give for each rank the seconds"),
    (lambda: ANY.Timeline(PROGRAM, [list(s) for s in TIMELINE.starts], TIMELINE.ends), "starts: give for each rank"),
    (lambda: Schedule.from_csv(None), "path = None: give the name of a file"),  # type: ignore[arg-type]
    (lambda: CostModel.from_timeline(SCHEDULE), "timeline: expected a Timeline, found Schedule"),
    (lambda: CostModel(backward_weight=[1, 2]).compute_seconds(Op.OVERLAP_F_B, 0), "pair_stage = -1: give"),
    (lambda: CostModel().compute_seconds("F", 0), "'F' is not a valid Op"),  # type: ignore[arg-type]
    (lambda: Action.overlap(None, None), "OVERLAP_F_B takes an F and a B"),  # type: ignore[arg-type]
    (lambda: Program("x", None, 1, (), ()), "placement: expected a Placement, found NoneType"),  # type: ignore[arg-type]
    (lambda: Program("x", Placement.loop(1), 0, (), ()), "num_microbatches = 0: give a whole number"),
    (lambda: Program("x", Placement.loop(1), 1, (), ([[0]],)), "columns of rank 0: expected a ndarray, found list"),  # type: ignore[arg-type]
    (lambda: Schedule("x", Placement.loop(1), 1, 5), "columns: expected a Sequence or a ndarray, found int"),  # type: ignore[arg-type]
    (lambda: Schedule("x", Placement.loop(1), 1, [], "no"), "options: expected a Mapping or None, found str"),  # type: ignore[arg-type]
    (lambda: Schedule.from_actions("x", Placement.loop(1), 1, None), "orders is a NoneType: give a list"),  # type: ignore[arg-type]
    (lambda: fastpipe.LayerCosts(4).parameters([[0, 2], [2, 4]]), "part: expected a range, found list"),  # type: ignore[list-item]
    (lambda: formulas.bubble_formula(["1f1b"]), "name = ['1f1b']: no closed form"),  # type: ignore[arg-type]
    (lambda: ANY.compare(["x"], num_ranks=2, num_microbatches=2, skip_impossible=True), "schedule name = 'x'"),
    (
        lambda: ANY.compare(["1f1b"], num_ranks=0, num_microbatches=2, skip_impossible=True),
        "num_ranks = 0: give a whole",
    ),
    (lambda: ANY.compare([], num_ranks=2, num_microbatches=2, lanes="x"), "lanes = 'x': use 'directed'"),
    (lambda: PLAN.recompute(2), "stage = 2: give a whole number from 0 to 1"),
    (lambda: grid(PROGRAM), "schedule: expected a Schedule, found Program"),  # type: ignore[arg-type]
    (lambda: grid(SCHEDULE, width=0), "width = 0: give a whole number of at least 1"),
    (lambda: grid(SCHEDULE, colour="no"), "colour = 'no': give True or False"),  # type: ignore[arg-type]
    (lambda: to_html(SCHEDULE, "x.html"), "timeline: expected a Timeline, found Schedule"),
    (lambda: to_chrome_trace(SCHEDULE, "x.json"), "timeline: expected a Timeline, found Schedule"),
    (lambda: pareto(ROWS, "x.png", dpi=0), "dpi = 0: give 10 to 2400 pixels an inch"),
    (lambda: pareto(ROWS, "x.png", limit=float("nan")), "limit = nan: give 0 to inf in the unit of peak_memory"),
    (lambda: pareto(ROWS, "x.png", title=5), "title: expected a str or None, found int"),  # type: ignore[arg-type]
    (lambda: pareto(ROWS, "x.png", memory_label=None), "memory_label: expected a str, found NoneType"),  # type: ignore[arg-type]
    (lambda: pareto(ROWS, "x.png", chosen="x"), "chosen = 'x': no row has this name; there are 1f1b"),
    (lambda: pareto(ROWS, "x.png", others=[1]), "others: expected what fastpipe.compare returned, found [1]"),  # type: ignore[list-item]
    (lambda: pareto(None, "x.png"), "rows: expected what fastpipe.compare returned, found [None]"),  # type: ignore[arg-type]
    (lambda: SCHEDULE.chunk_order(-1), "rank = -1: give a whole number from 0 to 1"),
    (lambda: SCHEDULE.chunk_order(2), "rank = 2: give a whole number from 0 to 1"),
]


@pytest.mark.parametrize(("call", "message"), CASES, ids=[message for _, message in CASES])
def test_wrong_arguments_are_refused_by_name(call: Callable[[], Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError)) as refused:
        call()
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_file_of_costs_that_is_no_text_is_named(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"costs\.json: .*invalid start byte"):
        CostModel.from_json(path)


def test_a_placement_of_lists_and_numbers_of_numpy_is_the_same() -> None:
    given: Any = np.int64(2), [[np.int64(0), np.int32(1)]]
    found = Placement(*given)
    assert found == Placement(2, ((0, 1),)) and hash(found) == hash(Placement(2, ((0, 1),)))
    count: Any = np.int64(1)
    orders = [["0F0", "0B0"], ["1F0", "1B0"]]
    schedule, same = (Schedule.from_actions("x", found, m, orders) for m in (count, 1))
    assert schedule == same and hash(schedule) == hash(same)
    assert ANY.lower(schedule).to_json() == ANY.lower(same).to_json()


def test_whole_numbers_of_numpy_are_numbers() -> None:
    numbers: Any = {"num_ranks": np.int64(2), "num_microbatches": np.int32(3)}
    assert fastpipe.make_schedule("1f1b", **numbers) == SCHEDULE
    assert repr(fastpipe.make_schedule("1f1b", **numbers)) == repr(SCHEDULE)


def test_the_longest_step_that_is_simulated_has_finite_numbers_everywhere(tmp_path: Path) -> None:
    """Microseconds in a trace, and sums over the ranks, are still numbers."""
    timeline = fastpipe.simulate(SCHEDULE, CostModel(forward=1e100))
    path = tmp_path / "trace.json"
    to_chrome_trace(timeline, path)
    assert "Infinity" not in path.read_text() and "NaN" not in path.read_text()
    assert 0 < timeline.bubble_fraction < 1


def test_numpys_whole_numbers_are_ranks_and_lanes() -> None:
    assert Placement.custom(np.array([0, 1])) == Placement.custom([0, 1])  # type: ignore[arg-type]
    lanes = [np.int64(lane) for lane in range(len(PROGRAM.channels))]
    assert fastpipe.simulate(PROGRAM, lanes=lanes).makespan == fastpipe.simulate(PROGRAM).makespan


SMALL: list[tuple[Callable[..., Any], tuple[Any, ...]]] = [
    (lambda p, v: Placement.loop(p, v), (100, 2)),
    (lambda p, v: Placement.wave(p, v), (3, 100)),
    (lambda p: Placement.bidirectional(p), (100,)),
    (
        lambda p, m, v: formulas.bubble("interleaved_1f1b", num_ranks=p, num_microbatches=m, stages_per_rank=v),
        (8, 80, 4),
    ),
    (lambda p, m: formulas.bubble("1f1b", num_ranks=p, num_microbatches=m, as_="total"), (100, 100)),
    (lambda p, m: formulas.bubble("dualpipev", num_ranks=p, num_microbatches=m), (60, 120)),
    (lambda p, m: formulas.peak_activations("zbv", num_ranks=p, num_microbatches=m), (60, 120)),
    (lambda p: formulas.smallest_num_microbatches("zbv", 0.25, num_ranks=p), (100,)),
    (lambda p, v: formulas.ramp_bound(1.0, num_ranks=p, stages_per_rank=v), (100, 100)),
    (lambda p, m, k: formulas.single_stage_bound(num_ranks=p, num_microbatches=m, live=k), (50, 120, 10)),
    (lambda k, p, v: formulas.wave_bubble_bound(k, num_ranks=p, stages_per_rank=v), (100, 8, 100)),
    (lambda p, f: formulas.memory_bubble_bound(0.5, num_ranks=p, forward=f), (100, 100)),
    (lambda f, i, w: formulas.full_throughput_memory(forward=f, backward_input=i, backward_weight=w), (100, 100, 100)),
    (lambda p, s, m: any_placement_bounds(num_ranks=p, num_stages=s, num_microbatches=m, memory=2), (50, 100, 120)),
    (lambda m, k: bounds(Placement.loop(2), num_microbatches=m, memory=[k, k]), (120, 100)),
    (lambda p, m, v: ANY.make_schedule("hanayo", num_ranks=p, num_microbatches=m, waves=v), (2, 2, 100)),
    (lambda p, m, v: ANY.make_schedule("wave_zb", num_ranks=p, num_microbatches=m, stages_per_rank=v), (8, 8, 40)),
    (lambda p, m, f: ANY.make_schedule("zb_auto", num_ranks=p, num_microbatches=m, forward=f), (2, 4, 3)),
    (lambda p, m, f: ANY.make_schedule("zb_auto", num_ranks=p, num_microbatches=m, forward=[f, f]), (2, 4, 3)),
    (lambda n: ANY.lower(SCHEDULE, recv_lookahead=n).to_json(), (3,)),
    (lambda n, k: ANY.partition(n, k), (100, 7)),
    (lambda n, k, b: fastpipe.LayerCosts(n, batch_size=b).partition(k), (100, 7, 120)),
    (lambda a, b, s: CostModel(comm={(a, b): s}), (0, 1, 100)),
]
"""Functions, and numbers whose sums and products are too large for 8 bits."""


@pytest.mark.parametrize("kind", [np.int8, np.uint8, np.int16, np.int64])
@pytest.mark.parametrize("number", range(len(SMALL)))
def test_small_numbers_of_numpy_do_not_overflow(number: int, kind: Callable[[int], Any]) -> None:
    call, given = SMALL[number]
    assert call(*map(kind, given)) == call(*given)


def test_floats_of_numpy_do_not_overflow() -> None:
    given = np.float16(6e4), np.float32(3e38)
    for number in given:
        assert formulas.full_throughput_memory(forward=number, backward_input=number) == pytest.approx(0.5, rel=1e-4)
        assert formulas.memory_bubble_bound(0.0, num_ranks=4, forward=number) == 4 * float(number)
    with pytest.raises(ValueError, match="forward = 1e\\+308: costs are finite numbers from 0 to 1e\\+100"):
        formulas.bubble("1f1b", num_ranks=4, num_microbatches=8, forward=1e308)


def test_a_number_of_layers_is_cut_without_a_list_of_them() -> None:
    assert fastpipe.partition(10**12, 2) == [range(5 * 10**11), range(5 * 10**11, 10**12)]
