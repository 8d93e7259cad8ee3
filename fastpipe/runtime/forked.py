"""Forked children: a pipeline belongs to the process that built it.

A child, say a worker of a DataLoader, has copies of the pipeline's objects, but neither its threads nor a place among
the ranks. So it must not run a step, nor end what the parent still uses; and what would wait for a thread when it is
destroyed is never destroyed there. (``csrc/core/common.h`` does the same for what C++ owns.)
"""

from __future__ import annotations

import ctypes
import os
import weakref
from typing import Any

_kept: weakref.WeakSet[Any] = weakref.WeakSet()


class Home:
    """The process in which it was made."""

    def __init__(self) -> None:
        self._process = os.getpid()

    @property
    def here(self) -> bool:
        """Whether this is that process."""
        return os.getpid() == self._process

    def check(self) -> None:
        """Refuse to run a step elsewhere.

        Raises:
            RuntimeError: in a forked child.
        """
        if not self.here:
            raise RuntimeError(
                f"this pipeline was built in process {self._process}, and process {os.getpid()} is a forked child of "
                "it, without the pipeline's threads and connections; run steps in the process that built it"
            )


def keep_in_children(thing: Any) -> None:
    """Forked children never destroy it."""
    _kept.add(thing)


def _keep() -> None:
    for thing in _kept:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


os.register_at_fork(after_in_child=_keep)
