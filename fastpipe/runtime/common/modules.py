"""Helpers for modules: walking through one, keeping its buffers, and the dtype of its gradients.

Microbatches in bf16 may be summed in fp32: since torch 2.11 a leaf's ``grad_dtype`` says what its ``.grad`` is;
autograd converts each contribution and then adds it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from fastpipe.runtime.common.torch_private import buffers_of, children_of, version_of


def walked(module: nn.Module) -> list[nn.Module]:
    """It and all that is in it, each once.

    ``modules()`` and ``parameters()``, which make names on their way, take several times as long.
    """
    pending, seen = [module], {module}
    for found in pending:
        for child in children_of(found).values():
            if child is not None and child not in seen:
                seen.add(child)
                pending.append(child)
    return pending


def keep_buffers(modules: Iterable[nn.Module]) -> Callable[[], None]:
    """Remember which buffers there are under which names, and what is in them.

    Returns:
        A function that puts all of it back, as often as it is called.
    """
    places = [(module, dict(buffers_of(module).items())) for root in modules for module in root.modules()]
    found = {id(b): b for _, named in places for b in named.values() if b is not None}.values()
    kept = [(buffer, buffer.detach().clone(), version_of(buffer)) for buffer in found]

    def put_back() -> None:
        for module, named in places:
            _rename(module, named)
        with torch.no_grad():
            for buffer, value, version in kept:
                # Where its version says that it was changed, the copy is a change, too: what is saved for a backward
                # may be the buffer itself, and torch then says so. But batch norm changes its statistics without a
                # word, and whether it did would have to be asked of the device.
                (buffer.data if version_of(buffer) == version else buffer).copy_(value)

    return put_back


def _rename(module: nn.Module, named: Mapping[str, torch.Tensor | None]) -> None:
    """Give a module these buffers, and no others."""
    now = buffers_of(module)  # of a scripted module no dict, and without its methods
    for name in set(now.keys()).difference(named):
        del now[name]
    for name, buffer in named.items():
        if name not in now or now[name] is not buffer:
            now[name] = buffer


def check_grad_dtype(dtype: Any) -> None:
    """Refuse what is no dtype of a gradient.

    Raises:
        ValueError: naming it, or the torch that cannot do it.
    """
    if dtype is None:
        return
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"grad_dtype = {dtype!r}: give a floating-point dtype, torch.float32 say, or None")
    if not hasattr(torch.Tensor, "grad_dtype"):
        raise ValueError(f"grad_dtype = {dtype}: parameters of torch {torch.__version__} cannot have it; leave it out")


def set_grad_dtype(module: nn.Module, dtype: torch.dtype) -> None:
    """Have the gradients of all floating-point parameters of a module in a dtype; those there are become it."""
    for parameter in module.parameters():
        if parameter.is_floating_point() and grad_dtype_of(parameter) != dtype:
            grad, parameter.grad = parameter.grad, None
            parameter.grad_dtype = dtype
            parameter.grad = None if grad is None else grad.to(dtype)


def grad_dtype_of(parameter: torch.Tensor) -> torch.dtype:
    """The dtype of its gradient."""
    found: torch.dtype | None = getattr(parameter, "grad_dtype", None)
    return parameter.dtype if found is None else found


def has_grad_dtype(parameter: torch.Tensor) -> bool:
    """Whether that is another one than its own."""
    return grad_dtype_of(parameter) != parameter.dtype


def alias_of(parameter: torch.Tensor) -> nn.Parameter:
    """Another parameter over the same memory, with gradients of its own in the same dtype."""
    alias = nn.Parameter(parameter.detach())
    if has_grad_dtype(parameter):
        alias.grad_dtype = grad_dtype_of(parameter)
    return alias


def dense(grad: torch.Tensor) -> torch.Tensor:
    """A gradient as it is swapped with another process: both ends know the shape of one that is not sparse."""
    return grad if grad.layout is torch.strided else grad.to_dense()


def zero_grad_of(parameter: torch.Tensor) -> torch.Tensor:
    """A gradient of zeros."""
    return torch.zeros_like(parameter, dtype=grad_dtype_of(parameter))
