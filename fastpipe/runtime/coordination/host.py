"""Processes of one host: who they are, how many, and how one rouses another.

Every process has a datagram socket (AF_UNIX, without a file) that wakes it when another one sends to it. A process
descriptor (pidfd) becomes readable when its process ends, whatever ended it. So one poll sleeps for both. Where the
kernel grants no such descriptor, `fastpipe.runtime.coordination.lifeline` watches in its place.
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
    """What only processes that see each other's /proc have in common; empty where there is none.

    The variable FASTPIPE_HOST tells processes of one host apart: those where it differs are taken to be on several.
    """
    identity = torch_private.host_identity()
    return identity and identity + os.environ.get("FASTPIPE_HOST", "")


def identify() -> dict[str, Any]:
    """What tells this process from all others: a process number alone is given to another one some day."""
    return {"host": host_name(), "pid": os.getpid(), "started": torch_private.start_of_process(os.getpid())}


def same_host(one: Identity, other: Identity) -> bool:
    """Whether two processes are on one host, by what they tell of themselves."""
    return bool(one["host"]) and one["host"] == other["host"]


class RanksPerHost:
    """How many ranks compute on this host: those of all pipelines of the default process group, replicas among them.

    It is known in full when all of these have been built. Under torchrun it is at least the number of processes that
    were started here, so that the first pipeline need not wait for the others.

    Args:
        store: the default group's; None where there is none.
        process: this process's rank in it.
    """

    def __init__(self, store: Any, process: int) -> None:
        self._host = host_name()
        self._store = store if self._host else None
        self._process = process
        self._own = 0

    def join(self, num_ranks: int) -> None:
        """Count the ranks of this process; once, however many pipelines it builds."""
        self._own = num_ranks
        if self._store is not None and self._store.add(f"fastpipe/counted/{self._host}/{self._process}", 1) == 1:
            self._store.add(f"fastpipe/ranks/{self._host}", num_ranks)

    def count(self) -> int:
        """How many have joined so far."""
        started = os.environ.get("LOCAL_WORLD_SIZE", "")
        joined = 0 if self._store is None else self._store.add(f"fastpipe/ranks/{self._host}", 0)
        return max(self._own, joined, int(started) if started.isdecimal() else 0)


def can_watch() -> bool:
    """Whether the kernel grants process descriptors: an old one has none, and a sandbox may deny them."""
    try:
        os.close(torch_private.process_descriptor(os.getpid()))
    except (OSError, AttributeError):
        return False
    return True


class LocalPeers:
    """The other processes of this host.

    Attributes:
        processes: a process descriptor of each, by rank.
        gone: the ranks whose processes had ended before they could be watched.
        wakeup: a socket that becomes readable when another process rings.
        parted: the ranks that have closed the pipeline, with their last step.
    """

    def __init__(self) -> None:
        self.processes: dict[int, int] = {}
        self.gone: set[int] = set()
        self.parted: dict[int, int] = {}
        self.wakeup = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.wakeup.bind("")  # an address of the kernel's choice, which is no file
        self.wakeup.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 1, 0))
        self._secret = secrets.token_hex(16)
        self._others: dict[int, tuple[bytes, str]] = {}

    def identity(self) -> dict[str, Any]:
        """What the others need to know of this process."""
        own = {"wakeup": self.wakeup.getsockname().hex(), "secret": self._secret, "can_watch": can_watch()}
        return identify() | own

    def watch(self, rank: int, identity: Identity) -> None:
        """Watch a process from now on, if it is one of this host and can be watched; once or more often."""
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
        """The ranks whose processes have ended."""
        ranks = {descriptor: rank for rank, descriptor in self.processes.items()}
        poll = select.poll()
        for descriptor in ranks:
            poll.register(descriptor, select.POLLIN)
        return self.gone | {ranks[descriptor] for descriptor, _ in poll.poll(0)}

    def meet(self, own: int, identities: Sequence[Identity]) -> list[int]:
        """Watch those of this host from now on; the ranks whose bell can be rung."""
        for rank, identity in enumerate(identities):
            if rank == own or not same_host(identity, identities[own]):
                continue
            self.watch(rank, identity)
            other = bytes.fromhex(identity["wakeup"]), identity["secret"]
            if self._send(other, "", socket.MSG_DONTWAIT):
                self._others[rank] = other
        return list(self._others)

    def ring(self) -> None:
        """Wake the others."""
        for other in self._others.values():
            self._send(other, "", socket.MSG_DONTWAIT)

    def ring_own(self) -> None:
        """Wake this process's own sleeper."""
        self._send((self.wakeup.getsockname(), self._secret), "", socket.MSG_DONTWAIT)

    def part(self, own: int, last_step: int) -> None:
        """Tell the others that this process closes the pipeline, and which step was its last."""
        for other in self._others.values():
            self._send(other, f"{own} {last_step}")

    def quiet(self) -> None:
        """Take what has been rung for so far."""
        with contextlib.suppress(BlockingIOError):
            while True:
                secret, _, word = self.wakeup.recv(256, socket.MSG_DONTWAIT).decode(errors="replace").partition(":")
                if word and hmac.compare_digest(secret, self._secret):
                    rank, last_step = map(int, word.split())
                    self.parted[rank] = last_step

    def close(self) -> None:
        """Let go of all descriptors; called once."""
        self.wakeup.close()
        for descriptor in self.processes.values():
            os.close(descriptor)

    def _send(self, other: tuple[bytes, str], word: str, flags: int = 0) -> bool:
        """Whether there is somebody to read it. Who has not read what came before is awake."""
        address, secret = other
        try:
            self.wakeup.sendto(f"{secret}:{word}".encode(), flags, address)
        except BlockingIOError:
            return True
        except OSError:  # it has ended, which its process descriptor says, or is in another network namespace
            return False
        return True
