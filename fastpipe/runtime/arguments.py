"""The arguments of a Pipeline that need no agreement: what is wrong with them, and what was left to be found."""

from __future__ import annotations

import os
from typing import Any

from torch import nn

from fastpipe.machine import Lanes
from fastpipe.placement import is_whole
from fastpipe.runtime.common import check_grad_dtype
from fastpipe.runtime.model import check_policy
from fastpipe.runtime.stage import PER_MICROBATCH, check_overlap
from fastpipe.runtime.step import check_reduction, check_rules
from fastpipe.runtime.transport import (
    CHOICES,
    NATIVE_ALONE,
    CoalescedGroups,
    Loopback,
    ProcessGroups,
    Transport,
    why_not_python,
)
from fastpipe.schedule import Schedule

_LONGEST = 1e9
"""Seconds. Much more overflows what locks, process groups and sockets count time in."""


def check_arguments(
    loss_fn: Any,
    loss_reduction: Any,
    metrics: Any,
    rng: Any,
    overlap: Any,
    recompute: Any,
    grad_dtype: Any,
    fused_weight_grad: Any,
    cuda_graph: Any,
) -> None:
    """Refuse what cannot be right whatever the model.

    Raises:
        ValueError: naming the argument.
    """
    if loss_fn is not None and not callable(loss_fn):
        raise ValueError(f"loss_fn = {loss_fn!r}: give a function (output, target) -> loss, or None")
    if isinstance(loss_fn, type):
        raise ValueError(f"loss_fn = {loss_fn.__name__}: that is a class; give one of it, {loss_fn.__name__}()")
    check_reduction(loss_reduction)
    check_rules(metrics)
    if rng not in (None, PER_MICROBATCH):
        raise ValueError(
            f"rng = {rng!r}: use None (torch's generators, in the order of the actions) or {PER_MICROBATCH!r} (a state "
            "of its own for every stage and microbatch)"
        )
    check_overlap(overlap)
    check_policy(recompute)
    check_grad_dtype(grad_dtype)
    for name, wanted in (("fused_weight_grad", fused_weight_grad), ("cuda_graph", cuda_graph)):
        if not isinstance(wanted, bool):
            raise ValueError(f"{name} = {wanted!r}: give True or False")


def check_loss_parameters(loss_fn: Any, schedule: Schedule) -> None:
    """Refuse a loss with parameters where two ranks compute it: nobody would add up its gradients.

    Raises:
        ValueError: with what to do.
    """
    learns = isinstance(loss_fn, nn.Module) and any(p.requires_grad for p in loss_fn.parameters())
    if learns and schedule.placement.num_routes > 1:
        raise ValueError(
            f"loss_fn has parameters, and {schedule.name} computes the loss on two ranks, of which each would have a "
            "part of their gradients: make it the last layer, which takes the target by a keyword of step and returns "
            "the loss, or use a schedule with one route"
        )


def asked_transport(transport: Any) -> Any:
    """What the user, or else the environment, says; ``"auto"`` where neither says anything."""
    return os.environ.get("FASTPIPE_TRANSPORT", "auto") if transport == "auto" else transport


def alike_text(transport: Any, loss_reduction: Any, grad_dtype: Any) -> str:
    """Of these what has to be the same on every rank, in words; nothing for what they are unless given."""
    where = asked_transport(transport)
    said = [f"transport {where}"] if isinstance(where, str) and where != "auto" else []
    said += [f"loss_reduction {loss_reduction}"] if isinstance(loss_reduction, str) and loss_reduction != "mean" else []
    said += [f"grad_dtype {grad_dtype}"] if grad_dtype is not None else []
    return "".join(f", {text}" for text in said)


def checked_timeout(timeout: Any) -> float:
    """What is a time to wait; infinity is one.

    Raises:
        ValueError: when it is none, with what to give.
    """
    if not isinstance(timeout, int | float) or isinstance(timeout, bool) or not timeout > 0:
        raise ValueError(f"timeout = {timeout!r}: give seconds, more than 0")
    return min(timeout, _LONGEST)


def find_num_ranks(num_ranks: int | None, schedule: str | Schedule, num_processes: int) -> int:
    """How many ranks there are: as the schedule or the user says, else as many as processes.

    Raises:
        ValueError: for a number that is none, or that the processes cannot be.
    """
    wanted = schedule.num_ranks if isinstance(schedule, Schedule) else num_ranks
    if wanted is None:
        return num_processes
    if num_ranks not in (None, wanted):
        raise ValueError(f"num_ranks = {num_ranks}: the schedule given has {wanted} ranks; leave it out")
    if not is_whole(wanted, 1):
        raise ValueError(f"num_ranks = {wanted!r}: give a whole number of at least 1")
    if num_processes > 1 and wanted != num_processes:
        raise ValueError(
            f"num_ranks = {wanted}: the group has {num_processes} processes, each one rank; start {wanted} processes, "
            "or one alone, whose ranks are then threads"
        )
    return int(wanted)


def find_num_microbatches(num_microbatches: int | None, schedule: str | Schedule) -> int:
    """How many microbatches a batch has: as the user or the schedule says.

    Raises:
        ValueError: when neither does.
    """
    if num_microbatches is None:
        if isinstance(schedule, Schedule):
            return schedule.num_microbatches
        raise ValueError("num_microbatches is missing: give the number of microbatches of a batch")
    return num_microbatches


def check_transport(transport: str | Transport, num_ranks: int, num_processes: int, executor: str) -> Lanes:
    """Refuse a transport that cannot be here; what the transport executes in one order.

    Raises:
        ValueError: with what to use instead.
    """
    alone = num_processes == 1
    if isinstance(transport, Transport):
        if not alone and isinstance(transport, Loopback):
            raise ValueError("transport: loopback connects threads of one process; use 'process_group' or 'auto'")
        return transport.lanes
    if transport not in ("auto", "loopback", *CHOICES):
        listed = ", ".join(map(repr, CHOICES))
        raise ValueError(f"transport = {transport!r}: use 'auto', 'loopback' or one of {listed}")
    if not alone and transport == "loopback":
        raise ValueError("transport = 'loopback': there are several processes; use 'process_group' or 'auto'")
    if alone and transport in CHOICES and num_ranks > 1:
        raise ValueError(
            f"transport = {transport!r}: there is one process for {num_ranks} ranks; start one a rank with "
            "torchrun, or use 'loopback' or 'auto'"
        )
    if alone:
        return Loopback.lanes
    asked = asked_transport(transport)
    if executor == "python" and asked in NATIVE_ALONE:
        raise ValueError(why_not_python(asked))
    return (CoalescedGroups if asked == CoalescedGroups.kind else ProcessGroups).lanes
