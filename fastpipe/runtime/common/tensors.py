"""Tensors that cross a boundary between stages, and their specs."""

from __future__ import annotations

import base64
import hashlib
import math
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from fastpipe.runtime.common.torch_private import pytree

Tensors = tuple[torch.Tensor, ...]


class TensorSpec(NamedTuple):
    """Dtype, shape and strides of a tensor.

    Attributes:
        stride: its strides, in elements; dense, so that its memory is a block of ``numel`` elements.
        requires_grad: whether the receiver makes it require a gradient.
    """

    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    requires_grad: bool

    def __str__(self) -> str:
        strides = "" if self._laid_out() == self._contiguous() else f" with strides {self.stride}"
        return f"{dtype_name(self.dtype)}{list(self.size)}{strides}{'' if self.requires_grad else ' without gradient'}"

    def matches(self, other: TensorSpec) -> bool:
        """Whether one fits where the other is expected: strides of dimensions of size 1 do not count."""
        return self._replace(stride=()) == other._replace(stride=()) and self._laid_out() == other._laid_out()

    def _laid_out(self) -> tuple[int, ...]:
        if 0 in self.size:
            return ()
        return tuple(stride for size, stride in zip(self.size, self.stride, strict=True) if size != 1)

    def _contiguous(self) -> tuple[int, ...]:
        sizes = [size for size in self.size if size != 1] if 0 not in self.size else []
        return tuple(math.prod(sizes[place + 1 :]) for place in range(len(sizes)))

    def empty(self, device: torch.device | None = None) -> torch.Tensor:
        """A new tensor with this spec, aligned to 64 bytes, without the gradient flag; default: on the CPU."""
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=device)


Specs = tuple[TensorSpec, ...]


def specs_of(tensors: Sequence[torch.Tensor]) -> Specs:
    """The specs of dense tensors."""
    return tuple(TensorSpec(t.dtype, tuple(t.shape), t.stride(), t.requires_grad) for t in tensors)


def specs_match(specs: Specs, others: Specs) -> bool:
    """Whether tensors with these specs fit where the others are expected."""
    return len(specs) == len(others) and all(spec.matches(other) for spec, other in zip(specs, others, strict=True))


def specs_text(specs: Specs) -> str:
    """Specs as text for users."""
    return ", ".join(map(str, specs)) or "no tensor"


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with its strides if its elements fill one block of memory; else a copy in the order of its strides.

    Strides are kept because kernels choose their order of summation by them: half of the channels of a channels_last
    tensor stay channels_last. Lazy conjugation and negation are resolved.

    Raises:
        ValueError: for a tensor that has no strides, or more than its elements.
    """
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
        raise ValueError(
            "a stage gave a sparse, nested or quantized tensor to another rank, which can take plain dense tensors "
            "only; convert it in the stage"
        )
    tensor = tensor.resolve_conj().resolve_neg()
    if tensor.is_contiguous() or torch.ops.aten.is_non_overlapping_and_dense(tensor):
        return tensor
    return tensor.clone()


def dense_all(tensors: Sequence[torch.Tensor]) -> Tensors:
    """Dense tensors for a transport, with their gradient flags and without their graphs."""
    return tuple(dense(tensor.detach()).requires_grad_(tensor.requires_grad) for tensor in tensors)


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a dense tensor as one dimension of bytes: backends do not support every dtype."""
    detached = tensor.detach()
    return detached.as_strided((detached.numel(),), (1,), detached.storage_offset()).view(torch.uint8)


def copy_of(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a dense tensor in new memory: same strides, same gradient flag."""
    with torch.no_grad():
        copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
        copy.copy_(tensor)
    return copy.requires_grad_(tensor.requires_grad)


def handed_over(tensors: Tensors) -> Tensors:
    """The same memory for another stage of the rank, detached from the graph."""
    return tuple(t.detach().requires_grad_(t.requires_grad) for t in tensors)


def tensor_leaves(value: Any) -> Tensors:
    """The tensors of a tree, in its order."""
    # pytree is slow
    leaves = (value,) if isinstance(value, torch.Tensor) else pytree.tree_leaves(value)
    return tuple(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))


def tensors_in(value: Any, what: str) -> Tensors:
    """`tensor_leaves`; ValueError if there are none."""
    found = tensor_leaves(value)
    if not found:
        raise ValueError(f"{what} is a {type(value).__name__} without a tensor: give a tensor, or a tree of tensors")
    return found


def has_graph(tensor: torch.Tensor) -> bool:
    """Whether a backward can begin at a tensor.

    Not at a view that was made under no_grad of a tensor with a graph: it has ``requires_grad``, and no node.
    """
    if tensor.grad_fn is not None or not tensor.requires_grad:
        return tensor.requires_grad
    with torch.enable_grad():
        node: Any = tensor.view_as(tensor).grad_fn
    return node.next_functions[0][0] is not None


def bytes_of(tensor: torch.Tensor, device: torch.device | str = "cpu") -> torch.Tensor:
    """The bytes of the elements in row-major order, on a device."""
    return tensor.detach().resolve_conj().resolve_neg().to(device).contiguous().reshape(-1).view(torch.uint8)


def dtype_name(dtype: torch.dtype) -> str:
    """A dtype as text, such as "float32"; `dtype_of` is the inverse."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """The dtype of a `dtype_name`."""
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def encoded(tensor: torch.Tensor) -> list[Any]:
    """A dense tensor as JSON, exact to the last bit: dtype, shape and bytes."""
    data = base64.b64encode(bytes_of(tensor).numpy().tobytes()).decode()
    return [dtype_name(tensor.dtype), list(tensor.shape), data]


def decoded(dtype: str, shape: Sequence[int], data: str) -> torch.Tensor:
    """The tensor of what `encoded` returned."""
    raw = bytearray(base64.b64decode(data))
    memory = torch.frombuffer(raw, dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)
    return memory.view(dtype_of(dtype)).view(shape)


def bit_sums(tensors: Iterable[torch.Tensor | None]) -> list[int | None]:
    """The 64-bit sum of each tensor's bits; waits for the device once."""
    sums = [None if tensor is None else bit_sum(tensor) for tensor in tensors]
    found = [total for total in sums if total is not None]
    values = iter(torch.stack(found).tolist() if found else [])
    return [None if total is None else next(values) for total in sums]


def bit_sum(tensor: torch.Tensor) -> torch.Tensor:
    """The 64-bit sum of a tensor's bits, as a tensor; one flipped bit changes it."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    size = tensor.element_size()
    if tensor.is_contiguous() and not (tensor.numel() * size % 8 or tensor.storage_offset() * size % 8):
        return tensor.view(-1).view(torch.int64).sum()  # nearly all weights and activations
    (dense,) = dense_all([tensor if tensor.layout is torch.strided else tensor.to_dense()])
    memory = flat(copy_of(dense))
    whole = len(memory) // 8 * 8
    return memory[:whole].view(torch.int64).sum() + memory[whole:].sum()


def digest_of(tensor: torch.Tensor) -> str:
    """A digest of the bytes of the elements."""
    return hashlib.blake2b(bytes_of(tensor).numpy().tobytes(), digest_size=16).hexdigest()


def is_dtensor(tensor: Any) -> bool:
    """Whether it is a DTensor. Does not import DTensor, which takes half a second."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def is_block_mask(value: Any) -> bool:
    """Whether it is FlexAttention's BlockMask. Does not import it, which takes a second."""
    module = sys.modules.get("torch.nn.attention.flex_attention")
    return module is not None and isinstance(value, module.BlockMask)


def unrepeated(tensor: torch.Tensor) -> torch.Tensor:
    """A view with each element of memory that `expand` repeats once, into which torch copies; else the tensor."""
    strides = enumerate(tensor.stride()) if tensor.layout is torch.strided and not tensor.is_nested else ()
    for dim, stride in strides:
        if stride == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """This process's shard of a DTensor; any other tensor itself."""
    if not is_dtensor(tensor):
        return tensor
    with torch.no_grad():
        local: torch.Tensor = tensor.to_local()  # type: ignore[attr-defined]
    return local
