"""Outputs on every rank: those that have them tell the others what they look like, and send them."""

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
    """The outputs of all processes, on every one of them. Called on all alike, after a step.

    Args:
        steps: the way to agree with the others.
        member: the group, and this process's place in it.
        device: where what arrives is put.
        own: those of this process; they come back as they are.

    Raises:
        ValueError: for an output that cannot be sent.
        StepError: when another rank could not take part.
    """
    if member.size == 1:
        return own
    packed: dict[int, Tensors] = {}

    def looks() -> Reply:
        # in a dict, so that a tuple stays one
        packed.update({i: to_tensors({"output": output}, {}, -1) for i, output in sorted(own.items())})
        return {"outputs": [[i, [_look(tensor) for tensor in tensors]] for i, tensors in packed.items()]}

    found = dict(own)
    for rank, reply in enumerate(steps.all_gather("gather_outputs", looks)):
        for i, described in reply["outputs"]:
            tensors = packed[i] if rank == member.rank else tuple(_empty(look, device) for look in described)
            try:
                for tensor in tensors:
                    _broadcast(tensor, member, rank)
            except RuntimeError as error:
                steps.abort(Failure(rank, cause_text(error), is_fatal=True), error)
            if rank != member.rank:
                ((value,), _) = from_tensors(tensors)
                found[i] = value["output"]
    return found


def _look(tensor: torch.Tensor) -> list[Any]:
    return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]


def _empty(look: list[Any], device: torch.device) -> torch.Tensor:
    dtype, shape = look
    return torch.empty(shape, dtype=getattr(torch, dtype), device=device)


def _broadcast(tensor: torch.Tensor, member: Membership, rank: int) -> None:
    """As bytes, since not every backend knows every dtype."""
    if not tensor.numel():
        return
    # what is received is contiguous, so this is its memory
    line = tensor.to(member.device).contiguous().view(-1).view(torch.uint8)
    dist.broadcast(line, src=member.ranks[rank], group=member.group)
