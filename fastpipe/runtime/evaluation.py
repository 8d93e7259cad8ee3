"""Forward alone: one batch, or a stream of microbatches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import torch

from fastpipe.runtime.gathering import gather
from fastpipe.runtime.group import Membership
from fastpipe.runtime.inputs import Request
from fastpipe.runtime.result import StepResult
from fastpipe.runtime.steps import Settings, Steps

_CALL = "stream"


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

    def eval_step(
        self,
        *args: Any,
        target: Any = None,
        num_microbatches: int | None = None,
        trace: bool = False,
        gather_outputs: bool = False,
        **kwargs: Any,
    ) -> StepResult:
        """Forward alone, without gradients; the loss too when a target is given. Arguments as for `step`.

        Nothing is kept, and no gradient is touched, so it may come between a step and its optimizer. Whether dropout
        and BatchNorm train is the modules' own affair: see `eval` and `train`.
        """
        count = self.num_microbatches if num_microbatches is None else num_microbatches
        return self._run(Request(args, kwargs, target, None, count, training=False), trace, gather_outputs)

    def _run(self, request: Request, trace: bool, gather_outputs: bool) -> StepResult:
        if gather_outputs and not self._settings.keep_outputs and not request.keeps_outputs:
            raise ValueError("gather_outputs: merge=False keeps no outputs; leave one of them out")
        result = self._steps.run(request, trace)
        if gather_outputs:
            result.found = gather(self._steps, self._member, self.device, result.found)
        return result

    def stream(
        self, microbatches: Iterable[Any], *, window: int | None = None, gather_outputs: bool = False, **kwargs: Any
    ) -> Iterator[Any]:
        """Send one microbatch after the other through the pipeline, and yield their outputs in order.

        Called on every rank alike, and iterated on every rank. A window of microbatches is on its way at a time, and as
        many outputs are held. Between two windows the pipeline runs empty, which costs as much as ``num_ranks - 1``
        microbatches: a larger window is faster, a smaller one gives its first output sooner. Between two outputs other
        steps may be made, on all ranks alike.

        Whoever stops (`break`, or an exception) ends the stream for all: the others get what is left of their window.

        Args:
            microbatches: the inputs, of any length; a tuple is several arguments. Looked at only where `needs_input`,
                and taken as far as needed.
            window: how many are on their way; the pipeline's ``num_microbatches`` unless given.
            gather_outputs: whether every rank yields the outputs; otherwise those without the last stage yield None.
            kwargs: keyword arguments of the model, the same for every microbatch.

        Raises:
            ValueError, TypeError: for a window that is none, or microbatches that cannot be iterated over.
            StepError: when the source or a stage raised on another rank; where it did, that comes through. The next
                step works.
        """
        size = self.num_microbatches if window is None else window
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ValueError(f"window = {window!r}: give a number of microbatches of at least 1")
        if self._takes_input and not isinstance(microbatches, Iterable):
            raise TypeError(f"microbatches is of type {type(microbatches).__name__}: give an iterable, one item each")
        return self._windows(iter(microbatches) if self._takes_input else iter(()), size, gather_outputs, kwargs)

    @property
    def _takes_input(self) -> bool:
        return any(stage.is_first for stage in self._steps.stages)

    def _windows(self, source: Iterator[Any], size: int, gather_outputs: bool, kwargs: dict[str, Any]) -> Iterator[Any]:
        open_ = True
        try:
            while True:
                taken, count = self._next_window(source, size)
                if not count:
                    open_ = False
                    return
                named = {name: [value] * count for name, value in kwargs.items()}
                request = Request((taken,), named, None, None, count, training=False, keeps_outputs=True)
                result = self._run(request, False, gather_outputs)
                outputs = [result.found.get(i) for i in range(count)]
                del result, request, taken
                for i in range(count):
                    output, outputs[i] = outputs[i], None
                    yield output
        except GeneratorExit:
            raise
        except BaseException:
            # all ranks know of it already
            open_ = False
            raise
        finally:
            if open_ and self._steps.broken is None:
                self._steps.meet(_CALL, lambda: {"stop": True})

    def _next_window(self, source: Iterator[Any], size: int) -> tuple[list[Any], int]:
        """The next microbatches, and how many; 0 when all is done, or another rank has stopped."""
        taken: list[Any] = []

        def take() -> dict[str, Any]:
            taken.extend(islice(source, size))
            return {"count": len(taken)} if self._takes_input else {}

        replies = self._steps.meet(_CALL, take)
        if any("stop" in reply for reply in replies):
            return [], 0
        counts = {reply["count"] for reply in replies if "count" in reply}
        if len(counts) > 1:
            raise ValueError(
                f"stream: the ranks with the first stage gave {sorted(counts)} microbatches; give the same to all"
            )
        return taken, counts.pop()
