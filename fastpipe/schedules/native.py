"""The generators' searches in the planning library (csrc/plan); see `fastpipe.native_plan`."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fastpipe import native_plan
from fastpipe.native_plan import Ints, loaded

Numbers = npt.NDArray[np.int64]


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
        length = getattr(loaded(), f"fastpipe_plan_{model}")(*places)
        return (np.column_stack([ticks, keys]), length) if _found(length) else None

    def play_loop(self, num_ranks: int, limit: int, give_up: int) -> tuple[Numbers, Numbers, int] | None:
        """`fastpipe.schedules.loop_zb`; the library must be there."""
        view, slots = self._view(num_ranks, limit), [np.empty(len(keys), dtype=np.int64) for keys in self.streams]
        length = loaded().fastpipe_plan_loop(ctypes.addressof(view), give_up, *(array.ctypes.data for array in slots))
        if not _found(length):
            return None
        forward, backward = (np.column_stack([at, keys]) for at, keys in zip(slots, self.streams, strict=True))
        return forward, backward, length


def search_beam(
    num_ranks: int, num_rounds: int, num_microbatches: int, limit: int, width: int, length: int, budget: int
) -> tuple[list[tuple[int, int]] | None, int, int]:
    """`fastpipe.schedules.wave_ticks.Beam`; the library must be there.

    Returns:
        Ticks and rounds, or None where none were found; the ticks in all; what is left of the budget.
    """
    given = _Beam(num_ranks, num_rounds, num_microbatches, width, limit)
    count = 2 * num_rounds * num_microbatches
    left = ctypes.c_int64(budget)
    ticks, keys = np.empty(count, dtype=np.int64), np.empty(count, dtype=np.int32)
    done = loaded().fastpipe_plan_beam(
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
    done = loaded().fastpipe_plan_fill(ctypes.addressof(given), rows.ctypes.data, ctypes.addressof(makespan))
    return (rows, makespan.value) if _found(done) else None


def zero_bubble(
    search: str,
    num_ranks: int,
    num_microbatches: int,
    seconds: Sequence[Sequence[float]],
    comm: float,
    limit: Sequence[float],
) -> list[list[int]] | None:
    """The searches of the families `zb_auto` and `zbv`, called by these names: every rank's kinds.

    Args:
        search: which.
        num_ranks: p.
        num_microbatches: m.
        seconds: of F, I and W, each one per rank, or of zbv one alone.
        comm: seconds of a hop.
        limit: activations, as many numbers.

    Returns:
        None where that is left to the Python code.
    """
    found = native_plan.library()
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
