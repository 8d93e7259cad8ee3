"""The Python executor's end of a transport that is C++ alone."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np

from fastpipe.program import ChannelKind, Op, Program
from fastpipe.runtime.tensors import Tensors
from fastpipe.runtime.transport import Endpoint, Message, SpecBook


class NativeEndpoint(Endpoint):
    """One rank's side.

    Args:
        runtime: the extension.
        source: what the transport gives to the native executor.
        program: all ranks'.
        rank: whose end it is.
        timeout: seconds to wait for a peer.
    """

    def __init__(self, runtime: Any, source: Any, program: Program, rank: int, timeout: float) -> None:
        channels = [tuple(map(int, channel)) for channel in program.channels]
        columns = np.ascontiguousarray(program[rank].columns)
        self._native = runtime.Endpoint(rank, columns, channels, source, timeout)
        self._book = SpecBook()
        self._positions = _positions(program, rank)

    def begin(self, signature: Hashable, announce: bool) -> None:
        """See `Endpoint.begin`."""
        self._book.begin(signature, announce)
        self._native.begin(signature, announce)

    def post_recv(self, message: Message, channel: int, slot: int) -> None:
        """See `Endpoint.post_recv`."""
        self._native.post_receive(self._positions[Op.POST_RECV, message])

    def wait_recv(self, channel: int, slot: int) -> Tensors | None:
        """See `Endpoint.wait_recv`."""
        found = self._native.wait_receive(slot)
        return None if found is None else tuple(found)

    def send(self, message: Message, channel: int, number: int, tensors: Tensors | None) -> None:
        """See `Endpoint.send`."""
        ready = None if tensors is None else list(self._book.prepare(message, tensors))
        self._native.send(self._positions[Op.SEND, message], ready)

    def wait_send(self, number: int) -> None:
        """See `Endpoint.wait_send`."""
        self._native.wait_send(number)

    def end(self) -> None:
        """See `Endpoint.end`."""
        self._native.end(False)

    def check(self) -> None:
        """See `Endpoint.check`."""
        self._native.check()


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
