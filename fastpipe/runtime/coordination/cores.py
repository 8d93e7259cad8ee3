"""Pins each rank of a host to its own cores during a step, if FASTPIPE_PIN is 1.

Without pinning the kernel may run two ranks on one core for seconds while another core idles. Ranks are pinned only if
torchrun started them, as it sets the number of local ranks and this rank's index, and if nothing else has set the
affinity: the process may use the same cores as torchrun.

Only the thread that runs the step is pinned, with the threads that it starts meanwhile, and only during the step.
DataLoader workers, the optimizer and other threads use all cores. Processes started within a step, such as the
compilers of torch.compile, inherit the rank's cores.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

VARIABLE = "FASTPIPE_PIN"
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
            return f"{', '.join(map(str, sorted(self.own)))} while a step runs ({VARIABLE})"
        return f"any: {VARIABLE} is set, but {self.why}" if self.why else ""


def find_cores(num_processes: int, device: torch.device, environment: Mapping[str, str] = os.environ) -> Cores:
    """This process's share of the cores, if requested and possible.

    Raises:
        ValueError: if FASTPIPE_PIN is not 0 or 1.
    """
    requested = environment.get(VARIABLE, "0")
    if requested not in ("0", "1"):
        raise ValueError(f"{VARIABLE} = {requested!r}: set it to 1 to keep each rank on cores of its own, or to 0")
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
