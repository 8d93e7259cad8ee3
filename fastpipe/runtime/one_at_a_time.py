"""One at a time: a pipeline's steps use the same channels and buffers, so two at once would take each other's."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from fastpipe.runtime.forked import Home


class OneAtATime:
    """Lets one call into a pipeline, in the process that built it."""

    def __init__(self) -> None:
        self._home = Home()
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """The call is under way within.

        Raises:
            RuntimeError: while another one is, or in a forked child.
        """
        self._home.check()
        if not self._lock.acquire(blocking=False):
            raise RuntimeError(
                "this pipeline is in the middle of another call: in another thread, or this one was made by a layer, "
                "loss function or hook of its own; wait for that call to end, or build a pipeline for each thread"
            )
        try:
            yield
        finally:
            self._lock.release()
