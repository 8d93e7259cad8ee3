"""What `plan` is given: refused here, before any work, if it cannot be."""

from __future__ import annotations

import threading
from typing import Any

from fastpipe.placement import is_whole
from fastpipe.planner.budget import is_number
from fastpipe.planner.layer_costs import LayerCosts
from fastpipe.planner.model import Problem

MOST_EFFORT = 1e6
"""Already days for a small case."""


def check_search(effort: Any, time_limit: Any, seed: Any) -> None:
    """How far the search goes."""
    if not is_number(effort) or not 0 <= effort <= MOST_EFFORT:
        raise ValueError(f"effort = {effort!r}: give a number from 0 to {MOST_EFFORT:g}")
    if time_limit is not None and (not is_number(time_limit) or not 0 < time_limit <= threading.TIMEOUT_MAX):
        raise ValueError(f"time_limit = {time_limit!r}: give seconds (at most {threading.TIMEOUT_MAX:.0f}), or None")
    if not is_whole(seed):
        raise ValueError(f"seed = {seed!r}: give a whole number of at least 0")


def microbatch_counts(problem: Problem, num_microbatches: Any) -> list[int]:
    """What was given, or every number that divides the batch."""
    costs = problem.costs
    batch = costs.batch_size if isinstance(costs, LayerCosts) else None
    if num_microbatches is not None:
        if not is_whole(num_microbatches, least=1):
            raise ValueError(f"num_microbatches = {num_microbatches!r}: give a whole number of at least 1")
        if batch is not None and num_microbatches > batch:
            raise ValueError(
                f"num_microbatches = {num_microbatches}: a batch_size of {batch} has too few rows; give at most "
                f"{batch}, or the batch_size of a step"
            )
        return [int(num_microbatches)]
    if batch is None:
        raise ValueError("num_microbatches: give it, or costs of layers with batch_size, from which it can be chosen")
    most = max(16 * problem.num_ranks, 1)
    return [count for count in range(1, min(batch, most) + 1) if batch % count == 0]
