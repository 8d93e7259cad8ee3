"""The interfaces: `Transport` moves tensors between ranks, in the order of each channel; and the simplest one.

A pipeline has one `Transport`, shared by the ranks of this process; an `Endpoint` is one rank's side of it for one
program. The Python executor uses the endpoint; the native executor creates its own from the transport.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from fastpipe.machine import Lanes, lane_numbers
from fastpipe.program import ChannelKind, Program
from fastpipe.runtime.common import (
    Failure,
    Specs,
    Tensors,
    copy_of,
    dense_all,
    lost_peer,
    specs_match,
    specs_of,
    specs_text,
)


class Message(NamedTuple):
    """Identifies the tensors of one boundary and microbatch.

    Attributes:
        kind: activations or gradients.
        stage: the consuming stage.
    """

    kind: ChannelKind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        what = "output" if self.kind is ChannelKind.ACTIVATION else "gradient"
        return f"the {what} of stage {self.stage - self.kind.direction}, microbatch {self.microbatch}"


class Endpoint(ABC):
    """One rank's side of a transport, for one program.

    It knows the tensor specs of every message, by signature of a step. A step that announces records what is sent; in
    other steps messages must match the record.

    Attributes:
        specs: those of this step's signature.
        announcing: whether this step announces.
    """

    def __init__(self) -> None:
        self._known: dict[Hashable, dict[Message, Specs]] = {}
        self.specs: dict[Message, Specs] = {}
        self.announcing = True

    def begin(self, signature: Hashable, announce: bool) -> None:
        """Start a step; ``announce`` if the signature is new."""
        if announce:
            self._known[signature] = {}
        self.specs = self._known.setdefault(signature, {})
        self.announcing = announce

    def prepare(self, message: Message, tensors: Tensors) -> Tensors:
        """The tensors to send, dense and checked.

        Raises:
            ValueError: if they differ from the announced specs.
        """
        ready = dense_all(tensors)
        found = specs_of(ready)
        if self.announcing:
            self.specs[message] = found
        elif self.specs[message] != found and not specs_match(self.specs[message], found):
            raise ValueError(
                f"{message} changed although the inputs did not: expected {specs_text(self.specs[message])}, found "
                f"{specs_text(found)}; pad it to one shape, let it always or never require a gradient, or place the "
                "layers that produce and consume it in one stage"
            )
        return ready

    @abstractmethod
    def post_recv(self, message: Message, channel: int, slot: int) -> None:
        """Post the receive of the channel's next message into a slot."""

    @abstractmethod
    def wait_recv(self, channel: int, slot: int) -> Tensors | None:
        """Wait for a posted receive; returns its tensors, or None if the sender failed."""

    @abstractmethod
    def send(self, message: Message, channel: int, number: int, tensors: Tensors | None) -> None:
        """Start a send; None sends the stand-in of a failed rank.

        Raises:
            ValueError: if the tensors differ from the announced specs; then nothing is sent.
        """

    @abstractmethod
    def wait_send(self, number: int) -> None:
        """Wait until the memory of a send may be reused."""

    def end(self) -> None:  # noqa: B027 - optional
        """Release the state of a step."""


def why_not_python(kind: str) -> str:
    """The error text for the Python executor with a transport that has no endpoint."""
    return (
        f"executor = 'python': transport = {kind!r} requires the native executor; set executor='native', or "
        "transport='process_group'"
    )


class Transport(ABC):
    """How the ranks of a pipeline exchange tensors.

    Attributes:
        kind: its name.
        lanes: which channels share one order.
        why: why a faster transport was not chosen; empty if none is faster.
        has_endpoint: whether the Python executor can use it.
        is_local: whether it connects only threads of one process.
        needs_queues: whether its messages wait on streams of CUDA, which share hardware queues. Copy engines refuse too
            few queues themselves.
        is_recordable: whether a CUDA graph may repeat its messages.
    """

    kind: str
    lanes: Lanes
    why: str = ""
    has_endpoint = True
    is_local = False
    needs_queues = False
    is_recordable = False

    def endpoint(self, program: Program, rank: int, timeout: float) -> Endpoint:
        """One rank's side, for the Python executor.

        Raises:
            ValueError: if `has_endpoint` is False.
        """
        raise ValueError(why_not_python(self.kind))

    @abstractmethod
    def native(self, runtime: Any, program: Program, rank: int, timeout: float) -> Any:
        """One rank's side as an object of the extension ``runtime``; all ranks create theirs in the same order."""

    def exchange(
        self, peer: int, tensors: Sequence[torch.Tensor], into: Sequence[torch.Tensor] | None = None
    ) -> list[torch.Tensor]:
        """Exchange tensors with another rank, between steps; returns the peer's.

        Used for stages that two ranks hold, for tied weights, and for audits.

        Args:
            peer: the other rank.
            tensors: for the peer.
            into: memory for the peer's tensors; None if they have the specs of ``tensors``.

        Raises:
            FailureError: when the peer is dead or silent.
            ValueError: for a transport that cannot.
        """
        raise ValueError(
            f"transport: {type(self).__name__} has no exchange(peer, tensors), which stages on two ranks, weights "
            "shared by stages, and audits need; define it, or set transport='auto'"
        )

    def prepare_exchange(self) -> None:  # noqa: B027 - optional
        """Prepare to exchange tensors between steps; called on every rank."""

    def close(self) -> None:  # noqa: B027 - optional
        """Close connections; called once, at the end of the pipeline."""

    def abort(self) -> None:
        """Close after the loss of a rank, without waiting for other ranks; `close` is still called."""
        self.close()

    def unblock(self, failure: Failure) -> None:  # noqa: B027 - ranks in threads are not lost
        """End all waits for messages after the loss of a rank; from any thread, and more than once.

        Args:
            failure: its failure; with rank None if it is unknown.
        """

    def describe(self) -> str:
        """One line for `Pipeline.describe`."""
        return f"{self.kind}, lanes {self.lanes}" + (f" ({self.why})" if self.why else "")


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
    """Transport between threads of this process, for one process and for tests. Strict FIFO, unbuffered, with the lanes
    of a real transport.

    Every rank has a queue of operations per lane. The heads of two queues match when one sends what the other receives;
    only then the tensors are copied, so a sender that overwrites or frees too early is detected.

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
            self._native_hubs[program] = runtime.over_loopback(program.channels, lanes, self.delay)
        return self._native_hubs[program]

    def describe(self) -> str:
        """See `Transport.describe`."""
        return super().describe() + (f", sends delayed by {self.delay:g} s" if self.delay else "")
