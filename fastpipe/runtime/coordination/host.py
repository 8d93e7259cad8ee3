"""The processes of one host: their identity, their number, and how they wake each other.

Every process has a datagram socket (AF_UNIX, without a file); a datagram wakes it. A process descriptor (pidfd) becomes
readable when its process exits for any reason. One poll waits for both. Where the kernel denies pidfds,
`fastpipe.runtime.coordination.lifeline` watches instead.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import select
import socket
import struct
from collections.abc import Mapping, Sequence
from typing import Any

from fastpipe.runtime.common import torch_private

Identity = Mapping[str, Any]


def host_name() -> str:
    """A name shared by the processes that see the same /proc; empty where there is none.

    FASTPIPE_HOST is part of it: processes with different values count as different hosts.
    """
    identity = torch_private.host_identity()
    return identity and identity + os.environ.get("FASTPIPE_HOST", "")


def identify() -> dict[str, Any]:
    """A unique identity of this process: the kernel reuses process numbers."""
    return {"host": host_name(), "pid": os.getpid(), "started": torch_private.start_of_process(os.getpid())}


def same_host(one: Identity, other: Identity) -> bool:
    """Whether two processes are on one host, by their identities."""
    return bool(one["host"]) and one["host"] == other["host"]


class RanksPerHost:
    """The number of ranks that compute on this host: of all pipelines of the default process group, and all replicas.

    It is complete once all pipelines are built. Under torchrun it is at least the number of local processes, so that
    the first pipeline does not have to wait for the others.

    Args:
        store: of the default group; None where there is none.
    """

    def __init__(self, store: Any, process: int) -> None:
        self._host = host_name()
        self._store = store if self._host else None
        self._process = process
        self._own = 0

    def join(self, num_ranks: int) -> None:
        """Count the ranks of this process, once per process."""
        self._own = num_ranks
        if self._store is not None and self._store.add(f"fastpipe/counted/{self._host}/{self._process}", 1) == 1:
            self._store.add(f"fastpipe/ranks/{self._host}", num_ranks)

    def count(self) -> int:
        """The number of ranks counted so far."""
        started = os.environ.get("LOCAL_WORLD_SIZE", "")
        joined = 0 if self._store is None else self._store.add(f"fastpipe/ranks/{self._host}", 0)
        return max(self._own, joined, int(started) if started.isdecimal() else 0)


def can_watch() -> bool:
    """Whether the kernel grants process descriptors: old kernels lack them, and sandboxes may deny them."""
    try:
        os.close(torch_private.process_descriptor(os.getpid()))
    except (OSError, AttributeError):
        return False
    return True


class LocalPeers:
    """The other processes of this host.

    Attributes:
        processes: by rank, a process descriptor.
        gone: ranks whose processes exited before they could be watched.
        wakeup: a socket that becomes readable when another process sends to it.
        closed: ranks that have closed the pipeline, with their last step.
    """

    def __init__(self) -> None:
        self.processes: dict[int, int] = {}
        self.gone: set[int] = set()
        self.closed: dict[int, int] = {}
        self.wakeup = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.wakeup.bind("")  # an abstract address, chosen by the kernel
        self.wakeup.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 1, 0))
        self._secret = secrets.token_hex(16)
        self._others: dict[int, tuple[bytes, str]] = {}

    def identity(self) -> dict[str, Any]:
        """What the others need to know of this process."""
        own = {"wakeup": self.wakeup.getsockname().hex(), "secret": self._secret, "can_watch": can_watch()}
        return identify() | own

    def watch(self, rank: int, identity: Identity) -> None:
        """Watch a process if it is on this host and a descriptor is available; may be called again."""
        if rank in self.processes or rank in self.gone or not same_host(identity, identify()) or not can_watch():
            return
        with contextlib.suppress(ProcessLookupError):
            descriptor = torch_private.process_descriptor(identity["pid"])
            if torch_private.start_of_process(identity["pid"]) in ("", identity["started"]):
                self.processes[rank] = descriptor
                return
            os.close(descriptor)
        self.gone.add(rank)

    def ended(self) -> set[int]:
        """The ranks whose processes have exited."""
        ranks = {descriptor: rank for rank, descriptor in self.processes.items()}
        poll = select.poll()
        for descriptor in ranks:
            poll.register(descriptor, select.POLLIN)
        return self.gone | {ranks[descriptor] for descriptor, _ in poll.poll(0)}

    def connect(self, own: int, identities: Sequence[Identity]) -> list[int]:
        """Watch the processes of this host; returns the ranks that this process can wake."""
        for rank, identity in enumerate(identities):
            if rank == own or not same_host(identity, identities[own]):
                continue
            self.watch(rank, identity)
            other = bytes.fromhex(identity["wakeup"]), identity["secret"]
            if self._send(other, "", socket.MSG_DONTWAIT):
                self._others[rank] = other
        return list(self._others)

    def wake(self) -> None:
        """Wake the others."""
        for other in self._others.values():
            self._send(other, "", socket.MSG_DONTWAIT)

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
                secret, _, word = self.wakeup.recv(256, socket.MSG_DONTWAIT).decode(errors="replace").partition(":")
                if word and hmac.compare_digest(secret, self._secret):
                    rank, last_step = map(int, word.split())
                    self.closed[rank] = last_step

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
