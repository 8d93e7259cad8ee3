"""From the user's ``stages`` to the modules of the local stages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from fastpipe.runtime.common import check_shapes, first_line, located, parameters_of, tensors_of, walked
from fastpipe.runtime.data_parallel import unwrapped
from fastpipe.runtime.model.chain import WholeNames, as_layers, check_whole_unhooked
from fastpipe.runtime.model.cuts import layer_ranges
from fastpipe.runtime.model.tied import Tie, make_ties, split_name, tied_names
from fastpipe.runtime.model.torch_stages import TracedStage, device_of

Stages = Sequence[nn.Module] | nn.Sequential | nn.ModuleList | Callable[[int], nn.Module] | Mapping[int, nn.Module]


def build_modules(stages: Stages, num_stages: int, local: Sequence[int], partition: Any) -> dict[int, nn.Module]:
    """The module of every local stage.

    Args:
        stages: the model's layers, a function of the stage's index, or a dict of the local stages.
        partition: ``"layers"``, or the number of layers per stage.
    """
    if isinstance(stages, Mapping):
        return _with_shapes(_from_mapping(stages, num_stages, local))
    layers = as_layers(stages)
    if layers is not None:
        check_whole_unhooked(stages)
        ranges = layer_ranges(layers, num_stages, partition)
        return {stage: layers.chain(ranges[stage]) for stage in local}
    if isinstance(stages, nn.Module | type) or not callable(stages):
        raise TypeError(
            f"stages is a {type(stages).__name__}: give the list of the model's layers (or an nn.Sequential), a "
            "function stage_index -> nn.Module, a dict {stage_index: nn.Module}, or the stages or Pipe of "
            "torch.distributed.pipelining"
        )
    made = {stage: stages(stage) for stage in local}
    for stage, module in made.items():
        if not isinstance(module, nn.Module):
            raise TypeError(f"stages({stage}) returned a {type(module).__name__}: return an nn.Module")
    return _with_shapes(made)


def _with_shapes(modules: dict[int, nn.Module]) -> dict[int, nn.Module]:
    for stage, module in modules.items():
        check_shapes(f"stages[{stage}]", module)
    return modules


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
    """The weights with several names: declared ones, and Parameters shared within this process.

    Raises:
        ValueError: for an unknown name.
    """
    layers = as_layers(stages)
    if layers is not None:
        ranges = layer_ranges(layers, num_stages, partition)
        parts = [dict(layers.chain(part).named_parameters(remove_duplicate=False)) for part in ranges]
        names = tied_names(layers.chain(range(len(layers))), [*(declared or ()), *layers.tied])
        return make_ties(names, lambda name: _in_parts(name, parts))
    local = nn.ModuleDict({str(stage): unwrapped(module) for stage, module in modules.items()})
    return make_ties(tied_names(local, declared), lambda name: split_name(name, num_stages))


def _in_parts(name: str, parts: Sequence[Mapping[str, nn.Parameter]]) -> tuple[int, str]:
    for stage, part in enumerate(parts):
        if name in part:
            return stage, name
    known = [name for part in parts for name in part] or ["none"]
    if name.partition(".")[0] in {other.partition(".")[0] for other in known}:
        raise ValueError(f"tied: {name} is no parameter of the model")
    raise ValueError(f"tied: {name!r} names no layer; names begin with the layer's, as {known[0]} does")


def check_device(modules: Mapping[int, nn.Module], device: torch.device) -> None:
    """Refuse a stage on another device than the pipeline's; it may still be on meta."""
    for stage, module in modules.items():
        for name, tensor in tensors_of(module):
            if tensor.is_meta:
                continue
            if tensor.device.type != device.type or (device.index not in (None, tensor.device.index)):
                raise ValueError(
                    f"stages: {name} of stage {stage} is on {tensor.device} but device = {device}; move the stage with "
                    f"module.to({str(device)!r}), or pass device={str(tensor.device)!r}"
                )


def find_device(modules: Any, device: str | torch.device | None) -> torch.device:
    """The given device, else that of the first parameter, else the CPU; if all are on meta, torch's default device.

    Raises:
        ValueError: if torch has no such device here, or it is meta.
    """
    if device is not None:
        try:
            wanted = torch.device(device)
        except (RuntimeError, TypeError) as error:
            raise ValueError(f"device = {device!r}: {first_line(error)}") from None
        return located(_computing(wanted))
    there = device_of(modules)
    if there is not None and there.type != "meta":
        return there
    candidates: Any = ()
    if isinstance(modules, Mapping):
        candidates = modules.values()
    elif isinstance(modules, Sequence | nn.Sequential | nn.ModuleList):
        candidates = modules
    found = {p.device: None for module in candidates if isinstance(module, nn.Module) for p in module.parameters()}
    for device_here in found:
        if device_here.type != "meta":
            return device_here
    return located(_computing(torch.get_default_device())) if found or there else torch.device("cpu")


def _computing(device: torch.device) -> torch.device:
    if device.type == "meta":
        raise ValueError(
            "device is meta, which computes nothing: pass the device on which stages will compute, device='cpu' for "
            "example; the layers may be on meta until pipe.to_empty()"
        )
    return device


class NamedParameter(NamedTuple):
    """A parameter of this process.

    Attributes:
        stage: its stage; of a tied weight the first stage of the model that uses it.
        name: in the unsplit model; of a tied weight the first one.
        is_echo: whether another process also has it, in that first stage.
    """

    stage: int
    name: str
    parameter: nn.Parameter
    is_echo: bool


def named_parameters(
    modules: Mapping[int, nn.Module], first_names: Mapping[str, tuple[int, str]]
) -> Iterator[NamedParameter]:
    """Every parameter of the local stages once, in the unsplit model's order; of tied shards the first.

    Args:
        first_names: from further names of tied weights to the weight's first stage and name.
    """
    seen: set[int | str] = set()
    for stage, module in sorted(modules.items()):
        prefix = state_prefix(module, stage)
        for name, parameter in unwrapped(module).named_parameters():
            first = first_names.get(prefix + name)
            known = first or (stage, prefix + name)
            if not seen & {id(parameter), known[1]}:
                seen |= {id(parameter), known[1]}
                yield NamedParameter(*known, parameter, first is not None)


def prefixes_message(modules: Mapping[int, nn.Module]) -> dict[str, str]:
    """By stage of this process, the prefix of its module's keys."""
    return {str(stage): state_prefix(module, stage) for stage, module in modules.items()}


def prefixes_of(messages: Iterable[Mapping[str, str]]) -> dict[int, str]:
    """The prefixes of all processes, by stage."""
    return {int(stage): prefix for message in messages for stage, prefix in message.items()}


def state_prefix(module: nn.Module, stage: int) -> str:
    """The prefix of a module's keys; empty for a part of a list of layers, which has the unsplit model's keys."""
    own = unwrapped(module)
    whole = isinstance(own, WholeNames) or (isinstance(own, TracedStage) and own.whole_names)
    return "" if whole else f"{stage}."


def flags_of(module: nn.Module) -> list[bool]:
    """The flags of a module that may change between steps: training modes and gradient flags.

    Computed in every step.
    """
    flags = []
    for found in walked(module):
        flags.append(found.training)
        parameters = parameters_of(found)
        if parameters:
            flags += [parameter.requires_grad for parameter in parameters.values() if parameter is not None]
    return flags
