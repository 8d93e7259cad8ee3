"""How long tests wait: for what should come at once, and for what should end at all."""

import os

# After so many seconds what should have ended is taken to hang. It is no measure of speed: on a machine that is ten
# times slower for a while tests pass all the same. pytest ends a test after twice as long (pyproject.toml).
PATIENCE = 300.0


def promptly(seconds: float, within: float = 2.0) -> bool:
    """Whether something took no longer than it may.

    The limit holds for a machine that does nothing else; where others compute, too, processes wait for their turn.
    """
    return seconds < within * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
