"""The process-group transport: any c10d backend, four groups, tag 0.

One group for each class and direction (activation | gradient, to a higher | to a lower rank), so that every channel
is an in-order stream of its own on backends that ignore tags. A step that announces sends a header before each
message; in the others the receiver knows what comes and posts its receives ahead.

On a GPU (NCCL) to wait for a message is to make the current stream wait, and the host goes on. The groups' own timeout,
and TORCH_NCCL_*, then say when a silent peer is given up.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from datetime import timedelta
from typing import Any

import torch

from fastpipe.program import Channel, Program, RankProgram
from fastpipe.runtime.group import Membership
from fastpipe.runtime.own_groups import OwnGroups, backend_of
from fastpipe.runtime.tensors import Specs, Tensors, TensorSpec, flat, specs_of
from fastpipe.runtime.transport import Endpoint, Message, SpecBook, Transport, TransportError, peer_of

HEADER = 512
"""Numbers in a header."""
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
_POISON, _GOOD = 0, 1


def write_header(specs: Specs | None) -> torch.Tensor:
    """A header: good or poison, the number of tensors, then dtype, gradient flag, sizes and strides of each."""
    numbers = [_POISON, 0] if specs is None else [_GOOD, len(specs)]
    for spec in specs or ():
        if spec.dtype not in _DTYPES:
            raise ValueError(f"a stage hands on a tensor of {spec.dtype}, which cannot be sent; convert it")
        numbers += [_DTYPES.index(spec.dtype), int(spec.requires_grad), len(spec.size), *spec.size, *spec.stride]
    if len(numbers) > HEADER:
        raise ValueError(
            f"a stage hands on {len(specs or ())} tensors, more than a header describes; join some of them"
        )
    return torch.tensor(numbers + [0] * (HEADER - len(numbers)), dtype=torch.int64)


def read_header(header: torch.Tensor) -> Specs | None:
    """The specs in a header; None when the sender has failed."""
    numbers = header.tolist()
    if numbers[0] == _POISON:
        return None
    specs, at = [], 2
    for _ in range(numbers[1]):
        dtype, requires_grad, dims = numbers[at : at + 3]
        size = tuple(numbers[at + 3 : at + 3 + dims])
        stride = tuple(numbers[at + 3 + dims : at + 3 + 2 * dims])
        specs.append(TensorSpec(_DTYPES[dtype], size, stride, bool(requires_grad)))
        at += 3 + 2 * dims
    return tuple(specs)


class _Receive:
    """A receive on its way: queued (announcing) or posted."""

    def __init__(self, message: Message, slot: int) -> None:
        self.message = message
        self.slot = slot
        self.tensors: Tensors | None = None
        self.works: list[Any] = []


class ProcessGroupEndpoint(Endpoint):
    """One rank's side of `ProcessGroups`."""

    def __init__(
        self, groups: Sequence[Any], channels: Sequence[Channel], rank: int, timeout: float, device: torch.device
    ) -> None:
        self.groups = groups
        self.channels = channels
        self.rank = rank
        self.timeout = timedelta(seconds=timeout)
        self.device = device
        self.book = SpecBook()
        self.queued: dict[int, deque[_Receive]] = {}
        self.receives: dict[int, _Receive] = {}
        self.sends: dict[int, tuple[int, list[Any]]] = {}
        self.broken: set[int] = set()

    def begin(self, signature: Hashable, announce: bool) -> None:
        """See `Endpoint.begin`."""
        self.book.begin(signature, announce)

    def post_recv(self, message: Message, channel: int, slot: int) -> None:
        """See `Endpoint.post_recv`."""
        receive = self.receives[slot] = _Receive(message, slot)
        if self.book.announcing:
            self.queued.setdefault(channel, deque()).append(receive)
        elif self._peer(channel) not in self.broken:
            self._post(receive, channel, self.book[message])

    def wait_recv(self, channel: int, slot: int) -> Tensors | None:
        """See `Endpoint.wait_recv`."""
        receive = self.receives.pop(slot)
        if self._peer(channel) in self.broken:
            return None
        queue = self.queued.get(channel)
        while queue and receive in queue:
            self._receive_announced(queue.popleft(), channel)
        self._wait(receive.works, channel)
        return receive.tensors

    def _receive_announced(self, receive: _Receive, channel: int) -> None:
        header = torch.empty(HEADER, dtype=torch.int64, device=self.device)
        self._wait([self._start("recv", header, channel)], channel)
        specs = read_header(header)
        if specs is not None:
            self.book.write(receive.message, specs)
            self._post(receive, channel, specs)

    def _post(self, receive: _Receive, channel: int, specs: Specs) -> None:
        buffers = [spec.empty(self.device) for spec in specs]
        receive.works = [self._start("recv", flat(buffer), channel) for buffer in buffers]
        pairs = zip(buffers, specs, strict=True)
        receive.tensors = tuple(buffer.requires_grad_(spec.requires_grad) for buffer, spec in pairs)

    def send(self, message: Message, channel: int, number: int, tensors: Tensors | None) -> None:
        """See `Endpoint.send`."""
        ready = None if tensors is None else self.book.prepare(message, tensors)
        if self._peer(channel) in self.broken:
            self.sends[number] = (channel, [])
            return
        parts: list[torch.Tensor] = []
        if self.book.announcing:
            parts.append(write_header(None if ready is None else specs_of(ready)).to(self.device))
        elif ready is None:
            ready = tuple(spec.empty(self.device).zero_() for spec in self.book[message])
        parts += [flat(tensor) for tensor in ready or ()]
        # the parts are kept beside their works: nothing else need keep them alive until they are sent
        self.sends[number] = (channel, [(self._start("send", part, channel), part) for part in parts])

    def wait_send(self, number: int) -> None:
        """See `Endpoint.wait_send`."""
        channel, works = self.sends.pop(number)
        if self._peer(channel) not in self.broken:
            self._wait([work for work, _ in works], channel)

    def end(self) -> None:
        """See `Endpoint.end`."""
        self.queued.clear()
        self.receives.clear()
        self.sends.clear()

    def _peer(self, channel: int) -> int:
        return peer_of(self.channels[channel], self.rank)

    def _start(self, verb: str, tensor: torch.Tensor, channel: int) -> Any:
        group = self.groups[group_index(self.channels[channel])]
        try:
            return getattr(group, verb)([tensor], self._peer(channel), 0)
        except RuntimeError as error:
            raise self._lost(channel, error) from error

    def _wait(self, works: Sequence[Any], channel: int) -> None:
        try:
            for work in works:
                wait_for(work, self.timeout, self.device)
        except RuntimeError as error:
            raise self._lost(channel, error) from error

    def _lost(self, channel: int, error: RuntimeError) -> TransportError:
        peer = self._peer(channel)
        self.broken.add(peer)
        return dead_or_silent(peer, error)


def wait_for(work: Any, timeout: timedelta, device: torch.device) -> None:
    """Wait for a message; on a GPU only its current stream does. (With a time limit NCCL would block the host.)"""
    if device.type == "cpu":
        work.wait(timeout)
    else:
        work.wait()


def swap(
    out: Any, back: Any, ranks: tuple[int, int], tensors: Sequence[torch.Tensor], timeout: timedelta
) -> list[torch.Tensor]:
    """Send tensors to a peer, and receive as many that look like them.

    The rank that is less sends first, and the other one receives first. So both come to the two groups in one order:
    NCCL connects a pair at its first message, for which it waits for the other end; and in one group a pair's messages
    go one after the other, whichever way they go.

    Args:
        out: the group that sends.
        back: the one that receives; it may be the same.
        ranks: the own one, and the peer.
        tensors: on any devices that the groups know.
        timeout: for the peer.

    Raises:
        TransportError: when the peer is dead or silent.
    """
    rank, peer = ranks
    own = [tensor.detach().contiguous() for tensor in tensors]
    theirs = [torch.empty_like(tensor) for tensor in own]
    ways = [(out.send, own), (back.recv, theirs)]
    try:
        works = [
            (move([tensor], peer, 0), tensor.device)
            for move, moved in (ways if rank < peer else ways[::-1])
            for tensor in moved
        ]
        for work, device in works:
            wait_for(work, timeout, device)
    except RuntimeError as error:
        raise dead_or_silent(peer, error) from error
    return theirs


def dead_or_silent(peer: int, error: RuntimeError) -> TransportError:
    """What to raise when c10d says that of a peer, in many lines."""
    return TransportError(f"rank {peer} is dead or silent: {str(error).splitlines()[0]}", peer)


def group_index(channel: Channel) -> int:
    """Which of the four groups carries a channel."""
    return int(channel.kind) * 2 + int(channel.destination < channel.source)


class ProcessGroups(Transport):
    """The ranks are processes, one each, of a c10d process group.

    All of them make it at once.

    Args:
        member: this process's place among them; its group is the one to imitate.
        timeout: seconds to wait for a peer.
    """

    kind = "process_group"
    lanes = "directed"

    def __init__(self, member: Membership, timeout: float = 600) -> None:
        self.rank = member.rank
        self.timeout = timedelta(seconds=timeout)
        self.device = member.device
        self.backend = backend_of(member)
        self._warm: set[Channel] = set()
        names = ("activation up", "activation down", "gradient up", "gradient down")
        self._own = OwnGroups(member, names, self.timeout)
        has_streams = member.device.type != "cpu"
        self._streams = [torch.Stream(device=member.device) for _ in names] if has_streams else []

    @property
    def groups(self) -> list[Any]:
        """The four of them."""
        return self._own.groups

    def endpoint(self, program: Program, rank: int, timeout: float) -> Endpoint:
        """One rank's side."""
        self._warm_up(program)
        return ProcessGroupEndpoint(self.groups, program.channels, rank, timeout, self.device)

    def native(self, runtime: Any, program: Program, rank: int, timeout: float) -> Any:
        """One rank's side in C++."""
        self._warm_up(program)
        channels = [tuple(map(int, channel)) for channel in program.channels]
        together = self._together(program[rank])
        return runtime.ProcessGroupTransport(self.groups, channels, rank, self.device, self._streams, **together)

    def _together(self, program: RankProgram) -> dict[str, Any]:
        """What C++ needs to know of transfers that are one operation: here there are none."""
        return {}

    def _warm_up(self, program: Program) -> None:
        """Where connections are made by the first message (NCCL), send one on every channel, all ranks in one order.

        Made in a step, by two ranks while a third waits for one of them, they are a class of hangs of their own. As
        every rank goes through the same list, the first channel in it that is not done has both its ends there.
        """
        if self.device.type == "cpu":
            return
        for channel in program.channels:
            if channel in self._warm or channel.source == channel.destination:
                continue
            self._warm.add(channel)
            if self.rank in (channel.source, channel.destination):
                verb = "send" if self.rank == channel.source else "recv"
                message = torch.zeros(1, dtype=torch.uint8, device=self.device)
                work = getattr(self.groups[group_index(channel)], verb)([message], peer_of(channel, self.rank), 0)
                wait_for(work, self.timeout, self.device)

    def exchange(self, peer: int, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Swap tensors with another rank, between steps: its tensors, which look like these.

        Raises:
            TransportError: when the peer is dead or silent.
        """
        out, back = self.groups[int(peer < self.rank)], self.groups[int(self.rank < peer)]
        return swap(out, back, (self.rank, peer), tensors, self.timeout)

    def close(self) -> None:
        """End the four groups, on a GPU when all ranks' devices are done with their messages."""
        self._own.close()

    def leave(self) -> None:
        """End the four groups, whatever is under way."""
        self._own.end()

    def end_silent(self) -> None:
        """See `Transport.end_silent`. Of NCCL's nothing is ended: there it is streams that wait, and not the host."""
        self._own.end_silent()

    def describe(self) -> str:
        """One line for `Pipeline.describe`."""
        return f"{super().describe()}, four {self.backend} groups"
