"""Transport: moves tensors between ranks, in the order of each channel. The interface, and the choice.

A `Transport` is chosen once for a pipeline and shared by the ranks of this process; an `Endpoint` is one rank's side
of it, for one program. The Python executor uses the endpoint; the native executor makes its own from the same choice.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable
from typing import Any, NamedTuple

from fastpipe.machine import Lanes
from fastpipe.program import ChannelKind, Program
from fastpipe.runtime.common import Failure, Specs, Tensors, alike, dense_all, specs_of, specs_text


class Message(NamedTuple):
    """Which tensors: those of one boundary and microbatch.

    Attributes:
        kind: activations or gradients.
        stage: the stage that consumes them.
        microbatch: the microbatch.
    """

    kind: ChannelKind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        what = "output" if self.kind is ChannelKind.ACTIVATION else "gradient"
        producer = self.stage - 1 if self.kind is ChannelKind.ACTIVATION else self.stage + 1
        return f"the {what} of stage {producer}, microbatch {self.microbatch}"


class SpecBook:
    """What the tensors of every message look like, by the signature of a step.

    In a step that announces, whatever is sent is written down; in the others, it must look as written.
    """

    def __init__(self) -> None:
        self._books: dict[Hashable, dict[Message, Specs]] = {}
        self._open: dict[Message, Specs] = {}
        self.announcing = True

    def begin(self, signature: Hashable, announce: bool) -> None:
        """Open the page of a step; a page that announces starts empty."""
        if announce:
            self._books[signature] = {}
        self._open = self._books.setdefault(signature, {})
        self.announcing = announce

    def __getitem__(self, message: Message) -> Specs:
        return self._open[message]

    def __contains__(self, message: Message) -> bool:
        return message in self._open

    def write(self, message: Message, specs: Specs) -> None:
        """Note what a message looks like."""
        self._open[message] = specs

    def prepare(self, message: Message, tensors: Tensors) -> Tensors:
        """What is to be sent, dense, and as announced.

        Raises:
            ValueError: when it looks otherwise than when it was announced.
        """
        ready = dense_all(tensors)
        found = specs_of(ready)
        if self.announcing:
            self.write(message, found)
        elif self._open[message] != found and not alike(self._open[message], found):
            raise ValueError(
                f"{message} changed without a change in the inputs: expected {specs_text(self._open[message])}, found "
                f"{specs_text(found)}; pad it to one shape, or cut the model so that who makes it and who takes it are "
                "in one stage"
            )
        return ready


class Endpoint(ABC):
    """One rank's side of a transport, for one program."""

    @abstractmethod
    def begin(self, signature: Hashable, announce: bool) -> None:
        """Start a step; ``announce`` when the shapes of this signature are not known yet."""

    @abstractmethod
    def post_recv(self, message: Message, channel: int, slot: int) -> None:
        """Say where the channel's next message goes."""

    @abstractmethod
    def wait_recv(self, channel: int, slot: int) -> Tensors | None:
        """The tensors of a posted receive; None when the sender has failed."""

    @abstractmethod
    def send(self, message: Message, channel: int, number: int, tensors: Tensors | None) -> None:
        """Send, without waiting; None stands in for what a failed rank has not computed.

        Raises:
            ValueError: when the tensors look otherwise than announced; nothing is sent then.
        """

    @abstractmethod
    def wait_send(self, number: int) -> None:
        """Wait until nothing reads the tensors of a send any more."""

    def end(self) -> None:  # noqa: B027 - most have nothing to do
        """Let go of what a step left."""


NATIVE_ALONE = ("shared_memory", "cuda_ipc")
"""Transports that are C++ alone."""


def why_not_python(kind: str) -> str:
    """Why the Python executor does not go with a transport that is C++ alone."""
    return (
        f"executor = 'python': transport = {kind!r} is for the native executor alone; set executor='native', or "
        "transport='process_group'"
    )


class Transport(ABC):
    """How the ranks of a pipeline exchange tensors.

    Attributes:
        kind: its name.
        lanes: which channels it executes in one order.
        why: why it was chosen, where something else would have been better.
    """

    kind: str
    lanes: Lanes
    why: str = ""

    def endpoint(self, program: Program, rank: int, timeout: float) -> Endpoint:
        """One rank's side, for the Python executor.

        Raises:
            ValueError: for a transport that is C++ alone.
        """
        raise ValueError(why_not_python(self.kind))

    @abstractmethod
    def native(self, runtime: Any, program: Program, rank: int, timeout: float) -> Any:
        """One rank's side as an object of the extension ``runtime``."""

    def prepare_exchange(self) -> None:  # noqa: B027 - most have what they need
        """Called on every rank before some of them swap tensors between steps."""

    def close(self) -> None:  # noqa: B027 - most have nothing to close
        """Let go of connections. Called once, when the pipeline is gone."""

    def abort(self) -> None:
        """The same when a rank is lost, without waiting for anybody; `close` is still called."""
        self.close()

    def unblock(self, failure: Failure) -> None:  # noqa: B027 - ranks in threads are not lost
        """A rank is lost: end all waits for messages, as no step can be completed any more.

        From any thread, and more than once.

        Args:
            failure: its failure; the rank is None where that is not known.
        """

    def describe(self) -> str:
        """One line for `Pipeline.describe`."""
        return f"{self.kind}, lanes {self.lanes}" + (f" ({self.why})" if self.why else "")
