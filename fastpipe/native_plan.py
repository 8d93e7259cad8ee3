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
from collections.abc import Callable, Sequence
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


class View(ctypes.Structure):
    """A struct of csrc/plan/plan.h. Its values are numbers, arrays, and lists of arrays, which it keeps alive."""

    def __init__(self, *values: Any) -> None:
        given = [_pointers(value) if isinstance(value, list) else value for value in values]
        self._kept = values, given
        super().__init__(*(value.ctypes.data if isinstance(value, np.ndarray) else value for value in given))


class _Orders(View):
    _fields_ = [
        *((name, ctypes.c_int32) for name in ("num_ranks", "num_stages", "num_microbatches", "num_routes")),
        ("routes", ctypes.c_void_p),
        ("columns", ctypes.c_void_p),
        ("counts", ctypes.c_void_p),
        ("num_channels", ctypes.c_int32),
        ("channels", ctypes.c_void_p),
        ("forward_only", ctypes.c_int32),
    ]


class _Costs(View):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("forward", "backward", "backward_input", "backward_weight")),
        ("overlapped", ctypes.c_void_p),
        ("has_overlapped", ctypes.c_int32),
        *((name, ctypes.c_void_p) for name in ("latency", "bandwidth", "boundary_bytes")),
    ]


class _Pointer:
    """The type of arguments: structs, numbers to be filled, arrays, lists of arrays, and what the library returned."""

    @staticmethod
    def from_param(value: Any) -> Any:
        if isinstance(value, int):
            return ctypes.c_void_p(value)
        if isinstance(value, list):
            value = _pointers(value)
        if not isinstance(value, np.ndarray):
            return ctypes.byref(value)
        pointer = ctypes.c_void_p(value.ctypes.data)
        pointer.kept = value  # type: ignore[attr-defined]
        return pointer


def _pointers(arrays: Sequence[npt.NDArray[Any]]) -> npt.NDArray[np.uintp]:
    return np.array([array.ctypes.data for array in arrays], dtype=np.uintp)


_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "version": (ctypes.c_int32,),
    "validate_schedule": (ctypes.c_int32, _Pointer),
    "lower": (ctypes.c_void_p, _Pointer, ctypes.c_int32, ctypes.c_int32),
    "num_channels": (ctypes.c_int32, _Pointer),
    "channels": (None, _Pointer, _Pointer),
    "num_instructions": (ctypes.c_int64, _Pointer, ctypes.c_int32),
    "write": (ctypes.c_int32, _Pointer, ctypes.c_int32, _Pointer),
    "free": (None, _Pointer),
    "validate_program": (ctypes.c_int32, _Pointer, _Pointer),
    "simulate": (ctypes.c_int32, *[_Pointer] * 5),
    "retime": (ctypes.c_int32, *[_Pointer] * 4),
    "search": (ctypes.c_void_p, *[_Pointer] * 2, ctypes.c_int32, ctypes.c_uint64),
    "improve": (ctypes.c_int32, _Pointer, ctypes.c_int64, *[ctypes.c_double] * 2),
    "best": (ctypes.c_int32, *[_Pointer] * 3),
    "end_search": (None, _Pointer),
    "compact": (ctypes.c_int64, *[_Pointer] * 2, ctypes.c_int64, *[_Pointer] * 2),
    "slack": (ctypes.c_int64, *[_Pointer] * 2, ctypes.c_int64, *[_Pointer] * 2),
    "beam": (ctypes.c_int64, _Pointer, ctypes.c_int64, *[_Pointer] * 3),
    "loop": (ctypes.c_int64, _Pointer, ctypes.c_int64, *[_Pointer] * 2),
    "fill": (ctypes.c_int32, *[_Pointer] * 3),
    "construct": (ctypes.c_int32, _Pointer, *[ctypes.c_int32] * 2, *[_Pointer] * 5),
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


def function(name: str) -> Callable[..., Any]:
    """A function of the library; the caller has asked whether it is there."""
    found = library()
    assert found is not None, "the caller asks first"
    return getattr(found, f"fastpipe_plan_{name}")  # type: ignore[no-any-return]


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


def _orders_of(orders: Schedule | Program) -> _Orders:
    placement, channels = orders.placement, orders.channels if isinstance(orders, Program) else ()
    return _Orders(
        placement.num_ranks,
        placement.num_stages,
        orders.num_microbatches,
        len(placement.routes),
        np.array(placement.routes, dtype=np.int32),
        [np.ascontiguousarray(columns, dtype=np.int32) for columns in orders.columns],
        np.array([columns.shape[1] for columns in orders.columns], dtype=np.int64),
        len(channels),
        np.array(channels, dtype=np.int32).reshape(-1, 3),
        orders.forward_only,
    )


def is_valid_schedule(schedule: Schedule) -> bool:
    """Whether it was found complete and able to run; False also when that is left to the Python code."""
    found = _library_for(schedule)
    return found is not None and bool(found.fastpipe_plan_validate_schedule(_orders_of(schedule)))


def is_valid_program(program: Program, lanes: Sequence[int]) -> bool:
    """Whether it was proved; False also when that is left to the Python code."""
    found, lane_of = _library_for(program), np.array(lanes, dtype=np.int32)
    return found is not None and bool(found.fastpipe_plan_validate_program(_orders_of(program), lane_of))


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
    orders = _orders_of(schedule)
    handle = found.fastpipe_plan_lower(orders, min(ahead, _INT_MAX), bounded)
    if not handle:
        return None
    try:
        return _read_lowered(found, handle, schedule.num_ranks)
    finally:
        found.fastpipe_plan_free(handle)


def _read_lowered(
    found: ctypes.CDLL, handle: int, num_ranks: int
) -> tuple[list[tuple[int, int, int]], list[Ints]] | None:
    channels = np.empty((found.fastpipe_plan_num_channels(handle), 3), dtype=np.int32)
    found.fastpipe_plan_channels(handle, channels)
    written = []
    for rank in range(num_ranks):
        columns = np.empty((7, found.fastpipe_plan_num_instructions(handle, rank)), dtype=np.int32)
        if not found.fastpipe_plan_write(handle, rank, columns):
            return None
        columns.setflags(write=False)
        written.append(columns)
    return [(a, b, kind) for a, b, kind in channels.tolist()], written


def simulate(program: Program, lanes: Sequence[int], cost: CostModel) -> tuple[list[Floats], list[Floats]] | None:
    """Starts and ends of every rank's instructions; None where the program does not come to its end."""
    found = _library_for(program)
    if found is None:
        return None
    starts, ends = ([np.empty(columns.shape[1]) for columns in program.columns] for _ in range(2))
    lane_of = np.array(lanes, dtype=np.int32)
    done = found.fastpipe_plan_simulate(_orders_of(program), lane_of, _costs_of(cost, program), starts, ends)
    return (starts, ends) if done else None


def _costs_of(cost: CostModel, program: Program) -> _Costs:
    fused = cost.overlapped is not None
    names = ["forward", "backward", "backward_input", "backward_weight", "overlapped" if fused else "forward"]
    links = [cost.link(source, destination) for source, destination, _ in program.channels]
    return _Costs(
        *(cost.per_stage(name, program.num_stages) for name in names),
        fused,
        *np.array(links, dtype=np.float64).reshape(-1, 2).T.copy(),
        cost.per_stage("activation_bytes", program.num_stages),
    )
