"""Clipping by the norm of all gradients of the pipeline: to the last bit that of the unsplit model.

torch's norm is a norm of norms: one a parameter, and then one of these. Summing the squares that every rank finds for
itself gives other last bits. So the ranks tell each other the norm of every parameter, a few bytes each, and all of
them take the same last norm, in the order of the unsplit model's parameters.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype

from fastpipe.errors import StepError
from fastpipe.runtime.control import Reply
from fastpipe.runtime.modules import Named
from fastpipe.runtime.steps import Steps

logger = logging.getLogger("fastpipe")


class Held(NamedTuple):
    """A gradient of this process."""

    stage: int
    name: str
    grad: torch.Tensor
    is_echo: bool = False


class Norm(NamedTuple):
    """The norm of one parameter's gradient, as the ranks tell each other.

    Attributes:
        stage: where the parameter is.
        name: its name in the whole model.
        dtype: of the gradient, without ``torch.``.
        value: its norm; a float holds that of every dtype exactly.
        rank: who said it.
    """

    stage: int
    name: str
    dtype: str
    value: float
    rank: int

    @property
    def place(self) -> str:
        """Which gradient, as a user reads it."""
        return f"{self.name} (stage {self.stage}, rank {self.rank})"


def check_limits(max_norm: Any, norm_type: Any) -> tuple[float, float]:
    """Both as numbers.

    Raises:
        ValueError: naming the one that is wrong, and what to give.
    """
    limit, order = _number(max_norm), _number(math.inf if norm_type == "inf" else norm_type)
    if not limit >= 0:
        raise ValueError(f"max_norm = {max_norm!r}: give a number of at least 0; float('inf') only measures")
    if not order >= 0:
        raise ValueError(f"norm_type = {norm_type!r}: give the p of the p-norm, 2.0 say and at least 0, or 'inf'")
    return limit, order


def _number(value: Any) -> float:
    """What is one, or a tensor of one; NaN for all else."""
    try:
        return math.nan if isinstance(value, str) else float(value)
    except (TypeError, ValueError, RuntimeError):
        return math.nan


def gradients_of(parameters: Iterable[Named]) -> list[Held]:
    """The gradients there are."""
    return [Held(p.stage, p.name, p.parameter.grad, p.is_echo) for p in parameters if p.parameter.grad is not None]


@torch.no_grad()
def norms_message(held: Sequence[Held], order: float) -> Reply:
    """What this rank tells the others: stage, name, dtype, norm of every gradient, and whether it is an echo.

    Raises:
        ValueError: for a sparse gradient, of which torch has no norm.
    """
    for h in held:
        if h.grad.layout is not torch.strided:
            raise ValueError(
                f"the gradient of {h.name} (stage {h.stage}) is sparse, and torch takes no norm of such: leave out "
                "sparse=True of its embedding, or make .grad dense by to_dense() before it is clipped"
            )
    norms = _norms([h.grad for h in held], order)
    dtypes = [str(h.grad.dtype).removeprefix("torch.") for h in held]
    return {"norms": [[h.stage, h.name, d, value, h.is_echo] for h, d, value in zip(held, dtypes, norms, strict=True)]}


def _norms(grads: Sequence[torch.Tensor], order: float) -> list[float]:
    """Each gradient's norm; one transfer from the device for all."""
    norms: list[torch.Tensor] = [torch.empty(0)] * len(grads)
    plain = [i for i, grad in enumerate(grads) if not _is_spread(grad)]
    for (_, _), ([tensors], places) in _grouped([grads[i] for i in plain]).items():
        for place, norm in zip(places, torch._foreach_norm(tensors, order), strict=True):
            norms[plain[place]] = norm
    for places, found in _sharded_norms(grads, order):
        for place, norm in zip(places, found.unbind(), strict=True):
            norms[place] = norm
    values: list[float] = torch.stack([norm.double() for norm in norms]).tolist() if norms else []
    return values


def _grouped(tensors: Sequence[torch.Tensor]) -> dict[Any, Any]:
    """The tensors and their indices by device and dtype, the groups in the order in which torch would take them."""
    return _group_tensors_by_device_and_dtype([list(tensors)], with_indices=True) if tensors else {}


def _is_spread(grad: torch.Tensor) -> bool:
    # who has made a DTensor has imported them; to do so here would cost every program half a second
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(grad, module.DTensor)


def _sharded_norms(grads: Sequence[Any], order: float) -> Iterable[tuple[list[int], torch.Tensor]]:
    """The norms of gradients that FSDP spread over processes: one reduction for all that are spread alike."""
    spread: dict[Any, list[int]] = {}
    for i, grad in enumerate(grads):
        if _is_spread(grad):
            spread.setdefault((grad.device_mesh, grad.placements, grad.dtype), []).append(i)
    for (mesh, placements, dtype), places in spread.items():
        local = torch.stack([_local_norm(grads[i], order) for i in places])
        for dimension, placement in enumerate(placements):
            if placement.is_shard():
                local = _reduced(local, order, mesh.get_group(dimension))
            elif not placement.is_replicate():
                raise ValueError(f"a gradient has the placement {placement}: reduce it before it is clipped")
        yield places, local.to(dtype.to_real())


def _local_norm(grad: Any, order: float) -> torch.Tensor:
    local: torch.Tensor = grad.to_local()
    # a process may have none of its rows, and an empty tensor has no norm of every order
    return torch.linalg.vector_norm(local, order).double() if local.numel() else local.new_zeros((), dtype=torch.double)


def _reduced(norms: torch.Tensor, order: float, group: Any) -> torch.Tensor:
    if order <= 0:
        raise ValueError(f"norm_type = {order}: gradients that are spread over processes take a norm above 0")
    if math.isinf(order):
        dist.all_reduce(norms, dist.ReduceOp.MAX, group)
        return norms
    powers = norms**order
    dist.all_reduce(powers, group=group)
    return powers ** (1 / order)


def same_arguments(replies: Sequence[Reply]) -> tuple[float, float, bool]:
    """The arguments of the call, which are those of every rank.

    Raises:
        ValueError: when they are not.
    """
    given = [tuple(reply["arguments"]) for reply in replies]
    if len(set(given)) > 1:
        listed = "; ".join(f"rank {rank}: {arguments}" for rank, arguments in enumerate(given))
        raise ValueError(f"max_norm, norm_type, error_if_nonfinite: give the same on every rank, not {listed}")
    limit, order, is_error = given[0]
    return limit, order, is_error


def merged_norms(replies: Sequence[Reply]) -> list[Norm]:
    """Every gradient's norm once, in the order of the unsplit model's parameters.

    Raises:
        ValueError: when two ranks hold a parameter and have different gradients of it.
    """
    found: dict[tuple[int, str], Norm] = {}
    given = [(rank, values) for rank, reply in enumerate(replies) for values in reply["norms"]]
    # a tied weight takes its place among those of its first stage, so its echoes come last
    for rank, (stage, name, dtype, value, _) in sorted(given, key=lambda pair: bool(pair[1][-1])):
        norm = Norm(stage, name, dtype, value, rank)
        first = found.setdefault((norm.stage, norm.name), norm)
        if first.value != norm.value and not (math.isnan(norm.value) and math.isnan(first.value)):
            raise ValueError(
                f"the ranks that hold {norm.name} have different gradients of it: norm {first.value:g} on rank "
                f"{first.rank}, {norm.value:g} on rank {norm.rank}; change gradients on all holders alike"
            )
    return sorted(found.values(), key=lambda norm: norm.stage)


def total_norm(norms: Sequence[Norm], order: float, device: torch.device) -> torch.Tensor:
    """The norm of norms, as `torch.nn.utils.get_total_norm` takes it."""
    if not norms:
        return torch.tensor(0.0, device=device)
    looks = [torch.empty(0, dtype=getattr(torch, norm.dtype)) for norm in norms]
    groups = [
        torch.tensor([norms[i].value for i in places], dtype=dtype.to_real(), device=device)
        for (_, dtype), (_, places) in _grouped(looks).items()
    ]
    total: torch.Tensor = torch.linalg.vector_norm(torch.cat(groups), order)
    return total


def report_nonfinite(
    total: torch.Tensor, norms: Sequence[Norm], local: Sequence[Held], *, is_error: bool, expected: bool = False
) -> None:
    """Name the gradients that made the norm infinite or NaN.

    Args:
        total: the norm.
        norms: of all gradients.
        local: those of this process, which it logs.
        is_error: whether to raise.
        expected: whether it is nothing to warn of.

    Raises:
        StepError: if that is to be an error, on every rank.
    """
    if bool(total.isfinite()):
        return
    bad = [norm for norm in norms if not math.isfinite(norm.value)]
    names = ", ".join(norm.place for norm in bad[:4]) + (f" and {len(bad) - 4} more" if len(bad) > 4 else "")
    cause = f"not finite are the gradients of {names}" if bad else "each gradient is finite, their norm overflows"
    text = f"the norm of the gradients is {float(total)}: {cause}"
    if is_error:
        rank, stage = (bad[0].rank, bad[0].stage) if bad else (None, None)
        raise StepError(f"{text}; nothing was clipped", rank=rank, stage=stage, cause=cause)
    own = {(held.stage, held.name) for held in local}
    if any((norm.stage, norm.name) in own for norm in bad):
        logger.log(logging.INFO if expected else logging.WARNING, "%s", text)


def clip_grad_norm(
    steps: Steps,
    named: Sequence[Named],
    device: torch.device,
    max_norm: Any,
    norm_type: Any,
    error_if_nonfinite: bool,
) -> torch.Tensor:
    """See `fastpipe.Pipeline.clip_grad_norm_`."""
    local = gradients_of(named)

    def message() -> Reply:
        # whatever is wrong here is an error on every rank, and nobody waits
        limit, order = check_limits(max_norm, norm_type)
        return {"arguments": [limit, order, bool(error_if_nonfinite)], **norms_message(local, order)}

    replies = steps.meet("clip_grad_norm_", message)
    limit, order, is_error = same_arguments(replies)
    norms = merged_norms(replies)
    total = total_norm(norms, order, device)
    # a scaler tries large scales, and leaves out the steps that overflow
    report_nonfinite(total, norms, local, is_error=is_error, expected=steps.loss_scale is not None)
    torch.nn.utils.clip_grads_with_norm_([p.parameter for p in named], limit, total)
    return total
