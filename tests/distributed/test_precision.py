"""Mixed precision over several processes: one verdict about infinite gradients, and gradients summed in fp32."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from fastpipe import GradScaler, Pipeline
from fastpipe.runtime.stage.stage import Chain
from fastpipe.testing import reference_step
from tests.conftest import WAYS, paired
from tests.distributed import meshes
from tests.distributed.meshes import Reference, build, mesh, wrong_gradients
from tests.distributed.meshes import batch as mesh_batch
from tests.distributed.ranks import GroupOf
from tests.runtime.checks import same_bits, unequal
from tests.runtime.models import CASES, Block, squared


def skipped_by_all(schedule: str, executor: str) -> list[Any]:
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
    return report


@pytest.mark.parametrize(("schedule", "executor"), paired(["1f1b", "zbv", "dualpipe"]), indirect=["executor"])
def test_one_infinite_gradient_is_everybodys(schedule: str, executor: str, group_of: GroupOf) -> None:
    for report in group_of(2).run(skipped_by_all, schedule, executor):
        assert report == [(8.0, False), (4.0, True), (4.0, False)]


def different_scales() -> str:
    pipe = Pipeline(CASES["plain"].layers(4), "1f1b", 4, squared)
    scaler = GradScaler(pipe, init_scale=8.0 * (1 + pipe.rank))
    batch = CASES["plain"].batches(1, 9)[0]
    pipe.step(*batch.args, target=batch.target)
    with pytest.raises(ValueError) as caught:
        scaler.step(torch.optim.SGD(pipe.parameters(), lr=0.1))
    return str(caught.value)


def test_ranks_with_different_scales_are_refused(group_of: GroupOf) -> None:
    for text in group_of(2).run(different_scales):
        assert text.startswith("the scale is 8 on rank 0, 16 on rank 1: ")


def sharded() -> tuple[list[str], list[Any], str]:
    """One step, and one in which a shard's gradient is made infinite on one rank of one replica."""
    over = mesh()
    pipe = build("fsdp", "zbv", "auto", over)
    reference = Reference(pipe)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    scaler = GradScaler(pipe, init_scale=8.0)
    replica = over.get_local_rank("dp")
    wrong, report = [], []
    for number in range(2):
        x, target = mesh_batch(number, replica)
        pipe.step(x, target=target)
        if number == 1 and pipe.is_last and replica == 1:
            next(p.grad for p in pipe.parameters() if p.grad is not None).to_local()[0] = torch.inf
        scaler.unscale_(optimizer)
        if number == 0:
            reference.step(0)
            wrong = wrong_gradients(pipe, reference)
        before = [p.detach().to_local().clone() for p in pipe.parameters()]
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        after = (p.detach().to_local() for p in pipe.parameters())
        report.append((scaler.get_scale(), all(map(torch.equal, before, after))))
    with pytest.raises(ValueError) as refused:
        build("fsdp", "1f1b", "auto", over, grad_dtype=torch.float32)
    return wrong, report, str(refused.value)


def test_shards_are_unscaled_and_replicas_share_a_verdict(group_of: GroupOf) -> None:
    for wrong, report, refused in group_of(4).run(sharded):
        assert wrong == []
        assert report == [(8.0, False), (4.0, True)]
        assert "is sharded by fully_shard over 2 replicas" in refused


def in_bfloat16() -> list[nn.Module]:
    return [layer.bfloat16() for layer in meshes.layers()]


def averaged_in_fp32(executor: str) -> tuple[list[str], str]:
    """One step; the replicas' averages are those of sums in fp32."""
    over = mesh()
    pipe = build("ddp", "zbv", executor, over, made=in_bfloat16, grad_dtype=torch.float32)
    models = [Chain(dict(enumerate(in_bfloat16()))) for _ in range(2)]
    pipe_batch = [tensor.bfloat16() for tensor in mesh_batch(0, over.get_local_rank("dp"))]
    pipe.step(pipe_batch[0], target=pipe_batch[1])
    for replica, model in enumerate(models):
        x, target = (tensor.bfloat16() for tensor in mesh_batch(0, replica))
        reference_step(model, (x, target), pipe.schedule, meshes.squared, grad_dtype=torch.float32)
    first, second = (dict(model.named_parameters()) for model in models)
    wrong = [
        name
        for name, p in pipe.named_parameters()
        if p.grad is not None and not same_bits(p.grad, (first[name].grad + second[name].grad) / 2)
    ]
    for module in pipe.stage_modules.values():
        module.register_comm_hook(None, default_hooks.allreduce_hook)
    with pytest.raises(ValueError) as refused:
        pipe.step(pipe_batch[0], target=pipe_batch[1])
    return wrong, str(refused.value)


def test_replicas_average_in_fp32(executor: str, group_of: GroupOf) -> None:
    for wrong, refused in group_of(4).run(averaged_in_fp32, executor):
        assert wrong == []
        assert "has a communication hook" in refused


def tied() -> list[nn.Module]:
    torch.manual_seed(0)
    layers: list[nn.Module] = [Block().bfloat16() for _ in range(8)]
    layers[7].linear.weight = layers[0].linear.weight
    return layers


def in_fp32(schedule: str, executor: str, transport: str) -> list[str]:
    pipe = Pipeline(tied(), schedule, 4, squared, executor=executor, transport=transport, grad_dtype=torch.float32)
    unsplit = Chain(dict(enumerate(tied())))
    wrong = []
    for batch in CASES["bfloat16"].batches(2, 9):
        pipe.step(*batch.args, target=batch.target)
        pair = (batch.args, batch.target)
        reference_step(unsplit, pair, pipe.schedule, squared, grad_dtype=torch.float32, ties=pipe._ties)
        wrong += unequal(pipe, unsplit)
    return wrong + [name for name, p in pipe.named_parameters() if p.grad.dtype is not torch.float32]


@pytest.mark.parametrize(
    ("schedule", "executor", "transport"),
    [(schedule, *way) for schedule, way in zip(("1f1b", "zbv", "dualpipe"), WAYS, strict=True)],
    indirect=["executor"],
)
def test_tied_gradients_in_fp32(schedule: str, transport: str, executor: str, group_of: GroupOf) -> None:
    assert group_of(2).run(in_fp32, schedule, executor, transport) == [[], []]
