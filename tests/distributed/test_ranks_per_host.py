"""How many ranks compute on a host: those of every pipeline there, and what they do about it."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fastpipe import Pipeline
from fastpipe.runtime import native
from fastpipe.runtime.transport.groups import ranks_per_host
from tests.conftest import skip_without_native
from tests.distributed.hosts import on_hosts
from tests.distributed.ranks import ranks


def replicas(hosts: str) -> tuple[int, list[int], str]:
    """Runs on every rank of four: two pipelines of two, which are replicas of each other; how many are counted."""
    counted = []
    runtime: Any = native.load()
    make_link = runtime.SharedMemoryLink

    def noted(rank: int, size: int, num_here: int) -> Any:
        counted.append(num_here)
        return make_link(rank, size, num_here)

    runtime.SharedMemoryLink = noted
    try:
        with on_hosts(hosts):
            mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
            layers = [nn.Linear(4, 4) for _ in range(4)]
            options = {"group": mesh["pp"], "data_parallel": mesh["dp"]}
            pipe = Pipeline(layers, "dualpipev", 4, nn.functional.mse_loss, **options)
            x = torch.randn(8, 4)
            pipe.step(x, target=x)
            return ranks_per_host().count(), counted, pipe.describe()
    finally:
        runtime.SharedMemoryLink = make_link


def test_replicas_are_counted() -> None:
    skip_without_native()
    with ranks(4) as group:
        for count, at_links, text in group.run(replicas, ""):
            assert count == 4 and at_links == [4] and "4 ranks on this host" in text


def test_other_hosts_are_not() -> None:
    skip_without_native()
    with ranks(4) as group:
        counts = [(count, at_links) for count, at_links, _ in group.run(replicas, "aaab")]
    assert counts == [(3, [3])] * 3 + [(1, [1])]


def several(expected: int) -> None:
    """Runs on every rank: each process has pipelines of its own, of three ranks, and others with its neighbour."""
    for options in ({"num_ranks": 3, "group": dist.new_group([dist.get_rank()], use_local_synchronization=True)}, {}):
        pipe = Pipeline([nn.Linear(4, 4) for _ in range(3)], "1f1b", 4, nn.functional.mse_loss, **options)
        dist.barrier()
        assert pipe._site.ranks_per_host.count() == expected


# Ranks that are threads count, and a process counts once; what torchrun started counts before it has a pipeline.
@pytest.mark.parametrize(
    ("environment", "expected"), [({}, 6), ({"LOCAL_WORLD_SIZE": "5"}, 6), ({"LOCAL_WORLD_SIZE": "7"}, 7)]
)
def test_what_counts(environment: dict[str, str], expected: int) -> None:
    with ranks(2, environment=environment) as group:
        group.run(several, expected)
