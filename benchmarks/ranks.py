"""Processes that measure together: each is a rank, takes orders, and starts what it times when the others do.

All that is compared runs in the same processes, in turns, round after round, so that whatever disturbs the machine
disturbs all of it.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

Tasks = Mapping[str, Callable[[], Any]]
"""What one rank can be ordered to do, by name."""

START_TIMEOUT = 60.0


class Ranks:
    """Processes forked from this one, each a rank of a Gloo group.

    They are forked so that ``make`` may be any function; this process must therefore not have used autograd before.

    Args:
        num_ranks: how many.
        make: called on every rank with its number; gives its tasks.
        pin: whether each rank is kept on one core: ``"auto"``, where there are enough for all, ``"always"`` or
            ``"never"``. A kernel that is free to choose may keep two ranks on one core while the other one idles.
    """

    def __init__(self, num_ranks: int, make: Callable[[int], Tasks], *, pin: str = "auto") -> None:
        context = multiprocessing.get_context("fork")
        barrier = context.Barrier(num_ranks, timeout=START_TIMEOUT)
        cores = sorted(os.sched_getaffinity(0))
        pinned = is_pinned(num_ranks, pin)
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(num_ranks):
            ours, theirs = context.Pipe()
            core = cores[rank % len(cores)] if pinned else None
            arguments = (rank, num_ranks, core, barrier, theirs, make)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        # torchrun, too, has its store in a process that is no rank. It has threads, beside which a process that is
        # forked may wait for ever for what one of them held at that moment: so all are forked before.
        self._store: dist.TCPStore | None = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for pipe in self._pipes:
            pipe.send(self._store.port)
        self._answers()

    def call(self, name: str, times: int = 1) -> list[Any]:
        """What the task returned, the last time, on each rank."""
        return [answer for _, _, answer in self._order(name, times, answers=True)]

    def time(self, name: str, times: int = 1) -> float:
        """Seconds a time, from the first rank's start to the last one's end."""
        spans = self._order(name, times, answers=False)
        return (max(end for _, end, _ in spans) - min(start for start, _, _ in spans)) / times

    def close(self) -> None:
        """End the processes."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        for process in self._processes:
            process.join(10)
            if process.is_alive():
                process.kill()
        self._store = None  # ends its threads

    def _order(self, name: str, times: int, *, answers: bool) -> list[tuple[float, float, Any]]:
        for pipe in self._pipes:
            pipe.send((name, times, answers))
        return self._answers()

    def _answers(self) -> list[Any]:
        answers = []
        for rank, pipe in enumerate(self._pipes):
            try:
                answers.append(pipe.recv())
            except EOFError:
                raise RuntimeError(f"the process of rank {rank} ended; what it wrote stands above") from None
        return answers


def is_pinned(num_ranks: int, pin: str) -> bool:
    """Whether each rank is kept on one core."""
    return pin == "always" or (pin == "auto" and num_ranks <= len(os.sched_getaffinity(0)))


def placing(num_ranks: int, pin: str) -> str:
    """Which ranks are measured, in words: a pipeline's are placed by the kernel unless FASTPIPE_PIN is set."""
    if is_pinned(num_ranks, pin):
        return "each rank is kept on one core, as FASTPIPE_PIN=1 does it (--pin never measures without)"
    return "the kernel places the ranks, as it does without FASTPIPE_PIN"


@contextlib.contextmanager
def ranks(num_ranks: int, make: Callable[[int], Tasks], *, pin: str = "auto") -> Iterator[Ranks]:
    """Ranks that end with the block."""
    made = Ranks(num_ranks, make, pin=pin)
    try:
        yield made
    finally:
        made.close()


def _serve(
    rank: int, num_ranks: int, core: int | None, barrier: Any, pipe: Connection, make: Callable[[int], Tasks]
) -> None:
    status = 1
    try:
        torch.set_num_threads(1)
        if core is not None:
            os.environ |= {"FASTPIPE_PIN": "1", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(num_ranks)}
        store = dist.TCPStore("127.0.0.1", pipe.recv(), is_master=False, wait_for_workers=False)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
        tasks = make(rank)
        if core is not None:  # pipelines have found their cores, the same; this is for all else that is measured
            os.sched_setaffinity(0, {core})
        pipe.send(None)
        while (order := pipe.recv()) is not None:
            name, times, answers = order
            start, end, answer = _timed(tasks[name], times, barrier)
            pipe.send((start, end, answer if answers else None))
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        # neither schedules of torch nor groups of Gloo end well when others have ended already, and nothing is lost
        sys.stderr.flush()
        os._exit(status)


def _timed(task: Callable[[], Any], times: int, barrier: Any) -> tuple[float, float, Any]:
    barrier.wait()
    # one clock for all processes of the machine
    start = time.perf_counter()
    for _ in range(times):
        answer = task()
    return start, time.perf_counter(), answer


def interleaved(
    measures: Mapping[str, Callable[[], float]], rounds: int, label: str, *, warm_up: int = 2
) -> dict[str, list[float]]:
    """Call every measure once a round, in an order that alternates; the first rounds warm up and are dropped."""
    found: dict[str, list[float]] = {name: [] for name in measures}
    for number in range(rounds + warm_up):
        names: Sequence[str] = list(measures)
        for name in names if number % 2 else reversed(names):
            taken = measures[name]()
            if number >= warm_up:
                found[name].append(taken)
        progress(f"{label}: round {max(0, number + 1 - warm_up)} of {rounds}")
    progress("")
    return found


def progress(text: str) -> None:
    """One line on a terminal, which the next one replaces."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
