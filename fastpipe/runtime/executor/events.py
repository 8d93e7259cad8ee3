"""Events of a device that say when a step's work is done, and whether its results can be trusted.

A device may be far behind its host. A process that is lost meanwhile may have owed a message to any stream, of this
process or of an earlier one; and waiting streams are released, on whatever lies in their buffers. So events that are
not done by then are invalidated first. Each event is judged once, and everybody who waits for it gets the same verdict.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterable

import torch

from fastpipe.errors import StepError
from fastpipe.runtime.common import Failure, TransportError, cause_text, recorded

Check = Callable[[], None]
"""Raises TransportError when a message never came and its stream was let go."""

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
        """Whether nobody would wait for it."""
        return self._judged or self._is_done()

    def give_up(self, failure: Failure, *, even_if_done: bool = False) -> None:
        """Streams are about to be let go: what is not done by now cannot be trusted."""
        with self._lock:
            if not self._judged:
                self._judge(failure if even_if_done or not self._is_done() else None)

    def wait(self) -> None:
        """Wait for it. From any thread, each of which is told the same.

        Raises:
            StepError: when it was given up, or a message never came.
        """
        if not self._judged:
            # not under the lock, as who gives it up does not wait
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
            except TransportError as error:
                lost = error.failure()
        self._judged, self._lost = True, lost


class DeviceEvents:
    """Those of one process, and what tells whether its messages came. From any thread, but where it says otherwise."""

    def __init__(self) -> None:
        # reentrant, as above; never taken by who has a moment's
        self._lock = threading.RLock()
        self._made: weakref.WeakSet[DeviceEvent] = weakref.WeakSet()
        self._checks: tuple[Check, ...] = ()
        self._lost: Failure | None = None

    def ask(self, checks: Iterable[Check]) -> None:
        """From now on these are asked, too. By the thread that runs steps."""
        self._checks = (*self._checks, *checks)

    def ask_nobody(self) -> None:
        """Those that are asked are about to go: waits until nobody needs them. By the thread that runs steps."""
        for moment in self._open():
            try:
                moment.wait()
            except StepError:
                pass  # told to who asks
            except RuntimeError as error:
                moment.give_up(Failure(None, cause_text(error), dead=True))
        self._checks = ()

    def make(self, device: torch.device) -> DeviceEvent:
        """When a device has done what it has been given so far."""
        moment = DeviceEvent(device, self.check)
        with self._lock:
            self._made.add(moment)
            lost = self._lost
        if lost is not None:
            # it may be done because its streams were let go
            moment.give_up(lost, even_if_done=True)
        return moment

    def check(self) -> None:
        """Whether all that the devices have come to the end of was there.

        Raises:
            TransportError: when a message never came, or streams have been let go.
        """
        for check in self._checks:
            check()
        if self._lost is not None:
            raise TransportError(self._lost.cause, self._lost.rank)

    def give_up(self, failure: Failure) -> None:
        """Streams are about to be let go: what no device has done by now is given up, and all that comes later."""
        with self._lock:
            for moment in self._open():
                moment.give_up(failure)
            # after them: what is done is asked whether its messages came
            self._lost = self._lost or failure

    def close(self, failure: Failure, seconds: float) -> bool:
        """The same for a pipeline that is closed, when its device has had so many seconds; whether that was enough."""
        until = time.monotonic() + seconds
        while not (done := all(moment.is_over for moment in self._open())) and time.monotonic() < until:
            time.sleep(_PAUSE)
        self.give_up(failure)
        return done

    def _open(self) -> list[DeviceEvent]:
        """Those that nobody has judged yet."""
        with self._lock:
            return [moment for moment in self._made if not moment._judged]
