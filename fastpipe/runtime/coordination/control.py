"""Control: what the processes of a pipeline exchange beside tensors. The interface, and that of a single process.

Before a step they agree that all inputs are good and whether shapes are known; after it they gather how it went, and
the losses. In between each of them learns of a failure or of the death of another one, so that all stop computing.
`fastpipe.runtime.coordination.processes` is the control of several.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from fastpipe.runtime.common import Failure
from fastpipe.runtime.coordination.deferred import DeferredResults

Reply = dict[str, Any]


class Control(ABC):
    """The exchange between the processes of a pipeline.

    Attributes:
        rank: this process.
        step: how often `begin` was called.
        deferred: for results that a device has after the host ends a step; None for a single process.
        remark: what `Pipeline.describe` says of it; empty where there is nothing unusual.
    """

    rank = 0
    step = 0
    deferred: DeferredResults | None = None
    remark = ""

    @abstractmethod
    def setup(self, message: Reply) -> list[Reply]:
        """The first exchange.

        Raises:
            FailureError: when a process is dead or does not come, or the store is gone.
        """

    @abstractmethod
    def begin(self, on_failure: Callable[[Failure], None]) -> None:
        """Start a step: from now on a failure elsewhere is reported to ``on_failure``, from another thread."""

    @abstractmethod
    def exchange(self, phase: str, message: Reply) -> list[Reply]:
        """Give a message and get those of all processes, in order.

        Raises:
            FailureError: when a process is dead or does not come, or the store is gone.
        """

    @abstractmethod
    def publish(self, failure: Failure) -> Failure:
        """Report to the others at once that this process failed; before the first step, that it builds no pipeline.

        Returns:
            The first failure of the step, or of the building: this one, or that of a process which was faster.
        """

    @abstractmethod
    def end(self) -> None:
        """The step is over."""

    def on_loss(self, report: Callable[[Failure], None]) -> None:  # noqa: B027 - a single process loses none
        """From now on ``report`` is called when a process has ended before it closed the pipeline, in a step or between
        two; from another thread, and more than once."""

    def lost(self, awaited: Sequence[int] | None = None) -> Failure | None:
        """What keeps another process from building the pipeline, or in a step from taking part in it, if that is known.

        Args:
            awaited: while it is built, the ranks whose end matters; that of all unless given. A process that has done
                its part may end.
        """
        return None

    def close(self) -> None:  # noqa: B027 - a control without threads has nothing to stop
        """Stop watching."""


class Alone(Control):
    """A single process: nothing to exchange."""

    def setup(self, message: Reply) -> list[Reply]:
        """Its own message."""
        return [message]

    def begin(self, on_failure: Callable[[Failure], None]) -> None:
        """Nothing to watch."""

    def exchange(self, phase: str, message: Reply) -> list[Reply]:
        """Its own message."""
        return [message]

    def publish(self, failure: Failure) -> Failure:
        """The only one."""
        return failure

    def end(self) -> None:
        """Nothing to stop."""


def exchange_or_refuse(
    exchange: Callable[[Reply], list[Reply]], message: Reply, failure: Failure | None
) -> tuple[list[Reply], Failure | None]:
    """Exchange messages before something that all processes do or none.

    Args:
        exchange: gives the message to all, and gets theirs.
        message: what the others need to know.
        failure: what keeps this process from it, if anything does.

    Returns:
        The messages of all, and the failure of the first process that has one.

    Raises:
        FailureError: when a process is dead or does not come, or the store is gone.
    """
    replies = exchange(message if failure is None else message | {"failure": asdict(failure)})
    failures = (Failure(**reply["failure"]) for reply in replies if "failure" in reply)
    return replies, next(failures, None)
