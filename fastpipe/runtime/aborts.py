"""Aborts: ending process groups of NCCL in which messages may wait for a rank that is lost."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Iterable
from typing import Any

from fastpipe.runtime.aside import aside
from fastpipe.runtime.failure import first_line

logger = logging.getLogger("fastpipe")


class Aborts:
    """Aborts of several groups, which have all begun when this is there; nobody has waited for any.

    One after the other they might wait for each other for ever: NCCL may wait for the whole device before it frees what
    a communicator had, and there a kernel of the next group waits for the lost rank. Torch waits for an abort as long
    as the group's timeout, too, and NCCL until every CUDA graph with a message of the group is gone.

    Args:
        backends: of the groups.
    """

    def __init__(self, backends: Iterable[Any]) -> None:
        self._threads = aside([functools.partial(_abort, backend) for backend in backends], "fastpipe-abort")

    def wait(self, seconds: float) -> bool:
        """Wait until all have come to their end, no longer than so many seconds; whether they have."""
        until = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)


def _abort(backend: Any) -> None:
    try:
        backend.abort()
    except Exception as error:  # logged
        logger.warning(
            "a process group could not be aborted (%s); if the device does not come to its end, end this process",
            first_line(error),
        )
