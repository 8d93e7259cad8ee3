"""Process groups: the place of this process in one, the groups that a pipeline makes, and how they are aborted."""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import json
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from fastpipe.runtime.common import (
    CPU,
    Failure,
    FailureError,
    ForkGuard,
    PatientStore,
    aside,
    attended,
    first_line,
    keep_in_children,
    lost_peer,
    torch_private,
    wait_until_done,
)
from fastpipe.runtime.coordination import Identity, RanksPerHost, identify

logger = logging.getLogger("fastpipe")
_made: Counter[tuple[int, ...]] = Counter()


@dataclass(frozen=True)
class Membership:
    """This process's place among the processes of a pipeline.

    Attributes:
        rank: its rank.
        size: how many processes there are.
        group: the process group; None when the process is alone.
        ranks: the members' global ranks.
        device: what they compute on.
        timeout: seconds to wait for the others.
        lost: what keeps one of them from coming; asked in a wait for the others to connect.
    """

    rank: int = 0
    size: int = 1
    group: Any = None
    ranks: tuple[int, ...] = (0,)
    device: torch.device = CPU
    lost: Callable[[], Failure | None] = lambda: None
    timeout: float = 600.0

    def store(self) -> Any:
        """A part of the group's store for one pipeline. The members make their pipelines in the same order."""
        return distributed_c10d.PrefixStore(_new_name(self.ranks), torch_private.default_store())

    def identity(self, rank: int) -> Identity | None:
        """Who a member is; None if it has never begun to build a pipeline."""
        store, key = _default_store(self.timeout), _process_key(self.ranks[rank])
        found: Identity | None = json.loads(store.get(key)) if store.check([key]) else None
        return found


def ranks_per_host(timeout: float = 600.0) -> RanksPerHost:
    """The ranks that compute on this process's host."""
    if not dist.is_initialized():
        return RanksPerHost(None, 0)
    return RanksPerHost(_default_store(timeout), dist.get_rank())


def _default_store(timeout: float) -> Any:
    return PatientStore(torch_private.default_store(), timeout)


def membership(group: Any, device: torch.device, timeout: float = 600.0) -> Membership:
    """Find this process's place.

    Args:
        group: a process group, a DeviceMesh of one dimension, or None for all processes.
        device: what the pipeline computes on; decides the backend when a group has to be made.
        timeout: seconds to wait for the others.

    Raises:
        FailureError: when the process group's store does not answer.
        ValueError: for a mesh of several dimensions, or a group that this process is not in.
    """
    if group is None and not dist.is_initialized():
        if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
            return Membership(device=device)
        _make_group(device, timeout)
    if dist.is_initialized() and "fake" in (dist.get_backend(), dist.get_backend(_from_mesh(group))):
        raise ValueError(
            "group: its backend is 'fake', which sends nothing, and a pipeline sends; make a group of gloo or nccl, or "
            "run all ranks in one process without a group (num_ranks=)"
        )
    if dist.is_initialized():  # before anything can fail: from now on the others can see when this process ends
        _default_store(timeout).set(_process_key(dist.get_rank()), json.dumps(identify()))
    group = _from_mesh(group)
    ranks = tuple(dist.get_process_group_ranks(group or dist.group.WORLD))
    if dist.get_rank() not in ranks:
        raise ValueError(f"group: this process (rank {dist.get_rank()}) is not one of its members {list(ranks)}")
    return Membership(dist.get_rank(group), len(ranks), group, ranks, device, timeout=timeout)


def registered_group(group: Any, backend: str, timeout: timedelta) -> Any:
    """Another group of the same processes, which torch's collectives take. The members make them in the same order."""
    ranks = dist.get_process_group_ranks(group)
    return torch_private.registered_group(ranks, backend, _new_name(tuple(ranks)), timeout)


def _new_name(ranks: tuple[int, ...]) -> str:
    """The same on all of these processes, and never twice."""
    members = hashlib.sha1(repr(ranks).encode()).hexdigest()[:12]
    number = _made[ranks]
    _made[ranks] += 1
    return f"fastpipe/{members}/{number}"


def _process_key(process: int) -> str:
    return f"fastpipe/process/{process}"


def _from_mesh(group: Any) -> Any:
    if group is None or isinstance(group, dist.ProcessGroup):
        return group
    if not hasattr(group, "mesh_dim_names"):
        raise TypeError(
            f"group is a {type(group).__name__}: give a process group that this process is in, or a DeviceMesh of one "
            "dimension"
        )
    if group.ndim != 1:
        raise ValueError(
            f"group: the DeviceMesh has {group.ndim} dimensions; give the pipeline's, for example mesh['pp']"
        )
    return group.get_group()


def _make_group(device: torch.device, timeout: float) -> None:
    """The default process group, ended at exit. Torch would wait for the others for 30 minutes."""
    backend = "gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:nccl"
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout))
    logger.info("made the process group: rank %d of %d, backend %s", dist.get_rank(), dist.get_world_size(), backend)
    atexit.register(_end_group, ForkGuard())


def _end_group(home: ForkGuard) -> None:
    if home.here and dist.is_initialized():
        dist.destroy_process_group()


class Aborts:
    """Aborts of several groups, which have all begun when this is there; nobody has waited for any.

    One after the other they might wait for each other for ever: NCCL may wait for the whole device before it frees what
    a communicator had, and there a kernel of the next group waits for the lost rank. Torch waits for an abort as long
    as the group's timeout, too, and NCCL until every CUDA graph with a message of the group is gone.

    Args:
        backends: of the groups.
    """

    def __init__(self, backends: Iterable[Any]) -> None:
        self._threads = aside([functools.partial(_abort, backend) for backend in backends], "fastpipe-abort")

    def wait(self, seconds: float) -> bool:
        """Wait until all have come to their end, no longer than so many seconds; whether they have."""
        until = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)


def _abort(backend: Any) -> None:
    try:
        backend.abort()
    except Exception as error:  # logged
        logger.warning(
            "a process group could not be aborted (%s); if the device does not come to its end, end this process",
            first_line(error),
        )


_WATCHDOG = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "10",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}
"""What the watchdogs of own groups do when NCCL fails or a message takes longer than the timeout: they abort the group,
and fastpipe says which rank it was. Torch's own way is to end the process after a minute. To a dump of what was under
way they leave four times the milliseconds for every message; who drops a group waits for them.

They also call for that dump. The first group of NCCL's in a process, whosever it is, makes it, and ends the process
after TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC, 8 minutes. One of these makes none. Where it is the user's only the user can see
to that, before it is made (docs/guide.md)."""

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
        self.groups = [make(name, timeout) for name in names]
        self._lock = threading.Lock()
        self._aborts: Aborts | None = None

    def close(self) -> None:
        """End them, on a GPU when the devices of all ranks are done with their messages."""
        try:
            self.settle()
        finally:
            self.end()

    def settle(self) -> bool:
        """Wait until the devices of all ranks are done with their messages; False when this rank's does not end.

        NCCL may still have to send what a device has handed to it, and ending a group drops that. When a rank is lost,
        so is that already, and the store may be gone.
        """
        device = self._member.device
        if not self.groups or self._aborts is not None or device.type == "cpu":
            return True
        if not wait_until_done(device, self._seconds):
            return False
        meet(self._store, self._member.rank, self._member.size, self._seconds)
        return True

    def abort(self) -> None:
        """Begin to abort NCCL's messages, of all groups at once. From any thread, and more than once."""
        device = self._member.device
        with self._lock:
            if self._aborts is None and device.type == "cuda":
                self._aborts = Aborts([torch_private.backend_for(group, device) for group in self.groups])

    def end(self) -> None:
        """End them, whatever is under way; where several are ended, `abort` all of them before.

        NCCL's destructor would abort them as well, and warn that the default group was not ended.
        """
        self.abort()
        groups, self.groups = self.groups, []
        if groups and self._aborts is not None:
            self._aborts.wait(self._seconds)


def meet(store: Any, rank: int, size: int, seconds: float) -> None:
    """Wait until as many ranks have come here, but no longer than so many seconds; without the store not at all."""

    def come() -> None:
        with contextlib.suppress(RuntimeError):
            own = store.clone()  # which takes minutes where the store is gone
            own.set(f"closing/{rank}", "")
            own.wait([f"closing/{other}" for other in range(size)], timedelta(seconds=seconds))

    for thread in aside([come], "fastpipe-closing"):
        thread.join(seconds)


def make_group(member: Membership, store: Any, name: str, timeout: timedelta) -> Any:
    """Another group of the same processes.

    A Gloo group stays outside torch's registry, which has two merits: it ends when nobody holds it, and
    a wait for the others to make it ends when one is dead.
    """
    if member.device.type == "cuda":
        # a connection of its own: who waits there for a peer's word, at a first message, lets nobody else ask anything
        own = attended(store.clone, member.lost, timeout)
        return _nccl_group(member, distributed_c10d.PrefixStore(name, own), name, timeout)
    if (backend := backend_of(member)) != "gloo":
        return registered_group(member.group or dist.group.WORLD, backend, timeout)
    store = distributed_c10d.PrefixStore(name, store)
    backends = {CPU: (dist.ProcessGroup.BackendType.GLOO, _gloo(member, store, timeout))}
    group = torch_private.unregistered_group(store, member.rank, member.size, backends)
    keep_in_children(group)
    return group


def backend_of(member: Membership) -> str:
    """What carries a pipeline's messages: NCCL on a GPU, otherwise as in the group it was given, or Gloo if that has
    nothing for tensors of the CPU."""
    if member.device.type == "cuda":
        return "nccl"
    # "cpu:gloo,cuda:nccl"
    devices = dict(one.split(":") for one in dist.get_backend_config(member.group).split(","))
    return devices.get("cpu", "gloo")


def _gloo(member: Membership, store: Any, timeout: timedelta) -> Any:
    """Gloo's connections with all others, made over a connection of its own to the store, as the thread that makes them
    may be left alone. (To make one takes minutes where the store is gone.)

    Raises:
        FailureError: when one is dead or silent, or does not build the pipeline, or they cannot be made.
    """

    def make() -> Any:
        own = store.clone()
        own.set(f"came/{member.rank}", "")
        try:
            return dist.ProcessGroupGloo(own, member.rank, member.size, timeout=timeout)
        except RuntimeError as error:
            if missing := [rank for rank in range(member.size) if not own.check([f"came/{rank}"])]:
                cause = f"did not come to connect within {timeout.total_seconds():g} s; see what it is doing"
                raise lost_peer(f"rank {missing[0]} {cause}, or set a longer timeout", missing[0]) from error
            raise

    try:
        return attended(make, member.lost, 2 * timeout)  # Gloo ends first, and says more
    except FailureError:
        raise
    except RuntimeError as error:
        raise lost_peer(f"the ranks cannot connect: {first_line(error)}", None) from error


@contextlib.contextmanager
def _unless_set(variables: Mapping[str, str]) -> Iterator[None]:
    """Variables of the environment, for a while, those that somebody has set, by their old names too, as they are."""
    added = [name for name in variables if not {name, name.removeprefix("TORCH_")} & os.environ.keys()]
    os.environ.update({name: variables[name] for name in added})
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


def _nccl_group(member: Membership, store: Any, name: str, timeout: timedelta) -> Any:
    """The same with NCCL, and with Gloo for what is on the host.

    It is not bound to its device: a bound one has one communicator, and with it one stream, for all pairs of ranks;
    this one makes one for a pair when they first speak. Its streams are of high priority so that none of them is a
    stage's, too: torch hands out those of either priority in turns. Nothing has been run on a GPU yet.
    """
    options = dist.ProcessGroupNCCL.Options()
    torch_private.set_timeout(options, timeout)
    options.is_high_priority_stream = True
    options.global_ranks_in_group = list(member.ranks)
    with _unless_set(_WATCHDOG):
        nccl = dist.ProcessGroupNCCL(store, member.rank, member.size, options)
    gloo, kinds = _gloo(member, distributed_c10d.PrefixStore("host", store), timeout), dist.ProcessGroup.BackendType
    backends = {member.device: (kinds.NCCL, nccl), CPU: (kinds.GLOO, gloo)}
    return torch_private.unregistered_group(store, member.rank, member.size, backends)
