"""Text inside bars: written only where it fits, as a few paths rather than thousands of text objects."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from fastpipe.visualize.bars import Floats, Ints

if TYPE_CHECKING:
    from matplotlib.path import Path

LARGEST, SMALL, SMALLEST = 9.0, 6.5, 4.8
"""Points: the first choice, the last one in favour of labelling every bar, the last one that can be read."""

_DIGIT = 0.65
_HIGH = 1.05
_AIR = 0.3
"""How wide a digit is, how high with a little air, and the air beside a number, in sizes of the font."""


def font_size(width: Floats, height: Floats, numbers: Ints) -> float:
    """One size for all bars of a panel, such that all labels fit, or three of four when they are small, or one of four.

    It is 0 where fewer have room.

    Args:
        width: of every bar, in points.
        height: the same.
        numbers: what is to be written into them.
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
        numbers: what is written.
        x: the centre of each, in data coordinates.
        y: the same.
        size: of the font, in points.
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
