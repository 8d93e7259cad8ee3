"""The costs that a searched schedule is built for, as options of its family.

A number holds for every rank; a sequence names the ranks. They are seconds of one *stage* action, in any unit: only
their ratios matter. What a schedule is then run with is the CostModel's business.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from fastpipe.schedules.family import Option

PerRank = float | Sequence[float]


def is_number(value: Any) -> bool:
    """Whether it is a finite number of at least 0."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= sys.float_info.max


def _is_cost(value: Any) -> bool:
    return is_number(value) or (
        isinstance(value, Sequence) and not isinstance(value, str) and len(value) > 0 and all(map(is_number, value))
    )


def _is_limit(value: Any) -> bool:
    numbers = value if isinstance(value, Sequence) and not isinstance(value, str) else (value,)
    return value is None or (len(numbers) > 0 and all(is_number(number) and number >= 1 for number in numbers))


def memory_limit(default: str) -> Option:
    """The option of a limit on live stage activations, where ``default`` says what None stands for."""
    text = f"live stage activations that a rank may hold until their W, at least 1, or one a rank; {default} by default"
    return Option(None, text, _is_limit)


COSTS = {
    "forward": Option(1.0, "seconds of F of a stage, at least 0, or one a rank", _is_cost),
    "backward_input": Option(1.0, "seconds of I of a stage, at least 0, or one a rank", _is_cost),
    "backward_weight": Option(1.0, "seconds of W of a stage, at least 0, or one a rank", _is_cost),
    "comm": Option(0.0, "seconds of latency between two ranks, at least 0", is_number),
}
UNIFORM_COSTS = {
    name: Option(option.default, option.text.removesuffix(", or one a rank"), is_number)
    for name, option in COSTS.items()
}
IGNORED_COSTS = {
    name: Option(option.default, f"{option.text}; the order is the same for all of them", is_number)
    for name, option in UNIFORM_COSTS.items()
}
"""Those of a family of V that has one order: what is compared over costs need not know which families search."""


def per_rank(name: str, value: PerRank, num_ranks: int) -> list[float]:
    """One number a rank.

    Raises:
        ValueError: for a sequence of another length.
    """
    if not isinstance(value, Sequence):
        return [float(value)] * num_ranks
    if len(value) != num_ranks:
        raise ValueError(f"{name} has {len(value)} values for num_ranks = {num_ranks}: give one number, or one a rank")
    return [float(number) for number in value]
