"""Outputs on every rank: the ranks exchange dtypes and shapes, and broadcast the tensors."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from fastpipe.runtime.common import Failure, Tensors, cause_text
from fastpipe.runtime.coordination import Reply
from fastpipe.runtime.stage import from_tensors, to_tensors
from fastpipe.runtime.step.steps import Steps
from fastpipe.runtime.transport import Membership

Outputs = dict[int, Any]
"""By microbatch."""


def gather(steps: Steps, member: Membership, device: torch.device, own: Outputs) -> Outputs:
    """The outputs of all processes, on every one of them. Collective, after a step.

    Args:
        member: the group, and this process's place in it.
        own: the outputs of this process; returned unchanged.

    Raises:
        ValueError: for an output that cannot be sent.
        StepError: if another rank could not take part.
    """
    if member.size == 1:
        return own
    packed: dict[int, Tensors] = {}

    def headers() -> Reply:
        # in a dict, which preserves tuples
        packed.update({i: to_tensors({"output": output}, {}, -1) for i, output in sorted(own.items())})
        return {"outputs": [[i, [_header(tensor) for tensor in tensors]] for i, tensors in packed.items()]}

    outputs = dict(own)
    for rank, reply in enumerate(steps.all_gather("gather_outputs", headers)):
        for i, received in reply["outputs"]:
            tensors = packed[i] if rank == member.rank else tuple(_empty(header, device) for header in received)
            try:
                for tensor in tensors:
                    _broadcast(tensor, member, rank)
            except RuntimeError as error:
                steps.abort(Failure(rank, cause_text(error), is_fatal=True), error)
            if rank != member.rank:
                ((value,), _) = from_tensors(tensors)
                outputs[i] = value["output"]
    return outputs


def _header(tensor: torch.Tensor) -> list[Any]:
    return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]


def _empty(header: list[Any], device: torch.device) -> torch.Tensor:
    dtype, shape = header
    return torch.empty(shape, dtype=getattr(torch, dtype), device=device)


def _broadcast(tensor: torch.Tensor, member: Membership, rank: int) -> None:
    """Broadcast as bytes, since not every backend supports every dtype."""
    if not tensor.numel():
        return
    # a receive buffer is contiguous, so `line` is a view of it
    line = tensor.to(member.device).contiguous().view(-1).view(torch.uint8)
    dist.broadcast(line, src=member.ranks[rank], group=member.group)
