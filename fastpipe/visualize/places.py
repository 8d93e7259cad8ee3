"""Where names go beside points so that nothing covers anything: greedy, nearest place first, the same every time."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

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
