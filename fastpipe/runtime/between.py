"""The transport between several processes: they find out together who can share memory with whom, and choose."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fastpipe.runtime import native
from fastpipe.runtime.coalesced import CoalescedGroups
from fastpipe.runtime.cuda_ipc import CudaIpc, Trial
from fastpipe.runtime.failure import first_line
from fastpipe.runtime.group import Membership
from fastpipe.runtime.host import host_name
from fastpipe.runtime.mixed import Circles, Mixed
from fastpipe.runtime.process_group import ProcessGroups
from fastpipe.runtime.shared_memory import SharedMemory
from fastpipe.runtime.transport import Transport

Offer = dict[str, Any]
Exchange = Callable[[str, dict[str, Any]], Sequence[dict[str, Any]]]

_GROUPS = {made.kind: made for made in (ProcessGroups, CoalescedGroups)}
CHOICES = ("shared_memory", "cuda_ipc", *_GROUPS)
"""The transports of several processes that can be asked for by name."""
_SAME = {
    "host": "they are not all on one host",
    "user": "they are not all of one user",
    "torch": "they do not all run the same torch",
    "machine": "they are not all of one machine type",
}
"""What must be the same on processes that share memory, and what is said if it is not."""


def between_processes(
    choice: str,
    exchange: Exchange,
    member: Membership,
    device: torch.device,
    timeout: float,
    num_ranks_here: int,
    by_python: bool = False,
) -> Transport:
    """The transport for several processes. All call it, and all get the same answer.

    ``"auto"`` is shared memory between processes of one host that compute on CPUs by the native executor, and process
    groups for all else. Copy engines are used only when asked for.

    Args:
        choice: ``"auto"``, or one of ``CHOICES``; the same on all of them.
        exchange: how they tell each other something: ``(phase, message) -> messages of all``.
        member: this process's place.
        device: what it computes on.
        timeout: seconds to wait for the others.
        num_ranks_here: how many ranks compute on this host: only where a core is free a rank looks before it sleeps.
        by_python: whether this process has the Python executor, which knows process groups alone.

    Raises:
        ValueError: for ``"shared_memory"`` or ``"cuda_ipc"`` where it cannot be; it says why.
    """
    if choice not in ("auto", *CHOICES):
        raise ValueError(f"FASTPIPE_TRANSPORT = {choice!r}: set it to 'auto' or one of {', '.join(map(repr, CHOICES))}")
    if choice in _GROUPS:
        return _GROUPS[choice](member, timeout)
    if choice == "auto" and device.type != "cpu":
        return ProcessGroups(member, timeout)
    by_engine = choice == "cuda_ipc"
    link, trial, circles, why = find_circles(exchange, member, device, num_ranks_here, by_engine, by_python)
    if len(circles) == 1:
        return CudaIpc(link, trial.engine, member, timeout) if trial else SharedMemory(link, member, timeout)
    if choice != "auto":
        raise ValueError(f"transport = {choice!r}: {why}; use 'auto' or 'process_group'")
    groups = ProcessGroups(member, timeout)
    if len(circles) == member.size:
        groups.why = f"no shared memory: {why}"
        return groups
    alone = [member.rank] in circles
    return Mixed(None if alone else SharedMemory(link, member, timeout), groups, circles, member.rank, why)


def find_circles(
    exchange: Exchange,
    member: Membership,
    device: torch.device,
    num_ranks_here: int,
    by_engine: bool,
    by_python: bool,
) -> tuple[Any, Trial | None, Circles, str]:
    """Connect this process to those that it can share memory with.

    Args:
        exchange: how they tell each other something.
        member: this process's place.
        device: what it computes on.
        num_ranks_here: how many ranks compute on this host.
        by_engine: whether devices are to copy messages into memory of theirs.
        by_python: whether this process has the Python executor.

    Returns:
        Its side of the shared memory, its copy engine, who shares memory with whom, and why not all do.
    """
    link, trial, offer = _offer(member, device, num_ranks_here, by_engine, by_python)
    offers = exchange("offer of shared memory", offer)
    circles = _alike(offers)
    mates = next(circle for circle in circles if member.rank in circle)
    # one may be forbidden what another is allowed, so they agree on the outcome, too
    answers = exchange("connection by shared memory", {"why": _connect(link, trial, member.rank, mates, offers)})
    failed = [f"rank {rank}: {answer['why']}" for rank, answer in enumerate(answers) if answer["why"]]
    kept = []
    for circle in circles:
        connected = not any(answers[rank]["why"] for rank in circle)
        kept += [circle] if connected else [[rank] for rank in circle]
    return link, trial, kept, _obstacle(offers) or next(iter(failed), "")


def _offer(
    member: Membership, device: torch.device, num_ranks_here: int, by_engine: bool, by_python: bool
) -> tuple[Any, Trial | None, Offer]:
    """This rank's side, and what the others need to know of it."""
    runtime: Any = native.load()
    if runtime is None:
        return None, None, {"cannot": native.native_status()}
    if by_python:
        return None, None, {"cannot": "executor = 'python'"}
    if device.type != "cpu" and not by_engine:
        return None, None, {"cannot": f"the stages are on {device.type}"}
    try:
        link = runtime.SharedMemoryLink(member.rank, member.size, num_ranks_here)
        trial = Trial(runtime, device) if by_engine else None
        ticket = {} if trial is None else {"ticket": trial.ticket()}
    except RuntimeError as error:
        return None, None, {"cannot": first_line(error)}
    identity = {"host": host_name(), "user": os.geteuid(), "torch": torch.__version__, "machine": os.uname().machine}
    return link, trial, identity | {"address": link.address()} | ticket


def _alike(offers: Sequence[Offer]) -> list[list[int]]:
    """The ranks that may share memory with each other, by the lowest of each."""
    found: dict[Any, list[int]] = {}
    for rank, offer in enumerate(offers):
        alone = "cannot" in offer or not offer["host"]
        found.setdefault(rank if alone else tuple(offer[name] for name in _SAME), []).append(rank)
    return list(found.values())


def _obstacle(offers: Sequence[Offer]) -> str:
    """Why not all of them can share memory, or nothing."""
    for rank, offer in enumerate(offers):
        if "cannot" in offer:
            return f"rank {rank}: {offer['cannot']}"
    for name, why in _SAME.items():
        if len({offer[name] for offer in offers}) > 1:
            return why
    return "" if offers[0]["host"] else "this system does not tell which processes are on one host"


def _connect(link: Any, trial: Trial | None, own: int, mates: Sequence[int], offers: Sequence[Offer]) -> str:
    """Open what the others of a circle offer; why it cannot be, or nothing."""
    try:
        for rank in mates:
            if rank == own:
                continue
            link.connect(rank, *offers[rank]["address"])
            if trial is not None:
                trial.connect(offers[rank]["ticket"])
    except RuntimeError as error:
        return first_line(error)
    return ""
