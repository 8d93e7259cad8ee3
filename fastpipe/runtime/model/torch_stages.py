"""Stages of torch.distributed.pipelining.

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

from fastpipe.runtime.common import children_of, torch_private


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
        _check_count(stages.num_stages, num_stages, "the traced model")
        return _traced(stages), [*(tied or ()), *_shared_names(stages)] or None
    listed = torch_stages(stages)
    if not listed:
        return stages, tied
    base = torch_private.pipeline_stage_type()
    found: dict[int, nn.Module] = {}
    for stage in listed:
        if not isinstance(stage, base):
            raise TypeError(f"stages has a {type(stage).__name__} beside torch's stages: give one kind or the other")
        index = stage.stage_index  # type: ignore[attr-defined]
        _check_count(stage.num_stages, num_stages, f"PipelineStage {index}")  # type: ignore[attr-defined]
        if index in found:
            raise ValueError(f"stages has PipelineStage {index} twice: give every stage of this process once")
        if stage.dw_builder is not None:  # type: ignore[attr-defined]
            raise ValueError(
                f"stages: PipelineStage {index} has a dw_builder; leave it out, as fastpipe splits backwards itself"
            )
        found[index] = _module_of(stage)
    return found, tied


def _check_count(there: int, num_stages: int, what: str) -> None:
    if there != num_stages:
        raise ValueError(
            f"stages: {what} is of {there} stages but the schedule has {num_stages}: use stages_per_rank, or another "
            "number of ranks, or split the model again"
        )


def _module_of(stage: Any) -> nn.Module:
    """The module that a stage object runs."""
    info = getattr(stage, "pipe_info", None)
    module: nn.Module = stage.submod
    return module if info is None else TracedStage(module, info.graph, stage.stage_index, whole_names=False)


def _traced(pipe: Any) -> dict[int, nn.Module]:
    """The stages of a traced model. Parameters keep their names unless these repeat between stages."""
    modules = [pipe.get_stage_module(index) for index in range(pipe.num_stages)]
    names = [name for module in modules for name in module.state_dict()]
    whole_names = len(names) == len(set(names))
    graph = pipe.split_gm.graph
    return {i: TracedStage(m, graph, i, whole_names=whole_names) for i, m in enumerate(modules)}


def _shared_names(pipe: Any) -> list[list[str]]:
    """The names of every weight that several stages of a traced model use; torch has copied it for each of them."""
    index = {f"submod_pp_{i}": i for i in range(pipe.num_stages)}
    return [[f"{index[module]}.{name}" for module, name in users.items()] for users in pipe.replicated_params]


class TracedStage(nn.Module):
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

    def forward(self, *values: Any) -> Any:
        """Run the stage, and pass on the other values."""
        if len(values) != len(self._inputs):
            names = ", ".join(node.name for node in self._inputs)
            raise TypeError(
                f"the traced model takes {len(self._inputs)} inputs by position ({names}); got {len(values)}"
            )
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

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A copy of its module, at the same place of the same graph."""
        made = type(self)(copy.deepcopy(self._traced[0], memo), *self._place, whole_names=self.whole_names)
        made.training = self.training
        return made


def _listed(given: Any) -> list[Any]:
    return list(given) if isinstance(given, tuple | list) else [given]


def _check_traced(node: fx.Node, value: Any) -> None:
    """Refuse an input that is not as the one of the trace, which may have become a number in the graph."""
    traced, shape = node.meta.get("val"), getattr(value, "shape", ())
    if isinstance(traced, torch.Tensor) and tuple(shape) != tuple(traced.shape):
        raise ValueError(
            f"{node.name} has the shape {tuple(shape)} in a microbatch, and the model was traced with "
            f"{tuple(traced.shape)}: give batches and num_microbatches that make the traced shape, or trace the model "
            "again"
        )


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
