"""Bars that are narrower than pixels, as pixels: each has the mean colour of what it covers."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fastpipe.visualize.bars import Bars, Floats, Ints

Part = tuple[Ints, npt.NDArray[np.float64], bool, bool]
"""Bars of one colour, the colour (0 to 1), and whether they are seen in the upper and in the lower half of the row."""


def pixels(drawn: Bars, parts: list[Part], longest: float, width: int, height: int, fill: float) -> Floats:
    """A picture of all rows: shape ``(ranks * height, width, 3)``, values of 0 to 1.

    Args:
        drawn: the bars.
        parts: which of them have which colour.
        longest: seconds that the width shows.
        width: pixels.
        height: pixels of a row.
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
