"""A step that was recorded: where its inputs, its results and its gradients lie, and how it is done again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from fastpipe.runtime.recording import Recording
from fastpipe.runtime.stage_work import StageWork

_GIVEN = ("args", "kwargs", "targets", "output_grads", "loss_scale")
_FOUND = ("losses", "scaled", "outputs", "metrics", "added")

Gradients = list[tuple[torch.nn.Parameter, torch.Tensor | None]]
"""By parameter; None for one that got none."""


class Unfit(Exception):  # noqa: N818 - it is caught, and the step runs as ever
    """A step that cannot be recorded; says why."""


@dataclass
class RecordedStep:
    """What one rank did in a step, and where.

    Attributes:
        recording: what the device was given.
        tensors: its inputs, each once, in the order of `tensors_of`.
        works: of the stages: where its results lie.
        grads: where they lie.
    """

    recording: Recording
    tensors: list[torch.Tensor]
    works: list[StageWork]
    grads: Gradients

    def replay(self, works: Sequence[StageWork], tensors: Sequence[torch.Tensor]) -> None:
        """Do it again.

        Args:
            works: of the stages: filled with copies of the results, as the next replay writes over these.
            tensors: the inputs; they look like those that it was recorded with.
        """
        if tensors:
            torch._foreach_copy_(self.tensors, list(tensors))
        # what lies where the recording puts its own gradient would be written over
        before = [p.grad if own is None or p.grad is not own else own.clone() for p, own in self.grads]
        self.recording.replay()
        if torch.is_grad_enabled():
            self._add_gradients(before)
        for work, found in zip(works, self.works, strict=True):
            for name in _FOUND:
                getattr(work, name).update(pytree.tree_map_only(torch.Tensor, torch.clone, getattr(found, name)))

    def _add_gradients(self, before: Sequence[torch.Tensor | None]) -> None:
        with torch.no_grad():
            for (parameter, own), there in zip(self.grads, before, strict=True):
                if own is None:
                    continue
                if there is None:
                    parameter.grad = own
                elif parameter.grad is own:
                    own.add_(there)
                else:
                    there.add_(own)


def tensors_of(works: Sequence[StageWork]) -> list[torch.Tensor]:
    """Those that stages are given, in one order; one that is given twice is there twice.

    Raises:
        Unfit: for an object that may hold others.
    """
    found: list[torch.Tensor] = []
    for work in works:
        for name in _GIVEN:
            _mapped(getattr(work, name), found.append)
    return found


def with_tensors(work: StageWork, change: Callable[[torch.Tensor], Any]) -> StageWork:
    """The same work with other tensors, and no results yet.

    Raises:
        Unfit: as `tensors_of`.
    """
    other: dict[str, Any] = {name: _mapped(getattr(work, name), change) for name in _GIVEN}
    other |= {name: {} for name in _FOUND}
    return replace(work, **other)


def _mapped(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """A tree with other tensors in it. (torch's pytree takes several times as long.)"""
    if isinstance(value, torch.Tensor):
        return change(value)
    if type(value) is dict:
        return {key: _mapped(item, change) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_mapped(item, change) for item in value))
    if type(value) in (list, tuple):
        return type(value)(_mapped(item, change) for item in value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise Unfit(f"there is a {type(value).__name__} among the inputs, which may hold tensors")
