"""The comparison as a picture: bubble against peak memory, one point a schedule, the best ones joined.

Names go beside the points so that nothing covers anything: greedy, nearest place first, the same every time.
"""

from __future__ import annotations

import itertools
import math
import reprlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from fastpipe.checks import check_type
from fastpipe.visualize import canvas
from fastpipe.visualize.colours import COLOURS

_WIDTH, _HEIGHT = 9.0, 6.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 0.8, 0.3, 0.75, 0.65
_SIZE = 9.5
_POINTS = 72.0
_ALLOWED = "memory limit"


class Compared(Protocol):
    """What a row of `fastpipe.compare` has."""

    @property
    def name(self) -> str:
        """The schedule's."""

    @property
    def bubble_fraction(self) -> float:
        """Of the ranks' time, 0 to 1."""

    @property
    def peak_memory(self) -> float:
        """Activations of a rank's share of the model."""


def pareto(
    rows: Iterable[Compared],
    path: str | Path,
    *,
    title: str | None = None,
    dpi: int = 150,
    chosen: str | None = None,
    others: Iterable[Compared] = (),
    limit: float | None = None,
    memory_label: str = "peak memory of a rank (activations of its share of the model)",
) -> Path:
    """Draw bubble against peak memory: the lower left is best.

    Args:
        rows: what `fastpipe.compare` returned; rows without numbers are left out.
        path: the file; its suffix says the format: .png, .svg or .pdf.
        title: the heading.
        dpi: pixels an inch of a PNG, 10 to 2400.
        chosen: the name of the one that is ringed.
        others: drawn as small grey points, without names: variants of `rows`.
        limit: of the memory, in the unit of ``peak_memory``; drawn as a line, where it is within the picture.
        memory_label: what the axis of ``peak_memory`` is called.

    Returns:
        The path.

    Raises:
        ImportError: when matplotlib is not installed.
        ValueError: for a suffix that is no format, or no row with numbers.
    """
    path = canvas.checked_path(path)
    canvas.check_size("dpi", dpi, 10, 2400, "pixels an inch")
    check_type(str | None, title=title, chosen=chosen)
    check_type(str, memory_label=memory_label)
    if limit is not None:
        canvas.check_size("limit", limit, 0, math.inf, "in the unit of peak_memory")
    shown, unnamed = _with_numbers("rows", rows), _with_numbers("others", others)
    if not shown:
        raise ValueError("rows: none has numbers, so there is nothing to draw")
    if chosen is not None and chosen not in (names := [row.name for row in shown]):
        raise ValueError(f"chosen = {chosen!r}: no row has this name; there are {', '.join(names)}")
    figure = canvas.figure(_WIDTH, _HEIGHT)
    size = (_WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM)
    axes = figure.add_axes((_LEFT / _WIDTH, _BOTTOM / _HEIGHT, size[0] / _WIDTH, size[1] / _HEIGHT))
    places = {_place(row) for row in (*shown, *unnamed)}
    points, rest = _merged(shown, places), _merged(unnamed, places)
    _frame(axes, points + rest, canvas.literal(memory_label))
    left, right = axes.get_xlim()
    limit = None if limit is None or not left <= limit <= right else limit
    _draw_rest(axes, rest, limit)
    _draw_front(axes, {point[:2] for point in points + rest if point[3]})
    _draw_points(axes, points)
    _draw_ring(axes, [row for row in shown if row.name == chosen])
    _draw_names(axes, points, rest, limit, size)
    heading = canvas.literal(title or "Bubble against peak memory")
    figure.text(0.12 / _WIDTH, 1 - 0.14 / _HEIGHT, heading, va="top", size=13, weight="bold", color=canvas.INK)
    note = "lower left is better; joined: no other schedule has both a smaller bubble and a smaller memory"
    note += "; grey: variants of those named" if rest else ""
    figure.text(0.12 / _WIDTH, 1 - 0.43 / _HEIGHT, note, va="top", size=9, color=canvas.INK)
    return canvas.save(figure, path, dpi)


def _with_numbers(name: str, rows: Iterable[Compared]) -> list[Compared]:
    rows = list(rows) if isinstance(rows, Iterable) else [rows]
    for row in rows:
        if not hasattr(row, "bubble_fraction"):
            raise TypeError(f"{name}: expected what fastpipe.compare returned, found {reprlib.repr(rows)}")
    return [row for row in rows if math.isfinite(row.bubble_fraction) and math.isfinite(row.peak_memory)]


Point = tuple[float, float, str, bool]
"""Memory, bubble in percent, names, whether it is best."""


def _place(row: Compared) -> tuple[float, float]:
    return round(row.peak_memory, 6), round(100 * row.bubble_fraction, 3)


def _merged(shown: list[Compared], places: Collection[tuple[float, float]]) -> list[Point]:
    """One point for schedules that fall on the same place: their names stand together. Best is what none of all
    `places` beats."""
    names: dict[tuple[float, float], list[str]] = {}
    for row in shown:
        names.setdefault(_place(row), []).append(row.name)
    return [
        (memory, bubble, _folded(found), not any(_beats(other, (memory, bubble)) for other in places))
        for (memory, bubble), found in names.items()
    ]


def _folded(names: list[str]) -> str:
    """Names side by side, three a line."""
    names = [canvas.literal(name) for name in names]
    return ",\n".join(", ".join(names[first : first + 3]) for first in range(0, len(names), 3))


def _beats(other: tuple[float, float], this: tuple[float, float]) -> bool:
    return other != this and other[0] <= this[0] and other[1] <= this[1]


def _frame(axes: Any, points: list[Point], memory_label: str) -> None:
    memory, bubble = (np.array([point[axis] for point in points]) for axis in (0, 1))
    margin = max(0.08 * float(np.ptp(memory)), 0.05 * float(memory.max()), 0.1)
    axes.set_xlim(max(0.0, memory.min() - margin), memory.max() + margin)
    axes.set_ylim(0, max(1.0, bubble.max() * 1.1))
    axes.set_xlabel(memory_label, color=canvas.INK)
    axes.set_ylabel("bubble (% of the ranks' time)", color=canvas.INK)
    axes.grid(color=canvas.FAINT, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(colors=canvas.INK, length=0)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(canvas.INK)


def _draw_rest(axes: Any, rest: list[Point], limit: float | None) -> None:
    axes.scatter([p[0] for p in rest], [p[1] for p in rest], s=9, color=canvas.INK, alpha=0.35, linewidth=0, zorder=1)
    if limit is not None:
        axes.axvline(limit, color=canvas.INK, linewidth=0.9, linestyle=(0, (4, 3)), zorder=1, gid="limit")
        at_top = {"xytext": (-7, -2), "textcoords": "offset points", "xycoords": ("data", "axes fraction")}
        axes.annotate(_ALLOWED, (limit, 1), ha="right", va="top", rotation=90, size=_SIZE, color=canvas.INK, **at_top)


def _draw_front(axes: Any, best: Collection[tuple[float, float]]) -> None:
    memory, bubble = zip(*sorted(best), strict=True)
    axes.plot(memory, bubble, "-", color=COLOURS["F"], linewidth=1.4, zorder=2, gid="front")


def _draw_points(axes: Any, points: list[Point]) -> None:
    best = sorted(point for point in points if point[3])
    rest = [point for point in points if not point[3]]
    for group, face, marker in ((best, COLOURS["F"], "o"), (rest, "white", "o")):
        axes.scatter(
            [p[0] for p in group],
            [p[1] for p in group],
            s=46,
            marker=marker,
            facecolor=face,
            edgecolor=COLOURS["F"] if face != "white" else canvas.INK,
            linewidth=1.2,
            zorder=5,
        )


def _draw_ring(axes: Any, rows: list[Compared]) -> None:
    """A ring around what was chosen: of several of the same name, the best."""
    if rows:
        row = min(rows, key=lambda one: one.bubble_fraction)
        ring = {"facecolor": "none", "edgecolor": COLOURS["W"], "linewidth": 2.0}
        axes.scatter([row.peak_memory], [100 * row.bubble_fraction], s=170, zorder=6, gid="chosen", **ring)


def _draw_names(
    axes: Any, points: list[Point], rest: list[Point], limit: float | None, size: tuple[float, float]
) -> None:
    """Each name beside its point, where it covers no point, line or other name; a line if it is far or ambiguous."""
    from matplotlib.patheffects import withStroke

    scale = np.array([size[0] * _POINTS / np.ptp(axes.get_xlim()), size[1] * _POINTS / np.ptp(axes.get_ylim())])
    origin = np.array([axes.get_xlim()[0], axes.get_ylim()[0]])
    marks, unnamed = ([_on_page(point, origin, scale) for point in group] for group in (points, rest))
    boxes = [_text_size(point[2]) for point in points]
    page = Box(0.0, 0.0, size[0] * _POINTS + _RIGHT * _POINTS - 4, size[1] * _POINTS)
    best = sorted(_on_page(point, origin, scale) for point in points + rest if point[3])
    lines, covered = [best], [square(mark, 2.0) for mark in unnamed]
    if limit is not None:
        at, _ = _on_page((limit, 0.0), origin, scale)
        length, height = _text_size(_ALLOWED)
        lines.append([(at, 0.0), (at, page.top)])
        covered.append(Box(at - 7 - height, page.top - length, at, page.top))
    places = place_labels(marks, boxes, page, lines, covered)
    halo = [withStroke(linewidth=2.5, foreground="white")]
    for point, mark, box in zip(points, marks, places, strict=True):
        corner = np.array([box.left, box.bottom]) / scale + origin
        style = {"fontsize": _SIZE, "color": canvas.INK, "linespacing": 1.1, "path_effects": halo, "va": "bottom"}
        axes.text(*corner, point[2], clip_on=False, zorder=4, gid=f"name {point[2]}", **style)
        distance = _distance(mark, box)
        if distance > 14 or any(
            _distance(other, box) < 1.5 * distance for other in (*marks, *unnamed) if other != mark
        ):
            ends = np.array([mark, box.nearest(mark)]) / scale + origin
            axes.plot(ends[:, 0], ends[:, 1], color=canvas.INK, linewidth=0.5, zorder=1)


def _distance(mark: tuple[float, float], box: Box) -> float:
    return math.dist(mark, box.nearest(mark))


def _on_page(point: Sequence[Any], origin: Any, scale: Any) -> tuple[float, float]:
    """Where a point is, in points (1/72 inch) from the lower left corner of the axes."""
    x, y = (np.array(point[:2], dtype=float) - origin) * scale
    return float(x), float(y)


def _text_size(text: str) -> tuple[float, float]:
    """Width and height in points."""
    lines = text.split("\n")
    width = max(canvas.text_width(line, _SIZE) for line in lines)
    return width + 7, len(lines) * _SIZE * 1.32


_DIRECTIONS = 24
_DISTANCES = (8.0, 14.0, 22.0, 32.0, 44.0, 60.0, 80.0, 105.0, 135.0, 170.0)
_MARK = 5.0
_STEP = 3.0


class Box(NamedTuple):
    """A rectangle in points."""

    left: float
    bottom: float
    right: float
    top: float

    def overlaps(self, other: Box) -> bool:
        """Whether the two have an area in common."""
        return (
            self.left < other.right and other.left < self.right and self.bottom < other.top and other.bottom < self.top
        )

    def nearest(self, point: tuple[float, float]) -> tuple[float, float]:
        """Its point that is nearest to another."""
        return min(max(point[0], self.left), self.right), min(max(point[1], self.bottom), self.top)

    def inside(self, other: Box) -> bool:
        """Whether it lies within the other."""
        return (
            self.left >= other.left
            and self.right <= other.right
            and self.bottom >= other.bottom
            and self.top <= other.top
        )


def place_labels(
    marks: Sequence[tuple[float, float]],
    sizes: Sequence[tuple[float, float]],
    page: Box,
    lines: Sequence[Sequence[tuple[float, float]]] = (),
    covered: Sequence[Box] = (),
) -> list[Box]:
    """A box for every label.

    Args:
        marks: the points, in points (1/72 inch).
        sizes: width and height of every label.
        page: what the labels stay inside of, where possible.
        lines: the corners of lines that they do not cover either.
        covered: nor what is in these.
    """
    taken = [*covered, *(square(mark, _MARK) for mark in marks)]
    for start, end in itertools.chain.from_iterable(map(itertools.pairwise, lines)):
        steps = max(1, int(math.dist(start, end) / _STEP))
        taken += [square(_between(start, end, step / steps), 1.0) for step in range(steps + 1)]
    placed: dict[int, Box] = {}
    crowded = sorted(range(len(marks)), key=lambda i: -sum(math.dist(marks[i], mark) < 60 for mark in marks))
    for index in crowded:
        candidates = list(_around(marks[index], sizes[index]))
        free = (box for box in candidates if box.inside(page) and not any(box.overlaps(other) for other in taken))
        placed[index] = next(free, candidates[0])
        taken.append(placed[index])
    return [placed[index] for index in range(len(marks))]


def square(centre: tuple[float, float], half: float) -> Box:
    """The one around a point, whose sides are twice as long as `half`."""
    return Box(centre[0] - half, centre[1] - half, centre[0] + half, centre[1] + half)


def _between(start: tuple[float, float], end: tuple[float, float], share: float) -> tuple[float, float]:
    return start[0] + share * (end[0] - start[0]), start[1] + share * (end[1] - start[1])


def _around(mark: tuple[float, float], size: tuple[float, float]) -> Iterator[Box]:
    """Boxes around a point, the near ones first; to the right before above, below and left."""
    x, y = mark
    width, height = size
    for distance in _DISTANCES:
        for turn in sorted(range(_DIRECTIONS), key=lambda t: min(t, _DIRECTIONS - t)):
            angle = 2 * math.pi * turn / _DIRECTIONS
            right, up = math.cos(angle), math.sin(angle)
            left = x + distance * right - width * (1 - right) / 2
            bottom = y + distance * up - height * (1 - up) / 2
            yield Box(left, bottom, left + width, bottom + height)
