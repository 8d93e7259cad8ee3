"""Measures the costs of a pipeline's stages and layers, as input for `fastpipe.plan`.

Seconds of stages come from traced steps. Bytes, and the shares of layers, are metered in a forward pass: a hook on the
first forward of a module runs its input a few more times through the layers (forward, backward for the input, backward
for the weights), while later ranks wait for the output.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from fastpipe.cost import CostModel
from fastpipe.placement import is_whole
from fastpipe.planner import LayerCosts
from fastpipe.program import Op
from fastpipe.runtime.common import (
    SavedBytes,
    Tensors,
    children_of,
    cuda_devices,
    local_part,
    tensor_leaves,
    time_when_idle,
)
from fastpipe.runtime.coordination import Reply
from fastpipe.runtime.data_parallel import Sharded, unwrapped
from fastpipe.runtime.model import Chain, restored, selected
from fastpipe.runtime.stage import Stage, StageWork, from_tensors, to_tensors
from fastpipe.runtime.step import StepResult, Steps
from fastpipe.timeline import Timeline

_REPEATS = 5


class UnitCosts(NamedTuple):
    """Costs of a unit, a stage or a layer, for one microbatch, in seconds and bytes.

    Attributes:
        held: bytes kept from the forward to the end of the backward: tensors saved by autograd, inputs and outputs,
            without parameters and buffers.
        rows: of the first input; 0 without a tensor.
    """

    forward: float
    backward_input: float
    backward_weight: float
    held: float
    output: float
    parameters: float
    rows: int


class Meters:
    """Meters on the stages of this process.

    Args:
        by_layer: whether each layer of a stage is measured separately.

    Attributes:
        units: by stage, the costs of its layers in order, or of the whole stage.
    """

    def __init__(self, stages: Sequence[Stage], *, by_layer: bool, trains: bool) -> None:
        self.by_layer = by_layer
        self.trains = trains
        self.units: dict[int, dict[int, UnitCosts]] = {}
        # With two routes both first forwards may be concurrent and would disturb each other. The lock is reentrant
        # because the metered forwards call the hook again.
        self._lock = threading.RLock()
        self._stages = [stage for stage in stages if not isinstance(stage.parallel, Sharded)]

    @contextlib.contextmanager
    def attached(self) -> Iterator[None]:
        """Context in which the first forward of every stage is measured."""
        hooks = [
            unwrapped(stage.module).register_forward_pre_hook(
                lambda module, args, kwargs, stage=stage: self._catch(stage, module, args, kwargs), with_kwargs=True
            )
            for stage in self._stages
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _catch(self, stage: Stage, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        with self._lock:
            if stage.index in self.units:
                return
            parts = children_of(module) if self.by_layer else {"": module}
            ends = next(iter(parts)), next(reversed(parts))
            self.units[stage.index] = {}
            for number, (name, layer) in enumerate(parts.items()):
                assert layer is not None
                inner = Chain({name: layer}) if self.by_layer else layer
                place = _place(stage.is_first and name == ends[0], stage.is_last and name == ends[1])
                part = Stage(place[0], inner, place[1], stage.losses.loss_fn, mesh=stage.mesh)
                probe = _Probe(stage, part, args, kwargs)
                with torch.set_grad_enabled(self.trains), restored(inner):
                    self.units[stage.index][number] = probe.unit()
                args, carried = from_tensors(probe.outputs, mesh=stage.mesh)
                kwargs = {**kwargs, **carried}


def _place(at_start: bool, at_end: bool) -> tuple[int, int]:
    """Index and number of stages for a probe of a part that has or lacks the model's start and end."""
    if at_start and at_end:
        return 0, 1
    return (0 if at_start else 2 if at_end else 1), 3


class _Probe:
    """A part of a stage, run as a stage of its own on one microbatch."""

    def __init__(self, stage: Stage, part: Stage, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self.part = part
        self.args = args
        self.outputs: Tensors = ()
        targets, microbatch = stage.work.targets, stage.running or 0
        self._targets = None if targets is None or not part.is_last else [targets[microbatch]]
        self._carried = selected({**stage.losses.carried, **kwargs}, part.losses.names)
        self._kwargs = [{k: v for k, v in selected(kwargs, part.accepts).items() if k not in self._carried}]
        self._devices = cuda_devices([part.module])

    def unit(self) -> UnitCosts:
        """The least of a few runs: other work of the machine only adds."""
        try:
            held = self._held_bytes()
            runs = [self._run() for _ in range(_REPEATS)]
        finally:
            self.part.end()
        forward, inputs, weights = map(min, zip(*runs, strict=True))
        tensors = tensor_leaves(self.args)
        rows = len(tensors[0]) if tensors and tensors[0].dim() else 0
        sent = sum(output.nbytes for output in self.outputs)
        parameters = sum(local_part(parameter).nbytes for parameter in self.part.module.parameters())
        return UnitCosts(forward, inputs, weights, float(held), float(sent), float(parameters), rows)

    def _begin(self) -> Tensors:
        """Start a new microbatch; its floating-point inputs require gradients."""
        first = self.part.is_first
        self.part.begin(StageWork(args=[self.args] if first else None, kwargs=self._kwargs, targets=self._targets))
        if first:
            return ()
        wants = torch.is_grad_enabled()
        value = self.args[0] if len(self.args) == 1 else self.args
        given = to_tensors(value, self._carried, self.part.index, mesh=self.part.mesh)
        return tuple(t.detach().requires_grad_(wants and t.is_floating_point()) for t in given)

    def _run(self) -> tuple[float, float, float]:
        """Seconds of F, I and W."""
        inputs, times = self._begin(), [time_when_idle(self._devices)]
        outputs = self.part.forward(0, inputs, splits=True)
        times.append(time_when_idle(self._devices))
        if torch.is_grad_enabled():
            self.part.backward_input(0, tuple(torch.ones_like(t) for t in outputs if t.requires_grad))
            times.append(time_when_idle(self._devices))
            self.part.backward_weight(0)
        times += [time_when_idle(self._devices)] * (4 - len(times))
        return times[1] - times[0], times[2] - times[1], times[3] - times[2]

    def _held_bytes(self) -> int:
        """Bytes that a microbatch keeps alive between F and the backward."""
        saved, inputs = SavedBytes(self.part.module), self._begin()
        with saved.counted():
            outputs = self.part.forward(0, inputs)
        for tensor in outputs:
            saved.add(tensor)
        for tensor in tensor_leaves(self.args):
            # a microbatch may be a view of the batch: not its whole storage
            local = local_part(tensor)
            saved.by_address[local.untyped_storage().data_ptr()] = local.nbytes
        self.outputs = () if self.part.is_last else tuple(output.detach() for output in outputs)
        return sum(saved.by_address.values())


_SPREAD = 2.0
"""Minimum ratio of the largest to the smallest message for a fit of bandwidth and latency."""
_KINDS = ("forward", "backward_input", "backward_weight")


@dataclass(frozen=True)
class Profile:
    """The measurements, the same on every process.

    Attributes:
        units: by stage, the costs of its parts.
    """

    timelines: Sequence[Timeline]
    units: Mapping[int, Mapping[int, UnitCosts]]
    num_microbatches: int

    def stage_costs(self) -> CostModel:
        """Medians over the steps; bytes, and the ratio of I and W if only whole backwards ran, from the meters."""
        cost = _medians([CostModel.from_timeline(timeline) for timeline in self.timelines])
        num_stages = self.timelines[0].program.num_stages
        cost = self._split(cost, num_stages)
        if len(self.units) < num_stages:
            return replace(cost, comm=_links(self.timelines, [0.0] * num_stages)[0])
        last = [units[max(units)] for _, units in sorted(self.units.items())]
        outputs = [unit.output for unit in last]
        held = [math.fsum(unit.held for unit in units.values()) for _, units in sorted(self.units.items())]
        comm, bandwidth = _links(self.timelines, outputs)
        return replace(cost, comm=comm, bandwidth=bandwidth, activation_bytes=outputs, stage_bytes=held)

    def _split(self, cost: CostModel, num_stages: int) -> CostModel:
        """If only whole backwards ran, divide B into I and W in the metered ratio."""
        seen = {op for timeline in self.timelines for op, _ in timeline.median_seconds()}
        if Op.B not in seen and Op.OVERLAP_F_B not in seen:
            return replace(cost, backward=None)
        if Op.I in seen:
            return cost
        inputs, weights = [], []
        for stage, both in enumerate(cost.per_stage("backward", num_stages).tolist()):
            units = self.units.get(stage, {}).values()
            first, second = (math.fsum(getattr(unit, name) for unit in units) for name in _KINDS[1:])
            share = first / (first + second) if first + second > 0 else 0.5
            inputs.append(both * share)
            weights.append(both - both * share)
        return replace(cost, backward_input=inputs, backward_weight=weights, backward=None)

    def layer_costs(self) -> LayerCosts:
        """The stages' costs, divided among their layers in the metered ratio."""
        cost = self.stage_costs()
        seconds: dict[str, Any] = {}
        num_stages = len(self.units)
        for name in _KINDS:
            by_stage = cost.per_stage(name, num_stages).tolist()
            shared = [self._shares(stage, name, by_stage[stage]) for stage in range(num_stages)]
            seconds[name] = [number for numbers in shared for number in numbers]
        layers = [unit for _, units in sorted(self.units.items()) for unit in units.values()]
        batch = layers[0].rows * self.num_microbatches
        return LayerCosts(
            num_layers=len(layers),
            **seconds,
            activation_bytes=[layer.output for layer in layers],
            held_bytes=[layer.held for layer in layers],
            parameter_bytes=[2 * layer.parameters for layer in layers],
            comm=cost.comm,
            bandwidth=cost.bandwidth,
            fused=_fused(cost, num_stages),
            microbatch_size=layers[0].rows or 1,
            batch_size=batch or None,
        )

    def _shares(self, stage: int, name: str, seconds: float) -> list[float]:
        parts = [getattr(unit, name) for unit in self.units[stage].values()]
        whole = math.fsum(parts)
        return [seconds * part / whole if whole > 0 else seconds / len(parts) for part in parts]


def profile(
    steps: Steps,
    call: Callable[[bool, bool], StepResult],
    modules: Collection[nn.Module],
    parameters: Sequence[nn.Parameter],
    *,
    inputs: Sequence[Any],
    num_steps: Any,
    by_layer: bool,
    num_microbatches: int,
) -> Profile:
    """Run and measure a few steps on one batch; see `Pipeline.profile`.

    Args:
        call: runs a step, or an `eval_step` if its first argument is false; the second says whether to trace it.
        modules: whose buffers are restored.
        parameters: whose gradients are restored.
        by_layer: meter layers instead of stages.
    """
    name = f"profile{'_layers' if by_layer else ''}, num_steps={num_steps!r}"
    steps.all_gather(name, lambda: _check(steps, inputs, num_steps, by_layer))
    with steps.part_of(name), _restored(modules, parameters, steps):
        call(True, False)
        timelines = [call(True, True).timeline for _ in range(num_steps)]
        meters = Meters(steps.stages, by_layer=by_layer, trains=not steps.forward_only)
        with meters.attached():
            call(False, False)
    replies = steps.all_gather("profile", lambda: _message(meters))
    return Profile(timelines, _units(replies), num_microbatches)


def _check(steps: Steps, inputs: Sequence[Any], num_steps: Any, by_layer: bool) -> Reply:
    if not is_whole(num_steps, least=1):
        raise ValueError(f"num_steps = {num_steps!r}: give a whole number of at least 1")
    if any(isinstance(value, Iterator) for value in inputs):
        raise ValueError("profile runs several steps on one batch: give whole batches or lists, not iterators")
    for stage in steps.stages if by_layer else ():
        if stage.parallel is not None or not isinstance(unwrapped(stage.module), Chain):
            raise ValueError(
                f"profile_layers: stage {stage.index} is not a list of plain layers; pass the model's layers as a list "
                "to Pipeline, or use profile, which gives the costs of the stages"
            )
    return {}


@contextlib.contextmanager
def _restored(modules: Collection[nn.Module], parameters: Sequence[nn.Parameter], steps: Steps) -> Iterator[None]:
    """Context that restores gradients, buffers, random generators and the step count."""
    devices = sorted({parameter.device.index for parameter in parameters if parameter.is_cuda})
    step_count = steps.random.step_count
    try:
        with torch.random.fork_rng(devices=devices), restored(*modules):
            yield
    finally:
        steps.random.step_count = step_count


def _message(meters: Meters) -> Reply:
    return {
        "units": [[stage, [[part, *unit] for part, unit in units.items()]] for stage, units in meters.units.items()]
    }


def _units(replies: Sequence[Reply]) -> dict[int, dict[int, UnitCosts]]:
    """Units by stage; if two ranks hold a stage, the last rank's."""
    found = {}
    for reply in replies:
        for stage, parts in reply["units"]:
            found[stage] = {part: UnitCosts(*numbers) for part, *numbers in parts}
    return found


def _medians(costs: Sequence[CostModel]) -> CostModel:
    values: dict[str, Any] = {}
    for name in (field.name for field in fields(CostModel)):
        column = [getattr(cost, name) for cost in costs]
        if isinstance(column[0], tuple):
            values[name] = tuple(statistics.median(numbers) for numbers in zip(*column, strict=True))
        elif isinstance(column[0], float | int):
            values[name] = statistics.median(column)
    return CostModel(**values)


def _links(timelines: Sequence[Timeline], sizes: Sequence[float]) -> tuple[float, float]:
    """Latency (seconds) and bandwidth (bytes per second), from the transfers whose receiver was waiting.

    If all messages have about the same size, they cannot be separated, and the whole transfer is latency.
    """
    found: dict[float, list[float]] = {}
    for timeline in timelines:
        for boundary, seconds in zip(*timeline.latencies(), strict=True):
            found.setdefault(sizes[boundary], []).append(float(seconds))
    if not found:
        return 0.0, math.inf
    medians = {size: statistics.median(seconds) for size, seconds in found.items()}
    if min(found) > 0 and max(found) >= _SPREAD * min(found):
        slope, start = np.polyfit(list(medians), list(medians.values()), 1).tolist()
        if slope > 0 and start >= 0:
            return start, 1 / slope
    return max(0.0, statistics.median(s for seconds in found.values() for s in seconds)), math.inf


def _fused(cost: CostModel, num_stages: int) -> float:
    """The duration of a fused pair, as a fraction of the sum of its halves."""
    if cost.overlapped is None:
        return 1.0
    pair, forward, backward = (
        float(cost.per_stage(name, num_stages).sum()) for name in ("overlapped", "forward", "backward")
    )
    return pair / (forward + backward) if forward + backward > 0 else 1.0
