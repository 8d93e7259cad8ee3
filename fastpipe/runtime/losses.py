"""What a last stage returns: losses, metrics, outputs, and what is wrong with them."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
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


def names_of(loss_fn: Callable[..., Any] | None) -> frozenset[str]:
    """The carried values that a loss function takes beside output and target.

    They are its keyword-only parameters, and further ones without a default. Others have to be left alone: torch's own
    loss functions have a ``weight``, which a model may well carry for another purpose.
    """
    if loss_fn is None:
        return frozenset()
    try:
        parameters = list(inspect.signature(getattr(loss_fn, "forward", loss_fn)).parameters.values())
    except (TypeError, ValueError):  # a function in C that does not say
        return frozenset()
    by_position = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    needed = [p.name for p in by_position[2:] if p.kind is p.POSITIONAL_OR_KEYWORD and p.default is p.empty]
    return frozenset([*needed, *(p.name for p in parameters if p.kind is p.KEYWORD_ONLY)])


def returned_loss(output: Any) -> Any:
    """The loss that a last stage returned, alone or in a dict; None if there is none."""
    value = output.get("loss") if isinstance(output, Mapping) else output
    is_loss = isinstance(value, torch.Tensor) and value.dim() == 0 and value.is_floating_point()
    return value if is_loss else None


def loss_and_metrics(returned: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """What a loss function returned: the loss; or the loss and its metrics, as ``(loss, dict)`` or all in one dict.

    Raises:
        ValueError: for a dict without ``"loss"``, another tuple, or a metric that is no tensor and no number.
    """
    if isinstance(returned, Mapping):
        if "loss" not in returned:
            raise ValueError(f"loss_fn returned a dict with {sorted(map(str, returned))}: its loss goes under 'loss'")
        metrics = {name: value for name, value in returned.items() if name != "loss"}
        return returned["loss"], _checked_metrics(metrics)
    if isinstance(returned, tuple | list):
        if len(returned) != 2 or not isinstance(returned[1], Mapping):
            kinds = ", ".join(type(value).__name__ for value in returned)
            raise ValueError(
                f"loss_fn returned a {type(returned).__name__} of {kinds}: return the loss, or (loss, dict)"
            )
        return returned[0], _checked_metrics(returned[1])
    return returned, {}


def _checked_metrics(metrics: Mapping[Any, Any]) -> dict[str, torch.Tensor]:
    found = {}
    for name, value in metrics.items():
        if not isinstance(name, str):
            raise ValueError(f"loss_fn returned a metric under {name!r}: give it a name")
        if isinstance(value, torch.Tensor):
            found[name] = value.detach()
        elif isinstance(value, bool | int | float):
            found[name] = torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)
        else:
            raise ValueError(
                f"loss_fn returned the metric {name!r} as a {type(value).__name__}: give a tensor or number"
            )
    return found


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
    if loss.is_complex():
        raise ValueError(
            f"loss_fn returned a complex number ({loss.dtype}): make it a real one, by .abs() or .real say"
        )
    return loss.reshape(()) if loss.dim() else loss


def scale_loss(loss: torch.Tensor, divisor: float | None) -> torch.Tensor:
    """A microbatch's share in the loss of the batch: the only copy of that rule.

    One that weighs nothing has none, even where its loss is no number, as a mean over no tokens is.
    """
    if divisor == math.inf:
        loss = loss.masked_fill(torch.ones_like(loss, dtype=torch.bool), 0)
    return loss if divisor is None else loss / divisor


def weighed(value: Any, divisor: float | None) -> Any:
    """What a loss function gets: the tree of tensors, whose gradients are 0 where the microbatch weighs nothing.

    Those of a mean over nothing are no numbers, and times 0 they are none either.
    """
    if divisor != math.inf:
        return value
    return torch.utils._pytree.tree_map(lambda x: _without_gradient(x) if isinstance(x, torch.Tensor) else x, value)


def _without_gradient(tensor: torch.Tensor) -> torch.Tensor:
    """The same values; in the graph still, so that all that gets a gradient gets zeros."""
    if not tensor.requires_grad:
        return tensor
    return torch.where(torch.zeros_like(tensor, dtype=torch.bool), tensor, tensor.detach())


def sum_in_order(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """One after the other, which decides the bits: the only copy of that rule."""
    total = values[0]
    for value in values[1:]:
        total = total + value
    return total


def detached(value: Any) -> Any:
    """A tree of tensors without their graphs."""
    if isinstance(value, torch.Tensor):
        return value.detach()
    return torch.utils._pytree.tree_map(lambda x: x.detach() if isinstance(x, torch.Tensor) else x, value)
