"""Which transport several processes have, and the transports of those that share a host: shared memory on CPUs, copy
engines between GPUs (experimental), and shared memory within hosts beside process groups between them.

Shared memory: a message is one copy into memory that both processes map. The consumer computes on it in place; the
sender gets the memory back after the last tensor in it is freed. The memory has no name: it is created by
`memfd_create`, sealed, and opened by peers through /proc, so a killed process leaves nothing behind. All of it is C++;
``csrc/core/shared_memory_transport.h`` proves that it cannot hang.

Copy engines (``transport="cuda_ipc"``): the devices' copy engines copy messages from GPU to GPU, without SMs. The
receiver's memory is mapped by CUDA IPC. The streams of both processes synchronize by flags in mapped host memory, and
no host takes part once shapes are known (``csrc/core/copy_engine_transport.h``). Not yet run on a GPU, so ``"auto"``
never selects it.

If only some processes can share memory, a step uses both ways; ``csrc/core/mixed_transport.cpp`` proves that the two
cannot block each other.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fastpipe.hardware_queues import why_too_few
from fastpipe.program import Program
from fastpipe.runtime import native
from fastpipe.runtime.common import Failure, first_line, listed
from fastpipe.runtime.coordination import host_name
from fastpipe.runtime.transport.groups import Membership, OwnGroups, end_groups
from fastpipe.runtime.transport.process_group import CoalescedGroups, ProcessGroups, dead_or_silent, make_waits, swap
from fastpipe.runtime.transport.transport import Transport


class SharedMemory(Transport):
    """Transport between processes of one host and user; made by `select_transport`.

    Args:
        link: this rank's side, connected to its peers.
        engine: copies messages between devices; None between CPUs.
    """

    lanes = "directed"
    has_endpoint = False

    def __init__(self, link: Any, member: Membership, engine: Any = None) -> None:
        self.kind = "shared_memory" if engine is None else "cuda_ipc"
        self.link = link
        self.member = member
        runtime: Any = native.load()
        self._copies = None if engine is None else runtime.CopyEngineLink(link, engine, member.timeout)
        self._own: list[OwnGroups] = []  # one, once it is needed
        self.waits = make_waits()

    def native(self, runtime: Any, program: Program, rank: int, timeout: float) -> Any:
        """See `Transport.native`."""
        if self._copies is None:
            return runtime.over_shared_memory(self.link, program.channels, program.columns)
        return runtime.over_copy_engines(self._copies, program.channels, program.columns, self.member.device)

    def exchange(
        self, peer: int, tensors: Sequence[torch.Tensor], into: Sequence[torch.Tensor] | None = None
    ) -> list[torch.Tensor]:
        """See `Transport.exchange`."""
        try:
            group = self._exchange_group()
        except RuntimeError as error:
            raise dead_or_silent(peer, error) from error
        return swap(group, group, (self.member.rank, peer), tensors, self.waits, self.member.limit, into)

    def prepare_exchange(self) -> None:
        """Create the group of exchanges; collective."""
        self._exchange_group()

    def _exchange_group(self) -> Any:
        if not self._own:
            self._own = [OwnGroups(self.member, ["exchange"])]
        return self._own[0].groups[0]

    def close(self) -> None:
        """Close the group. Memory is freed with the last tensor in it; that of devices once all sends have arrived."""
        self._copies = None
        end_groups(self._own, settle=True)

    def abort(self) -> None:
        """See `Transport.abort`; unblocks peers whose devices wait for this rank."""
        self._copies = None
        end_groups(self._own, settle=False)

    def unblock(self, failure: Failure) -> None:
        """See `Transport.unblock`."""
        self.waits.lose(failure.native_rank)
        self.link.lose(failure.native_rank)

    def describe(self) -> str:
        """See `Transport.describe`."""
        by_devices = ", copied by their devices" if self.kind == "cuda_ipc" else ""
        return f"{super().describe()}, {self.member.size} processes of one host{by_devices}"


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

    def __init__(self, shared: SharedMemory | None, member: Membership, host_groups: HostGroups, why: str) -> None:
        super().__init__(member)
        # so each channel has its own lane
        assert SharedMemory.lanes == self.lanes == "directed"
        self.shared = shared
        self.host_groups = host_groups
        self.why = why
        self._group_of = {rank: number for number, group in enumerate(host_groups) for rank in group}

    def native(self, runtime: Any, program: Program, rank: int, timeout: float) -> Any:
        """See `Transport.native`."""
        far = super().native(runtime, program, rank, timeout)
        if self.shared is None:
            return far
        near = [
            source != destination and self._group_of[source] == self._group_of[destination]
            for source, destination, _ in program.channels
        ]
        return runtime.over_both(self.shared.link, program.channels, program.columns, near, far)

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
CHOICES: dict[str, type[Transport]] = {"shared_memory": SharedMemory, "cuda_ipc": SharedMemory, **_GROUPS}
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
        if by_python and not _GROUPS[choice].has_endpoint:
            raise ValueError(f"transport = {choice!r}: {_why_python()}; use 'auto' or 'process_group'")
        return _GROUPS[choice](member)
    if choice == "auto" and member.device.type != "cpu":
        return ProcessGroups(member)
    by_engine = choice == "cuda_ipc"
    link, trial, host_groups, why = find_host_groups(exchange, member, num_sharing, by_engine, by_python)
    if len(host_groups) == 1:
        return SharedMemory(link, member, trial and trial[0])
    if choice != "auto":
        raise ValueError(f"transport = {choice!r}: {why}; use 'auto' or 'process_group'")
    if len(host_groups) == member.size:
        groups = ProcessGroups(member)
        groups.why = f"no shared memory: {why}"
        return groups
    shared = None if [member.rank] in host_groups else SharedMemory(link, member)
    return Mixed(shared, member, host_groups, why)


_TRIAL_SECONDS = 10.0
_TRIAL_BYTES = 64


def _cuda_engine(runtime: Any, device: torch.device) -> Any:
    if not runtime.has_cuda:
        raise RuntimeError(f"{native.native_status()} It was built without CUDA")
    if reason := why_too_few():
        raise RuntimeError(reason)
    return runtime.cuda_copy_engine(device.index or 0)


ENGINES: dict[str, Callable[[Any, torch.device], Any]] = {"cuda": _cuda_engine}
"""Factories of copy engines by device type: ``(extension, device) -> engine``; RuntimeError with the reason if there is
none."""


Trial = tuple[Any, Any]
"""This process's copy engine, and a small allocation that peers open as a test."""


def _try_engine(runtime: Any, device: torch.device) -> Trial:
    """The copy engine of a device; RuntimeError with the reason, if none is usable."""
    if device.type not in ENGINES:
        raise RuntimeError(f"the stages are on {device.type}, which has no copy engines")
    engine = ENGINES[device.type](runtime, device)
    obstacle = engine.obstacle(_TRIAL_SECONDS)
    if obstacle is not None:
        raise RuntimeError(obstacle)
    return engine, engine.allocate(_TRIAL_BYTES)


def find_host_groups(
    exchange: Exchange, member: Membership, num_sharing: int, by_engine: bool, by_python: bool
) -> tuple[Any, Trial | None, HostGroups, str]:
    """Connect this process to those that it can share memory with; with copy engines if ``by_engine``.

    See `select_transport` for the other arguments.

    Returns:
        Its side of the shared memory, its copy engine, the groups of ranks that share memory, and why not all do.
    """
    link, trial, offer = _offer(member, num_sharing, by_engine, by_python)
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


def _why_python() -> str:
    """Why this process has the Python executor."""
    return native.native_status() if native.load() is None else "executor = 'python'"


def _offer(member: Membership, num_sharing: int, by_engine: bool, by_python: bool) -> tuple[Any, Trial | None, Offer]:
    """This rank's side of the shared memory, and the offer to other ranks."""
    runtime: Any = native.load()
    if by_python or runtime is None:
        return None, None, {"cannot": _why_python()}
    if member.device.type != "cpu" and not by_engine:
        return None, None, {"cannot": f"the stages are on {member.device.type}"}
    try:
        link = runtime.SharedMemoryLink(member.rank, member.size, num_sharing)
        trial, ticket = None, {}
        if by_engine:
            engine, memory = trial = _try_engine(runtime, member.device)
            ticket = {"ticket": engine.ticket(memory).hex()}
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
            if trial is not None:  # fails without peer access between the devices, for example
                trial[0].open(bytes.fromhex(offers[rank]["ticket"]))
    except RuntimeError as error:
        return first_line(error)
    return ""
