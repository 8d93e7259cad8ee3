"""What crosses a boundary between stages: tensors, and what they look like before they arrive."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

Tensors = tuple[torch.Tensor, ...]


class TensorSpec(NamedTuple):
    """What a tensor looks like.

    Attributes:
        dtype: its element type.
        size: its shape.
        stride: its strides, in elements; dense, so that its memory is a block of ``numel`` elements.
        requires_grad: whether its receiver makes it require a gradient.
    """

    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    requires_grad: bool

    def __str__(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        return f"{name}{list(self.size)}{'' if self.requires_grad else ' without gradient'}"

    def empty(self) -> torch.Tensor:
        """A new tensor of this kind, without the gradient flag; torch aligns it to 64 bytes."""
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype)


Specs = tuple[TensorSpec, ...]


def specs_of(tensors: Sequence[torch.Tensor]) -> Specs:
    """The specs of dense tensors."""
    return tuple(TensorSpec(t.dtype, tuple(t.shape), t.stride(), t.requires_grad) for t in tensors)


def specs_text(specs: Specs) -> str:
    """Specs as a user reads them."""
    return ", ".join(map(str, specs)) or "no tensor"


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with its strides if its elements fill one block of memory; a contiguous copy otherwise.

    Strides are kept because kernels choose their order of summation by them.
    """
    if tensor.is_contiguous() or torch.ops.aten.is_non_overlapping_and_dense(tensor):
        return tensor
    return tensor.contiguous()


def dense_all(tensors: Sequence[torch.Tensor]) -> Tensors:
    """Dense tensors for a transport, with their gradient flags and without their graphs."""
    out = []
    for tensor in tensors:
        flat = dense(tensor.detach())
        out.append(flat.requires_grad_() if tensor.requires_grad else flat)
    return tuple(out)


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a dense tensor as one dimension."""
    detached = tensor.detach()
    return detached.as_strided((detached.numel(),), (1,), detached.storage_offset())


def copy_of(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a dense tensor in memory of its own: same strides, same gradient flag."""
    with torch.no_grad():
        copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
        copy.copy_(tensor)
    return copy.requires_grad_(tensor.requires_grad)


def handed_over(tensors: Tensors) -> Tensors:
    """The same memory for another stage of the same rank, cut off from the graph."""
    return tuple(t.detach().requires_grad_(t.requires_grad) for t in tensors)


def boundary_tensors(value: Any, what: str) -> Tensors:
    """The tensors that a stage hands to the next one.

    Raises:
        ValueError: when ``value`` is neither a tensor nor a tuple or list of tensors.
    """
    if isinstance(value, torch.Tensor):
        return (value,)
    if isinstance(value, tuple | list) and all(isinstance(item, torch.Tensor) for item in value):
        return tuple(value)
    found = type(value).__name__
    if isinstance(value, tuple | list):
        found += " of " + ", ".join(sorted({type(item).__name__ for item in value}))
    raise ValueError(
        f"{what} returned a {found}: a stage hands a tensor, or a tuple or list of tensors, to the next one"
    )
