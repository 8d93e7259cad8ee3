"""Failures: what failed first, and where.

`Failure` is the only record of it. It is sent between processes as JSON, raised within a process as a `FailureError`,
and raised to users as a `StepError`. All three are made in this file.
"""

from __future__ import annotations

import contextlib
import logging
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch.distributed as dist

from fastpipe.errors import StepError

logger = logging.getLogger("fastpipe")
DIED = "its process died"
MAX_TEXT = 4000
"""The longest text of an exception, in characters, that other ranks receive."""


@dataclass(frozen=True)
class Failure:
    """What failed first, and where.

    Attributes:
        rank: the rank that failed; None if unknown.
        cause: the exception as text, or the end of the process.
        stage: the stage that was computed, if any.
        action: the text of the action or instruction.
        microbatch: the microbatch, if any.
        is_fatal: whether the pipeline cannot run another step: a rank has exited, is silent, or is out of step with the
            others. After any other failure all ranks drain the step, and the next one works.
        is_suspected: whether the rank is named only because its messages are missing: another rank may be the silent
            one.
        pipeline: which pipeline of a mesh the rank belongs to, such as ``tp=1``, where several share a failure.
    """

    rank: int | None
    cause: str
    stage: int | None = None
    action: str | None = None
    microbatch: int | None = None
    is_fatal: bool = False
    is_suspected: bool = False
    pipeline: str = ""

    @property
    def native_rank(self) -> int:
        """The rank for C++: -1 if unknown, or if it may be one of another pipeline."""
        return -1 if self.rank is None or self.pipeline else self.rank

    def place(self) -> str:
        """The place, for users."""
        parts = ["an unknown rank" if self.rank is None else f"rank {self.rank}"]
        if self.pipeline:
            parts[0] += f" of the pipeline at {self.pipeline}"
        if self.stage is not None:
            parts.append(f"stage {self.stage}")
        if self.action is not None:
            parts.append(f"action {self.action}")
        if self.microbatch is not None:
            parts.append(f"microbatch {self.microbatch}")
        return ", ".join(parts)

    def error(self, what: str = "", note: str = "") -> StepError:
        """The exception for the other ranks.

        Args:
            what: what the rank did, such as "refused its input"; default: the step failed there.
            note: added to the exception.
        """
        closed = "the pipeline is closed; build a new one"
        if self.pipeline:
            closed = "the pipeline and the groups of its mesh are closed; start the processes again"
        again = f"; {closed}" if self.is_fatal and not what else ""
        if self.rank is None:  # the cause names processes, if it knows any
            place = what or "the step failed"
        else:
            place = f"{self.place()} {what}" if what else f"the step failed on {self.place()}"
        error = StepError(
            f"{place}: {self.cause}{again}",
            rank=self.rank,
            stage=self.stage,
            action=self.action,
            microbatch=self.microbatch,
            cause=self.cause,
        )
        if note:
            error.add_note(note)
        return error


class FailureError(RuntimeError):
    """A failure within a process, until it is published or raised as `Failure.error`."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.cause)
        self.failure = failure


def lost_peer(cause: str, peer: int | None) -> FailureError:
    """The error of a transfer whose peer is dead or silent; ``peer`` is None if unknown.

    The native runtime also creates its errors by this function.
    """
    return FailureError(Failure(peer, cause, is_fatal=True, is_suspected=True))


def failure_of(error: BaseException, rank: int) -> Failure:
    """The failure of an exception raised on a rank; for a lost peer, the peer's."""
    return error.failure if isinstance(error, FailureError) else Failure(rank, cause_text(error))


def add_note(error: BaseException, note: str) -> None:
    """Add a note to an exception, if its type allows."""
    with contextlib.suppress(Exception):  # a user's type may refuse notes
        error.add_note(note)


@contextlib.contextmanager
def logged(what: str) -> Iterator[None]:
    """Log an exception of this context instead of raising it, so that later cleanup runs too."""
    try:
        yield
    except Exception:  # logged
        logger.exception("%s failed", what)


@contextlib.contextmanager
def lost_named(who: str, others: Callable[[], Sequence[int]]) -> Iterator[None]:
    """Context of collectives of torch.distributed, whose errors name no process.

    Args:
        who: begins the cause, as in "of the replicas of stage 1, ".
        others: the processes that may have been lost.

    Raises:
        FailureError: if the connection to a process is lost.
    """
    try:
        yield
    except FailureError:
        raise
    except RuntimeError as error:
        if not is_lost_connection(error):
            raise
        raise FailureError(Failure(None, who + lost_text(others(), error), is_fatal=True)) from error


def raised_by_handler(error: BaseException) -> bool:
    """Whether a signal's handler raised it in a call of torch or native code, which may raise the same type."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    if not frames:  # native code has raised it
        return False
    return not frames[-1].f_globals.get("__name__", "").startswith(("fastpipe.", "torch.distributed."))


def is_lost_connection(error: RuntimeError) -> bool:
    """Whether a collective has lost a process. Gloo raises RuntimeErrors."""
    return isinstance(error, dist.DistError) or any(text in str(error) for text in ("gloo/transport", _GLOO_TIMEOUT))


_GLOO_TIMEOUT = "Application timeout caused pair closure"
"""In an operation whose connection an earlier timeout has closed."""


def lost_text(processes: Sequence[int], error: RuntimeError) -> str:
    """The cause of a collective's error by one of these processes."""
    which = f"process {processes[0]}" if len(processes) == 1 else f"one of the processes {list(processes)}"
    what = "has exited, or has closed its connections after a failure"
    is_late = any(text in str(error) for text in ("Timed out", _GLOO_TIMEOUT))
    return f"{which} {'does not respond' if is_late else what}: {cause_text(error)}"


def first_line(error: BaseException) -> str:
    """The first line of the text, or the type if there is no text."""
    return _text(error) or type(error).__name__


def cause_text(error: BaseException) -> str:
    """An exception in one line, "type: text"; of a `FailureError` the cause."""
    if isinstance(error, FailureError):
        return error.failure.cause
    text = _text(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def listed(values: Iterable[object], most: int | None = 4) -> str:
    """The first ``most`` values as text; None for all of them."""
    texts = [str(value) for value in values]
    more = 0 if most is None else len(texts) - most
    return ", ".join(texts[:most]) + (f" and {more} more" if more > 0 else "") or "none"


def _text(error: BaseException) -> str:
    """The first line, at most `MAX_TEXT` characters that UTF-8 can encode; empty if the exception has no text."""
    try:
        text = str(error)[: 2 * MAX_TEXT]
    except BaseException:  # from the text itself: the exception is still reported, by its type
        return ""
    line = next(iter(text.splitlines()), "").encode(errors="backslashreplace").decode()
    return line if len(line) <= MAX_TEXT else f"{line[:MAX_TEXT]} ..."
