"""Forward alone: one batch, or a stream of microbatches."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, NoReturn

import torch

from fastpipe.placement import is_whole
from fastpipe.runtime.gathering import gather
from fastpipe.runtime.group import Membership
from fastpipe.runtime.inputs import Request
from fastpipe.runtime.plans import Plans
from fastpipe.runtime.result import StepResult
from fastpipe.runtime.steps import Settings, Steps
from fastpipe.runtime.under_way import Source, UnderWay


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
        **kwargs: Any,
    ) -> StepResult:
        """Forward alone, without gradients; the loss too when a target is given. Arguments as for `step`.

        Nothing is kept, and no gradient is touched, so it may come between a step and its optimizer. Whether dropout
        and BatchNorm train is the modules' own affair: see `eval` and `train`.
        """
        count = self.num_microbatches if num_microbatches is None else num_microbatches
        request = Request(args, kwargs, target, None, count, training=False, gathers_outputs=gather_outputs)
        return self._run(request, trace)

    def _run(self, request: Request, trace: bool) -> StepResult:
        if request.gathers_outputs and not self._settings.keep_outputs and not request.keeps_outputs:
            raise ValueError("gather_outputs: merge=False keeps no outputs; leave one of them out")
        result = self._steps.run(request, bool(trace))
        if request.gathers_outputs:
            result.found = gather(self._steps, self._member, self.device, result.found)
        return result

    def stream(
        self,
        microbatches: Iterable[Any],
        *,
        window: int | None = None,
        drain: bool = False,
        gather_outputs: bool = False,
        **kwargs: Any,
    ) -> Iterator[Any]:
        """Send one microbatch after the other through the pipeline, and yield their outputs in order.

        Called on every rank alike, and iterated on every rank. A window of microbatches enters at a time. The pipeline
        stays full from window to window: the last microbatches of one go on in the next, so an output comes after
        ``num_stages - 1`` further microbatches have entered, or the source has ended. What is held is a window's
        inputs and outputs, and one input a stage. All ranks meet between two windows, which a larger window does less
        often. Between two outputs other steps may be made, on all ranks alike; a microbatch that is under way goes on
        with the weights that it meets.

        Whoever stops (`break`, or an exception) ends the stream for all: the others get what is left of their window.
        When the source raises, the outputs of all that it gave before come first.

        Args:
            microbatches: the inputs, of any length; a tuple is several arguments. Looked at only where `needs_input`,
                and taken as far as needed.
            window: how many enter at a time; the pipeline's ``num_microbatches`` unless given.
            drain: whether the pipeline runs empty after every window: for a source that needs the outputs of one window
                to give the next. That costs the time of ``num_stages - 1`` microbatches a window. It is done in any
                case where the schedule holds every stage twice, or is a `Schedule` of fewer than ``window + num_stages
                - 1`` microbatches.
            gather_outputs: whether every rank yields the outputs; otherwise those without the last stage yield None.
            kwargs: keyword arguments of the model, the same for every microbatch.

        Raises:
            ValueError, TypeError: for a window that is none, or microbatches that cannot be iterated over.
            StepError: when the source or a stage raised on another rank; where it did, that comes through. The next
                step works.
        """
        size = self.num_microbatches if window is None else window
        if not is_whole(size, 1):
            raise ValueError(f"window = {window!r}: give a number of microbatches of at least 1")
        takes_input = any(stage.is_first for stage in self._steps.stages)
        if takes_input and not isinstance(microbatches, Iterable):
            raise TypeError(f"microbatches is of type {type(microbatches).__name__}: give an iterable, one item each")
        source = Source(iter(microbatches), size) if takes_input else None
        return self._windows(source, size, drain, gather_outputs, kwargs)

    def _windows(
        self, source: Source | None, size: int, drain: bool, gather_outputs: bool, kwargs: dict[str, Any]
    ) -> Iterator[Any]:
        call = f"stream in windows of {size}{', drained' if drain else ''}"
        plans = self._steps.plans
        under_way = UnderWay(plans.num_stages, not drain and plans.can_keep_full(size), self.device)
        open_ = True
        try:
            while True:
                taken, count, is_last = self._next_window(call, source, under_way, plans)
                if not count and not under_way:
                    open_ = False
                    return
                outputs = self._run_window(under_way, taken, count, is_last, gather_outputs, kwargs)
                del taken
                while outputs:
                    yield outputs.popleft()
        except GeneratorExit:
            raise
        except BaseException:
            # all ranks know of it already
            open_ = False
            raise
        finally:
            if open_ and self._steps.broken is None:
                self._steps.meet(call, lambda: {"stop": True})

    def _run_window(
        self,
        under_way: UnderWay,
        taken: list[Any],
        count: int,
        is_last: bool,
        gather_outputs: bool,
        kwargs: dict[str, Any],
    ) -> deque[Any]:
        """One window; the outputs of those microbatches that have gone through."""
        window = under_way.window(count, is_last=is_last)
        inputs = [*under_way.inputs, *taken]
        num_microbatches = len(window.starts)
        named = {name: [value] * num_microbatches for name, value in kwargs.items()}
        request = Request(
            (inputs,),
            named,
            None,
            None,
            num_microbatches,
            training=False,
            keeps_outputs=True,
            gathers_outputs=gather_outputs,
            window=window,
        )
        found = self._run(request, False).found
        return deque(found.get(i) for i in range(under_way.after(window, inputs)))

    def _next_window(
        self, call: str, source: Source | None, under_way: UnderWay, plans: Plans
    ) -> tuple[list[Any], int, bool]:
        """The next microbatches, how many, and whether they are the last; none when another rank has stopped."""
        taken: list[Any] = []

        def take() -> dict[str, Any]:
            if under_way and self._steps.plans is not plans:
                raise ValueError("stream: the pipeline was replanned with microbatches under way; use drain=True")
            if source is None:
                return {}
            taken.extend(source.take(hold_error=bool(under_way)))
            return {"count": len(taken), "ended": source.ended}

        replies = self._steps.meet(call, take)
        if any("stop" in reply for reply in replies):
            under_way.drop()
            return [], 0, True
        given = {(reply["count"], reply["ended"]) for reply in replies if "count" in reply}
        if len(given) > 1:
            counts = sorted(count for count, _ in given)
            raise ValueError(f"stream: the ranks with the first stage gave {counts} microbatches; give the same to all")
        return taken, *given.pop()
