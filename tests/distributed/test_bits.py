"""Every schedule and odd model over Gloo, one process a rank: the unsplit model's loss and gradients, bit for bit."""

from collections.abc import Callable

import pytest

from tests.conftest import skip_without_native
from tests.distributed.ranks import Ranks
from tests.runtime.checks import train_and_compare
from tests.runtime.models import CASES
from tests.runtime.test_bits import COMBINATIONS


def compare(case: str, schedule: str, num_microbatches: int, executor: str) -> tuple[float, list[str]]:
    """Runs on every rank."""
    pipe = train_and_compare(case, schedule, num_microbatches, executor=executor, transport="process_group")
    return pipe.num_ranks, [name for name, _ in pipe.named_parameters()]


# Both executors run every schedule over loopback (tests/runtime/test_bits.py). Here the native one does again, and the
# Python one, which gives c10d the same transfers, one schedule of a kind: a line, a loop, a V, two routes.
OF_A_KIND = ("1f1b", "interleaved_zb", "dualpipev", "dualpipe")


@pytest.mark.parametrize(
    ("schedule", "num_ranks", "num_microbatches", "executor"),
    [
        (schedule, num_ranks, count, executor)
        for executor in ("native", "python")
        for schedule, num_ranks, count in COMBINATIONS
        if (num_ranks == 4 and executor == "native") or (num_ranks in (2, 4) and schedule in OF_A_KIND)
    ],
)
def test_every_schedule(
    schedule: str, num_ranks: int, num_microbatches: int, executor: str, group_of: Callable[[int], Ranks]
) -> None:
    if executor == "native":
        skip_without_native()
    answers = group_of(num_ranks).run(compare, "plain", schedule, num_microbatches, executor)
    assert all(found == num_ranks and names for found, names in answers)


@pytest.mark.parametrize("case", CASES)
def test_every_boundary(case: str, executor: str, group_of: Callable[[int], Ranks]) -> None:
    group_of(2).run(compare, case, "dualpipev", 5, executor)
