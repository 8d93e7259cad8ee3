"""Control: exchanges between the processes of a pipeline beside tensors. The interface, as a single process has it, and
what all processes do together or not at all.

Before a step the processes agree that all inputs are valid and whether shapes are cached; after it they gather results
and losses. Within the step each learns of failures and exits of others, so that all stop.
`fastpipe.runtime.coordination.processes` is the control of several processes.

While a pipeline is built, all processes build the same one, or all raise.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

import torch.distributed as dist

from fastpipe.errors import StepError
from fastpipe.runtime.common import SHORT_EXIT_SECONDS, Failure, FailureError, cause_text, first_line, waiting
from fastpipe.runtime.coordination.deferred import DeferredResults

Reply = dict[str, Any]


class Replies(list[Reply]):
    """The messages of all processes of a pipeline, by rank.

    Attributes:
        elsewhere: in a mesh, those of the other pipelines, pipeline after pipeline, each with its ``pipeline``, such as
            ``tp=1``.
    """

    def __init__(self, replies: Iterable[Reply], elsewhere: Sequence[Reply] = ()) -> None:
        super().__init__(replies)
        self.elsewhere = elsewhere

    @property
    def everywhere(self) -> list[Reply]:
        """Those of all pipelines of the mesh, this one first."""
        return [*self, *self.elsewhere]

    @property
    def by_place(self) -> dict[str, Reply]:
        """Those of all pipelines of the mesh, by rank, with the place of its pipeline if that is another one."""
        own = {str(rank): reply for rank, reply in enumerate(self)}
        return own | {f"{i % len(self)} at {reply['pipeline']}": reply for i, reply in enumerate(self.elsewhere)}


class Control:
    """The exchange between the processes of a pipeline; with a single process there is nothing to exchange.

    Attributes:
        step: number of calls of `begin`.
        num_processes: the number of processes that the exchange reaches: in a mesh those of all its pipelines.
        number: of this process among them; its rank if there is one pipeline.
        deferred: results that the device computes after the host ends a step; None for a single process.
        pipeline: in a mesh, where this pipeline is.
        remark: a note for `Pipeline.describe`; empty if there is nothing unusual.
    """

    rank = 0
    size = 1
    num_processes = 1
    number = 0
    step = 0
    deferred: DeferredResults | None = None
    remark = ""
    pipeline = ""

    @property
    def is_alone(self) -> bool:
        """Whether no other process takes part in a step, of this pipeline or of another in the mesh."""
        return self.size == 1 and not self.pipeline

    @property
    def dead(self) -> list[Failure]:
        """Failures of the processes that have exited or closed the pipeline, in their order; from any thread.

        In a mesh also those of other pipelines.
        """
        return []

    def setup(self, message: Reply) -> Replies:
        """The first exchange.

        Raises:
            FailureError: if a process is dead or silent, or the store is gone.
        """
        return Replies([message])

    def begin(self, on_failure: Callable[[Failure], None]) -> None:
        """Start a step; failures on other ranks are passed to ``on_failure``, from another thread."""

    def exchange(self, phase: str, message: Reply) -> Replies:
        """Send a message and return the messages of all processes.

        Raises:
            FailureError: if a process is dead or silent, or the store is gone.
        """
        return Replies([message])

    def publish(self, failure: Failure) -> Failure:
        """Report a failure of this process to the others at once; before the first step, that it cannot build the
        pipeline.

        Returns:
            The first failure of the step, or of construction: this one, or an earlier one of another process.
        """
        return failure

    def end(self) -> None:
        """End the step."""

    def on_loss(self, report: Callable[[Failure], None]) -> None:
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

    def put_place(self, step: int, is_active: bool, text: str, within: str = "step") -> None:
        """Write for the others what this process does, from any thread.

        Args:
            step: the number of the current or last step.
            is_active: whether the process is within it.
            within: the name of what it does; the last text of each name is kept.
        """

    def places(self, within: str = "step") -> dict[int, tuple[int, bool, str]]:
        """What processes have written by `put_place`, by number; empty without the store's answer. From any thread."""
        return {}

    def name_of(self, number: int) -> str:
        """A process's name in messages."""
        return f"rank {number}"

    def close(self) -> None:
        """Stop watching."""


def exchange_or_refuse(
    control: Control, phase: str | None, message: Reply, failure: Failure | None
) -> tuple[Replies, Failure | None]:
    """Exchange messages before an action of all processes or none.

    Args:
        phase: see `Control.exchange`; None for `Control.setup`.
        failure: what keeps this process from the action, if anything.

    Returns:
        The messages of all, and the failure of the lowest rank that has one, of this pipeline if possible.

    Raises:
        FailureError: if a process is dead or silent, or the store is gone.
    """
    message = message if failure is None else message | {"failure": asdict(failure)}
    replies = control.setup(message) if phase is None else control.exchange(phase, message)
    failures = (Failure(**reply["failure"]) for reply in replies.everywhere if "failure" in reply)
    return replies, next(failures, None)


Value = TypeVar("Value")
_LOST = (FailureError, dist.DistError)
"""Raised if another process, or the store, is lost."""
_NOT_BUILT = "could not build the pipeline"


def agree(
    control: Control, make: Callable[[], tuple[Value, Reply]], *, part: str | None = None
) -> tuple[Value, Replies]:
    """Build a part on all processes and compare it, or raise on all of them.

    Args:
        control: the exchange with the other processes.
        make: builds the part; also returns its message to the others, with ``arguments``, values by name, and ``seed``,
            which must be equal on all; optionally ``own``, values by name that must be equal on the same rank of all
            pipelines of a mesh.
        part: name of the part; None for the first one.

    Returns:
        The local result, and the messages of all processes.

    Raises:
        ValueError: if the processes built different things.
        StepError: naming a process that failed; the failed process raises its own exception.
        FailureError: if a process is dead or silent.
    """
    error: Exception | None = None
    own: Reply = {}
    try:
        made, own = make()
    except Exception as found:  # raised below, after the exchange
        error = found
    try:
        failure = None if error is None else Failure(control.rank, cause_text(error))
        try:
            replies, refused = exchange_or_refuse(control, part, own, failure)
        except FailureError as lost:
            if error is None:
                raise
            raise error from lost  # says more than the loss of another process
        if error is not None:
            raise error
    finally:
        del error  # breaks the cycle of exception and frame
    if refused is not None:
        raise refused.error(_NOT_BUILT)
    _check_same(control.pipeline, replies)
    return made, replies


def prepare_together(control: Control, prepare: Callable[[], None]) -> None:
    """Prepare a new program on all processes or on none: one of them may lack memory or descriptors.

    Programs are numbered, equally on every rank, so a failure here is fatal.

    Raises:
        FailureError: naming the process that failed; a single process raises its own exception.
    """
    error: Exception | None = None
    try:
        prepare()
    except Exception as found:  # raised below, after the exchange
        error = found
    try:
        failure = None if error is None else Failure(control.rank, cause_text(error), is_fatal=True)
        replies, refused = exchange_or_refuse(control, "program", {}, failure)
        if error is not None and len(replies) == 1:
            raise error
        if refused is not None:
            raise FailureError(refused) from error
    finally:
        del error  # as in `agree`


@contextlib.contextmanager
def building(control: Control) -> Iterator[list[Callable[[], None]]]:
    """Build a pipeline within this context. A process that raises publishes its failure, so that no other waits for it.

    Args:
        control: the exchange with the other processes; closed on failure.

    Yields:
        A list for functions that close connections; they are called on failure.

    Raises:
        StepError: for a process that is dead or silent, or fails to build the pipeline.
    """
    undo: list[Callable[[], None]] = []
    try:
        yield undo
    except BaseException as error:  # raised again after it is published
        failure = _failure(control, error)
        control.publish(failure)
        for close in undo:
            close()
        control.close()
        if isinstance(error, _LOST):
            raise failure.error(_NOT_BUILT) from error
        raise


def _failure(control: Control, error: BaseException) -> Failure:
    """The cause of an error. A broken connection does not tell it; the watcher or the store may, a little later."""
    known = error.failure if isinstance(error, FailureError) else None
    if known is not None and not known.is_suspected:
        return known
    if isinstance(error, StepError):
        return Failure(error.rank, error.cause or str(error), is_fatal=True)
    if not isinstance(error, _LOST):
        return Failure(control.rank, cause_text(error), is_fatal=True)
    try:
        for pause in waiting(SHORT_EXIT_SECONDS, control.lost):
            time.sleep(pause)
    except FailureError as lost:
        return lost.failure
    return Failure(None if known is None else known.rank, first_line(error), is_fatal=True)


def sharing_batch(pipeline: str) -> str:
    """The place in ``cp`` and ``ep``: pipelines that differ in others only (``tp``, say) get the same batch."""
    return ", ".join(part for part in pipeline.split(", ") if part.startswith(("cp=", "ep=")))


def _check_same(here: str, replies: Replies) -> None:
    """Refuse ranks that build other pipelines; those of a mesh must be the same, as their stages share collectives."""
    places, size = list(replies.by_place.items()), len(replies)
    same_rank = [places[rank::size] for rank in range(size)]
    compared = [{place: reply["arguments"] for place, reply in places}]
    compared += [{place: reply.get("own", {}) for place, reply in of_rank} for of_rank in same_rank]
    for given in compared:
        for name in dict.fromkeys(name for values in given.values() for name in values):
            ranks = _ranks_by_value({place: values.get(name, "the default") for place, values in given.items()})
            what, found = name, _text_of(ranks)
            if name == "program":  # a digest, of what only the schedule decides
                what, found = "schedule", f"its actions have another order on each of [{', '.join(ranks.values())}]"
            if len(ranks) > 1:
                mesh = " of the mesh, whose stages share collectives" if here else ""
                raise ValueError(
                    f"{what}: the ranks do not build the same pipeline: {found}; pass the same on every rank{mesh}"
                )
    sharing = [(place, r) for place, r in places if sharing_batch(r.get("pipeline", here)) == sharing_batch(here)]
    seeds = _ranks_by_value({place: "none" if r["seed"] is None else r["seed"] for place, r in sharing})
    if len(seeds) > 1:
        raise ValueError(
            f"rng = 'per_microbatch': the seed, torch.initial_seed(), is {_text_of(seeds)}; pass the same rng on every "
            "rank, and call torch.manual_seed with the same number before"
        )


def _ranks_by_value(values: Mapping[str, Any]) -> dict[Any, str]:
    ranks: dict[Any, list[str]] = {}
    for place, value in values.items():
        ranks.setdefault(value, []).append(place)
    return {value: f"[{', '.join(having)}]" for value, having in ranks.items()}


def _text_of(ranks: Mapping[Any, str]) -> str:
    return ", ".join(f"{value} on ranks {having}" for value, having in ranks.items())
