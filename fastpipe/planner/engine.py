"""The search's three steps, in C++ where the planning library is built, else in Python: the same numbers either way."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import numpy as np

from fastpipe import native_plan
from fastpipe.planner import native
from fastpipe.planner.construct import Constructor
from fastpipe.planner.retime import retime as _retime
from fastpipe.planner.search import Search
from fastpipe.planner.tasks import Floats, Ints, Tasks

T = TypeVar("T")
R = TypeVar("R")
Annealing = native.Search | Search


def is_native() -> bool:
    """Whether the library is there."""
    return native_plan.library() is not None


def _workers() -> int:
    """Threads that are of use: one where Python does the work."""
    return (os.cpu_count() or 1) if is_native() else 1


def turns(count: int) -> int:
    """One after the other, how many items a thread has of so many."""
    return -(-count // _workers())


@contextmanager
def at_once(call: Callable[[T], R], items: Sequence[T]) -> Iterator[Iterator[R]]:
    """The answers for all items, in their order: by several threads where the library, which lets go of Python's lock,
    does the work. What an answer is does not depend on it."""
    workers = min(len(items), _workers())
    if workers < 2:
        yield map(call, items)
        return
    with ThreadPoolExecutor(workers, "fastpipe-plan") as threads:
        futures = [threads.submit(call, item) for item in items]
        try:
            yield (future.result() for future in futures)
        finally:
            for future in futures:
                future.cancel()


def retime(tasks: Tasks, order: Ints) -> tuple[Floats, Floats] | None:
    """Starts and ends of every task, or None if the order cannot run."""
    if is_native():
        return native.retime(tasks, order)
    found = _retime(tasks, order)
    return None if found is None else (np.array(found[0]), np.array(found[1]))


def measure(tasks: Tasks, order: Ints, span: bool) -> float:
    """The makespan or the span of an order; infinite if it cannot run."""
    times = retime(tasks, order)
    if times is None:
        return float("inf")
    starts, ends = times
    last = ends[order[tasks.first[1:] - 1]]
    begin = starts[order[tasks.first[:-1]]] if span else 0.0
    return float((last - begin).max())


def search(tasks: Tasks, order: Ints, *, span: bool, seed: int) -> Annealing | None:
    """An annealing that has begun; None if the order cannot run or fit into memory."""
    made = (native.Search if is_native() else Search)(tasks, order, span, seed)
    return made if made.begin() else None


def construct(
    tasks: Tasks, keys: Sequence[Floats], reserves: Sequence[Floats], patience: Sequence[float], span: bool
) -> list[tuple[Ints, float]]:
    """The orders that list scheduling gives, and their objectives: infinite where it came to a stop."""
    if is_native():
        found = native.construct(tasks, np.array(keys), np.array(reserves), np.array(patience), span)
        if found is None:
            raise MemoryError("no memory for list scheduling")
        return found
    made = []
    for one in zip(keys, reserves, patience, strict=True):
        order = np.array(Constructor(tasks, *one).run() or (), dtype=np.int32)
        made.append((order, measure(tasks, order, span) if len(order) else float("inf")))
    return made
