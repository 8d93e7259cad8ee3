"""From steps of a pipeline to what its stages and layers cost: the input of `fastpipe.plan`."""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch

from fastpipe.cost import CostModel
from fastpipe.placement import is_whole
from fastpipe.planner.layer_costs import LayerCosts
from fastpipe.program import Op
from fastpipe.runtime.buffers import keep_buffers
from fastpipe.runtime.chain import Chain
from fastpipe.runtime.control import Reply
from fastpipe.runtime.held_model import HeldModel
from fastpipe.runtime.meter import Meters, Unit
from fastpipe.runtime.result import StepResult
from fastpipe.runtime.steps import Steps
from fastpipe.runtime.wrappers import unwrapped
from fastpipe.timeline import Timeline

_SPREAD = 2.0
"""How much larger the largest message has to be than the smallest, so that bandwidth and latency can be told apart."""
_KINDS = ("forward", "backward_input", "backward_weight")


@dataclass(frozen=True)
class Measured:
    """What every process knows in the end.

    Attributes:
        timelines: of the traced steps.
        units: by stage, its parts.
        num_microbatches: of a step.
    """

    timelines: Sequence[Timeline]
    units: Mapping[int, Mapping[int, Unit]]
    num_microbatches: int

    def stage_costs(self) -> CostModel:
        """Medians over the steps; bytes, and the parts of a backward that never ran split, from the meters."""
        cost = _medians([CostModel.from_timeline(timeline) for timeline in self.timelines])
        num_stages = self.timelines[0].program.num_stages
        cost = self._split(cost, num_stages)
        if len(self.units) < num_stages:
            return replace(cost, comm=_links(self.timelines, [0.0] * num_stages)[0])
        last = [units[max(units)] for _, units in sorted(self.units.items())]
        handed = [unit.handed for unit in last]
        held = [math.fsum(unit.held for unit in units.values()) for _, units in sorted(self.units.items())]
        comm, bandwidth = _links(self.timelines, handed)
        return replace(cost, comm=comm, bandwidth=bandwidth, activation_bytes=handed, stage_bytes=held)

    def _split(self, cost: CostModel, num_stages: int) -> CostModel:
        """Where only whole backwards ran, I and W in the proportion that was metered; B is then I + W."""
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
        """The stages' costs, shared out to their layers in the proportion that was metered."""
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
            activation_bytes=[layer.handed for layer in layers],
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
    pipe: HeldModel,
    steps: Steps,
    call: Callable[[bool, bool], StepResult],
    *,
    inputs: Sequence[Any],
    num_steps: Any,
    by_layer: bool,
    num_microbatches: int,
) -> Measured:
    """Run a few steps on one batch and measure them; see `Pipeline.profile`.

    Args:
        pipe: whose parameters and buffers are put back.
        steps: of the pipeline.
        call: runs a step, or an `eval_step` where the first argument is false; the second says whether to trace it.
        inputs: what it is called with.
        num_steps: how many are traced.
        by_layer: whether layers are metered, and not stages.
        num_microbatches: of a step.
    """
    _check(steps, inputs, num_steps, by_layer)
    with _put_back(pipe, steps):
        call(True, False)
        timelines = [call(True, True).timeline for _ in range(num_steps)]
        meters = Meters(steps.stages, by_layer=by_layer, trains=not steps.forward_only)
        with meters.attached():
            call(False, False)
    replies = steps.meet("profile", lambda: _message(meters))
    return Measured(timelines, _units(replies), num_microbatches)


def _check(steps: Steps, inputs: Sequence[Any], num_steps: Any, by_layer: bool) -> None:
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


@contextlib.contextmanager
def _put_back(pipe: HeldModel, steps: Steps) -> Iterator[None]:
    """After this context gradients, buffers, random generators and the count of steps are as they were."""
    parameters = list(pipe.parameters())
    kept = [(parameter, parameter.grad) for parameter in parameters]
    put_back = keep_buffers(pipe.stage_modules.values())
    devices = sorted({parameter.device.index for parameter in parameters if parameter.is_cuda})
    step_count = steps.random.step_count
    for parameter in parameters:
        parameter.grad = None
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        for parameter, grad in kept:
            parameter.grad = grad
        put_back()
        steps.random.step_count = step_count


def _message(meters: Meters) -> Reply:
    names = [field.name for field in fields(Unit)]
    return {
        "units": [
            [stage, [[part, *(getattr(unit, name) for name in names)] for part, unit in units.items()]]
            for stage, units in meters.found.items()
        ]
    }


def _units(replies: Sequence[Reply]) -> dict[int, dict[int, Unit]]:
    """By stage; of one that two ranks hold the last one's."""
    found = {}
    for reply in replies:
        for stage, parts in reply["units"]:
            found[stage] = {part: Unit(*numbers) for part, *numbers in parts}
    return found


def _medians(costs: Sequence[CostModel]) -> CostModel:
    """Attribute by attribute."""
    values: dict[str, Any] = {}
    for name in (field.name for field in fields(CostModel)):
        column = [getattr(cost, name) for cost in costs]
        if isinstance(column[0], tuple):
            values[name] = tuple(statistics.median(numbers) for numbers in zip(*column, strict=True))
        elif isinstance(column[0], float | int):
            values[name] = statistics.median(column)
    return CostModel(**values)


def _links(timelines: Sequence[Timeline], sizes: Sequence[float]) -> tuple[float, float]:
    """Latency and bandwidth, by the transfers whose receiver was there first.

    Where all messages are about as large the two cannot be told apart, and all of a transfer is latency.
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
    """What a fused pair takes, as a fraction of its two halves."""
    if cost.overlapped is None:
        return 1.0
    pair, forward, backward = (
        float(cost.per_stage(name, num_stages).sum()) for name in ("overlapped", "forward", "backward")
    )
    return pair / (forward + backward) if forward + backward > 0 else 1.0
