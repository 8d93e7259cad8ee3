"""From measured steps to costs, and from a plan to another schedule.

Promises: measuring leaves gradients, buffers and random numbers as they were.
Uses: `step` and all below.
"""

from __future__ import annotations

from fastpipe.runtime.tune.profiling import Measured, profile

__all__ = ["Measured", "profile"]
