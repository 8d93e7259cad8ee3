"""Guards of a pipeline: use in a forked child, concurrent calls, Ctrl-C within a step.

A pipeline belongs to the process that built it. A forked child, for example a DataLoader worker, has copies of its
objects, but neither its threads nor a rank. So the child must not run a step, go on with its parent's, or close what
the parent uses, and objects whose destructors wait for a thread are never destroyed there (``csrc/core/common.h`` does
the same for C++ objects).

Steps of one pipeline share channels and buffers, so only one call runs at a time.

Python may raise KeyboardInterrupt between any two lines of the main thread. Between two transfers that would leave
messages for the next step to misread, and blocked peers. So Ctrl-C makes the step fail and drain on all ranks; then
KeyboardInterrupt is raised.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

_kept: weakref.WeakSet[Any] = weakref.WeakSet()


def end_child(process: int, cause: str) -> None:
    """End this process unless it is the one in which its pipeline was built. Called before a rank tells the others
    anything.

    A child that a layer has forked, and that comes out of it, would take part in the step in place of its parent.
    """
    if os.getpid() == process:
        return
    why = f" ({cause})" if cause else ""
    print(
        f"fastpipe: process {os.getpid()} is a child that a layer, a loss function or an iterator has forked in a call "
        f"of the pipeline of process {process}, and has left that function{why}; it ends here, as it is not a rank: "
        "end such a child by os._exit()",
        file=sys.stderr,
        flush=True,
    )
    os._exit(1)


def keep_in_children(thing: Any) -> None:
    """Never destroy the object in forked children."""
    _kept.add(thing)


def _keep() -> None:
    for thing in _kept:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


os.register_at_fork(after_in_child=_keep)


@contextlib.contextmanager
def claimed(lock: threading.Lock, refusal: str) -> Iterator[None]:
    """Hold a lock; never waits for it.

    Raises:
        RuntimeError: with this text, if it is held already.
    """
    if not lock.acquire(blocking=False):
        raise RuntimeError(refusal)
    try:
        yield
    finally:
        lock.release()


class Calls:
    """The calls into a pipeline: one at a time, in the process that built it, with interrupts at their end.

    Args:
        on_interrupt: called in the main thread at any line: it must not take a lock that a step takes.

    Attributes:
        interrupted: whether there was an interrupt in this step.
    """

    def __init__(self, on_interrupt: Callable[[], None]) -> None:
        self.interrupted = False
        self._on_interrupt = on_interrupt
        self._process = os.getpid()
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Run a call within this context.

        Raises:
            RuntimeError: during another call, or in a forked child.
        """
        if os.getpid() != self._process:
            raise RuntimeError(
                f"this pipeline was built in process {self._process}, and process {os.getpid()} is a forked "
                "child of it, without the pipeline's threads and connections; run steps in the process that built it"
            )
        refusal = (
            "this pipeline is in the middle of another call: in another thread, or this one was made by a layer, "
            "loss function or hook of its own; wait for that call to end, or build a pipeline for each thread"
        )
        with claimed(self._lock, refusal):
            yield

    @contextlib.contextmanager
    def uninterrupted(self) -> Iterator[None]:
        """Raise KeyboardInterrupt at the end and not within; a second Ctrl-C raises at once.

        A handler set by the user stays, and other threads than the main thread get no signals.

        Raises:
            KeyboardInterrupt: in place of the block's exception, which becomes its context.
        """
        self.interrupted = False
        main = threading.current_thread() is threading.main_thread()
        if not main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            yield
            return
        signal.signal(signal.SIGINT, self._caught)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            if self.interrupted:
                raise KeyboardInterrupt

    def _caught(self, number: int, frame: FrameType | None) -> None:
        if self.interrupted:
            signal.default_int_handler(number, frame)
        self.interrupted = True
        self._on_interrupt()
