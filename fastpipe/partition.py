"""Partition: cut a row of layers into contiguous stages."""

from __future__ import annotations

import math
from collections.abc import Sequence


def partition(costs: int | Sequence[float], num_stages: int) -> list[range]:
    """Cut layers into ``num_stages`` contiguous, non-empty ranges.

    Args:
        costs: the cost of every layer, of at least 0; or the number of layers, all of which then cost the same.
        num_stages: how many ranges, at least 1 and at most the number of layers.

    Returns:
        The ranges of layer indices. The largest cost of a range is the smallest possible; among those the sum of
        squares is the smallest (most even); among those earlier ranges are longer (10 layers, 3 stages: 4, 3, 3).

    Raises:
        ValueError: for fewer layers than stages, or a cost that is negative or not a number.
    """
    weights = [1.0] * costs if isinstance(costs, int) else [float(cost) for cost in costs]
    _check(weights, num_stages)
    prefix = [0.0]
    for weight in weights:
        prefix.append(prefix[-1] + weight)
    return _ranges(_best_ends(prefix, len(weights), num_stages))


def _check(weights: list[float], num_stages: int) -> None:
    if not isinstance(num_stages, int) or num_stages < 1:
        raise ValueError(f"num_stages = {num_stages!r}: give at least 1")
    if len(weights) < num_stages:
        raise ValueError(
            f"num_stages = {num_stages}: there are only {len(weights)} layers; give at most as many stages"
        )
    for layer, weight in enumerate(weights):
        if not (weight >= 0 and math.isfinite(weight)):
            raise ValueError(f"costs[{layer}] = {weight}: a cost is a finite number of at least 0")


Score = tuple[float, float]
"""(largest cost, sum of squares): smaller is better."""


def _best_ends(prefix: list[float], num_layers: int, num_stages: int) -> list[int]:
    """The end of every stage, by dynamic programming from the last stage to the first."""
    # best[k][i]: the score of cutting layers i.. into k stages; the first of them as long as possible among equals
    best: list[dict[int, tuple[Score, int]]] = [{num_layers: ((0.0, 0.0), num_layers)}]
    limit = _smallest_maximum(prefix, num_stages)
    for k in range(1, num_stages + 1):
        row: dict[int, tuple[Score, int]] = {}
        for start in range(num_stages - k, num_layers - k + 1):
            found = _best_end(prefix, start, num_layers - k + 1, best[k - 1], limit)
            if found is not None:
                row[start] = found
        best.append(row)
    ends, start = [], 0
    for k in range(num_stages, 0, -1):
        start = best[k][start][1]
        ends.append(start)
    return ends


def _best_end(
    prefix: list[float], start: int, last_end: int, rest: dict[int, tuple[Score, int]], limit: float
) -> tuple[Score, int] | None:
    found: tuple[Score, int] | None = None
    for end in range(start + 1, last_end + 1):
        own = prefix[end] - prefix[start]
        if own > limit:
            break
        if end not in rest:
            continue
        (largest, squares), _ = rest[end]
        score = (max(own, largest), squares + own * own)
        # equal scores: the longer first stage; sums of floats differ in their last bits
        if found is None or score[0] < found[0][0] or (score[0] == found[0][0] and _at_most(score[1], found[0][1])):
            found = (score, end)
    return found


def _at_most(a: float, b: float) -> bool:
    return a <= b or math.isclose(a, b, rel_tol=1e-12)


def _smallest_maximum(prefix: list[float], num_stages: int) -> float:
    """The smallest possible largest cost of a stage, found exactly among the sums of neighbouring layers."""
    num_layers = len(prefix) - 1
    row = [prefix[num_layers] - prefix[i] for i in range(num_layers + 1)]
    for k in range(2, num_stages + 1):
        row = [
            min(
                (max(prefix[j] - prefix[i], row[j]) for j in range(i + 1, num_layers - k + 2)),
                default=math.inf,
            )
            for i in range(num_layers + 1)
        ]
    return row[0]


def _ranges(ends: list[int]) -> list[range]:
    return [range(start, end) for start, end in zip([0, *ends], ends, strict=False)]
