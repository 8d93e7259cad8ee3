"""The arguments of a Pipeline in four groups, and their checks before anything is built.

The group of batches is in `fastpipe.runtime.step.inputs`, as it is used in every step.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from fastpipe.checks import check_counts, check_flags, is_whole, plain
from fastpipe.hardware_queues import queues_in_force
from fastpipe.machine import Lanes
from fastpipe.runtime.common import check_grad_dtype
from fastpipe.runtime.model import Policy, Stages, check_policy
from fastpipe.runtime.stage import ContextFactory, Stage, check_contexts
from fastpipe.runtime.step import BatchArguments
from fastpipe.runtime.transport import (
    CHOICES,
    Loopback,
    MeshGroups,
    ProcessGroups,
    Transport,
    why_not_python,
)
from fastpipe.schedule import Schedule

_LONGEST = 1e9
"""Seconds. Larger timeouts overflow in locks, process groups and sockets."""


@dataclass(frozen=True)
class ModelArguments:
    """The model and its partition; attributes as of `fastpipe.Pipeline`."""

    stages: Stages
    partition: str | Sequence[int]
    example: Any
    tied: Sequence[Sequence[str]] | None
    recompute: Policy
    grad_dtype: torch.dtype | None
    fused_weight_grad: bool
    data_parallel: Any
    device: str | torch.device | None
    cache_carried: bool

    def check(self) -> None:
        """Check what does not depend on the model.

        Raises:
            ValueError: naming the argument.
        """
        check_policy(self.recompute)
        check_grad_dtype(self.grad_dtype)
        check_flags(fused_weight_grad=self.fused_weight_grad, cache_carried=self.cache_carried)
        groups = [] if self.tied is None else self.tied
        if not (_is_list(groups) and all(isinstance(names, Sequence) for names in groups)):
            raise ValueError(f"tied = {self.tied!r}: give a list of groups of names, as in [('0.weight', '11.weight')]")


@dataclass(frozen=True)
class ScheduleArguments:
    """The schedule; attributes as of `fastpipe.Pipeline`."""

    schedule: str | Schedule
    num_microbatches: int | None
    num_ranks: int | None
    stages_per_rank: int | None
    schedule_options: Mapping[str, Any] | None
    stage_to_rank: Sequence[int] | None
    recv_lookahead: int | str

    def check(self) -> None:
        """Raises ValueError, with the argument's name, for values that are wrong for any schedule."""
        ranks = self.stage_to_rank
        if ranks is not None and not (_is_list(ranks) and all(is_whole(rank) for rank in ranks)):
            raise ValueError(f"stage_to_rank = {ranks!r}: give a list with the rank of every stage")
        counts = {"num_microbatches": self.num_microbatches, "stages_per_rank": self.stages_per_rank}
        check_counts(**{name: count for name, count in counts.items() if count is not None})
        if isinstance(self.recv_lookahead, bool):
            raise ValueError(f"recv_lookahead = {self.recv_lookahead}: give a whole number, or 'all'")
        if isinstance(self.schedule_options, Mapping) and not all(isinstance(k, str) for k in self.schedule_options):
            raise ValueError(f"schedule_options = {self.schedule_options!r}: its keys are the names of options")

    def find_num_ranks(self, num_processes: int) -> int:
        """The number of ranks: that of the schedule or of the user; default: the number of processes.

        Raises:
            ValueError: for an invalid number, or one that does not match the processes.
        """
        wanted = self.schedule.num_ranks if isinstance(self.schedule, Schedule) else self.num_ranks
        if wanted is None:
            return num_processes
        if self.num_ranks not in (None, wanted):
            raise ValueError(f"num_ranks = {self.num_ranks}: the schedule given has {wanted} ranks; leave it out")
        check_counts(num_ranks=wanted)
        if num_processes > 1 and wanted != num_processes:
            raise ValueError(
                f"num_ranks = {wanted}: the group has {num_processes} processes, each one rank; start {wanted} "
                "processes, or a single one, whose ranks are threads"
            )
        return int(wanted)

    def find_num_microbatches(self) -> int:
        """The number of microbatches per batch, from the user or the schedule.

        Raises:
            ValueError: if neither gives it.
        """
        if self.num_microbatches is not None:
            return self.num_microbatches
        if isinstance(self.schedule, Schedule):
            return self.schedule.num_microbatches
        raise ValueError("num_microbatches is missing: give the number of microbatches of a batch")


@dataclass(frozen=True)
class ExecutionArguments:
    """Executor, transport and process groups; attributes as of `fastpipe.Pipeline`."""

    executor: str
    transport: str | Transport
    timeout: float
    group: Any
    mesh: Any
    overlap: str
    forward_context: ContextFactory | None
    backward_context: ContextFactory | None
    cuda_graph: bool
    warn_after: float | None = None
    audit: float | None = None

    def check(self) -> None:
        """Check what does not depend on the model.

        Raises:
            ValueError, TypeError: naming the argument.
        """
        check_contexts(self.forward_context, self.backward_context)
        if self.overlap not in ("auto", "always", "never"):
            raise ValueError(f"overlap = {self.overlap!r}: use 'auto', 'always' or 'never'")
        self.checked_warn_after()
        if self.overlap == "always" and (dimensions := self.other_dimensions()):
            raise ValueError(
                f"overlap = 'always': stages run collectives over {', '.join(dimensions)}, which all ranks must "
                "start in one order, and a forward and a backward in two threads would not; use 'auto', which overlaps "
                "them at fastpipe.all_to_all, or 'never'"
            )
        ended = [name for name in self.other_dimensions() if MeshGroups.have_ended(name, self.mesh.get_group(name))]
        if ended:
            raise ValueError(
                f"mesh: its groups over {', '.join(ended)} have ended, as a step failed in a stage that used them; "
                "start the processes again, or make a mesh in which these dimensions have other names"
            )
        for name in [name for name in self.other_dimensions() if name in ("replicate", "fsdp", "ddp")]:
            raise ValueError(
                f"mesh has a dimension {name!r}, whose ranks would need the same batch: name one of replicas 'dp', "
                f"or 'dp_{name}'"
            )
        check_flags(cuda_graph=self.cuda_graph)
        if self.audit is not None and not (_is_positive(self.audit) and self.audit <= 1):
            raise ValueError(
                f"audit = {self.audit!r}: give the share of the microbatches of stages that another rank computes "
                "again, 0.05 for example, or None"
            )

    def checked_timeout(self) -> float:
        """The timeout in seconds; infinity is allowed.

        Raises:
            ValueError: for an invalid timeout, with what to give.
        """
        if not _is_positive(self.timeout):
            raise ValueError(f"timeout = {self.timeout!r}: give seconds, more than 0")
        return min(self.timeout, _LONGEST)

    def checked_warn_after(self) -> float:
        """The seconds after which a step is reported.

        Raises:
            ValueError: for an invalid number, with what to give.
        """
        seconds = self.warn_after
        if seconds is None:
            return min(60.0, self.checked_timeout() / 10)
        if not _is_positive(seconds):
            raise ValueError(f"warn_after = {seconds!r}: give seconds, more than 0, or None")
        return float(seconds)

    def check_member(self) -> None:
        """Refuse a process outside the mesh or group at once: the processes in it do not wait for it.

        Raises:
            ValueError: naming the argument.
        """
        name, given = ("group", self.group) if self.mesh is None else ("mesh", self.mesh)
        is_outside = given is dist.GroupMember.NON_GROUP_MEMBER
        if is_outside or (hasattr(given, "get_coordinate") and given.get_coordinate() is None):
            raise ValueError(
                f"{name}: this process (rank {dist.get_rank()}) is not in it; build the Pipeline only in its processes"
            )

    def pipeline_group(self) -> Any:
        """The pipeline's processes: ``group``, or that of dimension ``"pp"`` of the mesh; None for all.

        Raises:
            TypeError: for a group of another type.
            ValueError: for a mesh without that dimension or in another order, or together with a group.
        """
        if self.mesh is None:
            return process_group(self.group, "group", "pp")
        names = getattr(self.mesh, "mesh_dim_names", None)
        if names is None or "pp" not in names:
            found = type(self.mesh).__name__ if not hasattr(self.mesh, "mesh_dim_names") else f"dimensions {names}"
            raise ValueError(
                f"mesh has {found}: give a DeviceMesh with a dimension named 'pp', as "
                "init_device_mesh(device_type, sizes, mesh_dim_names=('pp', 'tp')) makes one"
            )
        if self.group is not None:
            raise ValueError("mesh and group: both name the pipeline's processes; omit group")
        for dimension, name in enumerate(names):
            if (self.mesh.mesh.diff(dim=dimension) < 0).any():
                raise ValueError(
                    f"mesh: along {name!r} its processes are not in ascending order ({self.mesh.mesh.tolist()}), as "
                    "torch numbers the ranks of a group: stages would meet others, checkpoints mix shards; order them"
                )
        return self.mesh["pp"].get_group()

    def other_dimensions(self) -> dict[str, int]:
        """The mesh's dimensions over which stages run collectives of their own, with their sizes: all but ``"pp"`` and
        those of replicas that meet between forwards and backwards."""
        names = () if self.mesh is None else self.mesh.mesh_dim_names
        sizes = {name: int(self.mesh[name].size()) for name in names if name != "pp" and not name.startswith("dp")}
        return {name: size for name, size in sizes.items() if size > 1}

    def pipelines(self) -> dict[str, tuple[int, ...]]:
        """The processes of the pipelines whose stages meet, in the order of their ranks, by the place in the mesh."""
        dimensions = self.other_dimensions()
        names, here = list(self.mesh.mesh_dim_names), self.mesh.get_coordinate()
        places = tuple(slice(None) if n == "pp" or n in dimensions else i for n, i in zip(names, here, strict=True))
        left = [name for name in names if name == "pp" or name in dimensions]
        ranks = self.mesh.mesh[places].movedim(left.index("pp"), -1).flatten(end_dim=-2).tolist()
        texts = [
            ", ".join(f"{name}={i}" for name, i in zip(dimensions, place, strict=True))
            for place in itertools.product(*map(range, dimensions.values()))
        ]
        return {text: tuple(sorted(own)) for text, own in zip(texts, ranks, strict=True)}

    def check_replicas(self, stages: Iterable[Stage]) -> None:
        """Refuse stages whose gradients would not be averaged over the mesh's replicas."""
        names = () if self.mesh is None else self.mesh.mesh_dim_names
        groups = {name: self.mesh.get_group(name) for name in names if name.startswith("dp") or name == "cp"}
        wanted = {name: dist.get_process_group_ranks(group) for name, group in groups.items()}
        count, replicas = math.prod(map(len, wanted.values())), {*itertools.chain(*wanted.values())}
        trained = [stage for stage in stages if any(p.requires_grad for p in stage.module.parameters())]
        for stage in trained if count > 1 else ():
            for processes in [[dist.get_rank()]] if stage.parallel is None else stage.parallel.averages():
                # it may average over more dimensions than these, but not over others
                if len(processes) >= count and replicas.issubset(processes):
                    continue
                raise ValueError(
                    f"mesh has {count} replicas of stage {stage.index} (processes along each dimension: {wanted}), "
                    f"and gradients of it would be averaged over {len(processes)} (processes {processes}): apply "
                    "fully_shard over these dimensions, pass data_parallel=, or leave the dimension out of the "
                    "mesh if the script averages"
                )

    @property
    def chosen_transport(self) -> Any:
        """The user's transport, or that of the environment; default ``"auto"``."""
        return os.environ.get("FASTPIPE_TRANSPORT", "auto") if self.transport == "auto" else self.transport

    def lanes(self, num_ranks: int, num_processes: int) -> Lanes:
        """The lanes of the transport: operations that it executes in order.

        Raises:
            ValueError: for a transport that is impossible here, with the alternatives.
        """
        transport, is_single_process = self.transport, num_processes == 1
        if isinstance(transport, Transport):
            if not is_single_process and transport.is_local:
                raise ValueError("transport: loopback connects threads of one process; use 'process_group' or 'auto'")
            return transport.lanes
        if transport not in ("auto", "loopback", *CHOICES):
            listed = ", ".join(map(repr, CHOICES))
            raise ValueError(f"transport = {transport!r}: use 'auto', 'loopback' or one of {listed}")
        if not is_single_process and transport == "loopback":
            raise ValueError("transport = 'loopback': there are several processes; use 'process_group' or 'auto'")
        if is_single_process and transport in CHOICES and num_ranks > 1:
            raise ValueError(
                f"transport = {transport!r}: there is one process for {num_ranks} ranks; start one per rank with "
                "torchrun, or use 'loopback' or 'auto'"
            )
        if is_single_process:
            return Loopback.lanes
        chosen = self._transport_between_processes
        if self.executor == "python" and not chosen.has_endpoint:
            raise ValueError(why_not_python(self.chosen_transport))
        return chosen.lanes

    @property
    def _transport_between_processes(self) -> type[Transport]:
        """The class of the transport that was chosen by name; "auto" has the lanes of process groups."""
        return CHOICES.get(self.chosen_transport, ProcessGroups)

    def queues(self, device: torch.device, num_processes: int) -> int | None:
        """The number of hardware queues that the transport's streams share; None if it has no streams on CUDA.

        The loopback transport waits only for work queued earlier.
        """
        transport: Transport | type[Transport] = Loopback if num_processes == 1 else self._transport_between_processes
        if isinstance(self.transport, Transport):
            transport = self.transport
        return queues_in_force() if transport.needs_queues and device.type == "cuda" else None


@dataclass(frozen=True)
class Arguments:
    """All arguments of a Pipeline."""

    model: ModelArguments
    schedule: ScheduleArguments
    batch: BatchArguments
    execution: ExecutionArguments

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Arguments:
        """The groups of arguments by name; each group takes its own, NumPy's numbers as Python's."""
        given = {name: plain(value) if isinstance(value, np.generic) else value for name, value in given.items()}
        given |= {name: plain(given[name]) for name in ("split", "merge")}
        groups: Any = ModelArguments, ScheduleArguments, BatchArguments, ExecutionArguments
        return cls(*(group(**{field.name: given[field.name] for field in fields(group)}) for group in groups))

    def check(self) -> None:
        """Check what does not depend on the model.

        Raises:
            ValueError: naming the argument.
        """
        self.batch.check()
        self.execution.check()
        self.model.check()
        self.schedule.check()
        self._check_audit()

    def _check_audit(self) -> None:
        model, execution = self.model, self.execution
        others = {
            "data_parallel": model.data_parallel is not None,
            "mesh": execution.mesh is not None,
            "fused_weight_grad": model.fused_weight_grad,
            "cache_carried": model.cache_carried,
            "cuda_graph": execution.cuda_graph,
        }
        for name in (name for name, is_given in others.items() if is_given and execution.audit is not None):
            raise ValueError(f"audit and {name}: a stage cannot be computed again with {name}; leave one of them out")

    @property
    def signature(self) -> dict[str, str]:
        """The values that must be the same on every rank, by argument; without defaults."""
        where, reduction = self.execution.chosen_transport, self.batch.loss_reduction
        values = {"transport": where} if isinstance(where, str) and where != "auto" else {}
        values |= {"loss_reduction": _text(reduction)} if reduction != "mean" else {}
        values |= {"metrics": _text(self.batch.metrics)} if self.batch.metrics != "mean" else {}
        values |= {"split": _text(self.batch.split)} if self.batch.split is not None else {}
        values |= {"grad_dtype": str(self.model.grad_dtype)} if self.model.grad_dtype is not None else {}
        values |= {"cache_carried": "True"} if self.model.cache_carried else {}
        if self.execution.overlap != "auto" and self.execution.other_dimensions():
            # pairs that take turns start collectives in another order
            values |= {"overlap": self.execution.overlap}
        return values


def process_group(given: Any, argument: str, dimension: str) -> Any:
    """A process group that a user gives, or that of a DeviceMesh of one dimension; None stays None.

    Args:
        argument: the name of what was given.
        dimension: an example of a mesh's dimension.

    Raises:
        TypeError: for another type.
        ValueError: for a mesh of several dimensions.
    """
    if given is None or isinstance(given, dist.ProcessGroup):
        return given
    if not hasattr(given, "mesh_dim_names"):
        raise TypeError(
            f"{argument} is a {type(given).__name__}: give a process group that this process is in, or a DeviceMesh of "
            f"one dimension, for example mesh[{dimension!r}]"
        )
    if given.ndim != 1:
        raise ValueError(
            f"{argument}: the DeviceMesh has {given.ndim} dimensions; give one of them, for example mesh[{dimension!r}]"
        )
    return given.get_group()


def _text(value: Any) -> str:
    """The same on every rank that is given the same. Of functions it is the name, as their code cannot be compared."""
    if isinstance(value, Mapping):
        return str({key: _text(value[key]) for key in sorted(value, key=str)})
    if not callable(value):
        return str(value)
    named = value if hasattr(value, "__qualname__") else type(value)
    # methods of C, such as torch.Tensor.numel, have no module, and the script's has another name in processes that
    # multiprocessing starts
    names = filter(None, (getattr(named, "__module__", None), named.__qualname__))
    return ".".join(names).replace("__mp_main__", "__main__")


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0
