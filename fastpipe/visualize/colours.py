"""The one copy of the colours: the picture, the page, the text grid and the comparison all take theirs from here.

Told apart with every common kind of colour blindness: under a simulation of protanopia, deuteranopia and tritanopia
any two kinds differ by at least 18 in CIE L*a*b*, the shades of later stages included (a test computes it).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

COLOURS: Mapping[str, str] = {
    "F": "#2a90d9",
    "B": "#d6561a",
    "I": "#efc91a",
    "W": "#2f6352",
    "comm": "#16232b",
}
"""Forward, full backward, backward for the input, backward for the weights, communication."""

MEANINGS: Mapping[str, str] = {
    "F": "F  forward",
    "B": "B  backward",
    "I": "I  backward for the input",
    "W": "W  backward for the weights",
    "comm": "transfer",
}
"""What the legend says."""

KINDS = ("F", "B", "I", "W")
CRITICAL = "#d0148c"
"""The outline of the critical path: no kind has this colour, and an outline is told by its shape."""

LIGHTEST = 0.38
"""How far towards white the colour of a rank's last stage is moved."""


def channels(colour: str) -> tuple[int, int, int]:
    """Red, green and blue, 0 to 255, of ``"#rrggbb"``."""
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


def shade(kind: str, chunk: int, num_chunks: int) -> str:
    """The colour of a kind for the ``chunk``-th of the ``num_chunks`` stages of a rank: later ones are lighter."""
    towards_white = LIGHTEST * chunk / (num_chunks - 1) if num_chunks > 1 else 0.0
    mixed = (round(value + (255 - value) * towards_white) for value in channels(COLOURS[kind]))
    return "#" + "".join(f"{value:02x}" for value in mixed)


def shades(kind: str, num_chunks: int) -> npt.NDArray[np.float64]:
    """``shade`` for every chunk, as an array of shape ``(num_chunks, 3)`` with values of 0 to 1."""
    return np.array([channels(shade(kind, chunk, num_chunks)) for chunk in range(num_chunks)]) / 255.0


def luminance(colour: str) -> float:
    """The relative luminance of WCAG 2: 0 is black, 1 is white."""
    linear = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in (c / 255 for c in channels(colour))]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def ink(colour: str) -> str:
    """Black or white, whichever is read better on ``colour``."""
    return "#000000" if luminance(colour) > 0.179 else "#ffffff"
