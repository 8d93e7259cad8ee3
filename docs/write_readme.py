"""Writes the figures of README.md from the tables of benchmarks/README.md, so that the two cannot differ.

    python docs/write_readme.py              rewrite the figures, between their marks
    python docs/write_readme.py --check      say whether they are current

A figure stands between `<!-- name -->` and `<!-- end -->`. Nothing here needs torch.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from functools import partial
from itertools import dropwhile, takewhile
from pathlib import Path

from pages import finish, with_blocks

import fastpipe

ROOT = Path(__file__).resolve().parents[1]
PAGE, BENCHMARKS = ROOT / "README.md", ROOT / "benchmarks/README.md"


def section(text: str, heading: str) -> str:
    """What stands under a heading that begins with these words."""
    _, found, rest = text.partition(f"\n## {heading}")
    if not found:
        raise ValueError(f"{BENCHMARKS} has no section {heading}")
    return rest.partition("\n## ")[0]


def column(text: str, caption: str, header: str) -> list[float]:
    """The medians in a column of the first table after the line that begins with the caption."""
    lines = text.partition(f"\n{caption}")[2].splitlines()
    head, _, *rows = takewhile(is_row, dropwhile(lambda line: not is_row(line), lines))
    index = cells(head).index(header)
    return [float(cells(row)[index].split()[0]) for row in rows]


def is_row(line: str) -> bool:
    """Whether a line belongs to a table."""
    return line.startswith("|")


def cells(row: str) -> list[str]:
    """The cells of a row of a table."""
    return [cell.strip() for cell in row.strip().strip("|").split("|")]


def span(values: list[float], digits: int) -> str:
    """The smallest and the largest; from 10 on without decimals."""

    def number(value: float) -> str:
        return f"{value:.0f}" if value >= 10 else f"{value:.{digits}f}"

    return f"{number(min(values))} to {number(max(values))}"


def stated(pattern: str, text: str) -> str:
    """What the benchmarks say in a sentence: the group of a pattern that is there exactly once."""
    (found,) = re.findall(pattern, " ".join(text.split()))
    return str(found)


FIGURES: dict[str, Callable[[str], str]] = {
    "schedules": lambda text: str(len(fastpipe.list_schedules())),
    "overhead_2": lambda text: span(column(section(text, "overhead.py"), "2 ranks,", "torch/fastpipe"), 1),
    "gpt_2": lambda text: span(column(section(text, "gpt.py"), "2 ranks,", "torch/fastpipe"), 2),
    "split": lambda text: stated(r"I \+ W at most 1\.05 x B \| (\S+ to \S+)", text),
    "plans": lambda text: (
        stated(r"Plans are shorter than all opponents in (\d+) cases", text)
        + " of "
        + stated(r"--every 7`\. (\d+) cases", text)
    ),
    "gain": lambda text: stated(r"opponents in \d+ cases, by (\S+ %) in the mean", text),
}


def page(text: str, benchmarks: str) -> str:
    """The README with every figure written anew."""
    return with_blocks(text, {name: partial(figure, benchmarks) for name, figure in FIGURES.items()})


def main() -> int:
    """Write the page, or check it."""
    return finish(PAGE, page(PAGE.read_text(encoding="utf-8"), BENCHMARKS.read_text(encoding="utf-8")))


if __name__ == "__main__":
    sys.exit(main())
