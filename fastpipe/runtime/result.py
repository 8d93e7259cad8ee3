"""StepResult: what a step gives back."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch

from fastpipe.program import Program
from fastpipe.runtime.losses import sum_in_order
from fastpipe.runtime.microbatch import Rules, merge
from fastpipe.runtime.ranks import Spans
from fastpipe.runtime.reports import Reports, dtype_name, text_of
from fastpipe.timeline import Timeline

Packed = dict[str, list[Any]]
"""Scalars by dtype: their microbatches, and their bytes as text."""

Part = Callable[[], Mapping[str, Any]]
"""What a process found: under "losses" and "scaled" the losses of its microbatches, packed."""


class StepResult:
    """The outcome of a step. What costs time is made when it is read."""

    def __init__(
        self,
        parts: Sequence[Part],
        outputs: Mapping[int, Any] | None,
        merge_rules: Rules,
        program: Program,
        spans: Spans,
        reports: Reports | None = None,
    ) -> None:
        self._parts = parts
        self.found = dict(outputs or {})
        self._merge_rules = merge_rules
        self._program = program
        self._spans = spans
        self._reports = Reports() if reports is None else reports

    @cached_property
    def losses(self) -> list[torch.Tensor] | None:
        """The loss of every microbatch as the loss function returned it; None when there was no loss."""
        return _by_microbatch([part()["losses"] for part in self._parts])

    @cached_property
    def _scaled(self) -> list[torch.Tensor] | None:
        return _by_microbatch([part()["scaled"] for part in self._parts])

    @cached_property
    def loss(self) -> torch.Tensor | None:
        """The loss of the batch, the same on every rank: the microbatches' shares, summed in ascending order.

        It is that of the loss function; what stages added is in `added_losses`. It is on the CPU, wherever the stages
        are, and to read it is to wait for it.
        """
        return sum_in_order(self._scaled) if self._scaled else None

    @cached_property
    def metrics(self) -> dict[str, Any]:
        """What the loss function returned beside the loss, the same on every rank: reduced as ``metrics`` says.

        Raises:
            ValueError: for a metric that did not come with every microbatch, or a rule for one that there is not.
        """
        return self._reports.reduced_metrics()

    @cached_property
    def added_losses(self) -> dict[str, torch.Tensor]:
        """What the stages added by `fastpipe.add_loss`, by name and weighed as the loss is, the same on every rank.

        What was differentiated is the sum of all of them and `loss`.
        """
        return self._reports.added_losses()

    @cached_property
    def outputs(self) -> Any:
        """The last stage's outputs, merged; None on a process without the last stage.

        Where a schedule has two routes, each of the two processes that hold the last stage has its half.
        """
        return merge([self.found[i] for i in sorted(self.found)], self._merge_rules) if self.found else None

    @cached_property
    def timeline(self) -> Timeline:
        """The measured times of the ranks of this process; of all ranks after a step with ``trace=True``."""
        starts, ends = [], []
        for rank, columns in enumerate(self._program.columns):
            nothing = np.full(columns.shape[1], np.nan)
            start, end = self._spans.get(rank, (nothing, nothing))
            starts.append(start)
            ends.append(end)
        return Timeline(self._program, starts, ends, measured=True)

    def __repr__(self) -> str:
        return (
            f"<StepResult loss={None if self.loss is None else float(self.loss):.6g}>"
            if self._scaled
            else "<StepResult>"
        )


def _by_microbatch(losses: Sequence[Packed]) -> list[torch.Tensor] | None:
    found: dict[int, torch.Tensor] = {}
    for part in losses:
        found.update(unpack_tensors(part))
    return [found[i] for i in sorted(found)] or None


def packing_tensors(tensors: Mapping[int, torch.Tensor], *, wait: bool = True) -> Callable[[], Packed]:
    """Detached scalars by microbatch as JSON, to the last bit: by dtype, so that many cost hardly more than one.

    Args:
        tensors: what to pack.
        wait: for the device that computes them; otherwise they must be there before the function is called.
    """
    by_dtype: dict[torch.dtype, list[int]] = {}
    for microbatch, tensor in tensors.items():
        by_dtype.setdefault(tensor.dtype, []).append(microbatch)
    copies = [
        (microbatches, torch.stack([tensors[i] for i in microbatches]).detach().to("cpu", non_blocking=not wait))
        for microbatches in by_dtype.values()
    ]
    return lambda: {dtype_name(copy): [microbatches, text_of(copy)] for microbatches, copy in copies}


def unpack_tensors(packed: Packed) -> dict[int, torch.Tensor]:
    """The way back."""
    tensors: dict[int, torch.Tensor] = {}
    for dtype, (microbatches, data) in packed.items():
        raw = torch.frombuffer(bytearray(base64.b64decode(data)), dtype=torch.uint8)
        tensors.update(zip(microbatches, raw.view(getattr(torch, dtype)).unbind(), strict=True))
    return tensors


def pack_spans(spans: Spans) -> dict[str, list[str]]:
    """Spans as JSON."""
    return {
        str(rank): [base64.b64encode(np.ascontiguousarray(column).tobytes()).decode() for column in pair]
        for rank, pair in spans.items()
    }


def unpack_spans(packed: Mapping[str, list[str]]) -> Spans:
    """The way back."""
    spans: Spans = {}
    for rank, (start, end) in packed.items():
        spans[int(rank)] = (np.frombuffer(base64.b64decode(start)), np.frombuffer(base64.b64decode(end)))
    return spans
