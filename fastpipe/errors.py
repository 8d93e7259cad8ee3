"""The exceptions of fastpipe.

Wrong arguments are plain ``ValueError`` or ``TypeError``. What is wrong with a schedule or a program is a
``ScheduleError`` or ``ProgramError``, both of them ``ValueError`` too. What goes wrong while a step runs is a
``StepError``, which is a ``RuntimeError``; where hardware computed wrong numbers, a ``CorruptionError``.
"""

from __future__ import annotations


class FastpipeError(Exception):
    """Base of every exception that fastpipe defines."""


class ScheduleError(FastpipeError, ValueError):
    """A schedule that is incomplete, contradictory, or that cannot run."""


class ProgramError(FastpipeError, ValueError):
    """A program that would hang, mismatch a transfer, or misuse a buffer."""


class StepError(FastpipeError, RuntimeError):
    """A training step failed, here or on another rank.

    Attributes:
        rank: the rank of the pipeline on which it failed first, or ``None`` where that is not known, or where a process
            of another pipeline failed, a replica for example: the message has its number in torch's process group.
        stage: the stage that was being computed, or ``None``.
        action: the action's text, such as ``"2F0"``, or ``None``.
        microbatch: the microbatch, or ``None``.
        cause: what was raised there, as text (``"ValueError: ..."``).
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        stage: int | None = None,
        action: str | None = None,
        microbatch: int | None = None,
        cause: str | None = None,
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.stage = stage
        self.action = action
        self.microbatch = microbatch
        self.cause = cause


class CorruptionError(StepError):
    """An audit found numbers that the hardware computed, or kept, wrong; see ``audit`` of `Pipeline`.

    Attributes:
        rank: the rank that was wrong, or ``None`` where that is not known.
        stage: the stage, or ``None`` for a weight that changed in memory.
        microbatch: the microbatch, or ``None``.
        cause: what is wrong, as text.
    """
