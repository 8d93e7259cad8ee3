"""Timelines made visible: a picture, an interactive page, a Chrome trace, a comparison, a text grid.

Nothing here computes a schedule or a time; the drawings show what timelines and schedules say. matplotlib is imported
when a picture is drawn, and not before. The package uses the core alone.
"""

from __future__ import annotations

from fastpipe.visualize.grid import grid
from fastpipe.visualize.page import to_html
from fastpipe.visualize.pareto import pareto
from fastpipe.visualize.picture import plot
from fastpipe.visualize.trace import to_chrome_trace
