"""Tensor parallelism and sharding beside the pipeline, against the same mesh without a pipeline."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fastpipe import Pipeline, make_schedule
from fastpipe.testing import reference_step
from tests.distributed.ranks import Ranks
from tests.runtime.checks import same_bits

GroupOf = Callable[[int], Ranks]
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
    made = torch.randn(2, 2 * MICROBATCHES, 3, WIDTH, generator=torch.Generator().manual_seed(replica))
    return made[0], made[1]


def whole(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def spread(schedule: str, executor: str) -> str:
    """On four ranks: bits of a pipeline of layers that are spread over pairs of ranks."""
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    pipe = Pipeline(layers(mesh), schedule, MICROBATCHES, nn.functional.mse_loss, mesh=mesh, executor=executor)
    unsplit = nn.Sequential(*layers(mesh))
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


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b", "dualpipev"])
def test_layers_that_are_spread_over_ranks(group_of: GroupOf, schedule: str) -> None:
    group_of(4).run(spread, schedule, "native")


@pytest.mark.parametrize("executor", ["native", "python"])
def test_weights_that_are_spread_over_ranks_wait_for_w(group_of: GroupOf, executor: str) -> None:
    for text in group_of(4).run(spread, "zbv", executor):
        assert "4 of 12 parameters wait for W" in text and "weight" not in text.split("whole in I")[1].replace(
            "norm.weight", ""
        )


def sharded(schedule: str) -> None:
    """On eight ranks: two replicas that share the shards of spread layers."""
    mesh = dist.init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp_shard", "tp"))
    made = [fully_shard(layer, mesh=mesh["dp_shard"]) for layer in layers(mesh)]
    pipe = Pipeline(made, schedule, MICROBATCHES, nn.functional.mse_loss, mesh=mesh)
    x, y = batch(mesh["dp_shard"].get_local_rank())
    pipe.step(x, target=y)
    unsplit = [nn.Sequential(*layers(mesh)) for _ in range(2)]
    for replica, model in enumerate(unsplit):
        reference_step(model, batch(replica), pipe.schedule, nn.functional.mse_loss)
    pairs = zip(*(model.named_parameters() for model in unsplit), strict=True)
    expected = {name: (whole(first.grad) + whole(second.grad)) / 2 for (name, first), (_, second) in pairs}
    for name, parameter in pipe.named_parameters():
        assert same_bits(whole(parameter.grad), expected[name]), name
    total = torch.stack([grad.norm() for grad in expected.values()]).norm()
    torch.testing.assert_close(pipe.clip_grad_norm_(0.5), total)


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_shards_of_layers_that_are_spread(schedule: str) -> None:
    ranks = Ranks(8)
    try:
        ranks.run(sharded, schedule)
    finally:
        ranks.close()


def refused(names: tuple[str, str], given: bool) -> str:
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
    group = dist.group.WORLD if given else None
    try:
        Pipeline([Mlp() for _ in range(2)], "1f1b", 2, nn.functional.mse_loss, mesh=mesh, group=group, timeout=60)
    except (ValueError, RuntimeError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("names", "given", "says"),
    [
        (("pipe", "tp"), False, "mesh has dimensions ('pipe', 'tp')"),
        (("pp", "tp"), True, "leave out group"),
        (("pp", "dp_replicate"), False, "mesh has 2 replicas of stage"),
    ],
)
def test_meshes_that_are_refused(group_of: GroupOf, names: tuple[str, str], given: bool, says: str) -> None:
    answers = group_of(4).run(refused, names, given)
    assert all(says in answer for answer in answers), answers


def test_a_mesh_is_a_mesh() -> None:
    with pytest.raises(ValueError, match="mesh has int"):
        Pipeline([nn.Linear(2, 2)], make_schedule("1f1b", num_ranks=1, num_microbatches=2), mesh=2)
