"""From measured steps to costs, and from a plan to another schedule.

Promises: measuring restores gradients, buffers and random generators.
Uses: `step` and all below.
"""

from __future__ import annotations

from fastpipe.runtime.tune.profiling import Profile, profile
