"""GradScaler: torch's, with one scale and one verdict for all ranks of a pipeline."""

from __future__ import annotations

import math

import torch

from fastpipe.runtime.coordination import Reply
from fastpipe.runtime.pipeline import Pipeline


class GradScaler(torch.amp.GradScaler):
    """Loss scaling for fp16: what `torch.amp.GradScaler` is to the unsplit model.

    From its making on, each step of the pipeline multiplies what its backward starts from by the scale: the loss, added
    losses, and an ``output_grad``. `scale` is not called. The rest is as ever, on every rank alike::

        scaler = fastpipe.GradScaler(pipe)
        with torch.autocast("cpu", torch.float16):
            result = pipe.step(x, target=target)
        scaler.unscale_(optimizer)  # only if gradients are looked at, clipped say
        pipe.clip_grad_norm_(1.0)
        scaler.step(optimizer)
        scaler.update()

    Where one rank finds a gradient that is infinite or NaN, all skip the optimizer's step and lower the scale, those of
    other replicas too. To learn
    that costs one exchange between the processes; `result.loss` is without the scale.

    Args:
        pipe: the pipeline, whose steps are scaled from now on, by this scaler alone.
        init_scale: the first scale.
        growth_factor: by which it grows after ``growth_interval`` steps in a row without an infinity.
        backoff_factor: by which it shrinks after one with.
        growth_interval: see ``growth_factor``.
        enabled: whether to do anything at all.

    Raises:
        TypeError: for a pipe that is none.
    """

    def __init__(
        self,
        pipe: Pipeline,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        if not isinstance(pipe, Pipeline):
            raise TypeError(f"pipe is of type {type(pipe).__name__}: give the Pipeline whose steps are to be scaled")
        super().__init__(pipe.device.type, init_scale, growth_factor, backoff_factor, growth_interval, enabled)
        self._steps = pipe._steps
        self._steps.loss_scale = self._loss_scale if enabled else None

    def _loss_scale(self) -> torch.Tensor:
        """What the pipeline's next step multiplies by, on the pipeline's device."""
        scale: torch.Tensor = self.scale(torch.ones((), device=self._steps.settings.device))
        return scale

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        """As torch's; whatever is found on a rank is found on all.

        Of a gradient that `fully_shard` spread over replicas each unscales its shard, and torch shares what it found
        over them; here that is shared over the pipeline of each, so that in the end all know it.
        """
        found: dict[torch.device, torch.Tensor] = {}

        def unscale() -> Reply:
            found.update(super(GradScaler, self)._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16))
            return {"found": any(bool(flag) for flag in found.values()), "inverse": float(inv_scale)}

        replies = self._steps.all_gather("GradScaler", unscale)
        inverses = [reply["inverse"] for reply in replies]
        if not all(math.isclose(inverse, inverses[0]) for inverse in inverses):
            listed = ", ".join(f"{1 / inverse:g} on rank {rank}" for rank, inverse in enumerate(inverses))
            raise ValueError(f"the scale is {listed}: make the scaler and call update on every rank alike")
        # a rank of which nothing is trained has no gradients, and torch asks each for a verdict
        found.setdefault(found_inf.device, found_inf)
        for flag in found.values():
            flag.fill_(float(any(reply["found"] for reply in replies)))
        return found
