"""The interfaces: `Transport` moves tensors between ranks, in the order of each channel.

A pipeline has one `Transport`, shared by the ranks of this process; an `Endpoint` is one rank's side of it for one
program. The Python executor uses the endpoint; the native executor creates its own from the transport.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch

from fastpipe.machine import Lanes
from fastpipe.program import ChannelKind, Program
from fastpipe.runtime.common import Failure, Specs, Tensors, dense_all, specs_match, specs_of, specs_text


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
        """Start a send; None sends the placeholder of a failed rank.

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
