"""Events of a device that say when a step's work is done, and whether its results can be trusted.

A device may be far behind its host. A process that is lost meanwhile may have owed a message to any stream, of this
process or of an earlier one; and waiting streams are unblocked, on whatever lies in their buffers. So events that are
not done by then are invalidated first. Each event is judged once, and everybody who waits for it gets the same verdict.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterable

import torch

from fastpipe.errors import StepError
from fastpipe.runtime.common import Failure, FailureError, cause_text, recorded

Check = Callable[[], None]
"""Raises FailureError when a message never came and its stream was unblocked."""

_PAUSE = 1e-3


class DeviceEvent:
    """One of them; made by `DeviceEvents`.

    Args:
        device: which one.
        check: of all messages so far.
    """

    def __init__(self, device: torch.device, check: Check) -> None:
        self._check, self._event = check, recorded(device)
        # reentrant: what is collected under it may close a pipeline
        self._lock = threading.RLock()
        self._judged = False
        self._lost: Failure | None = None

    @property
    def is_over(self) -> bool:
        """Whether `wait` would return at once."""
        return self._judged or self._is_done()

    def invalidate(self, failure: Failure, *, even_if_done: bool = False) -> None:
        """Streams are about to be unblocked: what is not done by now cannot be trusted."""
        with self._lock:
            if not self._judged:
                self._judge(failure if even_if_done or not self._is_done() else None)

    def wait(self) -> None:
        """Wait for it. From any thread; all get the same verdict.

        Raises:
            StepError: when it was invalidated, or a message never came.
        """
        if not self._judged:
            # not under the lock, as `invalidate` does not wait
            self._event.synchronize()
        with self._lock:
            if not self._judged:
                self._judge(None)
            lost = self._lost
        if lost is not None:
            raise lost.error()

    def _is_done(self) -> bool:
        try:
            return self._event.query()
        except RuntimeError:  # a device that is lost has done nothing that can be trusted
            return False

    def _judge(self, lost: Failure | None) -> None:
        if lost is None:
            try:
                self._check()
            except FailureError as error:
                lost = error.failure
        self._judged, self._lost = True, lost


class DeviceEvents:
    """Those of one process, and the checks of its messages. From any thread, but where it says otherwise."""

    def __init__(self) -> None:
        # reentrant, as above; never taken by a thread that holds an event's
        self._lock = threading.RLock()
        self._made: weakref.WeakSet[DeviceEvent] = weakref.WeakSet()
        self._checks: tuple[Check, ...] = ()
        self._lost: Failure | None = None

    def add_checks(self, checks: Iterable[Check]) -> None:
        """Add checks. By the thread that runs steps."""
        self._checks = (*self._checks, *checks)

    def drop_checks(self) -> None:
        """Drop all checks, when no event needs them any more. By the thread that runs steps."""
        for event in self._open():
            try:
                event.wait()
            except StepError:
                pass  # raised to those who wait for it
            except RuntimeError as error:
                event.invalidate(Failure(None, cause_text(error), is_fatal=True))
        self._checks = ()

    def make(self, device: torch.device) -> DeviceEvent:
        """The event of all that a device has been given so far."""
        event = DeviceEvent(device, self.check)
        with self._lock:
            self._made.add(event)
            lost = self._lost
        if lost is not None:
            # it may be done because its streams were unblocked
            event.invalidate(lost, even_if_done=True)
        return event

    def check(self) -> None:
        """Whether the devices got every message that they waited for.

        Raises:
            FailureError: when one never came, or streams have been unblocked.
        """
        for check in self._checks:
            check()
        if self._lost is not None:
            raise FailureError(self._lost)

    def invalidate(self, failure: Failure) -> None:
        """Streams are about to be unblocked: what no device has done by now is invalid, and all that comes later."""
        with self._lock:
            for event in self._open():
                event.invalidate(failure)
            # after them: those that are done are checked
            self._lost = self._lost or failure

    def close(self, failure: Failure, seconds: float) -> bool:
        """The same for a pipeline that is closed, when its device has had so many seconds; whether that was enough."""
        until = time.monotonic() + seconds
        while not (done := all(event.is_over for event in self._open())) and time.monotonic() < until:
            time.sleep(_PAUSE)
        self.invalidate(failure)
        return done

    def _open(self) -> list[DeviceEvent]:
        """Those without a verdict."""
        with self._lock:
            return [event for event in self._made if not event._judged]
