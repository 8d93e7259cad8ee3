"""From the user's ``stages`` to the modules of the local stages.

Stages on the meta device are cut and agreed on without memory, and given memory and values before the first step.
`Unfilled.to_empty` keeps the identity of every tensor, by `torch.utils.swap_tensors`: tied weights stay one Parameter,
and optimizers that exist already have it. It fills new tensors with NaN, or the largest integer. So a tensor that was
never initialised is found before the first step, in particular a buffer that no checkpoint has.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import nn

from fastpipe.runtime.common import (
    allocate,
    check_shapes,
    children_of,
    first_line,
    is_dtensor,
    listed,
    local_part,
    located,
    parameters_of,
    tensors_of,
    torch_private,
    version_of,
    walked,
)
from fastpipe.runtime.data_parallel import unwrapped
from fastpipe.runtime.model.chain import Layers, WholeNames, check_whole_unhooked
from fastpipe.runtime.model.tied import (
    SHARDED,
    Shared,
    Tie,
    kind_of_tie,
    make_ties,
    split_name,
    tied_names,
)
from fastpipe.runtime.model.torch_stages import device_of

Stages = Sequence[nn.Module] | nn.Sequential | nn.ModuleList | Callable[[int], nn.Module] | Mapping[int, nn.Module]


def build_modules(
    stages: Stages, num_stages: int, local: Sequence[int], ranges: Sequence[range]
) -> dict[int, nn.Module]:
    """The module of every local stage.

    Args:
        stages: the model's `Layers`, a function of the stage's index, or a dict of the local stages.
        ranges: the layers of every stage.
    """
    if isinstance(stages, Layers):
        check_whole_unhooked(stages.whole)
        return {stage: stages.chain(ranges[stage]) for stage in local}
    if isinstance(stages, Mapping):
        made = _from_mapping(stages, num_stages, local)
    elif isinstance(stages, nn.Module | type) or not callable(stages):
        raise TypeError(
            f"stages is a {type(stages).__name__}: give the list of the model's layers, as fastpipe.split(model) "
            "returns it for many models, an nn.Sequential, a function stage_index -> nn.Module, a dict {stage_index: "
            "nn.Module}, or the stages or Pipe of torch.distributed.pipelining"
        )
    else:
        made = {stage: stages(stage) for stage in local}
    for stage, module in made.items():
        if not isinstance(module, nn.Module):
            raise TypeError(f"stages({stage}) returned a {type(module).__name__}: return an nn.Module")
        check_shapes(f"stages[{stage}]", module)
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


Holder = tuple[str, weakref.ref[nn.Module], dict[str, weakref.ref[nn.Module] | None]]
"""A module that is not called and has some that are: its path, and the called ones by name; None for others."""


def _holders_of(whole: nn.Module | None, modules: Mapping[int, nn.Module]) -> list[Holder]:
    """The modules of the unsplit model from which stages have taken members, and the members of these stages."""
    own = {id(module) for stage in modules.values() for module in stage.modules()}
    found: list[Holder] = []
    for path, holder in whole.named_modules() if whole is not None else ():
        members = children_of(holder)
        if id(holder) not in own and any(id(member) in own for member in members.values()):
            taken = {name: weakref.ref(m) if m is not None and id(m) in own else None for name, m in members.items()}
            found.append((f"{path}." if path else "", weakref.ref(holder), taken))
    return found


class RestOfModel:
    """What this process has of the user's model and does not compute.

    Nothing in a step may use the parameters of layers that other processes compute: the gradient would be lost, and the
    values are those of the beginning. The module that has all layers is not called, so it may have no hooks, and what
    replaces a layer there would not be called either.

    Args:
        modules: the stages of this process.
    """

    def __init__(self, layers: Layers | None, modules: Mapping[int, nn.Module], ties: Sequence[Tie]) -> None:
        own = {id(parameter) for module in modules.values() for parameter in module.parameters()}
        named = () if layers is None else layers.chain(range(len(layers))).named_parameters()
        whole = None if layers is None else layers.whole
        # the caller may let go of them
        self._whole = None if whole is None else weakref.ref(whole)
        self._modules = modules
        self._known = weakref.WeakSet(() if whole is None else whole.modules())
        self._holders = _holders_of(whole, modules)
        # a stage needs nothing for them, but optimizers and states know the first name only
        self._tied = [Shared(tie, modules) for tie in ties if len(tie.stages) == 1 and tie.stages[0] in modules]
        self._parameters = [(name, weakref.ref(parameter)) for name, parameter in named if id(parameter) not in own]
        self._before: dict[str, tuple[int, int] | None] | None = None
        self._is_unused = False

    def check_unchanged(self) -> None:
        """Refuse hooks and layers that were added to the whole module after the Pipeline was built, and weights of one
        stage that are no longer tied."""
        for weight in self._tied:
            weight.adopt()
        if self._whole is not None:
            check_whole_unhooked(self._whole())
        for path, reference, taken in self._holders:
            holder = reference()
            for name, layer in children_of(holder).items() if holder is not None else ():
                before = taken.get(name)
                if layer is None or (before is not None and before() is layer):
                    continue
                is_added = name not in taken and isinstance(holder, nn.Sequential | nn.ModuleList)
                own = (module for stage in self._modules.values() for module in stage.modules())
                is_placed = before is not None or is_added
                if is_placed and layer not in self._known and all(module is not layer for module in own):
                    how = "added" if is_added else "put in the place of another module"
                    raise ValueError(
                        f"model: {path}{name}, a {type(layer).__name__}, was {how} after the Pipeline was built, and "
                        "its stages would not call it; build the Pipeline after changes of whole layers"
                    )

    def begin(self, step: int) -> None:
        """Note the gradients, until a step has used none, and in every 256th step."""
        self._before = None if self._is_unused and step % 256 else self._grads()

    def check(self) -> None:
        """Refuse a step that has added to a gradient.

        Raises:
            ValueError: naming the parameter.
        """
        if self._before is None:
            return
        now = self._grads()
        used = [name for name in now if now[name] != self._before[name]]
        self._is_unused = not used
        if used:
            raise ValueError(
                f"stages: loss_fn or a layer of this rank uses {listed(used)}, of layers that other ranks compute: "
                "here these are copies that are never trained, and their gradient is lost. For a shared weight, assign "
                "the Parameter or its module as an attribute of each layer that uses it (a list or a closure hides "
                "it), so that it is tied; for a penalty, call fastpipe.add_loss in the layer that has the parameter, "
                "or add the penalty's gradient to .grad after pipe.step"
            )

    def _grads(self) -> dict[str, tuple[int, int] | None]:
        """Identity and version of every gradient."""
        found = {}
        for name, reference in self._parameters:
            parameter = reference()
            grad = None if parameter is None else parameter.grad
            found[name] = None if grad is None else (id(grad), version_of(grad))
        return found


def find_ties(
    layers: Layers | None,
    modules: Mapping[int, nn.Module],
    num_stages: int,
    ranges: Sequence[range],
    declared: Sequence[Sequence[str]] | None,
) -> list[Tie]:
    """The weights with several names: declared ones, and Parameters shared within this process.

    Raises:
        ValueError: for an unknown name.
    """
    if layers is not None:
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


def check_memory(layers: Layers | None, modules: Mapping[int, nn.Module], ties: Sequence[Tie]) -> None:
    """Refuse two tensors over the same memory, one of this process's stages and one of another's, if one is trained.

    In the unsplit model an optimizer that changes one changes the other.

    Args:
        ties: of the model, whose weights may share memory.

    Raises:
        ValueError: naming both.
    """
    if layers is None:
        return
    own = {id(tensor) for module in modules.values() for _, tensor in tensors_of(module)}
    first_names = {name: tie.names[0] for tie in ties for name in tie.names}
    none = 0, "", False
    last: dict[tuple[str, bool], tuple[int, str, bool]] = {}  # of each device, in own and in other stages
    for device, start, end, name, is_own, is_trained in sorted(_memory_of(layers.chain(range(len(layers))), own)):
        other_end, other, is_other_trained = last.get((device, not is_own), none)
        if start < other_end and (is_trained or is_other_trained):
            first, second = sorted((other, name))
            if first_names.get(first, first) != first_names.get(second, second):
                raise ValueError(
                    f"stages: {first} and {second} are two tensors over the same memory, in stages of different "
                    "processes, where training changes one without the other: assign one nn.Parameter to both layers, "
                    "and take views of it in the forward; if they are not one weight, clone() one"
                )
        if end >= last.get((device, is_own), none)[0]:
            last[device, is_own] = end, name, is_trained


def _memory_of(model: nn.Module, own: Container[int]) -> Iterator[tuple[str, int, int, str, bool, bool]]:
    """Of each tensor: device, begin and end, name, whether it is one of these, and whether it is trained."""
    for name, tensor in tensors_of(model):
        local = local_part(tensor)
        if type(local) in (torch.Tensor, nn.Parameter) and local.layout is torch.strided and local.numel():
            extent = 1 + sum((size - 1) * step for size, step in zip(local.shape, local.stride(), strict=True))
            start, is_trained = local.data_ptr(), isinstance(tensor, nn.Parameter)
            if start:  # none on meta
                end = start + extent * local.element_size()
                yield str(local.device), start, end, name, id(tensor) in own, is_trained


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


Held = TypeVar("Held", bound=torch.Tensor, covariant=True)


class NamedTensor(NamedTuple, Generic[Held]):
    """A parameter of this process, or its gradient.

    Attributes:
        stage: its stage; of a tied weight the first stage of the model that uses it.
        name: in the unsplit model; of a tied weight the first one.
        is_echo: whether another process also has it, in that first stage.
    """

    stage: int
    name: str
    tensor: Held
    is_echo: bool = False


def named_parameters(
    modules: Mapping[int, nn.Module], first_names: Mapping[str, tuple[int, str]]
) -> Iterator[NamedTensor[nn.Parameter]]:
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
                yield NamedTensor(*known, parameter, first is not None)


def prefixes_message(modules: Mapping[int, nn.Module]) -> dict[str, str]:
    """By stage of this process, the prefix of its module's keys."""
    return {str(stage): state_prefix(module, stage) for stage, module in modules.items()}


def prefixes_of(messages: Iterable[Mapping[str, str]]) -> dict[int, str]:
    """The prefixes of all processes, by stage."""
    return {int(stage): prefix for message in messages for stage, prefix in message.items()}


def state_prefix(module: nn.Module, stage: int) -> str:
    """The prefix of a module's keys; empty for a part of a list of layers, which has the unsplit model's keys."""
    own = unwrapped(module)
    return "" if isinstance(own, WholeNames) and own.whole_names else f"{stage}."


def flags_of(module: nn.Module) -> list[Any]:
    """What decides outputs and may change between steps: training modes, and the parameters' gradient flags and dtypes.

    Computed in every step.
    """
    flags: list[Any] = []
    for found in walked(module):
        if isinstance(found, WholeNames):
            found.follow_modes()
        flags.append(found.training)
        parameters = parameters_of(found)
        if parameters:
            flags += [(p.requires_grad, p.dtype) for p in parameters.values() if p is not None]
    return flags


_HOW = (
    "call pipe.to_empty() and initialise the layers, or load values with fastpipe.load_checkpoint, "
    "fastpipe.load_safetensors or pipe.load_state_dict(state, assign=True)"
)


def skeleton(module: nn.Module) -> nn.Module:
    """A copy of a module whose parameters and buffers are on meta; it takes no memory for them."""
    made: dict[int, Any] = {}
    for _, tensor in tensors_of(module):
        own = torch.empty_like(tensor, device="meta", requires_grad=False)
        made[id(tensor)] = nn.Parameter(own, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else own
    return copy.deepcopy(module, made)


class Unfilled:
    """Local stages that were built on the meta device, until the first step."""

    def __init__(self, modules: Mapping[int, nn.Module], device: torch.device, ties: Sequence[Tie]) -> None:
        self._modules = modules
        self._device = device
        self._tied = [
            Shared(tie, modules)
            for tie in ties
            if any(stage in modules for stage in tie.stages) and kind_of_tie(tie, modules) != SHARDED
        ]
        self._marked: dict[int, tuple[torch.Tensor, int]] = {}  # by id, and the version after the mark was written

    def to_empty(self) -> None:
        """Give memory to what has none; compute what a stage can compute itself."""
        for stage, module in sorted(self._modules.items()):
            own, on_meta = unwrapped(module), [(name, t) for name, t in self._named(stage) if t.is_meta]
            for name, tensor in on_meta:
                if torch_private.hooks_of(tensor) or (tensor.is_leaf and torch_private.post_hooks_of(tensor)):
                    raise ValueError(
                        f"stages: {name} has a hook, which it would lose with its memory; register it after to_empty"
                    )
                allocate(tensor, self._device)
                local_part(tensor).detach().fill_(_mark(tensor.dtype))
                self._marked[id(tensor)] = tensor, version_of(local_part(tensor))
            if on_meta and isinstance(own, WholeNames):
                own.compute_buffers({id(tensor) for _, tensor in on_meta})

    def check(self) -> None:
        """Refuse to use stages without values.

        Raises:
            ValueError: naming tensors without memory or values, those on another device, and weights that are no
                longer tied, each with the remedy.
        """
        named = {stage: dict(self._named(stage)) for stage in self._modules}
        for stage, tensors in named.items():
            absent = [name for name, tensor in tensors.items() if tensor.is_meta]
            if absent:
                raise ValueError(f"stages: {listed(absent)} of stage {stage} are on the meta device: {_HOW}")
        check_device(self._modules, self._device)
        for stage, tensors in named.items():
            self._check_values(stage, tensors)
        for weight in self._tied:
            weight.adopt()

    def _check_values(self, stage: int, tensors: Mapping[str, torch.Tensor]) -> None:
        empty = [name for name, t in tensors.items() if id(t) in self._marked and _is_empty(*self._marked[id(t)])]
        if not empty:
            return
        kept = unwrapped(self._modules[stage]).state_dict()
        prefix = state_prefix(self._modules[stage], stage)
        left = [name for name in empty if name.removeprefix(prefix) not in kept]
        if left == empty:
            raise ValueError(
                f"stages: {listed(empty)} of stage {stage} have no values since to_empty, and no checkpoint has them "
                "(register_buffer(persistent=False)): compute them after pipe.to_empty(), as the layer's __init__ "
                "does, for example in its reset_parameters()"
            )
        raise ValueError(
            f"stages: {listed(empty)} of stage {stage} have no values since to_empty: initialise them, as "
            "layer.reset_parameters() does for layers of torch, or load them"
        )

    def _named(self, stage: int) -> Iterator[tuple[str, torch.Tensor]]:
        prefix = state_prefix(self._modules[stage], stage)
        for name, tensor in tensors_of(unwrapped(self._modules[stage])):
            yield prefix + name, tensor


def assignable(state: Mapping[str, Any], ties: Sequence[Tie], device: torch.device) -> dict[str, Any]:
    """A state whose tensors stages can use as they are: one Parameter for all names of a tied weight.

    Raises:
        ValueError: for a tensor on another device.
    """
    for name, value in state.items():
        if isinstance(value, torch.Tensor) and value.device.type != device.type:
            raise ValueError(
                f"the state has {name} on {value.device}, and with assign=True the stages use it as it is: move it to "
                f"{device}, or call pipe.to_empty() and load without assign"
            )
    found = dict(state)
    for tie in ties:
        names = [key for key in tie.keys if isinstance(state.get(key), torch.Tensor)]
        if names and not is_dtensor(state[names[0]]):
            found |= dict.fromkeys(names, nn.Parameter(state[names[0]].detach(), requires_grad=False))
    return found


def check_spread_alike(name: str, own: Any, given: Any) -> None:
    """Refuse to load a plain tensor into a DTensor, which torch cannot copy and assigns as it is, and the reverse."""
    if is_dtensor(own) and not is_dtensor(given):
        raise ValueError(
            f"the state has a plain {name}, and that of the stage is a DTensor: load it by fastpipe.load_checkpoint or "
            "fastpipe.load_safetensors, which spread whole tensors, or give a DTensor with the same placements"
        )
    if is_dtensor(given) and not is_dtensor(own):
        raise ValueError(
            f"the state has {name} as a DTensor, and that of the stage is a plain tensor: give its full_tensor()"
        )


def _mark(dtype: torch.dtype) -> float | int | bool:
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return True if dtype == torch.bool else torch.iinfo(dtype).max


def _is_empty(tensor: torch.Tensor, version: int) -> bool:
    """Whether nothing was written since `allocate`."""
    local = local_part(tensor).detach()
    if not local.numel() or version_of(local) != version:
        return False
    mark = _mark(local.dtype)
    whole = local.float() if local.element_size() == 1 and local.is_floating_point() else local
    return bool((whole.isnan() if mark != mark else whole == mark).all())
