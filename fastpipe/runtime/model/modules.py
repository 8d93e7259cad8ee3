"""From the user's ``stages`` to the modules of the local stages.

Of a ``PipelineStage`` of torch.distributed.pipelining fastpipe uses the module and the index. A model traced by
``pipeline()`` (a ``Pipe``) consists of stages and a graph between them, in which a value may skip stages. Here a stage
sends to the next one only, so traced stages are wrapped to forward the values that later stages need.

Stages on the meta device are cut and agreed on without memory, and given memory and values before the first step.
`Unfilled.to_empty` keeps the identity of every tensor, by `torch.utils.swap_tensors`: tied weights stay one Parameter,
and optimizers that exist already have it. It fills new tensors with NaN, or the largest integer. So a tensor that was
never initialised is found before the first step, in particular a buffer that no checkpoint has.
"""

from __future__ import annotations

import copy
import operator
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, NamedTuple, Self, TypeVar

import torch
from torch import fx, nn

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
            f"stages is a {type(stages).__name__}: give the list of the model's layers (or an nn.Sequential), a "
            "function stage_index -> nn.Module, a dict {stage_index: nn.Module}, or the stages or Pipe of "
            "torch.distributed.pipelining"
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


def _holders_of(layers: Layers | None, modules: Mapping[int, nn.Module]) -> list[Holder]:
    """The modules of the unsplit model from which stages have taken members, and the members of these stages."""
    if layers is None or layers.whole is None:
        return []
    own = {id(module) for stage in modules.values() for module in stage.modules()}
    found: list[Holder] = []
    for path, holder in layers.whole.named_modules():
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
        # the caller may let go of them
        self._whole = None if layers is None or layers.whole is None else weakref.ref(layers.whole)
        self._modules = modules
        self._known = weakref.WeakSet(() if layers is None or layers.whole is None else layers.whole.modules())
        self._holders = _holders_of(layers, modules)
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


class _Span(NamedTuple):
    """The memory of a tensor of the model."""

    device: str
    start: int
    end: int
    name: str
    is_own: bool
    is_trained: bool


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
    last: dict[tuple[str, bool], _Span] = {}
    for span in sorted(_spans(layers.chain(range(len(layers))), own)):
        other = last.get((span.device, not span.is_own))
        if other is not None and span.start < other.end and (span.is_trained or other.is_trained):
            first, second = sorted((other.name, span.name))
            if first_names.get(first, first) != first_names.get(second, second):
                raise ValueError(
                    f"stages: {first} and {second} are two tensors over the same memory, in stages of different "
                    "processes, where training changes one without the other: assign one nn.Parameter to both layers, "
                    "and take views of it in the forward; if they are not one weight, clone() one"
                )
        key = span.device, span.is_own
        last[key] = max(span, last.get(key, span), key=operator.attrgetter("end"))


def _spans(model: nn.Module, own: Container[int]) -> Iterator[_Span]:
    for name, tensor in tensors_of(model):
        local = local_part(tensor)
        if type(local) in (torch.Tensor, nn.Parameter) and local.layout is torch.strided and local.numel():
            extent = 1 + sum((size - 1) * step for size, step in zip(local.shape, local.stride(), strict=True))
            start, is_trained = local.data_ptr(), isinstance(tensor, nn.Parameter)
            if start:  # none on meta
                end = start + extent * local.element_size()
                yield _Span(str(local.device), start, end, name, id(tensor) in own, is_trained)


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


def torch_stages(stages: Any) -> list[Any]:
    """The given stage objects of torch: one, a list, or the values of a dict; empty for anything else."""
    base = torch_private.pipeline_stage_type()
    if isinstance(stages, Mapping):
        listed = list(stages.values())
    elif isinstance(stages, Sequence) and not isinstance(stages, str):
        listed = list(stages)
    else:
        listed = [stages]
    return listed if any(isinstance(stage, base) for stage in listed) else []


def is_traced(stages: Any) -> bool:
    """Whether the model was traced by ``pipeline()`` of torch."""
    return isinstance(stages, torch_private.traced_model_type())


def group_of(stages: Any) -> Any:
    """The process group of torch's stages; None if they have none."""
    return next((stage.group for stage in torch_stages(stages) if getattr(stage, "group", None) is not None), None)


def device_of(stages: Any) -> torch.device | None:
    """The device of torch's stages or traced model; None for anything else."""
    if is_traced(stages):
        return next((parameter.device for parameter in stages.parameters()), None)
    return next((torch.device(stage.device) for stage in torch_stages(stages) if hasattr(stage, "device")), None)


def torch_stages_per_rank(stages: Any, num_ranks: int) -> int | None:
    """How many of torch's stages a rank has; None for anything else, and if ranks have different numbers."""
    listed = [stages] if is_traced(stages) else torch_stages(stages)
    num_stages = max((getattr(stage, "num_stages", 0) for stage in listed), default=0)
    return None if num_stages % num_ranks else num_stages // num_ranks or None


def from_torch(
    stages: Any, num_stages: int, tied: Sequence[Sequence[str]] | None
) -> tuple[Any, Sequence[Sequence[str]] | None]:
    """Convert torch's stages and their ties; anything else is returned unchanged.

    Args:
        tied: as declared by the user; weights that several stages of a traced model use are added.

    Raises:
        ValueError, TypeError: naming ``stages``, and the remedy.
    """
    if is_traced(stages):
        _check_num_stages(stages.num_stages, num_stages, "the traced model")
        ties = _mend_stages(stages.split_gm)
        return _traced(stages), [*(tied or ()), *ties] or None
    listed = torch_stages(stages)
    if not listed:
        return stages, tied
    base = torch_private.pipeline_stage_type()
    found: dict[int, nn.Module] = {}
    shared: list[list[str]] = []
    for stage in listed:
        if not isinstance(stage, base):
            raise TypeError(f"stages has a {type(stage).__name__} beside torch's stages: give one kind or the other")
        index = stage.stage_index  # type: ignore[attr-defined]
        _check_num_stages(stage.num_stages, num_stages, f"PipelineStage {index}")  # type: ignore[attr-defined]
        if index in found:
            raise ValueError(f"stages has PipelineStage {index} twice: give every stage of this process once")
        if stage.dw_builder is not None:  # type: ignore[attr-defined]
            raise ValueError(
                f"stages: PipelineStage {index} has a dw_builder; leave it out, as fastpipe splits backwards itself"
            )
        info = getattr(stage, "pipe_info", None)
        module: nn.Module = stage.submod  # type: ignore[attr-defined]
        if info is not None:
            shared = shared or _mend_stages(torch_private.module_of(info.graph))
            module = TracedStage(module, info.graph, index, whole_names=False)
        found[index] = module
    return found, [*(tied or ()), *shared] if shared else tied


def _check_num_stages(there: int, num_stages: int, what: str) -> None:
    if there != num_stages:
        raise ValueError(
            f"stages: {what} is of {there} stages but the schedule has {num_stages}: use stages_per_rank, or another "
            "number of ranks, or split the model again"
        )


def _traced(pipe: Any) -> dict[int, nn.Module]:
    """The stages of a traced model. Parameters keep their names unless these repeat between stages."""
    modules = list(pipe.split_gm.children())  # not by name: two markers in a row leave out a number
    names = [name for module in modules for name in module.state_dict()]
    whole_names = len(names) == len(set(names))
    graph = pipe.split_gm.graph
    return {i: TracedStage(m, graph, i, whole_names=whole_names) for i, m in enumerate(modules)}


def _mend_stages(whole: nn.Module) -> list[list[str]]:
    """Mend the weights of a traced model's stages, and return the names of each that several stages read.

    All stages are in every process, which has traced the model.
    """
    shared: dict[int, list[str]] = {}
    for index, module in enumerate(whole.children()):
        for value, name in _mend_weights(module).items():
            shared.setdefault(value, []).append(f"{index}.{name}")
    return [names for names in shared.values() if len(names) > 1]


def _mend_weights(module: nn.Module) -> dict[int, str]:
    """Give a traced stage one Parameter for each weight that it reads, and no other; return their names.

    Torch copies a weight of several stages under one of its names in each stage. Under its other names the stage keeps
    the original: it may read that, as a second weight, or never read it.

    Returns:
        The first name of every weight, by the identity of its value in the trace.
    """
    names: dict[int, str] = {}
    weights: dict[int, nn.Parameter] = {}
    read = set()
    for path, part in module.named_modules():
        graph = getattr(part, "graph", None)
        for node in graph.nodes if isinstance(graph, fx.Graph) else ():
            if node.op != "get_attr":
                continue
            inner, _, name = str(node.target).rpartition(".")
            holder = part.get_submodule(inner)
            read.add((holder, name))
            weight = parameters_of(holder).get(name)
            if weight is not None:
                value = id(node.meta["val"])
                names.setdefault(value, f"{path}.{node.target}" if path else str(node.target))
                setattr(holder, name, weights.setdefault(value, weight))
    for part in module.modules():
        for name, _ in [
            *part.named_parameters(recurse=False, remove_duplicate=False),
            *part.named_buffers(recurse=False),
        ]:
            if (part, name) not in read:
                delattr(part, name)
    return names


class TracedStage(WholeNames):
    """A stage of a traced model, with the model's parameter names; it passes on the values that later stages need.

    Args:
        module: the stage made by torch. Its parameters, buffers and submodules are this module's own.
        whole_names: whether no other stage has the same names.
    """

    def __init__(self, module: nn.Module, graph: fx.Graph, index: int, *, whole_names: bool) -> None:
        super().__init__()
        torch_private.share_tensors(self, module)
        torch_private.set_children(self, children_of(module))
        # in a tuple, so that it is not registered as a submodule, which would prefix the names
        self._traced = (module,)
        self._place = graph, index
        self._modes = _modes_of(module)
        self.whole_names = whole_names
        nodes = list(graph.nodes)
        calls = [node for node in nodes if node.op == "call_module"]
        inputs = [node for node in nodes if node.op == "placeholder"]
        output = next(node for node in nodes if node.op == "output")
        outputs = output.all_input_nodes
        self._call = calls[index]
        self._inputs = inputs if index == 0 else _values_after(calls, inputs, outputs, index - 1)
        is_last = index == len(calls) - 1
        # the model's own may have a value twice, or None
        self._outputs = _listed(output.args[0]) if is_last else _values_after(calls, inputs, outputs, index)

    def accepts(self) -> frozenset[str]:
        """The model's inputs, of its first stage."""
        return frozenset(self._names() if self._place[1] == 0 else ())

    def _names(self) -> list[str]:
        return [str(node.target) for node in self._inputs]

    def forward(self, *values: Any, **named: Any) -> Any:
        """Run the stage, and pass on the other values."""
        names = self._names()
        missing = names[len(values) :]
        if len(values) > len(names) or named.keys() != {*missing}:
            found = f"{len(values)} by position" + (f", and by name {', '.join(named)}" if named else "")
            raise TypeError(f"the traced model takes {len(names)} inputs ({', '.join(names)}); got {found}")
        values += tuple(map(named.__getitem__, missing))
        known = dict(zip(self._inputs, values, strict=True))
        if self._place[1] == 0:
            for node, value in known.items():
                _check_traced(node, value)
        output = self._traced[0](*fx.node.map_arg(self._call.args, known.__getitem__))
        known[self._call] = output
        for node in self._call.users:
            if node.target is operator.getitem:
                known[node] = output[node.args[1]]
        given = tuple(fx.node.map_arg(self._outputs, known.__getitem__))
        return given[0] if len(given) == 1 else given

    def train(self, mode: bool = True) -> Self:
        """Set the mode, unless operators have the other one: tracing makes it a constant.

        Raises:
            ValueError: naming one of them, with the remedy.
        """
        if self._modes and mode != (True in self._modes):
            traced, wanted = ("eval", "train") if mode else ("train", "eval")
            raise ValueError(
                f"stages: the model was traced in {traced}() mode, and {self._modes[not mode]} of stage "
                f"{self._place[1]} keeps it: trace another instance after its .{wanted}(), for a Pipeline that loads "
                "this one's state_dict()"
            )
        return super().train(mode)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A copy of its module, at the same place of the same graph."""
        made = type(self)(copy.deepcopy(self._traced[0], memo), *self._place, whole_names=self.whole_names)
        made.training = self.training
        return made


def _modes_of(module: nn.Module) -> dict[bool, str]:
    """Operators of a traced stage that are in training or evaluation, by this mode; one of each."""
    found: dict[bool, str] = {}
    graphs: dict[nn.Module, Any] = {part: getattr(part, "graph", None) for part in module.modules()}
    for part, graph in graphs.items():
        for node in graph.nodes if isinstance(graph, fx.Graph) else ():
            given = node.normalized_arguments(part, normalize_to_only_use_kwargs=True)
            named = given.kwargs if given else {}
            mode = named.get("training", named.get("train"))
            # a BatchNorm in evaluation may be a frozen one of a model in training; dropout of nothing has no mode
            if named.get("p") != 0 and (mode or (mode is False and "batch_norm" not in str(node.target))):
                found[mode] = str(node.target)
    return found


def _listed(given: Any) -> list[Any]:
    return list(given) if isinstance(given, tuple | list) else [given]


def _check_traced(node: fx.Node, value: Any) -> None:
    """Refuse an input with another shape than in the trace, or with another value if it is no tensor: both have become
    constants of the graph."""
    traced, found = _constant(node.meta.get("val")), _constant(value)
    if "val" in node.meta and found != traced:
        raise ValueError(
            f"{node.name} {found} in a microbatch, and {traced} in the trace, which made that a constant: give the "
            "same (a shape by batches and num_microbatches that make it), or trace the model again"
        )


def _constant(value: Any) -> str:
    return f"has the shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f"is {value!r}"


def _values_after(
    calls: Sequence[fx.Node], inputs: Sequence[fx.Node], outputs: Sequence[fx.Node], index: int
) -> list[fx.Node]:
    """The available values after a stage that later stages or the model's outputs need."""
    there = [*inputs]
    for call in calls[: index + 1]:
        parts = [node for node in call.users if node.target is operator.getitem]
        there += parts or [call]
    needed = {node for call in calls[index + 1 :] for node in call.all_input_nodes} | set(outputs)
    return [node for node in there if node in needed]


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
