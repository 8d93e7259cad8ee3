"""What a last stage returns: losses, outputs, and what is wrong with them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from fastpipe.runtime.tensors import Tensors


def fitting(outputs: Tensors, grads: Tensors) -> Tensors:
    """The outputs, if the gradients that the caller gave are theirs."""
    shapes = [[tuple(tensor.shape) for tensor in tensors] for tensors in (grads, outputs)]
    if shapes[0] != shapes[1]:
        raise ValueError(
            f"output_grad has the shapes {shapes[0]} for a microbatch whose outputs have {shapes[1]}: give one "
            "gradient of the same shape for each output"
        )
    return outputs


def returned_loss(output: Any) -> Any:
    """The loss that a last stage returned, alone or in a dict; None if there is none."""
    value = output.get("loss") if isinstance(output, Mapping) else output
    is_loss = isinstance(value, torch.Tensor) and value.dim() == 0 and value.is_floating_point()
    return value if is_loss else None


def checked_loss(loss: Any) -> torch.Tensor:
    """The loss, if it is one.

    Raises:
        ValueError: when it is no tensor of one element.
    """
    if not isinstance(loss, torch.Tensor):
        raise ValueError(
            f"loss_fn returned a {type(loss).__name__}: return one tensor with one element, the loss of the microbatch"
        )
    if loss.numel() != 1:
        raise ValueError(f"loss_fn returned a tensor of shape {tuple(loss.shape)}: reduce it to one element")
    return loss.reshape(()) if loss.dim() else loss


def scale_loss(loss: torch.Tensor, divisor: float | None) -> torch.Tensor:
    """A microbatch's share in the loss of the batch: the only copy of that rule."""
    return loss if divisor is None else loss / divisor


def detached(value: Any) -> Any:
    """A tree of tensors without their graphs."""
    if isinstance(value, torch.Tensor):
        return value.detach()
    return torch.utils._pytree.tree_map(lambda x: x.detach() if isinstance(x, torch.Tensor) else x, value)
