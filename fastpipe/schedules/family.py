"""Family: a named generator of schedules, with its options and its limits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fastpipe.placement import is_whole
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
        """Check the options and generate."""
        values = {name: option.default for name, option in self.options.items()}
        for name, value in options.items():
            if name not in values:
                known = ", ".join(values) or "none"
                raise ValueError(f"{name} = {value!r}: {self.name} has no such option; its options are: {known}")
            option = self.options[name]
            if option.check is not None and not option.check(value):
                raise ValueError(f"{name} = {value!r}: {self.name} takes {option.text}")
            values[name] = value
        schedule = self.generate(num_ranks, num_microbatches, **values)
        schedule.options.update(options)
        return schedule

    def __str__(self) -> str:
        lines = [f"{self.name}: {self.summary} ({self.limits})"]
        lines += [f"    {name} = {option.default!r}: {option.text}" for name, option in self.options.items()]
        return "\n".join(lines)


def check_counts(num_ranks: Any, num_microbatches: Any) -> None:
    """Refuse numbers of ranks and microbatches that no schedule takes."""
    for name, value in (("num_ranks", num_ranks), ("num_microbatches", num_microbatches)):
        if not is_count(value):
            raise ValueError(f"{name} = {value!r}: give a whole number of at least 1")


def is_count(value: Any) -> bool:
    """Whether it is a whole number of at least 1."""
    return is_whole(value, least=1)


def is_bool(value: Any) -> bool:
    """Whether it is True or False."""
    return isinstance(value, bool)
