"""What is thread-local in torch and must be the same in every thread that computes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _python_dispatch

from fastpipe.runtime.devices import CPU, current_stream

# not typed
_functions: Any = torch.overrides
_dispatch: Any = _python_dispatch


class ThreadState:
    """Grad mode, autocast, current stream, hooks of saved tensors and modes of the thread that made it.

    A device that is the default is a mode, and so is what counts FLOPs. Hooks are those of `torch.autograd.graph`:
    activations go to the host by them.

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
        # of several the innermost alone has effect
        self.hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        self.function_modes = _functions._get_current_function_mode_stack()
        self.dispatch_modes = _dispatch._get_current_dispatch_mode_stack()

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """The state, in another thread."""
        with (
            torch.set_grad_enabled(self.grad),
            torch.autocast(self.type, dtype=self.dtype, enabled=self.autocast, cache_enabled=self.cache),
            contextlib.nullcontext() if self.stream is None else self.stream,
            contextlib.nullcontext() if self.hooks is None else saved_tensors_hooks(*self.hooks),
            self._modes(),
        ):
            yield

    @contextlib.contextmanager
    def _modes(self) -> Iterator[None]:
        """The modes of another thread: not entered, which they were there, but put on this thread's stacks."""
        with contextlib.ExitStack() as stack:
            for function_mode in self.function_modes:
                _functions._push_mode(function_mode)
                stack.callback(_functions._pop_mode)
            for dispatch_mode in self.dispatch_modes:
                _dispatch._push_mode(dispatch_mode)
                stack.callback(_dispatch._pop_mode, getattr(dispatch_mode, "_mode_key", None))
            yield
