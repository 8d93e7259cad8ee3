"""Tensor parallelism and sharding beside the pipeline, against the same mesh without a pipeline."""

import itertools
import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from fastpipe import (
    AddedLosses,
    CostModel,
    GradScaler,
    Pipeline,
    StepError,
    add_loss,
    all_to_all,
    check_parity,
    load_checkpoint,
    make_schedule,
    plan,
    save_checkpoint,
)
from fastpipe.runtime import construction
from fastpipe.runtime.data_parallel import same_text
from fastpipe.runtime.model import cuts
from fastpipe.runtime.stage.boundary import to_tensors
from fastpipe.runtime.stage.losses import checked_loss, outputs_and_grads
from fastpipe.testing import reference_step
from tests.conftest import skip_without_native
from tests.distributed.ranks import GroupOf, on_ranks, ranks
from tests.runtime.checks import same_bits

WIDTH, LAYERS, MICROBATCHES = 8, 4, 4


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def layers(mesh: DeviceMesh) -> list[nn.Module]:
    torch.manual_seed(0)
    made = [Mlp() for _ in range(LAYERS)]
    for layer in made:
        parallelize_module(layer, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return made


def batch(replica: int) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.randn(2, 2 * MICROBATCHES, 4, WIDTH, generator=torch.Generator().manual_seed(replica))
    return made[0], made[1]


def whole(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def spread(schedule: str, executor: str, make: Callable[[DeviceMesh], list[nn.Module]] = layers) -> str:
    """On four ranks: bits of a pipeline of layers that are spread over pairs of ranks."""
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    pipe = Pipeline(make(mesh), schedule, MICROBATCHES, nn.functional.mse_loss, mesh=mesh, executor=executor)
    unsplit = nn.Sequential(*make(mesh))
    for replica in range(2):
        expected = reference_step(unsplit, batch(replica), pipe.schedule, nn.functional.mse_loss)
        x, y = batch(replica)
        assert same_bits(pipe.step(x, target=y).loss, expected.loss)
    grads = dict(unsplit.named_parameters())
    for name, parameter in pipe.named_parameters():
        assert same_bits(whole(parameter.grad), whole(grads[name].grad)), name
    norms = torch.stack([whole(parameter.grad).norm() for parameter in grads.values()])
    torch.testing.assert_close(pipe.clip_grad_norm_(0.5), norms.norm())
    return pipe.describe()


@pytest.mark.parametrize("schedule", ["interleaved_1f1b", "dualpipev", "dualpipe"])
def test_layers_that_are_spread_over_ranks(group_of: GroupOf, schedule: str) -> None:
    for text in group_of(4).run(spread, schedule, "auto"):
        assert schedule != "dualpipev" or "collectives over tp must have one order" in text


def ending_in_a_sum(mesh: DeviceMesh) -> list[nn.Module]:
    """Layers that return what the tensor-parallel linear returns: a tensor whose collective may still run."""
    torch.manual_seed(0)
    rows = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)) for _ in range(4)]
    ways = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    return [parallelize_module(row, mesh["tp"], ways) for row in rows]


def of_parts(mesh: DeviceMesh) -> list[nn.Module]:
    """Layers that begin and end with collectives, so that the gradients of their inputs may be results of one, too."""
    torch.manual_seed(0)
    rows = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)) for _ in range(4)]
    for i, row in enumerate(rows):
        begins = ColwiseParallel(input_layouts=Shard(1) if i else Replicate())
        ends = RowwiseParallel(output_layouts=Shard(1) if i < 3 else Replicate())
        parallelize_module(row, mesh["tp"], {"0": begins, "2": ends})
    return list(rows)


@pytest.mark.parametrize("make", [ending_in_a_sum, of_parts])
@pytest.mark.parametrize(("schedule", "executor"), [("1f1b", "native"), ("zbv", "python")], indirect=["executor"])
def test_stages_that_begin_or_end_in_a_tensor_parallel_linear(
    group_of: GroupOf, schedule: str, executor: str, make: Callable[[DeviceMesh], list[nn.Module]]
) -> None:
    group_of(4).run(spread, schedule, executor, make)


def test_processes_of_torchrun() -> None:
    """Which name their attempt first, group by group: pipelines of a mesh must meet under one name."""
    with ranks(4, environment={"TORCHELASTIC_USE_AGENT_STORE": "True"}) as group:
        group.run(spread, "1f1b", "auto")


def test_weights_that_are_spread_over_ranks_wait_for_w(group_of: GroupOf) -> None:
    skip_without_native()
    for text in group_of(4).run(spread, "zbv", "python"):
        assert "4 of 12 parameters in W" in text and "weight" not in text.split("in I ")[1].replace("norm.weight", "")


class Enter(nn.Module):
    """Cuts the sequence; beside it, a tensor that is whole, and the same part twice."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.mesh = mesh
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> tuple[Any, ...]:
        whole = DTensor.from_local(self.linear(x), self.mesh, [Partial()])
        part = whole.redistribute(placements=[Shard(1)], async_op=True)  # its shard is an AsyncCollectiveTensor
        return part, x.sum(), part


class Between(nn.Module):
    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.block = Mlp()
        ways = {
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
        }
        parallelize_module(self.block, mesh, ways)

    def forward(self, part: DTensor, total: torch.Tensor, same: DTensor) -> tuple[Any, ...]:
        assert part is same and part.placements == (Shard(1),) and tuple(part.shape[1:]) == (4, WIDTH)
        made = self.block(part)
        return made, total, made


class Leave(nn.Module):
    def forward(self, part: DTensor, total: torch.Tensor, same: DTensor) -> torch.Tensor:
        return (part + same).full_tensor() + total


class InOrder(nn.Sequential):
    def forward(self, x: Any) -> Any:
        for layer in self:
            x = layer(*x) if isinstance(x, tuple) else layer(x)
        return x


def of_dtensors(mesh: DeviceMesh) -> list[nn.Module]:
    torch.manual_seed(0)
    return [Enter(mesh["tp"]), Between(mesh["tp"]), Between(mesh["tp"]), Leave()]


@pytest.mark.parametrize(("schedule", "executor"), [("zbv", "auto"), ("interleaved_1f1b", "python")])
@on_ranks(4)
def test_dtensors_between_stages(schedule: str, executor: str) -> None:
    """On four ranks: stages that hand on parts of sequences."""
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))

    pipe = Pipeline(of_dtensors(mesh), schedule, MICROBATCHES, nn.functional.mse_loss, mesh=mesh, executor=executor)
    unsplit = InOrder(*of_dtensors(mesh))
    for replica in range(2):
        x, y = batch(replica)
        expected = reference_step(unsplit, (x, y), pipe.schedule, nn.functional.mse_loss)
        assert same_bits(pipe.step(x, target=y).loss, expected.loss)
    grads = dict(unsplit.named_parameters())
    for name, parameter in pipe.named_parameters():
        assert same_bits(whole(parameter.grad), whole(grads[name].grad)), name
    norms = torch.stack([whole(parameter.grad).norm() for parameter in grads.values()])
    torch.testing.assert_close(pipe.clip_grad_norm_(0.5), norms.norm())  # those of norms are parts of a sum
    for name, parameter in pipe.named_parameters():
        torch.testing.assert_close(whole(parameter.grad), whole(grads[name].grad) * 0.5 / norms.norm(), msg=name)

    spread = DTensor.from_local(x, mesh["tp"], [Shard(0)])
    with pytest.raises(ValueError, match=r"stage 0 returned a DTensor over the dimensions \('tp',\): pass a mesh"):
        to_tensors(spread, {}, 0, mesh=mesh["pp"])
    with pytest.raises(ValueError, match="stage 3 returned a DTensor with the placement P"):
        to_tensors(DTensor.from_local(x, mesh["tp"], [Partial()]), {}, 3, mesh=mesh)


@on_ranks(2)
def test_a_plan_rebuilds_stages_that_hand_on_dtensors() -> None:
    """On two ranks, each a pipeline of one rank with two stages."""
    mesh = dist.init_device_mesh("cpu", (1, 2), mesh_dim_names=("pp", "tp"))
    schedule = make_schedule("looped_bfs", num_ranks=1, num_microbatches=MICROBATCHES, stages_per_rank=2)
    pipe = Pipeline(of_dtensors(mesh), schedule, loss_fn=nn.functional.mse_loss, mesh=mesh, timeout=60)
    found = plan(CostModel(), num_ranks=1, num_microbatches=MICROBATCHES, placement=schedule, effort=0)
    pipe.replan(replace(found, recomputes=(True, True)))
    x, y = batch(0)
    expected = reference_step(InOrder(*of_dtensors(mesh)), (x, y), pipe.schedule, nn.functional.mse_loss)
    assert same_bits(pipe.step(x, target=y).loss, expected.loss)


class Logits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits = self.linear(x)
        if isinstance(logits, DTensor):
            add_loss(logits.square().mean().redistribute(placements=[Replicate()]), "large")
        return logits


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
@on_ranks(4)
def test_losses_of_logits_that_are_spread_over_ranks(schedule: str, executor: str) -> None:
    """As torch's loss_parallel returns them; so may metrics and added losses be."""
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))

    def made() -> list[nn.Module]:
        ways = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
        return [*layers(mesh), parallelize_module(Logits(), mesh["tp"], {"linear": ways})]

    def loss_fn(output: DTensor, target: torch.Tensor) -> Any:
        loss = nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())
        return loss, {"same": loss}

    (x, _), y = batch(0), torch.arange(8 * MICROBATCHES).view(-1, 4) % WIDTH
    pipe = Pipeline(made(), schedule, MICROBATCHES, loss_fn, mesh=mesh, executor=executor)
    unsplit = nn.Sequential(*made())
    with loss_parallel():
        result = pipe.step(x, target=y)
        with AddedLosses() as added:
            output = unsplit(x)
            loss, _ = loss_fn(output, y)
        (loss.to_local() + added.total).backward()
    assert same_bits(result.loss, result.metrics["same"])
    torch.testing.assert_close(result.loss, whole(loss.detach()))
    torch.testing.assert_close(result.added_losses["large"], added.total.detach())
    grads = dict(unsplit.named_parameters())
    for name, parameter in pipe.named_parameters():
        torch.testing.assert_close(whole(parameter.grad), whole(grads[name].grad), msg=name)
    outputs = pipe.eval_step(x, gather_outputs=True).outputs
    assert outputs.placements == (Shard(2),)
    torch.testing.assert_close(whole(outputs), whole(output.detach()))
    with pytest.raises(
        ValueError, match=r"output_grad is a plain tensor, and the output a DTensor with .*Shard\(dim=2"
    ):
        outputs_and_grads(outputs, whole(outputs))
    with pytest.raises(ValueError, match=r"output_grad is a DTensor, .* plain tensor: give its full_tensor\(\)"):
        outputs_and_grads(whole(outputs), outputs)
    assert outputs_and_grads(outputs, outputs) == ((outputs,), (outputs,))
    part = DTensor.from_local(loss.to_local().detach().requires_grad_(), mesh["tp"], [Partial()])
    checked = checked_loss(part)  # as the mean of a loss over an output that is cut
    assert same_bits(checked, 2 * loss.to_local())
    assert torch.autograd.grad(checked, part)[0].to_local() == 1


def tied_words(mesh: DeviceMesh, ways: dict[int, Any]) -> list[nn.Module]:
    """An embedding, layers that are spread, and a head with the embedding's weight, before they are spread."""
    made = layers(mesh)
    made = [nn.Embedding(10, WIDTH), *made, nn.Linear(WIDTH, 10, bias=False)]
    made[-1].weight = made[0].weight
    for place, way in ways.items():
        parallelize_module(made[place], mesh["tp"], way)
    return made


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
@on_ranks(4)
def test_tied_weights_that_are_spread_over_ranks(schedule: str, executor: str) -> None:
    """The gradient of an embedding that is cut into rows is whole on every rank, unlike that of the head."""
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    head = {-1: ColwiseParallel(output_layouts=Replicate())}
    both = head | {0: RowwiseParallel(input_layouts=Replicate())}

    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())

    def built(ways: dict[int, Any]) -> Pipeline:
        made, tied = tied_words(mesh, ways), [("0.weight", f"{LAYERS + 1}.weight")]
        options: Any = {"mesh": mesh, "executor": executor, "timeout": 60, "tied": tied}
        return Pipeline(made, schedule, MICROBATCHES, loss_fn, **options)

    words = torch.arange(8 * MICROBATCHES).view(-1, 4) % 7
    pipe, unsplit = built(both), tied_words(mesh, both)
    unsplit[-1].weight = unsplit[0].weight
    result = pipe.step(words, target=words)
    loss = loss_fn(nn.Sequential(*unsplit)(words), words)
    loss.backward()
    torch.testing.assert_close(result.loss, loss.detach())
    grads = dict(nn.Sequential(*unsplit).named_parameters())
    for name, parameter in pipe.named_parameters():
        torch.testing.assert_close(whole(parameter.grad), whole(grads[name].grad), msg=name)
    text = said(lambda: built(head))
    assert "0.weight" in text and "a plain tensor" in text and "over ('tp',)" in text, text


class Attention(nn.Module):
    """Attention of a part of the sequence to all of it."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.mesh = mesh
        self.inputs = nn.Linear(WIDTH, 3 * WIDTH)
        self.output = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, *shards = self.inputs(x).chunk(3, -1)
        key, value = (self.gathered(shard) for shard in shards)
        return x + self.output(nn.functional.scaled_dot_product_attention(query, key, value))

    def gathered(self, shard: torch.Tensor) -> torch.Tensor:
        return DTensor.from_local(shard, self.mesh, [Shard(1)]).full_tensor(grad_placements=[Partial()])


class Experts(nn.Module):
    """An expert per rank; every rank sends its part of the tokens to their experts."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.mesh = mesh
        self.router = nn.Linear(WIDTH, mesh.size())
        self.weights = nn.Parameter(distribute_tensor(torch.randn(mesh.size(), WIDTH, WIDTH) / 4, mesh, [Shard(0)]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, 1)
        gate, expert = self.router(tokens).softmax(-1).max(-1)
        expert = self.part(expert)
        order, sent = expert.sort(stable=True).indices, expert.bincount(minlength=self.mesh.size())
        received, group = torch.empty_like(sent), self.mesh.get_group()
        dist.all_to_all_single(received, sent, group=group)
        there, here = sent.tolist(), received.tolist()
        made = self.expert(all_to_all(self.part(tokens)[order], here, there, group))
        back = all_to_all(made, there, here, group)[order.argsort()]
        return x + (DTensor.from_local(back, self.mesh, [Shard(0)]).full_tensor() * gate[:, None]).view_as(x)

    def expert(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.tanh(rows @ self.weights.to_local()[0])

    def part(self, tokens: torch.Tensor) -> torch.Tensor:
        return DTensor.from_local(tokens, self.mesh, [Replicate()]).redistribute(placements=[Shard(0)]).to_local()


class PlainExperts(Experts):
    """Their weights are no DTensors, which DistributedDataParallel does not take."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__(mesh)
        self.weights = nn.Parameter(self.weights.to_local().detach().clone())

    def expert(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.tanh(rows @ self.weights[0])


def layers_of(kind: str, mesh: DeviceMesh, wrap: str = "fully_shard") -> list[nn.Module]:
    if kind == "tp":
        return layers(mesh)
    torch.manual_seed(0)
    experts = Experts if wrap == "fully_shard" else PlainExperts
    return [(Attention if kind == "cp" else experts)(mesh[kind]) for _ in range(LAYERS)]


def part_of_batch(kind: str, mesh: DeviceMesh, replica: int) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = batch(replica)
    if kind != "cp":
        return x, y
    part = mesh["cp"].get_local_rank()
    return x.chunk(2, 1)[part], y.chunk(2, 1)[part]


def replicated(kind: str, schedule: str, wrap: str) -> None:
    """On eight ranks: two replicas of layers with collectives of their own, which may share the layers' shards."""
    mesh = dist.init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", kind, "dp_shard"))
    # what is in a sequence's parts is averaged over them, too
    shards = mesh["cp", "dp_shard"] if kind == "cp" else mesh["dp_shard"]
    made, options = layers_of(kind, mesh, wrap), {}
    if wrap == "fully_shard":
        made = [fully_shard(layer, mesh=shards) for layer in made]
    else:
        options = {"data_parallel": shards}
    pipe = Pipeline(made, schedule, MICROBATCHES, nn.functional.mse_loss, mesh=mesh, **options)
    unsplit = [nn.Sequential(*layers_of(kind, mesh, wrap)) for _ in range(2)]
    for _ in range(2 if kind == "ep" else 1):  # pairs of experts take turns from the second step on
        for parameter in itertools.chain(pipe.parameters(), *(model.parameters() for model in unsplit)):
            parameter.grad = None
        expected = sharded_step(kind, mesh, pipe, unsplit)
    if wrap == "fully_shard":  # clipping refuses experts that are no DTensors
        total = torch.stack([grad.norm() for grad in expected.values()]).norm()
        torch.testing.assert_close(pipe.clip_grad_norm_(0.5), total)
    assert (pipe._steps.ranks.pair_counts()["in turns"] > 0) == (kind == "ep" and schedule == "dualpipev")


def sharded_step(kind: str, mesh: DeviceMesh, pipe: Pipeline, unsplit: list[nn.Sequential]) -> dict[str, torch.Tensor]:
    """A step against the replicas' unsplit models; the averaged gradients."""
    replica = mesh["dp_shard"].get_local_rank()
    x, y = part_of_batch(kind, mesh, replica)
    loss = pipe.step(x, target=y).loss
    losses = [
        reference_step(model, part_of_batch(kind, mesh, i), pipe.schedule, nn.functional.mse_loss).loss
        for i, model in enumerate(unsplit)
    ]
    assert same_bits(loss, losses[replica])
    pairs = zip(*(model.named_parameters() for model in unsplit), strict=True)
    expected = {name: (whole(first.grad) + whole(second.grad)) / 2 for (name, first), (_, second) in pairs}
    if kind == "cp":
        for grad in expected.values():
            dist.all_reduce(grad, group=mesh.get_group("cp"))
            grad /= 2
    for name, parameter in pipe.named_parameters():
        assert same_bits(whole(parameter.grad), expected[name]), name
    return expected


NIGHTLY = pytest.mark.nightly
FEW = [("tp", "zbv"), ("cp", "interleaved_1f1b"), ("ep", "dualpipev")]
"""Each dimension, with another schedule."""


@pytest.mark.parametrize(
    ("kind", "schedule"),
    [
        pytest.param(kind, schedule, marks=() if (kind, schedule) in FEW else NIGHTLY)
        for kind in ("tp", "cp", "ep")
        for schedule in ("1f1b", "interleaved_1f1b", "zbv", "dualpipev")
    ],
)
def test_shards_of_layers_with_collectives(group_of: GroupOf, kind: str, schedule: str) -> None:
    group_of(8).run(replicated, kind, schedule, "fully_shard")


@pytest.mark.parametrize("schedule", ["dualpipev", pytest.param("zbv", marks=NIGHTLY)])
def test_replicas_of_experts_in_distributed_data_parallel(group_of: GroupOf, schedule: str) -> None:
    group_of(8).run(replicated, "ep", schedule, "data_parallel")


@on_ranks(4)
def test_tools_take_the_whole_mesh(tmp_path: Path) -> None:
    """What reads or writes gradients and parameters."""
    mesh, folder = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp")), tmp_path / "saved"
    made = Pipeline(layers(mesh), "zbv", MICROBATCHES, nn.functional.mse_loss, mesh=mesh)
    x, y = batch(0)
    parity = check_parity(made, nn.Sequential(*layers(mesh)), (x, y))
    assert parity.ok, str(parity)
    optimizer, scaler = torch.optim.SGD(made.parameters(), 0.1), GradScaler(made, init_scale=4.0)
    before = {name: whole(p.detach()).clone() for name, p in made.named_parameters()}
    for number, place in enumerate(("up.weight", "norm.weight")):  # a DTensor, and a tensor beside DTensors
        made.step(x, target=y)
        if dist.get_rank() == 2:
            grad = next(p.grad for name, p in made.named_parameters() if name.endswith(place))
            (grad.to_local() if isinstance(grad, DTensor) else grad).view(-1)[0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 2.0 / 2**number, place
        optimizer.zero_grad()
        for name, p in made.named_parameters():
            assert same_bits(whole(p.detach()), before[name])
    save_checkpoint(folder, made, optimizer)
    torch.manual_seed(1)
    plain = Pipeline([Mlp() for _ in range(LAYERS)], "1f1b", MICROBATCHES, nn.functional.mse_loss, group=mesh["pp"])
    load_checkpoint(folder, plain)
    full = dict(nn.Sequential(*layers(mesh)).named_parameters())
    for name, p in plain.named_parameters():
        assert same_bits(p.detach(), whole(full[name].detach())), name
    with torch.no_grad():
        for p in made.parameters():
            p.zero_()
    load_checkpoint(folder, made, optimizer)
    for name, p in made.named_parameters():
        assert same_bits(whole(p.detach()), before[name])
    # a gradient that is only a part of it, and does not say so
    made.step(x, target=y)
    for name, p in made.named_parameters():
        if name == "1.norm.weight":
            p.grad *= 1 + mesh["tp"].get_local_rank()
    with pytest.raises(ValueError, match=r"gradient of 1\.norm\.weight .* at tp=\d .* DTensor"):
        made.clip_grad_norm_(1.0)


@pytest.mark.parametrize(
    ("names", "given", "says"),
    [
        (("pipe", "tp"), {}, r"mesh has dimensions \('pipe', 'tp'\)"),
        (("pp", "tp"), {"group": "world"}, "mesh and group: both name"),
        (("pp", "tp"), {"overlap": "always"}, "stages run collectives over tp|one half of a pair at a time"),
        (("pp", "dp_replicate"), {}, "mesh has 2 replicas of stage"),
        (("pp", "fsdp"), {}, "mesh has a dimension 'fsdp', whose ranks would need the same batch: .* 'dp_fsdp'"),
        (("pp", "tp"), {"data_parallel": "tp"}, "and 4 more are DTensors, which DistributedDataParallel does not"),
    ],
)
@on_ranks(4)
def test_meshes_that_are_refused(names: tuple[str, str], given: dict[str, Any], says: str) -> None:
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
    groups = {"world": dist.group.WORLD, "tp": mesh[names[1]]}
    given = {name: groups.get(value, value) for name, value in given.items()}
    made = layers(mesh) if "data_parallel" in given else [Mlp() for _ in range(2)]
    with pytest.raises((ValueError, RuntimeError), match=says):
        Pipeline(made, "1f1b", 2, nn.functional.mse_loss, mesh=mesh, timeout=60, **given)


@pytest.mark.parametrize("wrap", ["fully_shard", "data_parallel"])
@on_ranks(4)
def test_replicas_along_another_dimension_are_refused(wrap: str) -> None:
    """There are as many, but they are other processes: gradients would be averages of other stages' or batches'."""
    mesh = dist.init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("pp", "dp", "ep"))
    made: list[nn.Module] = [Mlp() for _ in range(2)]
    if wrap == "fully_shard":
        made = [fully_shard(layer, mesh=mesh["ep"]) for layer in made]
    options = {"data_parallel": mesh["ep"]} if wrap == "data_parallel" else {}
    processes = dist.get_process_group_ranks(mesh.get_group("ep"))
    with pytest.raises(ValueError, match=rf"'dp': \[\d, \d\].*averaged over 2 \(processes {re.escape(str(processes))}"):
        Pipeline(made, "1f1b", 2, nn.functional.mse_loss, mesh=mesh, timeout=60, **options)


@on_ranks(4)
def test_a_layer_with_fewer_replicas_is_refused() -> None:
    """The rest of its stage has all; the sum of experts, whose owner divides it, is not an average."""
    mesh = dist.init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("pp", "dp_replicate", "dp_shard"))
    made = [nn.Sequential(Mlp(), Mlp()) for _ in range(2)]
    for stage in made:
        fully_shard(stage[0], mesh=mesh["dp_shard"])
        fully_shard(stage, mesh=mesh["dp_replicate", "dp_shard"])
    processes = dist.get_process_group_ranks(mesh.get_group("dp_shard"))
    with pytest.raises(ValueError, match=rf"4 replicas of stage 0 .* over 2 \(processes {re.escape(str(processes))}"):
        Pipeline(made, "1f1b", 2, nn.functional.mse_loss, mesh=mesh, timeout=60)
    for stage in made:
        stage[0].set_gradient_divide_factor(4.0)
    assert Pipeline(made, "1f1b", 2, nn.functional.mse_loss, mesh=mesh, timeout=60).num_ranks == 1


@on_ranks(4)
def test_a_process_outside_is_refused_at_once() -> None:
    """The others neither know nor wait; one that waited for them would give up after the timeout."""
    mesh = DeviceMesh("cpu", torch.tensor([[0], [1]]), mesh_dim_names=("pp", "tp"))
    group = dist.new_group([0, 1])
    for options in ({"mesh": mesh}, {"group": mesh["pp"]}, {"group": group}):
        if dist.get_rank() < 2:
            assert Pipeline([Mlp(), Mlp()], "1f1b", 2, nn.functional.mse_loss, **options).schedule.num_ranks == 2
        else:
            text = said(lambda given=options: Pipeline([Mlp(), Mlp()], "1f1b", 2, timeout=0.001, **given))
            (name,) = options
            assert text.startswith(f"{name}: this process (rank {dist.get_rank()}) is not in it"), text


def ordered(processes: list[list[int]]) -> str:
    """On four ranks, whose mesh has these processes."""
    mesh = DeviceMesh("cpu", torch.tensor(processes), mesh_dim_names=("pp", "tp"))
    try:
        pipe = Pipeline(layers(mesh), "1f1b", MICROBATCHES, nn.functional.mse_loss, mesh=mesh, timeout=60)
    except ValueError as error:
        return str(error)
    x, y = batch(0)
    unsplit = nn.Sequential(*layers(mesh))
    expected = reference_step(unsplit, (x, y), pipe.schedule, nn.functional.mse_loss)
    assert same_bits(pipe.step(x, target=y).loss, expected.loss)
    return ""


@pytest.mark.parametrize(
    ("processes", "name"), [([[0, 2], [1, 3]], ""), ([[1, 0], [3, 2]], "tp"), ([[0, 3], [1, 2]], "pp")]
)
def test_the_order_of_processes(group_of: GroupOf, processes: list[list[int]], name: str) -> None:
    """In the last mesh stage 0 of a pipeline would share a group with stage 1 of the other."""
    for text in group_of(4).run(ordered, processes):
        assert text.startswith(f"mesh: along {name!r} its processes are not in ascending order") if name else not text


def said(call: Callable[[], Any]) -> str:
    with pytest.raises((ValueError, StepError)) as raised:
        call()
    return str(raised.value)


@on_ranks(4)
def test_pipelines_of_a_mesh_must_be_the_same() -> None:
    """On four ranks: pipelines of a mesh that are not given the same. Their collectives would be matched, wrongly."""
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    part = mesh["tp"].get_local_rank()

    def built(schedule: str = "interleaved_1f1b", count: int = MICROBATCHES, **options: Any) -> Pipeline:
        return Pipeline(layers(mesh), schedule, count, nn.functional.mse_loss, mesh=mesh, timeout=60, **options)

    place = f"at tp={1 - part}"
    for text in (
        said(lambda: built(["1f1b", "gpipe"][part])),
        said(lambda: built(count=[4, 8][part])),
        said(lambda: built("1f1b", partition=[[2, 2], [1, 3]][part])),
        said(lambda: built(loss_reduction=("mean", len)[part])),
        said(lambda: built(loss_reduction=(whole, len)[part])),
        said(lambda: built(split={0: (whole, len)[part]})),
        said(lambda: built(split=(None, {0: 1, "target": 1})[part])),
        said(lambda: built(recompute=("none", "full")[part])),
        said(lambda: built(recompute=lambda stage, _: "layers" if part and stage == 1 else "none")),
        said(lambda: built("dualpipev", overlap=("auto", "never")[part])),
    ):
        assert "the ranks do not build the same pipeline" in text and place in text, text
        assert "every rank of the mesh, whose stages share collectives" in text, text
    pipe = built()
    sizes = {"num_ranks": 2, "num_microbatches": MICROBATCHES, "stages_per_rank": 2}
    (x, y), (other, _) = batch(0), batch(1)
    for text in (
        said(lambda: pipe.step(x, target=y, num_microbatches=[4, 8][part])),
        said(lambda: (pipe.step, pipe.eval_step)[part](x, target=y)),
        said(lambda: pipe.step((x, other)[part], target=y)),
        said(lambda: pipe.replan([pipe.schedule, make_schedule("looped_bfs", **sizes)][part])),
    ):
        assert place in text, text
    assert bool(pipe.step(x, target=y).loss > 0)
    # times differ between processes
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(cuts, "layer_costs", lambda *args, by: [[1, 1, 1, 3], [3, 1, 1, 1]][part])
        cut = built("1f1b", partition="seconds", example=x[:2]).describe()
    assert "layers 0-2 | 3" in cut, cut


@pytest.mark.parametrize("name", ["tensor", "cp", "dp"])
@on_ranks(4)
def test_ranks_that_share_activations_draw_the_same_numbers(name: str) -> None:
    """Those of `cp`, `ep` and `dp` have data of their own, and draw by their seeds; other names are as `tp`."""
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", name))
    part = mesh[name].get_local_rank()

    def built(seed: int) -> Pipeline:
        made = [nn.Sequential(Mlp(), nn.Dropout(0.5)) for _ in range(LAYERS)]
        options = {} if name == "tensor" else {"data_parallel": mesh[name]}
        torch.manual_seed(seed)
        return Pipeline(
            made, "1f1b", MICROBATCHES, nn.functional.mse_loss, mesh=mesh, timeout=60, rng="per_microbatch", **options
        )

    def drawn(pipe: Pipeline) -> list[torch.Tensor]:
        zeros: list[torch.Tensor] = []
        for module in pipe.stage_modules.values():
            dropout = next(inner for inner in module.modules() if isinstance(inner, nn.Dropout))
            dropout.register_forward_hook(lambda module, args, output: zeros.append(output.detach() == 0))
        x, y = batch(0)
        pipe.step(x, target=y)
        masks = [torch.empty(2, *zeros[0].shape, dtype=torch.bool) for _ in zeros]
        for mask, zero in zip(masks, zeros, strict=True):
            dist.all_gather(list(mask.unbind()), zero, group=mesh.get_group(name))
        return masks

    if name == "tensor":
        text = said(lambda: built(seed=part))
        assert f"initial_seed(), is {part} on ranks [0, 1], {1 - part} on ranks [0 at tensor={1 - part}, " in text, text
        x, y = batch(part)
        text = said(lambda: built(seed=2).step(x, target=y))
        assert "has other values on ranks [0 at tensor=" in text and "or a name that begins with 'dp'" in text, text
    else:
        assert not any(torch.equal(*mask) for mask in drawn(built(seed=part)))
    assert all(torch.equal(*mask) for mask in drawn(built(seed=2)))


@on_ranks(4)
def test_costs_of_layers_that_are_spread_over_ranks() -> None:
    """Each rank's own part of them."""
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    x, y = batch(0)

    def built(schedule: str, made: list[nn.Module], **options: Any) -> Pipeline:
        return Pipeline(made, schedule, MICROBATCHES, nn.functional.mse_loss, mesh=mesh, timeout=60, **options)

    parts = [p.to_local() if isinstance(p, DTensor) else p for p in layers(mesh)[0].parameters()]
    for make in (layers, of_parts, of_dtensors):
        pipe = built("1f1b", make(mesh))
        costs = pipe.profile_layers(x, target=y, num_steps=1)
        assert min(pipe.profile(x, target=y, num_steps=1).stage_bytes) > 0 and costs.num_layers == LAYERS
        if make is layers:
            assert set(costs.parameter_bytes) == {2.0 * sum(p.nbytes for p in parts)}
    for partition in ("flops", "seconds", "memory"):
        pipe = built("1f1b", layers(mesh), partition=partition, example=x[:2])
        assert bool(pipe.step(x, target=y).loss > 0)


@on_ranks(4)
def test_pipelines_of_a_mesh_must_be_in_the_same_modes() -> None:
    """On four ranks: what a script sets in one of two pipelines decides which collectives their stages run."""
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    part = mesh["tp"].get_local_rank()
    x, y = batch(0)
    weights = [lambda target: len(target), lambda target: float(target[0, 0, 0] ** 2)][part]  # of one name
    pipe = Pipeline(layers(mesh), "1f1b", MICROBATCHES, nn.functional.mse_loss, mesh=mesh, loss_reduction=weights)
    place = f"of that at tp={1 - part}"
    assert place in (text := said(lambda: pipe.step(x, target=y))) and "loss_reduction gives other weights" in text
    pipe = Pipeline(layers(mesh), "1f1b", MICROBATCHES, nn.functional.mse_loss, mesh=mesh)
    inner = list(pipe.stage_modules.values())
    if part:
        inner[0].eval()
    assert place in (text := said(lambda: pipe.step(x, target=y))) and "call train(), eval()" in text
    inner[0].train()
    if dist.get_rank() == 0:
        next(inner[0].parameters()).requires_grad_(False)
    assert "on rank 0 of" in (text := said(lambda: pipe.step(x, target=y))) and place in text
    inner[0].requires_grad_(True)
    with torch.autocast("cpu", torch.bfloat16, enabled=bool(part)):
        text = said(lambda: pipe.step(x, target=y))
    assert f"rank 0 at tp={1 - part}: call" in text and "autocast is " in text and "in torch.bfloat16" in text
    assert bool(pipe.step(x, target=y).loss > 0)


@on_ranks(2)
def test_a_state_that_is_spread_otherwise_is_refused() -> None:
    """torch copies the parameters before the first DTensor, or assigns a plain tensor that the next step cannot use."""
    mesh = dist.init_device_mesh("cpu", (1, 2), mesh_dim_names=("pp", "tp"))
    made, plain = layers(mesh), nn.Sequential(*(Mlp() for _ in range(LAYERS))).state_dict()
    spread, unspread = (
        Pipeline(stages, "1f1b", MICROBATCHES, nn.functional.mse_loss, mesh=mesh)
        for stages in (made, [Mlp() for _ in range(LAYERS)])
    )
    before = {name: whole(parameter.detach()).clone() for name, parameter in spread.named_parameters()}
    for assign in (False, True):
        text = said(lambda: spread.load_state_dict(plain, assign=assign))  # noqa: B023 - called here
        assert text.startswith("the state has a plain 0.up.weight, and that of the stage is a DTensor: load it by"), (
            text
        )
        text = said(lambda: unspread.load_state_dict(spread.state_dict(), assign=assign))  # noqa: B023 - called here
        assert text.endswith(
            "0.up.weight as a DTensor, and that of the stage is a plain tensor: give its full_tensor()"
        )
    assert all(same_bits(whole(parameter.detach()), before[name]) for name, parameter in spread.named_parameters())
    spread.load_state_dict(spread.state_dict())


@on_ranks(4)
def test_pipelines_of_a_mesh_must_be_clipped_and_scaled_alike() -> None:
    """What is replicated over them would become different."""
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    pipe, place = (
        Pipeline(layers(mesh), "1f1b", MICROBATCHES, nn.functional.mse_loss, mesh=mesh),
        mesh["tp"].get_local_rank(),
    )
    x, y = batch(0)
    pipe.step(x, target=y)
    text = said(lambda: pipe.clip_grad_norm_(1.0 + place))
    assert "give the same on every rank, not rank 0: (" in text and f"; rank 1 at tp={1 - place}: (" in text, text
    scaler = GradScaler(pipe, init_scale=2.0 + place)
    pipe.step(x, target=y)
    text = said(lambda: scaler.unscale_(torch.optim.SGD(pipe.parameters())))
    assert "the scale is " in text and f" on rank 1 at tp={1 - place}: construct the GradScaler" in text, text


@on_ranks(4)
def test_all_pipelines_of_a_mesh_refuse_what_one_is_given() -> None:
    """On four ranks: one pipeline's ranks are given different batches, and the other's, of another batch, go on."""
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "ep"))
    made: list[nn.Module] = [Mlp() for _ in range(LAYERS)]
    pipe = Pipeline(made, "1f1b", MICROBATCHES, nn.functional.mse_loss, mesh=mesh, timeout=20)
    rank, part = (mesh[name].get_local_rank() for name in ("pp", "ep"))
    x, y = batch(part)
    other, _ = batch(2 + rank)
    text = said(lambda: pipe.step(other if part else x, target=y))
    assert "the input has other values" in text and ("than on rank 0 at ep=1" in text) == (part == 0), text
    text = said(lambda: pipe.step(x[part:], target=y))
    assert "rows" in text, text
    assert bool(pipe.step(x, target=y).loss > 0)


@pytest.mark.parametrize("wrap", ["data_parallel", "fully_shard"])
@on_ranks(4)
def test_replicas_must_be_the_same(wrap: str) -> None:
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    replica = mesh["dp"].get_local_rank()

    def built(schedule: str, count: int, timeout: float = 60, **options: Any) -> Pipeline:
        made: list[nn.Module] = [Mlp() for _ in range(LAYERS)]
        if wrap == "fully_shard":
            made = [fully_shard(layer, mesh=mesh["dp"]) for layer in made]
        else:
            options["data_parallel"] = mesh["dp"]
        return Pipeline(made, schedule, count, nn.functional.mse_loss, mesh=mesh, timeout=timeout, **options)

    says = "do not build the same pipeline"
    # both have the same stages on other ranks: DistributedDataParallel alone would average them with each other
    assert says in said(lambda: built(["interleaved_1f1b", "zbv"][replica], MICROBATCHES))
    assert says in said(lambda: built("1f1b", [4, 8][replica]))

    def answers_late(*args: Any) -> bool:
        same = same_text(*args)
        time.sleep(late)
        return same

    with pytest.MonkeyPatch.context() as monkeypatch:
        late = 0.5 if dist.get_rank() == 3 else 0.0  # it has its own error, though another replica has raised by then
        monkeypatch.setattr(construction, "same_text", answers_late)
        text = said(lambda: built("1f1b", 4, loss_reduction=("mean", len)[replica]))
    assert says in text and (not replica or "loss_reduction = builtins.len" in text), text
    pipe = built("zbv", MICROBATCHES)
    other = make_schedule("dualpipev", num_ranks=2, num_microbatches=MICROBATCHES)
    assert says in said(lambda: pipe.replan([pipe.schedule, other][replica]))
    x, y = batch(replica)
    assert bool(pipe.step(x, target=y).loss > 0)
    if wrap == "fully_shard":
        return  # the wait below is for the stage's group, and knows no wrapper
    pipe = built("zbv", MICROBATCHES, timeout=10)
    with pytest.MonkeyPatch.context() as monkeypatch:
        waits = 60 if dist.get_rank() == 0 else 0  # for a replica that does not come
        monkeypatch.setattr(construction, "same_text", lambda *args: time.sleep(waits) or True)
        if replica == 0:
            text = said(lambda: pipe.replan(pipe.schedule))
            assert "within 10 s" in text, text
        else:
            pipe.replan(pipe.schedule)


def test_a_mesh_is_a_mesh() -> None:
    with pytest.raises(ValueError, match="mesh has int"):
        Pipeline([nn.Linear(2, 2)], make_schedule("1f1b", num_ranks=1, num_microbatches=2), mesh=2)
