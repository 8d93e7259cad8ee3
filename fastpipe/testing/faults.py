"""Faults that are injected at a rank, an action and a microbatch: to test that a training script survives them.

docs/reliability.md has what a pipeline does in each case.
"""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


def flip_bit(tensor: torch.Tensor, element: int = 0, bit: int = 20) -> None:
    """Flip a bit of a tensor in memory, as faulty hardware does: autograd does not notice.

    Args:
        tensor: contiguous, of 4 bytes for each element. `Fault` flips one of an output or of its gradient with this.
        element: which element, in row-major order.
        bit: which bit of it, from the lowest, below 31.
    """
    bits = tensor.data.view(torch.int32).view(-1)
    bits[element] ^= 1 << bit


class Fault(nn.Module):
    """A module with a fault in one of its calls: it raises, or does what a function does.

    Which rank, action and microbatch fails follows from the layer and the number of its call.

    Args:
        module: the wrapped module.
        at_call: the number of the forward (or backward) that fails, from 0.
        error: an exception, or a function that gets the output (in the backward its gradient) and may raise, exit,
            sleep, or return another tensor.
        backward: fail in the backward instead of the forward.
    """

    def __init__(
        self, module: nn.Module, at_call: int, error: BaseException | Callable[[Any], Any], *, backward: bool = False
    ) -> None:
        super().__init__()
        self.module = module
        self.at_call = at_call
        self.error: BaseException | Callable[[Any], Any] | None = error
        self.backward = backward
        self.calls = 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward, or the fault."""
        if not self.backward:
            fault = self._count()
            output = self.module(*args, **kwargs)
            replaced = None if fault is None else fault(output)
            return output if replaced is None else replaced
        output = self.module(*args, **kwargs)
        first = output if isinstance(output, torch.Tensor) else output[0]
        if first.requires_grad:
            first.register_hook(self._in_backward)
        return output

    def _in_backward(self, grad: torch.Tensor) -> Any:
        fault = self._count()
        return None if fault is None else fault(grad)

    def _count(self) -> Callable[[Any], Any] | None:
        """The function of this call; raises the exception if it is one."""
        self.calls += 1
        if self.calls - 1 != self.at_call:
            return None
        # drop it: its traceback holds the step's frames, and so the pipeline that holds this module
        error, self.error = self.error, None
        assert error is not None
        if isinstance(error, BaseException):
            raise error
        return error


class NastyError(Exception):
    """An exception without a text, which takes no notes."""

    def __str__(self) -> str:
        raise RuntimeError("no text")

    def add_note(self, note: str) -> None:
        """Refuse it."""
        raise TypeError("no notes")


def not_a_number(tensor: torch.Tensor) -> torch.Tensor:
    """What hardware or a division by zero makes of a result."""
    return tensor * float("nan")


def out_of_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Allocates more than there is."""
    return tensor + torch.empty(2**60)


def few_descriptors(tensor: torch.Tensor) -> torch.Tensor:
    """From now on this process cannot open anything."""
    descriptor = os.open(os.devnull, os.O_RDONLY)
    os.close(descriptor)
    resource.setrlimit(resource.RLIMIT_NOFILE, (descriptor, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    return tensor


FAULTS: dict[str, Callable[[], BaseException | Callable[[Any], Any]]] = {
    "raise": lambda: ValueError("on purpose"),
    "nasty exception": NastyError,
    "SystemExit": lambda: SystemExit(3),
    "exit": lambda: lambda _: os._exit(3),
    "kill": lambda: lambda _: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: lambda _: os.kill(os.getpid(), signal.SIGSTOP),
    "delay": lambda: lambda _: time.sleep(1),
    "NaN": lambda: not_a_number,
    "out of memory": lambda: out_of_memory,
    "few descriptors": lambda: few_descriptors,
}
"""By name, makes what `Fault` takes as ``error``."""


@contextmanager
def full_disk() -> Iterator[None]:
    """Context in which this process cannot write files."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
