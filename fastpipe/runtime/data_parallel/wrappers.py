"""The supported wrappers of user modules, and the modules in them."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fastpipe.runtime.common import listed, lost_named, torch_private
from fastpipe.runtime.data_parallel.ddp import Replicated
from fastpipe.runtime.data_parallel.fsdp import Sharded, is_sharded
from fastpipe.runtime.data_parallel.interface import DataParallel, others_in


def find_data_parallel(module: nn.Module, stage: int) -> DataParallel | None:
    """The data parallelism of a stage; None if there is none.

    Raises:
        ValueError: for an unknown wrapper, or an unsupported option of a known one.
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
    found.check_covers(module)
    return found


def _check_unknown(module: nn.Module, stage: int) -> None:
    """Refuse wrappers with ``no_sync``: they reduce from hooks that are not disabled here."""
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
    """The user's module in a DistributedDataParallel, whose keys and arguments are the model's."""
    inner: nn.Module = module.module if isinstance(module, DistributedDataParallel) else module
    return inner


def replicate(
    modules: Mapping[int, nn.Module], group: dist.ProcessGroup, attend: Callable[[Callable[[], nn.Module]], nn.Module]
) -> dict[int, nn.Module]:
    """Wrap modules with parameters in DistributedDataParallel, also frozen ones, which may be unfrozen later.

    Args:
        group: of the replicas.
        attend: calls a function that waits for the replicas.

    Raises:
        ValueError: for a stage that has data parallelism already.
        FailureError: if a replica exits meanwhile.
    """
    for stage, module in modules.items():
        if find_data_parallel(module, stage) is not None:
            raise ValueError(
                f"data_parallel: stage {stage} is already wrapped in DistributedDataParallel or fully_shard; omit "
                "data_parallel= or the wrapper"
            )
        spread = [name for name, parameter in module.named_parameters() if hasattr(parameter, "placements")]
        if spread:
            raise ValueError(
                f"data_parallel: of stage {stage}, {listed(spread)} are DTensors, which DistributedDataParallel does "
                "not take; apply fully_shard to its layers instead, with a mesh of two dimensions to replicate them, "
                "the second of which may have size 1"
            )
    wrapped = {}
    for stage, module in modules.items():
        with lost_named(f"of the replicas of stage {stage}, ", lambda: others_in([group])):
            wrapped[stage] = attend(partial(_wrapped, module, group))
    return wrapped


def _wrapped(module: nn.Module, group: dist.ProcessGroup) -> nn.Module:
    stand_in: nn.Parameter | None = None
    if not any(parameter.requires_grad for parameter in module.parameters()):
        # torch requires a trainable parameter, and a frozen stage may be unfrozen later: use the cheapest one
        able = [p for p in module.parameters() if p.is_floating_point() or p.is_complex()]
        if not able:
            return module
        stand_in = min(able, key=nn.Parameter.numel)
        stand_in.requires_grad_(True)
    try:
        # otherwise torch starts with one bucket for all, and makes smaller ones only after its own reducer has run
        return DistributedDataParallel(module, process_group=group, find_unused_parameters=True)
    finally:
        if stand_in is not None:
            stand_in.requires_grad_(False)


def check_not_peers(name: str, remedy: str, processes: Sequence[int], peers: Container[int]) -> None:
    """Refuse replicas that are other ranks of the same pipeline, whose stages are others.

    Args:
        name: of what has the replicas, in the error.
        remedy: what to give instead.
        processes: of the replicas.
        peers: the processes of the pipeline's other ranks.
    """
    if found := [process for process in processes if process in peers]:
        raise ValueError(
            f"{name} averages over the processes {list(processes)}, of which {found} are other ranks of this pipeline, "
            f"with other stages: {remedy}"
        )


def check_parallel(
    stage: int, parallel: DataParallel | None, num_local_ranks: int, num_routes: int, peers: Container[int]
) -> None:
    """Refuse combinations that the ranks of this process cannot run.

    Args:
        peers: the processes of the pipeline's other ranks.
    """
    if parallel is None:
        return
    remedy = "wrap it over its replicas alone, by fully_shard(..., mesh=mesh['dp']) or process_group="
    check_not_peers(f"stages: stage {stage}, {parallel.description},", remedy, parallel.processes(), peers)
    if num_local_ranks > 1 and (parallel.num_replicas > 1 or num_routes > 1):
        raise ValueError(
            f"stages: stage {stage} is {parallel.description} and the ranks are threads of this process, which would "
            "run its collectives in any order; start one process per rank with torchrun"
        )
    if num_routes > 1 and not parallel.whole_gradients:
        raise ValueError(
            f"stages: stage {stage} is {parallel.description} and the schedule holds every stage on two ranks, which "
            "sum whole gradients; use DistributedDataParallel, or a schedule with one route such as 'dualpipev'"
        )


def check_not_sharded(stage: int, parallel: DataParallel | None, dtype: torch.dtype) -> None:
    """Refuse a stage whose wrapper sets the dtype of reduced gradients."""
    if parallel is not None and not parallel.whole_gradients:
        raise ValueError(
            f"grad_dtype = {dtype}: stage {stage} is {parallel.description}, which sets the dtype of summed "
            "gradients itself; leave it out, and apply fully_shard with MixedPrecisionPolicy(reduce_dtype=...)"
        )
