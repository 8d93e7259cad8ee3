"""A failing stage, one process a rank: its rank raises its own exception, the others say where; the next step works."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from fastpipe import StepError
from fastpipe.runtime import native
from fastpipe.runtime.step import steps
from tests.conftest import WAYS
from tests.distributed.ranks import GroupOf, on_ranks, ranks
from tests.distributed.test_step import batch, caught, pipeline
from tests.patience import PATIENCE
from tests.runtime.faults import Boom, FaultyTraining, Scenario
from tests.runtime.models import CASES


def fail_and_recover(scenario: Scenario, transport: str) -> dict[str, Any]:
    """Runs on every rank: good steps, the bad one, good steps."""
    training = FaultyTraining(scenario, transport=transport)
    for _ in range(scenario.step):
        training.good_step()
    error, _ = training.bad_step()
    for _ in range(2):
        training.good_step()
    return {
        "type": type(error),
        "text": str(error),
        "notes": getattr(error, "__notes__", []),
        "where": [getattr(error, name, None) for name in ("rank", "stage", "action", "microbatch")],
        "cause": getattr(error, "cause", None),
        "stage": training.stage,
        "places": training.places(),
    }


def check(answers: list[dict[str, Any]], scenario: Scenario) -> None:
    """The failing rank raises its own exception, and all others where it happened."""
    stage = answers[0]["stage"]
    ((rank, action),) = answers[0]["places"]
    place = f"rank {rank}, stage {stage}, action {action}, microbatch {scenario.microbatch}"
    own = answers[rank]
    assert own["type"] is Boom and own["text"] == f"stage {stage} fails on purpose"
    assert any(place in note for note in own["notes"])
    for other, answer in enumerate(answers):
        if other != rank:
            assert answer["type"] is StepError
            assert answer["where"] == [rank, stage, action, scenario.microbatch]
            assert answer["cause"] == f"Boom: stage {stage} fails on purpose"
            assert place in answer["text"]


# All combinations for one stage; of the others, a forward in the step that announces and a backward in a later one.
BY_BOTH = [("1f1b", 2, False, 2), ("1f1b", 2, True, 0)]
SCENARIOS = [
    (schedule, stage, backward, 2 * backward)
    for schedule, stage in (("1f1b", 2), ("1f1b", 0), ("1f1b", -1), ("dualpipev", 3), ("dualpipe", 0))
    for backward in (False, True)
]


# Over other transports these alone are others.
SHARED = [("1f1b", 2, False, 0), ("1f1b", 2, True, 2), ("dualpipev", 3, False, 2), ("dualpipev", 3, True, 0)]


@pytest.mark.parametrize(
    ("schedule", "stage", "backward", "step", "executor", "transport"),
    [
        *((*one, way, "process_group") for one in BY_BOTH for way in ("native", "python")),
        *((*one, ("native", "python")[number // 2 % 2], "process_group") for number, one in enumerate(SCENARIOS, 2)),
        *((*one, "native", "shared_memory") for one in SHARED),
        *((*one, "native", "process_group_coalesced") for one in SHARED[1:3]),
    ],
    indirect=["executor"],
)
def test_everybody_learns_of_it(
    schedule: str, stage: int, backward: bool, step: int, executor: str, transport: str, group_of: GroupOf
) -> None:
    scenario = Scenario(schedule, stage, 1, step, backward, executor)
    check(group_of(4).run(fail_and_recover, scenario, transport), scenario)


# Over shared memory the transport alone is another.


@pytest.mark.parametrize(("executor", "transport"), WAYS, indirect=["executor"])
@on_ranks(2)
def test_a_rank_that_cannot_prepare_a_program_leaves_nobody_waiting(transport: str, executor: str) -> None:
    """Two steps with a new number of microbatches, for which rank 1 gets no memory."""
    pipe = pipeline(executor, transport=transport)
    x, y = batch()
    pipe.step(x, target=y)

    def prepare(program: Any) -> None:
        raise MemoryError("there is no more")

    if pipe.rank == 1:
        pipe._steps.ranks.prepare = prepare
    for _ in range(2):
        with pytest.raises(StepError, match="rank 1: MemoryError: there is no more; ") as raised:
            pipe.step(x, target=y, num_microbatches=3)
        assert raised.value.rank == 1


def fail_outside(place: str, executor: str, transport: str) -> dict[str, Any]:
    """Runs on every rank: on rank 1 the third step fails outside of its instructions; then another step."""
    metric: list[Any] = []

    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> Any:
        loss = CASES["plain"].loss_fn(output, target)
        return (loss, {"metric": metric[0]}) if metric else (loss, {"metric": loss.detach()})

    def boom(*args: Any, **kwargs: Any) -> Any:
        setattr(owner, name, real)
        raise Boom("out of memory")

    schedule = "dualpipe" if place == "after_step" else "1f1b"
    pipe = pipeline(executor, schedule, loss_fn=loss_fn, transport=transport, timeout=PATIENCE)
    x, y = batch()
    for _ in range(2):
        pipe.step(x, target=y)
    owner, name = {
        "before_step": (pipe._steps.copies, "before_step"),
        "work": (steps, "StageWork"),
        "report": (pipe._steps, "_report"),
        "metric": (pipe._steps, "_report"),
        "after_step": (pipe._steps.copies, "after_step"),
    }[place]
    real = getattr(owner, name)
    if pipe.rank == 1 and place == "metric":
        metric.append(torch.eye(2).to_sparse())  # a tensor, but none that has bytes in a row
    elif pipe.rank == 1:
        setattr(owner, name, boom)
    found = caught(lambda: pipe.step(x, target=y))
    metric.clear()
    return {"found": found, "next": caught(lambda: pipe.step(x, target=y))}


@pytest.mark.parametrize(
    ("place", "executor", "transport"),
    [(place, *WAYS[number % 3]) for number, place in enumerate(["before_step", "work", "report"])]
    + [("metric", *WAYS[0]), ("metric", *WAYS[2]), ("after_step", *WAYS[1])],
    indirect=["executor"],
)
def test_outside_of_the_program_it_is_told_all_the_same(
    place: str, transport: str, executor: str, group_of: GroupOf
) -> None:
    """The other ranks get the cause; only after the last agreement of a step is the pipeline over."""
    zero, one = group_of(2).run(fail_outside, place, executor, transport)
    kind, text, _ = one["found"]
    assert kind not in ("nothing", "StepError") and text
    other, said, rank = zero["found"]
    assert other == "StepError" and rank == 1 and f"{kind}: {text.splitlines()[0]}" in said
    for answer in (zero, one):
        assert answer["next"][0] == ("StepError" if place == "after_step" else "nothing")


def count_keys() -> list[int]:
    """The keys in the store after good steps, after some more of which several failed in a row, and after another."""
    store = dist.distributed_c10d._get_default_store()

    def keys() -> int:
        dist.barrier()
        found = sum(key.startswith("fastpipe/") for key in store.list_keys())
        dist.barrier()
        return found

    x, y = batch()
    before, counts = keys(), []
    pipe = pipeline(transport="auto", loss_fn=lambda output, target: failing(output, target, fails))
    fails: list[bool] = []
    for times in (3, 5, 2):
        for _ in range(times):
            caught(lambda: pipe.step(x, target=y))
        counts.append(keys() - before)
        fails[:] = [not fails]
    return counts


def failing(output: torch.Tensor, target: torch.Tensor, fails: list[bool]) -> torch.Tensor:
    if any(fails):
        raise Boom("on purpose")
    return (output - target).square().mean()


def test_a_pipeline_and_its_failed_steps_leave_no_keys_in_the_store() -> None:
    """But for the last two failures, and who its processes are."""
    with ranks(2) as started:
        first, failed, last = started.run(count_keys)[0]
        again = started.run(count_keys)[0]
    assert failed <= first + 2 and last <= first
    # without shared memory the last steps' messages stay: another rank may still read them
    rest = 0 if native.load() else first
    assert again[0] <= rest and again[2] <= rest
