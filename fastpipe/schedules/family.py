"""Family: a named generator of schedules, its limits, and the options that several families share.

The costs that a searched schedule is built for are options too: a number holds for every rank, a sequence names the
ranks. They are seconds of one *stage* action, in any unit: only their ratios matter. What a schedule is then run with
is the CostModel's business.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, floor, isfinite
from typing import Any

from fastpipe.checks import check_counts, is_number, is_whole, plain
from fastpipe.schedule import Schedule


@dataclass(frozen=True)
class Option:
    """An option of a generator.

    Attributes:
        default: its value when it is not given.
        text: what it does, in a line, with its limits.
        check: what it must fulfil; None for anything.
    """

    default: Any
    text: str
    check: Callable[[Any], bool] | None = None


@dataclass(frozen=True)
class Family:
    """A generator.

    Attributes:
        name: what `make_schedule` takes.
        summary: what it is, in a line.
        limits: which numbers of ranks and microbatches it takes, in words.
        generate: ``(num_ranks, num_microbatches, **options)`` to a schedule.
        options: by name.
        stages_per_rank: how many stages a rank holds, where no option says so.
        num_routes: 2 where every stage is on two ranks, so that there are half as many stages as ranks hold.
    """

    name: str
    summary: str
    limits: str
    generate: Callable[..., Schedule]
    options: Mapping[str, Option] = field(default_factory=dict)
    stages_per_rank: int = 1
    num_routes: int = 1

    def make(self, num_ranks: int, num_microbatches: int, options: Mapping[str, Any]) -> Schedule:
        """Check the numbers and options, and generate."""
        num_ranks, num_microbatches = check_counts(num_ranks=num_ranks, num_microbatches=num_microbatches)
        values = {name: option.default for name, option in self.options.items()}
        for name, value in options.items():
            if name not in values:
                known = ", ".join(values) or "none"
                raise ValueError(f"{name} = {value!r}: {self.name} has no such option; its options are: {known}")
            option = self.options[name]
            values[name] = plain(value)
            if option.check is not None and not option.check(values[name]):
                raise ValueError(f"{name} = {value!r}: {self.name} takes {option.text}")
        stages = values.get("stages_per_rank", self.stages_per_rank * values.get("waves", 1))
        check_size(num_ranks, num_microbatches, stages)
        schedule = self.generate(num_ranks, num_microbatches, **values)
        schedule.options.update((name, values[name]) for name in options)
        return schedule

    def __str__(self) -> str:
        lines = [f"{self.name}: {self.summary} ({self.limits})"]
        lines += [f"    {name} = {option.default!r}: {option.text}" for name, option in self.options.items()]
        return "\n".join(lines)


_MAX_FORWARDS = 100_000_000
"""Of all ranks; a schedule of so many takes some 10 GB."""


def check_size(num_ranks: int, num_microbatches: int, stages_per_rank: int = 1) -> None:
    """Refuse a schedule whose actions memory cannot hold."""
    forwards = num_ranks * num_microbatches * stages_per_rank
    if forwards > _MAX_FORWARDS:
        raise ValueError(
            f"num_ranks = {num_ranks}, num_microbatches = {num_microbatches}, stages_per_rank = {stages_per_rank}: "
            f"that is {forwards:,} forwards, and a schedule has at most {_MAX_FORWARDS:,}; ask for fewer"
        )


def check_both_ways(name: str, num_ranks: int, num_microbatches: int) -> None:
    """Refuse odd numbers, for a schedule that sends half of the microbatches each way."""
    if num_ranks % 2 or num_microbatches % 2:
        raise ValueError(
            f"num_ranks = {num_ranks}, num_microbatches = {num_microbatches}: {name} sends half of the microbatches "
            "each way and needs an even number of both"
        )


def is_count(value: Any) -> bool:
    """Whether it is a whole number of at least 1."""
    return is_whole(value, least=1)


PerRank = float | Sequence[float]


def _is_cost(value: Any) -> bool:
    return is_number(value) or (
        isinstance(value, Sequence) and not isinstance(value, str) and len(value) > 0 and all(map(is_number, value))
    )


COSTS = {
    "forward": Option(1.0, "seconds of F of a stage, at least 0, or one per rank", _is_cost),
    "backward_input": Option(1.0, "seconds of I of a stage, at least 0, or one per rank", _is_cost),
    "backward_weight": Option(1.0, "seconds of W of a stage, at least 0, or one per rank", _is_cost),
    "comm": Option(0.0, "seconds of latency between two ranks, at least 0", is_number),
}
UNIFORM_COSTS = {
    name: Option(option.default, option.text.removesuffix(", or one per rank"), is_number)
    for name, option in COSTS.items()
}
IGNORED_COSTS = {
    name: Option(option.default, f"{option.text}; the order is the same for all of them", is_number)
    for name, option in UNIFORM_COSTS.items()
}
"""Those of a family of V that has one order: what is compared over costs need not know which families search."""


def per_rank(name: str, value: PerRank, num_ranks: int) -> list[float]:
    """One number per rank.

    Raises:
        ValueError: for a sequence of another length.
    """
    if not isinstance(value, Sequence):
        return [float(value)] * num_ranks
    if len(value) != num_ranks:
        raise ValueError(
            f"{name} has {len(value)} values for num_ranks = {num_ranks}: give one number, or one per rank"
        )
    return [float(number) for number in value]


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
