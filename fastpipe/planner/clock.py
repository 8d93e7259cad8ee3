"""The clock of a plan: when its time is over."""

from __future__ import annotations

import math
import time


class Clock:
    """Runs from when it is made.

    Args:
        limit: seconds; None for any number.
    """

    def __init__(self, limit: float | None) -> None:
        self.limit, self.start = limit, time.monotonic()
        self.cut = False

    def stop(self) -> None:
        """End the time now."""
        self.limit = 0.0

    def elapsed(self) -> float:
        """Seconds since it was made."""
        return time.monotonic() - self.start

    def is_over(self) -> bool:
        """Whether the time is over; what asks then stops, and the plan says that it was cut."""
        return self.is_past(1.0)

    def is_past(self, part: float) -> bool:
        """Whether more than a part of a limit is over; what asks then leaves out what is left of it."""
        past = self.limit is not None and self.elapsed() >= part * self.limit
        self.cut |= past
        return past

    def left(self) -> float:
        """Seconds that are left; infinite without a limit."""
        return math.inf if self.limit is None else max(0.0, self.limit - self.elapsed())
