"""What linears leave for W, and weight gradients that are added to ``.grad`` by the matrix product that makes them.

csrc/torch/fused_accumulation.cpp is the same for the native kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass
class Use:
    """What one linear leaves for W."""

    inputs: torch.Tensor
    grad: torch.Tensor
    versions: tuple[int, int] = (0, 0)

    def __post_init__(self) -> None:
        self.versions = _version(self.inputs), _version(self.grad)

    def require_unchanged(self) -> None:
        """Refuse what has been changed in place since I: a whole backward would have read it before."""
        for what, tensor, version in zip(
            ("input", "output's gradient"), (self.inputs, self.grad), self.versions, strict=True
        ):
            if _version(tensor) != version:
                raise RuntimeError(
                    f"the {what} of a linear, {tensor.type()} {list(tensor.shape)}, was changed in place between I, "
                    f"which left it for the weight's gradient, and W: it is at version {_version(tensor)} instead of "
                    f"{version}; do not write to it again, clone it before the linear, or use a schedule that does "
                    "not split backwards"
                )


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def accumulate_in_place(node: Any, uses: Sequence[Use]) -> bool:
    """Add what a weight's uses make to its parameter's gradient.

    Args:
        node: of autograd's graph, where the weight's gradient enters.
        uses: inputs, and gradients of the outputs, of the linears that used it.

    Returns:
        False, and nothing is done, where that is for the engine: no gradient to add to yet, one of another layout, a
        weight that is more than a parameter or its copy in another dtype, hooks that want to see a contribution, or
        operands of 16 bits where no product adds to 32.
    """
    leaf = _leaf_of(node)
    total = None if leaf is None else leaf.grad
    if leaf is None or total is None or not all(_fits(total, use.inputs, use.grad) for use in uses):
        return False
    with torch.no_grad():
        for use in uses:
            use.require_unchanged()
            if _widens(total, use.grad):
                torch.addmm(total, use.grad.t(), use.inputs, out_dtype=total.dtype, out=total)
            else:
                total.addmm_(use.grad.t(), use.inputs)
    for hook in list((leaf._post_accumulate_grad_hooks or {}).values()):
        hook(leaf)
    return True


def _leaf_of(node: Any) -> Any:
    """The parameter; None where what leads there is more than a cast, as autocast makes one."""
    if node.name() == "ToCopyBackward0":
        node = node.next_functions[0][0]
    leaf = getattr(node, "variable", None)
    return None if leaf is None or leaf._backward_hooks else leaf


def _widens(total: torch.Tensor, grad: torch.Tensor) -> bool:
    """Of a product of two 16-bit matrices that is added to a matrix of 32 bits: cuBLAS has it."""
    return grad.dtype in (torch.bfloat16, torch.float16) and total.dtype == torch.float32 and total.is_cuda


def _fits(total: torch.Tensor, inputs: torch.Tensor, grad: torch.Tensor) -> bool:
    plain = total.layout is torch.strided and not total.requires_grad
    dense = plain and torch.ops.aten.is_non_overlapping_and_dense(total)
    same = total.dtype == grad.dtype or _widens(total, grad)
    return dense and same and total.device == grad.device and total.shape == (grad.size(1), inputs.size(1))
