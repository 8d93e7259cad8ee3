"""Recomputation: what a stage does not keep for its backward but computes again when that comes.

It is `torch.utils.checkpoint` without reentrance, around a stage or around each of its layers. The split of a backward
recomputes once, in I (see `fastpipe.runtime.weight_grad`); random numbers are those of F; buffers, BatchNorm's say, are
after the backward what F made of them, as a forward that is run twice would count twice.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fastpipe.runtime.buffers import keep_buffers

NONE = "none"
FULL = "full"
LAYERS = "layers"
WAYS = (NONE, FULL, LAYERS)

Policy = str | Callable[[int, nn.Module], str]
"""One way for all stages, or ``function(stage index, module)`` that says it for each."""


def check_policy(policy: Any) -> None:
    """Refuse a ``recompute`` that is none.

    Raises:
        ValueError: naming it.
    """
    if not callable(policy) and policy not in WAYS:
        raise ValueError(
            f"recompute = {policy!r}: use 'none', 'full' (each stage as a whole), 'layers' (each layer by itself), or "
            "a function (stage index, module) that returns one of them"
        )


def way_of(policy: Policy, stage: int, module: nn.Module) -> str:
    """What one stage recomputes.

    Raises:
        ValueError: when the policy's function returns no way.
    """
    if callable(policy):
        with contextlib.suppress(ValueError):  # of a function that does not tell its arguments
            _check_arguments(policy)
    way = policy(stage, module) if callable(policy) else policy
    if way not in WAYS:
        raise ValueError(f"recompute returned {way!r} for stage {stage}: return 'none', 'full' or 'layers'")
    return way


def _check_arguments(policy: Callable[..., Any]) -> None:
    try:
        inspect.signature(policy).bind(0, None)
    except TypeError as error:
        raise TypeError(f"recompute is a function that does not take (stage index, module): {error}") from None


def recomputed(function: Callable[..., Any], module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Call a function that keeps its inputs alone.

    Args:
        function: what to call; in the backward again.
        module: whose buffers it may change.
        args: positional arguments.
        kwargs: keyword arguments.
    """
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    contexts = partial(_contexts, module)
    return checkpoint(function, *args, use_reentrant=False, context_fn=contexts, **kwargs)


def _contexts(module: nn.Module) -> tuple[Any, Any]:
    """Around the forward, and around its repetitions."""
    return contextlib.nullcontext(), _BuffersKept(module)


class _BuffersKept:
    """Around every repetition: a forward that asks for a gradient itself is repeated for that, and in the backward."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._put_back: list[Callable[[], None]] = []

    def __enter__(self) -> None:
        self._put_back.append(keep_buffers([self._module]))

    def __exit__(self, *error: object) -> None:
        self._put_back.pop()()
