"""The wrappers that users bring: which ones are known, and what is inside them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fastpipe.runtime.common import torch_private
from fastpipe.runtime.data_parallel.ddp import Replicated
from fastpipe.runtime.data_parallel.fsdp import Sharded, is_sharded
from fastpipe.runtime.data_parallel.interface import DataParallel


def find_data_parallel(module: nn.Module, stage: int) -> DataParallel | None:
    """How a stage is parallelised; None when it is not.

    Raises:
        ValueError: for a wrapper that is not known, or an option of a known one that a pipeline cannot keep.
    """
    replicated = [m for m in module.modules() if isinstance(m, DistributedDataParallel)]
    sharded = [m for m in module.modules() if is_sharded(m)]
    for inner in module.modules():
        if inner not in replicated and inner not in sharded:
            _check_unknown(inner, stage)
    if replicated and sharded:
        raise ValueError(
            f"stages: stage {stage} has DistributedDataParallel and fully_shard in it; use one of them (fully_shard "
            "takes a mesh of two dimensions to replicate what it shards)"
        )
    if not sharded and not replicated:
        return None
    found: DataParallel = Sharded(sharded, stage) if sharded else Replicated(replicated, stage)
    found.check_covers(module, stage)
    return found


def _check_unknown(module: nn.Module, stage: int) -> None:
    """What can be told not to reduce (``no_sync``) reduces from hooks that nobody here holds back."""
    name = type(module).__name__
    if torch_private.is_composable_replicate(module):
        name = "composable replicate"
    elif not callable(getattr(module, "no_sync", None)):
        return
    raise ValueError(
        f"stages: stage {stage} is wrapped in {name}, which reduces gradients in every backward in its own way; wrap "
        "it in torch.nn.parallel.DistributedDataParallel or apply torch.distributed.fsdp.fully_shard instead"
    )


def unwrapped(module: nn.Module) -> nn.Module:
    """The user's module within DistributedDataParallel: its keys and its arguments are the model's."""
    inner: nn.Module = module.module if isinstance(module, DistributedDataParallel) else module
    return inner


def replicate(modules: Mapping[int, nn.Module], group: Any) -> dict[int, nn.Module]:
    """Wrap what has parameters in DistributedDataParallel, also those that are frozen: they may not stay it.

    Args:
        modules: by stage.
        group: of the replicas: a process group, or a DeviceMesh of one dimension.

    Raises:
        ValueError: for a group that is none, or a stage that is parallel already.
    """
    if hasattr(group, "mesh_dim_names"):
        if group.ndim != 1:
            raise ValueError(
                f"data_parallel: the DeviceMesh has {group.ndim} dimensions; give the replicas', for example mesh['dp']"
            )
        group = group.get_group()
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError(f"data_parallel = {group!r}: give a process group, or a DeviceMesh such as mesh['dp']")
    for stage, module in modules.items():
        if find_data_parallel(module, stage) is not None:
            raise ValueError(f"data_parallel: stage {stage} has replicas already; leave out one of the two")
    return {stage: _wrapped(module, group) for stage, module in modules.items()}


def _wrapped(module: nn.Module, group: dist.ProcessGroup) -> nn.Module:
    parameters = list(module.parameters())
    stand_ins: list[nn.Parameter] = []
    if not any(parameter.requires_grad for parameter in parameters):
        # a frozen stage may be unfrozen later, and torch wants one parameter to train: the one that costs the least
        able = [p for p in parameters if p.is_floating_point() or p.is_complex()]
        stand_ins = sorted(able, key=nn.Parameter.numel)[:1]
        if not able:
            return module
    for stand_in in stand_ins:
        stand_in.requires_grad_(True)
    try:
        # else torch begins with one bucket for all, and makes smaller ones only when its own reducer has been at work
        return DistributedDataParallel(module, process_group=group, find_unused_parameters=True)
    finally:
        for stand_in in stand_ins:
            stand_in.requires_grad_(False)


def check_parallel(stage: int, parallel: DataParallel | None, num_local_ranks: int, num_routes: int) -> None:
    """Refuse what the ranks of this process cannot do together.

    Raises:
        ValueError: with what to do instead.
    """
    if parallel is None:
        return
    if num_local_ranks > 1 and (parallel.num_replicas > 1 or num_routes > 1):
        raise ValueError(
            f"stages: stage {stage} is {parallel.description} and the ranks are threads of this process, which would "
            "come to its collectives in any order; start one process a rank with torchrun"
        )
    if num_routes > 1 and not parallel.whole_gradients:
        raise ValueError(
            f"stages: stage {stage} is {parallel.description} and the schedule holds every stage on two ranks, which "
            "sum whole gradients; use DistributedDataParallel, or a schedule with one route such as 'dualpipev'"
        )


def check_not_sharded(stage: int, parallel: DataParallel | None, dtype: torch.dtype) -> None:
    """Refuse a stage whose wrapper says itself what gradients are reduced in.

    Raises:
        ValueError: saying what to set instead.
    """
    if parallel is not None and not parallel.whole_gradients:
        raise ValueError(
            f"grad_dtype = {dtype}: stage {stage} is {parallel.description}, which says itself what gradients are "
            "summed in; leave it out, and apply fully_shard with MixedPrecisionPolicy(reduce_dtype=...)"
        )
