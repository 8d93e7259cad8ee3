"""torch.distributed.pipelining: files both ways, in both of its formats; orders that are its own, action for action."""

import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from torch.distributed.pipelining import schedules

import fastpipe
from fastpipe import ActionKind, Schedule
from fastpipe.cli import main
from tests.unit.planning import random_orders

CLASSES = [
    "ScheduleInterleaved1F1B",
    "ScheduleLoopedBFS",
    "ScheduleInterleavedZeroBubble",
    "ScheduleZBVZeroBubble",
    "ScheduleDualPipeV",
]
"""Those that can dump: torch's schedules of one stage per rank cannot."""
COMING_FROM_TORCH = (Path(__file__).parents[2] / "docs" / "coming-from-torch.md").read_text()
OURS = ["gpipe", "1f1b", "interleaved_1f1b", "dualpipev"]


def stage(ranks: int, stages_per_rank: int) -> Any:
    """What torch's planner asks of a stage."""
    from torch.distributed.pipelining.stage import PipelineStage

    made = mock.create_autospec(PipelineStage, instance=True)
    made.group_rank, made.group_size, made.submod = 0, ranks, None
    made.num_stages = ranks * stages_per_rank
    made.stage_index_to_group_rank = {s: s % ranks for s in range(made.num_stages)}
    return made


def runtime(ranks: int, stages_per_rank: int, microbatches: int) -> Any:
    stages = [stage(ranks, stages_per_rank)] * stages_per_rank
    return schedules._PipelineScheduleRuntime(stages, microbatches)


def by_torch(name: str, ranks: int, microbatches: int) -> Any:
    """torch's own schedule, lowered by torch."""
    made = getattr(schedules, name)([stage(ranks, 2)] * 2, microbatches)
    loaded = runtime(ranks, 2, microbatches)
    loaded.pipeline_order = made.pipeline_order
    loaded._prepare_schedule_with_comms(made.pipeline_order)
    return loaded


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("dumped", ["compute_only", "compute_comms"])
def test_what_torch_dumps_loads_here(name: str, dumped: str, tmp_path: Path) -> None:
    path = tmp_path / "torch.csv"
    by_torch(name, 4, 8)._dump_csv(path, format=dumped)
    schedule = Schedule.from_csv(path).validate()
    cells = [cell for row in path.read_text().splitlines() for cell in row.split(",") if cell]
    assert [str(action) for rank in schedule for action in rank] == cells
    kinds = {action.kind for rank in schedule for action in rank}
    assert ({ActionKind.UNSHARD, ActionKind.RESHARD, ActionKind.REDUCE_GRAD} <= kinds) == (dumped == "compute_comms")
    assert (ActionKind.SEND_F in kinds) == (dumped == "compute_comms")
    assert fastpipe.simulate(schedule).makespan > 0


@pytest.mark.parametrize("name", OURS)
def test_ours_load_in_torch(name: str, tmp_path: Path) -> None:
    schedule = fastpipe.make_schedule(name, num_ranks=4, num_microbatches=8)
    count = schedule.num_stages // 4
    for aligned in (False, True):
        path = tmp_path / f"ours{aligned}.csv"
        schedule.to_csv(path, aligned=aligned)
        loaded = runtime(4, count, 8)
        loaded._load_csv(path, format="compute_only")
        assert loaded.pipeline_order_with_comms.keys() == set(range(4))
        texts = [[str(a) for a in rank if a is not None] for rank in loaded.pipeline_order.values()]
        assert texts == [[str(a) for a in rank] for rank in schedule]


@pytest.mark.parametrize("name", OURS)
def test_ours_with_transfers_load_in_torch(name: str, tmp_path: Path) -> None:
    schedule = fastpipe.make_schedule(name, num_ranks=4, num_microbatches=8)
    path = tmp_path / "ours.csv"
    fastpipe.lower(schedule).to_csv(path)
    loaded = runtime(4, schedule.num_stages // 4, 8)
    loaded._load_csv(path, format="compute_comms")
    order = loaded.pipeline_order_with_comms
    assert "\n".join(",".join(map(str, order[rank])) for rank in range(4)) + "\n" == path.read_text()
    if name != "dualpipev":  # torch's simulator knows no fused pair
        receives_late = fastpipe.lower(schedule, recv_lookahead=0).to_csv()
        rows = [[schedules._Action.from_str(cell) for cell in row.split(",")] for row in receives_late.splitlines()]
        schedules._simulate_comms_compute(dict(enumerate(rows)), lambda s: s % 4, schedule.num_stages)


def progresses_in_torch(text: str, schedule: Schedule) -> None:
    """torch's own check, which raises where ranks would stop, without collectives, which it does not know; a fused
    pair, which it does not know either, as its parts."""
    plain = re.sub(r"\((\w+);(\w+)\)OVERLAP_F_B", r"\1,\2", text)
    cells = [[cell for cell in row.split(",") if cell[-1].isdigit()] for row in plain.splitlines()]
    rows = [list(map(schedules._Action.from_str, row)) for row in cells]
    schedules._simulate_comms_compute(dict(enumerate(rows)), schedule.placement.rank_of, schedule.num_stages)


@pytest.mark.parametrize("name", [family.name for family in fastpipe.list_schedules() if family.num_routes == 1])
@pytest.mark.parametrize(("ranks", "microbatches"), [(4, 8), (3, 7)])
def test_what_convert_writes_with_transfers_progresses_in_torch(
    name: str, ranks: int, microbatches: int, tmp_path: Path
) -> None:
    schedule = fastpipe.make_schedule(name, num_ranks=ranks, num_microbatches=microbatches)
    plain, comms = tmp_path / "plain.csv", tmp_path / "comms.csv"
    schedule.to_csv(plain)
    assert main(["convert", str(plain), "--to", "comms", "-o", str(comms)]) == 0
    progresses_in_torch(comms.read_text(), schedule)
    for order in () if schedule.forward_only else Schedule.from_csv(comms).validate():
        last = {part.stage: part.kind for action in order for part in action.parts if part.kind != ActionKind.RESHARD}
        assert set(last.values()) == {ActionKind.REDUCE_GRAD}  # where torch divides the gradients of a stage


def test_receives_that_are_posted_ahead_do_not_progress_in_torch() -> None:
    """Why `convert` does not write them: a rank stays at a receive whose message another one sends later."""
    schedule = fastpipe.make_schedule("1f1b", num_ranks=4, num_microbatches=8)
    with pytest.raises(ValueError, match="not progressing"):
        progresses_in_torch(fastpipe.lower(schedule).to_csv(), schedule)


@pytest.mark.filterwarnings("ignore:.*come in another order")
@pytest.mark.parametrize("seed", range(8))
def test_any_order_with_transfers_progresses_in_torch(seed: int) -> None:
    stages = [0, 1, 2, 1, 0]
    orders = random_orders(stages, 4, seed=seed, split="always")
    schedule = Schedule.from_actions("mine", fastpipe.Placement.custom(stages), 4, orders)
    progresses_in_torch(fastpipe.lower(schedule, coalesce=True).to_csv(), schedule)


def torch_order(name: str, p: int, m: int, v: int) -> list[str]:
    """What a class of torch's does on every rank, without idle steps: it needs a few numbers, not live stages."""
    schedule = object.__new__(getattr(schedules, name))
    schedule.pp_group_size, schedule._n_microbatches = p, m
    schedule.n_local_stages, schedule._stages = v, [None] * v
    schedule._num_stages = schedule.num_stages = p * v
    schedule.number_of_rounds = max(1, m // p)
    schedule.microbatches_per_round = m // schedule.number_of_rounds
    if name == "ScheduleGPipe":
        rows = list(schedule._get_pipeline_order().values())
    else:
        rows = [schedule._calculate_single_rank_operations(rank) for rank in range(p)]
    return [" ".join(str(a) for a in row if a is not None and "REDUCE" not in str(a)) for row in rows]


def our_order(name: str, p: int, m: int, **options: int) -> list[str]:
    return [str(rank) for rank in fastpipe.make_schedule(name, num_ranks=p, num_microbatches=m, **options)]


@pytest.mark.parametrize("p", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("m", [1, 2, 3, 4, 5, 6, 8, 9, 12, 13, 24])
def test_orders_are_those_of_torch(p: int, m: int) -> None:
    assert our_order("gpipe", p, m) == torch_order("ScheduleGPipe", p, m, 1)
    if m >= 2 * p - 1:  # torch leaves out the surplus of an order for 2p-1, which the search behind ZB-V does not
        assert our_order("zbv", p, m) == torch_order("ScheduleZBVZeroBubble", p, m, 2)
    if m >= 2 * p:
        assert our_order("dualpipev", p, m) == torch_order("ScheduleDualPipeV", p, m, 2)
    for v in (1, 2, 3):
        assert our_order("looped_bfs", p, m, stages_per_rank=v) == torch_order("ScheduleLoopedBFS", p, m, v)
        if m % max(1, m // p) == 0:  # torch takes no other m
            for ours, theirs in (
                ("interleaved_1f1b", "ScheduleInterleaved1F1B"),
                ("interleaved_zb", "ScheduleInterleavedZeroBubble"),
            ):
                assert our_order(ours, p, m, stages_per_rank=v) == torch_order(theirs, p, m, v)


@pytest.mark.parametrize("name", ["ScheduleGPipe", "Schedule1F1B", *CLASSES])
def test_torch_s_name_of_a_schedule_is_taken(name: str) -> None:
    """By ``get_schedule_class``, in upper and lower case; the schedule has the name in the registry."""
    short = name.removeprefix("Schedule")
    for given in (short, short.upper(), short.lower()):
        assert schedules.get_schedule_class(given).__name__ == name
        made = fastpipe.make_schedule(given, num_ranks=2, num_microbatches=4)
        assert f'| `{name}` | `"{made.name}"` |' in COMING_FROM_TORCH
