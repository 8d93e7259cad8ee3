"""From steps to costs, and from a plan to a running pipeline.

The costs of stages and layers are the input of `fastpipe.plan`. Seconds of stages come from traced steps. Bytes, and
the shares of layers, are metered in a forward pass: a hook on the first forward of a module runs its input a few more
times through the layers (forward, backward for the input, backward for the weights), while later ranks wait for the
output. Measuring restores gradients, buffers and random generators.

A pipeline takes another plan if all ranks agree on it and it keeps what cannot be moved.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import statistics
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from fastpipe.checks import check_counts
from fastpipe.cost import CostModel
from fastpipe.planner import LayerCosts, Plan
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
from fastpipe.runtime.coordination import Replies, Reply
from fastpipe.runtime.data_parallel import Sharded, unwrapped
from fastpipe.runtime.model import FULL, NONE, Chain, Policy, restored, selected
from fastpipe.runtime.stage import Stage, StageWork, from_tensors, to_tensors
from fastpipe.runtime.step import StepResult, Steps
from fastpipe.schedule import Schedule
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


Units = dict[int, dict[int, UnitCosts]]
"""By stage, the costs of its layers in order, or of the whole stage."""


@contextlib.contextmanager
def metered(stages: Sequence[Stage], *, by_layer: bool, trains: bool) -> Iterator[Units]:
    """Context in which the first forward of every stage of this process is measured.

    Args:
        by_layer: whether each layer of a stage is measured separately.
    """
    units: Units = {}
    # With two routes both first forwards may be concurrent and would disturb each other. The lock is reentrant because
    # the metered forwards call the hook again.
    lock = threading.RLock()

    def catch(stage: Stage, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        with lock:
            if stage.index in units:
                return
            parts = children_of(module) if by_layer else {"": module}
            ends = next(iter(parts)), next(reversed(parts))
            units[stage.index] = {}
            for number, (name, layer) in enumerate(parts.items()):
                assert layer is not None
                inner = Chain({name: layer}) if by_layer else layer
                place = _place(stage.is_first and name == ends[0], stage.is_last and name == ends[1])
                part = Stage(place[0], inner, place[1], stage.losses.loss_fn, mesh=stage.mesh)
                with torch.set_grad_enabled(trains), restored(inner):
                    units[stage.index][number], outputs = _measured(stage, part, args, kwargs)
                args, carried = from_tensors(outputs, mesh=stage.mesh)
                kwargs = {**kwargs, **carried}

    hooks = [
        unwrapped(stage.module).register_forward_pre_hook(
            lambda module, args, kwargs, stage=stage: catch(stage, module, args, kwargs), with_kwargs=True
        )
        for stage in stages
        if not isinstance(stage.parallel, Sharded)
    ]
    try:
        yield units
    finally:
        for hook in hooks:
            hook.remove()


def _place(at_start: bool, at_end: bool) -> tuple[int, int]:
    """Index and number of stages for a probe of a part that has or lacks the model's start and end."""
    if at_start and at_end:
        return 0, 1
    return (0 if at_start else 2 if at_end else 1), 3


def _measured(stage: Stage, part: Stage, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[UnitCosts, Tensors]:
    """The costs of a part of a stage, run as a stage of its own on one microbatch, and its outputs for the next part.

    Seconds are the least of a few runs: other work of the machine only adds.
    """
    targets, microbatch = stage.work.targets, stage.running or 0
    own_targets = None if targets is None or not part.is_last else [targets[microbatch]]
    carried = selected({**stage.losses.carried, **kwargs}, part.losses.names)
    named = [{k: v for k, v in selected(kwargs, part.accepts).items() if k not in carried}]

    def begin() -> Tensors:
        """Start a new microbatch; its floating-point inputs require gradients."""
        part.begin(StageWork(args=[args] if part.is_first else None, kwargs=named, targets=own_targets))
        if part.is_first:
            return ()
        wants = torch.is_grad_enabled()
        given = to_tensors(args[0] if len(args) == 1 else args, carried, part.index, mesh=part.mesh)
        return tuple(t.detach().requires_grad_(wants and t.is_floating_point()) for t in given)

    try:
        held, outputs = _held_bytes(part, begin(), tensors := tensor_leaves(args))
        runs = [_seconds(part, begin()) for _ in range(_REPEATS)]
    finally:
        part.end()
    forward, backward, weights = map(min, zip(*runs, strict=True))
    sent = sum(output.nbytes for output in outputs)
    parameters = sum(local_part(parameter).nbytes for parameter in part.module.parameters())
    rows = len(tensors[0]) if tensors and tensors[0].dim() else 0
    return UnitCosts(forward, backward, weights, float(held), float(sent), float(parameters), rows), outputs


def _held_bytes(part: Stage, inputs: Tensors, batch: Sequence[torch.Tensor]) -> tuple[int, Tensors]:
    """Bytes that a microbatch keeps alive between F and the backward, and the outputs for the next part."""
    saved = SavedBytes(part.module)
    with saved.counted():
        outputs = part.forward(0, inputs)
    for tensor in outputs:
        saved.add(tensor)
    for tensor in batch:
        saved.add_view(tensor)  # a microbatch may be a view of the batch
    return sum(saved.by_address.values()), () if part.is_last else tuple(output.detach() for output in outputs)


def _seconds(part: Stage, inputs: Tensors) -> tuple[float, float, float]:
    """Seconds of F, I and W."""
    devices = cuda_devices([part.module])
    times = [time_when_idle(devices)]
    outputs = part.forward(0, inputs, splits=True)
    times.append(time_when_idle(devices))
    if torch.is_grad_enabled():
        part.backward_input(0, tuple(torch.ones_like(t) for t in outputs if t.requires_grad))
        times.append(time_when_idle(devices))
        part.backward_weight(0)
    times += [time_when_idle(devices)] * (4 - len(times))
    return times[1] - times[0], times[2] - times[1], times[3] - times[2]


_SPREAD = 2.0
"""Minimum ratio of the largest to the smallest message for a fit of bandwidth and latency."""
_KINDS = ("forward", "backward_input", "backward_weight")


def stage_costs(timelines: Sequence[Timeline], units: Units) -> CostModel:
    """Medians over the steps; bytes, and the ratio of I and W if only whole backwards ran, from the meters."""
    cost = _medians([CostModel.from_timeline(timeline) for timeline in timelines])
    num_stages = timelines[0].program.num_stages
    cost = _split(cost, timelines, units)
    if len(units) < num_stages:
        return replace(cost, comm=_links(timelines, [0.0] * num_stages)[0])
    last = [parts[max(parts)] for _, parts in sorted(units.items())]
    outputs = [unit.output for unit in last]
    held = [math.fsum(unit.held for unit in parts.values()) for _, parts in sorted(units.items())]
    comm, bandwidth = _links(timelines, outputs)
    return replace(cost, comm=comm, bandwidth=bandwidth, activation_bytes=outputs, stage_bytes=held)


def _split(cost: CostModel, timelines: Sequence[Timeline], units: Units) -> CostModel:
    """If only whole backwards ran, divide B into I and W in the metered ratio."""
    seen = {op for timeline in timelines for op, _ in timeline.median_seconds()}
    if Op.B not in seen and Op.OVERLAP_F_B not in seen:
        return replace(cost, backward=None)
    if Op.I in seen:
        return cost
    inputs, weights = [], []
    for stage, both in enumerate(cost.per_stage("backward", timelines[0].program.num_stages).tolist()):
        parts = units.get(stage, {}).values()
        first, second = (math.fsum(getattr(unit, name) for unit in parts) for name in _KINDS[1:])
        share = first / (first + second) if first + second > 0 else 0.5
        inputs.append(both * share)
        weights.append(both - both * share)
    return replace(cost, backward_input=inputs, backward_weight=weights, backward=None)


def costs_by_layer(timelines: Sequence[Timeline], units: Units) -> LayerCosts:
    """The stages' costs, divided among their layers in the metered ratio."""
    cost = stage_costs(timelines, units)
    seconds: dict[str, Any] = {}
    num_stages = len(units)
    for name in _KINDS:
        by_stage = cost.per_stage(name, num_stages).tolist()
        shared = [_shares(units[stage], name, by_stage[stage]) for stage in range(num_stages)]
        seconds[name] = [number for numbers in shared for number in numbers]
    layers = [unit for _, parts in sorted(units.items()) for unit in parts.values()]
    batch = layers[0].rows * timelines[0].program.num_microbatches
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


def _shares(units: Mapping[int, UnitCosts], name: str, seconds: float) -> list[float]:
    parts = [getattr(unit, name) for unit in units.values()]
    whole = math.fsum(parts)
    return [seconds * part / whole if whole > 0 else seconds / len(parts) for part in parts]


def profile(
    steps: Steps,
    call: Callable[[bool, bool], StepResult],
    *,
    inputs: Sequence[Any],
    num_steps: Any,
    by_layer: bool,
    num_microbatches: int,
) -> tuple[list[Timeline], Units]:
    """Run and measure a few steps on one batch; see `Pipeline.profile`.

    Args:
        call: runs a step, or an `eval_step` if its first argument is false; the second says whether to trace it.
        by_layer: meter layers instead of stages.

    Returns:
        The timelines of the steps, and by stage the costs of its parts; the same on every process.
    """
    name = f"profile{'_layers' if by_layer else ''}, num_steps={num_steps!r}"
    steps.all_gather(name, lambda: _check(steps, inputs, num_steps, by_layer))
    trains = not steps.programs.schedule(num_microbatches).forward_only
    with steps.part_of(name), _restored(steps):
        call(trains, False)
        timelines = [call(trains, True).timeline for _ in range(num_steps)]
        with metered(steps.stages, by_layer=by_layer, trains=trains) as units:
            call(False, False)
    message = {"units": [[stage, [[part, *unit] for part, unit in parts.items()]] for stage, parts in units.items()]}
    replies = steps.all_gather("profile", lambda: message)
    return timelines, _units_of(replies)


def _check(steps: Steps, inputs: Sequence[Any], num_steps: Any, by_layer: bool) -> Reply:
    check_counts(num_steps=num_steps)
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
def _restored(steps: Steps) -> Iterator[None]:
    """Context that restores gradients, buffers, random generators and the step count."""
    step_count = steps.random.step_count
    modules = [stage.module for stage in steps.stages]  # also those of hidden copies
    followed = steps.copies.followed()
    try:
        with torch.random.fork_rng(devices=cuda_devices(modules)), restored(*modules, followed=followed):
            yield
    finally:
        steps.random.step_count = step_count


def _units_of(replies: Sequence[Reply]) -> Units:
    """If two ranks hold a stage, the last rank's."""
    found: Units = {}
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


Counts = list[int] | None
"""The number of layers of every stage."""


def agree_on_plan(steps: Steps, plan: Plan | Schedule | None) -> tuple[Schedule, Counts, Policy | None]:
    """Distribute the plan of rank 0.

    Args:
        plan: on this rank; optional except on rank 0.

    Returns:
        The schedule; the partition, None for the present one; what stages recompute, None for what they do now.

    Raises:
        ValueError: if rank 0 has none, or another rank has a different one.
    """
    found: list[tuple[Schedule, Counts, Policy | None]] = []
    steps.all_gather("replan", lambda: _offer(steps, plan), lambda replies: found.append(_agreed(plan, replies)))
    return found[0]


def _agreed(plan: Plan | Schedule | None, replies: Replies) -> tuple[Schedule, Counts, Policy | None]:
    others = [(f"rank {other}", reply) for other, reply in enumerate(replies)]
    others += [(f"the pipeline at {reply['pipeline']}", reply) for reply in replies.elsewhere]
    for other, reply in others:
        if reply["digest"] not in (None, replies[0]["digest"]):
            raise ValueError(
                f"plan differs between rank 0 and {other} (measurements, and searches with a time limit, need not end "
                "alike): pass rank 0's plan on every rank, also of the other pipelines of a mesh, or none on other "
                "ranks than 0"
            )
    text = replies[0]["text"]
    schedule = _schedule_of(plan) if plan is not None else Schedule.from_csv(text["csv"], name=text["name"])
    recomputes, ways = text["recomputes"], dict(pair for reply in replies for pair in reply["ways"])
    if recomputes is None or dict(enumerate(recomputes)) == {stage: way != NONE for stage, way in ways.items()}:
        return schedule, text["counts"], None
    return schedule, text["counts"], lambda stage, module: FULL if recomputes[stage] else NONE


def _offer(steps: Steps, plan: Plan | Schedule | None) -> Reply:
    """The plan of rank 0, and on all ranks its digest and what their stages recompute."""
    is_first = steps.control.rank == 0
    ways = [[stage.index, stage.recompute] for stage in steps.stages]
    if plan is None:
        if is_first:
            raise ValueError("plan = None on rank 0: pass the result of fastpipe.plan; only other ranks may omit it")
        return {"digest": None, "ways": ways}
    if not isinstance(plan, Plan | Schedule):
        raise TypeError(f"plan is a {type(plan).__name__}: pass the result of fastpipe.plan, or a Schedule")
    schedule = _schedule_of(plan).validate()
    partition, recomputes = (None, None) if isinstance(plan, Schedule) else (plan.partition, plan.recomputes)
    counts = None if partition is None else [len(part) for part in partition]
    text = {"csv": schedule.to_csv(), "counts": counts, "name": schedule.name, "recomputes": recomputes}
    digest = hashlib.sha256(json.dumps(text, sort_keys=True).encode()).hexdigest()
    return {"digest": digest, "ways": ways} | ({"text": text} if is_first else {})


def _schedule_of(plan: Plan | Schedule) -> Schedule:
    return (plan if isinstance(plan, Schedule) else plan.schedule).without_transfers()


def check_fits(new: Schedule, counts: Counts, old: Schedule, old_counts: Counts) -> None:
    """Refuse a plan for another pipeline."""
    if new.num_ranks != old.num_ranks:
        raise ValueError(
            f"plan is for {new.num_ranks} ranks but the pipeline has {old.num_ranks}: pass the pipeline's costs to plan"
        )
    if old_counts is None and (counts is not None or new.num_stages != old.num_stages):
        raise ValueError(
            f"plan has {new.num_stages} stages but this pipeline was given {old.num_stages} finished stages, which "
            "cannot be partitioned again: plan with the costs of pipe.profile, or build a Pipeline from a list of "
            "layers"
        )
    if counts is None and new.num_stages != old.num_stages:
        raise ValueError(
            f"plan has {new.num_stages} stages but the model is cut into {old.num_stages}: plan with the costs of "
            "pipe.profile, or, for another partition, of pipe.profile_layers"
        )
    if counts is not None and old_counts is not None and sum(counts) != sum(old_counts):
        raise ValueError(
            f"plan is for {sum(counts)} layers but the model has {sum(old_counts)}: pass its costs to plan"
        )


def check_movable(stages: Sequence[Stage], num_processes: int) -> None:
    """Refuse a plan that moves stages, if they cannot change rank or partition, with the alternatives."""
    if num_processes == 1 and not any(stage.parallel is not None for stage in stages):
        return
    reason = "its ranks are processes" if num_processes > 1 else "its stages have replicas"
    raise ValueError(
        f"plan moves layers to other ranks or changes which stages recompute, which is not possible, as {reason}. To "
        "change only the order, plan with placement=pipe.schedule and the costs of pipe.profile(...). Otherwise save "
        "with fastpipe.save_checkpoint, build a Pipeline with schedule=plan.schedule, partition=plan.partition, "
        "recompute=plan.recompute, and load with fastpipe.load_checkpoint"
    )
