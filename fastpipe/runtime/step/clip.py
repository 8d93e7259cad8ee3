"""Clipping by the norm of all gradients of the pipeline, bit-identical to the unsplit model's.

torch takes the norm of the norms of all parameters. A sum of per-rank sums of squares rounds differently. So the ranks
gather the norm of every parameter (8 bytes each), and each takes the norm of them in the unsplit model's order.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from fastpipe.checks import check_flags
from fastpipe.errors import StepError
from fastpipe.runtime.common import (
    decoded,
    dtype_name,
    dtype_of,
    encoded,
    is_dtensor,
    torch_private,
)
from fastpipe.runtime.coordination import Replies, Reply
from fastpipe.runtime.data_parallel import wait_for
from fastpipe.runtime.model import NamedTensor
from fastpipe.runtime.step.steps import Steps

logger = logging.getLogger("fastpipe")


class Norm(NamedTuple):
    """The gradient that a norm belongs to.

    Attributes:
        name: of the parameter in the whole model.
        dtype: of the gradient, without ``torch.``.
        rank: whose norm is used.
    """

    stage: int
    name: str
    dtype: str
    rank: int

    @property
    def place(self) -> str:
        """Name, stage and rank, for messages."""
        return f"{self.name} (stage {self.stage}, rank {self.rank})"


Row = tuple[int, str, str, bool]
"""A gradient: stage, name, dtype without ``torch.``, and whether it is an echo."""


class GradNorms:
    """Gathers the norms of all gradients; names are exchanged only when they change.

    Attributes:
        norms: the gradients of all ranks, each once, in the order of the unsplit model's parameters.
    """

    def __init__(self) -> None:
        self._digests: list[int] = []
        self.arrange([])

    def arrange(self, tables: Sequence[Sequence[Row]]) -> None:
        """Set `norms` and what follows from it.

        Args:
            tables: for each rank, the rows of its norms in order.
        """
        found: dict[tuple[int, str], tuple[int, Norm]] = {}
        given = enumerate((rank, *row) for rank, table in enumerate(tables) for row in table)
        self._same: list[tuple[int, int, Norm, int]] = []
        # a tied weight is in the order of its first stage, so its echoes come last
        for at, (rank, stage, name, dtype, _) in sorted(given, key=lambda pair: pair[1][-1]):
            first, norm = found.setdefault((stage, name), (at, Norm(stage, name, dtype, rank)))
            if first != at:
                self._same.append((first, at, norm, rank))
        chosen = sorted(found.values(), key=lambda pair: pair[1].stage)
        self.norms = [norm for _, norm in chosen]
        self._order = torch.tensor([at for at, _ in chosen], dtype=torch.long)
        empty = [torch.empty(0, dtype=dtype_of(norm.dtype)) for norm in self.norms]
        self._groups = [(dtype.to_real(), torch.tensor(places)) for dtype, _, places in torch_private.grouped(empty)]

    def values(self, gathered: torch.Tensor) -> torch.Tensor:
        """Select the norms, as doubles, from the concatenated norms of all ranks.

        Raises:
            ValueError: if two ranks hold a parameter and have different gradients of it.
        """
        for first, at, norm, rank in self._same:
            one, other = gathered[first].item(), gathered[at].item()
            if one != other and not (math.isnan(one) and math.isnan(other)):
                raise ValueError(
                    f"the gradient of {norm.name} has norm {one:g} on rank {norm.rank} but {other:g} on rank {rank}: "
                    "make the same changes to it on every rank that holds the parameter"
                )
        return gathered[self._order]

    def total(self, values: torch.Tensor, order: float, device: torch.device) -> torch.Tensor:
        """The norm of norms, computed like `torch.nn.utils.get_total_norm`."""
        if not self.norms:
            return torch.tensor(0.0, device=device)
        groups = [values[places].to(dtype).to(device) for dtype, places in self._groups]
        total: torch.Tensor = torch.linalg.vector_norm(torch.cat(groups), order)
        return total

    def gather(
        self,
        all_gather: Callable[[str, Callable[[], Reply]], Replies],
        call: str,
        held: Sequence[NamedTensor[torch.Tensor]],
        make: Callable[[], tuple[float, Reply]],
        timeout: float,
    ) -> tuple[torch.Tensor, Replies]:
        """The norms of all ranks' gradients, in the order of `norms`. Collective.

        Args:
            all_gather: see `fastpipe.runtime.step.Steps.all_gather`.
            call: its first argument.
            make: returns the order of the norm, and further entries of the message. An error in it, or in the
                gradients, is an error on every rank.
            timeout: seconds to wait for other processes that have a part of a gradient.

        Returns:
            The norms, and the messages of all ranks.
        """
        table = [(h.stage, h.name, dtype_name(h.tensor.dtype), h.is_echo) for h in held]

        def numbers() -> Reply:
            order, more = make()
            norms = encoded(norms_of(held, order, timeout))
            # other ranks only compare digests that this process sent, so its own hash will do
            return {"norms": norms, "digest": hash(tuple(table)), "received": self._digests, **more}

        replies = all_gather(call, numbers)
        digests = [reply["digest"] for reply in replies]
        if any(reply["received"] != digests for reply in replies):
            tables = [reply["table"] for reply in all_gather(f"{call}, names", lambda: {"table": table})]
            self.arrange(tables)
            self._digests = digests
        return self.values(_unpacked(replies)), replies


def _unpacked(replies: Sequence[Reply]) -> torch.Tensor:
    return torch.cat([decoded(*reply["norms"]) for reply in replies])


def check_elsewhere(norms: GradNorms, values: torch.Tensor, replies: Replies) -> None:
    """Refuse gradients that differ between the pipelines of a mesh: their norm is that of a part."""
    for first in range(0, len(replies.elsewhere), len(replies)):
        pipeline = replies.elsewhere[first : first + len(replies)]
        other = norms.values(_unpacked(pipeline))
        close = torch.isclose(values, other, rtol=1e-3, equal_nan=True)
        if not close.all():
            i = int((~close).nonzero()[0])
            raise ValueError(
                f"the gradient of {norms.norms[i].place} has norm {values[i].item():g} here and {other[i].item():g} "
                f"at {pipeline[0]['pipeline']} in the mesh: make a parameter of which every rank has a part a "
                "DTensor (torch.distributed.tensor.distribute_tensor), and sum a gradient to which every rank adds a "
                "part"
            )


def check_limits(max_norm: Any, norm_type: Any) -> tuple[float, float]:
    """Both as numbers."""
    limit, order = _number(max_norm), _number(math.inf if norm_type == "inf" else norm_type)
    if not limit >= 0:
        raise ValueError(f"max_norm = {max_norm!r}: give a number of at least 0; float('inf') only measures")
    if not order >= 0:
        raise ValueError(f"norm_type = {norm_type!r}: give the p of the p-norm, 2.0 say and at least 0, or 'inf'")
    return limit, order


def _number(value: Any) -> float:
    """A number, or a tensor of one element, as float; NaN for anything else."""
    try:
        return math.nan if isinstance(value, str) else float(value)
    except (TypeError, ValueError, RuntimeError):
        return math.nan


@torch.no_grad()
def norms_of(held: Sequence[NamedTensor[torch.Tensor]], order: float, timeout: float) -> torch.Tensor:
    """The norm of each gradient, as doubles on the CPU (exact for every dtype); one transfer for all.

    Raises:
        ValueError: for a sparse gradient, which torch's norm does not support.
        FailureError: if a process that has a part of a gradient does not come within the timeout.
    """
    for h in held:
        if h.tensor.layout is not torch.strided:
            raise ValueError(
                f"the gradient of {h.name} (stage {h.stage}) is sparse, which torch's norm does not support: leave "
                "out sparse=True of its embedding, or make .grad dense by to_dense() before it is clipped"
            )
    grads = [h.tensor for h in held]
    norms: list[torch.Tensor] = [torch.empty(0)] * len(grads)
    plain = [i for i, grad in enumerate(grads) if not is_dtensor(grad)]
    for _, tensors, places in torch_private.grouped([grads[i] for i in plain]):
        for place, norm in zip(places, torch_private.norms(tensors, order), strict=True):
            norms[plain[place]] = norm
    for places, found in _sharded_norms(grads, order, time.monotonic() + timeout):
        for place, norm in zip(places, found.unbind(), strict=True):
            norms[place] = norm
    return torch.stack([norm.double() for norm in norms]).cpu() if norms else torch.empty(0, dtype=torch.double)


def _sharded_norms(grads: list[Any], order: float, deadline: float) -> Iterable[tuple[list[int], torch.Tensor]]:
    """The norms of gradients that FSDP shards; one reduction per mesh, placement and dtype."""
    spread: dict[Any, list[int]] = {}
    for i, grad in enumerate(grads):
        if is_dtensor(grad):
            grad = grads[i] = _summed(grad)
            spread.setdefault((grad.device_mesh, grad.placements, grad.dtype), []).append(i)
    for (mesh, placements, dtype), places in spread.items():
        local = torch.stack([_local_norm(grads[i], order) for i in places])
        for dimension, placement in enumerate(placements):
            # also the special shards that fully_shard makes of tensor-parallel layers
            if not placement.is_replicate():
                local = _reduced(local, order, mesh.get_group(dimension), deadline)
        yield places, local.to(dtype.to_real())


def _summed(grad: Any) -> Any:
    """A gradient of which every rank has a part of the sum, as sequence parallelism leaves those of norms, summed."""
    if not any(placement.is_partial() for placement in grad.placements):
        return grad
    from torch.distributed.tensor import Replicate

    return grad.redistribute(placements=[Replicate() if p.is_partial() else p for p in grad.placements])


def _local_norm(grad: Any, order: float) -> torch.Tensor:
    local: torch.Tensor = grad.to_local()
    # the local shard may be empty, and not every norm is defined for empty tensors
    return torch.linalg.vector_norm(local, order).double() if local.numel() else local.new_zeros((), dtype=torch.double)


def _reduced(norms: torch.Tensor, order: float, group: Any, deadline: float) -> torch.Tensor:
    if order <= 0:
        raise ValueError(f"norm_type = {order}: gradients sharded over processes need a norm above 0")
    is_largest = math.isinf(order)
    powers = norms if is_largest else norms**order
    work = dist.all_reduce(powers, dist.ReduceOp.MAX if is_largest else dist.ReduceOp.SUM, group, async_op=True)

    def cause() -> str:
        return (
            f"the norms of gradients that {group.size()} processes share were not reduced within the Pipeline's "
            "timeout: another of them does not clip; call clip_grad_norm_ on every rank of all replicas"
        )

    wait_for(work.get_future(), deadline, cause)
    return powers if is_largest else powers ** (1 / order)


def same_arguments(replies: Replies) -> tuple[float, float, bool]:
    """The arguments of the call, equal on every rank of all pipelines of a mesh.

    Raises:
        ValueError: if they differ.
    """
    given = {place: tuple(reply["arguments"]) for place, reply in replies.by_place.items()}
    if len(set(given.values())) > 1:
        listed = "; ".join(f"rank {place}: {arguments}" for place, arguments in given.items())
        raise ValueError(f"max_norm, norm_type, error_if_nonfinite: give the same on every rank, not {listed}")
    limit, order, is_error = given["0"]
    return limit, order, is_error


def report_nonfinite(
    total: torch.Tensor,
    norms: Sequence[Norm],
    values: torch.Tensor,
    local: Sequence[NamedTensor[torch.Tensor]],
    *,
    is_error: bool,
    expected: bool = False,
) -> None:
    """Report the gradients that made the norm infinite or NaN.

    Args:
        local: the gradients of this process; it logs only these.
        expected: log at INFO instead of WARNING.

    Raises:
        StepError: if ``is_error``, on every rank.
    """
    if bool(total.isfinite()):
        return
    bad = [norm for norm, finite in zip(norms, values.isfinite().tolist(), strict=True) if not finite]
    names = ", ".join(norm.place for norm in bad[:4]) + (f" and {len(bad) - 4} more" if len(bad) > 4 else "")
    cause = f"the gradients of {names} are not finite" if bad else "each gradient is finite, but their norm overflows"
    text = f"the norm of the gradients is {float(total)}: {cause}"
    if is_error:
        rank, stage = (bad[0].rank, bad[0].stage) if bad else (None, None)
        raise StepError(f"{text}; nothing was clipped", rank=rank, stage=stage, cause=cause)
    own = {(held.stage, held.name) for held in local}
    if any((norm.stage, norm.name) in own for norm in bad):
        logger.log(logging.INFO if expected else logging.WARNING, "%s", text)


def clip_grad_norm(
    steps: Steps,
    gathering: GradNorms,
    named: Sequence[NamedTensor[nn.Parameter]],
    max_norm: Any,
    norm_type: Any,
    error_if_nonfinite: bool,
) -> torch.Tensor:
    """See `fastpipe.Pipeline.clip_grad_norm_`."""
    local = [NamedTensor(p.stage, p.name, p.tensor.grad, p.is_echo) for p in named if p.tensor.grad is not None]

    def arguments() -> tuple[float, Reply]:
        # an error here is an error on every rank, so no rank hangs
        check_flags(error_if_nonfinite=error_if_nonfinite)
        limit, order = check_limits(max_norm, norm_type)
        return order, {"arguments": [limit, order, bool(error_if_nonfinite)]}

    values, replies = gathering.gather(steps.all_gather, "clip_grad_norm_", local, arguments, steps.ranks.timeout)
    limit, order, is_error = same_arguments(replies)
    check_elsewhere(gathering, values, replies)
    norms, total = gathering.norms, gathering.total(values, order, steps.device)
    # a scaler tries large scales and skips steps that overflow
    report_nonfinite(total, norms, values, local, is_error=is_error, expected=steps.loss_scale is not None)
    # of DTensors the local parts: torch scales no mixture of both, and 2.11 leaves parts of a sum as they are
    grads: list[Any] = [SimpleNamespace(grad=_local(h.tensor)) for h in local]
    torch.nn.utils.clip_grads_with_norm_(grads, limit, total)
    return total


@torch.no_grad()
def _local(grad: Any) -> Any:
    return grad.to_local() if is_dtensor(grad) else grad
