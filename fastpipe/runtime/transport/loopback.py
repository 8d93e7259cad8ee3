"""Loopback: the ranks are threads of one process. Strict FIFO, unbuffered, with the lanes of a real transport.

Used for one process and for tests. Every rank has a queue of operations per lane. The heads of two queues match when
one sends what the other receives; only then the tensors are copied, so a sender that overwrites or frees too early is
detected. ``delay`` seconds must pass before a send may match.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from fastpipe.machine import Lanes, lane_numbers
from fastpipe.program import Program
from fastpipe.runtime.common import Tensors, copy_of, lost_peer
from fastpipe.runtime.transport.transport import Endpoint, Message, Transport


@dataclass(eq=False)
class _Operation:
    """A send or a receive in its queue."""

    channel: int
    sends: bool
    message: Message
    tensors: Tensors | None
    due: float
    done: bool = False


class _Hub:
    """The queues of all ranks for one program, under one lock."""

    def __init__(self, program: Program, lanes: Lanes, delay: float) -> None:
        self.channels = program.channels
        self.lane_of = lane_numbers(lanes, program.channels)
        self.delay = delay
        self.queues: dict[tuple[int, int], deque[_Operation]] = {}
        self.changed = threading.Condition()

    def post(self, rank: int, channel: int, sends: bool, message: Message, tensors: Tensors | None) -> _Operation:
        """Append an operation to its queue."""
        due = time.monotonic() + self.delay if sends and self.delay else 0.0
        operation = _Operation(channel, sends, message, tensors, due)
        lane = self.lane_of[channel]
        with self.changed:
            self.queues.setdefault((lane, rank), deque()).append(operation)
            if self._match(lane, rank) is not None:
                # threads that wait for a delayed send need its due time
                self.changed.notify_all()
        return operation

    def wait(self, rank: int, operation: _Operation, timeout: float) -> None:
        """Block until an operation is done."""
        deadline = time.monotonic() + timeout
        lane = self.lane_of[operation.channel]
        peer = self.channels[operation.channel].peer_of(rank)
        with self.changed:
            while True:
                due = self._match(lane, rank)
                if operation.done:
                    return
                now = time.monotonic()
                if now >= deadline:
                    raise lost_peer(f"rank {peer} did not answer within {timeout:g} s", peer)
                self.changed.wait(min(deadline, due or deadline) - now)

    def _match(self, lane: int, rank: int) -> float | None:
        """Complete matching heads and wake waiting threads.

        Returns:
            The due time of a delayed send at the head; None if there is none.
        """
        pending = [rank]
        while pending:
            end = pending.pop()
            queue = self.queues.get((lane, end))
            if not queue:
                continue
            head = queue[0]
            peer = self.channels[head.channel].peer_of(end)
            other = self.queues.get((lane, peer))
            if not other or other[0].channel != head.channel or other[0].sends == head.sends:
                continue
            due = max(head.due, other[0].due)
            if due > time.monotonic():
                return due
            self._complete(queue.popleft(), other.popleft())
            self.changed.notify_all()
            pending += [end, peer]
        return None

    def _complete(self, one: _Operation, other: _Operation) -> None:
        send, receive = (one, other) if one.sends else (other, one)
        if send.message != receive.message:
            raise AssertionError(f"sent {send.message}, received as {receive.message}")
        receive.tensors = None if send.tensors is None else tuple(copy_of(t) for t in send.tensors)
        send.tensors = None
        send.done = receive.done = True


class _LoopbackEndpoint(Endpoint):
    def __init__(self, hub: _Hub, rank: int, timeout: float) -> None:
        super().__init__()
        self.hub = hub
        self.rank = rank
        self.timeout = timeout
        self.receives: dict[int, _Operation] = {}
        self.sends: dict[int, _Operation] = {}

    def post_recv(self, message: Message, channel: int, slot: int) -> None:
        self.receives[slot] = self.hub.post(self.rank, channel, False, message, None)

    def wait_recv(self, channel: int, slot: int) -> Tensors | None:
        operation = self.receives.pop(slot)
        self.hub.wait(self.rank, operation, self.timeout)
        return operation.tensors

    def send(self, message: Message, channel: int, number: int, tensors: Tensors | None) -> None:
        ready = None if tensors is None else self.prepare(message, tensors)
        self.sends[number] = self.hub.post(self.rank, channel, True, message, ready)

    def wait_send(self, number: int) -> None:
        self.hub.wait(self.rank, self.sends.pop(number), self.timeout)

    def end(self) -> None:
        self.receives.clear()
        self.sends.clear()


class Loopback(Transport):
    """Transport between threads of this process.

    Args:
        lanes: ``"directed"`` (an order per channel) or ``"pair"`` (one order for all messages of two ranks).
        delay: seconds before a send may complete.
    """

    kind = "loopback"
    lanes: Lanes = "directed"
    is_local = True
    is_recordable = True

    def __init__(self, lanes: str = "directed", delay: float = 0.0) -> None:
        if lanes not in ("directed", "pair"):
            raise ValueError(f"lanes = {lanes!r}: use 'directed' or 'pair'")
        if delay < 0:
            raise ValueError(f"delay = {delay}: give seconds, at least 0")
        self.lanes = lanes
        self.delay = delay
        self._hubs: WeakKeyDictionary[Program, _Hub] = WeakKeyDictionary()
        self._native_hubs: WeakKeyDictionary[Program, Any] = WeakKeyDictionary()

    def endpoint(self, program: Program, rank: int, timeout: float) -> Endpoint:
        """See `Transport.endpoint`; the ranks of a program share a hub."""
        hub = self._hubs.setdefault(program, _Hub(program, self.lanes, self.delay))
        return _LoopbackEndpoint(hub, rank, timeout)

    def native(self, runtime: Any, program: Program, rank: int, timeout: float) -> Any:
        """See `Transport.native`."""
        if program not in self._native_hubs:
            lanes = lane_numbers(self.lanes, program.channels)
            channels = [tuple(map(int, channel)) for channel in program.channels]
            self._native_hubs[program] = runtime.over_loopback(channels, lanes, self.delay)
        return self._native_hubs[program]

    def describe(self) -> str:
        """See `Transport.describe`."""
        return super().describe() + (f", sends delayed by {self.delay:g} s" if self.delay else "")
