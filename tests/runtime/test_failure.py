"""A failing stage, ranks as threads: its own exception comes through, everything is drained, the next step works."""

import json
import threading
import traceback
from dataclasses import asdict
from itertools import product

import pytest
import torch
from torch import nn

from fastpipe import Pipeline, StepError
from fastpipe.runtime.common.failure import Failure, FailureError, failure_of, lost_peer
from fastpipe.runtime.coordination.control import Control, exchange_or_refuse
from fastpipe.runtime.executor.ranks import LocalRanks, Outcome, failure_at
from fastpipe.testing import Loopback
from tests.conftest import paired
from tests.patience import PATIENCE
from tests.runtime.faults import NEVER, Boom, FaultyTraining, Scenario
from tests.runtime.models import CASES

# All combinations for one schedule, with the executors in turn; of the others, which differ by the order that is
# drained, each choice once.
SCENARIOS = [
    ("1f1b", stage, backward, step, executor)
    for number, (stage, backward) in enumerate(product((0, 1, -1), (False, True)))
    for step, executor in zip((0, 2), ("native", "python") if number % 2 else ("python", "native"), strict=True)
]
SCENARIOS += paired(
    (schedule, *choice)
    for schedule in ("dualpipev", "interleaved_1f1b")
    for choice in ((0, False, 2), (1, True, 0), (-1, True, 2))
)


@pytest.mark.parametrize(("schedule", "stage", "backward", "step", "executor"), SCENARIOS, indirect=["executor"])
def test_own_exception_then_a_good_step(schedule: str, stage: int, backward: bool, step: int, executor: str) -> None:
    scenario = Scenario(schedule, stage, 3, step, backward, executor)
    transport = Loopback()
    training = FaultyTraining(scenario, num_ranks=4, transport=transport)
    for _ in range(step):
        training.good_step()
    error, _ = training.bad_step()
    assert type(error) is Boom and str(error) == f"stage {training.stage} fails on purpose"
    frames = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
    assert frames[-1] == "_count" and (backward or "run" in frames)
    ((rank, action),) = training.places()
    place = f"rank {rank}, stage {training.stage}, action {action}, microbatch 3"
    assert [note for note in error.__notes__ if place in note], error.__notes__
    assert all(not queue for hub in transport._hubs.values() for queue in hub.queues.values())
    for _ in range(3):
        training.good_step()


def test_a_peer_that_is_found_gone_when_the_device_ends_fails_the_step(executor: str) -> None:
    """A device that is behind its host may wait for who is gone, and go on without: its losses are no losses."""
    training = FaultyTraining(Scenario("1f1b", NEVER, NEVER, 0, False, executor), num_ranks=4)
    training.good_step()

    def gone() -> None:
        raise lost_peer("rank 0: no transfer with rank 1 any more", 1)

    training.pipe._steps.ranks.device_events.add_checks([gone])
    for _ in range(2):
        error, _ = training.bad_step()
        assert isinstance(error, StepError) and error.rank == 1
        assert "no transfer with rank 1" in str(error)


def test_a_peer_that_is_lost_while_a_step_is_drained_counts_more() -> None:
    """All others have to know that there is no next step."""
    local = object.__new__(LocalRanks)
    local._lock, local._outcome, local._current, local.failed_at = threading.Lock(), Outcome(), (), []
    refused, lost, later = Failure(0, "no memory"), Failure(1, "gone", is_fatal=True), Failure(0, "later")
    for failure in (refused, lost, later):
        local._note(failure, RuntimeError(failure.cause), refused)
    assert local._outcome.failure is lost and str(local._outcome.error) == "gone"


def test_the_rank_of_another_pipeline_is_none_of_this_one() -> None:
    assert [Failure(rank, "", pipeline=where).native_rank for rank, where in ((1, ""), (1, "tp=1"), (None, ""))] == [
        1,
        -1,
        -1,
    ]


def test_a_failure_is_one_record_on_every_way() -> None:
    failure = Failure(1, "Boom: now", 3, "3F0", 0, is_fatal=True)
    assert Failure(**json.loads(json.dumps(asdict(failure)))) == failure
    assert failure_of(FailureError(failure), 2) is failure
    assert exchange_or_refuse(Control(), "start", {}, failure)[1] == failure
    error = failure.error()
    place = (error.rank, error.stage, error.action, error.microbatch, error.cause)
    assert place == (1, 3, "3F0", 0, "Boom: now")
    assert str(error).endswith("action 3F0, microbatch 0: Boom: now; the pipeline is closed; build a new one")
    assert str(Failure(1, "no memory").error("refused its input")) == "rank 1 refused its input: no memory"
    assert failure_of(ValueError("two\nlines"), 2) == Failure(2, "ValueError: two")


class UnsayableError(Exception):
    """Its own message fails, as one does that is made of an attribute nobody set."""

    def __str__(self) -> str:
        return str(self.missing)  # type: ignore[attr-defined]


class Fails(nn.Linear):
    """Once."""

    failed = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.failed:
            self.failed = True
            raise UnsayableError
        return super().forward(x)


def test_an_exception_that_cannot_be_told_is_one_like_any_other(executor: str) -> None:
    options = {"num_ranks": 2, "executor": executor, "timeout": 2 * PATIENCE}
    pipe = Pipeline([nn.Linear(4, 4), Fails(4, 4)], "1f1b", 2, nn.MSELoss(), **options)
    x = torch.randn(4, 4)
    with pytest.raises(UnsayableError):
        pipe.step(x, target=x)
    assert pipe.step(x, target=x).loss is not None


def test_a_peer_that_is_gone_is_a_failure_even_if_nobody_knows_which() -> None:
    failure = failure_at(None, {}, 2, 0, lost_peer("messages for rank 2 did not arrive", None))  # type: ignore[arg-type]
    assert failure.rank is None and failure.is_fatal


def test_a_failure_told_just_before_a_run_is_not_forgotten(executor: str) -> None:
    case = CASES["plain"]
    pipe = Pipeline(case.layers(1), "gpipe", 2, case.loss_fn, num_ranks=1, executor=executor)
    (batch,) = case.batches(1, 4)
    pipe.step(*batch.args, target=batch.target)
    ((made,),) = pipe._steps.ranks._executors.values()
    made.fail()
    assert made.run(0, False) is None
    made.fail()  # too late for any step
    assert pipe.step(*batch.args, target=batch.target).loss is not None
