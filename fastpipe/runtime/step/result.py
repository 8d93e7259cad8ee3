"""The losses, metrics and added losses of a step: weighted, gathered over the processes, and reduced to a StepResult.

The process that computes a value sends it exact to the last bit; each process reduces all values in one order when they
are read, so the result is the same everywhere. On a device, values complete after the host ends the step;
`fastpipe.runtime.executor.ranks` says whether they are valid.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from operator import itemgetter
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from fastpipe.program import Program
from fastpipe.runtime.common import (
    CPU,
    Tensors,
    decoded,
    dense_all,
    encoded,
    packing,
)
from fastpipe.runtime.coordination import Control, DeferredResults, Reply
from fastpipe.runtime.executor import DeviceEvent, DeviceEvents, Spans
from fastpipe.runtime.stage import Stage, from_tensors, scale_loss, sum_in_order, to_tensors
from fastpipe.runtime.step.microbatch import Rules, merge
from fastpipe.runtime.transport import Membership
from fastpipe.timeline import Timeline

MetricRule = str | Callable[[list[torch.Tensor]], Any]
MetricRules = MetricRule | Mapping[str, MetricRule]
"""One rule for all metrics, or one per metric by name; default "mean"."""

Named = list[tuple[str, torch.Tensor]]
Values = dict[int, dict[int, Named]]
"""Named values by stage and microbatch, in order."""

Packed = list[list[Any]]
"""`Values` as JSON: stage, name, microbatches, positions in `Named`, and the values in one tensor, `encoded`."""

Outputs = Callable[[], Mapping[str, Packed]]
"""Returns the values of one process, by kind; it may wait for them."""

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
    """
    # without a target rows may be unknown; with no rows at all there is no mean
    mean = given or (None if rows is not None and not sum(rows) else loss_divisors("mean", rows, None, count))
    return Weights(None if reduction == "sum" else mean, mean)


def loss_divisors(
    reduction: str | Callable[[Any], float], rows: Sequence[int] | None, targets: Sequence[Any] | None, count: int
) -> list[float]:
    """The divisor of each microbatch's loss, so that the sum is the loss of the whole batch.

    ``"mean"``: all rows divided by its rows; for equal microbatches exactly their number. A function gives the weight
    of a target (its number of tokens, for example): the sum of weights divided by its weight.
    """
    if callable(reduction):
        if targets is None:
            raise ValueError("loss_reduction is a function of the target, and no target was given: pass target=")
        weights = [_weight_of(reduction, target, number) for number, target in enumerate(targets)]
    else:
        weights = [1.0] * count if rows is None else [float(r) for r in rows]
    total = sum(weights)
    if not 0 < total < math.inf:
        raise ValueError(
            f"loss_reduction: the weights of the microbatches sum to {total}; their sum must be above 0 and finite: "
            "leave out a batch with nothing to count, on every rank and replica"
        )
    return [total / weight if weight else math.inf for weight in weights]


def _weight_of(reduction: Callable[[Any], float], target: Any, number: int) -> float:
    given: Any = reduction(target)
    try:
        weight = float(given)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        weight = math.nan
    if not 0 <= weight < math.inf:
        raise ValueError(
            f"loss_reduction returned {_shown(given)} for the target of microbatch {number}: return one number, its "
            "weight, at least 0 and finite"
        )
    return weight


def _shown(given: Any) -> str:
    if isinstance(given, torch.Tensor):
        value = f" = {given.item()}" if given.numel() == 1 and not given.is_meta else ""
        return f"a tensor of shape {tuple(given.shape)} and {given.dtype} on {given.device}{value}"
    is_large = isinstance(given, int) and given.bit_length() > 1000
    return f"an int of {given.bit_length()} bits" if is_large else repr(given)


Columns = list[tuple[list[Any], torch.Tensor]]
"""`Values` on the host: as in `Packed`, with the tensor itself."""


def to_host(values: Values, *, wait: bool = True) -> Columns:
    """Copy values from the device, once for each stage, name, dtype and shape: more microbatches hardly cost more.

    Args:
        wait: for the device. Otherwise the copies are complete when the device has done the work queued so far.
    """
    alike: dict[tuple[Any, ...], list[tuple[int, int, torch.Tensor]]] = {}
    for stage, by_microbatch in values.items():
        for i, named in by_microbatch.items():
            for place, (name, value) in enumerate(named):
                alike.setdefault((stage, name, value.dtype, value.shape, value.device), []).append((i, place, value))
    columns = []
    for (stage, name, *_), found in alike.items():
        microbatches, places, tensors = zip(*found, strict=True)
        copy = torch.stack(tensors).detach().to("cpu", non_blocking=not wait)
        columns.append(([stage, name, microbatches, places], copy))
    return columns


def pack(columns: Columns) -> Packed:
    """Values as JSON, exact to the last bit."""
    return [[*head, *encoded(copy)] for head, copy in columns]


def unpack(parts: Iterable[Packed]) -> Values:
    """Unpack and merge the values of all processes."""
    found: dict[int, dict[int, list[tuple[int, str, torch.Tensor]]]] = {}
    for stage, name, microbatches, places, *values in (group for part in parts for group in part):
        for i, place, value in zip(microbatches, places, decoded(*values).unbind(), strict=True):
            found.setdefault(stage, {}).setdefault(i, []).append((place, name, value))
    return {
        stage: {
            i: [(name, value) for _, name, value in sorted(named, key=itemgetter(0))]
            for i, named in by_microbatch.items()
        }
        for stage, by_microbatch in found.items()
    }


def packed_later(values: Mapping[str, Values], make_event: Callable[[], DeviceEvent] | None = None) -> Outputs:
    """A function that packs values when it is first called.

    Args:
        make_event: records an event after the work queued on the device. The copies to the host are queued at once, and
            the function waits for them; it raises StepError if the device's results are invalid.
    """
    if make_event is None:
        return cache(lambda: {kind: pack(to_host(found)) for kind, found in values.items()})
    columns = {kind: to_host(found, wait=False) for kind, found in values.items()}
    copied = make_event()

    def read() -> dict[str, Packed]:
        copied.wait()
        return {kind: pack(found) for kind, found in columns.items()}

    return cache(read)


def report_outputs(
    stages: Sequence[Stage], control: Control, device: torch.device, events: DeviceEvents
) -> tuple[Reply, Outputs]:
    """The message with the values that this process has computed, or the promise to post them, as packing waits for the
    device; and the function that packs them.

    Args:
        stages: of this process, after the step; stages with two local holders are merged.
    """
    values: dict[str, Values] = {kind: {} for kind in KINDS}
    for stage in stages:
        for kind, own in values.items():
            if given := getattr(stage.work, kind):
                named = {i: [("loss", loss)] for i, loss in given.items()} if kind == "losses" else given
                own.setdefault(stage.index, {}).update(named)
    deferred = _deferred(control, device)
    wanted: Reply = {} if deferred is None else {"wanted": deferred.wanted()}
    if not any(values.values()):
        return wanted, dict
    outputs = packed_later(values, None if deferred is None else partial(events.make, device))
    if deferred is None and control.size > 1:
        return {"outputs": outputs()}, outputs
    if deferred is not None:
        deferred.post(control.step, partial(_on_device, device, outputs))
    return {"later": True} | wanted, outputs


def every_output(own: Outputs, control: Control, device: torch.device, replies: Sequence[Reply]) -> list[Outputs]:
    """The values of every process, from what `report_outputs` returned on each."""
    deferred = _deferred(control, device)
    found: list[Outputs] = [partial(dict, reply["outputs"]) for reply in replies if "outputs" in reply]
    for rank, reply in enumerate(replies):
        if "later" in reply and rank == control.rank:
            found.append(own)
        elif "later" in reply and deferred is not None:
            found.append(deferred.result(control.step, rank))
    if deferred is not None:
        deferred.forget(control.step, [reply["wanted"] for reply in replies])
    return found


def _deferred(control: Control, device: torch.device) -> DeferredResults | None:
    """Where outputs on a device are posted; None on a CPU, and in a single process."""
    return None if device.type == "cpu" else control.deferred


def _on_device(device: torch.device, outputs: Outputs) -> dict[str, Any]:
    """Read outputs in a helper thread, whose wait would create a CUDA context on the default device."""
    torch.accelerator.set_device_index(device.index or 0)
    return dict(outputs())


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
    rule_of = {name: rules.get(name, "mean") if isinstance(rules, Mapping) else rules for name in by_name}
    return {name: _reduced(name, found, count, weights, rule_of[name]) for name, found in by_name.items()}


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
        return _weighted_sum(found, weights.mean)
    if not values[0].is_floating_point() and not values[0].is_complex():
        values = [value.long() for value in values]  # like torch.sum
    return sum_in_order(values)


def added_by_name(values: Values, weights: Weights) -> dict[str, torch.Tensor]:
    """The losses that stages added, by name: summed over layers, weighted, and summed over microbatches."""
    by_name: dict[str, dict[int, list[torch.Tensor]]] = {}
    for stage in sorted(values):
        for microbatch, named in sorted(values[stage].items()):
            for name, value in named:
                by_name.setdefault(name, {}).setdefault(microbatch, []).append(value)
    return {
        name: _weighted_sum({i: sum_in_order(added) for i, added in by_microbatch.items()}, weights.loss)
        for name, by_microbatch in by_name.items()
    }


def _weighted_sum(values: Mapping[int, torch.Tensor], divisors: Sequence[float] | None) -> torch.Tensor:
    """The sum of the shares of microbatches, in ascending order."""
    return sum_in_order([scale_loss(values[i], divisors[i] if divisors else None) for i in sorted(values)])


class StepResult:
    """The result of a step. Expensive values are computed when they are read.

    Args:
        parts: the values of each process.
        outputs: the last stage's outputs by microbatch; None without one.
        spans: when its actions ran, by rank.
        rules: how metrics are reduced.
    """

    def __init__(
        self,
        parts: Sequence[Outputs],
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

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_parts": [partial(dict, part()) for part in self._parts]}

    def _values(self, kind: str) -> Values:
        return unpack(outputs()[kind] for outputs in self._parts)

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
        return None if self.losses is None else _weighted_sum(dict(enumerate(self.losses)), self._weights.loss)

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
        in_order = [self.raw_outputs[i] for i in sorted(self.raw_outputs)]
        return merge(in_order, self._merge_rules) if in_order else None

    @cached_property
    def timeline(self) -> Timeline:
        """The measured times of this process's ranks; of all ranks after a step with ``trace=True``.

        On a GPU only such a step has the times of the device; others have those of the launches.
        """
        starts, ends = [], []
        for rank, columns in enumerate(self._program.columns):
            nothing = np.full(columns.shape[1], np.nan)
            start, end = self._spans.get(rank, (nothing, nothing))
            starts.append(start)
            ends.append(end)
        return Timeline(self._program, starts, ends, measured=True)

    def __repr__(self) -> str:
        return "<StepResult>" if self.loss is None else f"<StepResult loss={float(self.loss):.6g}>"


def pack_spans(spans: Spans) -> dict[str, list[Any]]:
    """Spans as JSON."""
    return {str(rank): encoded(torch.from_numpy(np.stack(pair))) for rank, pair in spans.items()}


def unpack_spans(packed: Mapping[str, list[Any]]) -> Spans:
    """The inverse of `pack_spans`."""
    found = {int(rank): decoded(*pair).numpy() for rank, pair in packed.items()}
    return {rank: (start, end) for rank, (start, end) in found.items()}


def gather_outputs(
    all_gather: Callable[..., Any], stage: Stage, member: Membership, own: dict[int, Any]
) -> dict[int, Any]:
    """The last stage's outputs by microbatch, from all processes to every one of them. Collective, after a step.

    Args:
        all_gather: `Steps.all_gather`.
        stage: the last one of this process.
        member: the group, and this process's place in it.
        own: the outputs of this process; returned unchanged.

    Raises:
        ValueError: for an output that cannot be sent.
        StepError: if another rank could not take part.
    """
    if member.size == 1:
        return own
    blocks: dict[int, torch.Tensor] = {}

    def size() -> Reply:
        if not dist.is_initialized():
            raise RuntimeError(
                "gather_outputs: the process group has been destroyed, and outputs are sent over it: call "
                "dist.destroy_process_group() after the last step"
            )
        if own:
            blocks[member.rank] = block_of(dense_all(to_tensors(own, {}, stage.index, mesh=stage.mesh)), member.device)
        return {"bytes": len(blocks[member.rank]) if own else 0}

    def broadcast(replies: Sequence[Reply]) -> None:
        for rank, reply in enumerate(replies):
            if reply["bytes"]:
                arriving = torch.empty(reply["bytes"], dtype=torch.uint8, device=member.device)
                block = blocks.setdefault(rank, arriving)
                dist.broadcast(block, src=member.ranks[rank], group=member.group)

    all_gather("gather_outputs", size, broadcast)
    outputs = dict(own)
    for rank, block in blocks.items():
        if rank != member.rank:
            (found,), _ = from_tensors(tensors_in_block(block), mesh=stage.mesh)
            outputs |= found
    return outputs


def block_of(tensors: Tensors, device: torch.device) -> torch.Tensor:
    """Tensors as bytes, exact to the last bit, on a device that sends them."""
    places, end = packing.lay_out(tensors)
    text = json.dumps([[*place, tensor.device.type] for place, tensor in zip(places, tensors, strict=True)]).encode()
    block = torch.empty(packing.size_of(end, text), dtype=torch.uint8, device=device)
    packing.pack([place.memory(block) for place in places], tensors)
    packing.write_text(block, text)
    return block


def tensors_in_block(block: torch.Tensor) -> Tensors:
    """The tensors of `block_of`: those of a CPU on the CPU, the others on the block's device."""
    rows = json.loads(packing.text_of(block))
    places = ((packing.PackedTensor(*place), CPU if kind == "cpu" else block.device) for *place, kind in rows)
    return tuple(place.copy(block, device) for place, device in places)
