"""Ctrl-C in a step: the step fails and is drained everywhere, and then KeyboardInterrupt is raised.

Python raises KeyboardInterrupt between any two lines of the main thread. Between two transfers it would leave messages
that the next step takes for its own, and peers that wait for ever.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType


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
