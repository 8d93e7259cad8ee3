"""Figures in words: medians with quartiles, ratios of rounds, tables for a terminal or for README.md."""

from __future__ import annotations

import argparse
import os
import platform
import statistics
from collections.abc import Sequence
from pathlib import Path

import torch

import fastpipe


def parser(description: str | None, *, rounds: int) -> argparse.ArgumentParser:
    """What every benchmark takes."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--rounds", type=int, default=rounds, help=f"how often each measurement is taken ({rounds})")
    made.add_argument(
        "--pin",
        default="auto",
        choices=["auto", "always", "never"],
        help="keep each rank on one core; auto: where there are enough for all (auto)",
    )
    made.add_argument("--markdown", action="store_true", help="tables as README.md has them")
    return made


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """First quartile, median, third quartile."""
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def spread(values: Sequence[float], scale: float = 1.0, digits: int = 1) -> str:
    """``median (first..third quartile)``."""
    low, middle, high = (scale * value for value in quartiles(values))
    return f"{middle:,.{digits}f} ({low:,.{digits}f}..{high:,.{digits}f})"


def ratio(ones: Sequence[float], others: Sequence[float], digits: int = 2) -> str:
    """The ratio of rounds: its median and quartiles."""
    return spread([one / other for one, other in zip(ones, others, strict=True)], digits=digits)


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], *, markdown: bool) -> str:
    """The first column to the left, the others to the right."""
    widths = None if markdown else [max(len(line[i]) for line in [heads, *rows]) for i in range(len(heads))]
    return "\n".join([*header(heads, widths), *(aligned(row, widths) for row in rows)])


def header(heads: Sequence[str], widths: Sequence[int] | None) -> list[str]:
    """The first lines of a table, for a terminal if there are widths, else for README.md."""
    rule = [":--", *["---:"] * (len(heads) - 1)]
    return [aligned(line, widths) for line in ([heads] if widths else [heads, rule])]


def aligned(cells: Sequence[str], widths: Sequence[int] | None) -> str:
    """A row of it."""
    if widths is None:
        return "| " + " | ".join(cells) + " |"
    first, *others = zip(cells, widths, strict=True)
    return "  ".join([first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)]).rstrip()


def machine() -> str:
    """What the figures were taken on, and how busy it is now."""
    cores = len(os.sched_getaffinity(0))
    load = os.getloadavg()[0]
    return f"{_processor()}, {cores} cores, load {load:.1f}; torch {torch.__version__}; {fastpipe.native_status()}"


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
