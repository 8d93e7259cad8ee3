"""What proofs and windows share of OR-Tools' CP-SAT (`pip install ortools`): durations, memory, orders."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import inf, lcm
from typing import Any

import numpy as np

from fastpipe.action import ActionKind
from fastpipe.planner.model import Setting
from fastpipe.planner.tasks import Tasks

FULL = 10**9
"""What a rank may hold, in the solver's unit."""
_DENOMINATOR, _UNITS = 10_000, 10**9
_PAIR = int(ActionKind.OVERLAP_F_B)


def imported() -> Any:
    """OR-Tools' model of constraints.

    Raises:
        ImportError: without OR-Tools.
    """
    try:
        from ortools.sat.python import cp_model
    except ImportError:
        raise ImportError("exact = True needs OR-Tools, which is not installed: pip install ortools") from None
    return cp_model


def refuse_recompute(setting: Setting) -> None:
    """The solver knows one size of what a microbatch holds, from F to W.

    Raises:
        ValueError: where stages recompute.
    """
    if setting.kept != setting.held:
        raise ValueError("exact = True: what stages recompute cannot be proved; leave exact or recompute out")


def common_unit(seconds: Sequence[float]) -> Fraction:
    """The largest duration of which all of these are whole multiples.

    Raises:
        ValueError: when there is none of a reasonable size.
    """
    parts = [Fraction(value).limit_denominator(_DENOMINATOR) for value in set(seconds)]
    scale = lcm(*(part.denominator for part in parts))
    wrong = [v for v, part in zip(set(seconds), parts, strict=True) if abs(float(part) - v) > 1e-9 * max(1.0, v)]
    if wrong or scale > _UNITS:
        value = wrong[0] if wrong else max(seconds)
        raise ValueError(f"exact = True: {value!r} seconds; round the costs, so that all are multiples of one unit")
    return Fraction(1, scale)


class Durations:
    """The seconds of tasks and transfers as whole numbers.

    Attributes:
        unit: seconds of 1.
        length: of every task.
        transfer: by task and source.
    """

    def __init__(self, tasks: Tasks) -> None:
        self.unit = common_unit([*tasks.seconds.tolist(), *tasks.transfer.ravel().tolist()])
        self.length = [self._whole(value) for value in tasks.seconds.tolist()]
        self.transfer = [[self._whole(value) for value in row] for row in tasks.transfer.tolist()]

    def _whole(self, seconds: float) -> int:
        return round(Fraction(seconds).limit_denominator(_DENOMINATOR) / self.unit)


def lives(tasks: Tasks) -> list[list[tuple[int, int, int]]]:
    """By rank with a limit: the task that takes memory, the one whose end releases it, and how much of `FULL`."""
    rows = np.concatenate(tasks.schedule.columns, axis=1)
    released = np.where(rows[0] == _PAIR, rows[3:5], rows[1:3])  # a fused pair releases what its backward is of
    ends = {(int(released[0, t]), int(released[1, t])): t for t in np.flatnonzero(tasks.give > 0).tolist()}
    found: list[list[tuple[int, int, int]]] = []
    for rank, limit in enumerate(tasks.limit.tolist()):
        mine = [task for task in range(*tasks.first[rank : rank + 2].tolist()) if tasks.take[task] > 0]
        found.append([])
        for task in mine if limit < inf else ():
            size = int(tasks.take[task] / limit * FULL * (1 - 1e-12)) if limit > 0 else FULL + 1
            found[rank].append((task, ends[int(rows[1, task]), int(rows[2, task])], size))
    return found


def by_start(mine: Sequence[int], starts: Any, length: Sequence[int]) -> list[int]:
    """Tasks of a rank in the order of their starts; of those without length, what comes first in its line first."""
    return sorted(mine, key=lambda task: (starts[task], length[task], task))
