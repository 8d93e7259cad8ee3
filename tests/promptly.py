"""How long "at once" may take on a machine that has other things to do."""

import os


def promptly(seconds: float, within: float = 2.0) -> bool:
    """Whether something took no longer than it may.

    The limit holds for a machine that does nothing else; where others compute, too, processes wait for their turn.
    """
    return seconds < within * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
