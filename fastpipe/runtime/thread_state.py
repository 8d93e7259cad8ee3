"""What is thread-local in torch and must be the same in every thread that computes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


class ThreadState:
    """Grad mode and autocast of the thread that made it."""

    def __init__(self) -> None:
        self.grad = torch.is_grad_enabled()
        self.autocast = torch.is_autocast_enabled("cpu")
        self.dtype = torch.get_autocast_dtype("cpu")
        self.cache = torch.is_autocast_cache_enabled()

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """The state, in another thread."""
        with (
            torch.set_grad_enabled(self.grad),
            torch.autocast("cpu", dtype=self.dtype, enabled=self.autocast, cache_enabled=self.cache),
        ):
            yield
