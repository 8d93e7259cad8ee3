"""Events that show when a device has finished a step, and whether the results are valid.

A device may run far behind its host. If a process is lost meanwhile, streams of this process or of one upstream may
wait for its messages; they are unblocked, and continue on whatever is in their buffers. So events that are not done by
then are invalidated first. Each event gets one verdict, the same for all waiting threads.
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
"""Raises FailureError if a stream was unblocked without its message."""

_PAUSE = 1e-3


class DeviceEvent:
    """An event with a verdict; made by `DeviceEvents`. ``check`` checks all messages so far."""

    def __init__(self, device: torch.device, check: Check) -> None:
        self._check, self._event = check, recorded(device)
        # reentrant: garbage collection under it may close a pipeline
        self._lock = threading.RLock()
        self._has_verdict = False
        self._lost: Failure | None = None

    @property
    def is_over(self) -> bool:
        """Whether `wait` would return at once."""
        return self._has_verdict or self._is_done()

    def invalidate(self, failure: Failure, *, even_if_done: bool = False) -> None:
        """Before streams are unblocked: an event that is not done gets this failure."""
        with self._lock:
            if not self._has_verdict:
                self._decide(failure if even_if_done or not self._is_done() else None)

    def wait(self) -> None:
        """Wait for the event; from any thread.

        Raises:
            StepError: if it was invalidated, or a message never came.
        """
        if not self._has_verdict:
            # not under the lock, as `invalidate` must not wait
            self._event.synchronize()
        with self._lock:
            if not self._has_verdict:
                self._decide(None)
            lost = self._lost
        if lost is not None:
            raise lost.error()

    def _is_done(self) -> bool:
        try:
            return self._event.query()
        except RuntimeError:  # a lost device has no valid results
            return False

    def _decide(self, lost: Failure | None) -> None:
        if lost is None:
            try:
                self._check()
            except FailureError as error:
                lost = error.failure
        self._has_verdict, self._lost = True, lost


class DeviceEvents:
    """Events of one process, and the checks of its messages. Thread-safe except where noted."""

    def __init__(self) -> None:
        # reentrant, as above; never taken while holding an event's lock
        self._lock = threading.RLock()
        self._made: weakref.WeakSet[DeviceEvent] = weakref.WeakSet()
        self._checks: tuple[Check, ...] = ()
        self._lost: Failure | None = None

    def add_checks(self, checks: Iterable[Check]) -> None:
        """Add checks; only from the thread that runs steps."""
        self._checks = (*self._checks, *checks)

    def drop_checks(self) -> None:
        """Wait for all events, then drop all checks; only from the thread that runs steps."""
        for event in self._open():
            try:
                event.wait()
            except StepError:
                pass  # raised in the threads that wait for it
            except RuntimeError as error:
                event.invalidate(Failure(None, cause_text(error), is_fatal=True))
        self._checks = ()

    def make(self, device: torch.device) -> DeviceEvent:
        """Record an event after all work enqueued on a device so far."""
        event = DeviceEvent(device, self.check)
        with self._lock:
            self._made.add(event)
            lost = self._lost
        if lost is not None:
            # it may be done only because its streams were unblocked
            event.invalidate(lost, even_if_done=True)
        return event

    def check(self) -> None:
        """Check that the devices received every message.

        Raises:
            FailureError: if one never came, or streams have been unblocked.
        """
        for check in self._checks:
            check()
        if self._lost is not None:
            raise FailureError(self._lost)

    def invalidate(self, failure: Failure) -> None:
        """Before streams are unblocked: invalidate all events that are not done, and all later ones."""
        with self._lock:
            for event in self._open():
                event.invalidate(failure)
            # set afterwards, as done events are still checked
            self._lost = self._lost or failure

    def close(self, failure: Failure, seconds: float) -> bool:
        """For a pipeline that closes: invalidate after at most ``seconds``; returns whether the device was done."""
        until = time.monotonic() + seconds
        while not (done := all(event.is_over for event in self._open())) and time.monotonic() < until:
            time.sleep(_PAUSE)
        self.invalidate(failure)
        return done

    def _open(self) -> list[DeviceEvent]:
        """Events without a verdict."""
        with self._lock:
            return [event for event in self._made if not event._has_verdict]
