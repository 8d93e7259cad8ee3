"""Processes of one host: who they are, and how one rouses another.

Every process has a pipe that the others open through /proc, and a byte in it wakes whoever sleeps for it. A process
descriptor (pidfd) becomes readable when its process ends, whatever ended it. So one poll sleeps for both.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Identity = Mapping[str, Any]


def host_name() -> str:
    """What only processes that see each other's /proc have in common; empty where there is none."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text().strip() + os.readlink("/proc/self/ns/pid") if boot.exists() else ""


class Neighbours:
    """The other processes of this host.

    Attributes:
        processes: a process descriptor of each, by rank.
        bell: the end of this process's pipe that is read.
    """

    def __init__(self) -> None:
        self.processes: dict[int, int] = {}
        self.bell, self._own = os.pipe()
        os.set_blocking(self.bell, False)
        os.set_blocking(self._own, False)
        self._bells: dict[int, int] = {}

    def identity(self) -> dict[str, Any]:
        """What the others need to know of this process."""
        return {"host": host_name(), "pid": os.getpid(), "bell": self._own}

    def meet(self, own: int, identities: Sequence[Identity]) -> list[int]:
        """Watch those of this host from now on; the ranks whose bell can be rung."""
        for rank, identity in enumerate(identities):
            if rank == own or not identity["host"] or identity["host"] != identities[own]["host"]:
                continue
            self.processes[rank] = os.pidfd_open(identity["pid"])
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

    def quiet(self) -> None:
        """Take what has been rung for so far."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.bell, 4096)

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


def _ring(bell: int) -> None:
    # a full pipe has woken it already; one without a reader has nobody to wake
    with contextlib.suppress(BlockingIOError, BrokenPipeError):
        os.write(bell, b"!")
