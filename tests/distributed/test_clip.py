"""Clipping where every rank is a process: one norm, the same everywhere, and nobody waits for a rank that cannot."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from fastpipe import StepError
from fastpipe.runtime.model import NamedTensor
from fastpipe.runtime.step.clip import norms_of
from tests.conftest import executors_in_turn
from tests.distributed.ranks import GroupOf, on_ranks
from tests.distributed.test_step import batch, caught, pipeline, refuses
from tests.runtime.models import CASES
from tests.runtime.test_clip import assert_clipped_alike, gathered


@executors_in_turn(
    "case, schedule", [("plain", "1f1b"), ("plain", "dualpipe"), ("channels_last", "dualpipev"), ("bfloat16", "zbv")]
)
@on_ranks(2)
def test_the_norm_is_that_of_the_unsplit_model(case: str, schedule: str, executor: str) -> None:
    assert_clipped_alike(CASES[case], schedule, executor=executor)


@on_ranks(2)
def test_whoever_cannot_clip_is_an_error_for_all() -> None:
    rank, pipe = dist.get_rank(), pipeline()
    x, y = batch()
    pipe.step(x, target=y)
    last = [p.grad for p in pipe.parameters()][-1]
    limit = r"max_norm = -1.0: give a number of at least 0; float\('inf'\) only measures"
    refuses(lambda: pipe.clip_grad_norm_(-1.0 if rank else 1.0), limit if rank else "rank 1 failed in clip_grad_", on=1)
    refuses(lambda: pipe.clip_grad_norm_(1.0 + rank), "give the same on every rank")
    refuses(lambda: pipe.clip_grad_norm_(1.0) if rank else pipe.step(x, target=y), "do not make the same call")
    if rank == 1:
        last[0] = math.inf
    with pytest.raises(StepError, match=r"7.linear.bias \(stage 1, rank 1\)") as raised:
        pipe.clip_grad_norm_(1.0, error_if_nonfinite=True)
    assert raised.value.rank == 1
    for parameter in pipe.parameters():
        parameter.grad = None
    pipe.step(x, target=y)
    norms = [0.0, 0.0]
    dist.all_gather_object(norms, float(pipe.clip_grad_norm_(0.01)))
    assert norms[0] == norms[1] > 0.01


def norms_of_spread_gradients() -> list[tuple[float, float]]:
    """As FSDP leaves them: parts of rows, of which the last process may have none; the last one is on both."""
    mesh = dist.init_device_mesh("cpu", (2,))
    torch.manual_seed(3)
    whole = [torch.randn(5, 4), torch.randn(1, 4), torch.randn(6), torch.randn(3)]
    looks = [Shard(0), Shard(0), Shard(0), Replicate()]
    grads = [dist.tensor.distribute_tensor(g, mesh, [look]) for g, look in zip(whole, looks, strict=True)]
    held = [NamedTensor(i, str(i), grad) for i, grad in enumerate([*grads, whole[0]])]
    found = []
    for order in (2.0, 3.0, math.inf):
        total = gathered([*grads, whole[0]], order)
        found.append((float(total), float(torch.nn.utils.get_total_norm([*whole, whole[0]], order))))
    scaled = nn.Parameter(grads[0].clone())
    scaled.grad = grads[0].clone()
    torch.nn.utils.clip_grads_with_norm_([scaled], 1.0, total)
    torch.testing.assert_close(scaled.grad.full_tensor(), whole[0] / (total + 1e-6))
    partial = DTensor.from_local(whole[0], mesh, [Partial()])
    torch.testing.assert_close(norms_of([NamedTensor(0, "0", partial)], 2.0, 60.0), 2 * whole[0].norm().double()[None])
    assert "need a norm above 0" in caught(lambda: norms_of(held, 0.0, 60.0))[1]
    return found


def test_gradients_that_are_spread_over_processes(group_of: GroupOf) -> None:
    zero, one = group_of(2).run(norms_of_spread_gradients)
    assert zero == one
    assert all(math.isclose(found, expected, rel_tol=1e-6) for found, expected in zero)


def clip_plain_and_spread() -> tuple[float, float]:
    """A stage of which one layer is sharded over all processes by itself, so that both kinds are on one rank."""
    mesh = dist.init_device_mesh("cpu", (2,))
    pipe = pipeline(group=dist.new_group([dist.get_rank()], use_local_synchronization=True))
    x, y = batch()
    pipe.step(x, target=y)
    for parameter in list(pipe.parameters())[:2]:
        whole = parameter.grad
        parameter.data = dist.tensor.distribute_tensor(parameter.data, mesh, [Replicate()])
        parameter.grad = dist.tensor.distribute_tensor(whole, mesh, [Replicate()])
    before = float(pipe.clip_grad_norm_(0.01))
    return before, float(pipe.clip_grad_norm_(0.01))


def test_plain_and_spread_gradients_on_one_rank(group_of: GroupOf) -> None:
    zero, one = group_of(2).run(clip_plain_and_spread)
    assert zero == one and zero[0] > 0.02 and math.isclose(zero[1], 0.01, rel_tol=1e-3)
