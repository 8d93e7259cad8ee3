"""Every schedule and odd model over Gloo, one process a rank: the unsplit model's loss and gradients, bit for bit."""

from typing import Any

import pytest
import torch
from torch import nn

from fastpipe import Pipeline
from fastpipe.runtime.common.tensors import bytes_of, digest_of
from tests.conftest import WAYS, executors_in_turn, skip_without_native
from tests.distributed.ranks import GroupOf, on_ranks
from tests.runtime.checks import train_and_compare
from tests.runtime.models import CASES, squared
from tests.runtime.test_bits import COMBINATIONS, OF_A_KIND
from tests.runtime.test_held import batch, grads_of, pipeline


def compare(
    case: str, schedule: str, num_microbatches: int, executor: str, transport: str = "process_group"
) -> tuple[float, list[str]]:
    """Runs on every rank."""
    pipe = train_and_compare(case, schedule, num_microbatches, executor=executor, transport=transport)
    assert pipe.transport.describe().startswith(f"{transport}, ")
    return pipe.num_ranks, [name for name, _ in pipe.named_parameters()]


# Both executors run every schedule over loopback (tests/runtime/test_bits.py). Here the native one does again, and the
# Python one, which gives c10d the same transfers, one schedule of a kind. Two ranks,
# whose neighbours to both sides are one, have these by the native one alone; the boundaries below are by both in turn.


@pytest.mark.parametrize(
    ("schedule", "num_ranks", "num_microbatches", "executor"),
    [
        (schedule, num_ranks, count, executor)
        for executor in ("native", "python")
        for schedule, num_ranks, count in COMBINATIONS
        if (num_ranks == 4 and (executor == "native" or schedule in OF_A_KIND))
        or (num_ranks == 2 and executor == "native" and schedule in OF_A_KIND)
    ],
)
def test_every_schedule(schedule: str, num_ranks: int, num_microbatches: int, executor: str, group_of: GroupOf) -> None:
    if executor == "native":
        skip_without_native()
    answers = group_of(num_ranks).run(compare, "plain", schedule, num_microbatches, executor)
    assert all(found == num_ranks and names for found, names in answers)


@pytest.mark.parametrize("schedule", OF_A_KIND)
def test_coalesced(schedule: str, group_of: GroupOf) -> None:
    """What the executor does with a schedule is seen above; here the transport alone is another."""
    skip_without_native()
    group_of(4).run(compare, "plain", schedule, 8, "native", "process_group_coalesced")


DTYPES = [
    *(torch.float64, torch.float16, torch.bfloat16, torch.complex32, torch.complex64, torch.complex128, torch.bool),
    *(torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
]


class EveryDtype(nn.Module):
    """The first hands on a tensor of each dtype, empty ones, and what a mark alone negates; the second compares."""

    def forward(self, x: torch.Tensor, *others: torch.Tensor) -> Any:
        if others:
            assert all(
                torch.equal(bytes_of(other), bytes_of(made)) for other, made in zip(others, made_of(x), strict=True)
            )
            return 2 * x
        return x, *made_of(x)


def made_of(x: torch.Tensor) -> list[torch.Tensor]:
    whole = (100 * x.detach()).abs()
    marked = torch.complex(whole, x.detach()).conj()  # by a mark, as its imaginary part is negated
    return [part for dtype in DTYPES for part in (whole.to(dtype), whole[:0].to(dtype))] + [marked, marked.imag]


@pytest.mark.parametrize(
    ("executor", "transport"),
    [*WAYS, ("native", "process_group_coalesced")],
    indirect=["executor"],
)
@on_ranks(2)
def test_every_dtype(executor: str, transport: str) -> None:
    """Runs on every rank."""
    torch.manual_seed(0)
    layers = [nn.Linear(6, 6), EveryDtype(), EveryDtype(), nn.Linear(6, 6)]
    pipe = Pipeline(layers, "1f1b", 3, squared, executor=executor, transport=transport)
    for _ in range(2):
        x = torch.randn(6, 6)
        expected = squared(layers[3](2 * layers[0](x)), x)
        assert torch.allclose(pipe.step(x, target=x).loss, expected)


def hold(schedule: str, executor: str, transport: str) -> tuple[str, dict[str, str]]:
    """Runs on every rank: the loss and the gradients of two steps of a pipeline that keeps what it passes on."""
    pipe = pipeline("residuals", schedule, executor, transport=transport, cache_carried=True)
    x, target = batch()
    pipe.step(x, target=target)
    loss = pipe.step(x, target=target).loss
    assert loss is not None
    return digest_of(loss), {name: digest_of(grad) for name, grad in grads_of(pipe).items()}


@pytest.mark.parametrize(("executor", "transport"), WAYS, indirect=["executor"])
def test_tensors_that_ranks_hold(executor: str, transport: str, group_of: GroupOf) -> None:
    """The bits of threads."""
    answers = group_of(4).run(hold, "zbv", executor, transport)
    loss, expected = hold("zbv", "python", "loopback")
    assert {found for found, _ in answers} == {loss}
    assert {name: digest for _, found in answers for name, digest in found.items()} == expected


@executors_in_turn("case", CASES)
def test_every_boundary(case: str, executor: str, group_of: GroupOf) -> None:
    group_of(2).run(compare, case, "dualpipev", 5, executor)
