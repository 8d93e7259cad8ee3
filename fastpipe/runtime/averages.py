"""The gradients of one DistributedDataParallel on their way to their average over the replicas.

They lie in buckets made as its reducer's own, which go through its communication hook in the background, in the
buckets' order. A bucket may start while the stage's last backward still runs, as soon as hooks of its parameters and of
those before it have seen a gradient. Whether that was too soon, because something added to a gradient afterwards, is
looked at when all gradients are complete; one small message says which buckets are to be averaged once more, which
parameters have a gradient, and whether the step failed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from fastpipe.runtime.grad_dtype import grad_dtype_of, has_grad_dtype, zero_grad_of


class FlatBucket:
    """A bucket in the dtype of gradients that is not their parameters'; one of the reducer's has that of parameters.

    Args:
        parameters: whose gradients lie in it, one after the other.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = list(parameters)
        sizes = [parameter.numel() for parameter in self._parameters]
        first = self._parameters[0]
        self._buffer = torch.zeros(sum(sizes), dtype=grad_dtype_of(first), device=first.device)

    def buffer(self) -> torch.Tensor:
        """All of it."""
        return self._buffer

    def set_buffer(self, buffer: torch.Tensor) -> None:
        """Take what came of it."""
        self._buffer = buffer

    def gradients(self) -> list[torch.Tensor]:
        """The part of every parameter, in its shape."""
        parts = torch.split(self._buffer, [parameter.numel() for parameter in self._parameters])
        return [part.view(p.shape) for part, p in zip(parts, self._parameters, strict=True)]


class Told(NamedTuple):
    """What the replicas told each other.

    Attributes:
        num_failed: in how many of them the step failed.
        num_asking: how many of these made none, since parameters are missed in their pipeline.
        num_missing: how many miss some in this wrapper.
        again: whether a bucket had to be averaged again in any.
    """

    num_failed: int
    num_asking: int
    num_missing: int
    again: bool


class Average:
    """One step's.

    Args:
        wrapper: whose parameters, group and communication hook.
        in_place: from a parameter that the wrapper knows to the one that is used.
    """

    def __init__(self, wrapper: Any, in_place: Callable[[nn.Parameter], nn.Parameter]) -> None:
        self.wrapper = wrapper
        self.buckets: Sequence[Any] = wrapper.reducer._get_zeros_like_grad_buckets()
        self.parameters = [[in_place(parameter) for parameter in bucket.parameters()] for bucket in self.buckets]
        self._flat = any(map(has_grad_dtype, wrapper.module.parameters()))
        if self._flat:
            self.buckets = [FlatBucket(parameters) for parameters in self.parameters]
        # as the reducer does it: a hook gets gradients as they are, without one they are divided before they are summed
        self.factor = 1.0 if has_comm_hook(wrapper) else 1.0 / wrapper.process_group.size()
        self._futures: list[Any] = []
        self._used: list[list[tuple[torch.Tensor | None, int]]] = []
        self._missing: list[int] = []
        self._hooks: list[Any] = []

    def watch(self, comes: Callable[[nn.Parameter], bool]) -> None:
        """The last backward begins: start every bucket when it is complete.

        Args:
            comes: whether a parameter's gradient is still to come; the others have theirs.
        """
        self._missing = [0] * len(self.buckets)
        for number, parameters in enumerate(self.parameters):
            for parameter in parameters:
                if parameter.requires_grad and comes(parameter):
                    self._missing[number] += 1
                    hook = partial(self._came, number)
                    self._hooks.append(parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]
        self._start_complete()

    def _came(self, number: int, _: torch.Tensor) -> None:
        self._missing[number] -= 1
        self._start_complete()

    def _start_complete(self) -> None:
        # in their order, whichever is complete first: it must be the same on every replica
        while len(self._futures) < len(self.buckets) and self._missing[len(self._futures)] <= 0:
            self._start(failed=False)

    def _start(self, *, failed: bool) -> None:
        number = len(self._futures)
        if not failed:
            self._fill(number)
        self._used.append([(p.grad, 0 if p.grad is None else p.grad._version) for p in self.parameters[number]])
        self._futures.append(self._run(self.buckets[number]))

    def _run(self, bucket: Any) -> Any:
        if not self._flat:
            return self.wrapper.reducer._run_comm_hook(bucket)
        return dist.all_reduce(bucket.buffer(), group=self.wrapper.process_group, async_op=True).get_future()

    def _fill(self, number: int) -> None:
        with torch.no_grad():
            for parameter, view in zip(self.parameters[number], self.buckets[number].gradients(), strict=True):
                if parameter.grad is not None and self.factor == 1.0:
                    view.copy_(parameter.grad)
                elif parameter.grad is not None:
                    torch.mul(parameter.grad, self.factor, out=view)

    def complete(self, failed: bool, asks: tuple[bool, bool] = (False, False)) -> None:
        """All gradients are complete: start what has not been started, and tell the other replicas how it went.

        Args:
            failed: the step failed here, so send zeros instead, and that they mean nothing.
            asks: that it is none, since parameters are missed in the pipeline, and whether they are in this wrapper.
        """
        self.unwatch()
        early = len(self._futures)
        while len(self._futures) < len(self.buckets):
            self._start(failed=failed)
        again = [int(number < early and self._changed(number)) for number in range(len(self.buckets))]
        used = [int(p.grad is not None and not failed) for parameters in self.parameters for p in parameters]
        device = self.buckets[0].buffer().device
        status = [int(failed), *map(int, asks), *again, *used]
        self.status = torch.tensor(status, dtype=torch.int32, device=device)
        self._told = dist.all_reduce(self.status, group=self.wrapper.process_group, async_op=True).get_future()

    def unwatch(self) -> None:
        """Take the hooks off."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _changed(self, number: int) -> bool:
        """Whether a gradient is another one than went into the bucket."""
        now = [(p.grad, 0 if p.grad is None else p.grad._version) for p in self.parameters[number]]
        return any(
            grad is not before or version != old
            for (grad, version), (before, old) in zip(now, self._used[number], strict=True)
        )

    def finish(self, deadline: float) -> Told:
        """Put the averages into ``.grad``.

        Raises:
            TimeoutError: when they are not there by the deadline.
        """
        _awaited(self._told, deadline)
        num_failed, num_asking, num_missing, *flags = self.status.tolist()
        again, used = flags[: len(self.buckets)], flags[len(self.buckets) :]
        averages: list[torch.Tensor] = []
        for number, repeat in enumerate(again):
            averages += self._average(number, deadline, repeat=bool(repeat))
        parameters = [parameter for each in self.parameters for parameter in each]
        with torch.no_grad():
            for parameter, average, count in zip(parameters, averages, used, strict=True):
                if count:
                    parameter.grad = zero_grad_of(parameter) if parameter.grad is None else parameter.grad
                    parameter.grad.copy_(average)
        return Told(num_failed, num_asking, num_missing, any(again))

    def _average(self, number: int, deadline: float, *, repeat: bool) -> Sequence[torch.Tensor]:
        bucket = self.buckets[number]
        result = _awaited(self._futures[number], deadline)
        if repeat:
            bucket.buffer().zero_()
            self._fill(number)
            result = _awaited(self._run(bucket), deadline)
        bucket.set_buffer(result[0] if isinstance(result, list | tuple) else result)
        gradients: Sequence[torch.Tensor] = bucket.gradients()
        return gradients


def has_comm_hook(wrapper: Any) -> bool:
    """Whether a communication hook of the user's was registered."""
    return bool(wrapper._get_ddp_logging_data().get("comm_hook"))


def _awaited(future: Any, deadline: float) -> Any:
    """A future's value; `Future.wait` knows no limit of time."""
    done = threading.Event()
    future.add_done_callback(lambda _: done.set())
    if not done.wait(max(0.0, deadline - time.monotonic())):
        raise TimeoutError
    return future.wait()
