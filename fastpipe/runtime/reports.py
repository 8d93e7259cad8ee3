"""What a step reports beside its loss: the metrics of the loss function, and the losses that stages added.

Every process tells the others what its stages found, to the last bit; each reduces for itself, when it is asked.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fastpipe.runtime.losses import scale_loss, sum_in_order
from fastpipe.runtime.microbatch import loss_divisors

MetricRule = str | Callable[[list[torch.Tensor]], Any]
MetricRules = MetricRule | Mapping[str, MetricRule]
"""One rule for all metrics, or one each by name; the others take "mean"."""

Named = list[tuple[str, torch.Tensor]]
Values = dict[int, dict[int, Named]]
"""By stage and microbatch, what was found there, in order."""

_RULES = ("mean", "sum", "list")


def check_rules(rules: Any) -> None:
    """Refuse ``metrics`` that says nothing.

    Raises:
        ValueError: naming the entry.
    """
    for name, rule in rules.items() if isinstance(rules, Mapping) else [(None, rules)]:
        if not callable(rule) and rule not in _RULES:
            where = "metrics" if name is None else f"metrics[{name!r}]"
            raise ValueError(f"{where} = {rule!r}: use 'mean', 'sum', 'list' or a function of the microbatches' values")


@dataclass(frozen=True)
class Weights:
    """What microbatches weigh in a step, as divisors; see `loss_divisors`.

    Attributes:
        loss: of losses; None where they are summed as they are.
        mean: of metrics that are averaged.
    """

    loss: list[float] | None
    mean: list[float] | None


def weights_of(
    reduction: str | Callable[[Any], float], given: list[float] | None, rows: Sequence[int] | None, count: int
) -> Weights:
    """What the microbatches of a step weigh.

    Args:
        reduction: the pipeline's ``loss_reduction``.
        given: the divisors that its function says; None where there was no target to ask it about.
        rows: of every microbatch, where they can be counted.
        count: of the microbatches.
    """
    # without a target nobody may have counted rows, and microbatches without any weigh nothing
    mean = given or (None if rows is not None and not sum(rows) else loss_divisors("mean", rows, None, count))
    return Weights(None if reduction == "sum" else mean, mean)


def packing(values: Values, *, wait: bool = True) -> Callable[[], list[Any]]:
    """Values as JSON, to the last bit: where they belong, then their bytes by dtype.

    Args:
        values: what to pack.
        wait: for the device that computes them; otherwise they must be there before the function is called.
    """
    flat = [(stage, i, name, v) for stage, found in values.items() for i, named in found.items() for name, v in named]
    if not flat:
        return list
    places = [[stage, i, name, list(value.shape)] for stage, i, name, value in flat]
    alike: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for number, (*_, value) in enumerate(flat):
        alike.setdefault((value.dtype, value.device), []).append(number)
    copies = [
        (
            numbers,
            torch.cat([flat[number][3].detach().reshape(-1) for number in numbers]).to("cpu", non_blocking=not wait),
        )
        for numbers in alike.values()
    ]
    return lambda: [places, [[dtype_name(copy), numbers, text_of(copy)] for numbers, copy in copies]]


def dtype_name(tensor: torch.Tensor) -> str:
    """As an attribute of torch."""
    return str(tensor.dtype).removeprefix("torch.")


def text_of(tensor: torch.Tensor) -> str:
    """The bytes of a tensor of the host's."""
    return base64.b64encode(tensor.view(torch.uint8).numpy().tobytes()).decode()


def unpack(replies: Iterable[list[Any]]) -> Values:
    """The way back, of all processes."""
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
    """What all processes reported of a step.

    Attributes:
        parts: give what each process found: under "metrics" what the loss function returned beside the loss, under
            "added" the losses that stages added, both as `packing` has them.
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
            ValueError: for one that the loss function did not return with every microbatch.
        """
        return reduce_metrics(unpack(part()["metrics"] for part in self.parts), self.count, self.weights, self.rules)

    def added_losses(self) -> dict[str, torch.Tensor]:
        """What was added by name, weighed as the loss is."""
        return added_by_name(unpack(part()["added"] for part in self.parts), self.weights)


def reduce_metrics(values: Values, count: int, weights: Weights, rules: MetricRules) -> dict[str, Any]:
    """Every metric, reduced by its rule: the only copy of what the rules mean."""
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
            f"metric {name!r} came back from the microbatches {sorted(found)} of {count}: let loss_fn return it always"
        )
    values = [found[i] for i in range(count)]
    if callable(rule):
        return rule(values)
    if rule == "list":
        return values
    shapes = sorted({tuple(value.shape) for value in values})
    if len(shapes) > 1:
        raise ValueError(
            f"metric {name!r} has shape {' and '.join(map(str, shapes))}, whose {rule} there is not; reduce it in "
            f"loss_fn, or use metrics={{{name!r}: 'list'}}"
        )
    if rule == "mean":
        values = [
            scale_loss(value, None if weights.mean is None else weights.mean[i]) for i, value in enumerate(values)
        ]
    elif not values[0].is_floating_point() and not values[0].is_complex():
        values = [value.long() for value in values]  # as torch's sum counts
    return sum_in_order(values)


def added_by_name(values: Values, weights: Weights) -> dict[str, torch.Tensor]:
    """The losses that stages added: by name, summed over layers, then weighed and summed over microbatches."""
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
