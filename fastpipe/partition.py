"""Partition: cut a row of layers into contiguous stages."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence, Set
from numbers import Integral
from typing import Any

from fastpipe.checks import check_counts, plain


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
    costs = plain(costs)
    (num_stages,) = check_counts(num_stages=num_stages)
    if isinstance(costs, Integral):
        (num_layers,) = check_counts(costs=costs)
        _check_enough(num_layers, num_stages)
        return _even_ranges(num_layers, num_stages)
    weights = _weights(costs)
    _check_enough(len(weights), num_stages)
    prefix = [0.0]
    for weight in weights:
        prefix.append(prefix[-1] + weight)
    return _ranges(_best_ends(prefix, len(weights), num_stages))


def _weights(costs: Any) -> list[float]:
    """The cost of every layer."""
    if isinstance(costs, str | bytes | Mapping | Set) or not isinstance(costs, Iterable):
        raise TypeError(f"costs = {costs!r}: give the cost of every layer, or the number of layers")
    weights: list[float] = []
    for layer, cost in enumerate(costs):
        try:
            weights.append(math.nan if isinstance(cost, str | bytes | bool) else float(cost))
        except (TypeError, ValueError, OverflowError):
            weights.append(math.nan)
        if not 0 <= weights[-1] < math.inf:
            raise ValueError(f"costs[{layer}] = {cost!r}: a cost is a finite number of at least 0")
    return weights


def _check_enough(num_layers: int, num_stages: int) -> None:
    if num_layers < num_stages:
        raise ValueError(f"num_stages = {num_stages}: there are only {num_layers} layers; give at most as many stages")


def _even_ranges(num_layers: int, num_stages: int) -> list[range]:
    """Of layers that cost the same: what the search finds, without one."""
    length, longer = divmod(num_layers, num_stages)
    return _ranges([(stage + 1) * length + min(stage + 1, longer) for stage in range(num_stages)])


def _best_ends(prefix: list[float], num_layers: int, num_stages: int) -> list[int]:
    """The end of every stage, by dynamic programming from the last stage to the first."""
    limit = _smallest_maximum(prefix, num_stages)
    # best[k][i]: (sum of squares, end of the first stage) of layers i.. cut into k stages, none above the limit. The
    # limit is the whole row's: a tail may go up to it when an earlier stage must, if that makes it more even.
    best: list[dict[int, tuple[float, int]]] = [{num_layers: (0.0, num_layers)}]
    for k in range(1, num_stages + 1):
        row: dict[int, tuple[float, int]] = {}
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
    prefix: list[float], start: int, last_end: int, rest: dict[int, tuple[float, int]], limit: float
) -> tuple[float, int] | None:
    found: tuple[float, int] | None = None
    for end in range(start + 1, last_end + 1):
        own = prefix[end] - prefix[start]
        if own > limit:
            break
        if end not in rest:
            continue
        squares = rest[end][0] + own * own
        # equal sums: the longer first stage; sums of floats differ in their last bits
        if found is None or _at_most(squares, found[0]):
            found = (squares, end)
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
