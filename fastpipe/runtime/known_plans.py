"""The plans of what crosses a boundary on a device with streams, where to read one is to wait for the device.

In a step that announces its shapes, both ends write down the plans that have no values in them. In the others such a
plan is taken to be as it was: its sender sees to that, and its receiver does not read it.
"""

from __future__ import annotations

import functools

import torch

from fastpipe.runtime.boundary import is_lasting, plan_tensor, plan_text

_Book = dict[tuple[str, int], bytes]


class KnownPlans:
    """Those that one stage sends and receives.

    Args:
        stage: its index.
        device: what it computes on.
    """

    def __init__(self, stage: int, device: torch.device) -> None:
        self.stage = stage
        self.device = device
        self._books: dict[int, _Book] = {}
        self._open: _Book = {}
        self._announcing = True

    def begin(self, signature: int, announce: bool) -> None:
        """Open the page of a step; one that announces starts empty."""
        self._announcing = announce
        if announce:
            self._books[signature] = {}
        self._open = self._books.setdefault(signature, {})

    def make(self, microbatch: int, text: bytes, lasting: bool) -> torch.Tensor:
        """The tensor of a plan that is sent.

        Raises:
            ValueError: when it is not the one that was announced.
        """
        key = ("sent", microbatch)
        if self._announcing and lasting:
            self._open[key] = text
        elif self._open.get(key, text) != text:
            raise ValueError(
                f"stage {self.stage} handed on another tree for microbatch {microbatch} than in the step that had the "
                "same inputs first; let its structure depend on the shapes of the step's inputs alone"
            )
        return _on_device(text, self.device) if lasting else plan_tensor(text).to(self.device)

    def read(self, microbatch: int, plan: torch.Tensor) -> bytes:
        """The text of a plan that was received."""
        key = ("received", microbatch)
        if not self._announcing and key in self._open:
            return self._open[key]
        text = plan_text(plan)
        if self._announcing and is_lasting(text):
            self._open[key] = text
        return text


@functools.lru_cache(maxsize=256)
def _on_device(text: bytes, device: torch.device) -> torch.Tensor:
    # the host has waited for the copy, so any stream may use it
    return plan_tensor(text).to(device)
