"""For tests: the unsplit model's step, and modules that fail.

Tied weights get one gradient per use, summed in the pipeline's order.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fastpipe.action import ActionKind
from fastpipe.runtime.common import children_of, set_grad_dtype, without_autocast
from fastpipe.runtime.model import (
    Chain,
    Layers,
    Made,
    Shared,
    Tie,
    accepted_names,
    as_arguments,
    as_inputs,
    as_layers,
    has_own_forward,
    layer_ranges,
    parameter_of,
    selected,
    split_carried,
    twin,
    whole,
    with_parameters,
)
from fastpipe.runtime.stage import (
    PER_MICROBATCH,
    AddedLosses,
    Generators,
    checked_loss,
    detached,
    loss_and_metrics,
    loss_arguments,
    microbatch_seed,
    names_of,
    returned_loss,
    scale_loss,
    sum_in_order,
)
from fastpipe.runtime.step import (
    MetricRules,
    Rules,
    Values,
    added_by_name,
    by_microbatch,
    count_rows,
    input_names,
    loss_divisors,
    reduce_metrics,
    split,
    weights_of,
)
from fastpipe.schedule import Schedule


@contextmanager
def tied_reference(model: nn.Module, ties: Sequence[Tie]) -> Iterator[None]:
    """Context that sums the uses of tied weights like a pipeline: per stage, then over stages from the last to the
    first.

    Raises:
        ValueError: if the model's weights are not tied, or have hooks.
    """
    ties = [tie for tie in ties if len(tie.stages) > 1]  # within one stage, autograd sums a pipeline's uses, too
    replaced = _separate(model, ties)
    try:
        shared = [_shared(model, tie) for tie in ties]
        for weight in shared:
            weight.check_hooks()
        with _aliases_in(shared):
            yield
    finally:
        for holder, name, module in replaced:
            children_of(holder)[name] = module


def ties_in(model: nn.Module, ties: Sequence[Tie]) -> list[Tie]:
    """The pipeline's ties whose uses are distinct in the unsplit model, with its names.

    If stages came from a function or a trace, the model's names may lack the number of the stage. A weight that one
    module uses several times has one name, so autograd sums its uses in its own order.
    """
    present = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    found = []
    for tie in ties:
        for names in (tie.names, tuple(name.partition(".")[2] for name in tie.names)):
            if len(set(names)) == len(names) and present.issuperset(names):
                found.append(Tie(names, tie.members))
                break
    return found


@contextmanager
def _aliases_in(shared: Sequence[Shared]) -> Iterator[None]:
    for weight in shared:
        weight.set_aside()
        weight.bind_alias()
    try:
        yield
    finally:
        for weight in shared:
            weight.add_up(weight.grads())
            weight.unbind_alias()


def _separate(model: nn.Module, ties: Sequence[Tie]) -> list[tuple[nn.Module, str, nn.Module]]:
    """Copy modules that parts of several stages share, like `own_modules` for those of a pipeline.

    Returns:
        The modules that were replaced, with their holders and names there.
    """
    stages = {name: stage for tie in ties for (stage, _), name in zip(tie.members, tie.names, strict=True)}
    seen: dict[int, set[int]] = {}
    made: dict[int, Made] = {}
    replaced = []
    paths = {(stage, _own_part(name, stages)) for name, stage in stages.items()}
    for stage, path in sorted((stage, path) for stage, path in paths if path):
        part = model.get_submodule(path)
        if any(earlier & with_parameters(part) for other, earlier in seen.items() if other != stage):
            parent, _, name = path.rpartition(".")
            holder = model.get_submodule(parent)
            replaced.append((holder, name, part))
            part = children_of(holder)[name] = twin(part, made.setdefault(stage, {}))
        seen.setdefault(stage, set()).update(with_parameters(part))
    return replaced


def _own_part(name: str, stages: Mapping[str, int]) -> str:
    """The path of the outermost module around a tied weight that has none of another stage; empty if the model has the
    weight beside its modules."""
    steps = name.split(".")
    paths = [".".join(steps[:number]) for number in range(1, len(steps))]
    others = [other for other, stage in stages.items() if stage != stages[name]]
    return next((path for path in paths if not any(other.startswith(f"{path}.") for other in others)), "")


def _shared(model: nn.Module, tie: Tie) -> Shared:
    """A weight of the unsplit model, which is the module of every stage here."""
    first = parameter_of(model, tie.names[0], tie.names[0])
    for name in tie.names:
        if parameter_of(model, name, name) is not first:
            raise ValueError(f"model: {name} and {tie.names[0]} are one weight in the pipeline but not in the model")
    members = tuple((stage, name) for name, (stage, _) in zip(tie.names, tie.members, strict=True))
    return Shared(Tie(tie.names, members), dict.fromkeys(tie.stages, model))


@dataclass
class Reference:
    """The results of the unsplit model.

    Attributes:
        losses: of every microbatch, as the loss function returned them.
    """

    loss: torch.Tensor
    losses: list[torch.Tensor]
    outputs: list[Any]
    metrics: dict[str, Any]
    added_losses: dict[str, torch.Tensor]


def reference_step(
    model: nn.Module | Sequence[nn.Module],
    batch: tuple[Any, Any],
    schedule: Schedule,
    loss_fn: Callable[..., Any] | None = None,
    *,
    loss_reduction: str | Callable[[Any], float] = "mean",
    split_rules: Rules = None,
    kwargs: Mapping[str, Any] | None = None,
    rng: str | None = None,
    seed: int | None = None,
    step_count: int = 0,
    partition: str | Sequence[int] = "layers",
    ties: Sequence[Tie] = (),
    metrics: MetricRules = "mean",
    loss_scale: torch.Tensor | float | None = None,
    grad_dtype: torch.dtype | None = None,
) -> Reference:
    """Run one step of the unsplit model; on a CPU every pipelined step must equal it, bit for bit.

    Microbatches run one after the other, in the order of the schedule's B or W; each loss is scaled before its
    backward; gradients accumulate in ``.grad``. Buffers that a forward changes (BatchNorm's) follow this order; those
    of a pipeline follow the order of its forwards, which differs in some schedules (``looped_bfs``).

    Args:
        model: the whole model, or the list of its layers.
        batch: ``(input, target)``; the input may be a tuple of arguments, the target None without a loss function.
        schedule: gives the number and order of microbatches.
        loss_fn: ``loss_fn(output, target)``; without it the model returns its loss (a scalar, or a dict with
            ``"loss"``).
        loss_reduction, metrics: as for `fastpipe.Pipeline`.
        split_rules: as ``split`` of `fastpipe.Pipeline`.
        kwargs: keyword arguments of the model.
        rng: ``"per_microbatch"`` for the random numbers of a Pipeline with this ``rng``. The model must then be the
            list of its layers, as the numbers depend on the stages.
        seed: with ``rng``: `torch.initial_seed` at the construction of the Pipeline. Default: the present one.
        step_count: with ``rng``: the Pipeline's before its step.
        partition: with ``rng``: as for `fastpipe.Pipeline`.
        ties: tied weights whose uses are summed stage by stage, like in a pipeline (its ``_local.ties``). Without them
            autograd sums a microbatch's uses first, which differs only by rounding.
        loss_scale: multiplies each share of the loss before its backward, like `fastpipe.GradScaler`.
        grad_dtype: as for `fastpipe.Pipeline`; the model's parameters keep it.

    Returns:
        The losses and metrics; the gradients are in ``.grad``.

    Raises:
        ValueError: for a schedule without a backward, or another ``rng``.
        TypeError: with ``rng``, for a model that is not a list of layers.
    """
    if schedule.forward_only:
        raise ValueError(f"schedule: {schedule.name} has no backward, so there is no training step")
    layers = None if has_own_forward(model) else as_layers(model)
    model = whole(model)
    if grad_dtype is not None:
        set_grad_dtype(model, grad_dtype)
    inputs, target = batch
    given, count = as_inputs((inputs,)), schedule.num_microbatches
    names = input_names(len(given))
    columns = [split(value, count, split_rules, i, names[i]) for i, value in enumerate(given)]
    args = by_microbatch(columns, count)
    named = {name: split(value, count, split_rules, name) for name, value in (kwargs or {}).items()}
    targets = None if loss_fn is None else split(target, count, split_rules, "target")
    counted = count_rows(targets, columns, named, split_rules)
    divided = loss_divisors(loss_reduction, None, targets, count) if callable(loss_reduction) else None
    weights = weights_of(loss_reduction, divided, None if counted is None else counted[1], count)
    divisors: Sequence[float | None] = weights.loss or [None] * count
    losses: dict[int, torch.Tensor] = {}
    scaled: dict[int, torch.Tensor] = {}
    outputs: dict[int, Any] = {}
    # by stage; here there is one
    returned: Values = {0: {}}
    added: Values = {0: {}}

    def finish(i: int, output: Any, carried: Mapping[str, Any]) -> Any:
        """Compute loss and metrics from a microbatch's output and carried values."""
        taken, others = loss_arguments((output, selected(carried, names_of(loss_fn))), divisors[i])
        found, measured = (
            (returned_loss(output), {})
            if loss_fn is None or targets is None
            else loss_and_metrics(loss_fn(taken, targets[i], **others))
        )
        losses[i], returned[0][i] = checked_loss(found), list(measured.items())
        return output

    with tied_reference(model, ties), _separate_halves(model, schedule) as next_half:
        forward = _forward_of(model, layers, finish, rng, seed, step_count, partition, schedule.num_stages)
        for i in backward_order(schedule):
            next_half(i)
            with AddedLosses() as collected:
                output = forward(i, args[i], {name: named[name][i] for name in named})
            scaled[i], share = scale_loss(losses[i], divisors[i]), collected.share(divisors[i])
            root = scaled[i] if share is None else scaled[i] + share
            if root.requires_grad or divisors[i] != math.inf:  # with weight 0 the loss may be a constant
                root = root if loss_scale is None else root * loss_scale
                with without_autocast(root.device.type):
                    torch.autograd.backward(root)
            outputs[i], added[0][i] = detached(output), collected.detached()
    return Reference(
        sum_in_order([scaled[i].detach() for i in range(count)]),
        [losses[i].detach() for i in range(count)],
        [outputs[i] for i in range(count)],
        reduce_metrics(returned, count, weights, metrics),
        added_by_name(added, weights),
    )


Forward = Callable[[int, tuple[Any, ...], Mapping[str, Any]], Any]
"""The model's forward of one microbatch, of arguments by position and by name."""


def _forward_of(
    model: nn.Module,
    layers: Layers | None,
    finish: Callable[[int, Any, Mapping[str, Any]], Any],
    rng: str | None,
    seed: int | None,
    step: int,
    partition: Any,
    num_stages: int,
) -> Forward:
    """The model's forward of one microbatch, with its loss by `finish`.

    With `rng` it runs stage by stage, each from the generator state of the pipeline.
    """
    if rng is None:
        return lambda microbatch, args, kwargs: finish(microbatch, *split_carried(model(*args, **kwargs)))
    if rng != PER_MICROBATCH:
        raise ValueError(f"rng = {rng!r}: use None or {PER_MICROBATCH!r}")
    if isinstance(model, Chain | nn.Sequential | nn.ModuleList):
        # `tied_reference` may have replaced children
        modules: Any = children_of(model)
        layers = Layers(modules.values(), modules)
    if layers is None:
        raise TypeError(f"model is a {type(model).__name__}: with rng = {rng!r} give the list of the model's layers")
    stages = [layers.chain(part) for part in layer_ranges(layers, num_stages, partition)]
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    generators = Generators(device)
    seed = torch.initial_seed() if seed is None else seed

    def forward(microbatch: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        value: Any = args
        named = dict(kwargs)
        carried: dict[str, Any] = {}
        for index, stage in enumerate(stages):
            with generators.seeded(microbatch_seed(seed, step, index, microbatch)):
                value, values = split_carried(stage(*value, **selected(named, accepted_names(stage))))
                carried |= values
                if index == num_stages - 1:
                    return finish(microbatch, value, carried)
            named |= values
            value = as_arguments(value)

    return forward


def backward_order(schedule: Schedule) -> list[int]:
    """The microbatches in the order in which weight gradients of stage 0 are summed, route by route."""
    kinds = (ActionKind.B, ActionKind.W)
    parts = [part for rank in schedule for action in rank for part in action.parts]
    order = [part.microbatch for part in parts if part.stage == 0 and part.kind in kinds]
    return sorted(order, key=lambda i: schedule.placement.route_of(i, schedule.num_microbatches))


@contextlib.contextmanager
def _separate_halves(model: nn.Module, schedule: Schedule) -> Iterator[Callable[[int], None]]:
    """With two copies of the stages, sum the gradients of each half separately, then add their sum to ``.grad``."""
    if schedule.placement.num_routes == 1:
        yield lambda microbatch: None
        return
    parameters = list(model.parameters())
    sums = [[p.grad for p in parameters]]
    route = 0

    def save_grads() -> None:
        sums.append([p.grad for p in parameters])
        for parameter in parameters:
            parameter.grad = None

    def next_half(microbatch: int) -> None:
        nonlocal route
        if schedule.placement.route_of(microbatch, schedule.num_microbatches) != route:
            route = 1
            save_grads()

    for parameter in parameters:
        parameter.grad = None
    yield next_half
    save_grads()
    before, first, second = sums
    for parameter, a, b, c in zip(parameters, before, first, second, strict=True):
        half_sum = b if c is None else c if b is None else b + c
        parameter.grad = a if half_sum is None else half_sum if a is None else a + half_sum
