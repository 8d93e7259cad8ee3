"""Stages that recompute and have replicas: the bits of the unsplit model; tests/runtime has those without replicas."""

import pytest
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from tests.distributed.meshes import build, mesh, two_steps
from tests.distributed.ranks import GroupOf


def train(wrap: str, schedule: str, way: str, executor: str) -> list[list[str]]:
    over = mesh()
    replica = over.get_local_rank("dp")
    pipe = build(wrap, schedule, executor, over, recompute=way)
    return two_steps(pipe, wrap, replica)


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
def test_replicas(wrap: str, schedule: str, way: str, executor: str, group_of: GroupOf) -> None:
    assert group_of(4).run(train, wrap, schedule, way, executor) == [[[], []]] * 4


def refused() -> str:
    """A module of the user's own in a wrapper: its forward would run twice, and with it the wrapper's."""
    over = mesh()

    def stage(module: nn.Module, replicas: DeviceMesh) -> nn.Module:
        return DistributedDataParallel(nn.Sequential(*module.children()), process_group=replicas.get_group())

    with pytest.raises(ValueError) as caught:
        build(stage, "1f1b", "auto", over, recompute="full")
    return str(caught.value)


def test_a_wrapper_is_not_run_twice(group_of: GroupOf) -> None:
    for rank, text in enumerate(group_of(4).run(refused)):
        assert f"stage {rank % 2} is in DistributedDataParallel over 2 replicas" in text and "within it" in text
