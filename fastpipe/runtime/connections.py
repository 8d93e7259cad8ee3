"""Connections that torch makes, and that would outlive the host at their other end: Gloo's, and the store's.

A process that ends has its connections ended by its kernel. A host that vanishes, without power or cut off, ends
nothing, and whoever waits for its message waits on. That it has vanished is found out by `fastpipe.runtime.lifeline`;
here is what lets go of those who wait. It is kernels that ask and answer, so a process may be busy or stopped for as
long as it likes.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

Made = TypeVar("Made")
_ASK_SECONDS = 1
"""How long nothing comes before the other host is asked whether it is there: the least that the kernel knows."""
_SILENT_SECONDS = _ASK_SECONDS + 0.25
"""For which nothing comes from no host that is there."""
_TCP_INFO_BYTES, _LAST_DATA, _LAST_ACK = 104, 52, 56
"""Of the kernel's struct tcp_info: its size (more has been added since), and milliseconds since something came."""
_HAS_INFO = hasattr(socket, "TCP_INFO") and hasattr(socket, "TCP_KEEPIDLE") and os.path.isdir("/proc/self/fd")


class Connections:
    """Some of this process's that are another's to close.

    Args:
        found: inodes by descriptor, as `descriptors` has them. What is no connection over TCP does not matter.
    """

    def __init__(self, found: Mapping[int, int]) -> None:
        self._found = dict(found)
        self._lock = threading.Lock()

    def ask(self) -> Connections:
        """From now on the kernel asks the other hosts, when nothing has come for a second, whether they are there.

        It ends nothing by itself before it has asked many times: packets are lost.
        """
        self._each(_ask)
        return self

    def end_silent(self) -> None:
        """End those on which not even an answer has come, as their host is gone; for any thread, and more than once."""
        self._each(_end_if_silent)

    def end_after(self, seconds: float) -> None:
        """Have them ended by the kernel when what was sent is not acknowledged for so long.

        Until then it is sent several times. The kernel would also end one whose other end has had no room for so long,
        as that of a stopped process: so this is for those on which so little is said that there is always room. And one
        that is asked as well would end when a single answer is lost.
        """
        milliseconds = int(1000 * seconds)
        self._each(lambda it: it.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds))

    def _each(self, work: Callable[[socket.socket], None]) -> None:
        with self._lock:
            for descriptor, inode in self._found.items():
                with contextlib.suppress(OSError), _borrowed(descriptor, inode) as connection:
                    work(connection)


def made_by(make: Callable[[], Made]) -> tuple[Made, Connections]:
    """What is made, and the connections that this has taken."""
    before = descriptors().items()
    made = make()
    return made, Connections(dict(descriptors().items() - before))


def connections_with(store: Any) -> Connections:
    """All that this process has with a store now."""
    places = _places(store)
    found = {}
    for descriptor, inode in descriptors().items() if places else ():
        with contextlib.suppress(OSError), _borrowed(descriptor, inode) as connection:
            if _place(connection.getpeername()) in places:
                found[descriptor] = inode
    return Connections(found)


def descriptors() -> dict[int, int]:
    """This process's sockets: inodes by descriptor. A descriptor may be another socket's soon, an inode is not."""
    found = {}
    for name in os.listdir("/proc/self/fd") if _HAS_INFO else ():
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                found[int(name)] = os.fstat(int(name)).st_ino
    return found


@contextlib.contextmanager
def _borrowed(descriptor: int, inode: int) -> Iterator[socket.socket]:
    """The connection behind a descriptor that is another's to close.

    Raises:
        OSError: when it is closed, or no connection over TCP.
    """
    with socket.socket(fileno=os.dup(descriptor)) as connection:
        tcp = connection.type == socket.SOCK_STREAM and connection.family in (socket.AF_INET, socket.AF_INET6)
        if not tcp or os.fstat(connection.fileno()).st_ino != inode:
            raise OSError("another one, or of another kind")
        yield connection


def _ask(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _ASK_SECONDS)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _ASK_SECONDS)


def _end_if_silent(connection: socket.socket) -> None:
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    if min(struct.unpack_from("I", info, at)[0] for at in (_LAST_DATA, _LAST_ACK)) > 1000 * _SILENT_SECONDS:
        connection.shutdown(socket.SHUT_RDWR)


def _places(store: Any) -> set[tuple[str, int]]:
    """Addresses and ports of a store's server; none if it is no TCPStore."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    host, port = getattr(store, "host", None), getattr(store, "port", None)
    if not host or not port:
        return set()
    with contextlib.suppress(OSError):
        return {_place(address) for *_, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
    return set()


def _place(address: tuple[Any, ...]) -> tuple[str, int]:
    return str(address[0]).removeprefix("::ffff:"), int(address[1])
