"""Selects the transport of several processes, which agree on which of them can share memory.

If only some can, a step uses both ways: a message is one copy between processes that share memory, and goes through
process groups elsewhere. ``csrc/core/mixed_transport.h`` proves that the two cannot block each other.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fastpipe.program import Channel, Program
from fastpipe.runtime import native
from fastpipe.runtime.common import Failure, first_line, listed
from fastpipe.runtime.coordination import host_name
from fastpipe.runtime.transport.groups import Membership
from fastpipe.runtime.transport.process_group import CoalescedGroups, ProcessGroups
from fastpipe.runtime.transport.shared_memory import CudaIpc, SharedMemory, Trial
from fastpipe.runtime.transport.transport import Transport

HostGroups = Sequence[Sequence[int]]
"""Groups of ranks that share memory; every rank is in one group, of one rank or more."""


class Mixed(ProcessGroups):
    """Shared memory within groups of ranks, process groups between them; made by `select_transport`.

    The Python executor uses process groups only, and so do exchanges between steps.

    Args:
        shared: this rank's side of the shared memory; None if no rank shares memory with it.
        host_groups: groups of ranks that share memory, the same on all ranks.
    """

    kind = "mixed"
    is_recordable = False

    def __init__(
        self, shared: SharedMemory | None, member: Membership, timeout: float, host_groups: HostGroups, why: str
    ) -> None:
        super().__init__(member, timeout)
        # so each channel has its own lane
        assert SharedMemory.lanes == self.lanes == "directed"
        self.shared = shared
        self.host_groups = host_groups
        self.why = why
        self._group_of = {rank: number for number, group in enumerate(host_groups) for rank in group}

    def is_near(self, channel: Channel) -> bool:
        """Whether a channel goes through shared memory."""
        source, destination = channel.source, channel.destination
        return source != destination and self._group_of[source] == self._group_of[destination]

    def native(self, runtime: Any, program: Program, rank: int, timeout: float) -> Any:
        """See `Transport.native`."""
        far = super().native(runtime, program, rank, timeout)
        if self.shared is None:
            return far
        near = [self.is_near(channel) for channel in program.channels]
        return runtime.over_both(self.shared.link, *self.shared.native_arguments(program), near, far)

    def unblock(self, failure: Failure) -> None:
        """See `Transport.unblock`."""
        super().unblock(failure)
        if self.shared is not None:
            self.shared.unblock(failure)

    def describe(self) -> str:
        """See `Transport.describe`."""
        shared = ", ".join(f"({listed(group, most=None)})" for group in self.host_groups if len(group) > 1)
        near = [rank for rank in self.host_groups[self._group_of[self.rank]] if rank != self.rank]
        far = [rank for rank in sorted(self._group_of) if rank not in (*near, self.rank)]
        mine = f"shared memory with {listed(near, most=None)}, " if near else ""
        return (
            f"{self.kind}, lanes {self.lanes}: shared memory within ranks {shared}, four {self.backend} groups "
            f"elsewhere ({self.why}); rank {self.rank}: {mine}groups with {listed(far, most=None)}"
        )


Offer = dict[str, Any]
Exchange = Callable[[str, dict[str, Any]], Sequence[dict[str, Any]]]

_GROUPS: dict[str, type[ProcessGroups]] = {made.kind: made for made in (ProcessGroups, CoalescedGroups)}
CHOICES: dict[str, type[Transport]] = {SharedMemory.kind: SharedMemory, CudaIpc.kind: CudaIpc, **_GROUPS}
"""Transports of several processes that can be selected by name."""
_SAME = {
    "host": "they are not all on one host",
    "user": "they are not all of one user",
    "torch": "they do not all run the same torch",
    "machine": "they are not all of one machine type",
}
"""What must be equal on processes that share memory, and the error text if it is not."""


def select_transport(
    choice: str,
    exchange: Exchange,
    member: Membership,
    device: torch.device,
    timeout: float,
    num_sharing: int,
    by_python: bool = False,
) -> Transport:
    """Select the transport of several processes. Collective, with the same result on all.

    ``"auto"`` is shared memory between processes of one host with CPUs and the native executor, and process groups
    otherwise. Copy engines are used only on request.

    Args:
        choice: ``"auto"``, or one of ``CHOICES``; the same on all processes.
        exchange: ``(phase, message) -> messages of all processes``.
        num_sharing: number of ranks that may run on this rank's cores, itself included; decides how long waits spin.
        by_python: whether this process has the Python executor, which supports only process groups.

    Raises:
        ValueError: for another choice, or ``"shared_memory"`` or ``"cuda_ipc"`` where it is not possible; says why.
    """
    if choice not in ("auto", *CHOICES):
        raise ValueError(f"FASTPIPE_TRANSPORT = {choice!r}: set it to 'auto' or one of {', '.join(map(repr, CHOICES))}")
    if choice in _GROUPS:
        return _GROUPS[choice](member, timeout)
    if choice == "auto" and device.type != "cpu":
        return ProcessGroups(member, timeout)
    by_engine = choice == "cuda_ipc"
    link, trial, host_groups, why = find_host_groups(exchange, member, device, num_sharing, by_engine, by_python)
    if len(host_groups) == 1:
        return CudaIpc(link, trial.engine, member, timeout) if trial else SharedMemory(link, member, timeout)
    if choice != "auto":
        raise ValueError(f"transport = {choice!r}: {why}; use 'auto' or 'process_group'")
    if len(host_groups) == member.size:
        groups = ProcessGroups(member, timeout)
        groups.why = f"no shared memory: {why}"
        return groups
    shared = None if [member.rank] in host_groups else SharedMemory(link, member, timeout)
    return Mixed(shared, member, timeout, host_groups, why)


def find_host_groups(
    exchange: Exchange,
    member: Membership,
    device: torch.device,
    num_sharing: int,
    by_engine: bool,
    by_python: bool,
) -> tuple[Any, Trial | None, HostGroups, str]:
    """Connect this process to those that it can share memory with; with copy engines if ``by_engine``.

    See `select_transport` for the other arguments.

    Returns:
        Its side of the shared memory, its copy engine, the groups of ranks that share memory, and why not all do.
    """
    link, trial, offer = _offer(member, device, num_sharing, by_engine, by_python)
    offers = exchange("offer of shared memory", offer)
    host_groups = _group_by_host(offers)
    host_ranks = next(group for group in host_groups if member.rank in group)
    # permissions may differ between processes, so they agree on the result, too
    answers = exchange("connection by shared memory", {"why": _connect(link, trial, member.rank, host_ranks, offers)})
    failed = [f"rank {rank}: {answer['why']}" for rank, answer in enumerate(answers) if answer["why"]]
    kept = []
    for group in host_groups:
        connected = not any(answers[rank]["why"] for rank in group)
        kept += [group] if connected else [[rank] for rank in group]
    return link, trial, kept, _obstacle(offers) or next(iter(failed), "")


def _offer(
    member: Membership, device: torch.device, num_sharing: int, by_engine: bool, by_python: bool
) -> tuple[Any, Trial | None, Offer]:
    """This rank's side of the shared memory, and the offer to other ranks."""
    runtime: Any = native.load()
    if runtime is None:
        return None, None, {"cannot": native.native_status()}
    if by_python:
        return None, None, {"cannot": "executor = 'python'"}
    if device.type != "cpu" and not by_engine:
        return None, None, {"cannot": f"the stages are on {device.type}"}
    try:
        link = runtime.SharedMemoryLink(member.rank, member.size, num_sharing)
        trial = Trial(runtime, device) if by_engine else None
        ticket = {} if trial is None else {"ticket": trial.ticket()}
    except RuntimeError as error:
        return None, None, {"cannot": first_line(error)}
    identity = {"host": host_name(), "user": os.geteuid(), "torch": torch.__version__, "machine": os.uname().machine}
    return link, trial, identity | {"address": link.address()} | ticket


def _group_by_host(offers: Sequence[Offer]) -> list[list[int]]:
    """Groups of ranks that may share memory, in order of their lowest rank."""
    found: dict[Any, list[int]] = {}
    for rank, offer in enumerate(offers):
        is_single = "cannot" in offer or not offer["host"]
        found.setdefault(rank if is_single else tuple(offer[name] for name in _SAME), []).append(rank)
    return list(found.values())


def _obstacle(offers: Sequence[Offer]) -> str:
    """Why not all ranks can share memory; empty if they can."""
    for rank, offer in enumerate(offers):
        if "cannot" in offer:
            return f"rank {rank}: {offer['cannot']}"
    for name, why in _SAME.items():
        if len({offer[name] for offer in offers}) > 1:
            return why
    return "" if offers[0]["host"] else "this system cannot identify which processes are on one host"


def _connect(link: Any, trial: Trial | None, own: int, host_ranks: Sequence[int], offers: Sequence[Offer]) -> str:
    """Open the memory that the other ranks of a host group offer; returns the error, or an empty text."""
    try:
        for rank in host_ranks:
            if rank == own:
                continue
            link.connect(rank, *offers[rank]["address"])
            if trial is not None:
                trial.connect(offers[rank]["ticket"])
    except RuntimeError as error:
        return first_line(error)
    return ""
