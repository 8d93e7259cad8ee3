"""Which rank of which group this process is; makes the outer process group where there is none."""

from __future__ import annotations

import atexit
import hashlib
import json
import logging
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from fastpipe.runtime.devices import CPU
from fastpipe.runtime.failure import Failure
from fastpipe.runtime.forked import Home
from fastpipe.runtime.host import Crowd, Identity, identify
from fastpipe.runtime.patience import PatientStore

logger = logging.getLogger("fastpipe")
_made: Counter[tuple[int, ...]] = Counter()


@dataclass(frozen=True)
class Membership:
    """This process's place among the processes of a pipeline.

    Attributes:
        rank: its rank.
        size: how many processes there are.
        group: the process group; None when the process is alone.
        ranks: the members' global ranks.
        device: what they compute on.
        timeout: seconds to wait for the others.
        lost: asked by who waits for the others to connect: what keeps one of them from coming.
    """

    rank: int = 0
    size: int = 1
    group: Any = None
    ranks: tuple[int, ...] = (0,)
    device: torch.device = CPU
    lost: Callable[[], Failure | None] = lambda: None
    timeout: float = 600.0

    def store(self) -> Any:
        """A part of the group's store for one pipeline. The members make their pipelines in the same order."""
        return distributed_c10d.PrefixStore(_new_name(self.ranks), distributed_c10d._get_default_store())

    def identity(self, rank: int) -> Identity | None:
        """Who a member is; None if it has never begun to build a pipeline."""
        store, key = _default_store(self.timeout), _process_key(self.ranks[rank])
        found: Identity | None = json.loads(store.get(key)) if store.check([key]) else None
        return found


def crowd(timeout: float = 600.0) -> Crowd:
    """The ranks that compute on this process's host."""
    if not dist.is_initialized():
        return Crowd(None, 0)
    return Crowd(_default_store(timeout), dist.get_rank())


def _default_store(timeout: float) -> Any:
    return PatientStore(distributed_c10d._get_default_store(), timeout)


def membership(group: Any, device: torch.device, timeout: float = 600.0) -> Membership:
    """Find this process's place.

    Args:
        group: a process group, a DeviceMesh of one dimension, or None for all processes.
        device: what the pipeline computes on; decides the backend when a group has to be made.
        timeout: seconds to wait for the others.

    Raises:
        TransportError: when the process group's store does not answer.
        ValueError: for a mesh of several dimensions, or a group that this process is not in.
    """
    if group is None and not dist.is_initialized():
        if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
            return Membership(device=device)
        _make_group(device, timeout)
    if dist.is_initialized() and "fake" in (dist.get_backend(), dist.get_backend(_from_mesh(group))):
        raise ValueError(
            "group: its backend is 'fake', which sends nothing, and a pipeline sends; make a group of gloo or nccl, or "
            "run all ranks in one process without a group (num_ranks=)"
        )
    if dist.is_initialized():  # before anything can fail: from now on the others can see when this process ends
        _default_store(timeout).set(_process_key(dist.get_rank()), json.dumps(identify()))
    group = _from_mesh(group)
    ranks = tuple(dist.get_process_group_ranks(group or dist.group.WORLD))
    if dist.get_rank() not in ranks:
        raise ValueError(f"group: this process (rank {dist.get_rank()}) is not one of its members {list(ranks)}")
    return Membership(dist.get_rank(group), len(ranks), group, ranks, device, timeout=timeout)


def registered_group(group: Any, backend: str, timeout: timedelta) -> Any:
    """Another group of the same processes, which torch's collectives take. The members make them in the same order.

    `dist.new_group` would have the processes that are in none of it call it, too; or give it a name with the number of
    groups that this process is in. Where that is not the same for all, they would wait for each other for ever.
    """
    ranks = dist.get_process_group_ranks(group)
    made, _ = distributed_c10d._new_process_group_helper(
        len(ranks),
        dist.get_rank(group),
        ranks,
        dist.Backend(backend),
        distributed_c10d._get_default_store(),
        distributed_c10d.GroupName(_new_name(tuple(ranks))),
        timeout=timeout,
        group_desc="fastpipe",
    )
    distributed_c10d._world.pg_group_ranks[made] = {process: rank for rank, process in enumerate(ranks)}
    return made


def _new_name(ranks: tuple[int, ...]) -> str:
    """The same on all of these processes, and never twice."""
    members = hashlib.sha1(repr(ranks).encode()).hexdigest()[:12]
    number = _made[ranks]
    _made[ranks] += 1
    return f"fastpipe/{members}/{number}"


def _process_key(process: int) -> str:
    return f"fastpipe/process/{process}"


def _from_mesh(group: Any) -> Any:
    if group is None or isinstance(group, dist.ProcessGroup):
        return group
    if not hasattr(group, "mesh_dim_names"):
        raise TypeError(
            f"group is a {type(group).__name__}: give a process group that this process is in, or a DeviceMesh of one "
            "dimension"
        )
    if group.ndim != 1:
        raise ValueError(
            f"group: the DeviceMesh has {group.ndim} dimensions; give the pipeline's, for example mesh['pp']"
        )
    return group.get_group()


def _make_group(device: torch.device, timeout: float) -> None:
    """The default process group, ended at exit. Torch would wait for the others for 30 minutes."""
    backend = "gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:nccl"
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout))
    logger.info("made the process group: rank %d of %d, backend %s", dist.get_rank(), dist.get_world_size(), backend)
    atexit.register(_end_group, Home())


def _end_group(home: Home) -> None:
    if home.here and dist.is_initialized():
        dist.destroy_process_group()
