"""How soon ranks learn of a failure, as medians: of an idle machine, so in the nightly alone."""

import statistics
from pathlib import Path

import pytest

from tests.conftest import BOTH, WAYS
from tests.distributed.ranks import GroupOf, ranks
from tests.distributed.test_death import COUNT, SIZE, lose
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
            note = tmp_path / str(number)
            answers = lose(group, 2, 2 * COUNT + 3, note, executor=executor, transport=transport)
            seconds.append(max(answer["seconds"] for answer in answers))
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
