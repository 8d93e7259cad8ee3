"""What is thread-local in torch and must be the same in every thread that computes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from fastpipe.runtime.devices import CPU, current_stream


class ThreadState:
    """Grad mode, autocast and current stream of the thread that made it.

    Args:
        device: what is computed on.
    """

    def __init__(self, device: torch.device = CPU) -> None:
        self.type = device.type
        self.grad = torch.is_grad_enabled()
        self.autocast = torch.is_autocast_enabled(self.type)
        self.dtype = torch.get_autocast_dtype(self.type)
        self.cache = torch.is_autocast_cache_enabled()
        self.stream = current_stream(device)

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """The state, in another thread."""
        with (
            torch.set_grad_enabled(self.grad),
            torch.autocast(self.type, dtype=self.dtype, enabled=self.autocast, cache_enabled=self.cache),
            contextlib.nullcontext() if self.stream is None else self.stream,
        ):
            yield
