"""`current`: the action that a thread computes; and the user's contexts around actions.

With the extension both executors set it in C++, so torch's own threads, which run a GPU's backward, see it, too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, NamedTuple

import numpy as np
import torch

from fastpipe.program import Columns, Op
from fastpipe.runtime import native
from fastpipe.runtime.common import without_autocast


class Current(NamedTuple):
    """The action that runs.

    Attributes:
        step: the number of training steps before this one; `Pipeline.step_count` at its begin.
        stage: index of the stage.
        microbatch: index of the microbatch.
        action: ``"F"``, ``"B"``, ``"I"`` or ``"W"``.
        is_last_microbatch: whether it is the last of its stage and kind in the step on this rank: of B and I, or of B
            and W if it is a W.
        training: whether the step has a backward.
    """

    step: int
    stage: int
    microbatch: int
    action: str
    is_last_microbatch: bool
    training: bool


ContextFactory = Callable[[Current], AbstractContextManager[Any]]
"""Returns a context manager for an action."""


_current: ContextVar[Current | None] = ContextVar("_current", default=None)
"""Without the extension, the action of each thread."""


def current() -> Current | None:
    """The action that this thread computes: in a layer's forward, the loss function, and backward hooks.

    During a checkpoint's recompute it is the backward. In ``overlapped_forward_backward`` it is the forward. Outside of
    a pipeline's step it is None.
    """
    runtime: Any = native.load()
    found = runtime.current() if runtime is not None else None
    if found is None:
        return _current.get()
    step, stage, microbatch, op, is_last, training = found
    return Current(step, stage, microbatch, Op(op).name, is_last, training)


def check_contexts(forward_context: ContextFactory | None, backward_context: ContextFactory | None) -> None:
    """Raises TypeError if one is not a function."""
    for name, given in (("forward_context", forward_context), ("backward_context", backward_context)):
        if given is not None and (not callable(given) or hasattr(type(given), "__enter__")):
            raise TypeError(
                f"{name} is a {type(given).__name__}: give a function of the action that returns a context manager"
            )


class ActionContext:
    """The current action of one stage on one rank, and the user's contexts around F and around B, I and W.

    Attributes:
        last: the microbatches of its last F, its last B or I, and its last B or W; see `last_microbatches`.
    """

    def __init__(
        self, stage: int, forward_context: ContextFactory | None = None, backward_context: ContextFactory | None = None
    ):
        self.stage = stage
        self.forward_context = forward_context
        self.backward_context = backward_context
        self.step = 0
        self.last = (-1, -1, -1)

    def as_current(self, op: Op, microbatch: int) -> AbstractContextManager[None]:
        """Around an action of the Python executor: makes it the current one."""
        runtime: Any = native.load()
        if runtime is None:
            return self._as_current_in_python(op, microbatch)
        context: AbstractContextManager[None] = runtime.Moment(self.step, self.last, op, self.stage, microbatch)
        return context

    @contextlib.contextmanager
    def _as_current_in_python(self, op: Op, microbatch: int) -> Iterator[None]:
        is_last = self.last[_KIND[op]] == microbatch
        training = op is not Op.F or torch.is_grad_enabled()
        before = _current.set(Current(self.step, self.stage, microbatch, op.name, is_last, training))
        try:
            yield
        finally:
            _current.reset(before)

    def around_forward(self) -> AbstractContextManager[Any]:
        """The user's context for the current F."""
        return _entered(self.forward_context)

    @contextlib.contextmanager
    def around_backward(self) -> Iterator[None]:
        """The user's context for the current B, I or W, without autocast."""
        with without_autocast(), _entered(self.backward_context):
            yield

    @property
    def around(self) -> Callable[[Callable[[], None]], None] | None:
        """`around_backward` for C++: a function that runs a call within it; None without a context."""
        return None if self.backward_context is None else self._call

    def _call(self, call: Callable[[], None]) -> None:
        with self.around_backward():
            call()


_NOTHING = contextlib.nullcontext()
_KIND = {Op.F: 0, Op.B: 1, Op.I: 1, Op.W: 2}


def _entered(around: ContextFactory | None) -> AbstractContextManager[Any]:
    return _NOTHING if around is None else _within(around)


@contextlib.contextmanager
def _within(around: ContextFactory) -> Iterator[None]:
    action = current()
    assert action is not None, "no current action"
    name = "forward_context" if action.action == "F" else "backward_context"
    context = around(action)
    if not hasattr(context, "__exit__"):
        raise TypeError(f"{name} returned a {type(context).__name__}: return a context manager")
    is_done = False
    with context:
        yield
        is_done = True
    if not is_done:  # without its outputs or its gradients the step would go on with wrong numbers
        raise RuntimeError(
            f"{name} returned a {type(context).__name__} that suppressed an exception of the action: return a context "
            "manager that lets exceptions through (its __exit__ returns False or None)"
        )


def last_microbatches(columns: Columns, stage: int) -> tuple[int, int, int]:
    """Microbatches of a stage's last F, last B or I, and last B or W in one rank's program; -1 for none."""
    ops, stages, microbatches, pair_stages, pair_microbatches = columns[:5]
    pairs = ops == Op.OVERLAP_F_B
    own, paired = stages == stage, pairs & (pair_stages == stage)
    forwards, whole = own & ((ops == Op.F) | pairs), (own & (ops == Op.B)) | paired
    of_backwards = np.where(paired, pair_microbatches, microbatches)
    return (
        _last(forwards, microbatches),
        _last(whole | (own & (ops == Op.I)), of_backwards),
        _last(whole | (own & (ops == Op.W)), of_backwards),
    )


def _last(which: Any, microbatches: Any) -> int:
    found = np.flatnonzero(which)
    return int(microbatches[found[-1]]) if len(found) else -1
