"""What the picture and the comparison share: matplotlib, looked for in one place, files, the legend, units."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fastpipe.checks import as_path, is_number, plain
from fastpipe.program import Op
from fastpipe.timeline import Timeline
from fastpipe.visualize.colours import COLOURS, CRITICAL, KINDS, MEANINGS, shade

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg", ".pdf")
INK = "#20282c"
FAINT = "#d5dadd"


def checked_path(path: str | Path) -> Path:
    """The path of a picture, whose suffix is a format that can be written; matplotlib is there.

    Raises:
        ImportError: when matplotlib is not installed.
        ValueError: for another suffix.
    """
    path = as_path(path)
    if path.suffix.lower() not in SUFFIXES:
        raise ValueError(f"path = {str(path)!r}: the suffix says the format; use one of {', '.join(SUFFIXES)}")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ImportError("pictures need matplotlib, which is not installed: run `pip install matplotlib`") from error
    return path


def check_size(name: str, size: Any, least: float, most: float, unit: str) -> None:
    """Refuse a size in which there is no room, or that no viewer opens."""
    if not is_number(plain(size), least, most):
        raise ValueError(f"{name} = {size!r}: give {least:g} to {most:g} {unit}")


def figure(width: float, height: float) -> Figure:
    """An empty figure, in inches; no window and no global state."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), facecolor="white")


def save(drawn: Figure, path: Path, dpi: int) -> Path:
    """Write a figure; the same figure gives the same file."""
    from matplotlib import rc_context

    stamps = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
    with rc_context({"svg.hashsalt": "fastpipe"}):
        drawn.savefig(path, dpi=dpi, metadata=stamps.get(path.suffix.lower()))
    return path


def literal(text: str) -> str:
    """Text to be drawn as it is: matplotlib reads formulas between dollars, and SVG has no control characters."""
    shown = (letter if letter.isprintable() or letter == "\n" else "\N{REPLACEMENT CHARACTER}" for letter in text)
    return "".join(shown).replace("$", r"\$")


def text_width(text: str, size: float, **style: Any) -> float:
    """Points (1/72 inch) that a line takes, measured."""
    if not text.strip():  # of which matplotlib makes no path
        return size
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import TextPath

    return float(TextPath((0, 0), text, size=size, prop=FontProperties(**style)).get_extents().width)


def seconds(value: float) -> str:
    """A duration for people: three digits and a unit."""
    scale, unit = unit_of(value)
    return f"{value * scale:.4g} {unit}"


def unit_of(longest: float) -> tuple[float, str]:
    """By what to multiply seconds so that ``longest`` is read easily, and the unit's name."""
    if longest >= 1 or longest <= 0:
        return 1.0, "s"
    return (1e3, "ms") if longest >= 1e-3 else (1e6, "µs")


def kinds_of(shown: Sequence[Timeline]) -> tuple[list[str], bool]:
    """The kinds that occur, in the legend's order, and whether some are fused pairs."""
    ops = set().union(*(set(np.unique(columns[0]).tolist()) for t in shown for columns in t.program.columns))
    fused = Op.OVERLAP_F_B in ops
    found = {Op(op).name for op in ops} | ({"F", "B"} if fused else set())
    return [kind for kind in KINDS if kind in found], fused


class Boxes:
    """An entry of the legend that is drawn as boxes, each ``(colour, left, bottom, right, top)`` in parts of its size.

    It is also the handler by which matplotlib draws such entries.
    """

    def __init__(self, label: str = "", *parts: tuple[str, float, float, float, float]) -> None:
        self.label, self.parts = label, parts

    def get_label(self) -> str:
        """Its text."""
        return self.label

    def legend_artist(self, legend: Any, handle: Boxes, fontsize: float, box: Any) -> Any:
        """Draw an entry."""
        from matplotlib.patches import Rectangle

        for colour, left, bottom, right, top in handle.parts:
            corner = (box.xdescent + left * box.width, box.ydescent + bottom * box.height)
            size = (right - left) * box.width, (top - bottom) * box.height
            box.add_artist(Rectangle(corner, *size, facecolor=colour, transform=box.get_transform()))
        return box


def legend_handles(shown: Sequence[Timeline], *, critical_path: bool = False, transfers: bool = False) -> list[Any]:
    """What the legend lists: the kinds that occur, and no others."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    kinds, fused = kinds_of(shown)
    handles: list[Any] = [Patch(facecolor=COLOURS[kind], label=MEANINGS[kind]) for kind in kinds]
    if fused:
        # one above the other, as they are drawn
        handles.append(Boxes("F and B overlapped", (COLOURS["F"], 0, 0.5, 1, 1), (COLOURS["B"], 0, 0, 1, 0.5)))
    if any(len(stages) > 1 for t in shown for stages in t.program.placement.stages_by_rank()):
        shades = (COLOURS["F"], 0, 0, 0.5, 1), (shade("F", 1, 2), 0.5, 0, 1, 1)
        handles.append(Boxes("lighter: later stage of the rank", *shades))
    if transfers:
        handles.append(Line2D([], [], color=COLOURS["comm"], linewidth=0.9, label=MEANINGS["comm"]))
    if critical_path:
        handles.append(Patch(facecolor="none", edgecolor=CRITICAL, linewidth=1.6, label="critical path"))
    return handles
