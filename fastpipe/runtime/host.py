"""Processes of one host: who they are, how many, and how one rouses another.

Every process has a pipe that the others open through /proc, and a byte in it wakes whoever sleeps for it. A process
descriptor (pidfd) becomes readable when its process ends, whatever ended it. So one poll sleeps for both.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Identity = Mapping[str, Any]


def host_name() -> str:
    """What only processes that see each other's /proc have in common; empty where there is none.

    The variable FASTPIPE_HOST tells processes of one host apart: those where it differs are taken to be on several.
    """
    boot = Path("/proc/sys/kernel/random/boot_id")
    if not boot.exists():
        return ""
    return boot.read_text().strip() + os.readlink("/proc/self/ns/pid") + os.environ.get("FASTPIPE_HOST", "")


def identify() -> dict[str, Any]:
    """What tells this process from all others: a process number alone is given to another one some day."""
    return {"host": host_name(), "pid": os.getpid(), "started": _started(os.getpid())}


def _started(pid: int) -> str:
    """When a process was started, in the kernel's words; empty where that is not known, or it is gone."""
    with contextlib.suppress(OSError):
        # after its name, which may hold anything, come fields 3 to 52; this is the 22nd
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    return ""


def same_host(one: Identity, other: Identity) -> bool:
    """Whether two processes are on one host, by what they tell of themselves."""
    return bool(one["host"]) and one["host"] == other["host"]


class Crowd:
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


class Neighbours:
    """The other processes of this host.

    Attributes:
        processes: a process descriptor of each, by rank.
        gone: the ranks whose processes had ended before they could be watched.
        bell: the end of this process's pipe that is read.
        parted: the ranks that have closed the pipeline, and may end.
    """

    def __init__(self) -> None:
        self.processes: dict[int, int] = {}
        self.gone: set[int] = set()
        self.bell, self._own = os.pipe()
        os.set_blocking(self.bell, False)
        os.set_blocking(self._own, False)
        self._bells: dict[int, int] = {}
        self.parted: set[int] = set()

    def identity(self) -> dict[str, Any]:
        """What the others need to know of this process."""
        return identify() | {"bell": self._own}

    def watch(self, rank: int, identity: Identity) -> None:
        """Watch a process from now on, if it is one of this host; once or more often."""
        if rank in self.processes or rank in self.gone or not same_host(identity, identify()):
            return
        with contextlib.suppress(ProcessLookupError):
            descriptor = os.pidfd_open(identity["pid"])
            if _started(identity["pid"]) in ("", identity["started"]):
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
            with contextlib.suppress(OSError):
                self._bells[rank] = _open_pipe(identity["pid"], identity["bell"])
        return list(self._bells)

    def ring(self) -> None:
        """Wake the others."""
        for bell in self._bells.values():
            _ring(bell)

    def ring_own(self) -> None:
        """Wake this process's own sleeper."""
        _ring(self._own)

    def part(self, own: int) -> None:
        """Tell the others that this process closes the pipeline, and owes them nothing."""
        for bell in self._bells.values():
            _ring(bell, f"<{own}>".encode())

    def quiet(self) -> None:
        """Take what has been rung for so far."""
        said = b""
        with contextlib.suppress(BlockingIOError):  # all of it, as a part may end within a word
            while part := os.read(self.bell, 4096):
                said += part
        self.parted |= {int(rank) for rank in re.findall(rb"<(\d+)>", said)}

    def close(self) -> None:
        """Let go of all descriptors; called once."""
        for descriptor in (self.bell, self._own, *self.processes.values(), *self._bells.values()):
            os.close(descriptor)


def _open_pipe(process: int, number: int) -> int:
    """The writing end of another process's pipe, if it is this user's.

    Raises:
        OSError: when it is not there, is no pipe or somebody else's.
    """
    path = f"/proc/{process}/fd/{number}"
    opened = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    status = os.fstat(opened)
    if stat.S_ISFIFO(status.st_mode) and status.st_uid == os.geteuid():
        return opened
    os.close(opened)
    raise OSError(f"{path} is not a pipe of this user")


def _ring(bell: int, word: bytes = b"!") -> None:
    # a full pipe has woken it already; one without a reader has nobody to wake
    with contextlib.suppress(BlockingIOError, BrokenPipeError):
        os.write(bell, word)
