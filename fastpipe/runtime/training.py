"""Steps: forward and backward of a batch, and what comes between them and the optimizer."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from fastpipe.placement import is_whole
from fastpipe.runtime.evaluation import Evaluates
from fastpipe.runtime.step import GradNorms, LocalModelState, Plans, Request, StepResult, clip_grad_norm
from fastpipe.schedule import Schedule


class Trains(Evaluates, LocalModelState):
    """The part of `fastpipe.Pipeline` that makes gradients.

    Attributes:
        schedule: what runs.
    """

    schedule: Schedule
    _plans: Plans
    _reduces: bool
    _grad_norms: GradNorms

    @property
    def step_count(self) -> int:
        """How many training steps there were; `rng="per_microbatch"` draws from it, so set it when training resumes."""
        return self._steps.random.step_count

    @step_count.setter
    def step_count(self, count: int) -> None:
        if not is_whole(count) or count >= 2**63:
            raise ValueError(f"step_count = {count!r}: give a whole number of steps, 0 or more, the same on every rank")
        self._steps.random.step_count = int(count)

    def step(
        self,
        *args: Any,
        target: Any = None,
        output_grad: Any = None,
        num_microbatches: int | None = None,
        trace: bool = False,
        gather_outputs: bool = False,
        index: int | None = None,
        **kwargs: Any,
    ) -> StepResult:
        """Forward and backward of one batch; adds to ``.grad``. Called on every rank alike.

        Args:
            args: the model's inputs: whole batches (cut by ``split``), lists of microbatches, or iterators, which are
                consumed only where they are needed.
            target: the loss function's second argument, in the same forms.
            output_grad: gradients of the outputs, in the same forms, instead of a loss.
            num_microbatches: for this step, if not the pipeline's.
            trace: gather the times of all ranks into ``result.timeline``.
            gather_outputs: whether every rank gets the outputs, and not only those with the last stage.
            index: the number of the batch, counted as you like. Ranks whose numbers differ raise; without it they find
                out only where they were given the same argument.
            kwargs: keyword arguments, given to every stage whose forward names them.

        Raises:
            ValueError: for wrong input, naming it; on the other ranks StepError.
            StepError: when the step failed on another rank. Where it failed, what was raised there comes through.
        """
        count = self.num_microbatches if num_microbatches is None else num_microbatches
        request = Request(
            args,
            kwargs,
            target,
            output_grad,
            count,
            training=not self._steps.forward_only,
            reduces=self._reduces,
            gathers_outputs=gather_outputs,
            index=index,
        )
        if self._steps.forward_only and output_grad is not None:
            if not self._plans.has_backward(self.num_microbatches):
                raise ValueError(f"output_grad: {self.schedule.name} has no backward; leave it out")
            request = replace(request, training=True)
        return self._run(request, trace)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within this context steps add to the gradients of this replica alone: nothing is reduced over the replicas.

        As `DistributedDataParallel.no_sync`, for several steps an optimizer's step. The first step outside averages
        what all of them added.

        Raises:
            ValueError: where the schedule holds every stage twice and the stages have replicas.
        """
        if self._plans.parallel and self.schedule.placement.num_routes > 1:
            raise ValueError(
                f"no_sync: {self.schedule.name} holds every stage twice, and a step's gradients are summed over the "
                "holders apart from those of earlier steps; let every step reduce, or use a schedule with one route"
            )
        before, self._reduces = self._reduces, False
        try:
            yield
        finally:
            self._reduces = before

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Scale the gradients so that the norm of all of them together is at most ``max_norm``.

        What `torch.nn.utils.clip_grad_norm_` does to the unsplit model, and on a CPU the same to the last bit. Called
        on every rank alike, between `step` and the optimizer. A stage that two ranks hold counts once, and so does a
        gradient that FSDP spread over processes (that one to rounding only).

        Args:
            max_norm: at least 0; ``float("inf")`` only measures.
            norm_type: the p of the p-norm, or ``"inf"``.
            error_if_nonfinite: whether a norm that is infinite or NaN is an error. Otherwise a warning is logged,
                which names the gradients, and they are scaled by that norm. (With a `fastpipe.GradScaler`, which skips
                such steps, it is logged as information.)

        Returns:
            The norm before clipping, the same on every rank.

        Raises:
            StepError: for such a norm, naming parameter, stage and rank; gradients are left as they were. Or when
                another rank could not take part.
            ValueError: for a wrong argument, or one that is not the same on every rank.
        """
        named = self._named_parameters()
        return clip_grad_norm(
            self._steps, self._grad_norms, named, self.device, max_norm, norm_type, error_if_nonfinite
        )
