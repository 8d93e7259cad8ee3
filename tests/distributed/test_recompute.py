"""Stages that recompute and have replicas: the bits of the unsplit model; tests/runtime has those without replicas."""

import pytest
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from tests.distributed.meshes import build, mesh, mesh_and_replica, two_steps
from tests.distributed.ranks import on_ranks


@pytest.mark.parametrize(
    ("wrap", "schedule", "way", "executor"),
    [
        ("ddp", "zbv", "full", "native"),
        ("ddp", "dualpipev", "layers", "python"),
        ("fsdp", "1f1b", "layers", "native"),
        ("fsdp", "zbv", "full", "python"),
    ],
    indirect=["executor"],
)
@on_ranks(4)
def test_replicas(wrap: str, schedule: str, way: str, executor: str) -> None:
    over, replica = mesh_and_replica()
    pipe = build(wrap, schedule, executor, over, recompute=way)
    assert two_steps(pipe, wrap, replica) == [[], []]


@on_ranks(4)
def test_a_wrapper_is_not_run_twice() -> None:
    """A module of the user's own in a wrapper: its forward would run twice, and with it the wrapper's."""
    over = mesh()

    def stage(module: nn.Module, replicas: DeviceMesh) -> nn.Module:
        return DistributedDataParallel(nn.Sequential(*module.children()), process_group=replicas.get_group())

    number = over.get_local_rank("pp")
    with pytest.raises(ValueError, match=f"stage {number} is in DistributedDataParallel over 2 replicas.*within it"):
        build(stage, "1f1b", "auto", over, recompute="full")
