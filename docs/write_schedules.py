"""Writes docs/schedules.md from the registry, so that the page says what the code does.

    python docs/write_schedules.py              rewrite the page
    python docs/write_schedules.py --check      say whether it is current

`make lint` runs the check. Nothing here needs torch.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from pages import finish

import fastpipe
from fastpipe import ActionKind, ChannelKind, Op, Program, Schedule, formulas
from fastpipe.schedules import Family

PAGE = Path(__file__).with_name("schedules.md")
RANKS = 8
MICROBATCHES = (32, 16, 8)
"""The first of these that a schedule takes is what its numbers are for."""

HEAD = """\
# The schedules

`docs/write_schedules.py` writes this page from the registry and the simulator. `fastpipe.list_schedules()` and
`fastpipe schedules` print the same names, limits and options.

## How to read it

A **rank** holds one or more **stages** of the model. Every **microbatch** goes forward through all stages (`F`) and
back. `B` is the full backward. A split backward is `I`, the backward for the stage's input, for which the previous
stage waits, and `W`, the backward for the weights, for which none waits. `F&B` is a forward and a backward of another
microbatch, run as one.

| column | meaning |
|---|---|
| stages per rank | stages that a rank holds by default. More stages mean smaller bubbles and more transfers. |
| bubble | fraction of the makespan (first start to last end of the step) in which ranks are idle |
| by span | the same if every rank starts its next step at once, without waiting for the others |
| peak activations | the most that a rank holds at a time, in multiples of 1F1B's. One is held until the end of `W`. |
| weights | copies of the model that all ranks hold together |
| transfers | messages between ranks for one microbatch's forward; its backward has as many |

"""

NOTE = """
The numbers are simulated for {ranks} ranks and {microbatches} microbatches, with `F`, `I` and `W` of equal length, `B`
as long as `I` and `W` together, a pair as long as its parts, and free transfers. Your costs differ: pass them to
`fastpipe.simulate`, or as `--forward`, `--backward-input`, `--backward-weight` and `--comm` to `fastpipe compare`.

`fastpipe.formulas` has the known closed forms, and refuses numbers outside their range:
`formulas.smallest_num_microbatches("1f1b", 0.1, num_ranks=8)` is how many microbatches bring the bubble to a tenth.

In a real step `W` has the weight gradients of linears, and `I` all the rest. The numbers of schedules with `I` and `W`
are for stages whose weights are nearly all in linears, as a transformer's are.

```sh
fastpipe compare all --ranks {ranks} --microbatches {microbatches}
```
"""

TAIL = """\
## Your own

A schedule may also be written by hand (`fastpipe.Schedule.from_actions`) or loaded from a CSV file in the format of
`torch.distributed.pipelining` (`fastpipe.Schedule.from_csv`). Both are proved before they run, like those below.
`fastpipe validate mine.csv` proves one from the command line.

## Every schedule

"""


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
        str(schedule.placement.num_routes),
        f"{numbers.transfers:g}",
    )
    return f"| {' | '.join(cells)} |"


def section(family: Family, numbers: Numbers) -> str:
    """The section of one schedule beneath the table."""
    schedule = numbers.schedule
    source = sys.modules[family.generate.__module__]
    ranks, m = 4, 16 if schedule.num_microbatches >= 16 else 4
    lines = [
        f"### {family.name}",
        "",
        f"{family.summary[0].upper()}{family.summary[1:]}.",
        "",
        f"* takes: {family.limits}",
        f"* placement: {schedule.placement.name}; actions: {numbers.kinds}",
    ]
    lines += [f"* option `{name}` (`{option.default!r}`): {option.text}" for name, option in family.options.items()]
    lines += _closed_forms(family.name)
    lines += [
        f"* code and source: [{source.__name__.rpartition('.')[2]}.py](../{source.__name__.replace('.', '/')}.py)",
        "",
        "```sh",
        f"fastpipe plot {family.name} --ranks {ranks} --microbatches {m} -o {family.name}.png",
        "```",
        "",
    ]
    return "\n".join(lines)


def _closed_forms(name: str) -> list[str]:
    """Where `fastpipe.formulas` knows the numbers exactly."""
    lines = []
    for what, find in (("bubble", formulas.bubble_formula), ("peak activations", formulas.peak_formula)):
        with contextlib.suppress(ValueError):
            formula = find(name)
            lines.append(f"* closed form of the {what}, for {formula.range}: {formula.source}")
    return lines


def page() -> str:
    """The whole page."""
    families = fastpipe.list_schedules()
    numbers = [measure(example(family)) for family in families]
    header = "| schedule | stages per rank | bubble | by span | peak activations | weights | transfers |"
    table = [header, "|---|---:|---:|---:|---:|---:|---:|", *map(row, families, numbers)]
    note = NOTE.format(ranks=RANKS, microbatches=MICROBATCHES[0])
    return HEAD + "\n".join(table) + "\n" + note + "\n" + TAIL + "\n".join(map(section, families, numbers))


def main() -> int:
    """Write the page, or check it."""
    return finish(PAGE, page())


if __name__ == "__main__":
    sys.exit(main())
