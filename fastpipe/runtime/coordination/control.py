"""Control: what the processes of a pipeline tell each other beside the tensors. The interface, and that of one alone.

Before a step they agree that every one has good inputs and whether shapes are known; after it, that it went well
everywhere, and the losses. In between they learn of a failure on another rank, or of the death of a process, so that
everybody can stop computing. `fastpipe.runtime.coordination.processes` does so for several.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from fastpipe.runtime.common import Failure, cause_text
from fastpipe.runtime.coordination.deferred import DeferredResults

REFUSED = "refused"
"""The key of why a process cannot do what all are about to do."""

Reply = dict[str, Any]


class Control(ABC):
    """The exchange between the processes of a pipeline.

    Attributes:
        rank: this process.
        step: how often `begin` was called.
        deferred: for what a device has later than the host ends a step; None where there is nobody to tell.
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
            LostError: when a process is dead or does not come, or the store is gone.
        """

    @abstractmethod
    def begin(self, on_failure: Callable[[Failure], None]) -> None:
        """Start a step: from now on a failure elsewhere is reported to ``on_failure``, from another thread."""

    @abstractmethod
    def exchange(self, phase: str, message: Reply) -> list[Reply]:
        """Give a message and get those of all processes, in order.

        Raises:
            LostError: when a process is dead or does not come, or the store is gone.
        """

    @abstractmethod
    def publish(self, failure: Failure) -> Failure:
        """Tell the others at once that this process failed.

        Returns:
            The step's first failure: this one, or that of a process which was faster.
        """

    @abstractmethod
    def end(self) -> None:
        """The step is over."""

    def on_loss(self, tell: Callable[[Failure], None]) -> None:  # noqa: B027 - one alone cannot lose anybody
        """From now on ``tell`` is called when a process has ended before it closed the pipeline, in a step or between
        two; from another thread, and more than once."""

    def lost(self, awaited: Sequence[int] | None = None) -> Failure | None:
        """What keeps another process from building the pipeline, or in a step from taking part in it, if that is known.

        Args:
            awaited: while it is built, the ranks whose end matters; that of all unless given. Who has done its part may
                go.
        """
        return None

    def give_up(self, failure: Failure) -> None:  # noqa: B027 - one alone has nobody to tell
        """Leave word, while the pipeline is built, why this process does not build it."""

    def close(self) -> None:  # noqa: B027 - a control without threads has nothing to stop
        """Stop watching."""


class Alone(Control):
    """One process: nobody to tell."""

    def setup(self, message: Reply) -> list[Reply]:
        """Its own message."""
        return [message]

    def begin(self, on_failure: Callable[[Failure], None]) -> None:
        """Nothing to watch."""

    def exchange(self, phase: str, message: Reply) -> list[Reply]:
        """Its own message."""
        return [message]

    def publish(self, failure: Failure) -> Failure:
        """Nobody to tell."""
        return failure

    def end(self) -> None:
        """Nothing to stop."""


def tell(
    exchange: Callable[[Reply], list[Reply]], message: Reply, error: BaseException | None
) -> tuple[list[Reply], tuple[int, str] | None]:
    """Give a message, or why this process cannot go on, before something that all have to do or none.

    Args:
        exchange: gives the message to all, and gets theirs.
        message: what the others need to know.
        error: what keeps this process from it, if anything does. Nobody waits for one that gave up.

    Returns:
        The messages of all, and the first process that refused, with its reason.

    Raises:
        LostError: when a process is dead or does not come, or the store is gone.
    """
    replies = exchange(message if error is None else message | {REFUSED: cause_text(error)})
    refused = next(((rank, reply[REFUSED]) for rank, reply in enumerate(replies) if REFUSED in reply), None)
    return replies, refused
