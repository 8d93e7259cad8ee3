"""One panel of the picture: a row per rank, bars as a few collections.

Text is written into bars only where it fits, as a few paths rather than thousands of text objects. Bars that are
narrower than pixels are pixels: each has the mean colour of what it covers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from fastpipe.program import Op
from fastpipe.timeline import Timeline
from fastpipe.visualize import canvas, colours
from fastpipe.visualize.bars import (
    Bars,
    Floats,
    Ints,
    bars,
    critical_bars,
    critical_transfers,
    of_kind,
    runs,
    transfers,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.path import Path


Reals = npt.NDArray[np.floating[Any]]

_FILL = 0.86
"""How much of its row a bar takes."""

_MANY = 20_000
"""From this number of bars on they are drawn as pixels."""

_FEW_TRANSFERS = 400
_POINTS = 72.0


@dataclass(frozen=True)
class Parts:
    """The bars that show one kind: whole ones, and halves of fused pairs.

    Attributes:
        number: the microbatch of each.
        chunk: which of its rank's stages each belongs to.
        low, high: upper and lower edge, in rows.
    """

    index: Ints
    number: Ints
    chunk: Ints
    low: Floats
    high: Floats


class Panel:
    """Draws one timeline into one axes.

    Args:
        size: of the axes, in inches.
        longest: seconds that the time axis shows.
        dpi: pixels an inch, for what is drawn as pixels.
    """

    def __init__(self, axes: Axes, size: tuple[float, float], timeline: Timeline, longest: float, *, dpi: int) -> None:
        self.axes = axes
        self.dpi = dpi
        self.timeline = timeline
        self.bars = bars(timeline)
        self.longest = 1.003 * longest if longest > 0 else 1.0
        self.scale, self.unit = canvas.unit_of(longest)
        self.points_a_second = size[0] * _POINTS / self.longest
        self.points_a_row = size[1] * _POINTS / self.bars.program.num_ranks
        self.inches = size[0]
        self.parts = {kind: self._parts(kind) for kind in colours.KINDS}

    def draw(self, *, with_labels: bool, with_transfers: bool, critical_path: bool) -> None:
        """Everything inside the axes."""
        if len(self.bars) > _MANY:
            self._draw_dense()
        else:
            for kind, parts in self.parts.items():
                self._draw_bars(kind, parts)
        if with_labels and len(self.bars) <= _MANY:
            self._draw_labels()
        if with_transfers:
            self._draw_transfers()
        if critical_path:
            self._outline_critical_path()

    def describe(self, heading: str, *, as_shares: bool = False) -> None:
        """Everything around it: ranks on the left, peaks on the right, the heading above.

        Args:
            heading: of the panel.
            as_shares: count peaks in activations of a rank's share of the model, as `fastpipe.compare` does, where
                another panel has stages of another size.
        """
        axes, ranks = self.axes, self.bars.program.num_ranks
        axes.set_xlim(0, self.longest * self.scale)
        axes.set_ylim(ranks, 0)
        shown = range(0, ranks, max(1, int(np.ceil(8.5 / self.points_a_row))))
        size = min(9.5, max(6.5, self.points_a_row * 0.8))
        axes.set_yticks([rank + 0.5 for rank in shown], [f"rank {rank}" for rank in shown], fontsize=size)
        axes.tick_params(axis="y", length=0)
        axes.tick_params(colors=canvas.INK)
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
        axes.spines["bottom"].set_color(canvas.INK)
        axes.set_title(heading, loc="left", fontsize=10, color=canvas.INK, pad=5)
        self._write_peaks(shown, size, as_shares)

    def wants_transfers(self) -> bool:
        """Whether transfers take time and are few enough to be told from each other."""
        sent = transfers(self.timeline)
        return 0 < len(sent) <= _FEW_TRANSFERS and float(np.nanmax(sent.end - sent.start)) > 0.01 * self._typical()

    def _typical(self) -> float:
        return float(np.median(self.bars.end - self.bars.start)) if len(self.bars) else 0.0

    def _write_peaks(self, shown: range, size: float, as_shares: bool) -> None:
        style: dict[str, Any] = {"transform": self.axes.get_yaxis_transform(), "ha": "center", "color": canvas.INK}
        centre = 1 + 0.34 / self.inches
        above = -3.5 / self.points_a_row
        what = "peak live\n(shares)" if as_shares else "peak\nlive"
        self.axes.text(centre, above, what, va="bottom", fontsize=7.5, linespacing=0.95, **style)
        program = self.timeline.program
        for rank in shown:
            peak = self.timeline.peak_activations[rank]
            text = f"{peak * program.num_ranks / program.num_stages:.4g}" if as_shares else str(peak)
            self.axes.text(centre, rank + 0.5, text, va="center", fontsize=size, **style)

    def _parts(self, kind: str) -> Parts:
        drawn = self.bars
        index, is_half, is_pair = of_kind(drawn, Op[kind])
        high = _FILL / drawn.num_tracks
        top = drawn.rank[index] + (1 - _FILL) / 2 + drawn.track[index] * high + np.where(is_pair, high / 2, 0.0)
        return Parts(
            index,
            np.where(is_pair, drawn.pair_microbatch[index], drawn.microbatch[index]),
            np.where(is_pair, drawn.pair_chunk[index], drawn.chunk[index]),
            top,
            top + np.where(is_half, high / 2, high),
        )

    def _boxes(self, index: Ints, low: Reals, high: Reals) -> Floats:
        """Corners in data coordinates: one row a bar."""
        return _corners(self.bars.start[index] * self.scale, self.bars.end[index] * self.scale, low, high)

    def _draw_bars(self, kind: str, parts: Parts) -> None:
        from matplotlib.collections import PolyCollection

        roomy = self._typical() * self.points_a_second > 3
        collection = PolyCollection(
            list(self._boxes(parts.index, parts.low, parts.high)),
            facecolors=colours.shades(kind, self.bars.num_chunks)[parts.chunk],
            edgecolors="white" if roomy else "none",
            linewidths=0.5 if roomy else 0.0,
            gid=f"bars-{kind}",
        )
        self.axes.add_collection(collection, autolim=False)

    def _draw_dense(self) -> None:
        """All bars as one picture, of as many pixels as the file will have."""
        found: list[Part] = []
        for kind, parts in self.parts.items():
            fused = self.bars.fused[parts.index]
            for chunk, colour in enumerate(colours.shades(kind, self.bars.num_chunks)):
                whole, half = (parts.index[(parts.chunk == chunk) & (fused == state)] for state in (False, True))
                found += [(whole, colour, True, True), (half, colour, kind == "F", kind == "B")]
        width, height = (round(points * self.dpi / _POINTS) for points in (self.inches * _POINTS, self.points_a_row))
        image = pixels(self.bars, found, self.longest, width, max(height, 2), _FILL)
        extent = (0.0, self.longest * self.scale, float(self.bars.program.num_ranks), 0.0)
        self.axes.imshow(image, extent=extent, aspect="auto", interpolation="nearest", gid="bars")

    def _draw_labels(self) -> None:
        """The microbatch of every bar that it fits into."""
        widths = {kind: self._width(parts) for kind, parts in self.parts.items()}
        heights = {kind: (parts.high - parts.low) * self.points_a_row for kind, parts in self.parts.items()}
        numbers = np.concatenate([parts.number for parts in self.parts.values()])
        size = font_size(np.concatenate([*widths.values()]), np.concatenate([*heights.values()]), numbers)
        if not size:
            return
        for kind, parts in self.parts.items():
            fits = fitting(widths[kind], heights[kind], parts.number, size)
            for chunk in range(self.bars.num_chunks):
                ink = colours.ink(colours.shade(kind, chunk, self.bars.num_chunks))
                self._write(parts, np.flatnonzero(fits & (parts.chunk == chunk)), size, ink)

    def _width(self, parts: Parts) -> Floats:
        return (self.bars.end[parts.index] - self.bars.start[parts.index]) * self.points_a_second

    def _write(self, parts: Parts, which: Ints, size: float, ink: str) -> None:
        from matplotlib.patches import PathPatch

        if not len(which):
            return
        index = parts.index[which]
        x = (self.bars.start[index] + self.bars.end[index]) / 2 * self.scale
        y = (parts.low[which] + parts.high[which]) / 2
        scale = (self.scale / self.points_a_second, -1 / self.points_a_row)
        path = text_path(parts.number[which], x, y, size, scale)
        self.axes.add_patch(PathPatch(path, facecolor=ink, linewidth=0, gid="labels"))

    def _draw_transfers(self) -> None:
        """A line from the sender's row to the receiver's."""
        from matplotlib.collections import LineCollection

        sent = transfers(self.timeline)
        from_y, to_y = _edge(sent.source, sent.destination), _edge(sent.destination, sent.source)
        ends = [np.stack([sent.start * self.scale, from_y], 1), np.stack([sent.end * self.scale, to_y], 1)]
        lines = np.stack(ends, axis=1)[~np.isnan(sent.start)]
        collection = LineCollection(list(lines), colors=colours.COLOURS["comm"], linewidths=0.8, gid="transfers")
        self.axes.add_collection(collection, autolim=False)

    def _outline_critical_path(self) -> None:
        """A box around every run of neighbours on the path, and the path's transfers."""
        from matplotlib.collections import LineCollection, PolyCollection

        drawn = self.bars
        ends = np.array(runs(drawn, critical_bars(self.timeline, drawn)), dtype=np.int64).reshape(-1, 2)
        left, right = drawn.start[ends[:, 0]] * self.scale, drawn.end[ends[:, 1]] * self.scale
        low = drawn.rank[ends[:, 0]] + (1 - _FILL) / 2
        style: dict[str, Any] = {"edgecolors": colours.CRITICAL, "linewidths": 1.6, "gid": "critical-path"}
        boxes = list(_corners(left, right, low, low + _FILL))
        self.axes.add_collection(PolyCollection(boxes, facecolors="none", **style), autolim=False)
        lines = [
            [(start * self.scale, _edge(source, destination)), (end * self.scale, _edge(destination, source))]
            for source, destination, start, end in critical_transfers(self.timeline)
        ]
        self.axes.add_collection(LineCollection(lines, colors=colours.CRITICAL, linewidths=1.6), autolim=False)


def _corners(left: Reals, right: Reals, low: Reals, high: Reals) -> Floats:
    corners = ((left, low), (right, low), (right, high), (left, high))
    return np.stack([np.stack(corner, axis=1) for corner in corners], axis=1)


def _edge(rank: Any, towards: Any) -> Any:
    """The edge of a rank's bars on the side of another rank."""
    return rank + 0.5 + np.sign(towards - rank) * _FILL / 2


LARGEST, SMALL, SMALLEST = 9.0, 6.5, 4.8
"""Points: the first choice, the last one in favour of labelling every bar, the last one that can be read."""

_DIGIT = 0.65
_HIGH = 1.05
_AIR = 0.3
"""How wide a digit is, how high with a little air, and the air beside a number, in sizes of the font."""


def font_size(width: Floats, height: Floats, numbers: Ints) -> float:
    """One size for all bars of a panel, such that all labels fit, or three of four when they are small, or one of four.

    It is 0 where fewer have room.
    """
    if not len(width):
        return 0.0
    fits = np.minimum(width / (_DIGIT * _digits(numbers) + _AIR), height / _HIGH)
    size = float(np.quantile(fits, 0.01))
    if size < SMALL:
        size = min(SMALL, float(np.quantile(fits, 0.25)))
    if size < SMALLEST and float(np.quantile(fits, 0.75)) >= SMALL:
        size = SMALL
    return min(LARGEST, size) if size >= SMALLEST else 0.0


def fitting(width: Floats, height: Floats, numbers: Ints, size: float) -> npt.NDArray[np.bool_]:
    """Which bars the text of that size fits into."""
    return (width >= (_DIGIT * _digits(numbers) + _AIR) * size * 0.999) & (height >= 0.95 * size)


def text_path(numbers: Ints, x: Floats, y: Floats, size: float, scale: tuple[float, float]) -> Path:
    """All numbers as one path.

    Args:
        scale: data coordinates a point, to the right and upwards.
    """
    from matplotlib.path import Path

    glyphs = [_glyphs(int(number)) for number in numbers]
    points = [g.vertices * size * scale + (cx, cy) for g, cx, cy in zip(glyphs, x, y, strict=True)]
    codes = [g.codes for g in glyphs]
    return Path(np.concatenate(points), np.concatenate(codes))


def _digits(numbers: Ints) -> Ints:
    return np.floor(np.log10(np.maximum(numbers, 1))).astype(np.int64) + 1


@cache
def _glyphs(number: int) -> Any:
    """The outline of a number of size 1, its centre at the origin."""
    from matplotlib.path import Path
    from matplotlib.textpath import TextPath

    outline = TextPath((0, 0), str(number), size=100)
    low, high = outline.vertices.min(axis=0), outline.vertices.max(axis=0)
    return Path((outline.vertices - (low + high) / 2) / 100, outline.codes)


Part = tuple[Ints, npt.NDArray[np.float64], bool, bool]
"""Bars of one colour, the colour (0 to 1), and whether they are seen in the upper and in the lower half of the row."""


def pixels(drawn: Bars, parts: list[Part], longest: float, width: int, height: int, fill: float) -> Floats:
    """A picture of all rows: shape ``(ranks * height, width, 3)``, values of 0 to 1.

    Args:
        parts: which of them have which colour.
        longest: seconds that the width shows.
        fill: how much of its row a bar takes.
    """
    ranks = drawn.program.num_ranks
    halves = np.ones((ranks, 2, width, 3))
    edges = np.linspace(0.0, longest, width + 1)
    for index, colour, upper, lower in parts:
        ordered = np.sort(index)
        bounds = np.searchsorted(ordered, drawn.first)
        for rank in range(ranks):
            mine = ordered[bounds[rank] : bounds[rank + 1]]
            if len(mine):
                covered = _coverage(drawn.start[mine], drawn.end[mine], edges)
                for half in [0] * upper + [1] * lower:
                    halves[rank, half] -= covered[:, None] * (1.0 - colour)
    rows = np.ones((ranks, height, width, 3))
    first, last = round(height * (1 - fill) / 2), max(round(height * (1 + fill) / 2), 1)
    middle = (first + last) // 2
    rows[:, first:middle] = halves[:, :1]
    rows[:, middle:last] = halves[:, 1:]
    return np.clip(rows.reshape(ranks * height, width, 3), 0.0, 1.0)


def _coverage(start: Floats, end: Floats, edges: Floats) -> Floats:
    """How much of every pixel the bars cover, 0 to 1: differences of the time that is covered up to each edge."""
    order = np.argsort(start, kind="stable")
    start, end = start[order], end[order].copy()
    end[:-1] = np.minimum(end[:-1], start[1:])
    total = np.concatenate([[0.0], np.cumsum(end - start)])
    times = np.stack([start, end], axis=1).ravel()
    values = np.stack([total[:-1], total[1:]], axis=1).ravel()
    covered: Floats = np.diff(np.interp(edges, times, values)) / (edges[1] - edges[0])
    return covered
