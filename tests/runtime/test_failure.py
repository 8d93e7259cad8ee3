"""A failing stage, ranks as threads: its own exception comes through, everything is drained, the next step works."""

import traceback

import pytest

from fastpipe.testing import Loopback
from tests.runtime.faults import Boom, FaultyTraining, Scenario


@pytest.mark.parametrize("step", [0, 2])
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("stage", [0, 1, -1])
@pytest.mark.parametrize("schedule", ["1f1b", "dualpipev", "interleaved_1f1b"])
def test_own_exception_then_a_good_step(schedule: str, stage: int, backward: bool, step: int, executor: str) -> None:
    scenario = Scenario(schedule, stage, 3, step, backward, executor)
    transport = Loopback()
    training = FaultyTraining(scenario, num_ranks=4, transport=transport)
    for _ in range(step):
        training.good_step()
    error, seconds = training.bad_step()
    assert type(error) is Boom and str(error) == f"stage {training.stage} fails on purpose"
    frames = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
    assert frames[-1] == "_count" and (backward or "run" in frames)
    ((rank, action),) = training.places()
    place = f"rank {rank}, stage {training.stage}, action {action}, microbatch 3"
    assert [note for note in error.__notes__ if place in note], error.__notes__
    assert seconds < 2
    assert all(not queue for _, hub in transport._hubs.values() for queue in hub.queues.values())
    for _ in range(3):
        training.good_step()
