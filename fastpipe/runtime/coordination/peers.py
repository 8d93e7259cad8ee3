"""The exits of other processes: of this host by process descriptors, of other hosts by TCP connections.

Within a host (`LocalPeers`) a process descriptor (pidfd) becomes readable when its process exits for any reason. Every
process also has a datagram socket (AF_UNIX, without a file); a datagram wakes it. One poll waits for both. Where the
kernel denies pidfds, the connections watch instead.

Between hosts (`Lifeline`) every process on another host than rank 0 has a connection to rank 0; what either end detects
it publishes in the store. The kernel closes a connection when its process exits. A lost host closes nothing. So both
ends send a byte periodically, and each kernel ends the connection if the byte is not acknowledged in time: both ends
detect a break of either direction. The kernel acknowledges, so a process may be busy or stopped. A process that closes
its pipeline sends its last step, since others may still read what it published for that step.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hmac
import os
import secrets
import select
import socket
import struct
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any

from fastpipe.runtime.common import DIED, aside, first_line, torch_private
from fastpipe.runtime.coordination.control import Reply
from fastpipe.runtime.coordination.host import Identity, identify, same_host

LEFT = "its process ended or closed the pipeline"
SILENT = "its host does not answer"
BEAT_SECONDS = 0.25
HANGUP = select.POLLRDHUP
"""The event to poll for: received bytes need not wake the watcher."""

_BEAT = b"."
_CONNECT_SECONDS = 10.0
_TOKEN_BYTES = 16
_LOST = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)
_open: weakref.WeakSet[Lifeline] = weakref.WeakSet()


def can_watch() -> bool:
    """Whether the kernel grants process descriptors: old kernels lack them, and sandboxes may deny them."""
    try:
        os.close(torch_private.process_descriptor(os.getpid()))
    except (OSError, AttributeError):
        return False
    return True


def _open_process(identity: Identity) -> int | None:
    """A descriptor of a process of this host; None if it has exited."""
    with contextlib.suppress(ProcessLookupError):
        descriptor = torch_private.process_descriptor(identity["pid"])
        if torch_private.start_of_process(identity["pid"]) in ("", identity["started"]):
            return descriptor
        os.close(descriptor)
    return None


def has_exited(identity: Identity) -> bool:
    """Whether a process of this host has exited; False if it cannot be watched."""
    if not same_host(identity, identify()) or not can_watch():
        return False
    descriptor = _open_process(identity)
    if descriptor is None:
        return True
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    try:
        return bool(poll.poll(0))
    finally:
        os.close(descriptor)


class LocalPeers:
    """The other processes of this host.

    Attributes:
        processes: by number (see `Control`), a process descriptor.
        gone: processes that exited before they could be watched.
        wakeup: a socket that becomes readable when another process sends to it.
        closed: processes that have closed the pipeline, with their last step.
        failed: the last step in which another process has published a failure; -1 if there is none.
    """

    def __init__(self) -> None:
        self.processes: dict[int, int] = {}
        self.gone: set[int] = set()
        self.closed: dict[int, int] = {}
        self.failed = -1
        self.wakeup = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.wakeup.bind("")  # an abstract address, chosen by the kernel
        self.wakeup.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 1, 0))
        self._secret = secrets.token_hex(16)
        self._others: dict[int, tuple[bytes, str]] = {}

    def identity(self) -> dict[str, Any]:
        """What the others need to know of this process."""
        own = {"wakeup": self.wakeup.getsockname().hex(), "secret": self._secret, "can_watch": can_watch()}
        return identify() | own

    def watch(self, number: int, identity: Identity) -> None:
        """Watch a process if it is on this host and a descriptor is available; may be called again."""
        if number in self.processes or number in self.gone or not same_host(identity, identify()) or not can_watch():
            return
        descriptor = _open_process(identity)
        if descriptor is None:
            self.gone.add(number)
        else:
            self.processes[number] = descriptor

    def ended(self) -> set[int]:
        """The processes that have exited."""
        numbers = {descriptor: number for number, descriptor in self.processes.items()}
        poll = select.poll()
        for descriptor in numbers:
            poll.register(descriptor, select.POLLIN)
        return self.gone | {numbers[descriptor] for descriptor, _ in poll.poll(0)}

    def connect(self, own: int, identities: Sequence[Identity]) -> list[int]:
        """Watch the processes of this host; returns those that this process can wake."""
        for number, identity in enumerate(identities):
            if number == own or not same_host(identity, identities[own]):
                continue
            self.watch(number, identity)
            other = bytes.fromhex(identity["wakeup"]), identity["secret"]
            if self._send(other, "", socket.MSG_DONTWAIT):
                self._others[number] = other
        return list(self._others)

    def wake(self, step: int) -> None:
        """Wake the others, for a failure that this process has published in a step."""
        for other in self._others.values():
            self._send(other, str(step), socket.MSG_DONTWAIT)

    def wake_own(self) -> None:
        """Wake this process's own watcher."""
        self._send((self.wakeup.getsockname(), self._secret), "", socket.MSG_DONTWAIT)

    def report_close(self, own: int, last_step: int) -> None:
        """Report to the others that this process closes the pipeline, with its last step."""
        for other in self._others.values():
            self._send(other, f"{own} {last_step}")

    def drain(self) -> None:
        """Read all pending datagrams."""
        with contextlib.suppress(BlockingIOError):
            while True:
                secret, _, word = self.wakeup.recv(256, socket.MSG_DONTWAIT).partition(b":")
                if word and hmac.compare_digest(secret, self._secret.encode()):
                    *number, step = map(int, word.split())
                    if number:
                        self.closed[number[0]] = step
                    else:
                        self.failed = step

    def close(self) -> None:
        """Close all descriptors; called once."""
        self.wakeup.close()
        for descriptor in self.processes.values():
            os.close(descriptor)

    def _send(self, other: tuple[bytes, str], word: str, flags: int = 0) -> bool:
        """Send a datagram; returns whether its receiver exists. A receiver with a full queue is awake."""
        address, secret = other
        try:
            self.wakeup.sendto(f"{secret}:{word}".encode(), flags, address)
        except BlockingIOError:
            return True
        except OSError:  # the receiver has exited, which its descriptor reports, or is in another network namespace
            return False
        return True


class Lifeline:
    """The connections of one process; after `connect`, other threads may use it.

    Raises:
        ValueError: if FASTPIPE_SILENCE is not a number of seconds.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self._silence = _silence_seconds()
        self._token = secrets.token_hex(_TOKEN_BYTES)
        self._listener: socket.socket | None = None
        self._connections: dict[int, socket.socket] = {}
        self._awaited: set[int] = set()
        self._said: dict[int, bytes] = {}
        self._ended: dict[int, tuple[str, int]] = {}
        self._lock = threading.Lock()
        self._next_beat = 0.0
        _open.add(self)

    def offer(self, store: Any) -> Reply:
        """Rank 0: its address, or why it cannot listen.

        Args:
            store: its server is reachable from all processes.
        """
        try:
            own, name = _addresses(store)
            family = socket.AF_INET6 if ":" in own else socket.AF_INET
            self._listener = socket.create_server((own, 0), family=family, backlog=4096)
            return {"address": [name, self._listener.getsockname()[1]], "token": self._token}
        except OSError as error:
            return {"no_lifeline": first_line(error)}

    def connect(self, offer: Reply, far: Sequence[int]) -> list[int]:
        """Connect to all at the same time; returns the connected processes.

        Args:
            far: the processes that rank 0 cannot watch.
        """
        with contextlib.suppress(OSError):  # the others see it in the result
            if self._listener is not None:
                self._accept(self._listener, far)
            elif self.number in far and "address" in offer:
                connection = socket.create_connection(offer["address"], timeout=_CONNECT_SECONDS)
                connection.sendall(f"{offer['token']}{self.number:08}".encode())
                self._add(0, connection)
        return list(self._connections)

    def _accept(self, listener: socket.socket, far: Sequence[int]) -> None:
        deadline = time.monotonic() + _CONNECT_SECONDS
        self._awaited = set(far)
        listener.settimeout(0.05)
        while self._awaited and time.monotonic() < deadline:
            with contextlib.suppress(TimeoutError):
                connection, _ = listener.accept()
                # a client that connects and sends nothing delays no other client
                aside([functools.partial(self._handshake, connection)], "fastpipe-accept")
        with self._lock:
            self._awaited.clear()

    def _handshake(self, connection: socket.socket) -> None:
        connection.settimeout(_CONNECT_SECONDS)
        with contextlib.suppress(OSError):  # an unknown client, or a process that has exited
            greeting = connection.recv(2 * _TOKEN_BYTES + 8, socket.MSG_WAITALL)
            token, number = greeting[: 2 * _TOKEN_BYTES], greeting[2 * _TOKEN_BYTES :]
            with self._lock:
                if hmac.compare_digest(token, self._token.encode()) and int(number) in self._awaited:
                    self._add(int(number), connection)
                    return self._awaited.remove(int(number))
        connection.close()

    def _add(self, number: int, connection: socket.socket) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * self._silence))
        self._connections[number] = connection

    def keep(self, numbers: Sequence[int]) -> None:
        """Keep the connections of these processes only, whose other ends are connected too."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        for number in self._connections.keys() - set(numbers):
            self._connections.pop(number).close()

    @property
    def descriptors(self) -> list[int]:
        """The descriptors to poll for `HANGUP`."""
        return [connection.fileno() for connection in self._connections.values()]

    def beat(self) -> None:
        """Send a byte if it is due; call this at least every `BEAT_SECONDS`."""
        if time.monotonic() >= self._next_beat:
            self._next_beat = time.monotonic() + BEAT_SECONDS / 5
            self._exchange(_BEAT)

    def ended(self) -> dict[int, tuple[str, int]]:
        """Of each process that has exited, by number: why, and its last complete step, 0 if it sent none."""
        self._exchange(b"")
        return dict(self._ended)

    def _exchange(self, word: bytes) -> None:
        """Receive from all connections, and send a word."""
        with self._lock:
            for number in self._connections.keys() - self._ended.keys():
                try:
                    self._exchange_with(number, self._connections[number], word)
                except OSError as error:
                    last_step = self._said.get(number)
                    cause = SILENT if error.errno in _LOST else DIED
                    self._ended[number] = (LEFT, int(last_step)) if last_step else (cause, 0)

    def _exchange_with(self, number: int, connection: socket.socket, word: bytes) -> None:
        with contextlib.suppress(BlockingIOError):
            while data := connection.recv(4096):
                self._said[number] = self._said.get(number, b"") + data.replace(_BEAT, b"")
            raise ConnectionResetError("it has ended the connection")
        with contextlib.suppress(BlockingIOError):  # enough bytes wait for an acknowledgement
            connection.send(word)

    def close(self, last_step: int) -> None:
        """Send the number of the last step, and close the connections; called once."""
        self._exchange(str(last_step).encode())
        with self._lock:
            self.close_descriptors()

    def close_descriptors(self) -> None:
        """Close this process's copies of the descriptors; in a forked child the parent's connections stay open."""
        for descriptor in (self._listener, *self._connections.values()):
            if descriptor is not None:
                descriptor.close()
        self._connections = {}


def _silence_seconds() -> float:
    """Seconds after which an unacknowledged byte ends the connection; until then it is sent again."""
    text = os.environ.get("FASTPIPE_SILENCE", "1.5")
    with contextlib.suppress(ValueError):
        if 0 < (seconds := float(text)) < 1e6:
            return seconds
    raise ValueError(f"FASTPIPE_SILENCE = {text!r}: set it to the seconds for which another host may be silent")


def _addresses(store: Any) -> tuple[str, str]:
    """Where to listen, and the address for the others: this host's address on the route to the store's host.

    On the store's host itself the others use the store's name. If that name resolves to loopback here, the address that
    the others use is not visible, so this process listens on all of them.

    Raises:
        OSError: if there is no route.
    """
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    name: str = getattr(store, "host", "") or socket.gethostname()
    family, kind, protocol, _, address = socket.getaddrinfo(name, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as way:
        way.connect(address)  # sends nothing
        own: str = way.getsockname()[0]
    if own.startswith("127.") or own == "::1":
        return own if name in ("localhost", own) else "", name
    return own, name if own == address[0] else own


def _close_in_child() -> None:
    # a child that outlives its parent would keep the connections open
    for lifeline in list(_open):
        lifeline.close_descriptors()


os.register_at_fork(after_in_child=_close_in_child)
