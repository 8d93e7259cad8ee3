"""The option ``memory`` of schedules that are built within a cap on live activations."""

from __future__ import annotations

from math import ceil, floor, isfinite
from typing import Any

from fastpipe.placement import is_whole
from fastpipe.schedules.family import Option


def _is_memory(value: Any) -> bool:
    if is_whole(value):
        return int(value) >= 1
    return isinstance(value, float) and isfinite(value) and value > 0


MEMORY = Option(
    1.0,
    "the stage activations that a rank may hold until their W: a float above 0 is a fraction of 1F1B's "
    "(ranks x stages_per_rank), an int of at least 1 is their number",
    _is_memory,
)


def live_limit(name: str, memory: float | int, num_ranks: int, stages_per_rank: int, num_microbatches: int) -> int:
    """The cap in stage activations, no more than there are.

    Raises:
        ValueError: for less than one microbatch's activations, which no order does without.
    """
    whole = is_whole(memory)
    limit = int(memory) if whole else floor(memory * num_ranks * stages_per_rank + 1e-9)
    if limit < stages_per_rank:
        fraction = ceil(1e4 / num_ranks) / 1e4
        raise ValueError(
            f"memory = {memory!r}: {limit} live stage activations a rank are too few for {name} with stages_per_rank = "
            f"{stages_per_rank}; one microbatch alone takes {stages_per_rank}: give memory = {stages_per_rank}, or "
            f"{fraction:g} as a fraction, or more"
        )
    return min(limit, num_microbatches * stages_per_rank)
