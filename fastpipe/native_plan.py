"""The planning library `_plan` (csrc/plan), called through ctypes.

Here it is opened, and its proofs, lowering and simulation are called; the searches of rounds are called in
`fastpipe.schedules`, the planner's in `fastpipe.planner.engine`.

Every function here may answer "not by me" (None or False): the caller then runs its Python code, which is the
specification, has the words for what is wrong, and gives the same results. So do the generators. Only the planner's
annealing needs the library.
"""

from __future__ import annotations

import ctypes
import sysconfig
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fastpipe.cost import CostModel
from fastpipe.program import Program
from fastpipe.schedule import Schedule

VERSION = 9
"""Of the C interface, see csrc/plan/plan.h: a library of another one is left alone."""

PATH = Path(__file__).with_name("_plan" + (sysconfig.get_config_var("EXT_SUFFIX") or ".so"))
_INT_MAX = 2**31 - 1

Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float64]


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


def loaded() -> ctypes.CDLL:
    """The library; the caller has asked whether it is there."""
    found = library()
    assert found is not None, "the caller asks first"
    return found


def status() -> str:
    """One sentence: whether planning is native, or why not."""
    if library() is not None:
        return f"{PATH.name} is loaded: planning is native."
    if not PATH.exists():
        return f"{PATH.name} was not built: {_WITHOUT}."
    return f"{PATH.name} is of another version of fastpipe: until it is built again, {_WITHOUT}."


_WITHOUT = (
    "proofs, lowering and simulation run in Python, with the same results, and fastpipe.plan chooses from the registry "
    "and from list scheduling, without annealing"
)


def _library_for(orders: Schedule | Program) -> ctypes.CDLL | None:
    """The library, unless the orders are too short to be complete: it allocates for every stage and microbatch."""
    num_actions = sum(columns.shape[1] for columns in orders.columns)
    return library() if orders.placement.num_stages * orders.num_microbatches <= 2 * num_actions else None


class _View:
    """Orders as the library reads them; keeps the arrays alive."""

    def __init__(self, orders: Schedule | Program) -> None:
        placement, channels = orders.placement, orders.channels if isinstance(orders, Program) else ()
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
    found = _library_for(schedule)
    if found is None:
        return False
    view = _View(schedule)
    return bool(found.fastpipe_plan_validate_schedule(view.address))


def is_valid_program(program: Program, lanes: Sequence[int]) -> bool:
    """Whether it was proved; False also when that is left to the Python code."""
    found = _library_for(program)
    if found is None:
        return False
    view, lane_of = _View(program), np.array(lanes, dtype=np.int32)
    return bool(found.fastpipe_plan_validate_program(view.address, lane_of.ctypes.data))


def lower(schedule: Schedule, ahead: int, bounded: int) -> tuple[list[tuple[int, int, int]], list[Ints]] | None:
    """The channels (source, destination, kind) and every rank's instructions.

    Args:
        schedule: compute and stage actions only.
        ahead: how many actions before its consumer a receive is posted.
        bounded: how many sends are under way at most; 0 to wait only for those that are proven complete.
    """
    found = _library_for(schedule)
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


def simulate(program: Program, lanes: Sequence[int], cost: CostModel) -> tuple[list[Floats], list[Floats]] | None:
    """Starts and ends of every rank's instructions; None where the program does not come to its end."""
    found = _library_for(program)
    if found is None:
        return None
    view, lane_of = _View(program), np.array(lanes, dtype=np.int32)
    starts, ends = ([np.empty(count) for count in view.counts.tolist()] for _ in range(2))
    seconds = _Seconds(cost, program)
    pointers = _pointers(starts), _pointers(ends)
    done = found.fastpipe_plan_simulate(
        view.address, lane_of.ctypes.data, seconds.address, *(array.ctypes.data for array in pointers)
    )
    return (starts, ends) if done else None


class _Seconds:
    """Costs as the library reads them; keeps the arrays alive."""

    def __init__(self, cost: CostModel, program: Program) -> None:
        fused = cost.overlapped is not None
        names = ["forward", "backward", "backward_input", "backward_weight", "overlapped" if fused else "forward"]
        links = [cost.link(source, destination) for source, destination, _ in program.channels]
        self.arrays = [
            *(cost.per_stage(name, program.num_stages) for name in names),
            *(np.array([link[i] for link in links], dtype=np.float64) for i in range(2)),
            cost.per_stage("activation_bytes", program.num_stages),
        ]
        data = [array.ctypes.data for array in self.arrays]
        self.struct = _Costs(*data[:5], fused, *data[5:])
        self.address = ctypes.addressof(self.struct)
