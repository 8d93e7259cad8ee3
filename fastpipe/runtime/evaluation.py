"""Forward alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NoReturn

import torch

from fastpipe.runtime.step import Request, Settings, StepResult, Steps, gather
from fastpipe.runtime.transport import Membership


class Evaluates:
    """The part of `fastpipe.Pipeline` that goes forward alone.

    Attributes:
        num_microbatches: into how many microbatches a batch is cut.
        device: what is computed on.
    """

    num_microbatches: int
    device: torch.device
    _steps: Steps
    _settings: Settings
    _member: Membership

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "a Pipeline cannot be copied or pickled, since it has threads and connections: copy or pickle its layers "
            "or its state_dict(), or use fastpipe.save_checkpoint"
        )

    def eval_step(
        self,
        *args: Any,
        target: Any = None,
        num_microbatches: int | None = None,
        trace: bool = False,
        gather_outputs: bool = False,
        index: int | None = None,
        **kwargs: Any,
    ) -> StepResult:
        """Forward alone, without gradients; the loss too when a target is given. Arguments as for `step`.

        Nothing is kept, and no gradient is touched, so it may come between a step and its optimizer. Whether dropout
        and BatchNorm train is the modules' own affair: see `eval` and `train`.
        """
        count = self.num_microbatches if num_microbatches is None else num_microbatches
        request = Request(
            args, kwargs, target, None, count, training=False, gathers_outputs=gather_outputs, index=index
        )
        return self._run(request, trace)

    def _run(self, request: Request, trace: bool) -> StepResult:
        if request.gathers_outputs and not self._settings.keep_outputs:
            raise ValueError("gather_outputs: merge=False keeps no outputs; leave one of them out")
        result = self._steps.run(self._with_target(request), bool(trace))
        if request.gathers_outputs:
            result.found = gather(self._steps, self._member, self.device, result.found)
        return result

    def _with_target(self, request: Request) -> Request:
        """A loss of a model that takes its target by a name finds it among the keyword arguments."""
        name = getattr(self._settings.loss_fn, "target_name", "")
        if request.target is not None or name not in request.kwargs:
            return request
        kwargs = {other: value for other, value in request.kwargs.items() if other != name}
        return replace(request, target=request.kwargs[name], kwargs=kwargs)
