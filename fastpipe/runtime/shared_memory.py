"""The shared-memory transport: the ranks are processes of one host, and a message is one copy into memory both map.

The consumer computes on the message where it lies; the sender gets the memory back when the last tensor in it is gone.
The memory has no name: it is `memfd_create`'s, sealed, and opened by the peers through /proc. So nothing is left
behind, whoever is killed. All of it is C++ (csrc/core/shared_memory_transport.h says why it cannot hang); this module
introduces the processes to each other, and is the Python executor's way to it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch

from fastpipe.program import ChannelKind, Op, Program
from fastpipe.runtime import native
from fastpipe.runtime.group import Membership, make_group
from fastpipe.runtime.host import host_name
from fastpipe.runtime.process_group import ProcessGroups
from fastpipe.runtime.tensors import Tensors
from fastpipe.runtime.transport import Endpoint, Message, SpecBook, Transport, TransportError

Offer = dict[str, Any]
Exchange = Callable[[str, dict[str, Any]], Sequence[dict[str, Any]]]

_SAME = {
    "host": "they are not all on one host",
    "user": "they are not all of one user",
    "torch": "they do not all run the same torch",
    "machine": "they are not all of one machine type",
}
"""What must be the same on all processes, and what is said if it is not."""


class _SharedMemoryEndpoint(Endpoint):
    def __init__(self, runtime: Any, source: Any, program: Program, rank: int, timeout: float) -> None:
        channels = [tuple(map(int, channel)) for channel in program.channels]
        columns = np.ascontiguousarray(program[rank].columns)
        self._native = runtime.SharedMemoryEndpoint(rank, columns, channels, source, timeout)
        self._book = SpecBook()
        self._positions = _positions(program, rank)

    def begin(self, signature: Hashable, announce: bool) -> None:
        self._book.begin(signature, announce)
        self._native.begin(signature, announce)

    def post_recv(self, message: Message, channel: int, slot: int) -> None:
        self._native.post_receive(self._positions[Op.POST_RECV, message])

    def wait_recv(self, channel: int, slot: int) -> Tensors | None:
        found = self._native.wait_receive(slot)
        return None if found is None else tuple(found)

    def send(self, message: Message, channel: int, number: int, tensors: Tensors | None) -> None:
        ready = None if tensors is None else list(self._book.prepare(message, tensors))
        self._native.send(self._positions[Op.SEND, message], ready)

    def wait_send(self, number: int) -> None:
        self._native.wait_send(number)

    def end(self) -> None:
        self._native.end(False)


def _positions(program: Program, rank: int) -> dict[tuple[Op, Message], int]:
    """Where each message is sent or its receive posted, in the rank's program."""
    found: dict[tuple[Op, Message], int] = {}
    for position, instruction in enumerate(program[rank]):
        if instruction.op not in (Op.SEND, Op.POST_RECV):
            continue
        kind = program.channels[instruction.channel].kind
        step = 0 if instruction.op is Op.POST_RECV else 1 if kind is ChannelKind.ACTIVATION else -1
        found[instruction.op, Message(kind, instruction.stage + step, instruction.microbatch)] = position
    return found


class SharedMemory(Transport):
    """The ranks are processes of one host, with one user, on CPU; made by `connect`.

    Args:
        link: this rank's side, connected to the others.
        member: this process's place.
        timeout: seconds to wait for a peer between steps.
    """

    kind = "shared_memory"
    lanes = "directed"

    def __init__(self, link: Any, member: Membership, timeout: float) -> None:
        self.link = link
        self.member = member
        self.timeout = timedelta(seconds=timeout)
        self._group: Any = None

    def endpoint(self, program: Program, rank: int, timeout: float) -> Endpoint:
        """One rank's side. Every rank makes those of its programs in the same order."""
        runtime: Any = native.load()
        return _SharedMemoryEndpoint(runtime, self.native(runtime, program, rank, timeout), program, rank, timeout)

    def native(self, runtime: Any, program: Program, rank: int, timeout: float) -> Any:
        """One rank's side in C++. Every rank makes those of its programs in the same order."""
        channels = [tuple(map(int, channel)) for channel in program.channels]
        columns = [np.ascontiguousarray(of_rank.columns) for of_rank in program]
        return runtime.SharedMemorySource(self.link, channels, columns)

    def exchange(self, peer: int, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Swap tensors with another rank, between steps: its tensors, which look like these.

        It is for the copies of a stage that two ranks hold, of which every rank has some, and for tied weights.

        Raises:
            TransportError: when the peer is dead or silent.
        """
        own = [tensor.detach().contiguous() for tensor in tensors]
        theirs = [torch.empty_like(tensor) for tensor in own]
        try:
            self.prepare_exchange()
            works = [self._group.send([tensor], peer, 0) for tensor in own]
            works += [self._group.recv([tensor], peer, 0) for tensor in theirs]
            for work in works:
                work.wait(self.timeout)
        except RuntimeError as error:
            raise TransportError(f"rank {peer} is dead or silent: {str(error).splitlines()[0]}", peer) from error
        return theirs

    def prepare_exchange(self) -> None:
        """Make the group that exchanges take, which needs every rank."""
        if self._group is None:
            self._group = make_group(self.member, self.member.store(), "exchange", self.timeout)

    def close(self) -> None:
        """Let go of the group. The memory goes with the last tensor in it."""
        self._group = None

    def describe(self) -> str:
        """One line for `Pipeline.describe`."""
        return f"{super().describe()}, {self.member.size} processes of one host"


def between_processes(
    choice: str, exchange: Exchange, member: Membership, device: torch.device, timeout: float
) -> Transport:
    """The transport for several processes.

    Args:
        choice: ``"auto"``, ``"shared_memory"`` or ``"process_group"``; the same on all of them.
        exchange: how they tell each other something: ``(phase, message) -> messages of all``.
        member: this process's place.
        device: what it computes on.
        timeout: seconds to wait for the others.

    Raises:
        ValueError: for ``"shared_memory"`` where it cannot be; it says why.
    """
    if choice not in ("auto", "shared_memory", "process_group"):
        raise ValueError(f"FASTPIPE_TRANSPORT = {choice!r}: set it to 'auto', 'shared_memory' or 'process_group'")
    if choice == "process_group":
        return ProcessGroups(member, timeout)
    found = connect(exchange, member, device, timeout)
    if isinstance(found, SharedMemory):
        return found
    if choice == "shared_memory":
        raise ValueError(f"transport = 'shared_memory': {found}; use 'auto' or 'process_group'")
    groups = ProcessGroups(member, timeout)
    groups.why = f"no shared memory: {found}"
    return groups


def connect(exchange: Exchange, member: Membership, device: torch.device, timeout: float) -> SharedMemory | str:
    """Connect this process to the others of its group. All call it, and all get the same answer.

    Returns:
        The transport, or why there can be none.
    """
    link, offer = _offer(member, device)
    offers = exchange("offer of shared memory", offer)
    why = _obstacle(offers) or _connect(link, member.rank, offers)
    # one may be forbidden what another is allowed, so they agree on the outcome, too
    answers = exchange("connection by shared memory", {"why": why})
    for rank, answer in enumerate(answers):
        if answer["why"]:
            return str(answer["why"]) if _obstacle(offers) else f"rank {rank}: {answer['why']}"
    return SharedMemory(link, member, timeout)


def _offer(member: Membership, device: torch.device) -> tuple[Any, Offer]:
    """This rank's side, and what the others need to know of it."""
    runtime: Any = native.load()
    if runtime is None:
        return None, {"cannot": native.native_status()}
    if device.type != "cpu":
        return None, {"cannot": f"the stages are on {device.type}"}
    try:
        link = runtime.SharedMemoryLink(member.rank, member.size)
    except RuntimeError as error:
        return None, {"cannot": str(error)}
    identity = {"host": host_name(), "user": os.geteuid(), "torch": torch.__version__, "machine": os.uname().machine}
    return link, identity | {"address": link.address()}


def _obstacle(offers: Sequence[Offer]) -> str | None:
    """Why these processes cannot share memory."""
    for rank, offer in enumerate(offers):
        if "cannot" in offer:
            return f"rank {rank}: {offer['cannot']}"
    for name, why in _SAME.items():
        if len({offer[name] for offer in offers}) > 1:
            return why
    return None


def _connect(link: Any, own: int, offers: Sequence[Offer]) -> str:
    """Open what the others offer; why it cannot be, or nothing."""
    try:
        for rank, offer in enumerate(offers):
            if rank != own:
                link.connect(rank, *offer["address"])
    except RuntimeError as error:
        return str(error)
    return ""
