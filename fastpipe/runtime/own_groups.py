"""Process groups that one pipeline has for itself."""

from __future__ import annotations

import contextlib
import functools
import math
import threading
from collections.abc import Iterable
from concurrent.futures import Future, wait
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from fastpipe.runtime.connections import made_by
from fastpipe.runtime.devices import CPU, wait_until_done
from fastpipe.runtime.failure import first_line
from fastpipe.runtime.forked import keep_in_children
from fastpipe.runtime.group import Membership, registered_group
from fastpipe.runtime.meeting import waiting
from fastpipe.runtime.transport import TransportError

_CLOSING = 10.0
"""Seconds that a device is given to finish when groups are closed; a peer that died keeps it for ever."""


class OwnGroups:
    """Groups of the same processes as the pipeline's. All of them make them at once.

    Args:
        member: this process's place.
        names: one a group.
        timeout: for a peer.

    Attributes:
        groups: in the order of the names; empty when they have ended.
    """

    def __init__(self, member: Membership, names: Iterable[str], timeout: timedelta) -> None:
        self._member = member
        self._store = member.store()
        self._seconds = min(timeout.total_seconds(), _CLOSING)
        make = functools.partial(make_group, member, self._store)
        self.groups, connections = made_by(lambda: [make(name, timeout) for name in names])
        self._connections = connections.ask()

    def close(self) -> None:
        """End them, on a GPU when the devices of all ranks are done with their messages.

        NCCL may still have to send what a device has handed to it, and ending a group drops that.
        """
        device = self._member.device
        if self.groups and device.type != "cpu" and wait_until_done(device, self._seconds):
            meet(self._store, self._member.rank, self._member.size, self._seconds)
        self.end()

    def end_silent(self) -> None:
        """End Gloo's connections with hosts that have vanished, so that nobody waits for their messages."""
        self._connections.end_silent()

    def end(self) -> None:
        """End them, whatever is under way.

        NCCL's destructor would abort them as well, and warn that the default group was not ended.
        """
        groups, self.groups = self.groups, []
        for group in groups if self._member.device.type == "cuda" else ():
            group._get_backend(self._member.device).abort()


def meet(store: Any, rank: int, size: int, seconds: float) -> None:
    """Wait until as many ranks have come here, but no longer than so many seconds; without the store not at all."""
    with contextlib.suppress(RuntimeError):
        own = store.clone()  # a pipeline may be closed in any thread
        own.set(f"closing/{rank}", "")
        own.wait([f"closing/{other}" for other in range(size)], timedelta(seconds=seconds))


def make_group(member: Membership, store: Any, name: str, timeout: timedelta) -> Any:
    """Another group of the same processes.

    A Gloo group stays outside torch's registry, which has two merits: it ends when nobody holds it, and
    whoever waits for the others to make it can be told that one is dead.
    """
    if member.device.type == "cuda":
        return _nccl_group(member, distributed_c10d.PrefixStore(name, store), name, timeout)
    if (backend := backend_of(member)) != "gloo":
        return registered_group(member.group or dist.group.WORLD, backend, timeout)
    store = distributed_c10d.PrefixStore(name, store)
    group = dist.ProcessGroup(store, member.rank, member.size)
    gloo = _gloo(member, store, timeout)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
    keep_in_children(group)
    return group


def backend_of(member: Membership) -> str:
    """What carries a pipeline's messages: NCCL on a GPU, otherwise as in the group it was given, or Gloo if that has
    nothing for tensors of the CPU."""
    if member.device.type == "cuda":
        return "nccl"
    outer: Any = member.group or dist.group.WORLD
    try:
        return str(outer._get_backend(CPU).name())
    except RuntimeError:
        return "gloo"


def _gloo(member: Membership, store: Any, timeout: timedelta) -> Any:
    """Gloo's connections with all others. It waits for them deaf and blind, so a thread does that.

    If one of them will not come the thread is left alone, with a connection of its own to the store. (To make one takes
    minutes where the store is gone.)

    Raises:
        LostError: when one is dead, or does not build the pipeline.
        TransportError: when they cannot be made, or one is silent.
    """
    made: Future[Any] = Future()

    def make() -> None:
        try:
            made.set_result(dist.ProcessGroupGloo(store.clone(), member.rank, member.size, timeout=timeout))
        except BaseException as error:
            made.set_exception(error)

    threading.Thread(target=make, name="fastpipe-connect", daemon=True).start()
    for pause in waiting(math.inf, member.lost):
        if wait([made], pause).done:
            break
    try:
        return made.result()
    except RuntimeError as error:
        raise TransportError(f"the ranks cannot connect: {first_line(error)}", None) from error


def _nccl_group(member: Membership, store: Any, name: str, timeout: timedelta) -> Any:
    """The same with NCCL, and with Gloo for what is on the host.

    It is not bound to its device: a bound one has one communicator, and with it one stream, for all pairs of ranks;
    this one makes one for a pair when they first speak. Its streams are of high priority so that none of them is a
    stage's, too: torch hands out those of either priority in turns. Nothing has been run on a GPU yet.
    """
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    options.is_high_priority_stream = True
    options.global_ranks_in_group = list(member.ranks)
    group = dist.ProcessGroup(store, member.rank, member.size)
    nccl = dist.ProcessGroupNCCL(store, member.rank, member.size, options)
    group._register_backend(member.device, dist.ProcessGroup.BackendType.NCCL, nccl)
    gloo = _gloo(member, distributed_c10d.PrefixStore("host", store), timeout)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
    return group
