"""Process groups: membership of this process, the groups that a pipeline creates, and their aborts."""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import json
import logging
import os
import socket
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from fastpipe.errors import StepError
from fastpipe.runtime import native
from fastpipe.runtime.common import (
    CPU,
    SHORT_EXIT_SECONDS,
    STORE_SECONDS,
    CircuitBreaker,
    Failure,
    FailureError,
    StoreWithTimeout,
    aside,
    attended,
    call_in_thread,
    cause_text,
    check_descriptors,
    first_line,
    keep_in_children,
    lost_peer,
    pauses,
    torch_private,
    wait_until_idle,
)
from fastpipe.runtime.coordination import (
    Identity,
    RanksPerHost,
    Reply,
    check_job,
    has_exited,
    identify,
    name_attempt,
    shares_store,
    write_failure,
)

logger = logging.getLogger("fastpipe")
_made: Counter[tuple[str, tuple[int, ...]]] = Counter()
_attempts: dict[tuple[int, ...], str] = {}
"""The prefix of the keys of this attempt, by members."""
_side_groups: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()
_own_worlds: weakref.WeakSet[Any] = weakref.WeakSet()
"""The default group, if its store has no keys of earlier attempts."""


@dataclass(frozen=True)
class Membership:
    """This process as a member of a pipeline's processes.

    Attributes:
        group: the process group; None for a single process.
        ranks: global ranks of the members.
        lost: returns the failure of a member, if any; polled while waiting for members to connect.
        timeout: seconds to wait for a member, in construction and in a step.
        attempt: the prefix of all keys; see `name_attempt`.
        name: of the pipeline's keys; one for each construction, as a failed one ends at another point on each member.
    """

    rank: int = 0
    group: Any = None
    ranks: tuple[int, ...] = (0,)
    device: torch.device = CPU
    lost: Callable[[], Failure | None] = lambda: None
    timeout: float = 600.0
    attempt: str = ""
    name: str = ""

    @property
    def size(self) -> int:
        """The number of members."""
        return len(self.ranks)

    @property
    def limit(self) -> timedelta:
        """The timeout, as c10d takes it."""
        return timedelta(seconds=self.timeout)

    def store(self) -> Any:
        """The group's store with a prefix for one pipeline; see `named`."""
        return distributed_c10d.PrefixStore(self.attempt + self.name, torch_private.default_store())

    def named(self) -> Membership:
        """The same, with the name of one more pipeline. Members must create pipelines in the same order."""
        return replace(self, name=_new_name("pipeline", self.ranks))

    def among(self, ranks: tuple[int, ...], rank: int) -> Membership:
        """This process's membership of the processes of several pipelines, which come together."""
        attempt = _write_identity(ranks, self.timeout)
        return replace(self, rank=rank, group=None, ranks=ranks, attempt=attempt).named()

    def check_job(self) -> None:
        """Raise ValueError if the members are of different jobs."""
        if self.size > 1:
            check_job(_default_store(self.timeout))

    def identity(self, rank: int) -> Identity | None:
        """Identity of a member; None if it has not started to create a pipeline."""
        return self._identity_of(self.ranks[rank])

    def _identity_of(self, process: int) -> Identity | None:
        store, key = _default_store(self.timeout), self.attempt + _process_key(process)
        found: Identity | None = json.loads(store.get(key)) if store.check([key]) else None
        return found

    def lost_in(self, group: Any) -> list[int]:
        """After a collective of a group has raised: the processes of other pipelines that have exited within a short
        time; all of other pipelines if it is not known of any."""
        others = [process for process in dist.get_process_group_ranks(group) if process not in self.ranks]
        with contextlib.suppress(RuntimeError):  # of a store that is gone
            identities = {process: self._identity_of(process) for process in others}
            for pause in pauses(SHORT_EXIT_SECONDS):
                if exited := [process for process, found in identities.items() if found and has_exited(found)]:
                    return exited
                time.sleep(pause)
        return others


class SharedCall:
    """A call that the processes of several pipelines make together: a save, a load, the construction of replicas.

    A pipeline's control does not reach the others, which would wait in a collective for a process that has raised, and
    whose connections remain open. So a process that raises before the collectives have ended writes why into the
    default store, where the others look while they wait. A process that exits need not be watched: whoever waits for
    it gets an error of its connection, and all others wait for processes that do, or for each other.

    Args:
        processes: those that make the call. They make their calls in the same order.
        num_reached: how many of them learn of a failure by the pipeline's control.
        maps_ranks: whether the ranks in errors of the control are those of this pipeline.
    """

    def __init__(self, member: Membership, processes: Sequence[int], num_reached: int, *, maps_ranks: bool) -> None:
        is_shared = len(processes) > num_reached and not _may_have_old_keys()
        # kept, as the script may end the process group while a save in the background goes on
        self._store = torch_private.default_store() if is_shared else None
        self._member, self._maps_ranks = member, maps_ranks
        self._key = f"{_new_name('call', tuple(processes))}/failure"
        self._breaker = CircuitBreaker(min(1.0, member.timeout / 4))
        self._has_ended = False

    @property
    def is_shared(self) -> bool:
        """Whether there are processes that the control does not reach."""
        return self._store is not None

    def lost(self) -> Failure | None:
        """The failure of a process that the others wait for, if any is known; polled, from any thread."""
        if (store := self._store) is None:
            return None
        text = self._breaker.call(lambda: store.get(self._key).decode() if store.check([self._key]) else "", "")
        if not text:
            return None
        process, cause = json.loads(text)
        if process in self._member.ranks:
            return Failure(self._member.ranks.index(process), cause, is_fatal=True)
        who = "" if process is None else f"process {process}, of another pipeline: "
        return Failure(None, f"{who}{cause}", is_fatal=True)

    @contextlib.contextmanager
    def published(self) -> Iterator[None]:
        """Context of the whole call on this process."""
        try:
            yield
        except BaseException as error:  # raised again, after it is published
            if (store := self._store) is not None and not self._has_ended:
                text = json.dumps(self._cause_of(error))
                CircuitBreaker().call(lambda: store.compare_set(self._key, "", text), None)
            raise

    @contextlib.contextmanager
    def collective(self, *everywhere: type[BaseException]) -> Iterator[None]:
        """Context of the last collectives; see `raised_by_all`."""
        with self.raised_by_all(*everywhere):
            yield
        self._has_ended = True

    @contextlib.contextmanager
    def raised_by_all(self, *everywhere: type[BaseException]) -> Iterator[None]:
        """Context in which all processes raise an exception of a given type, or none; the collectives end with it."""
        try:
            yield
        except everywhere:
            self._has_ended = True
            raise

    def _cause_of(self, error: BaseException) -> tuple[int | None, str]:
        """The process that failed, None if unknown, and the cause."""
        ranks = self._member.ranks
        if not isinstance(error, StepError):
            return ranks[self._member.rank], cause_text(error)
        if error.rank is None:
            return None, error.cause or str(error)
        if self._maps_ranks:
            return ranks[error.rank], error.cause or str(error)
        return ranks[self._member.rank], str(error)


def gather_messages(message: Reply, group: Any, device: torch.device = CPU) -> list[Reply]:
    """The messages of all processes of a group, in the order of its ranks; as JSON, so nothing is unpickled.

    Args:
        device: of tensors that the group sends.
    """
    size = dist.get_world_size(group)
    text = torch.frombuffer(bytearray(json.dumps(message).encode()), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(size)]
    dist.all_gather(sizes, torch.tensor([len(text)], device=device), group=group)
    longest = max(int(size) for size in sizes)
    padded = torch.nn.functional.pad(text, (0, longest - len(text))).to(device)
    texts = [torch.zeros_like(padded) for _ in range(size)]
    dist.all_gather(texts, padded, group=group)
    return [json.loads(bytes(text[: int(size)].tolist())) for text, size in zip(texts, sizes, strict=True)]


def ranks_per_host(timeout: float = 600.0) -> RanksPerHost:
    """The ranks on this process's host."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return RanksPerHost(None, 0)
    return RanksPerHost(_default_store(timeout), dist.get_rank())


def _default_store(timeout: float) -> Any:
    return StoreWithTimeout(torch_private.default_store(), timeout)


def membership(group: Any, device: torch.device, timeout: float = 600.0) -> Membership:
    """The membership of this process.

    Args:
        group: a process group; None for all processes.
        device: device of the pipeline; decides the backend if a group is created.

    Raises:
        FailureError: when the process group's store does not answer.
        OSError: if this process has too few file descriptors to build a pipeline.
        ValueError: for a fake backend of several processes, or a group without this process.
    """
    if group is None and not dist.is_initialized():
        if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
            return Membership(device=device, timeout=timeout)
        _check_descriptors(1)
        _make_group(device, timeout)
    if dist.is_initialized() and "fake" in (dist.get_backend(), dist.get_backend(group)):
        if dist.get_world_size() == 1:  # nothing is sent; its store keeps nothing
            return Membership(device=device, timeout=timeout)
        raise ValueError(
            "group: its backend is 'fake', which sends nothing; make a group of gloo or nccl, or "
            "run all ranks in one process without a group (num_ranks=)"
        )
    torch_private.default_store()  # of a group that was closed, torch 2.14 would not know the rank
    ranks = tuple(dist.get_process_group_ranks(group or dist.group.WORLD))
    if dist.get_rank() not in ranks:
        raise ValueError(f"group: this process (rank {dist.get_rank()}) is not one of its members {list(ranks)}")
    rank, attempt = dist.get_rank(group), _attempt_of(ranks, timeout)
    member = Membership(rank, group, ranks, device, timeout=timeout, attempt=attempt)
    if len(ranks) > 1:
        try:
            _check_descriptors(len(ranks))
        except OSError as error:
            failure = Failure(rank, cause_text(error), is_fatal=True)
            write_failure(member.named().store(), failure, 0)  # as no control can be made
            raise
    # before anything else can fail, so that other processes can detect the end of this one
    _write_identity(ranks, timeout)
    return member


def _check_descriptors(size: int) -> None:
    """For the control of a pipeline: its sockets, and a descriptor of each process."""
    check_descriptors(14 + size)


def _write_identity(ranks: tuple[int, ...], timeout: float) -> str:
    """Write this process's identity for the others; returns the prefix of the members' keys."""
    attempt = _attempt_of(ranks, timeout)
    _default_store(timeout).set(attempt + _process_key(dist.get_rank()), json.dumps(identify()))
    return attempt


def registered_group(group: Any, backend: str, timeout: timedelta) -> Any:
    """Another group of the same processes, for torch's collectives. Members must create them in the same order."""
    ranks = dist.get_process_group_ranks(group)
    return torch_private.registered_group(ranks, backend, _new_name("group", tuple(ranks)), timeout)


def side_group(purpose: str, group: Any, timeout: float) -> Any:
    """A Gloo group of the same processes, for collectives in the background; one for each group and purpose.

    Collective: it is created where a process has none, which is at first, and after `drop_side_group`.

    Args:
        purpose: what it is used for: two threads cannot use one group.
        group: of the script; None for all processes.

    Returns:
        The group; None without a process group.
    """
    if not dist.is_initialized():
        return None
    group = group or dist.group.WORLD
    made = _side_groups.setdefault(group, {})
    have = [False] * dist.get_world_size(group)
    dist.all_gather_object(have, purpose in made, group)
    if not all(have):
        made[purpose] = registered_group(group, "gloo", timedelta(seconds=timeout))
    return made[purpose]


def drop_side_group(purpose: str, group: Any) -> None:
    """A collective has failed, after which Gloo's group cannot be used: the next `side_group` creates another one."""
    if dist.is_initialized():
        _side_groups.get(group or dist.group.WORLD, {}).pop(purpose, None)


def _new_name(kind: str, ranks: tuple[int, ...]) -> str:
    """A name that is unique, and the same on all of these processes if they have made as many of this kind."""
    number = _made[kind, ranks]
    _made[kind, ranks] += 1
    return f"fastpipe/{kind}/{_digest(ranks)}/{number}"


def _digest(ranks: tuple[int, ...]) -> str:
    return hashlib.sha1(repr(ranks).encode()).hexdigest()[:12]


def _process_key(process: int) -> str:
    return f"fastpipe/process/{process}"


def _attempt_of(ranks: tuple[int, ...], timeout: float) -> str:
    """The prefix of the members' keys in the default store."""
    if len(ranks) == 1 or not shares_store() or dist.group.WORLD in _own_worlds:
        return ""
    if ranks not in _attempts:
        if _may_have_old_keys():
            logger.warning("%s", _RESTARTS)
        own, limit = ranks.index(dist.get_rank()), timedelta(seconds=timeout)
        store = distributed_c10d.PrefixStore(f"fastpipe/{_digest(ranks)}", torch_private.default_store().clone())
        name = attended(lambda: name_attempt(store, own, len(ranks), timeout), lambda: None, 2 * limit)
        _attempts[ranks] = f"{name}/"
    return _attempts[ranks]


def _may_have_old_keys() -> bool:
    """Whether the default store may have keys of an earlier attempt, of the same names."""
    restarts = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0
    return restarts and shares_store() and dist.group.WORLD not in _own_worlds


_RESTARTS = (
    "torchrun keeps one store for all attempts, and init_process_group of this script connects to processes of earlier "
    "ones after a restart: let fastpipe.Pipeline make the process group, or set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 "
    "and start torchrun with --standalone or --rdzv-backend=c10d"
)


def _make_group(device: torch.device, timeout: float) -> None:
    """Create the default process group with our timeout instead of torch's 30 minutes; destroyed at exit.

    Its keys in a store that earlier attempts have used have a prefix of their own.
    """
    backend = "gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:nccl"
    limit = timedelta(seconds=timeout)
    size = _number_in("WORLD_SIZE", 1)
    rank = _number_in("RANK", 0, size - 1)
    store = _joined_store(rank, size, timeout)
    try:
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit)
    except RuntimeError as error:
        raise lost_peer(
            f"the process group could not be made ({first_line(error)}); a process may have ended, or be stopped: see "
            "what the others say",
            None,
        ) from error
    if size > 1 and shares_store():
        _own_worlds.add(dist.group.WORLD)
    logger.info("made the process group: rank %d of %d, backend %s", dist.get_rank(), dist.get_world_size(), backend)
    atexit.register(_end_group, os.getpid())


def _number_in(variable: str, least: int, most: int | None = None) -> int:
    """A whole number in an environment variable.

    Raises:
        ValueError: if it is not set, or to something else.
    """
    text = os.environ.get(variable, "")
    if text.isdecimal() and least <= int(text) and (most is None or int(text) <= most):
        return int(text)
    limit = f"of {least} or more" if most is None else f"from {least} to {most}"
    raise ValueError(
        f"{variable} = {text!r}: set it in the environment to a whole number {limit}, or start the processes with "
        "torchrun"
    )


def _joined_store(rank: int, size: int, timeout: float) -> Any:
    """Connect to the store of all processes; its prefix is this attempt's, if earlier ones have used it.

    Raises:
        FailureError: if the store or a process cannot be reached in time, or is of another number of processes.
        ValueError: for a process of another job, or an address that is no address.
    """
    c10d: Any = dist
    if size == 1:
        return c10d.HashStore()
    host, port = os.environ.get("MASTER_ADDR", ""), _number_in("MASTER_PORT", 0, 65535)
    if not host:
        raise ValueError("MASTER_ADDR is not set: set it to the address of the host of rank 0, or use torchrun")
    limit = timedelta(seconds=timeout)

    def join() -> Any:
        # under torchrun its agent holds the store
        is_master = rank == 0 and not shares_store()
        store = c10d.TCPStore(host, port, size, is_master, limit, wait_for_workers=False, multi_tenant=True)
        check_job(store, decides=rank == 0)  # first: one of another job must not disturb those that belong here
        if shares_store():
            return distributed_c10d.PrefixStore(name_attempt(store, rank, size, timeout), store)
        _await_all(store, rank, size, timeout)
        return store

    made = call_in_thread(join, "fastpipe-connect")
    try:
        # torch repeats attempts, and then takes several times as long
        if not wait([made], timeout + STORE_SECONDS).done:
            raise TimeoutError(f"nothing answered within {timeout:g} s")
        return made.result()
    except FailureError:
        raise
    except (RuntimeError, TimeoutError) as error:
        raise lost_peer(
            f"no connection to MASTER_ADDR = {host!r}, MASTER_PORT = {port} as RANK = {rank} of WORLD_SIZE = {size}: "
            f"{_why_unknown(host) or first_line(error)}; give every process the address of rank 0's host and a free "
            "port there, and start as many processes as WORLD_SIZE says, each with a RANK of its own",
            rank,
        ) from error


def _why_unknown(host: str) -> str:
    """Why the name of a host has no address; empty if it has one."""
    try:
        socket.getaddrinfo(host, None)
    except OSError as error:
        return f"the name of the host has no address ({error.strerror})"
    return ""


def _await_all(store: Any, rank: int, size: int, timeout: float) -> None:
    """Wait until all processes have come, so that one that has not is named, and with it another number of them.

    Raises:
        FailureError: if one does not come in time, or was started with another number.
    """
    keys, late = [f"fastpipe/size/{other}" for other in range(size)], "fastpipe/late"
    store.set(keys[rank], str(size))
    missing = list(range(size))
    for pause in pauses(timeout):
        missing = [other for other in missing if not store.check([keys[other]])]
        sizes = {other: int(store.get(key)) for other, key in enumerate(keys) if other not in missing}
        for other, found in sizes.items():
            if found != size:
                raise lost_peer(
                    f"WORLD_SIZE = {found} on rank {other} and {size} on rank {rank}: set the same on every process",
                    other,
                )
        if not missing:
            return
        if store.check([late]):
            missing = [int(store.get(late))]
            break
        time.sleep(pause)
    else:
        store.set(late, str(missing[0]))
        time.sleep(SHORT_EXIT_SECONDS)  # the others read it before the store ends with its process
    raise lost_peer(
        f"rank {missing[0]} did not start within {timeout:g} s; see what it is doing, set a longer timeout, or start "
        f"as many processes as WORLD_SIZE = {size} says, each with a RANK of its own",
        missing[0],
    )


def _end_group(process: int) -> None:
    if os.getpid() == process and dist.is_initialized():
        dist.destroy_process_group()


def start_aborts(backends: Iterable[Any]) -> list[threading.Thread]:
    """Start to abort several groups at once, in a thread each, which ends with the abort.

    In sequence they could deadlock: NCCL may synchronize the device before it frees a communicator, while a kernel of
    the next group waits for the lost rank. An abort takes up to the group's timeout in torch, and in NCCL until every
    CUDA graph with a message of the group is freed.
    """
    return aside([functools.partial(_abort, backend) for backend in backends], "fastpipe-abort")


def _abort(backend: Any) -> None:
    try:
        backend.abort()
    except Exception as error:  # logged
        logger.warning(
            "a process group could not be aborted (%s); if the device does not finish, end this process",
            first_line(error),
        )


class MeshGroups:
    """The groups of a mesh in which stages run collectives of their own. They end when a stage fails, as nothing else
    unblocks its peers.

    A collective of NCCL ends when its process aborts it. One of Gloo ends when a peer closes its connections. So every
    rank closes its own: at once if it failed, otherwise before it waits for anything but messages of its pipeline. Of
    the ranks that wait for each other one is not in a collective, closes its connections, and so unblocks the others,
    which close theirs. A rank that is stopped closes none: its peers' collectives end after twice the Pipeline's
    timeout (`LocalRanks.run`).
    """

    _ended: set[tuple[str, tuple[int, ...]]] = set()
    """Of all meshes of this process: names of dimensions, and processes. torch takes the mesh of a DTensor from caches,
    in which a new mesh that is equal in these would be the one that has ended."""

    def __init__(self, groups: Mapping[str, Any] | None = None, device: torch.device = CPU) -> None:
        self._names = {_name_of(name, group) for name, group in (groups or {}).items()}
        self.groups: Sequence[Any] = list((groups or {}).values())
        self._device = device
        self._failed = False

    @classmethod
    def have_ended(cls, name: str, group: Any) -> bool:
        """Whether a failure has ended this dimension's group, or one that torch would use instead."""
        return _name_of(name, group) in cls._ended

    def abort(self) -> None:
        """A rank failed or is lost: abort what can be aborted from any thread."""
        failed, self._failed = self._failed, True
        self._ended.update(self._names)
        if not failed and self._device.type == "cuda":
            start_aborts([torch_private.backend_for(group, self._device) for group in self.groups])

    def leave(self) -> None:
        """After `abort`, in the thread that runs the stages and outside of any: close the connections of Gloo."""
        if self._failed:
            leave_groups(self.groups, self._device)

    def end(self) -> None:
        """`abort` and `leave`, as a rank of the mesh has failed. A rank that drains may learn of it by a stand-in for a
        message, before its watcher does."""
        self.abort()
        self.leave()


def leave_groups(groups: Iterable[Any], device: torch.device) -> None:
    """Close this process's connections of Gloo, so that peers that wait in these groups get an error."""
    runtime: Any = native.load()
    if device.type != "cpu" or runtime is None:
        return
    for group in groups:
        try:
            backend = [torch_private.backend_for(group, device)]
        except RuntimeError:  # left before
            continue
        runtime.drop_backends(group)
        # dropped in a thread: its end waits for its own threads, which may still serve peers
        aside([backend.clear], "fastpipe-leave")


def _name_of(dimension: str, group: Any) -> tuple[str, tuple[int, ...]]:
    return dimension, tuple(dist.get_process_group_ranks(group))


_WATCHDOG = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "10",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}
"""Settings of NCCL's watchdogs in our groups. If NCCL fails or a message exceeds the timeout, they abort the group, and
fastpipe reports the rank; torch's default ends the process after a minute. The watchdog waits four times the
milliseconds per message for a dump of open messages, and dropping a group waits for the watchdog.

They also request that dump. The first NCCL group of a process, which may be the user's, writes it, and ends the process
after TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC, 8 minutes. Our groups write none. For a group of the user's only the user can
change that, before it is created (docs/guide.md)."""

_CLOSING = 10.0
"""Seconds to wait for a device when groups are closed; with a dead peer it never finishes."""


class OwnGroups:
    """Groups that a pipeline creates of its own processes. Collective: all processes create them together.

    Args:
        names: the first one is of no other groups of the pipeline.

    Attributes:
        groups: the groups in order of the names; empty after the end.
    """

    def __init__(self, member: Membership, names: Sequence[str]) -> None:
        self._member = member
        self._store = distributed_c10d.PrefixStore(f"groups/{names[0]}", member.store())
        self._seconds = min(member.timeout, _CLOSING)
        self.groups = [make_group(member, self._store, name) for name in names]
        self._lock = threading.Lock()
        self._aborts: list[threading.Thread] | None = None

    def settle(self) -> bool:
        """Wait until the devices of all ranks have finished their messages; False if this rank's does not.

        Ending a group drops messages that NCCL has not sent yet. After an abort there is nothing to wait for.
        """
        device = self._member.device
        if not self.groups or self._aborts is not None or device.type == "cpu":
            return True
        if not wait_until_idle(device, self._seconds):
            return False
        wait_for_all(self._store, self._member.rank, self._member.size, self._seconds)
        return True

    def abort(self) -> None:
        """Start to abort NCCL's messages in all groups; from any thread, and more than once."""
        device = self._member.device
        with self._lock:
            if self._aborts is None and device.type == "cuda":
                self._aborts = start_aborts([torch_private.backend_for(group, device) for group in self.groups])

    def end(self) -> None:
        """End the groups without waiting for messages; to end several objects, `abort` all of them first.

        NCCL's destructor would abort them, too, but warn that the default group was not destroyed.
        """
        self.abort()
        groups, self.groups = self.groups, []
        until = time.monotonic() + self._seconds
        for thread in (self._aborts or ()) if groups else ():
            thread.join(max(0.0, until - time.monotonic()))


def end_groups(owned: Sequence[OwnGroups], *, settle: bool) -> None:
    """End groups; with ``settle`` first wait until the devices of all ranks have finished their messages."""
    try:
        if settle:
            all(own.settle() for own in owned)  # stops at the first whose device does not finish
    finally:
        for own in owned:
            own.abort()
        for own in owned:
            own.end()


def wait_for_all(store: Any, rank: int, size: int, seconds: float) -> None:
    """Wait at most ``seconds`` until all ranks call this; returns at once if the store fails."""

    def wait() -> None:
        with contextlib.suppress(RuntimeError):
            own = store.clone()  # takes minutes if the store is lost
            own.set(f"closing/{rank}", "")
            own.wait([f"closing/{other}" for other in range(size)], timedelta(seconds=seconds))

    for thread in aside([wait], "fastpipe-closing"):
        thread.join(seconds)


def make_group(member: Membership, store: Any, name: str) -> Any:
    """Another group of the same processes.

    A Gloo group is not in torch's registry: so it ends with its last reference, and the wait for other processes to
    create it ends if one is dead.
    """
    if member.device.type == "cuda":
        # a separate connection: NCCL's wait for a peer at a first message blocks all other requests on it
        own = attended(store.clone, member.lost, member.limit)
        return _nccl_group(member, distributed_c10d.PrefixStore(name, own))
    if (backend := backend_of(member)) != "gloo":
        return registered_group(member.group or dist.group.WORLD, backend, member.limit)
    store = distributed_c10d.PrefixStore(name, store)
    backends = {CPU: (dist.ProcessGroup.BackendType.GLOO, _gloo(member, store))}
    group = torch_private.unregistered_group(store, member.rank, member.size, backends)
    keep_in_children(group)
    return group


def backend_of(member: Membership) -> str:
    """The backend of a pipeline's messages: NCCL on a GPU, else the CPU backend of the given group, or Gloo if it has
    none."""
    if member.device.type == "cuda":
        return "nccl"
    # for example "cpu:gloo,cuda:nccl"
    devices = dict(one.split(":") for one in dist.get_backend_config(member.group).split(","))
    return devices.get("cpu", "gloo")


def _gloo(member: Membership, store: Any) -> Any:
    """Connect to all members by Gloo, in a thread that may be abandoned, with a separate connection to the store.
    (To a lost store it takes minutes.)

    Raises:
        FailureError: when a member is dead, silent or does not create the pipeline, or they cannot connect.
        OSError: if this process has too few file descriptors, for lack of which a thread of Gloo ends the process.
    """
    check_descriptors(2 * member.size + 6)  # while it connects; then ``size + 3``

    def make() -> Any:
        own = store.clone()
        own.set(f"came/{member.rank}", "")
        try:
            gloo: Any = dist.ProcessGroupGloo(own, member.rank, member.size, timeout=member.limit)
        except RuntimeError as error:
            if missing := [rank for rank in range(member.size) if not own.check([f"came/{rank}"])]:
                cause = f"did not connect within {member.timeout:g} s; see what it is doing"
                raise lost_peer(f"rank {missing[0]} {cause}, or set a longer timeout", missing[0]) from error
            raise
        # Then all have read the keys, which the store would keep. A barrier would connect only some pairs of ranks with
        # TORCH_GLOO_LAZY_INIT=1, and the others would look for the keys later.
        gloo.alltoall_base(torch.empty(member.size), torch.zeros(member.size), [], []).wait()
        for key in (f"came/{member.rank}", f"0/{member.rank}"):
            own.delete_key(key)
        return gloo

    try:
        return attended(make, member.lost, 2 * member.limit)  # Gloo times out first, with a better message
    except FailureError:
        raise
    except RuntimeError as error:
        raise lost_peer(f"the ranks cannot connect: {first_line(error)}", None) from error


@contextlib.contextmanager
def _unless_set(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables temporarily, except those already set, also by their old names."""
    added = [name for name in variables if not {name, name.removeprefix("TORCH_")} & os.environ.keys()]
    os.environ.update({name: variables[name] for name in added})
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


def _nccl_group(member: Membership, store: Any) -> Any:
    """A group of NCCL, with Gloo for tensors on the host.

    It is not bound to its device: a bound group has one communicator, and so one stream, for all pairs of ranks; this
    one creates one per pair at their first message. Its streams have high priority, so that none is also a stage's:
    torch allots streams round-robin per priority. Not yet run on a GPU.
    """
    options = dist.ProcessGroupNCCL.Options()
    torch_private.set_timeout(options, member.limit)
    options.is_high_priority_stream = True
    options.global_ranks_in_group = list(member.ranks)
    with _unless_set(_WATCHDOG):
        nccl = dist.ProcessGroupNCCL(store, member.rank, member.size, options)
    gloo, kinds = _gloo(member, distributed_c10d.PrefixStore("host", store)), dist.ProcessGroup.BackendType
    backends = {member.device: (kinds.NCCL, nccl), CPU: (kinds.GLOO, gloo)}
    return torch_private.unregistered_group(store, member.rank, member.size, backends)
