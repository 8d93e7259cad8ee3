"""Failures: what went wrong first, and where.

`Failure` is the one record of that. Between processes it travels as JSON, within a process in a `FailureError`, and
users get it as a `StepError`. Each of these is made in this file.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass

from fastpipe.errors import StepError

logger = logging.getLogger("fastpipe")
DIED = "its process died"
MAX_TEXT = 4000
"""Characters of an exception's text that other ranks get."""


@dataclass(frozen=True)
class Failure:
    """What went wrong first, and where.

    Attributes:
        rank: the rank on which it happened; None where that is not known.
        cause: the exception as text, or what became of the rank.
        stage: the stage that was computed, if any.
        action: the text of the action or instruction.
        microbatch: the microbatch, if any.
        is_fatal: whether the pipeline cannot run another step: a rank has exited, is silent, or is out of step with the
            others. After any other failure all ranks drain the step, and the next one works.
        is_suspected: whether the rank is named only because messages did not come: another one may be the silent one.
    """

    rank: int | None
    cause: str
    stage: int | None = None
    action: str | None = None
    microbatch: int | None = None
    is_fatal: bool = False
    is_suspected: bool = False

    @property
    def number(self) -> int:
        """The rank as C++ has it: -1 where it is not known."""
        return -1 if self.rank is None else self.rank

    def place(self) -> str:
        """Where, as a user reads it."""
        parts = ["an unknown rank" if self.rank is None else f"rank {self.rank}"]
        if self.stage is not None:
            parts.append(f"stage {self.stage}")
        if self.action is not None:
            parts.append(f"action {self.action}")
        if self.microbatch is not None:
            parts.append(f"microbatch {self.microbatch}")
        return ", ".join(parts)

    def error(self, what: str = "") -> StepError:
        """The exception for the ranks on which it did not happen.

        Args:
            what: what the rank did, such as "refused its input"; unless given, the step failed there.
        """
        again = "; the pipeline cannot go on: build it again" if self.is_fatal and not what else ""
        place = f"{self.place()} {what}" if what else f"the step failed on {self.place()}"
        return StepError(
            f"{place}: {self.cause}{again}",
            rank=self.rank,
            stage=self.stage,
            action=self.action,
            microbatch=self.microbatch,
            cause=self.cause,
        )


class FailureError(RuntimeError):
    """A failure on its way up within a process, to where it is published or raised as `Failure.error`."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.cause)
        self.failure = failure


def lost_peer(cause: str, peer: int | None) -> FailureError:
    """The error of a transfer whose peer is dead or silent; None where it is not known which one is.

    The native runtime raises its own by this function, too.
    """
    return FailureError(Failure(peer, cause, is_fatal=True, is_suspected=True))


def failure_of(error: BaseException, rank: int) -> Failure:
    """The failure behind an exception that was raised on a rank; a lost peer has failed itself."""
    return error.failure if isinstance(error, FailureError) else Failure(rank, cause_text(error))


@contextlib.contextmanager
def logged(what: str) -> Iterator[None]:
    """Within this context an exception is logged and not raised, as what comes after it must be done as well."""
    try:
        yield
    except Exception:  # logged, as the name says
        logger.exception("%s failed", what)


def first_line(error: BaseException) -> str:
    """The first line of its text, or its type where there is none."""
    return _text(error) or type(error).__name__


def cause_text(error: BaseException) -> str:
    """An exception in one line: its type and its text; of a `FailureError` the cause."""
    if isinstance(error, FailureError):
        return error.failure.cause
    text = _text(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _text(error: BaseException) -> str:
    """The first line, at most `MAX_TEXT` characters that UTF-8 can encode; empty where the exception has no text."""
    try:
        text = str(error)[: 2 * MAX_TEXT]
    except BaseException:  # of the text, not of the step: the exception itself is reported, by its type
        return ""
    line = next(iter(text.splitlines()), "").encode(errors="backslashreplace").decode()
    return line if len(line) <= MAX_TEXT else f"{line[:MAX_TEXT]} ..."
