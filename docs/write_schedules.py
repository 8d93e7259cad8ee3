"""Writes docs/schedules.md from the registry, so that the page says what the code does.

    python docs/write_schedules.py              rewrite the page
    python docs/write_schedules.py --check      say whether it is current

`make lint` runs the check. Nothing here needs torch.
"""

from __future__ import annotations

import contextlib
import sys
import textwrap
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from pages import finish

import fastpipe
from fastpipe import ActionKind, ChannelKind, Op, Program, Schedule, formulas
from fastpipe.schedules import Family
from fastpipe.schedules.family import Option

PAGE = Path(__file__).with_name("schedules.md")
RANKS = 8
MICROBATCHES = (32, 16, 8)
"""The first of these that a schedule takes is what its numbers are for."""

HEAD = """\
# The schedules

`fastpipe.list_schedules()` and `fastpipe schedules` print these names, limits and options. To draw a schedule:

```sh
fastpipe plot dualpipev --ranks 4 --microbatches 16 -o dualpipev.png
```

Every microbatch runs forward (`F`) and backward (`B`) through all stages. A split backward is `I`, for the stage's
input, which the previous stage waits for, and `W`, for the weights. `F&B` is a forward and a backward of another
microbatch, run as one.

| column | meaning |
|---|---|
| stages per rank | the default; more stages mean smaller bubbles and more transfers |
| bubble | fraction of the makespan (first start to last end of the step) in which ranks are idle |
| by span | the same if every rank starts its next step at once, without waiting for the others |
| peak activations | the most that a rank holds at a time, until the end of `W` or `B`, in multiples of 1F1B's |
| transfers | messages between ranks for the forward of one microbatch; its backward has as many |

"""

NOTE = """
The numbers are simulated for {ranks} ranks and {microbatches} microbatches, with `F`, `I` and `W` of equal length, `B`
as long as `I` and `W`, `F&B` as long as its parts, and free transfers. In a real step `W` computes the weight gradients
of linears only, and `I` the rest: the numbers are for stages whose weights are nearly all in linears, as in a
transformer. For your costs use `fastpipe.simulate`, or `--forward`, `--backward-input`, `--backward-weight` and
`--comm` of

```sh
fastpipe compare all --ranks {ranks} --microbatches {microbatches}
```

You can also [write a schedule](planning.md), or load one from a CSV file of `torch.distributed.pipelining`. All are
proved before they run.
"""

OPTIONS = """
## Options of several schedules

Pass options as `fastpipe.make_schedule("wave_zb", ..., memory=0.5)`, to the Pipeline as
`schedule_options={"memory": 0.5}` (`stages_per_rank=` is an argument of its own), and in a shell as
`--option memory=0.5`.

| option | meaning |
|---|---|
"""

ANY = "any ranks and microbatches"
"""The limits of most schedules."""

EVERY = f"""
## Every schedule

A schedule without limits below takes {ANY}. `fastpipe.formulas` has the closed forms, and
refuses numbers outside of their range.

"""

IGNORED = "; the order is the same for all of them"
"""What an option says that does not change the order."""


@dataclass(frozen=True)
class Numbers:
    """What the page says of one schedule.

    Attributes:
        schedule: generated for `RANKS`, with its default options.
        kinds: the kinds of action it uses.
        bubble: by makespan.
        span_bubble: by span.
        peak: the most activations on a rank, against 1F1B.
        transfers: activations sent from rank to rank for one microbatch.
    """

    schedule: Schedule
    kinds: str
    bubble: float
    span_bubble: float
    peak: float
    transfers: float


def example(family: Family) -> Schedule:
    """The schedule with the first number of microbatches that it takes.

    Raises:
        ValueError: when it takes none of them.
    """
    refusals = []
    for count in MICROBATCHES:
        try:
            return fastpipe.make_schedule(family.name, num_ranks=RANKS, num_microbatches=count)
        except ValueError as error:
            refusals.append(str(error))
    raise ValueError(f"{family.name} for {RANKS} ranks: {'; '.join(refusals)}")


def measure(schedule: Schedule) -> Numbers:
    """Simulate it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the order of W, on which no number here depends
        program = fastpipe.lower(schedule)
    timeline = fastpipe.simulate(program)
    return Numbers(
        schedule,
        _kinds(schedule),
        timeline.bubble_fraction,
        timeline.span_bubble_fraction,
        max(timeline.peak_activations) / schedule.num_stages,
        _activations_sent(program) / schedule.num_microbatches,
    )


def _kinds(schedule: Schedule) -> str:
    found = {int(kind) for columns in schedule.columns for kind in np.unique(columns[0])}
    names = {ActionKind.OVERLAP_F_B: "F&B"}
    return ", ".join(names.get(kind, kind.name) for kind in ActionKind if kind in found)


def _activations_sent(program: Program) -> int:
    activation = [index for index, c in enumerate(program.channels) if c.kind is ChannelKind.ACTIVATION]
    return sum(int(((c[0] == Op.SEND) & np.isin(c[5], activation)).sum()) for c in program.columns)


def row(family: Family, numbers: Numbers) -> str:
    """One line of the table."""
    schedule = numbers.schedule
    m = schedule.num_microbatches
    name = f"[{family.name}](#{family.name})" + ("" if m == MICROBATCHES[0] else f" (m = {m})")
    cells = (
        name,
        str(len(schedule.placement.stages_of(0))),
        f"{numbers.bubble:.1%}",
        f"{numbers.span_bubble:.1%}",
        f"{numbers.peak:.2f}",
        f"{numbers.transfers:g}",
    )
    return f"| {' | '.join(cells)} |"


def shared(families: Sequence[Family]) -> dict[str, str]:
    """The options of several schedules with one text, which the page has once: text by name."""
    texts = Counter((name, _text(option)) for family in families for name, option in family.options.items())
    return {name: text for (name, text), count in texts.items() if count > 1}


def _text(option: Option) -> str:
    return option.text.removesuffix(IGNORED)


def section(family: Family, numbers: Numbers, common: Mapping[str, str]) -> str:
    """The section of one schedule beneath the table."""
    file = f"{family.generate.__module__.replace('.', '/')}.py"
    options = family.options.items()
    once = [f"`{name}={option.default!r}`" for name, option in options if common.get(name) == _text(option)]
    is_ignored = any(option.text.endswith(IGNORED) for option in family.options.values())
    lines = [
        f"### {family.name}",
        "",
        f"{family.summary[0].upper()}{family.summary[1:]}.",
        "",
        f"* placement: {numbers.schedule.placement.name}; actions: {numbers.kinds}; [code](../{file})",
    ]
    lines += [f"* takes: {family.limits}"] * (family.limits != ANY)
    lines += [f"* options: {', '.join(once)}{' (the order does not depend on them)' * is_ignored}"] * bool(once)
    lines += [f"* `{name}={o.default!r}`: {o.text}" for name, o in options if common.get(name) != _text(o)]
    lines += _closed_forms(family.name)
    return "\n".join([*lines, ""])


def _closed_forms(name: str) -> list[str]:
    """Where `fastpipe.formulas` knows the numbers exactly."""
    found: dict[str, list[str]] = {}
    for what, find in (("bubble", formulas.bubble_formula), ("peak activations", formulas.peak_formula)):
        with contextlib.suppress(ValueError):
            formula = find(name)
            found.setdefault(formula.source, []).append(what)
    return [f"* closed form: {', '.join(whats)} ({source})" for source, whats in found.items()]


def page() -> str:
    """The whole page."""
    families = fastpipe.list_schedules()
    numbers = [measure(example(family)) for family in families]
    header = "| schedule | stages per rank | bubble | by span | peak activations | transfers |"
    table = [header, "|---|---:|---:|---:|---:|---:|", *map(row, families, numbers)]
    note = NOTE.format(ranks=RANKS, microbatches=MICROBATCHES[0])
    common = shared(families)
    sections = [section(family, measured, common) for family, measured in zip(families, numbers, strict=True)]
    options = OPTIONS + "".join(f"| `{name}` | {text} |\n" for name, text in common.items())
    text = HEAD + "\n".join(table) + "\n" + note + options + EVERY + "\n".join(sections)
    return "\n".join(line if line.startswith("|") else wrapped(line) for line in text.split("\n"))


def wrapped(line: str) -> str:
    """A line of a paragraph or of a list in lines of 120 characters."""
    indent = "  " * line.startswith("* ")
    return textwrap.fill(line, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def main() -> int:
    """Write the page, or check it."""
    return finish(PAGE, page())


if __name__ == "__main__":
    sys.exit(main())
