"""The losses, metrics and added losses of a step: weighted, gathered over the processes, and reduced to a StepResult.

The process that computes a value sends it exact to the last bit; each process reduces all values in one order when they
are read, so the result is the same everywhere. On a device, values complete after the host ends the step;
`fastpipe.runtime.executor.events` says whether they are valid.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from typing import Any

import numpy as np
import torch

from fastpipe.program import Program
from fastpipe.runtime.coordination import Alone, Control, DeferredResults, Reply
from fastpipe.runtime.executor import DeviceEvent, DeviceEvents, Spans
from fastpipe.runtime.stage import Stage, scale_loss, sum_in_order
from fastpipe.runtime.step.microbatch import Rules, merge
from fastpipe.timeline import Timeline

MetricRule = str | Callable[[list[torch.Tensor]], Any]
MetricRules = MetricRule | Mapping[str, MetricRule]
"""One rule for all metrics, or one per metric by name; default "mean"."""

Named = list[tuple[str, torch.Tensor]]
Values = dict[int, dict[int, Named]]
"""Named values by stage and microbatch, in order."""

Packed = list[list[Any]]
"""`Values` as JSON, by stage, name, dtype and shape: microbatches, positions in `Named`, and bytes."""

Part = Callable[[], Mapping[str, Packed]]
"""Returns the values of one process, by kind."""

KINDS = ("losses", "metrics", "added")
"""Losses and metrics of the loss function, and losses that stages added: the names of the results in `StageWork`."""

_RULES = ("mean", "sum", "list")


def check_rules(rules: Any) -> None:
    """Refuse invalid ``metrics``."""
    for name, rule in rules.items() if isinstance(rules, Mapping) else [(None, rules)]:
        if not isinstance(name, str | None):
            raise ValueError(f"metrics[{name!r}]: metrics have names; give that of one which loss_fn returns")
        if not callable(rule) and rule not in _RULES:
            where = "metrics" if name is None else f"metrics[{name!r}]"
            raise ValueError(f"{where} = {rule!r}: use 'mean', 'sum', 'list' or a function of the microbatches' values")


def check_reduction(reduction: Any) -> None:
    """Refuse an invalid ``loss_reduction``."""
    if not callable(reduction) and reduction not in ("mean", "sum"):
        raise ValueError(f"loss_reduction = {reduction!r}: use 'mean', 'sum' or a function of the target")


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


def loss_divisors(
    reduction: str | Callable[[Any], float], rows: Sequence[int] | None, targets: Sequence[Any] | None, count: int
) -> list[float] | None:
    """The divisor of each microbatch's loss, so that the sum is the loss of the whole batch.

    ``"mean"``: all rows divided by its rows; for equal microbatches exactly their number. ``"sum"``: None. A function
    gives the weight of a target (its number of tokens, for example): the sum of weights divided by its weight.
    """
    if reduction == "sum":
        return None
    if callable(reduction):
        if targets is None:
            raise ValueError("loss_reduction is a function of the target, and no target was given: pass target=")
        weights = [_weight_of(reduction, target, number) for number, target in enumerate(targets)]
    else:
        weights = [1.0] * count if rows is None else [float(r) for r in rows]
    total = sum(weights)
    if not total > 0:
        raise ValueError(f"loss_reduction: the weights of the microbatches sum to {total}; one must be above 0")
    return [total / weight if weight else float("inf") for weight in weights]


def _weight_of(reduction: Callable[[Any], float], target: Any, number: int) -> float:
    weight: Any = reduction(target)
    try:
        return float(weight)
    except (TypeError, ValueError, RuntimeError):
        found = f"shape {tuple(weight.shape)}" if isinstance(weight, torch.Tensor) else repr(weight)
        raise ValueError(
            f"loss_reduction returned {found} for the target of microbatch {number}: return one number, its weight"
        ) from None


def packing(values: Values, *, wait: bool = True) -> Callable[[], Packed]:
    """Return a function that packs values exact to the last bit.

    There is one copy from the device for each stage, name, dtype and shape, so the cost hardly grows with the number of
    microbatches.

    Args:
        values: to pack.
        wait: for the device. Otherwise the device must have completed before the function is called.
    """
    alike: dict[tuple[Any, ...], list[tuple[int, int, torch.Tensor]]] = {}
    for stage, by_microbatch in values.items():
        for i, named in by_microbatch.items():
            for place, (name, value) in enumerate(named):
                alike.setdefault((stage, name, value.dtype, value.shape, value.device), []).append((i, place, value))
    packed = []
    for (stage, name, dtype, shape, _), found in alike.items():
        microbatches, places, tensors = zip(*found, strict=True)
        copy = torch.stack(tensors).detach().to("cpu", non_blocking=not wait)
        packed.append(([stage, name, str(dtype).removeprefix("torch."), list(shape), microbatches, places], copy))
    return lambda: [[*head, _text_of(copy)] for head, copy in packed]


def _text_of(tensor: torch.Tensor) -> str:
    return base64.b64encode(tensor.reshape(-1).view(torch.uint8).numpy().tobytes()).decode()


def unpack(parts: Iterable[Packed]) -> Values:
    """Unpack and merge the values of all processes."""
    found: dict[int, dict[int, list[tuple[int, str, torch.Tensor]]]] = {}
    for stage, name, dtype, shape, microbatches, places, data in (group for part in parts for group in part):
        raw = bytearray(base64.b64decode(data))
        flat = torch.frombuffer(raw, dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)
        values = flat.view(getattr(torch, dtype)).view(len(places), *shape)
        for i, place, value in zip(microbatches, places, values.unbind(), strict=True):
            found.setdefault(stage, {}).setdefault(i, []).append((place, name, value))
    return {
        stage: {
            i: [(name, value) for _, name, value in sorted(named, key=itemgetter(0))]
            for i, named in by_microbatch.items()
        }
        for stage, by_microbatch in found.items()
    }


@dataclass(frozen=True)
class StepOutputs:
    """The values of a step on the process that computed them.

    Attributes:
        values: by kind, see `KINDS`.
    """

    values: Mapping[str, Values]

    @classmethod
    def on(cls, stages: Sequence[Stage]) -> StepOutputs:
        """The values of the step that has just run on these stages; stages with two local holders are merged."""
        found: dict[str, Values] = {kind: {} for kind in KINDS}
        for stage in stages:
            for kind, values in found.items():
                if given := getattr(stage.work, kind):
                    named = {i: [("loss", loss)] for i, loss in given.items()} if kind == "losses" else given
                    values.setdefault(stage.index, {}).update(named)
        return cls(found)

    def __bool__(self) -> bool:
        return any(self.values.values())

    def packed(self) -> Reply:
        """As JSON. Waits for the device."""
        return {kind: packing(values)() for kind, values in self.values.items()}

    def packed_later(self, device: torch.device, events: DeviceEvents) -> tuple[DeviceEvent, Callable[[], Reply]]:
        """An event for the values, and a function that packs them; a helper thread calls it, as it waits."""
        packs = {kind: packing(values, wait=False) for kind, values in self.values.items()}
        copied = events.make(device)

        def ready() -> Reply:
            # otherwise the wait would create a CUDA context on the thread's default device
            torch.accelerator.set_device_index(device.index or 0)
            copied.wait()
            return {kind: pack() for kind, pack in packs.items()}

        return copied, ready


class OutputExchange:
    """Exchanges the values of a step between processes."""

    def __init__(self, control: Control, device: torch.device, events: DeviceEvents) -> None:
        self._control, self._device, self._events = control, device, events
        self._local: Part = dict

    @property
    def _deferred(self) -> DeferredResults | None:
        """Where outputs on a device are posted; None on a CPU, and in a single process."""
        return None if self._device.type == "cpu" else self._control.deferred

    def report(self, outputs: StepOutputs) -> Reply:
        """The message with this process's outputs, or the promise to post them, as packing waits for the device."""
        deferred = self._deferred
        wanted: Reply = {} if deferred is None else {"wanted": deferred.wanted()}
        if not outputs:
            return wanted
        if deferred is not None:
            event, ready = outputs.packed_later(self._device, self._events)
            deferred.post(self._control.step, ready)
            self._local = _ready(_LocalOutputs(outputs, event))
        elif isinstance(self._control, Alone):
            self._local = _ready(_LocalOutputs(outputs, None))
        else:
            return {"outputs": outputs.packed()}
        return {"later": True} | wanted

    def parts(self, replies: Sequence[Reply]) -> list[Part]:
        """The outputs of every process, as functions that return them."""
        deferred = self._deferred
        parts = [_ready(reply["outputs"]) for reply in replies if "outputs" in reply]
        for rank, reply in enumerate(replies):
            if "later" in reply and rank == self._control.rank:
                parts.append(self._local)
            elif "later" in reply and deferred is not None:
                parts.append(deferred.result(self._control.step, rank))
        if deferred is not None:
            deferred.forget(self._control.step, [reply["wanted"] for reply in replies])
        return parts


def _ready(outputs: Mapping[str, Any]) -> Part:
    """Outputs that are available already."""
    return _Ready(outputs)


@dataclass(frozen=True)
class _Ready:
    """A class, unlike a lambda, can be pickled."""

    outputs: Mapping[str, Any]

    def __call__(self) -> Mapping[str, Any]:
        return self.outputs


class _LocalOutputs(dict[str, Any]):
    """The outputs of this process, each packed when it is read."""

    def __init__(self, outputs: StepOutputs, event: DeviceEvent | None) -> None:
        self._outputs, self._event = outputs, event

    def __getstate__(self) -> dict[str, Any]:
        self._wait()
        return vars(self)

    def _wait(self) -> None:
        if (event := self._event) is not None:
            event.wait()
            self._event = None

    def __missing__(self, name: str) -> Any:
        self._wait()
        self[name] = packing(self._outputs.values[name])()
        return self[name]


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


class StepResult:
    """The result of a step. Expensive values are computed when they are read.

    Args:
        parts: the values of each process.
        outputs: the last stage's outputs by microbatch; None without one.
        merge_rules: how they are merged.
        program: that was run.
        spans: when its actions ran, by rank.
        weights: of the microbatches.
        rules: how metrics are reduced.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        outputs: Mapping[int, Any] | None,
        merge_rules: Rules,
        program: Program,
        spans: Spans,
        weights: Weights | None = None,
        rules: MetricRules = "mean",
    ) -> None:
        self._parts = parts
        self.raw_outputs = dict(outputs or {})
        self._merge_rules = merge_rules
        self._program = program
        self._spans = spans
        self._weights = Weights(None, None) if weights is None else weights
        self._rules = rules

    def _values(self, kind: str) -> Values:
        return unpack(part()[kind] for part in self._parts)

    @cached_property
    def losses(self) -> list[torch.Tensor] | None:
        """The loss of every microbatch as the loss function returned it; None without a loss."""
        found = {i: loss for losses in self._values("losses").values() for i, ((_, loss),) in losses.items()}
        return [found[i] for i in sorted(found)] or None

    @cached_property
    def loss(self) -> torch.Tensor | None:
        """The loss of the batch, the same on every rank: the sum of the microbatches' shares in ascending order.

        It excludes the losses that stages added; see `added_losses`. It is on the CPU; reading it waits for the device.
        """
        if self.losses is None:
            return None
        divisors = self._weights.loss
        return sum_in_order(
            [scale_loss(x, None if divisors is None else divisors[i]) for i, x in enumerate(self.losses)]
        )

    @cached_property
    def metrics(self) -> dict[str, Any]:
        """The metrics of the loss function, reduced as ``metrics`` says, the same on every rank.

        Raises:
            ValueError: for a metric that is missing for a microbatch, or a rule for an unknown metric.
        """
        return reduce_metrics(self._values("metrics"), self._program.num_microbatches, self._weights, self._rules)

    @cached_property
    def added_losses(self) -> dict[str, torch.Tensor]:
        """The losses that stages added by `fastpipe.add_loss`, by name, weighted like the loss; the same on every rank.

        The backward differentiates the sum of them and `loss`.
        """
        return added_by_name(self._values("added"), self._weights)

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
        return "<StepResult>" if self.loss is None else f"<StepResult loss={float(self.loss):.6g}>"


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
