"""Failures: what went wrong first, and where, as one process tells the others."""

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
        cause: the exception as text, or what else became of the rank.
        stage: the stage that was computed, if any.
        action: the text of the action or instruction.
        microbatch: the microbatch, if any.
        dead: whether the rank is dead or silent, so that the pipeline cannot go on.
        suspected: whether that is only known from messages that did not come: it may be another rank that is silent.
    """

    rank: int | None
    cause: str
    stage: int | None = None
    action: str | None = None
    microbatch: int | None = None
    dead: bool = False
    suspected: bool = False

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

    def error(self) -> StepError:
        """The exception for the ranks on which it did not happen."""
        again = "; the pipeline cannot go on: build it again" if self.dead else ""
        return StepError(
            f"the step failed on {self.place()}: {self.cause}{again}",
            rank=self.rank,
            stage=self.stage,
            action=self.action,
            microbatch=self.microbatch,
            cause=self.cause,
        )


class LostError(Exception):
    """Nothing can be exchanged any more: a process is dead or silent, or the store is gone.

    Attributes:
        failure: which, and what became of it.
    """

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.cause)
        self.failure = failure


class TransportError(RuntimeError):
    """A peer is dead or silent.

    Attributes:
        peer: its rank, or None when it is not known which one.
    """

    def __init__(self, message: str, peer: int | None) -> None:
        super().__init__(message)
        self.peer = peer

    def failure(self) -> Failure:
        """The same for the other processes: without the peer this pipeline cannot go on."""
        return Failure(self.peer, str(self), dead=True, suspected=True)


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
    """An exception in one line: its type and its text."""
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
