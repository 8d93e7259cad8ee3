"""This process among the others: its job, attempt and host, the number of ranks there, and their cores.

torchrun's agent keeps one store for all attempts (``TORCHELASTIC_USE_AGENT_STORE``). So a restarted process finds the
keys of its killed predecessors there, such as the addresses of Gloo's connections, and connects to those
(`docs/reliability.md`). `name_attempt` makes a prefix that no earlier attempt has used. The count of restarts is not
one: two agents count separately.

With FASTPIPE_PIN=1 each rank has its own cores during a step. Without pinning the kernel may run two ranks on one core
for seconds while another core idles. Ranks are pinned only if torchrun started them, as it sets the number of local
ranks and this rank's index, and if nothing else has set the affinity: the process may use the same cores as torchrun.
Only the thread that runs the step is pinned, with the threads that it starts meanwhile, and only during the step.
DataLoader workers, the optimizer and other threads use all cores. Processes started within a step, such as the
compilers of torch.compile, inherit the rank's cores.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fastpipe.runtime.common import lost_peer, torch_private, waiting

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


_JOB = ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID")


def job_name() -> str:
    """The job of this process, as its launcher names it; empty if it does not."""
    return next((f"{name}={os.environ[name]}" for name in _JOB if os.environ.get(name)), "")


def check_job(store: Any, *, decides: bool | None = None) -> None:
    """Refuse a process that has joined the store of another job.

    Args:
        store: shared by the processes.
        decides: whether this process names the store's job; None: the first one that calls this does.
    """
    own, key = job_name() or "no name", "fastpipe/job"
    if decides:
        store.set(key, own)
        return
    first = (store.compare_set(key, "", own) if decides is None else store.get(key)).decode()
    if first != own:
        raise ValueError(
            f"MASTER_ADDR, MASTER_PORT = {os.environ.get('MASTER_ADDR')}, {os.environ.get('MASTER_PORT')}: this "
            f"process is of the job {own}, and the processes there are of {first}; give each job a port of its own"
        )


def shares_store() -> bool:
    """Whether the store is one that earlier attempts may have written to."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def name_attempt(store: Any, rank: int, size: int, timeout: float) -> str:
    """A name for this attempt, the same on all of its processes and on no others.

    Each process writes a random word. The first rank proposes the list of them until everyone has acknowledged the same
    list; a word of a process that was killed is never acknowledged, and is replaced by that of its successor.

    Args:
        store: shared by the processes, and by those of earlier attempts.

    Raises:
        FailureError: if a process does not come in time.
    """
    own = secrets.token_hex(8)
    words, answers = ([f"fastpipe/{what}/{other}" for other in range(size)] for what in ("attempt", "acknowledged"))
    store.set(words[rank], own)
    for pause in waiting(timeout, lambda: None):
        if rank == 0 and store.check(words):
            store.set("fastpipe/proposed", b",".join(store.multi_get(words)))
        proposed = store.get("fastpipe/proposed").decode() if store.check(["fastpipe/proposed"]) else ""
        if own in proposed.split(",")[rank : rank + 1]:
            store.set(answers[rank], proposed)
            if rank == 0 and store.check(answers) and set(store.multi_get(answers)) == {proposed.encode()}:
                store.set("fastpipe/agreed", proposed)
            if store.check(["fastpipe/agreed"]) and store.get("fastpipe/agreed").decode() == proposed:
                return hashlib.sha1(proposed.encode()).hexdigest()[:16]
        time.sleep(pause)
    missing = [other for other, key in enumerate(words) if not store.check([key])]
    who = f"rank {missing[0]} did not start" if missing else "the ranks did not agree on a start"
    cause = f"{who} within {timeout:g} s; see what it is doing, or set a longer timeout"
    raise lost_peer(cause, next(iter(missing), None))


PIN = "FASTPIPE_PIN"
_PLACED = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
"""Variables that make OpenMP place its threads."""
_TOPOLOGY = "/sys/devices/system/cpu/cpu{}/topology/{}"


@dataclass(frozen=True)
class Cores:
    """The cores on which this process runs its steps.

    Attributes:
        own: the cores; None if the process is not pinned.
        why: why pinning was requested and not possible.
    """

    own: frozenset[int] | None = None
    why: str = ""

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Pin the calling thread within this context, unless its affinity has changed since."""
        before = os.sched_getaffinity(0) if self.own is not None else set()
        if self.own is None or not self.own < before:
            yield
            return
        os.sched_setaffinity(0, self.own)
        try:
            yield
        finally:
            os.sched_setaffinity(0, before)

    def __str__(self) -> str:
        """For `Pipeline.describe`; empty if pinning was not requested."""
        if self.own is not None:
            return f"{', '.join(map(str, sorted(self.own)))} while a step runs ({PIN})"
        return f"any: {PIN} is set, but {self.why}" if self.why else ""


def find_cores(num_processes: int, device: torch.device, environment: Mapping[str, str] = os.environ) -> Cores:
    """This process's share of the cores, if requested and possible.

    Raises:
        ValueError: if FASTPIPE_PIN is not 0 or 1.
    """
    requested = environment.get(PIN, "0")
    if requested not in ("0", "1"):
        raise ValueError(f"{PIN} = {requested!r}: set it to 1 to keep each rank on cores of its own, or to 0")
    if requested == "0":
        return Cores()
    rank, size = (environment.get(name, "") for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    if num_processes == 1:
        return Cores(why="the ranks are threads of one process")
    if device.type != "cpu":
        return Cores(why=f"the stages are on {device.type}")
    if not (rank.isdecimal() and size.isdecimal() and int(rank) < int(size)):
        return Cores(why="torchrun has not started the processes (LOCAL_RANK, LOCAL_WORLD_SIZE)")
    if placed := next((name for name in _PLACED if name in environment), None):
        return Cores(why=f"OpenMP places threads ({placed})")
    return _share(int(rank), int(size))


def _share(rank: int, size: int) -> Cores:
    cores = os.sched_getaffinity(0)
    try:
        if cores != os.sched_getaffinity(os.getppid()):
            return Cores(why=f"this process is pinned to {', '.join(map(str, sorted(cores)))}")
        share = len(cores) // size
        if share == 0:
            return Cores(why=f"{size} ranks have {len(cores)} cores")
        if (threads := torch.get_num_threads()) > share:
            return Cores(
                why=f"a rank has {threads} threads and {share} of {len(cores)} cores; set OMP_NUM_THREADS={share}"
            )
        own = Cores(frozenset(by_place(cores)[rank * share : (rank + 1) * share]))
        with own.kept():  # pinning may be denied
            return own
    except OSError as error:
        return Cores(why=f"the system does not allow it ({error.strerror})")


def by_place(cores: Collection[int]) -> list[int]:
    """Cores sorted by socket and physical core, so that neighbours share caches."""

    def place(core: int) -> tuple[int, int, int]:
        found = [0, 0]
        with contextlib.suppress(OSError, ValueError):  # no topology: keep the order of their numbers
            found = [int(Path(_TOPOLOGY.format(core, name)).read_text()) for name in ("physical_package_id", "core_id")]
        return found[0], found[1], core

    return sorted(cores, key=place)
