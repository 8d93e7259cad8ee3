"""Weights whose bits change although nothing writes to them."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from fastpipe.runtime.common import bit_sums, version_of
from fastpipe.runtime.model import state_prefix
from fastpipe.runtime.stage import Stage


class WeightSums:
    """Finds weights whose bits change although nothing writes to them.

    A weight is summed after each step of an optimizer, or else at the begin of a step, and again at the end of the
    step. If its version counter is the same, nothing has written to it in between.
    """

    def __init__(self) -> None:
        self._names: dict[int, str] = {}
        self._is_in_step = False
        self._noted: dict[int, tuple[nn.Parameter, tuple[int, int], int | None]] = {}
        own = weakref.ref(self)

        def after_optimizer(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            if (sums := own()) is not None:
                sums.note(p for group in optimizer.param_groups for p in group["params"])

        weakref.finalize(self, register_optimizer_step_post_hook(after_optimizer).remove)

    def begin(self, stages: Iterable[Stage]) -> None:
        """Before a step."""
        named = [(state_prefix(s.module, s.index) + name, p) for s in stages for name, p in s.module.named_parameters()]
        self._names = {id(parameter): name for name, parameter in named}
        if self._is_in_step:  # the last step failed, and any optimizer may have written since
            self._noted.clear()
        self._is_in_step = True
        self.note(p for _, p in named if id(p) not in self._noted or self._noted[id(p)][1] != _state(p))

    def note(self, parameters: Iterable[Any]) -> None:
        """Sum the local ones of these weights."""
        own = [p for p in parameters if id(p) in self._names and not p.is_meta]
        for parameter, total in zip(own, bit_sums(own), strict=True):
            self._noted[id(parameter)] = parameter, _state(parameter), total

    def changed(self) -> list[str]:
        """After a step: the names of weights that have other bits than when they were noted."""
        noted, self._noted, self._is_in_step = self._noted.values(), {}, False
        same = [(p, total) for p, state, total in noted if id(p) in self._names and _state(p) == state]
        now = bit_sums(p for p, _ in same)
        return [self._names[id(p)] for (p, total), found in zip(same, now, strict=True) if total != found]


def _state(parameter: torch.Tensor) -> tuple[int, int]:
    return version_of(parameter), parameter.data_ptr()
