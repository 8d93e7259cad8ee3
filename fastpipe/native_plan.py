"""The planning library `_plan` (csrc/plan), called through ctypes: the same results as the Python code, sooner.

Every function here may answer "not by me" (None or False): the caller then runs its Python code, which is the
specification and has the words for what is wrong. So nothing depends on the library being there.
"""

from __future__ import annotations

import ctypes
import sysconfig
import weakref
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from fastpipe.cost import CostModel
    from fastpipe.planner.tasks import Tasks
    from fastpipe.program import Program
    from fastpipe.schedule import Schedule

VERSION = 8
"""Of the C interface, see csrc/plan/plan.h: a library of another one is left alone."""

PATH = Path(__file__).with_name("_plan" + (sysconfig.get_config_var("EXT_SUFFIX") or ".so"))
_INT_MAX = 2**31 - 1

Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float64]
Numbers = npt.NDArray[np.int64]


class _Orders(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int32) for name in ("num_ranks", "num_stages", "num_microbatches", "num_routes")),
        ("routes", ctypes.c_void_p),
        ("columns", ctypes.c_void_p),
        ("counts", ctypes.c_void_p),
        ("num_channels", ctypes.c_int32),
        ("channels", ctypes.c_void_p),
        ("forward_only", ctypes.c_int32),
    ]


class _Costs(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("forward", "backward", "backward_input", "backward_weight")),
        ("overlapped", ctypes.c_void_p),
        ("has_overlapped", ctypes.c_int32),
        *((name, ctypes.c_void_p) for name in ("latency", "bandwidth", "boundary_bytes")),
    ]


class _Tasks(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int32) for name in ("num_ranks", "num_tasks")),
        *((name, ctypes.c_void_p) for name in ("first", "seconds", "source", "transfer")),
        ("num_local", ctypes.c_int32),
        *((name, ctypes.c_void_p) for name in ("local", "next", "take", "give", "limit")),
    ]


class _Rounds(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int32) for name in ("num_ranks", "num_microbatches")),
        *((name, ctypes.c_int64) for name in ("count", "num_keys")),
        *((name, ctypes.c_void_p) for name in ("forward", "backward")),
        ("limit", ctypes.c_int64),
    ]


class _Beam(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int32) for name in ("num_ranks", "num_rounds", "num_microbatches", "width")),
        ("limit", ctypes.c_int64),
    ]


class _ZeroBubble(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int32) for name in ("num_ranks", "num_microbatches")),
        *((name, ctypes.c_void_p) for name in ("forward", "backward_input", "backward_weight")),
        ("comm", ctypes.c_double),
        ("limit", ctypes.c_void_p),
    ]


class _Steps(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int32) for name in ("num_ranks", "num_stages", "num_microbatches")),
        *((name, ctypes.c_void_p) for name in ("route", "first", "slot", "kind", "stage", "microbatch")),
        ("limit", ctypes.c_int64),
        *((name, ctypes.c_double) for name in ("forward", "backward_input", "backward_weight", "comm")),
    ]


_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "version": (ctypes.c_int32,),
    "validate_schedule": (ctypes.c_int32, ctypes.c_void_p),
    "lower": (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32),
    "num_channels": (ctypes.c_int32, ctypes.c_void_p),
    "channels": (None, ctypes.c_void_p, ctypes.c_void_p),
    "num_instructions": (ctypes.c_int64, ctypes.c_void_p, ctypes.c_int32),
    "write": (ctypes.c_int32, ctypes.c_void_p, ctypes.c_int32, ctypes.c_void_p),
    "free": (None, ctypes.c_void_p),
    "validate_program": (ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p),
    "simulate": (ctypes.c_int32, *[ctypes.c_void_p] * 5),
    "retime": (ctypes.c_int32, *[ctypes.c_void_p] * 4),
    "search": (ctypes.c_void_p, *[ctypes.c_void_p] * 2, ctypes.c_int32, ctypes.c_uint64),
    "improve": (ctypes.c_int32, ctypes.c_void_p, ctypes.c_int64, *[ctypes.c_double] * 2),
    "best": (ctypes.c_int32, *[ctypes.c_void_p] * 3),
    "end_search": (None, ctypes.c_void_p),
    "compact": (ctypes.c_int64, *[ctypes.c_void_p] * 2, ctypes.c_int64, *[ctypes.c_void_p] * 2),
    "slack": (ctypes.c_int64, *[ctypes.c_void_p] * 2, ctypes.c_int64, *[ctypes.c_void_p] * 2),
    "beam": (ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64, *[ctypes.c_void_p] * 3),
    "loop": (ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64, *[ctypes.c_void_p] * 2),
    "fill": (ctypes.c_int32, *[ctypes.c_void_p] * 3),
    "zb_auto": (ctypes.c_int32, *[ctypes.c_void_p] * 2),
    "zbv": (ctypes.c_int32, *[ctypes.c_void_p] * 2),
    "construct": (ctypes.c_int32, ctypes.c_void_p, *[ctypes.c_int32] * 2, *[ctypes.c_void_p] * 5),
}


@cache
def library() -> ctypes.CDLL | None:
    """The library, or None where there is none that fits; see `status`."""
    try:
        found = ctypes.CDLL(str(PATH))
        for name, (result, *arguments) in _SIGNATURES.items():
            function = getattr(found, f"fastpipe_plan_{name}")
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError):
        return None
    return found if found.fastpipe_plan_version() == VERSION else None


def status() -> str:
    """One sentence: whether planning is native, or why not."""
    if library() is not None:
        return f"{PATH.name} is loaded: planning is native."
    if not PATH.exists():
        return f"{PATH.name} was not built: planning runs in Python, with the same results."
    return f"{PATH.name} is of another version of fastpipe: planning runs in Python until it is built again."


class _View:
    """Orders as the library reads them; keeps the arrays alive."""

    def __init__(self, orders: Schedule | Program, channels: Sequence[tuple[int, int, int]] = ()) -> None:
        placement = orders.placement
        self.columns = [np.ascontiguousarray(columns, dtype=np.int32) for columns in orders.columns]
        self.routes = np.array(placement.routes, dtype=np.int32)
        self.channels = np.array(channels, dtype=np.int32).reshape(-1, 3)
        self.counts = np.array([columns.shape[1] for columns in self.columns], dtype=np.int64)
        self.pointers = _pointers(self.columns)
        self.struct = _Orders(
            placement.num_ranks,
            placement.num_stages,
            orders.num_microbatches,
            len(placement.routes),
            self.routes.ctypes.data,
            self.pointers.ctypes.data,
            self.counts.ctypes.data,
            len(self.channels),
            self.channels.ctypes.data,
            orders.forward_only,
        )
        self.address = ctypes.addressof(self.struct)


def _pointers(arrays: Sequence[npt.NDArray[Any]]) -> npt.NDArray[np.uintp]:
    return np.array([array.ctypes.data for array in arrays], dtype=np.uintp)


def is_valid_schedule(schedule: Schedule) -> bool:
    """Whether it was found complete and able to run; False also when that is left to the Python code."""
    found = library()
    if found is None:
        return False
    view = _View(schedule)
    return bool(found.fastpipe_plan_validate_schedule(view.address))


def is_valid_program(program: Program, channels: Sequence[tuple[int, int, int]], lanes: Sequence[int]) -> bool:
    """Whether it was proved; False also when that is left to the Python code."""
    found = library()
    if found is None:
        return False
    view, lane_of = _View(program, channels), np.array(lanes, dtype=np.int32)
    return bool(found.fastpipe_plan_validate_program(view.address, lane_of.ctypes.data))


def lower(schedule: Schedule, ahead: int, bounded: int) -> tuple[list[tuple[int, int, int]], list[Ints]] | None:
    """The channels (source, destination, kind) and every rank's instructions.

    Args:
        schedule: compute and stage actions only.
        ahead: how many actions before its consumer a receive is posted.
        bounded: how many sends are under way at most; 0 to wait only for those that are proven complete.
    """
    found = library()
    if found is None:
        return None
    view = _View(schedule)
    handle = found.fastpipe_plan_lower(view.address, min(ahead, _INT_MAX), bounded)
    if not handle:
        return None
    try:
        return _read_lowered(found, handle, len(view.columns))
    finally:
        found.fastpipe_plan_free(handle)


def _read_lowered(
    found: ctypes.CDLL, handle: int, num_ranks: int
) -> tuple[list[tuple[int, int, int]], list[Ints]] | None:
    channels = np.empty((found.fastpipe_plan_num_channels(handle), 3), dtype=np.int32)
    found.fastpipe_plan_channels(handle, channels.ctypes.data)
    written = []
    for rank in range(num_ranks):
        columns = np.empty((7, found.fastpipe_plan_num_instructions(handle, rank)), dtype=np.int32)
        if not found.fastpipe_plan_write(handle, rank, columns.ctypes.data):
            return None
        columns.setflags(write=False)
        written.append(columns)
    return [(a, b, kind) for a, b, kind in channels.tolist()], written


def simulate(
    program: Program, channels: Sequence[tuple[int, int, int]], lanes: Sequence[int], cost: CostModel
) -> tuple[list[Floats], list[Floats]] | None:
    """Starts and ends of every rank's instructions; None where the program does not come to its end."""
    found = library()
    if found is None:
        return None
    view, lane_of = _View(program, channels), np.array(lanes, dtype=np.int32)
    starts, ends = ([np.empty(count) for count in view.counts.tolist()] for _ in range(2))
    seconds = _Seconds(cost, program.placement.num_stages, channels)
    pointers = _pointers(starts), _pointers(ends)
    done = found.fastpipe_plan_simulate(
        view.address, lane_of.ctypes.data, seconds.address, *(array.ctypes.data for array in pointers)
    )
    return (starts, ends) if done else None


class _Seconds:
    """Costs as the library reads them; keeps the arrays alive."""

    def __init__(self, cost: CostModel, num_stages: int, channels: Sequence[tuple[int, int, int]]) -> None:
        fused = cost.overlapped is not None
        names = ["forward", "backward", "backward_input", "backward_weight", "overlapped" if fused else "forward"]
        links = [cost.link(source, destination) for source, destination, _ in channels]
        self.arrays = [
            *(cost.per_stage(name, num_stages) for name in names),
            *(np.array([link[i] for link in links], dtype=np.float64) for i in range(2)),
            cost.per_stage("activation_bytes", num_stages),
        ]
        data = [array.ctypes.data for array in self.arrays]
        self.struct = _Costs(*data[:5], fused, *data[5:])
        self.address = ctypes.addressof(self.struct)


class _TasksView:
    """Tasks as the library reads them; they keep their own arrays alive."""

    def __init__(self, tasks: Tasks) -> None:
        self.tasks = tasks
        names = ("first", "seconds", "source", "transfer", "local", "next", "take", "give", "limit")
        data = [getattr(tasks, name).ctypes.data for name in names]
        self.struct = _Tasks(tasks.num_ranks, len(tasks), *data[:4], len(tasks.local), *data[4:])
        self.address = ctypes.addressof(self.struct)


def retime(tasks: Tasks, order: Ints) -> tuple[Floats, Floats] | None:
    """`fastpipe.planner.retime.retime`; the library must be there."""
    view, order = _TasksView(tasks), np.ascontiguousarray(order, dtype=np.int32)
    starts, ends = np.empty(len(tasks)), np.empty(len(tasks))
    found = _loaded().fastpipe_plan_retime(view.address, order.ctypes.data, starts.ctypes.data, ends.ctypes.data)
    return (starts, ends) if found else None


class Search:
    """`fastpipe.planner.search.Search`; the library must be there."""

    def __init__(self, tasks: Tasks, order: Ints, span: bool, seed: int) -> None:
        self.view, self.size = _TasksView(tasks), len(tasks)
        self.start, self.span, self.seed = np.array(order, dtype=np.int32), span, seed
        self.handle: int | None = None

    def begin(self) -> bool:
        """Whether the order can run and fits into memory."""
        found = _loaded()
        self.handle = found.fastpipe_plan_search(self.view.address, self.start.ctypes.data, self.span, self.seed)
        if self.handle:
            weakref.finalize(self, found.fastpipe_plan_end_search, self.handle)
        return bool(self.handle)

    def improve(self, attempts: int, hot: float, cold: float) -> None:
        """Try so many changes, while the heat falls from the first to the second."""
        if not _loaded().fastpipe_plan_improve(self.handle, attempts, hot, cold):
            raise MemoryError("no memory for a search")

    def found(self) -> tuple[Ints, float]:
        """The best order so far, and its objective."""
        best, objective = np.empty(self.size, dtype=np.int32), ctypes.c_double()
        if not _loaded().fastpipe_plan_best(self.handle, best.ctypes.data, ctypes.addressof(objective)):
            raise MemoryError("no memory for a search")
        return best, objective.value


def construct(
    tasks: Tasks, keys: Floats, reserves: Floats, patience: Floats, span: bool
) -> list[tuple[Ints, float]] | None:
    """`fastpipe.planner.engine.construct`; the library must be there, and None says that memory was not."""
    view, count = _TasksView(tasks), len(patience)
    given = [np.ascontiguousarray(array, dtype=np.float64) for array in (keys, reserves, patience)]
    orders, objectives = np.empty((count, len(tasks)), dtype=np.int32), np.empty(count)
    done = _loaded().fastpipe_plan_construct(
        *(view.address, span, count, *(array.ctypes.data for array in given)),
        *(orders.ctypes.data, objectives.ctypes.data),
    )
    return list(zip(orders, objectives.tolist(), strict=True)) if done else None


class Streams:
    """The rounds of F and of I in the order in which they start, as the library reads them.

    Args:
        forward: rounds of F, as ``round * m + microbatch``.
        backward: as many rounds of I, whose numbers follow.
        num_microbatches: m.
    """

    def __init__(self, forward: npt.ArrayLike, backward: npt.ArrayLike, num_microbatches: int) -> None:
        self.streams = [np.ascontiguousarray(keys, dtype=np.int32) for keys in (forward, backward)]
        count = len(self.streams[0])
        self.fixed = num_microbatches, count, 2 * count, *(array.ctypes.data for array in self.streams)

    def _view(self, num_ranks: int, limit: int) -> _Rounds:
        return _Rounds(num_ranks, *self.fixed, limit)

    def play(
        self, model: str, num_ranks: int, limit: int, rule: Sequence[int], give_up: int
    ) -> tuple[Numbers, int] | None:
        """`fastpipe.schedules.wave_ticks`: ``"compact"`` or ``"slack"``; the library must be there."""
        view, numbers = self._view(num_ranks, limit), (ctypes.c_int32 * len(rule))(*rule)
        count = 2 * len(self.streams[0])
        ticks, keys = np.empty(count, dtype=np.int64), np.empty(count, dtype=np.int32)
        places = ctypes.addressof(view), ctypes.addressof(numbers), give_up, ticks.ctypes.data, keys.ctypes.data
        length = getattr(_loaded(), f"fastpipe_plan_{model}")(*places)
        return (np.column_stack([ticks, keys]), length) if _found(length) else None

    def play_loop(self, num_ranks: int, limit: int, give_up: int) -> tuple[Numbers, Numbers, int] | None:
        """`fastpipe.schedules.loop_zb`; the library must be there."""
        view, slots = self._view(num_ranks, limit), [np.empty(len(keys), dtype=np.int64) for keys in self.streams]
        length = _loaded().fastpipe_plan_loop(ctypes.addressof(view), give_up, *(array.ctypes.data for array in slots))
        if not _found(length):
            return None
        forward, backward = (np.column_stack([at, keys]) for at, keys in zip(slots, self.streams, strict=True))
        return forward, backward, length


def search_beam(
    num_ranks: int, num_rounds: int, num_microbatches: int, limit: int, width: int, length: int, budget: int
) -> tuple[list[tuple[int, int]] | None, int, int]:
    """`fastpipe.schedules.wave_beam`; the library must be there.

    Returns:
        Ticks and rounds, or None where none were found; the ticks in all; what is left of the budget.
    """
    given = _Beam(num_ranks, num_rounds, num_microbatches, width, limit)
    count = 2 * num_rounds * num_microbatches
    left = ctypes.c_int64(budget)
    ticks, keys = np.empty(count, dtype=np.int64), np.empty(count, dtype=np.int32)
    done = _loaded().fastpipe_plan_beam(
        ctypes.addressof(given), length, ctypes.addressof(left), ticks.ctypes.data, keys.ctypes.data
    )
    starts = list(zip(ticks.tolist(), keys.tolist(), strict=True)) if _found(done) else None
    return starts, done, left.value


def fill(
    route: Sequence[int],
    num_microbatches: int,
    first: npt.NDArray[np.int64],
    columns: Sequence[npt.NDArray[np.integer[Any]]],
    limit: int,
    seconds: Sequence[float],
) -> tuple[Ints, float] | None:
    """`fastpipe.schedules.filling.filled`; the library must be there.

    Args:
        route: the rank of every stage.
        num_microbatches: m.
        first: the first step of every rank, and how many there are.
        columns: slots (int64), kinds, stages and microbatches of all steps of F and I.
        limit: stage activations that a rank may hold.
        seconds: of F, I, W and a hop.

    Returns:
        Kinds, stages and microbatches of all steps with their W, and the makespan; None where the limit cannot be kept.
    """
    ranks = np.array(route, dtype=np.int32)
    given = _Steps(
        *(len(first) - 1, len(ranks), num_microbatches, ranks.ctypes.data, first.ctypes.data),
        *(column.ctypes.data for column in columns),
        *(limit, *seconds),
    )
    rows, makespan = np.empty((3, len(columns[0]) * 3 // 2), dtype=np.int32), ctypes.c_double()
    done = _loaded().fastpipe_plan_fill(ctypes.addressof(given), rows.ctypes.data, ctypes.addressof(makespan))
    return (rows, makespan.value) if _found(done) else None


def zero_bubble(
    search: str,
    num_ranks: int,
    num_microbatches: int,
    seconds: Sequence[Sequence[float]],
    comm: float,
    limit: Sequence[float],
) -> list[list[int]] | None:
    """The searches of `fastpipe.schedules.zb_auto` (``"zb_auto"``) and `zbv_search` (``"zbv"``): every rank's kinds.

    Args:
        search: which.
        num_ranks: p.
        num_microbatches: m.
        seconds: of F, I and W, each one a rank, or of zbv one alone.
        comm: seconds of a hop.
        limit: activations, as many numbers.

    Returns:
        None where that is left to the Python code.
    """
    found = library()
    if found is None:
        return None
    arrays = [np.array(column, dtype=np.float64) for column in (*seconds, limit)]
    *columns, last = (array.ctypes.data for array in arrays)
    given = _ZeroBubble(num_ranks, num_microbatches, *columns, comm, last)
    each = {"zb_auto": 3, "zbv": 6}[search] * num_microbatches
    kinds = np.empty((num_ranks, each), dtype=np.int32)
    done = getattr(found, f"fastpipe_plan_{search}")(ctypes.addressof(given), kinds.ctypes.data)
    orders: list[list[int]] = kinds.tolist()
    return orders if done else None


def _found(length: int) -> bool:
    if length < 0:
        raise MemoryError("no memory for the rounds of a schedule")
    return length > 0


def _loaded() -> ctypes.CDLL:
    found = library()
    assert found is not None, "the caller asks first"
    return found
