"""Every schedule, executor and odd model over loopback: the unsplit model's loss and gradients, bit for bit."""

import pytest
import torch

from fastpipe import Pipeline, list_schedules
from fastpipe.runtime.stage import Chain
from fastpipe.testing import Loopback, backward_order, reference_step
from tests.runtime.checks import rows_for, same_bits, train_and_compare, unequal
from tests.runtime.models import CASES, squared

SCHEDULES = [family.name for family in list_schedules()]


def microbatches_for(schedule: str, num_ranks: int) -> int:
    """As few as bring out all of a schedule."""
    return 2 * num_ranks if schedule.startswith("dualpipe") else 2 * num_ranks + 1


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule(schedule: str, num_ranks: int, executor: str) -> None:
    if schedule == "dualpipe" and num_ranks == 1:
        pytest.skip("dualpipe needs an even number of ranks")
    train_and_compare(
        "plain", schedule, microbatches_for(schedule, num_ranks), num_ranks=num_ranks, executor=executor
    )


@pytest.mark.parametrize("schedule", ["1f1b", "dualpipev"])
@pytest.mark.parametrize("case", CASES)
def test_every_boundary(case: str, schedule: str, executor: str) -> None:
    train_and_compare(case, schedule, 4, num_ranks=2, executor=executor)
