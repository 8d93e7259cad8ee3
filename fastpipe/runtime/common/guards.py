"""Three guards of a pipeline: use in a forked child, calls at the same time, Ctrl-C within a step.

A pipeline belongs to the process that built it. A forked child, a DataLoader's worker for example, has copies of its
objects, but neither its threads nor a place among the ranks. So the child must not run a step or close what the
parent still uses, and an object whose destructor waits for a thread is never destroyed there (``csrc/core/common.h``
does the same for objects that C++ owns).

Steps of one pipeline use the same channels and buffers, so only one call runs at a time.

Python raises KeyboardInterrupt between any two lines of the main thread. Between two transfers that would leave
messages which the next step takes for its own, and peers that wait forever. So Ctrl-C makes the step fail and drain
on all ranks, and then KeyboardInterrupt is raised.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

_kept: weakref.WeakSet[Any] = weakref.WeakSet()


class ForkGuard:
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


class ReentrancyGuard:
    """Lets one call into a pipeline, in the process that built it."""

    def __init__(self) -> None:
        self._home = ForkGuard()
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


class Interrupts:
    """Holds back the interrupts of a step.

    Args:
        on_interrupt: called in the main thread, wherever it is: it must take no lock that a step takes.

    Attributes:
        pending: whether there was one in this step.
    """

    def __init__(self, on_interrupt: Callable[[], None]) -> None:
        self.pending = False
        self._on_interrupt = on_interrupt

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """Raise KeyboardInterrupt at the end, and not within; a second Ctrl-C does not wait.

        A handler of the user's own is left alone, and so is a thread that gets no signals.

        Raises:
            KeyboardInterrupt: in place of what the block raised, which becomes its context.
        """
        self.pending = False
        main = threading.current_thread() is threading.main_thread()
        if not main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            yield
            return
        signal.signal(signal.SIGINT, self._caught)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            if self.pending:
                raise KeyboardInterrupt

    def _caught(self, number: int, frame: FrameType | None) -> None:
        if self.pending:
            signal.default_int_handler(number, frame)
        self.pending = True
        self._on_interrupt()
