"""Control: exchanges between the processes of a pipeline beside tensors. The interface, and the one of a single
process.

Before a step the processes agree that all inputs are valid and whether shapes are cached; after it they gather results
and losses. Within the step each learns of failures and exits of others, so that all stop.
`fastpipe.runtime.coordination.processes` is the control of several processes.
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
        step: number of calls of `begin`.
        deferred: results that the device computes after the host ends a step; None for a single process.
        elsewhere: in a mesh, the messages of the other pipelines in the last exchange, pipeline after pipeline.
        remark: a note for `Pipeline.describe`; empty if there is nothing unusual.
    """

    rank = 0
    size = 1
    step = 0
    deferred: DeferredResults | None = None
    remark = ""
    elsewhere: Sequence[Reply] = ()

    @property
    def dead(self) -> list[Failure]:
        """The processes that have exited, by rank; from any thread. In a mesh also those of other pipelines."""
        return []

    @abstractmethod
    def setup(self, message: Reply) -> list[Reply]:
        """The first exchange.

        Raises:
            FailureError: if a process is dead or silent, or the store is gone.
        """

    @abstractmethod
    def begin(self, on_failure: Callable[[Failure], None]) -> None:
        """Start a step; failures on other ranks are passed to ``on_failure``, from another thread."""

    @abstractmethod
    def exchange(self, phase: str, message: Reply) -> list[Reply]:
        """Send a message and return the messages of all processes, by rank.

        Raises:
            FailureError: if a process is dead or silent, or the store is gone.
        """

    def exchange_within(self, phase: str, message: Reply) -> list[Reply]:
        """Like `exchange` while a pipeline is built, in this pipeline alone where several of a mesh share a control."""
        return self.exchange(phase, message)

    @abstractmethod
    def publish(self, failure: Failure) -> Failure:
        """Report a failure of this process to the others at once; before the first step, that it cannot build the
        pipeline.

        Returns:
            The first failure of the step, or of construction: this one, or an earlier one of another process.
        """

    @abstractmethod
    def end(self) -> None:
        """End the step."""

    def on_loss(self, report: Callable[[Failure], None]) -> None:  # noqa: B027 - a single process loses none
        """Call ``report`` if a process exits before it closes the pipeline, in or between steps; from another thread,
        possibly more than once."""

    def lost(self, awaited: Sequence[int] | None = None) -> Failure | None:
        """The failure that keeps another process from building the pipeline, or from taking part in the step, if any is
        detected.

        Args:
            awaited: during construction, the ranks whose exit matters; default: all. A process that has done its part
                may exit.
        """
        return None

    def put_place(self, step: int, is_active: bool, text: str) -> None:  # noqa: B027 - nobody to read it
        """Write for the others what this process does, from any thread.

        Args:
            step: the number of the current or last step.
            is_active: whether the process is within it.
            text: what it does.
        """

    def places(self) -> dict[int, tuple[int, bool, str]]:
        """What other processes have written by `put_place`, by rank; from any thread."""
        return {}

    def close(self) -> None:  # noqa: B027 - a control without threads has nothing to stop
        """Stop watching."""


class Alone(Control):
    """The control of a single process: nothing to exchange."""

    def setup(self, message: Reply) -> list[Reply]:
        """Return the message."""
        return [message]

    def begin(self, on_failure: Callable[[Failure], None]) -> None:
        """Nothing to watch."""

    def exchange(self, phase: str, message: Reply) -> list[Reply]:
        """Return the message."""
        return [message]

    def publish(self, failure: Failure) -> Failure:
        """Return the failure."""
        return failure

    def end(self) -> None:
        """Nothing to stop."""


def exchange_or_refuse(
    exchange: Callable[[Reply], list[Reply]], message: Reply, failure: Failure | None
) -> tuple[list[Reply], Failure | None]:
    """Exchange messages before an action of all processes or none.

    Args:
        exchange: sends a message to all and returns theirs.
        message: for the others.
        failure: what keeps this process from the action, if anything.

    Returns:
        The messages of all, and the failure of the lowest rank that has one.

    Raises:
        FailureError: if a process is dead or silent, or the store is gone.
    """
    replies = exchange(message if failure is None else message | {"failure": asdict(failure)})
    failures = (Failure(**reply["failure"]) for reply in replies if "failure" in reply)
    return replies, next(failures, None)
