"""Which transport several processes use: they find out together which of them can share memory.

Where only some can, both ways run in one step of one program: between processes that share memory a message is one
copy, between others it goes through process groups. ``csrc/core/mixed_transport.h`` says why the two cannot block
each other.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fastpipe.program import Channel, Program
from fastpipe.runtime import native
from fastpipe.runtime.common import Failure, first_line
from fastpipe.runtime.coordination import host_name
from fastpipe.runtime.transport.groups import Membership
from fastpipe.runtime.transport.process_group import CoalescedGroups, ProcessGroups
from fastpipe.runtime.transport.shared_memory import CudaIpc, SharedMemory, Trial
from fastpipe.runtime.transport.transport import Endpoint, Transport

HostGroups = Sequence[Sequence[int]]
"""Ranks that share memory with each other; every rank is in one, perhaps alone."""


class Mixed(Transport):
    """Shared memory within groups of ranks, process groups between them; made by `select_transport`.

    Args:
        shared: this rank's side of the shared memory; None where it is alone.
        groups: the way to all others.
        host_groups: who shares memory with whom, the same on all ranks.
        own: this rank.
        why: why not all do.
    """

    kind = "mixed"
    # of both halves, so a channel's lane is its own whichever half it belongs to
    lanes = "directed"

    def __init__(
        self, shared: SharedMemory | None, groups: ProcessGroups, host_groups: HostGroups, own: int, why: str
    ) -> None:
        assert groups.lanes == SharedMemory.lanes == self.lanes
        self.shared = shared
        self.groups = groups
        self.host_groups = host_groups
        self.own = own
        self.why = why
        self._group_of = {rank: number for number, group in enumerate(host_groups) for rank in group}

    def is_near(self, channel: Channel) -> bool:
        """Whether a channel goes through shared memory."""
        source, destination = channel.source, channel.destination
        return source != destination and self._group_of[source] == self._group_of[destination]

    def endpoint(self, program: Program, rank: int, timeout: float) -> Endpoint:
        """One rank's side for the Python executor, which shares memory with nobody."""
        assert self.shared is None
        return self.groups.endpoint(program, rank, timeout)

    def native(self, runtime: Any, program: Program, rank: int, timeout: float) -> Any:
        """One rank's side in C++. Every rank makes those of its programs in the same order."""
        far = self.groups.native(runtime, program, rank, timeout)
        if self.shared is None:
            return far
        near = [self.is_near(channel) for channel in program.channels]
        return runtime.over_both(self.shared.link, *self.shared.native_arguments(program), near, far)

    def exchange(self, peer: int, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Swap tensors with another rank, between steps: its tensors, which look like these.

        Raises:
            FailureError: when the peer is dead or silent.
        """
        return self.groups.exchange(peer, tensors)

    def close(self) -> None:
        """Let go of the groups. The memory goes with the last tensor in it."""
        self.groups.close()

    def abort(self) -> None:
        """The same when a rank is lost."""
        self.groups.abort()

    def unblock(self, failure: Failure) -> None:
        """See `Transport.unblock`."""
        self.groups.unblock(failure)
        if self.shared is not None:
            self.shared.unblock(failure)

    def describe(self) -> str:
        """One line for `Pipeline.describe`."""
        shared = ", ".join(f"({_listed(group)})" for group in self.host_groups if len(group) > 1)
        near = [rank for rank in self.host_groups[self._group_of[self.own]] if rank != self.own]
        far = [rank for rank in sorted(self._group_of) if rank not in (*near, self.own)]
        mine = f"shared memory with {_listed(near)}, " if near else ""
        return (
            f"{self.kind}, lanes {self.lanes}: shared memory within ranks {shared}, four {self.groups.backend} groups "
            f"elsewhere ({self.why}); rank {self.own}: {mine}groups with {_listed(far)}"
        )


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


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


def select_transport(
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
        exchange: how they exchange messages: ``(phase, message) -> messages of all``.
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
    link, trial, host_groups, why = find_host_groups(exchange, member, device, num_ranks_here, by_engine, by_python)
    if len(host_groups) == 1:
        return CudaIpc(link, trial.engine, member, timeout) if trial else SharedMemory(link, member, timeout)
    if choice != "auto":
        raise ValueError(f"transport = {choice!r}: {why}; use 'auto' or 'process_group'")
    groups = ProcessGroups(member, timeout)
    if len(host_groups) == member.size:
        groups.why = f"no shared memory: {why}"
        return groups
    alone = [member.rank] in host_groups
    return Mixed(None if alone else SharedMemory(link, member, timeout), groups, host_groups, member.rank, why)


def find_host_groups(
    exchange: Exchange,
    member: Membership,
    device: torch.device,
    num_ranks_here: int,
    by_engine: bool,
    by_python: bool,
) -> tuple[Any, Trial | None, HostGroups, str]:
    """Connect this process to those that it can share memory with.

    Args:
        exchange: how they exchange messages.
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
    host_groups = _alike(offers)
    mates = next(group for group in host_groups if member.rank in group)
    # one may be forbidden what another is allowed, so they agree on the outcome, too
    answers = exchange("connection by shared memory", {"why": _connect(link, trial, member.rank, mates, offers)})
    failed = [f"rank {rank}: {answer['why']}" for rank, answer in enumerate(answers) if answer["why"]]
    kept = []
    for group in host_groups:
        connected = not any(answers[rank]["why"] for rank in group)
        kept += [group] if connected else [[rank] for rank in group]
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
    """Open what the others of a host group offer; why it cannot be, or nothing."""
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
