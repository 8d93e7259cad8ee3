"""The losses of a stage: from what its module returned, and its layers added, to what its backward starts from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fastpipe.runtime.added_losses import AddedLosses, attached
from fastpipe.runtime.losses import (
    checked_loss,
    detached,
    fitting,
    loss_and_metrics,
    names_of,
    returned_loss,
    scale_loss,
    weighed,
)
from fastpipe.runtime.stage_work import StageWork
from fastpipe.runtime.tensors import Tensors, tensors_in

LossFunction = Callable[..., Any]


class NoLoss(Exception):  # noqa: N818 - it is caught, and the step goes on without a backward
    """The last stage returned no loss, and neither a loss function nor an output gradient was given."""


class StageLosses:
    """What a stage adds to the loss and, if it is the last one, the loss itself; everything found is noted in the work.

    Args:
        stage: its index.
        is_last: whether it is the last one.
        loss_fn: ``loss_fn(output, target)`` on the last stage, and what is carried to it by name.

    Attributes:
        names: the carried values that the loss function takes.
        carried: those of the microbatch whose forward runs.
        work: of the step that runs.
        added: collects what the layers add in the forward that runs.
    """

    def __init__(self, stage: int, is_last: bool, loss_fn: LossFunction | None) -> None:
        self.stage = stage
        self.is_last = is_last
        self.loss_fn = loss_fn
        self.names = names_of(loss_fn) if is_last else frozenset()
        self.carried: dict[str, Any] = {}
        self.work = StageWork()
        self.added = AddedLosses()

    @property
    def wanted(self) -> bool:
        """Whether the loss function is called here in this step."""
        work = self.work
        return self.is_last and self.loss_fn is not None and work.targets is not None and work.output_grads is None

    @property
    def has_output_grads(self) -> bool:
        """Whether the caller gave the gradients of the outputs instead of a loss."""
        return self.work.output_grads is not None

    def output_grads(self, microbatch: int) -> Tensors | None:
        """The caller's gradients of one microbatch's outputs."""
        grads = self.work.output_grads
        scale = self.work.loss_scale
        if grads is None or scale is None:
            return None if grads is None else grads[microbatch]
        return tuple(grad * scale for grad in grads[microbatch])

    def attached(self, microbatch: int, outputs: Tensors) -> Tensors:
        """The outputs, one of which brings what was added into the backward."""
        return attached(outputs, self._scaled_up(self._share_added(microbatch)), self.stage)

    def roots(self, microbatch: int, output: Any) -> Tensors:
        """What the last stage's backward starts from: the loss, or the outputs whose gradients the caller gave.

        Raises:
            NoLoss: where there is nothing to differentiate.
        """
        work = self.work
        self.keep(microbatch, output)
        if work.output_grads is not None:
            outputs = fitting(tensors_in(output, "the last stage's output"), work.output_grads[microbatch])
            return self.attached(microbatch, outputs)
        if self.loss_fn is None and not isinstance(returned_loss(output), torch.Tensor):
            if torch.is_grad_enabled():
                raise NoLoss
            self._share_added(microbatch)
            return ()
        if self.loss_fn is not None and work.targets is None:
            self._share_added(microbatch)
            return ()
        return (self.root(microbatch, output, None if work.targets is None else work.targets[microbatch]),)

    def keep(self, microbatch: int, output: Any) -> None:
        """Note the last stage's output, where it is wanted."""
        if self.work.keep_outputs:
            self.work.outputs[microbatch] = detached(output)

    def root(self, microbatch: int, output: Any, target: Any) -> torch.Tensor:
        """The loss of one microbatch: its share in that of the batch, and what was added, both scaled."""
        work, divisor = self.work, self._divisor(microbatch)
        found, metrics = (
            (returned_loss(output), {}) if self.loss_fn is None else self._call_loss_fn(output, target, divisor)
        )
        loss = checked_loss(found)
        scaled = scale_loss(loss, divisor)
        if torch.is_grad_enabled() and not scaled.requires_grad:
            whose = "the last stage" if self.loss_fn is None else "loss_fn"
            raise ValueError(
                f"{whose} returned a loss that requires no gradient: leave out detach() and no_grad(), let a parameter "
                "require one, or call eval_step"
            )
        work.losses[microbatch] = loss.detach()
        work.scaled[microbatch] = scaled.detach()
        if metrics:
            work.metrics[microbatch] = list(metrics.items())
        share = self._share_added(microbatch)
        root = self._scaled_up(scaled if share is None else scaled + share)
        assert root is not None
        return root

    def _call_loss_fn(self, output: Any, target: Any, divisor: float | None) -> tuple[Any, dict[str, torch.Tensor]]:
        assert self.loss_fn is not None
        return loss_and_metrics(self.loss_fn(weighed(output, divisor), target, **weighed(self.carried, divisor)))

    def _share_added(self, microbatch: int) -> torch.Tensor | None:
        """The share of the losses that this stage added in that of the batch, which are noted."""
        if not self.added.values:
            return None
        self.work.added[microbatch] = self.added.detached()
        return self.added.share(self._divisor(microbatch)) if torch.is_grad_enabled() else None

    def _scaled_up(self, root: torch.Tensor | None) -> torch.Tensor | None:
        """What a backward starts from, times the scale of the losses."""
        scale = self.work.loss_scale
        return root if scale is None or root is None or not torch.is_grad_enabled() else root * scale

    def _divisor(self, microbatch: int) -> float | None:
        return None if self.work.divisors is None else self.work.divisors[microbatch]
