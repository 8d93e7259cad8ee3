"""From stages of torch.distributed.pipelining to modules.

Of a ``PipelineStage`` fastpipe uses the module and the index. A model traced by ``pipeline()`` (a ``Pipe``) consists of
stages and a graph between them, in which a value may skip stages. Here a stage sends to the next one only, so traced
stages are wrapped to forward the values that later stages need.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from torch import fx, nn

from fastpipe.runtime.common import children_of, parameters_of, torch_private
from fastpipe.runtime.model.chain import WholeNames


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
    for part in module.modules():
        code = vars(part).get("graph_module")  # runs with the part's weights, and keeps those of the trace
        for path, inner in code.named_modules() if isinstance(code, nn.Module) else ():
            torch_private.share_tensors(inner, part.get_submodule(path))
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
        own: Any = output.args[0]
        own = list(own) if isinstance(own, tuple | list) else [own]
        self._outputs = own if is_last else _values_after(calls, inputs, outputs, index)

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
