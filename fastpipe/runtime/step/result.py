"""StepResult: the outcome of a step, with metrics of the loss function and losses that layers added.

Every process sends the values of its stages, exact to the last bit. Each reduces them when they are read.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch

from fastpipe.program import Program
from fastpipe.runtime.executor import Spans
from fastpipe.runtime.stage import scale_loss, sum_in_order
from fastpipe.runtime.step.microbatch import Rules, loss_divisors, merge
from fastpipe.timeline import Timeline

MetricRule = str | Callable[[list[torch.Tensor]], Any]
MetricRules = MetricRule | Mapping[str, MetricRule]
"""One rule for all metrics, or one per metric by name; default "mean"."""

Named = list[tuple[str, torch.Tensor]]
Values = dict[int, dict[int, Named]]
"""Named values by stage and microbatch, in order."""

_RULES = ("mean", "sum", "list")


def check_rules(rules: Any) -> None:
    """Refuse invalid ``metrics``.

    Raises:
        ValueError: naming the entry.
    """
    for name, rule in rules.items() if isinstance(rules, Mapping) else [(None, rules)]:
        if not isinstance(name, str | None):
            raise ValueError(f"metrics[{name!r}]: metrics have names; give that of one which loss_fn returns")
        if not callable(rule) and rule not in _RULES:
            where = "metrics" if name is None else f"metrics[{name!r}]"
            raise ValueError(f"{where} = {rule!r}: use 'mean', 'sum', 'list' or a function of the microbatches' values")


@dataclass(frozen=True)
class Weights:
    """The weights of a step's microbatches, as divisors; see `loss_divisors`.

    Attributes:
        loss: of losses; None if they are summed unweighted.
        mean: of metrics that are averaged.
    """

    loss: list[float] | None
    mean: list[float] | None


def weights_of(
    reduction: str | Callable[[Any], float], given: list[float] | None, rows: Sequence[int] | None, count: int
) -> Weights:
    """The weights of a step's microbatches.

    Args:
        reduction: the pipeline's ``loss_reduction``.
        given: the divisors by its function; None without a target.
        rows: of every microbatch, if they can be counted.
        count: of the microbatches.
    """
    # without a target rows may be unknown; with no rows at all there is no mean
    mean = given or (None if rows is not None and not sum(rows) else loss_divisors("mean", rows, None, count))
    return Weights(None if reduction == "sum" else mean, mean)


def packing(values: Values, *, wait: bool = True) -> Callable[[], list[Any]]:
    """Return a function that packs values as JSON, exact to the last bit: stage, microbatch, name and shape; bytes by
    dtype.

    Args:
        values: to pack.
        wait: for the device. Otherwise the device must have completed before the function is called.
    """
    flat = [(stage, i, name, v) for stage, found in values.items() for i, named in found.items() for name, v in named]
    if not flat:
        return list
    places = [[stage, i, name, list(value.shape)] for stage, i, name, value in flat]
    by_kind: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for number, (*_, value) in enumerate(flat):
        by_kind.setdefault((value.dtype, value.device), []).append(number)
    copies = [
        (
            numbers,
            torch.cat([flat[number][3].detach().reshape(-1) for number in numbers]).to("cpu", non_blocking=not wait),
        )
        for numbers in by_kind.values()
    ]
    return lambda: [places, [[dtype_name(copy), numbers, text_of(copy)] for numbers, copy in copies]]


def dtype_name(tensor: torch.Tensor) -> str:
    """The name of the dtype as an attribute of torch."""
    return str(tensor.dtype).removeprefix("torch.")


def text_of(tensor: torch.Tensor) -> str:
    """The bytes of a CPU tensor, as base64."""
    return base64.b64encode(tensor.view(torch.uint8).numpy().tobytes()).decode()


def unpack(replies: Iterable[list[Any]]) -> Values:
    """Unpack and merge the values of all processes."""
    values: Values = {}
    for places, packed in (reply for reply in replies if reply):
        tensors: dict[int, torch.Tensor] = {}
        for name, numbers, data in packed:
            dtype, raw = getattr(torch, name), bytearray(base64.b64decode(data))
            flat = torch.frombuffer(raw, dtype=torch.uint8).view(dtype) if raw else torch.empty(0, dtype=dtype)
            shapes = [torch.Size(places[number][3]) for number in numbers]
            parts = torch.split(flat, [shape.numel() for shape in shapes])
            tensors.update((n, part.reshape(s)) for n, part, s in zip(numbers, parts, shapes, strict=True))
        for number, (stage, microbatch, name, _) in enumerate(places):
            values.setdefault(stage, {}).setdefault(microbatch, []).append((name, tensors[number]))
    return values


@dataclass(frozen=True)
class Reports:
    """The outputs of a step on all processes.

    Attributes:
        parts: return the outputs of each process: metrics of the loss function under "metrics", losses that stages
            added under "added", in the form of `packing`.
        weights: of the microbatches.
        rules: how metrics are reduced.
        count: of the microbatches.
    """

    parts: Sequence[Callable[[], Mapping[str, Any]]] = ()
    weights: Weights = field(default_factory=lambda: Weights(None, None))
    rules: MetricRules = "mean"
    count: int = 0

    def reduced_metrics(self) -> dict[str, Any]:
        """Every metric, reduced by its rule.

        Raises:
            ValueError: for one that the loss function did not return for every microbatch.
        """
        return reduce_metrics(unpack(part()["metrics"] for part in self.parts), self.count, self.weights, self.rules)

    def added_losses(self) -> dict[str, torch.Tensor]:
        """The added losses by name, weighted like the loss."""
        return added_by_name(unpack(part()["added"] for part in self.parts), self.weights)


def reduce_metrics(values: Values, count: int, weights: Weights, rules: MetricRules) -> dict[str, Any]:
    """Every metric, reduced by its rule. Pipelines and the reference share this definition."""
    by_name: dict[str, dict[int, torch.Tensor]] = {}
    for found in values.values():
        for microbatch, named in found.items():
            for name, value in named:
                by_name.setdefault(name, {})[microbatch] = value
    unknown = [name for name in rules if name not in by_name] if isinstance(rules, Mapping) and by_name else []
    if unknown:
        raise ValueError(f"metrics[{unknown[0]!r}]: loss_fn returns no such metric; it returns {sorted(by_name)}")
    return {name: _reduced(name, found, count, weights, _rule_of(rules, name)) for name, found in by_name.items()}


def _rule_of(rules: MetricRules, name: str) -> MetricRule:
    return rules.get(name, "mean") if isinstance(rules, Mapping) else rules


def _reduced(name: str, found: Mapping[int, torch.Tensor], count: int, weights: Weights, rule: MetricRule) -> Any:
    if len(found) < count:
        raise ValueError(
            f"metric {name!r} was returned for microbatches {sorted(found)} of {count}: let loss_fn return it always"
        )
    values = [found[i] for i in range(count)]
    if callable(rule):
        return rule(values)
    if rule == "list":
        return values
    shapes = sorted({tuple(value.shape) for value in values})
    if len(shapes) > 1:
        raise ValueError(
            f"metric {name!r} has shape {' and '.join(map(str, shapes))}, which have no {rule}; reduce it in "
            f"loss_fn, or use metrics={{{name!r}: 'list'}}"
        )
    if rule == "mean":
        values = [
            scale_loss(value, None if weights.mean is None else weights.mean[i]) for i, value in enumerate(values)
        ]
    elif not values[0].is_floating_point() and not values[0].is_complex():
        values = [value.long() for value in values]  # like torch.sum
    return sum_in_order(values)


def added_by_name(values: Values, weights: Weights) -> dict[str, torch.Tensor]:
    """The losses that stages added, by name: summed over layers, weighted, and summed over microbatches."""
    by_name: dict[str, dict[int, list[torch.Tensor]]] = {}
    for stage in sorted(values):
        for microbatch, named in sorted(values[stage].items()):
            for name, value in named:
                by_name.setdefault(name, {}).setdefault(microbatch, []).append(value)
    found = {}
    for name, by_microbatch in by_name.items():
        shares = [
            scale_loss(sum_in_order(by_microbatch[i]), None if weights.loss is None else weights.loss[i])
            for i in sorted(by_microbatch)
        ]
        found[name] = sum_in_order(shares)
    return found


Packed = dict[str, list[Any]]
"""Scalars by dtype: their microbatches, and their bytes as base64."""

Part = Callable[[], Mapping[str, Any]]
"""Returns the packed losses of a process: "losses" as returned, "scaled" as shares."""


class StepResult:
    """The result of a step. Expensive values are computed when they are read."""

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
        self.raw_outputs = dict(outputs or {})
        self._merge_rules = merge_rules
        self._program = program
        self._spans = spans
        self._reports = Reports() if reports is None else reports

    @cached_property
    def losses(self) -> list[torch.Tensor] | None:
        """The loss of every microbatch as the loss function returned it; None without a loss."""
        return _by_microbatch([part()["losses"] for part in self._parts])

    @cached_property
    def _scaled(self) -> list[torch.Tensor] | None:
        return _by_microbatch([part()["scaled"] for part in self._parts])

    @cached_property
    def loss(self) -> torch.Tensor | None:
        """The loss of the batch, the same on every rank: the sum of the microbatches' shares in ascending order.

        It excludes the losses that stages added; see `added_losses`. It is on the CPU; reading it waits for the device.
        """
        return sum_in_order(self._scaled) if self._scaled else None

    @cached_property
    def metrics(self) -> dict[str, Any]:
        """The metrics of the loss function, reduced as ``metrics`` says, the same on every rank.

        Raises:
            ValueError: for a metric that is missing for a microbatch, or a rule for an unknown metric.
        """
        return self._reports.reduced_metrics()

    @cached_property
    def added_losses(self) -> dict[str, torch.Tensor]:
        """The losses that stages added by `fastpipe.add_loss`, by name, weighted like the loss; the same on every rank.

        The backward differentiates the sum of them and `loss`.
        """
        return self._reports.added_losses()

    @cached_property
    def outputs(self) -> Any:
        """The last stage's outputs, merged; None on a process without the last stage.

        If a schedule has two routes, each of the two processes with the last stage has half of the microbatches.
        """
        return (
            merge([self.raw_outputs[i] for i in sorted(self.raw_outputs)], self._merge_rules)
            if self.raw_outputs
            else None
        )

    @cached_property
    def timeline(self) -> Timeline:
        """The measured times of this process's ranks; of all ranks after a step with ``trace=True``."""
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
    """Like `packing`, for scalars by microbatch, detached; one copy per dtype, so the cost hardly grows with their
    number.

    Args:
        tensors: to pack.
        wait: for the device. Otherwise the device must have completed before the function is called.
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
    """The inverse of `packing_tensors`."""
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
    """The inverse of `pack_spans`."""
    spans: Spans = {}
    for rank, (start, end) in packed.items():
        spans[int(rank)] = (np.frombuffer(base64.b64decode(start)), np.frombuffer(base64.b64decode(end)))
    return spans
