"""StageWork: what one step gives to a stage and takes from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fastpipe.runtime.tensors import Tensors


@dataclass
class StageWork:
    """What one step gives to a stage and takes from it, by microbatch.

    Attributes:
        args: positional arguments of the module; None for a stage that is fed by another.
        kwargs: keyword arguments of the module.
        targets: the loss function's second argument.
        divisors: what each microbatch's loss is divided by before its backward; None for no scaling.
        loss_scale: what a backward's roots are multiplied by, see `fastpipe.GradScaler`; None for 1.
        output_grads: gradients of the outputs, given by the caller instead of a loss.
        keep_outputs: whether the last stage's outputs are kept.
        reduces: whether gradients are reduced over the replicas of the pipeline in this step.
        losses: out: the loss of each microbatch as the loss function returned it, detached.
        scaled: out: the same after the division.
        outputs: out: the last stage's outputs, detached.
        metrics: out: what the loss function returned beside the loss.
        added: out: the losses that the stage added.
    """

    args: Sequence[tuple[Any, ...]] | None = None
    kwargs: Sequence[Mapping[str, Any]] | None = None
    targets: Sequence[Any] | None = None
    divisors: Sequence[float] | None = None
    loss_scale: torch.Tensor | None = None
    output_grads: Sequence[Tensors] | None = None
    keep_outputs: bool = True
    reduces: bool = True
    losses: dict[int, torch.Tensor] = field(default_factory=dict)
    scaled: dict[int, torch.Tensor] = field(default_factory=dict)
    outputs: dict[int, Any] = field(default_factory=dict)
    metrics: dict[int, list[tuple[str, torch.Tensor]]] = field(default_factory=dict)
    added: dict[int, list[tuple[str, torch.Tensor]]] = field(default_factory=dict)
