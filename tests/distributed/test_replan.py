"""Processes agree on one plan; only the order can change."""

import contextlib
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

import fastpipe
from fastpipe import Pipeline, Schedule, make_schedule
from fastpipe.runtime import tune
from fastpipe.runtime.model.chain import Chain
from fastpipe.runtime.step import Programs
from tests.conftest import WAYS
from tests.distributed.ranks import GroupOf, on_ranks
from tests.distributed.test_step import refuses
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


@on_ranks(2)
def test_processes_refuse_what_they_cannot_do() -> None:
    """Plans that move layers, that differ, or that rank 0 does not have; the pipeline goes on."""
    case, rank = CASES["plain"], dist.get_rank()
    pipe = Pipeline(case.layers(8), "zbv", 4, squared)
    given = case.batches(1, 8)[0]
    numbers: dict[str, Any] = {"num_ranks": 2, "num_microbatches": 4}
    layers = fastpipe.LayerCosts(8, [5.0, *[1.0] * 7])
    recomputing = fastpipe.plan(fastpipe.CostModel(), placement=pipe.schedule, recompute="full", effort=0, **numbers)
    for plan, said in (
        (make_schedule("interleaved_1f1b", **numbers), "moves layers.*processes.*fastpipe.save_checkpoint"),
        (fastpipe.plan(layers, placement=pipe.schedule, effort=0, **numbers), "moves layers"),
        (make_schedule("v_half" if rank else "zbv", **numbers), "plan differs between rank 0 and rank 1"),
        (None if rank == 0 else pipe.schedule, "plan = None on rank 0"),
        ("1f1b" if rank else pipe.schedule, "plan is a str"),
        (recomputing, "which stages recompute.*recompute=plan.recompute"),
    ):
        with pytest.raises((TypeError, ValueError, fastpipe.StepError), match=said):
            pipe.replan(plan)
        pipe.step(*given.args, target=given.target)


@on_ranks(2)
def test_whoever_cannot_profile_is_an_error_for_all() -> None:
    """A profile is more than the steps that it runs: a step on another rank is not taken for one of these."""
    case, rank = CASES["plain"], dist.get_rank()
    pipe = Pipeline(case.layers(8), "1f1b", 4, squared)
    given = case.batches(1, 8)[0]
    (x,), target = given.args, given.target
    refuses(lambda: pipe.profile(iter([x]) if rank else x, target=target), "not iterators", on=1)
    for calls in (
        (pipe.step, pipe.profile),
        (lambda x, target: fastpipe.check_parity(pipe, None, (x, target)), pipe.profile),
        (pipe.profile, pipe.profile_layers),
        (pipe.profile, partial(pipe.profile, num_steps=0)),
    ):
        refuses(lambda calls=calls: calls[rank](x, target=target), "the ranks do not make the same call")
    with mock.patch.object(tune, "metered", side_effect=MemoryError) if rank else contextlib.nullcontext():
        if rank:
            with pytest.raises(MemoryError):
                pipe.profile(x, target=target)
        refuses(lambda: (pipe.eval_step if rank else pipe.profile)(x, target=target), "do not make the same call")
    pipe.profile(x, target=target, num_steps=1)


@on_ranks(2)
def test_whoever_cannot_follow_a_plan_keeps_all_at_the_former_one() -> None:
    case, rank = CASES["plain"], dist.get_rank()
    pipe = Pipeline(case.layers(8), "1f1b", 4, squared)
    given = case.batches(1, 8)[0]
    other = make_schedule("gpipe", num_ranks=2, num_microbatches=4)
    for owner, name, plan in ((Programs, "successor", other), (Schedule, "from_csv", None if rank else other)):
        failing = mock.patch.object(owner, name, side_effect=MemoryError("no room"))
        with failing if rank else contextlib.nullcontext():
            refuses(lambda: pipe.replan(plan), "no room", on=1, kind=MemoryError)  # noqa: B023
        assert pipe.schedule.name == "1f1b"
    pipe.step(*given.args, target=given.target)
