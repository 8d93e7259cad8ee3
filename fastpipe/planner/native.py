"""The planner's searches in the planning library (csrc/plan), which must be there; see `fastpipe.native_plan`."""

from __future__ import annotations

import ctypes
import weakref

import numpy as np

from fastpipe.native_plan import loaded
from fastpipe.planner.tasks import Floats, Ints, Tasks


class _Tasks(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int32) for name in ("num_ranks", "num_tasks")),
        *((name, ctypes.c_void_p) for name in ("first", "seconds", "source", "transfer")),
        ("num_local", ctypes.c_int32),
        *((name, ctypes.c_void_p) for name in ("local", "next", "take", "give", "limit")),
    ]


class _TasksView:
    """Tasks as the library reads them; they keep their own arrays alive."""

    def __init__(self, tasks: Tasks) -> None:
        self.tasks = tasks
        names = ("first", "seconds", "source", "transfer", "local", "next", "take", "give", "limit")
        data = [getattr(tasks, name).ctypes.data for name in names]
        self.struct = _Tasks(tasks.num_ranks, len(tasks), *data[:4], len(tasks.local), *data[4:])
        self.address = ctypes.addressof(self.struct)


def retime(tasks: Tasks, order: Ints) -> tuple[Floats, Floats] | None:
    """Starts and ends of every task, or None if the order cannot run; the library must be there."""
    view, order = _TasksView(tasks), np.ascontiguousarray(order, dtype=np.int32)
    starts, ends = np.empty(len(tasks)), np.empty(len(tasks))
    found = loaded().fastpipe_plan_retime(view.address, order.ctypes.data, starts.ctypes.data, ends.ctypes.data)
    return (starts, ends) if found else None


class Search:
    """Annealing over the orders of tasks (csrc/plan/search.h); the library must be there."""

    def __init__(self, tasks: Tasks, order: Ints, span: bool, seed: int) -> None:
        self.view, self.size = _TasksView(tasks), len(tasks)
        self.start, self.span, self.seed = np.array(order, dtype=np.int32), span, seed
        self.handle: int | None = None

    def begin(self) -> bool:
        """Whether the order can run and fits into memory."""
        found = loaded()
        self.handle = found.fastpipe_plan_search(self.view.address, self.start.ctypes.data, self.span, self.seed)
        if self.handle:
            # not at exit, when a thread of a plan that was interrupted may still be in `improve`
            weakref.finalize(self, found.fastpipe_plan_end_search, self.handle).atexit = False
        return bool(self.handle)

    def improve(self, attempts: int, hot: float, cold: float) -> None:
        """Try so many changes, while the heat falls from the first to the second."""
        if not loaded().fastpipe_plan_improve(self.handle, attempts, hot, cold):
            raise MemoryError("no memory for a search")

    def found(self) -> tuple[Ints, float]:
        """The best order so far, and its objective."""
        best, objective = np.empty(self.size, dtype=np.int32), ctypes.c_double()
        if not loaded().fastpipe_plan_best(self.handle, best.ctypes.data, ctypes.addressof(objective)):
            raise MemoryError("no memory for a search")
        return best, objective.value


def construct(
    tasks: Tasks, keys: Floats, reserves: Floats, patience: Floats, span: bool
) -> list[tuple[Ints, float]] | None:
    """`fastpipe.planner.engine.construct`; the library must be there, and None says that memory was not."""
    view, count = _TasksView(tasks), len(patience)
    given = [np.ascontiguousarray(array, dtype=np.float64) for array in (keys, reserves, patience)]
    orders, objectives = np.empty((count, len(tasks)), dtype=np.int32), np.empty(count)
    done = loaded().fastpipe_plan_construct(
        *(view.address, span, count, *(array.ctypes.data for array in given)),
        *(orders.ctypes.data, objectives.ctypes.data),
    )
    return list(zip(orders, objectives.tolist(), strict=True)) if done else None
