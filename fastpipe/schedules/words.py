"""Words: a rank's order as blocks of steps with their counts, much as the papers write them.

``[("F", 3), ("F B", 5), ("B", 3)]`` is a rank of 1F1B. A step is ``F``, ``B``, ``I`` or ``W``, with the number of its
stream where a rank has several (``F0``, ``I1``), or a fused pair (``F0&B1``). Every step takes the next stage and
microbatch of its stream; ``B`` and ``I`` share one. ``W`` takes the oldest I that still wants it, of any stream, and
``W1`` the oldest of stream 1. The columns are filled by whole streams, so that a rank of a million actions costs
milliseconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fastpipe.action import NONE, Action, ActionKind
from fastpipe.schedule import Columns

Ints = npt.NDArray[np.int32]
Blocks = Iterable[tuple[str, int]]
"""Steps and how often they come, in order. A count of zero or less is none."""

_WIDTH = len(Action._fields)


class Stream(NamedTuple):
    """What the steps of one stream work on, in the order in which they come."""

    stages: Ints
    microbatches: Ints


def stream(stage: int, microbatches: range | Ints) -> Stream:
    """The stream of one stage over the given microbatches."""
    numbers = np.asarray(microbatches, dtype=np.int32)
    return Stream(np.full(len(numbers), stage, dtype=np.int32), numbers)


def columns_of(rows: Sequence[tuple[ActionKind, int, int]] | Ints) -> Columns:
    """The columns of an order given as (kind, stage, microbatch), for orders that are found step by step."""
    columns = np.full((_WIDTH, len(rows)), NONE, dtype=np.int32)
    columns[:3] = np.array(rows, dtype=np.int32).reshape(-1, 3).T
    return columns


class _Step(NamedTuple):
    """A step's kind, and the numbers of the streams that its parts take from."""

    kind: ActionKind
    forward: int = NONE
    backward: int = NONE
    weight: int = NONE


@lru_cache
def _parse(text: str) -> _Step:
    if "&" in text:
        forward, backward = map(_parse, text.split("&"))
        return _Step(ActionKind.OVERLAP_F_B, forward.forward, backward.backward)
    kind, number = ActionKind[text[0]], int(text[1:] or 0)
    if kind is ActionKind.F:
        return _Step(kind, forward=number)
    if kind is ActionKind.W:
        return _Step(kind, weight=number if text[1:] else NONE)
    return _Step(kind, backward=number)


def spell(blocks: Blocks, forward: Sequence[Stream], backward: Sequence[Stream]) -> Columns:
    """Write a word out.

    Args:
        blocks: the word; it uses up every stream.
    """
    steps: dict[_Step, int] = {}
    parts = [
        np.tile(np.array([steps.setdefault(_parse(step), len(steps)) for step in text.split()], dtype=np.int8), count)
        for text, count in blocks
        if count > 0
    ]
    word = np.concatenate(parts) if parts else np.zeros(0, dtype=np.int8)
    kind, forward_of, backward_of, weight_of = np.array(list(steps), dtype=np.int32).reshape(-1, 4).T[:, word]
    columns = np.full((_WIDTH, len(word)), NONE, dtype=np.int32)
    columns[0] = kind
    for number, line in enumerate(forward):
        columns[1:3, forward_of == number] = line
    fused = kind == ActionKind.OVERLAP_F_B
    for number, line in enumerate(backward):
        mine = backward_of == number
        pairs = fused[mine]
        columns[1:3, mine & ~fused] = np.asarray(line)[:, ~pairs]
        columns[3:5, mine & fused] = np.asarray(line)[:, pairs]
    _fill_weights(columns, backward_of, weight_of)
    return columns


def _fill_weights(columns: Columns, backward_of: Ints, weight_of: Ints) -> None:
    """Give every W the stage and microbatch of its I: the oldest of its stream that is left."""
    inputs, weights = columns[0] == ActionKind.I, columns[0] == ActionKind.W
    for number in np.unique(weight_of[weights]).tolist():
        mine = inputs if number == NONE else inputs & (backward_of == number)
        columns[1:3, weights & (weight_of == number)] = columns[1:3, mine]


def delayed_weights(plain: str, full: str, steady: int, tail: int, delay: int) -> Blocks:
    """The blocks of a zero bubble order after its warm-up: from the ``delay + 1``-th I on, each is followed by a W.

    Args:
        plain: a steady step without W, for example ``"F I"``.
        full: the same with its W, ``"F I W"``.
        steady: the number of steady steps.
        tail: the number of I that remain after them.
        delay: the number of I without a W; their W come last.
    """
    plain_steps = min(delay, steady)
    plain_tail = min(delay - plain_steps, tail)
    return [
        (plain, plain_steps),
        (full, steady - plain_steps),
        ("I", plain_tail),
        ("I W", tail - plain_tail),
        ("W", plain_steps + plain_tail),
    ]
