"""Lifeline: connections between processes of several hosts, by whose end each learns that the other one is gone.

On one host a process descriptor tells (`fastpipe.runtime.host`). Every process that is on another host than rank 0 has
a connection to rank 0, and what either end learns all others read in the store. The kernel ends a connection when its
process ends, whatever ended it. A host that vanishes ends nothing: so both ends send a byte from time to time, and
give up when the other host has not acknowledged it for a while. Its kernel does that, so a process may be busy or
stopped for as long as it likes. Who closes its pipeline says which step was its last one, since others may still be
reading what it said there.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import os
import secrets
import select
import socket
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

from fastpipe.runtime.control import Reply
from fastpipe.runtime.failure import DIED, first_line

LEFT = "its process ended or closed the pipeline"
SILENT = "its host does not answer"
BEAT_SECONDS = 0.25
GONE = getattr(select, "POLLRDHUP", select.POLLIN)
"""What to poll for: bytes alone need no waking up."""

_BEAT = b"."
_TIE_SECONDS = 5.0
_BACKLOG = 4096
_TOKEN_BYTES = 16
_GREETING_BYTES = 2 * _TOKEN_BYTES + 8
_open: weakref.WeakSet[Lifeline] = weakref.WeakSet()


class Ended(NamedTuple):
    """The end of a process.

    Attributes:
        cause: what became of it.
        last_step: the last one that it took part in to the end, where it said so; 0 where it did not.
    """

    cause: str
    last_step: int = 0


class Lifeline:
    """The connections of one process; from `tie` on other threads may use it, too.

    Args:
        rank: this process.

    Attributes:
        silence: seconds after which a host that has not answered is taken to be gone.

    Raises:
        ValueError: when the variable FASTPIPE_SILENCE is not a number of seconds.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.silence = _silence_seconds()
        self._token = secrets.token_hex(_TOKEN_BYTES)
        self._listener: socket.socket | None = None
        self._ties: dict[int, socket.socket] = {}
        self._said: dict[int, bytes] = {}
        self._ended: dict[int, Ended] = {}
        self._lock = threading.Lock()
        self._next_beat = 0.0
        _open.add(self)

    def offer(self, store: Any) -> Reply:
        """Rank 0's: where it can be reached, or why it cannot.

        Args:
            store: whose server all processes reach.
        """
        try:
            dual = socket.has_dualstack_ipv6()
            family = socket.AF_INET6 if dual else socket.AF_INET
            self._listener = socket.create_server(("", 0), family=family, backlog=_BACKLOG, dualstack_ipv6=dual)
            return {"address": [_own_name(store), self._listener.getsockname()[1]], "token": self._token}
        except OSError as error:
            return {"no_lifeline": first_line(error)}

    def tie(self, offer: Reply, far: Sequence[int]) -> list[int]:
        """Connect, all at the same time; the ranks that this process has a connection with.

        Args:
            offer: rank 0's.
            far: the ranks that are on other hosts than rank 0.
        """
        with contextlib.suppress(OSError):
            if self.rank == 0:
                self._accept(far)
            elif self.rank in far and "address" in offer:
                tie = socket.create_connection(offer["address"], timeout=_TIE_SECONDS)
                tie.sendall(f"{offer['token']}{self.rank:08}".encode())
                self._add(0, tie)
        return list(self._ties)

    def _accept(self, far: Sequence[int]) -> None:
        deadline = time.monotonic() + _TIE_SECONDS
        while self._listener is not None and len(self._ties) < len(far):
            self._listener.settimeout(max(0.001, deadline - time.monotonic()))
            tie, _ = self._listener.accept()
            rank = self._greeted(tie)
            if rank in far:
                self._add(rank, tie)
            else:
                tie.close()

    def _greeted(self, tie: socket.socket) -> int:
        """Whose connection it is; -1 if it is a stranger's."""
        tie.settimeout(_TIE_SECONDS / 5)
        with contextlib.suppress(OSError):
            greeting = tie.recv(_GREETING_BYTES, socket.MSG_WAITALL)
            token, rank = greeting[: 2 * _TOKEN_BYTES], greeting[2 * _TOKEN_BYTES :]
            if hmac.compare_digest(token, self._token.encode()):
                return int(rank)
        return -1

    def _add(self, rank: int, tie: socket.socket) -> None:
        tie.setblocking(False)
        tie.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            tie.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * self.silence))
        self._ties[rank] = tie

    def keep(self, ranks: Sequence[int]) -> None:
        """Only these have the other end of a connection; it has begun."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        for rank, tie in list(self._ties.items()):
            if rank not in ranks:
                del self._ties[rank]
                tie.close()

    @property
    def descriptors(self) -> list[int]:
        """To poll for `GONE`."""
        return [tie.fileno() for tie in self._ties.values()]

    def beat(self) -> None:
        """Send a byte, if it is time; to be called at least every `BEAT_SECONDS`."""
        if time.monotonic() < self._next_beat:
            return
        # at every look into the store, which may itself be with a host that has vanished, and keep this thread waiting
        self._next_beat = time.monotonic() + BEAT_SECONDS / 5
        with self._lock:
            self._listen()
            for rank, tie in self._living():
                try:
                    tie.send(_BEAT)
                except OSError as error:
                    self._failed(rank, error)

    def ended(self) -> dict[int, Ended]:
        """The processes that are gone, by rank."""
        with self._lock:
            self._listen()
            return dict(self._ended)

    def _living(self) -> list[tuple[int, socket.socket]]:
        return [(rank, tie) for rank, tie in self._ties.items() if rank not in self._ended]

    def _listen(self) -> None:
        for rank, tie in self._living():
            try:
                while data := tie.recv(4096):
                    self._said[rank] = self._said.get(rank, b"") + data.replace(_BEAT, b"")
                self._end(rank, DIED)
            except OSError as error:
                self._failed(rank, error)

    def _failed(self, rank: int, error: OSError) -> None:
        if not isinstance(error, BlockingIOError):
            lost = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)
            self._end(rank, SILENT if error.errno in lost else DIED)

    def _end(self, rank: int, cause: str) -> None:
        last_step = self._said.get(rank)
        self._ended[rank] = Ended(LEFT, int(last_step)) if last_step else Ended(cause)

    def close(self, last_step: int) -> None:
        """Say that this was the last step, and let go; called once."""
        with self._lock:
            self._listen()
            for _, tie in self._living():
                with contextlib.suppress(OSError):
                    tie.send(str(last_step).encode())
            self.let_go()

    def let_go(self) -> None:
        """Close this process's copies of the descriptors; its parent's connections, if it is a forked child, go on."""
        for descriptor in (self._listener, *self._ties.values()):
            if descriptor is not None:
                descriptor.close()
        self._ties = {}


def _silence_seconds() -> float:
    """After which a byte that was not acknowledged ends the connection; it is sent several times until then."""
    text = os.environ.get("FASTPIPE_SILENCE", "1.5")
    with contextlib.suppress(ValueError):
        if 0 < (seconds := float(text)) < 1e6:
            return seconds
    raise ValueError(f"FASTPIPE_SILENCE = {text!r}: set it to the seconds for which another host may be silent")


def _own_name(store: Any) -> str:
    """What other hosts call this one: its address on the way to the store's host, or that one's name if it is the same.

    Raises:
        OSError: when there is no such way.
    """
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    name: str = getattr(store, "host", "") or socket.gethostname()
    family, kind, protocol, _, address = socket.getaddrinfo(name, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as way:
        way.connect(address)  # sends nothing
        own: str = way.getsockname()[0]
    is_there = own == address[0] or own in ("127.0.0.1", "::1")
    return name if is_there else own


def _let_go_in_child() -> None:
    # a child that outlives its parent would keep the connections open
    for lifeline in list(_open):
        lifeline.let_go()


os.register_at_fork(after_in_child=_let_go_in_child)
