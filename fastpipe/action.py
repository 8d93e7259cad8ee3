"""Action: what one rank does for one stage and one microbatch, and its text form both ways.

The text is that of ``torch.distributed.pipelining``: ``2F0`` is stage 2, forward, microbatch 0; ``1SEND_F3``;
``(0F7;3B0)OVERLAP_F_B``; ``UNSHARD``, ``RESHARD`` and ``REDUCE_GRAD`` name a stage and no microbatch.
"""

from __future__ import annotations

import re
from enum import IntEnum
from typing import NamedTuple

NONE = -1
"""The value of an index column that an action does not use."""


class ActionKind(IntEnum):
    """What an action does. The numbers are the integer encoding shared with the C++ side: what computes comes first,
    transfers last."""

    F = 0
    """forward of one microbatch"""
    B = 1
    """full backward: inputs and weights"""
    I = 2
    """backward for the stage's input (``B`` in the zero-bubble papers)"""
    W = 3
    """backward for the stage's weights"""
    OVERLAP_F_B = 4
    """a forward and a full backward of another microbatch, run as one"""
    UNSHARD = 5
    RESHARD = 6
    REDUCE_GRAD = 7
    SEND_F = 8
    RECV_F = 9
    SEND_B = 10
    RECV_B = 11


COMPUTE_KINDS = frozenset({ActionKind.F, ActionKind.B, ActionKind.I, ActionKind.W, ActionKind.OVERLAP_F_B})
STAGE_ONLY_KINDS = frozenset({ActionKind.UNSHARD, ActionKind.RESHARD, ActionKind.REDUCE_GRAD})
COMMUNICATION_KINDS = frozenset({ActionKind.SEND_F, ActionKind.RECV_F, ActionKind.SEND_B, ActionKind.RECV_B})

_SINGLE = re.compile(
    r"(0|[1-9][0-9]{0,8})(UNSHARD|RESHARD|REDUCE_GRAD|SEND_F|RECV_F|SEND_B|RECV_B|F|I|B|W)(0|[1-9][0-9]{0,8})?"
)
_OVERLAP = re.compile(r"\(([^;()]*);([^;()]*)\)OVERLAP_F_B")


class Action(NamedTuple):
    """One entry of a schedule.

    Attributes:
        kind: what is done.
        stage: the model's stage. For ``OVERLAP_F_B`` the stage of the forward.
        microbatch: the microbatch, or ``NONE`` (-1) for a kind that has none. For ``OVERLAP_F_B`` that of the forward.
        pair_stage: the stage of the backward of an ``OVERLAP_F_B``, else ``NONE``.
        pair_microbatch: the microbatch of the backward of an ``OVERLAP_F_B``, else ``NONE``.
    """

    kind: ActionKind
    stage: int
    microbatch: int = NONE
    pair_stage: int = NONE
    pair_microbatch: int = NONE

    @classmethod
    def overlap(cls, forward: Action, backward: Action) -> Action:
        """The fused pair of a forward and a full backward."""
        kinds = [getattr(one, "kind", None) for one in (forward, backward)]
        if kinds != [ActionKind.F, ActionKind.B]:
            raise ValueError(f"OVERLAP_F_B takes an F and a B, in that order; found {forward} and {backward}")
        return cls(ActionKind.OVERLAP_F_B, forward.stage, forward.microbatch, backward.stage, backward.microbatch)

    @classmethod
    def parse(cls, text: str) -> Action:
        """Read the text form, which must be the whole string.

        Raises:
            ValueError: naming what is wrong with ``text``.
        """
        if not isinstance(text, str):
            raise TypeError(f"an action's text is a str; found {type(text).__name__}")
        pair = _OVERLAP.fullmatch(text)
        if pair:
            return cls.overlap(cls.parse(pair[1]), cls.parse(pair[2]))
        match = _SINGLE.fullmatch(text)
        if not match:
            raise ValueError(
                f"not an action: {text!r}; write for example 2F0, 1SEND_F3, 0UNSHARD or (0F7;3B0)OVERLAP_F_B"
            )
        kind = ActionKind[match[2]]
        if (match[3] is None) != (kind in STAGE_ONLY_KINDS):
            takes = "no microbatch" if kind in STAGE_ONLY_KINDS else "a microbatch"
            raise ValueError(f"not an action: {text!r}; {kind.name} takes a stage and {takes}")
        return cls(kind, int(match[1]), NONE if match[3] is None else int(match[3]))

    @property
    def parts(self) -> tuple[Action, ...]:
        """The forward and the backward of a fused pair; the action itself otherwise."""
        if self.kind is not ActionKind.OVERLAP_F_B:
            return (self,)
        return (
            Action(ActionKind.F, self.stage, self.microbatch),
            Action(ActionKind.B, self.pair_stage, self.pair_microbatch),
        )

    def __str__(self) -> str:
        if self.kind is ActionKind.OVERLAP_F_B:
            forward, backward = self.parts
            return f"({forward};{backward})OVERLAP_F_B"
        return f"{self.stage}{self.kind.name}{'' if self.microbatch == NONE else self.microbatch}"
