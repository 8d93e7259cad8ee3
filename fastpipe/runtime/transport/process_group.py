"""The process-group transports: any c10d backend, with separate or coalesced messages.

``"process_group"`` has four groups, one per kind and direction (activation | gradient, to a higher | to a lower rank),
so that every channel is an in-order stream even on backends that ignore tags. The tag is always 0. A step that
announces its messages sends a header before each; in other steps the receiver knows the shapes and posts its receives
ahead. On a GPU (NCCL) a wait for a message blocks the current stream, not the host; the groups' timeout and
TORCH_NCCL_* then decide when a silent peer is lost.

``"process_group_coalesced"`` joins a send and a receive that two ranks start side by side into one operation, as
`torch.distributed.batch_isend_irecv` does on NCCL: one kernel moves both ways, on one communicator per pair of ranks.
Neither is done before the other; so receives are posted when their messages are made (`fastpipe.lower`), and programs
are proved with that rule (`fastpipe.machine`). A step that announces its messages sends them one by one, through the
four groups. Gloo cannot coalesce; there the parts of an operation are started together. It is for GPUs, so only the
native executor (``csrc/torch/process_group.cpp``) starts operations.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch

from fastpipe.machine import COALESCED, batches, turns
from fastpipe.program import Channel, Program
from fastpipe.runtime import native
from fastpipe.runtime.common import (
    CPU,
    Failure,
    FailureError,
    Specs,
    Tensors,
    TensorSpec,
    attended,
    first_line,
    flat,
    keep_in_children,
    logged,
    lost_peer,
    raised_by_handler,
    specs_of,
    torch_private,
)
from fastpipe.runtime.transport.groups import Membership, OwnGroups, backend_of, end_groups
from fastpipe.runtime.transport.transport import Endpoint, Message, Transport

HEADER = 512
"""Number of int64 values in a header."""
_DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.complex32,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
)
_STAND_IN, _GOOD = 0, 1


def write_header(specs: Specs | None) -> torch.Tensor:
    """A header: good or a stand-in, number of tensors; of each, dtype, gradient flag, dimensions, sizes and strides."""
    numbers = [_STAND_IN, 0] if specs is None else [_GOOD, len(specs)]
    for spec in specs or ():
        if spec.dtype not in _DTYPES:
            raise ValueError(
                f"a message to another stage has a tensor of {spec.dtype}, which cannot be sent: convert it to an "
                "ordinary floating-point, complex, integer or bool dtype, such as torch.float32"
            )
        numbers += [_DTYPES.index(spec.dtype), int(spec.requires_grad), len(spec.size), *spec.size, *spec.stride]
    if len(numbers) > HEADER:
        raise ValueError(
            f"a message to another stage has {len(specs or ())} tensors, more than a header describes; join "
            "some of them"
        )
    return torch.tensor(numbers + [0] * (HEADER - len(numbers)), dtype=torch.int64)


def read_header(header: torch.Tensor) -> Specs | None:
    """The specs in a header; None if the sender failed."""
    numbers = header.tolist()
    if numbers[0] == _STAND_IN:
        return None
    specs, at = [], 2
    for _ in range(numbers[1]):
        dtype, requires_grad, dims = numbers[at : at + 3]
        size = tuple(numbers[at + 3 : at + 3 + dims])
        stride = tuple(numbers[at + 3 + dims : at + 3 + 2 * dims])
        specs.append(TensorSpec(_DTYPES[dtype], size, stride, bool(requires_grad)))
        at += 3 + 2 * dims
    return tuple(specs)


class _ProcessGroupEndpoint(Endpoint):
    """One rank's side of `ProcessGroups`, on a CPU."""

    def __init__(self, transport: ProcessGroups, channels: Sequence[Channel], rank: int, timeout: float) -> None:
        super().__init__()
        self.transport = transport
        self.groups = transport.groups
        self.channels = channels
        self.rank = rank
        self.timeout = timedelta(seconds=timeout)
        self.queued: dict[int, deque[tuple[int, Message]]] = {}
        """Where messages are announced: the slots that are to receive, by channel."""
        self.receives: dict[int, tuple[list[Any], Tensors]] = {}
        """The posted receives, by slot."""
        self.sends: dict[int, tuple[int, list[Any]]] = {}
        self.broken: set[int] = set()

    def post_recv(self, message: Message, channel: int, slot: int) -> None:
        if self.announcing:
            self.queued.setdefault(channel, deque()).append((slot, message))
        elif self._peer(channel) not in self.broken:
            self._post(slot, channel, self.specs[message])

    def wait_recv(self, channel: int, slot: int) -> Tensors | None:
        if self._peer(channel) in self.broken:
            self.receives.pop(slot, None)
            return None
        queue = self.queued.get(channel, deque())
        while any(queued == slot for queued, _ in queue):
            self._receive_announced(*queue.popleft(), channel)
        works, tensors = self.receives.pop(slot, ([], None))
        self._wait(works, channel)
        return tensors

    def _receive_announced(self, slot: int, message: Message, channel: int) -> None:
        header = torch.empty(HEADER, dtype=torch.int64)
        self._wait([self._start("recv", header, channel)], channel)
        specs = read_header(header)
        if specs is not None:
            self.specs[message] = specs
            self._post(slot, channel, specs)

    def _post(self, slot: int, channel: int, specs: Specs) -> None:
        buffers = [spec.empty() for spec in specs]
        works = [self._start("recv", flat(buffer), channel) for buffer in buffers]
        pairs = zip(buffers, specs, strict=True)
        self.receives[slot] = works, tuple(buffer.requires_grad_(spec.requires_grad) for buffer, spec in pairs)

    def send(self, message: Message, channel: int, number: int, tensors: Tensors | None) -> None:
        ready = None if tensors is None else self.prepare(message, tensors)
        if self._peer(channel) in self.broken:
            self.sends[number] = (channel, [])
            return
        parts: list[torch.Tensor] = []
        if self.announcing:
            parts.append(write_header(None if ready is None else specs_of(ready)))
        elif ready is None:
            ready = tuple(spec.empty().zero_() for spec in self.specs[message])
        parts += [flat(tensor) for tensor in ready or ()]
        # keeps the parts alive until they are sent
        self.sends[number] = (channel, [(self._start("send", part, channel), part) for part in parts])

    def wait_send(self, number: int) -> None:
        channel, works = self.sends.pop(number)
        if self._peer(channel) not in self.broken:
            self._wait([work for work, _ in works], channel)

    def end(self) -> None:
        self.queued.clear()
        self.receives.clear()
        self.sends.clear()

    def _peer(self, channel: int) -> int:
        return self.channels[channel].peer_of(self.rank)

    def _start(self, verb: str, tensor: torch.Tensor, channel: int) -> Any:
        group = self.groups[group_index(self.channels[channel])]
        return self._call(channel, getattr(group, verb), [tensor], self._peer(channel), 0)

    def _wait(self, works: Sequence[Any], channel: int) -> None:
        for work in works:
            self._call(channel, wait_for, work, self.transport.waits, self.timeout, CPU)

    def _call(self, channel: int, call: Callable[..., Any], *args: Any) -> Any:
        """Call c10d; after an error note in `broken` the peers with whom nothing is exchanged any more."""
        try:
            return call(*args)
        except BaseException as error:  # raised again: by a signal's handler, after which no message is waited for
            if not isinstance(error, RuntimeError) or raised_by_handler(error):
                self.broken |= {one.peer_of(self.rank) for one in self.channels if self.rank in one[:2]}
                raise
            peer, lost = self._peer(channel), self.transport.lost
            self.broken.add(peer)
            raise dead_or_silent(peer if lost is None or lost.rank is None else lost.rank, error) from error


def make_waits() -> Any:
    """A rank's waits for messages: they end when a rank is lost, and handle signals meanwhile.

    None without the extension, as Python's `Work` has no `abort`: only the timeout ends them.
    """
    runtime: Any = native.load()
    if runtime is None:
        return None
    waits = runtime.WorkWaits()
    keep_in_children(waits)
    return waits


def wait_for(work: Any, waits: Any, timeout: timedelta, device: torch.device) -> None:
    """Wait for a message; on a GPU only the current stream waits. (With a time limit NCCL would block the host.)

    Args:
        waits: of `make_waits`.
    """
    if device.type != "cpu":
        work.wait()
    elif waits is None:
        work.wait(timeout)
    else:
        waits.wait(work, timeout.total_seconds())


def swap(
    out: Any,
    back: Any,
    ranks: tuple[int, int],
    tensors: Sequence[torch.Tensor],
    waits: Any,
    timeout: timedelta,
    into: Sequence[torch.Tensor] | None = None,
) -> list[torch.Tensor]:
    """Exchange tensors with a peer.

    The lower rank sends first, the higher one receives first, so both enter the two groups in one order: NCCL connects
    a pair at its first message, for which it waits for the peer; and a group runs a pair's messages one after the
    other, in either direction.

    Args:
        back: the group to receive with; may be the same.
        ranks: own rank and peer.
        tensors: on any devices that the groups support.
        into: memory for the peer's tensors; None if they have the same specs.

    Raises:
        FailureError: when the peer is dead or silent.
    """
    rank, peer = ranks
    own = [tensor.detach().contiguous() for tensor in tensors]
    theirs = [torch.empty_like(tensor) for tensor in own] if into is None else list(into)
    ways = [(out.send, own), (back.recv, theirs)]
    try:
        works = [
            (move([tensor], peer, 0), tensor.device)
            for move, moved in (ways if rank < peer else ways[::-1])
            for tensor in moved
        ]
        for work, device in works:
            wait_for(work, waits, timeout, device)
    except RuntimeError as error:
        if raised_by_handler(error):
            raise
        raise dead_or_silent(peer, error) from error
    return theirs


def dead_or_silent(peer: int, error: RuntimeError) -> FailureError:
    """The error for an exception of c10d about a peer; keeps its first line."""
    return lost_peer(f"rank {peer} is dead or silent: {first_line(error)}", peer)


def group_index(channel: Channel) -> int:
    """Index of the group that carries a channel."""
    return int(channel.kind) * 2 + int(channel.destination < channel.source)


_Way = tuple[int, int, int]
"""Index of a group, sending rank, receiving rank."""


class ProcessGroups(Transport):
    """Transport between the processes of a c10d process group, one rank each.

    Collective: all processes create it together.

    Args:
        member: membership of this process; the new groups are modelled on its group.
    """

    kind = "process_group"
    lanes = "directed"
    needs_queues = True
    is_recordable = True

    def __init__(self, member: Membership) -> None:
        self.rank = member.rank
        self.device = member.device
        self.backend = backend_of(member)
        self.lost: Failure | None = None
        self.waits = make_waits()
        self._member = member
        self._connected: set[_Way] = set()
        names = ("activation up", "activation down", "gradient up", "gradient down")
        self._own = OwnGroups(member, names)
        has_streams = member.device.type != "cpu"
        self._streams = [torch.Stream(device=member.device) for _ in names] if has_streams else []

    @property
    def groups(self) -> list[Any]:
        """The four groups; see `group_index`."""
        return self._own.groups

    def endpoint(self, program: Program, rank: int, timeout: float) -> Endpoint:
        """See `Transport.endpoint`."""
        self._connect_all(program)
        return _ProcessGroupEndpoint(self, program.channels, rank, timeout)

    def native(self, runtime: Any, program: Program, rank: int, timeout: float) -> Any:
        """See `Transport.native`."""
        self._connect_all(program)
        together = self._together(program, rank)
        return runtime.over_process_groups(self.groups, self.waits, self.device, self._streams, **together)

    def _together(self, program: Program, rank: int) -> dict[str, Any]:
        """Arguments for C++ about coalesced transfers; none here."""
        return {}

    def _connect_all(self, program: Program) -> None:
        """If the first message connects (NCCL), send one on every channel, in the same order on all ranks.

        Connecting within a step can deadlock, when two ranks connect while a third waits for one of them. Here it
        cannot: all ranks follow the same list, so both ends reach the first unconnected channel.
        """
        self._connect([(group_index(channel), channel.source, channel.destination) for channel in program.channels])

    def _connect(self, ways: Sequence[_Way]) -> None:
        """Send a first message on each way of this rank that has had none."""
        own = [way for way in ways if way not in self._connected and way[1] != way[2] and self.rank in way[1:]]
        if self.device.type == "cpu" or not own:
            return
        for way in own:
            peer = way[2] if self.rank == way[1] else way[1]
            attended(functools.partial(self._first_message, way, peer), self._member.lost, self._member.limit, peer)
            self._connected.add(way)

    def _first_message(self, way: _Way, peer: int) -> None:
        group, source, _ = way
        message = torch.zeros(1, dtype=torch.uint8, device=self.device)
        verb = "send" if self.rank == source else "recv"
        wait_for(getattr(self.groups[group], verb)([message], peer, 0), self.waits, self._member.limit, self.device)

    def exchange(
        self, peer: int, tensors: Sequence[torch.Tensor], into: Sequence[torch.Tensor] | None = None
    ) -> list[torch.Tensor]:
        """See `Transport.exchange`."""
        low, high = sorted((self.rank, peer))
        self._connect([(0, low, high), (1, high, low)])
        out, back = self.groups[int(peer < self.rank)], self.groups[int(self.rank < peer)]
        return swap(out, back, (self.rank, peer), tensors, self.waits, self._member.limit, into)

    def close(self) -> None:
        """End the groups; on a GPU first wait until all ranks' devices have finished their messages."""
        end_groups(self._all(), settle=True)

    def abort(self) -> None:
        """End the groups without waiting for messages."""
        end_groups(self._all(), settle=False)

    def unblock(self, failure: Failure) -> None:
        """See `Transport.unblock`. Aborts NCCL's groups, whose messages block streams."""
        if self.device.type != "cpu" and self.lost is None:
            # set first: a thread that sees a stream unblocked must know that its message is missing
            self.lost = failure
        if self.waits is not None:
            self.waits.lose(failure.native_rank)
        for own in self._all():
            with logged("to end what waits for a lost rank's messages"):
                own.abort()

    def _all(self) -> list[OwnGroups]:
        """All groups, in the order in which they are ended."""
        return [self._own]

    def describe(self) -> str:
        """See `Transport.describe`."""
        return f"{super().describe()}, four {self.backend} groups"


class CoalescedGroups(ProcessGroups):
    """Process groups with an additional group per peer, for coalesced messages; see `ProcessGroups`.

    Raises:
        ValueError: for a backend other than Gloo and NCCL.
    """

    kind = "process_group_coalesced"
    lanes = COALESCED
    has_endpoint = False

    def __init__(self, member: Membership) -> None:
        if (backend := backend_of(member)) not in ("gloo", "nccl"):
            raise ValueError(
                f"transport = {self.kind!r}: the process group's backend is {backend!r}, but must be 'gloo' or "
                "'nccl'; use 'process_group'"
            )
        super().__init__(member)
        self.pairs: dict[int, OwnGroups] = {}

    def _together(self, program: Program, rank: int) -> dict[str, Any]:
        pairs = {peer: own.groups[0] for peer, own in self.pairs.items()}
        return {"pairs": pairs, "turns": turns(batches(program)[rank])}

    def _connect_all(self, program: Program) -> None:
        """Also create and connect the groups of two, in the same order on all ranks."""
        super()._connect_all(program)
        for channel in program.channels:
            if self.rank not in channel[:2]:
                continue
            peer = channel.peer_of(self.rank)
            if peer != self.rank and peer not in self.pairs:
                self.pairs[peer] = self._make_pair(peer)

    def _make_pair(self, peer: int) -> OwnGroups:
        both = sorted((self.rank, peer))
        ranks = tuple(self._member.ranks[rank] for rank in both)
        member = replace(self._member, rank=both.index(self.rank), ranks=ranks)
        made = OwnGroups(member, [f"pair {both}"])
        if self.device.type != "cpu":
            first = functools.partial(self._first_operation, made.groups[0], both.index(peer))
            attended(first, self._member.lost, self._member.limit, peer)
        return made

    def _first_operation(self, group: Any, peer: int) -> None:
        sent, received = (torch.zeros(1, dtype=torch.uint8, device=self.device) for _ in range(2))
        with torch_private.coalesced(group, self.device) as works:
            group.send([sent], peer, 0)
            group.recv([received], peer, 0)
        for work in works:
            wait_for(work, self.waits, self._member.limit, self.device)

    def _all(self) -> list[OwnGroups]:
        return [*self.pairs.values(), *super()._all()]

    def describe(self) -> str:
        """See `Transport.describe`."""
        return f"{super().describe()}, and {len(self.pairs)} for pairs of ranks"
