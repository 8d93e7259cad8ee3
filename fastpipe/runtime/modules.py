"""From what the user gives as ``stages`` to the modules of the local stages."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from fastpipe.partition import partition as partition_layers
from fastpipe.runtime.chain import Chain
from fastpipe.runtime.layer_costs import layer_costs
from fastpipe.runtime.tied import Tie, make_ties, split_name, tied_names
from fastpipe.runtime.wrappers import unwrapped

Stages = Sequence[nn.Module] | nn.Sequential | nn.ModuleList | Callable[[int], nn.Module] | Mapping[int, nn.Module]


def build_modules(stages: Stages, num_stages: int, local: Sequence[int], partition: Any) -> dict[int, nn.Module]:
    """The module of every local stage.

    Args:
        stages: the model's layers, a function of the stage's index, or a dict of the local stages.
        num_stages: how many stages the model is cut into.
        local: the stages of this process.
        partition: ``"layers"``, or the number of layers of every stage.

    Raises:
        TypeError, ValueError: naming ``stages`` or ``partition`` and what to give.
    """
    if isinstance(stages, Mapping):
        return _from_mapping(stages, num_stages, local)
    if isinstance(stages, Sequence | nn.Sequential | nn.ModuleList):
        layers = list(stages)
        ranges = layer_ranges(layers, num_stages, partition)
        return {stage: Chain({i: layers[i] for i in ranges[stage]}) for stage in local}
    if isinstance(stages, nn.Module) or not callable(stages):
        raise TypeError(
            f"stages is a {type(stages).__name__}: give the list of the model's layers (or an nn.Sequential), a "
            "function stage_index -> nn.Module, or a dict {stage_index: nn.Module}"
        )
    made = {stage: stages(stage) for stage in local}
    for stage, module in made.items():
        if not isinstance(module, nn.Module):
            raise TypeError(f"stages({stage}) returned a {type(module).__name__}: return an nn.Module")
    return made


def _from_mapping(stages: Mapping[int, nn.Module], num_stages: int, local: Sequence[int]) -> dict[int, nn.Module]:
    for stage, module in stages.items():
        if not isinstance(stage, int) or not 0 <= stage < num_stages:
            raise ValueError(f"stages has the key {stage!r}: stages are 0 to {num_stages - 1}")
        if not isinstance(module, nn.Module):
            raise TypeError(f"stages[{stage}] is a {type(module).__name__}: give an nn.Module")
    missing = [stage for stage in local if stage not in stages]
    if missing:
        raise ValueError(f"stages lacks stage {missing[0]}, which this process computes: it needs {list(local)}")
    return {stage: stages[stage] for stage in local}


def find_ties(
    stages: Stages,
    modules: Mapping[int, nn.Module],
    num_stages: int,
    partition: Any,
    declared: Sequence[Sequence[str]] | None,
) -> list[Tie]:
    """The weights that have several names: those declared, and those that share a Parameter where it can be seen.

    Raises:
        ValueError: for a name that there is not.
    """
    if isinstance(stages, Sequence | nn.Sequential | nn.ModuleList):
        layers = list(stages)
        ranges = layer_ranges(layers, num_stages, partition)
        stage_of = {str(layer): stage for stage, part in enumerate(ranges) for layer in part}
        return make_ties(tied_names(Chain(dict(enumerate(layers))), declared), lambda n: _in_chain(n, stage_of))
    local = nn.ModuleDict({str(stage): module for stage, module in modules.items()})
    return make_ties(tied_names(local, declared), lambda name: split_name(name, num_stages))


def _in_chain(name: str, stage_of: Mapping[str, int]) -> tuple[int, str]:
    layer = name.partition(".")[0]
    if layer not in stage_of:
        raise ValueError(
            f"tied: {name!r} names no layer; names begin with the layer's number, 0 to {len(stage_of) - 1}"
        )
    return stage_of[layer], name


def layer_ranges(layers: Sequence[nn.Module], num_stages: int, partition: Any) -> list[range]:
    """Which layers every stage has."""
    for index, layer in enumerate(layers):
        if not isinstance(layer, nn.Module):
            raise TypeError(f"stages[{index}] is a {type(layer).__name__}: the layers are nn.Modules")
    if partition in ("layers", "parameters"):
        if len(layers) < num_stages:
            raise ValueError(
                f"stages has {len(layers)} layers and the schedule has {num_stages} stages: give at least one layer a "
                "stage, or use fewer ranks or stages_per_rank"
            )
        return partition_layers(len(layers) if partition == "layers" else layer_costs(layers, by=partition), num_stages)
    if isinstance(partition, str) and re.fullmatch(r"\s*\d+(\s*,\s*\d+)*\s*", partition):
        partition = [int(count) for count in partition.split(",")]
    if isinstance(partition, str) or not isinstance(partition, Sequence):
        raise ValueError(
            f"partition = {partition!r}: use 'layers', 'parameters', or the number of layers of every stage, as a list "
            "or as text like '3,2,2,1'"
        )
    return _explicit(list(partition), len(layers), num_stages)


def cut_text(stages: Stages, num_stages: int, partition: Any) -> str:
    """Where a list of layers is cut, and how far the largest stage is from the mean; empty for other forms."""
    if isinstance(stages, Mapping) or not isinstance(stages, Sequence | nn.Sequential | nn.ModuleList):
        return ""
    layers = list(stages)
    ranges = layer_ranges(layers, num_stages, partition)
    listed = " | ".join(f"{part[0]}-{part[-1]}" if len(part) > 1 else str(part[0]) for part in ranges)
    return f"layers {listed}; {_imbalance(layer_costs(layers, by='parameters'), ranges)}"


def _imbalance(costs: Sequence[float], ranges: Sequence[range]) -> str:
    sums = [sum(costs[layer] for layer in part) for part in ranges]
    if not sum(sums):
        return "no parameters"
    largest = max(sums)
    excess = largest * len(sums) / sum(sums) - 1
    return f"stage {sums.index(largest)} has most parameters, {excess:.1%} above the mean"


def _explicit(counts: list[Any], num_layers: int, num_stages: int) -> list[range]:
    counts = [len(count) if isinstance(count, range) else count for count in counts]
    if len(counts) != num_stages or any(not isinstance(c, int) or c < 1 for c in counts) or sum(counts) != num_layers:
        raise ValueError(
            f"partition = {counts}: give {num_stages} numbers of at least 1, one a stage, that sum to the "
            f"{num_layers} layers"
        )
    ends = [sum(counts[: i + 1]) for i in range(num_stages)]
    return [range(end - count, end) for count, end in zip(counts, ends, strict=True)]


def check_device(modules: Mapping[int, nn.Module], device: torch.device) -> None:
    """Refuse a stage that is not where the pipeline computes."""
    for stage, module in modules.items():
        for name, tensor in tensors_of(module):
            if tensor.device.type != device.type or (device.index not in (None, tensor.device.index)):
                raise ValueError(
                    f"stages: {name} of stage {stage} is on {tensor.device} and device = {device}; move the stage with "
                    f"module.to({str(device)!r}), or pass device={str(tensor.device)!r}"
                )


def tensors_of(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers."""
    yield from module.named_parameters()
    yield from module.named_buffers()


def find_device(modules: Any, device: str | torch.device | None) -> torch.device:
    """The device that the user names, else that of the first parameter there is, else the CPU."""
    if device is not None:
        return torch.device(device)
    candidates: Any = ()
    if isinstance(modules, Mapping):
        candidates = modules.values()
    elif isinstance(modules, Sequence | nn.Sequential | nn.ModuleList):
        candidates = modules
    for module in candidates:
        for parameter in module.parameters() if isinstance(module, nn.Module) else ():
            return parameter.device
    return torch.device("cpu")


class Named(NamedTuple):
    """A parameter of this process.

    Attributes:
        stage: where it is; of a tied weight the first stage of the model that uses it.
        name: in the whole model; of a tied weight the first one.
        parameter: it.
        is_echo: whether another process has it, too, in that first stage.
    """

    stage: int
    name: str
    parameter: nn.Parameter
    is_echo: bool


def named_parameters(modules: Mapping[int, nn.Module], first_names: Mapping[str, tuple[int, str]]) -> Iterator[Named]:
    """Every parameter of the local stages once, in the order of the unsplit model's.

    Args:
        modules: by stage.
        first_names: from the further names of tied weights to the stage and name under which each is known.
    """
    seen: set[int] = set()
    for stage, module in sorted(modules.items()):
        prefix = state_prefix(module, stage)
        for name, parameter in unwrapped(module).named_parameters():
            if id(parameter) not in seen:
                seen.add(id(parameter))
                first = first_names.get(prefix + name)
                yield Named(*(first or (stage, prefix + name)), parameter, first is not None)


def state_prefix(module: nn.Module, stage: int) -> str:
    """What goes before a module's own keys: a chain of layers has the whole model's keys already."""
    return "" if isinstance(unwrapped(module), Chain) else f"{stage}."


def flags_of(module: nn.Module) -> list[bool]:
    """What may change from step to step in a module and what it hands on: training modes and gradient flags.

    ``parameters()`` makes the names on its way, which takes ten times as long, in every step.
    """
    flags = []
    pending, seen = [module], {module}
    while pending:
        found = pending.pop()
        flags.append(found.training)
        flags += [parameter.requires_grad for parameter in found._parameters.values() if parameter is not None]
        children = [child for child in found._modules.values() if child is not None and child not in seen]
        seen.update(children)
        pending += children
    return flags
