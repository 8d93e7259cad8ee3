"""Gradients in another dtype than their parameters: microbatches in bf16 whose sum is taken in fp32.

Since torch 2.11 a leaf says in ``grad_dtype`` what its ``.grad`` is; autograd converts each contribution and then adds.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


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
