"""The picture: a timeline as PNG, SVG or PDF. Ranks go down, time goes right."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fastpipe.checks import check_flags, check_type
from fastpipe.timeline import Timeline
from fastpipe.visualize import canvas
from fastpipe.visualize.rows import Panel

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_LEFT, _RIGHT, _TOP, _BOTTOM, _GAP = 0.75, 0.75, 1.05, 0.55, 0.85
"""Inches around the panels, and between two of them."""

_TITLE, _LEGEND, _ENTRY, _LINE = 13.0, 9.0, 42.0, 0.19
"""Sizes of the title and the legend in points; of an entry's box and gaps in points; of a line of it in inches."""

_SAME_SCALE = 4.0
"""Two timelines share their time axis unless one is this many times longer than the other."""


def plot(
    timeline: Timeline,
    path: str | Path,
    *,
    against: Timeline | None = None,
    title: str | None = None,
    width: float = 14.0,
    row_height: float | None = None,
    labels: bool = True,
    transfers: bool | None = None,
    critical_path: bool = False,
    dpi: int = 150,
) -> Path:
    """Draw a timeline into a file.

    Args:
        timeline: simulated or measured.
        path: the file; its suffix says the format: .png, .svg or .pdf.
        against: a second timeline, drawn beneath on the same time axis, such as the prediction of a measured one.
            Where its stages are of another size, the most activations that a rank holds are counted in those of a
            rank's share of the model (1/ranks of it), as `fastpipe.compare` counts them.
        title: the heading; the schedule and its numbers unless given.
        width: inches, 2 to 200.
        row_height: inches a rank takes, 0.01 to 20; chosen by the number of ranks unless given.
        labels: write microbatch numbers into the bars, wherever they fit.
        transfers: draw every transfer between ranks as a line; unless given, when they take time and are few.
        critical_path: outline the actions of the critical path.
        dpi: pixels an inch of a PNG, 10 to 2400.

    Returns:
        The path.

    Raises:
        ImportError: when matplotlib is not installed.
        ValueError: for a suffix that is no format, or a size that is none.
    """
    path = canvas.checked_path(path)
    canvas.check_size("width", width, 2, 200, "inches")
    canvas.check_size("row_height", 1 if row_height is None else row_height, 0.01, 20, "inches")
    canvas.check_size("dpi", dpi, 10, 2400, "pixels an inch")
    check_flags(labels=labels, critical_path=critical_path, transfers=False if transfers is None else transfers)
    check_type(Timeline, "simulate gives one", timeline=timeline)
    check_type(Timeline | None, against=against)
    check_type(str | None, title=title)
    shown = [timeline] if against is None else [timeline, against]
    height = (
        row_height if row_height is not None else min(0.42, max(0.13, 6.5 / max(t.program.num_ranks for t in shown)))
    )
    figure, panels = _layout(shown, width, height, dpi)
    lines = any(panel.wants_transfers() for panel in panels) if transfers is None else transfers
    for panel in panels:
        panel.draw(with_labels=labels, with_transfers=lines, critical_path=critical_path)
        panel.describe(canvas.literal(_heading(panel.timeline, shown)), as_shares=not _same_stages(shown))
        panel.axes.set_xlabel(f"time ({panel.unit})", color=canvas.INK)
    _head(
        figure,
        canvas.literal(title or _title(shown)),
        canvas.legend_handles(shown, critical_path=critical_path, transfers=lines),
    )
    return canvas.save(figure, path, dpi)


def _layout(shown: Sequence[Timeline], width: float, row_height: float, dpi: int) -> tuple[Figure, list[Panel]]:
    """A figure with one panel a timeline; every panel's size is known in inches, so that text can be measured."""
    heights = [t.program.num_ranks * row_height for t in shown]
    total = _TOP + sum(heights) + _GAP * (len(shown) - 1) + _BOTTOM
    longest = [t.makespan for t in shown]
    if max(longest) <= _SAME_SCALE * min(longest):
        longest = [max(longest)] * len(shown)
    figure = canvas.figure(width, total)
    panels, top, inner = [], total - _TOP, width - _LEFT - _RIGHT
    for each, height, seconds in zip(shown, heights, longest, strict=True):
        axes = figure.add_axes((_LEFT / width, (top - height) / total, inner / width, height / total))
        panels.append(Panel(axes, (inner, height), each, seconds, dpi=dpi))
        top -= height + _GAP
    return figure, panels


def _title(shown: Sequence[Timeline]) -> str:
    program = shown[0].program
    name = " / ".join(dict.fromkeys(t.program.name for t in shown))
    same = len({t.program.num_stages for t in shown}) == 1
    stages = _stages(shown[0]) if same else ""
    return f"{name}   {program.num_ranks} ranks{stages}, {program.num_microbatches} microbatches"


def _same_stages(shown: Sequence[Timeline]) -> bool:
    """Whether a stage is the same part of the model in all."""
    return len({t.program.num_stages / t.program.num_ranks for t in shown}) == 1


def _stages(timeline: Timeline) -> str:
    program = timeline.program
    return "" if program.num_stages == program.num_ranks else f", {program.num_stages} stages"


def _heading(timeline: Timeline, shown: Sequence[Timeline]) -> str:
    """What a panel shows: which of the two it is, where there are two."""
    text = f"makespan {canvas.seconds(timeline.makespan)}, bubble {timeline.bubble_fraction:.1%}"
    if len(shown) == 1:
        return text
    if len({t.program.name for t in shown}) > 1:
        return f"{timeline.program.name}{_stages(timeline)}: {text}"
    return f"{'measured' if timeline.measured else 'simulated'}: {text}"


def _head(figure: Figure, title: str, handles: list[Any]) -> None:
    """The title, smaller if it is long, and the legend beneath it, on more lines in a narrow picture."""
    width, height = figure.get_size_inches()
    room = 72 * (width - 0.32)
    size = _TITLE * min(1.0, room / canvas.text_width(title, _TITLE, weight="bold"))
    columns = _legend_columns(handles, room)
    lines = -(-len(handles) // columns)
    if lines > 1:  # grow upwards: what has its place from below keeps it
        taller = height + _LINE * (lines - 1)
        for axes in figure.axes:
            left, bottom, wide, high = axes.get_position().bounds
            axes.set_position((left, bottom * height / taller, wide, high * height / taller))
        height = taller
        figure.set_size_inches(width, height)
    figure.text(0.12 / width, 1 - 0.14 / height, title, va="top", size=size, weight="bold", color=canvas.INK)
    figure.legend(
        handles=handles,
        handler_map={canvas.Boxes: canvas.Boxes()},
        loc="upper left",
        bbox_to_anchor=(0.05 / width, 1 - 0.36 / height),
        ncols=columns,
        frameon=False,
        fontsize=_LEGEND,
        labelcolor=canvas.INK,
        handlelength=1.8,
        columnspacing=1.8,
    )


def _legend_columns(handles: list[Any], room: float) -> int:
    """How many entries stand side by side in so many points; of matplotlib's columns the first ones are the longer."""
    widths = [canvas.text_width(handle.get_label(), _LEGEND) + _ENTRY for handle in handles]
    for columns in range(len(widths), 1, -1):
        if sum(float(max(part)) for part in np.array_split(widths, columns)) <= room:
            return columns
    return 1
