"""Losses that a stage adds to that of the loss function: the balance of a mixture of experts, a penalty.

A layer calls `add_loss` in its forward. On the last stage the value is added to the loss; on any other one its gradient
enters the graph at the stage's output, when the gradient of that arrives, so that it takes part in the backward of its
stage whether that comes in one part or two. What a checkpoint recomputes in a backward adds nothing again; a forward
that a method for pairs runs within a backward adds as any other.
"""

from __future__ import annotations

import sys
import threading
from types import FrameType, TracebackType
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.utils import checkpoint

from fastpipe.runtime.losses import scale_loss, sum_in_order
from fastpipe.runtime.tensors import Tensors


class _Open(threading.local):
    """What collects the losses that are added in this thread."""

    losses: AddedLosses | None = None


_open = _Open()
_FUNCTION = BackwardCFunction.apply.__code__
"""What calls the backward of Python's functions, that of a reentrant checkpoint among them."""


def add_loss(value: torch.Tensor, name: str = "added") -> None:
    """Add a loss to that of the loss function; called in the forward of a layer, of any stage.

    It takes part in the backward and weighs like the loss: with ``loss_reduction="mean"`` a microbatch counts by its
    rows, with ``"sum"`` not. ``result.added_losses`` has what was added, by name, on every rank; ``result.loss`` is
    that of the loss function alone. In `eval_step` it is reported only. What is recomputed adds nothing again.

    Without a pipeline, call the model within `AddedLosses`, which collects them.

    Args:
        value: a tensor with one element. One that requires no gradient is reported only.
        name: what it is called in the result; values of one name are summed, within a stage and over the stages.

    Raises:
        ValueError: for what is no such tensor, or where its graph would be lost: inside a reentrant checkpoint.
        RuntimeError: outside of a pipeline's step and of `AddedLosses`, when gradients are on.
    """
    if not isinstance(name, str):
        raise TypeError(f"add_loss: name = {name!r}: give a text")
    losses = _open.losses
    if torch._C._current_graph_task_id() != -1 and (losses is None or _recomputes()):
        return  # this was added in the forward
    if losses is not None:
        losses.append(_checked(value, name), name)
    elif torch.is_grad_enabled():
        raise RuntimeError(
            f"add_loss({name!r}): there is no step to add it to; call the model within "
            "`with fastpipe.AddedLosses() as added:` and add added.total to the loss"
        )


def _recomputes() -> bool:
    """Whether what runs in a backward is a checkpoint's, or another function's, and no forward of its own.

    Looked at by the stack of the calls, as torch says nothing of it; only where a forward and a backward are mixed.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code is _FUNCTION or (code.co_name == "unpack_hook" and code.co_filename == checkpoint.__file__):
            return True
        frame = frame.f_back
    return False


def _checked(value: Any, name: str) -> torch.Tensor:
    if not isinstance(value, torch.Tensor) or value.numel() != 1 or not value.is_floating_point():
        found = (
            f"a tensor of shape {tuple(value.shape)} and {value.dtype}"
            if isinstance(value, torch.Tensor)
            else f"a {type(value).__name__}"
        )
        raise ValueError(f"add_loss({name!r}): give a floating-point tensor with one element, not {found}")
    return value.reshape(()) if value.dim() else value


class AddedLosses:
    """Collects what is given to `add_loss` within it, as a pipeline does for each forward.

    For a model that runs without a pipeline::

        with fastpipe.AddedLosses() as added:
            output = model(x)
        loss = loss_fn(output, target) + added.total

    Attributes:
        values: ``(name, value)`` in the order of the calls, with their graphs.
    """

    def __init__(self) -> None:
        self.values: list[tuple[str, torch.Tensor]] = []
        self._grad = torch.is_grad_enabled()
        self._before: AddedLosses | None = None

    def __enter__(self) -> AddedLosses:
        """Collect, in this thread."""
        self._before, _open.losses = _open.losses, self
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        """Leave what is added from now on to whoever collected before."""
        _open.losses, self._before = self._before, None

    def append(self, value: torch.Tensor, name: str) -> None:
        """One more."""
        if self._grad and not torch.is_grad_enabled():
            raise ValueError(
                f"add_loss({name!r}): gradients are off here, so that its gradient would be lost; in a checkpoint use "
                "use_reentrant=False, or hand the value out of the checkpoint (or of no_grad) and add it outside"
            )
        self.values.append((name, value))

    @property
    def total(self) -> torch.Tensor | float:
        """The sum of all, with its graph; 0.0 where nothing was added."""
        return sum_in_order([value for _, value in self.values]) if self.values else 0.0

    def share(self, divisor: float | None) -> torch.Tensor | None:
        """What a backward starts from beside the loss; None where nothing of it requires a gradient."""
        trained = [value for _, value in self.values if value.requires_grad]
        return scale_loss(sum_in_order(trained), divisor) if trained else None

    def detached(self) -> list[tuple[str, torch.Tensor]]:
        """The values without their graphs."""
        return [(name, value.detach()) for name, value in self.values]


class AddedLoss(torch.autograd.Function):
    """The tensor as it is; in the backward the loss gets its gradient of 1 when that of the tensor comes."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        """Not a view, which could not be changed in place."""
        ctx.one = torch.ones_like(loss)
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Both gradients."""
        return grads[0], ctx.one


def attached(outputs: Tensors, share: torch.Tensor | None, stage: int) -> Tensors:
    """A stage's outputs, one of which brings the added loss into the backward.

    Raises:
        ValueError: when no output requires a gradient, so that no backward would reach it.
    """
    if share is None:
        return outputs
    for i, output in enumerate(outputs):
        if output.requires_grad:
            entered: torch.Tensor = AddedLoss.apply(output, share)  # type: ignore[no-untyped-call]
            return *outputs[:i], entered, *outputs[i + 1 :]
    raise ValueError(
        f"add_loss: stage {stage} adds a loss that requires a gradient and hands on no tensor that requires one, so no "
        "backward comes to it: add it in a stage whose outputs require gradients, or detach it"
    )
