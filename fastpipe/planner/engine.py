"""The steps of a plan's search: by the planning library; without it list scheduling alone, in Python."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import numpy as np

from fastpipe import native_plan
from fastpipe.planner import listing, native
from fastpipe.planner.clock import Clock
from fastpipe.planner.tasks import Floats, Ints, Tasks

T = TypeVar("T")
R = TypeVar("R")


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
def at_once(call: Callable[[T], R], items: Sequence[T], clock: Clock) -> Iterator[Iterator[R]]:
    """The answers for all items, in their order: by several threads where the library, which releases the GIL, does
    the work. What an answer is does not depend on it. An exception here, Ctrl-C among them, stops the clock, so that
    the calls end soon."""
    workers = min(len(items), _workers())
    if workers < 2:
        yield map(call, items)
        return
    with ThreadPoolExecutor(workers, "fastpipe-plan") as threads:
        futures = [threads.submit(call, item) for item in items]
        try:
            yield (future.result() for future in futures)
        except BaseException:  # raised again
            clock.stop()
            raise
        finally:
            for future in futures:
                future.cancel()


def retime(tasks: Tasks, order: Ints) -> tuple[Floats, Floats] | None:
    """Starts and ends of every task, or None if the order cannot run."""
    return native.retime(tasks, order) if is_native() else listing.retime(tasks, order)


def measure(tasks: Tasks, order: Ints, span: bool) -> float:
    """The makespan or the span of an order; infinite if it cannot run."""
    times = retime(tasks, order)
    if times is None:
        return float("inf")
    starts, ends = times
    last = ends[order[tasks.first[1:] - 1]]
    begin = starts[order[tasks.first[:-1]]] if span else 0.0
    return float((last - begin).max())


def search(tasks: Tasks, order: Ints, *, span: bool, seed: int) -> native.Search | None:
    """An annealing that has begun; None if the order cannot run or fit into memory. The library must be there."""
    made = native.Search(tasks, order, span, seed)
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
        order = np.array(listing.Listing(tasks, *one).run() or (), dtype=np.int32)
        made.append((order, measure(tasks, order, span) if len(order) else float("inf")))
    return made
