"""Processes agree on one plan; only the order can change."""

from typing import Any

import pytest
import torch.distributed as dist

import fastpipe
from fastpipe import Pipeline, make_schedule
from fastpipe.runtime.model.chain import Chain
from tests.conftest import WAYS
from tests.distributed.ranks import GroupOf
from tests.runtime.checks import assert_same, reference_of
from tests.runtime.models import CASES, squared


def go_on(transport: str, executor: str, schedule: str, everywhere: bool) -> list[Any]:
    """A step, a profile, a plan on rank 0 or on all, two more steps; each compared with the unsplit model."""
    case = CASES["plain"]
    pipe = Pipeline(case.layers(8), schedule, 4, squared, transport=transport, executor=executor)
    unsplit = Chain(dict(enumerate(case.layers(8))))
    costs = None
    for number, (given, twin) in enumerate(zip(case.batches(3, 8), case.batches(3, 8), strict=True)):
        if number == 1:
            costs = pipe.profile(*given.args, target=given.target)
            options: dict[str, Any] = {"num_ranks": pipe.num_ranks, "num_microbatches": 4, "effort": 0.002}
            mine = everywhere or pipe.rank == 0
            pipe.replan(fastpipe.plan(costs, placement=pipe.schedule, **options) if mine else None)
        result = pipe.step(*given.args, target=given.target)
        assert_same(pipe, result, unsplit, reference_of(unsplit, twin, pipe, case))
    return [costs, pipe.schedule.to_csv()]


@pytest.mark.parametrize(
    ("executor", "transport", "schedule", "everywhere"),
    [(*way, *case) for way, case in zip(WAYS, [("dualpipe", True), ("1f1b", False), ("zbv", True)], strict=True)],
    indirect=["executor"],
)
def test_processes_go_on_by_one_plan(
    transport: str, schedule: str, everywhere: bool, executor: str, group_of: GroupOf
) -> None:
    answers = group_of(2).run(go_on, transport, executor, schedule, everywhere)
    assert answers[0] == answers[1]


def refused() -> list[str]:
    """What is said of plans that move layers, that differ, or that rank 0 does not have; the pipeline goes on."""
    case, rank = CASES["plain"], dist.get_rank()
    pipe = Pipeline(case.layers(8), "zbv", 4, squared)
    given = case.batches(1, 8)[0]
    numbers = {"num_ranks": 2, "num_microbatches": 4}
    loop = make_schedule("interleaved_1f1b", **numbers)
    found = []
    layers = fastpipe.LayerCosts(8, [5.0, *[1.0] * 7])
    for plan in (
        loop,
        fastpipe.plan(layers, placement=pipe.schedule, effort=0, **numbers),
        make_schedule("v_half" if rank else "zbv", **numbers),
        None if rank == 0 else pipe.schedule,
        "1f1b" if rank else pipe.schedule,
        fastpipe.plan(fastpipe.CostModel(), placement=pipe.schedule, recompute="full", effort=0, **numbers),
    ):
        try:
            pipe.replan(plan)
            found.append("nothing")
        except (TypeError, ValueError, fastpipe.StepError) as error:
            found.append(str(error))
        pipe.step(*given.args, target=given.target)
    return found


def test_processes_refuse_what_they_cannot_do(group_of: GroupOf) -> None:
    for rank, (moves, cuts, differ, nothing, wrong, again) in enumerate(group_of(2).run(refused)):
        assert "moves layers" in moves and "processes" in moves and "fastpipe.save_checkpoint" in moves
        assert "moves layers" in cuts
        assert "plan differs between rank 0 and rank 1" in differ
        assert "plan = None on rank 0" in nothing
        assert "plan is a str" in wrong, rank
        assert "which stages recompute" in again and "recompute=plan.recompute" in again
