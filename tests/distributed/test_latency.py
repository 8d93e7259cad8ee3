"""How soon ranks learn of a failure, as medians: of an idle machine, so in the nightly alone."""

import signal
import statistics
from pathlib import Path

import pytest

from tests.conftest import BOTH, WAYS
from tests.distributed.ranks import GroupOf, ranks
from tests.distributed.test_death import COUNT, SIZE, others, train_until
from tests.runtime.faults import FaultyTraining, Scenario

pytestmark = pytest.mark.nightly

REPEATS = 5
SECONDS = 2.0


@pytest.mark.parametrize(("executor", "transport"), WAYS, indirect=["executor"])
def test_a_killed_rank(transport: str, executor: str, tmp_path: Path) -> None:
    """The slowest survivor of each kill."""
    seconds = []
    for number in range(REPEATS):
        with ranks(SIZE) as group:
            arguments = (2, 2 * COUNT + 3, int(signal.SIGKILL), str(tmp_path / str(number)), executor, "1f1b", 60.0, 3)
            group.start(train_until, *arguments, transport=transport)
            seconds.append(max(answer["seconds"] for answer in group.results(others(2))))
    assert statistics.median(seconds) < SECONDS, seconds


def fail(executor: str) -> float:
    """Runs on every rank."""
    training = FaultyTraining(Scenario("1f1b", 1, 3, 1, True, executor))
    training.good_step()
    return training.bad_step()[1]


@BOTH
def test_an_exception(executor: str, group_of: GroupOf) -> None:
    seconds = [max(group_of(4).run(fail, executor)) for _ in range(REPEATS)]
    assert statistics.median(seconds) < SECONDS, seconds
