"""Forked children of a rank: they let go of what it shares with the others, and the ranks go on."""

import gc
import itertools
import sys
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fastpipe import Pipeline
from tests.conftest import skip_without_native
from tests.distributed.hosts import on_hosts
from tests.distributed.ranks import GroupOf, ranks
from tests.forks import in_child
from tests.patience import PATIENCE
from tests.runtime.checks import rows_for, train_and_compare
from tests.runtime.models import CASES

COUNT = 8


def fork(transport: str, hosts: str) -> tuple[int, str]:
    """Runs on every rank: a child, whose pipeline is dropped, between two steps; how it ended."""
    with on_hosts(hosts):
        held = [train_and_compare("plain", "dualpipev", COUNT, transport=transport, overlap="always")]

    def drop() -> None:
        held.clear()
        gc.collect()

    status = in_child(drop)
    batch = CASES["plain"].batches(1, rows_for(COUNT))[0]
    held[0].step(*batch.args, target=batch.target)
    return status, held[0].transport.kind


@pytest.mark.parametrize(
    ("transport", "hosts"), [("shared_memory", ""), ("process_group", ""), ("auto", "aab")], ids=["near", "far", "both"]
)
def test_a_child_may_let_go_of_a_pipeline(transport: str, hosts: str, group_of: GroupOf) -> None:
    skip_without_native()
    kind = "mixed" if hosts else transport
    assert group_of(3).run(fork, transport, hosts) == [(0, kind)] * 3


class Forks(nn.Module):
    """Forks a child in one of its calls, which leaves it by an exception; the parent goes on when that has ended."""

    def __init__(self, at_call: int) -> None:
        super().__init__()
        self.linear, self.calls, self.at_call = nn.Linear(4, 4), itertools.count(), at_call
        self.status: int | None = None

    def fork(self) -> None:
        self.status = in_child(lambda: sys.exit(0), leaves=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if next(self.calls) == self.at_call:
            self.fork()
        return self.linear(x)


def leave(place: str, executor: str) -> tuple[list[float], int | None]:
    """Runs on every rank: losses of three steps, and how the child of rank 1 ended."""
    torch.manual_seed(0)
    own = dist.get_rank()
    forks = Forks(5 if place == "layer" and own == 1 else -1)
    made = [nn.Linear(4, 4), forks]

    def stage(index: int) -> nn.Module:
        if place == "construction" and own == 1:
            forks.fork()
        return made[index]

    def parts(value: torch.Tensor) -> Iterator[torch.Tensor]:
        if place == "iterator" and own == 1 and forks.status is None:
            forks.fork()
        yield from value.tensor_split(4)

    pipe = Pipeline(stage, "1f1b", 4, nn.functional.mse_loss, executor=executor, timeout=PATIENCE)
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    return [float(pipe.step(parts(x), target=parts(x)).loss) for _ in range(3)], forks.status


@pytest.mark.parametrize("place", ["layer", "iterator", "construction"])
def test_a_child_that_leaves_a_layer_is_no_rank(place: str, executor: str) -> None:
    """It would send zeros and report a failure in place of its parent."""
    with ranks(2) as group:
        (losses, none), (others, status) = group.run(leave, place, executor)
    assert len(set(losses)) == 1 and losses == others
    assert none is None and status == 1
