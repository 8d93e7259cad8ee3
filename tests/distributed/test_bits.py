"""Every schedule and odd model over Gloo, one process a rank: the unsplit model's loss and gradients, bit for bit."""

from collections.abc import Callable

import pytest

from tests.distributed.ranks import Ranks
from tests.runtime.checks import train_and_compare
from tests.runtime.models import CASES
from tests.runtime.test_bits import COMBINATIONS


def compare(case: str, schedule: str, num_microbatches: int, executor: str) -> tuple[float, list[str]]:
    """Runs on every rank."""
    pipe = train_and_compare(case, schedule, num_microbatches, executor=executor, transport="process_group")
    return pipe.num_ranks, [name for name, _ in pipe.named_parameters()]


@pytest.mark.parametrize(
    ("schedule", "num_ranks", "num_microbatches"),
    [c for c in COMBINATIONS if c[1] == 4 or (c[1] == 2 and c[0].startswith(("1f1b", "dual")))],
)
def test_every_schedule(
    schedule: str, num_ranks: int, num_microbatches: int, executor: str, group_of: Callable[[int], Ranks]
) -> None:
    answers = group_of(num_ranks).run(compare, "plain", schedule, num_microbatches, executor)
    assert all(found == num_ranks and names for found, names in answers)


@pytest.mark.parametrize("case", CASES)
def test_every_boundary(case: str, executor: str, group_of: Callable[[int], Ranks]) -> None:
    group_of(2).run(compare, case, "dualpipev", 5, executor)
