"""Pauses between looks: how to wait for what nobody rings for.

A store that is waited at instead, a while at a time, writes two warnings whenever nothing has come.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

LOOK_SECONDS = 0.1
"""The longest pause."""
_PAUSE_SECONDS = 0.001


def pauses(seconds: float) -> Iterator[float]:
    """Pauses until the time is over: short ones at first, as most things come soon."""
    start = now = time.monotonic()
    while now < start + seconds:
        yield min(_PAUSE_SECONDS + (now - start) / 10, LOOK_SECONDS, start + seconds - now)
        now = time.monotonic()
