"""Mixed precision over several processes: one verdict about infinite gradients, and gradients summed in fp32."""

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from fastpipe import GradScaler, Pipeline
from fastpipe.runtime.stage.stage import Chain
from fastpipe.testing import reference_step
from tests.conftest import WAYS, executors_in_turn
from tests.distributed import meshes
from tests.distributed.meshes import Reference, build, mesh_and_replica, step, wrong_gradients
from tests.distributed.meshes import batch as mesh_batch
from tests.distributed.ranks import on_ranks
from tests.runtime.checks import same_bits, unequal
from tests.runtime.models import CASES, Block, squared


@executors_in_turn("schedule", ["1f1b", "zbv", "dualpipe"])
@on_ranks(2)
def test_one_infinite_gradient_is_everybodys(schedule: str, executor: str) -> None:
    """In the second step one gradient of the last stage is made infinite, on the rank that has it."""
    case = CASES["plain"]
    pipe = Pipeline(case.layers(8), schedule, 4, squared, executor=executor)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    scaler = GradScaler(pipe, init_scale=8.0)
    report = []
    for number, batch in enumerate(case.batches(3, 9)):
        before = [p.detach().clone() for p in pipe.parameters()]
        pipe.step(*batch.args, target=batch.target)
        if number == 1 and pipe.is_last:
            list(pipe.parameters())[-1].grad[0] = torch.inf
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        report.append((scaler.get_scale(), any(map(torch.equal, before, pipe.parameters()))))
    assert report == [(8.0, False), (4.0, True), (4.0, False)]


@on_ranks(2)
def test_ranks_with_different_scales_are_refused() -> None:
    pipe = Pipeline(CASES["plain"].layers(4), "1f1b", 4, squared)
    scaler = GradScaler(pipe, init_scale=8.0 * (1 + pipe.rank))
    batch = CASES["plain"].batches(1, 9)[0]
    pipe.step(*batch.args, target=batch.target)
    with pytest.raises(ValueError, match="^the scale is 8 on rank 0, 16 on rank 1: "):
        scaler.step(torch.optim.SGD(pipe.parameters(), lr=0.1))


@on_ranks(4)
def test_shards_are_unscaled_and_replicas_share_a_verdict() -> None:
    """One step, and one in which a shard's gradient is made infinite on one rank of one replica."""
    over, replica = mesh_and_replica()
    pipe = build("fsdp", "zbv", "auto", over)
    reference = Reference(pipe)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    scaler = GradScaler(pipe, init_scale=8.0)
    report = []
    for number in range(2):
        step(pipe, number, replica)
        if number == 1 and pipe.is_last and replica == 1:
            next(p.grad for p in pipe.parameters() if p.grad is not None).to_local()[0] = torch.inf
        scaler.unscale_(optimizer)
        if number == 0:
            reference.step(0)
            assert wrong_gradients(pipe, reference) == []
        before = [p.detach().to_local().clone() for p in pipe.parameters()]
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        after = (p.detach().to_local() for p in pipe.parameters())
        report.append((scaler.get_scale(), all(map(torch.equal, before, after))))
    assert report == [(8.0, False), (4.0, True)]
    with pytest.raises(ValueError, match="is sharded by fully_shard over 2 replicas"):
        build("fsdp", "1f1b", "auto", over, grad_dtype=torch.float32)


def in_bfloat16() -> list[nn.Module]:
    return [layer.bfloat16() for layer in meshes.layers()]


@on_ranks(4)
def test_replicas_average_in_fp32(executor: str) -> None:
    """One step; the replicas' averages are those of sums in fp32."""
    over, replica = mesh_and_replica()
    pipe = build("ddp", "zbv", executor, over, made=in_bfloat16, grad_dtype=torch.float32)
    models = [Chain(dict(enumerate(in_bfloat16()))) for _ in range(2)]
    batches = [tuple(tensor.bfloat16() for tensor in mesh_batch(0, number)) for number in range(2)]
    x, target = batches[replica]
    pipe.step(x, target=target)
    for model, batch in zip(models, batches, strict=True):
        reference_step(model, batch, pipe.schedule, meshes.squared, grad_dtype=torch.float32)
    first, second = (dict(model.named_parameters()) for model in models)
    for name, p in pipe.named_parameters():
        assert p.grad is None or same_bits(p.grad, (first[name].grad + second[name].grad) / 2), name
    for module in pipe.stage_modules.values():
        module.register_comm_hook(None, default_hooks.allreduce_hook)
    with pytest.raises(ValueError, match="has a communication hook"):
        pipe.step(x, target=target)


def tied() -> list[nn.Module]:
    torch.manual_seed(0)
    layers: list[nn.Module] = [Block().bfloat16() for _ in range(8)]
    layers[7].linear.weight = layers[0].linear.weight
    return layers


@pytest.mark.parametrize(
    ("schedule", "executor", "transport"),
    [(schedule, *way) for schedule, way in zip(("1f1b", "zbv", "dualpipe"), WAYS, strict=True)],
    indirect=["executor"],
)
@on_ranks(2)
def test_tied_gradients_in_fp32(schedule: str, transport: str, executor: str) -> None:
    pipe = Pipeline(tied(), schedule, 4, squared, executor=executor, transport=transport, grad_dtype=torch.float32)
    unsplit = Chain(dict(enumerate(tied())))
    for batch in CASES["bfloat16"].batches(2, 9):
        pipe.step(*batch.args, target=batch.target)
        pair = (batch.args, batch.target)
        reference_step(unsplit, pair, pipe.schedule, squared, grad_dtype=torch.float32, ties=pipe._local.ties)
        assert unequal(pipe, unsplit) == []
    assert all(p.grad.dtype is torch.float32 for p in pipe.parameters())
