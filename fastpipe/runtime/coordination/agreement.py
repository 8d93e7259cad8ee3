"""What the processes of a pipeline have to agree on when they build it: all build the same, or all raise."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch.distributed as dist

from fastpipe.errors import StepError
from fastpipe.runtime.common import Failure, FailureError, cause_text, first_line, waiting
from fastpipe.runtime.coordination.control import Control, Reply, exchange_or_refuse

Value = TypeVar("Value")
_GRACE_SECONDS = 0.5
_LOST = (FailureError, dist.DistError)
"""What is raised where another process is lost, or the store with it."""
_NOT_BUILT = "could not build the pipeline"


def agree(
    control: Control, make: Callable[[], tuple[Value, Reply]], *, part: str | None = None
) -> tuple[Value, list[Reply]]:
    """Make something on all processes that must be alike, or raise on all of them.

    Args:
        control: the way to the other processes.
        make: makes it; also returns what the others need to know: ``plan`` and ``seed``, the same on all, and more.
        part: what is made, where it is not the first thing that they agree on.

    Returns:
        What was made here, and the messages of all.

    Raises:
        ValueError: when the processes did not make the same.
        StepError: naming a process that could not; on that one, what was raised there comes through.
        FailureError: when a process is dead or silent.
    """
    error: Exception | None = None
    own: Reply = {}
    try:
        made, own = make()
    except Exception as found:  # raised below, when the others have been told
        error = found
    exchange = control.setup if part is None else functools.partial(control.exchange, part)
    try:
        failure = None if error is None else Failure(control.rank, cause_text(error))
        replies, refused = exchange_or_refuse(exchange, own, failure)
    except FailureError as lost:
        if error is None:
            raise
        raise error from lost  # says more than that another is lost
    if error is not None:
        raise error
    if refused is not None:
        raise refused.error(_NOT_BUILT)
    _check_alike(replies)
    return made, replies


def prepare_together(control: Control, prepare: Callable[[], None]) -> None:
    """Make what a new program needs, on all processes or on none: memory or descriptors may not be there on one.

    Programs have numbers, the same on every rank. So where one has none the pipeline is over.

    Raises:
        FailureError: naming the process that could not; of a single process, what was raised comes through.
    """
    error: Exception | None = None
    try:
        prepare()
    except Exception as found:  # raised below, when the others have been told
        error = found
    failure = None if error is None else Failure(control.rank, cause_text(error), is_fatal=True)
    replies, refused = exchange_or_refuse(functools.partial(control.exchange, "program"), {}, failure)
    if error is not None and len(replies) == 1:
        raise error
    if refused is not None:
        raise FailureError(refused) from error


@contextlib.contextmanager
def building(control: Control) -> Iterator[list[Callable[[], None]]]:
    """Within this context a pipeline is built. A process that raises publishes that, so that no other one waits for it.

    Args:
        control: the way to the other processes; closed when the pipeline is not built.

    Yields:
        What is to be called when the pipeline is not built, to end connections.

    Raises:
        StepError: for a process that is dead or silent, or does not build the pipeline.
    """
    undo: list[Callable[[], None]] = []
    try:
        yield undo
    except BaseException as error:  # raised again, when word is left for the others
        failure = _failure(control, error)
        control.publish(failure)
        for close in undo:
            close()
        control.close()
        if isinstance(error, _LOST):
            raise failure.error(_NOT_BUILT) from error
        raise


def _failure(control: Control, error: BaseException) -> Failure:
    """What is behind an error. A connection that breaks does not say why; a little later that is known."""
    known = error.failure if isinstance(error, FailureError) else None
    if known is not None and not known.is_suspected:
        return known
    if isinstance(error, StepError):
        return Failure(error.rank, error.cause or str(error), is_fatal=True)
    if not isinstance(error, _LOST):
        return Failure(control.rank, cause_text(error), is_fatal=True)
    try:
        for pause in waiting(_GRACE_SECONDS, control.lost):
            time.sleep(pause)
    except FailureError as lost:
        return lost.failure
    return Failure(None if known is None else known.rank, first_line(error), is_fatal=True)


def _check_alike(replies: Sequence[Reply]) -> None:
    plans = [reply["plan"] for reply in replies]
    if len(set(plans)) > 1:
        listed = "; ".join(f"rank {rank}: {plan}" for rank, plan in enumerate(plans))
        raise ValueError(f"schedule: the ranks do not build the same pipeline: {listed}")
    check_seeds([reply["seed"] for reply in replies])


def check_seeds(seeds: Sequence[int | None]) -> None:
    """Refuse ranks whose seeds differ; None for one with torch's own generators.

    Raises:
        ValueError: saying which rank has which.
    """
    if len(set(seeds)) > 1:
        listed = ", ".join(f"{'none' if seed is None else seed} on rank {rank}" for rank, seed in enumerate(seeds))
        raise ValueError(
            f"rng = 'per_microbatch': the seed, torch.initial_seed(), is {listed}; pass the same rng on every rank, "
            "and call torch.manual_seed with the same number before"
        )
