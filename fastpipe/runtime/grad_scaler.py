"""GradScaler: torch's, with one scale for all ranks of a pipeline."""

from __future__ import annotations

import math
import weakref
from types import SimpleNamespace
from typing import Any

import torch

from fastpipe.checks import check_counts, check_flags, check_type, plain
from fastpipe.runtime.common import by_mesh
from fastpipe.runtime.coordination import Reply
from fastpipe.runtime.pipeline import Pipeline


class GradScaler(torch.amp.GradScaler):
    """Loss scaling for fp16: `torch.amp.GradScaler` for a pipeline.

    Once created, it scales the roots of every backward of the pipeline: the loss, added losses, and ``output_grad``.
    Do not call `scale`. Otherwise use it as usual, on every rank::

        scaler = fastpipe.GradScaler(pipe)
        with torch.autocast("cpu", torch.float16):
            result = pipe.step(x, target=target)
        scaler.unscale_(optimizer)  # only if gradients are read before the step, for clipping for example
        pipe.clip_grad_norm_(1.0)
        scaler.step(optimizer)
        scaler.update()

    If one rank finds an infinite or NaN gradient, all ranks, of other replicas too, skip the optimizer's step and lower
    the scale. This costs one exchange between the processes. `result.loss` is unscaled.

    Args:
        pipe: the pipeline to scale. One pipeline has one scaler.
        init_scale, growth_factor, backoff_factor, growth_interval, enabled: as for `torch.amp.GradScaler`.

    Raises:
        TypeError: if ``pipe`` is not a Pipeline.
        ValueError: for a factor or an interval out of its range.
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
        check_type(Pipeline, pipe=pipe)
        check_flags(enabled=enabled)
        for name, value, least, most in (
            ("init_scale", init_scale, 0.0, torch.finfo(torch.float32).max),
            ("growth_factor", growth_factor, 1.0, math.inf),
            ("backoff_factor", backoff_factor, 0.0, 1.0),
        ):
            if enabled and not (isinstance(plain(value), int | float) and least < value < most):
                raise ValueError(f"{name} = {value!r}: give a number above {least:g} and below {most:g}")
        (interval,) = check_counts(growth_interval=growth_interval)
        super().__init__(pipe.device.type, float(init_scale), growth_factor, backoff_factor, interval, enabled)
        # not the pipeline itself: its steps hold this, and it ends when the script drops it
        self._pipe: Any = weakref.proxy(pipe)
        pipe._steps.loss_scale = self._loss_scale if enabled else None
        if enabled:
            self._loss_scale()  # so that `step` may come before the pipeline's first

    def _loss_scale(self) -> torch.Tensor:
        """The scale of the pipeline's next step, on its device."""
        scale: torch.Tensor = self.scale(torch.ones((), device=self._pipe.device))
        return scale

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        """Like torch's; an infinity on one rank is reported on all.

        For gradients that `fully_shard` shards, torch reduces ``found_inf`` over the replicas; this method reduces it
        over the pipeline of each replica, so all ranks get the same result.
        """
        found: dict[torch.device, torch.Tensor] = {}
        flags: list[torch.Tensor] = []  # of each kind of tensors, on the same devices

        def unscale() -> Reply:
            given = (parameter for group in optimizer.param_groups for parameter in group["params"])
            for parameters in by_mesh(given):
                part: Any = SimpleNamespace(param_groups=[{"params": parameters}])
                found.update(super(GradScaler, self)._unscale_grads_(part, inv_scale, found_inf, allow_fp16))
                flags.extend(found.values())
            return {"found": any(map(bool, flags)), "inverse": float(inv_scale)}

        replies = self._pipe._steps.all_gather("GradScaler", unscale)
        inverses = {place: reply["inverse"] for place, reply in replies.by_place.items()}
        if not all(math.isclose(inverse, inverses["0"]) for inverse in inverses.values()):
            listed = ", ".join(f"{1 / inverse:g} on rank {place}" for place, inverse in inverses.items())
            raise ValueError(
                f"the scale is {listed}: construct the GradScaler with the same arguments and call update on every rank"
            )
        # a rank without trained parameters has no gradients, and torch needs found_inf of every rank
        found.setdefault(found_inf.device, found_inf)
        for flag in found.values():
            flag.fill_(float(any(reply["found"] for reply in replies.everywhere)))
        return found
