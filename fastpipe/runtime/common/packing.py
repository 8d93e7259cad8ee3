"""Tensors in a block of bytes, exact to the last bit, and behind them a text that says where each one lies.

Strides, gaps between elements, and addresses modulo 64 are kept, as kernels choose their order of summation by them.
The text is the caller's: places are tuples of plain values, so that no reader has to construct objects.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from fastpipe.runtime.common.tensors import bytes_of, dtype_name, dtype_of

_ALIGNMENT = 64
"""Of all memory that torch allocates or maps, in bytes."""
_LENGTH = 8
"""Bytes at the end of a block: the length of the text before them."""


class PackedTensor(NamedTuple):
    """The place of a tensor in a block: `offset` of its first element and `length` to its last one, in bytes."""

    dtype: str
    size: Sequence[int]
    stride: Sequence[int]
    offset: int
    length: int
    requires_grad: bool

    def memory(self, block: torch.Tensor) -> torch.Tensor:
        """The tensor's bytes in the block, and those between its elements."""
        return block[self.offset : self.offset + self.length]

    def view(self, block: torch.Tensor) -> torch.Tensor:
        """The tensor, in the block's memory."""
        with torch.no_grad():
            found = self.memory(block).view(dtype_of(self.dtype)).as_strided(self.size, self.stride)
            # detached: autograd refuses changes in place of a view that was made without gradients
            return found.detach().requires_grad_(self.requires_grad)

    def copy(self, block: torch.Tensor, device: torch.device) -> torch.Tensor:
        """The tensor on a device, in memory of its own: autograd sees no change of others in a change of it."""
        place = self.offset % _ALIGNMENT
        own = block[self.offset - place : self.offset + self.length].to(device, copy=True)
        return self._replace(offset=place).view(own)


def lay_out(tensors: Sequence[torch.Tensor], start: int = 0) -> tuple[list[PackedTensor], int]:
    """Places for tensors without lazy conjugation or negation, from ``start``, a multiple of 64; and their end."""
    places: list[PackedTensor] = []
    for tensor in tensors:
        size, stride, num_elements = tuple(tensor.shape), tensor.stride(), tensor.numel()
        if num_elements and not tensor.is_contiguous():
            num_elements = 1 + sum((count - 1) * step for count, step in zip(size, stride, strict=True))
        length = num_elements * tensor.itemsize
        offset = start + tensor.data_ptr() % _ALIGNMENT
        places.append(PackedTensor(dtype_name(tensor.dtype), size, stride, offset, length, tensor.requires_grad))
        start = -(-(offset + length) // _ALIGNMENT) * _ALIGNMENT
    return places, start


def size_of(end: int, text: bytes) -> int:
    """The least size of a block whose tensors end there, and that has the text."""
    return end + len(text) + _LENGTH


def pack(memories: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> None:
    """Copy tensors to their `PackedTensor.memory`."""
    with torch.no_grad():
        for memory, tensor in zip(memories, tensors, strict=True):
            memory.copy_(_memory_of(tensor, len(memory)))


def _memory_of(tensor: torch.Tensor, length: int) -> torch.Tensor:
    """As bytes: torch does not copy all dtypes, such as int4."""
    return tensor.as_strided((length // tensor.itemsize,), (1,)).view(torch.uint8)


def write_text(block: torch.Tensor, text: bytes) -> None:
    """Write a text at the end of a block."""
    tail = text + len(text).to_bytes(_LENGTH, "little")
    block[-len(tail) :].copy_(torch.frombuffer(bytearray(tail), dtype=torch.uint8))


def text_of(block: torch.Tensor) -> bytes:
    """The text at the end of a block."""
    length = int.from_bytes(bytes_of(block[-_LENGTH:]).numpy().tobytes(), "little")
    return bytes_of(block[-_LENGTH - length : -_LENGTH]).numpy().tobytes()


def exact_copy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on which kernels compute the same bits."""
    with torch.no_grad():
        tensor = tensor.resolve_conj().resolve_neg()
    (place,), size = lay_out([tensor])
    block = torch.empty(size, dtype=torch.uint8, device=tensor.device)
    pack([place.memory(block)], [tensor])
    return place.view(block)


def is_exact_copy(copy: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Whether a result of `exact_copy` is what it would be of this tensor."""
    with torch.no_grad():
        tensor = tensor.resolve_conj().resolve_neg()
        ((place,), _), ((own,), _) = lay_out([copy]), lay_out([tensor])
        return place == own and torch.equal(*(_memory_of(found, place.length) for found in (copy, tensor)))
