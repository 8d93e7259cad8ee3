"""How a batch is split, weighted and merged; from the arguments of a step to the microbatches of local stages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any

import numpy as np
import torch
from torch import nn

from fastpipe.runtime.common import is_block_mask, pytree, tensor_leaves, tensors_in
from fastpipe.runtime.data_parallel import unwrapped
from fastpipe.runtime.model import accepted_names, positional_names
from fastpipe.runtime.stage import PER_MICROBATCH, Stage
from fastpipe.runtime.step.microbatch import (
    Counted,
    Rules,
    check_has_shape,
    check_split_and_merge,
    count_rows,
    has_rule,
    is_list_of_microbatches,
    lengths,
    rows_of,
    rule_for,
    split,
)
from fastpipe.runtime.step.result import MetricRules, check_reduction, check_rules, loss_divisors
from fastpipe.schedule import Schedule

ROWS, NAMED, RULE, PARTS = "rows", "named", "rule", "parts"
"""How a whole batch is split: positional inputs, and keyword inputs, by rows if they have the batch's number of rows;
others by a rule of `split`; targets in any proportion. `PARTS` are the rows of each microbatch, if the user cuts."""


@dataclass(frozen=True)
class BatchArguments:
    """How a batch is split, weighted and merged; attributes as of `fastpipe.Pipeline`."""

    loss_fn: Callable[..., Any] | None
    loss_reduction: str | Callable[[Any], float]
    metrics: MetricRules
    split: Rules
    merge: Rules | bool
    rng: str | None

    @property
    def merge_rules(self) -> Rules:
        """How outputs are merged."""
        return None if isinstance(self.merge, bool) else self.merge

    @property
    def keeps_outputs(self) -> bool:
        """Whether outputs are kept."""
        return self.merge is not False

    def check(self) -> None:
        """Check what does not depend on the model.

        Raises:
            ValueError: naming the argument.
        """
        loss_fn = self.loss_fn
        if loss_fn is not None and not callable(loss_fn):
            raise ValueError(f"loss_fn = {loss_fn!r}: give a function (output, target) -> loss, or None")
        if isinstance(loss_fn, type):
            raise ValueError(f"loss_fn = {loss_fn.__name__}: that is a class; give an instance, {loss_fn.__name__}()")
        check_reduction(self.loss_reduction)
        check_rules(self.metrics)
        if self.rng not in (None, PER_MICROBATCH):
            raise ValueError(
                f"rng = {self.rng!r}: use None (torch's generators, in the order of the actions) or "
                f"{PER_MICROBATCH!r} (a separate state for every stage and microbatch)"
            )
        check_split_and_merge(self.split, self.merge_rules)

    def check_loss_parameters(self, schedule: Schedule) -> None:
        """Refuse a loss with parameters if two ranks compute it: their gradients would not be summed."""
        is_trained = isinstance(self.loss_fn, nn.Module) and any(p.requires_grad for p in self.loss_fn.parameters())
        if is_trained and schedule.placement.num_routes > 1:
            raise ValueError(
                f"loss_fn has parameters, and {schedule.name} computes the loss on two ranks, each with a part of "
                "their gradients: make it the last layer, which takes the target by a keyword of step and "
                "returns the loss, or use a schedule with one route"
            )


@dataclass(frozen=True)
class Request:
    """The arguments of one step; attributes as of `fastpipe.Pipeline.step`.

    Attributes:
        reduces: whether gradients are reduced over the replicas of the pipeline.
        gathers_outputs: whether every rank gets the outputs.
        traces: whether every rank gets the times of all.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    target: Any
    output_grad: Any
    num_microbatches: int
    training: bool
    reduces: bool = True
    gathers_outputs: bool = False
    index: int | None = None
    traces: bool = False


@dataclass
class Inputs:
    """The microbatches that this process needs.

    Attributes:
        args: positional arguments of the first stage, by microbatch.
        kwargs: every keyword argument of a local stage, by name and microbatch.
        targets: by microbatch, on a process with the last stage.
        output_grads: by microbatch, on a process with the last stage.
        counted: the rows of every microbatch, if they can be counted.
        whole: for whole batches, rows and rule by name; one entry per distinct pair.
        divisors: of the losses, if a function of the user gives weights.
        unknown: keys of the split rules that match no argument here.
    """

    args: list[tuple[Any, ...]] | None = None
    kwargs: dict[str, list[Any]] = field(default_factory=dict)
    targets: list[Any] | None = None
    output_grads: list[Any] | None = None
    counted: Counted | None = None
    whole: dict[str, list[Any]] = field(default_factory=dict)
    divisors: list[float] | None = None
    unknown: list[str] = field(default_factory=list)

    def given(self) -> dict[str, list[bool]]:
        """For every keyword argument of a local stage: the microbatches in which it is not None."""
        return {name: [value is not None for value in values] for name, values in self.kwargs.items()}


def signature_of(request: Request, inputs: Inputs, rules: Rules) -> tuple[Any, ...]:
    """Everything that shapes between stages may depend on: the form of every argument that this process takes.

    Of a batch that is split by its shape, the form of the whole; otherwise that of every microbatch.
    """
    taken: list[tuple[str | int, Any, Sequence[Any] | None]] = [(i, x, inputs.args) for i, x in enumerate(request.args)]
    taken += [(name, request.kwargs[name], microbatches) for name, microbatches in inputs.kwargs.items()]
    taken += [("target", request.target, inputs.targets), ("output_grad", request.output_grad, inputs.output_grads)]
    found = []
    for key, value, microbatches in taken:
        rule = rule_for(rules, key)
        is_cut = not is_list_of_microbatches(value, rule) and not callable(rule)
        found.append((key, _form_of(value if is_cut and microbatches is not None else microbatches)))
    return tuple(found)


def _form_of(value: Any) -> Any:
    # pytree takes several times as long as all other work on a step's inputs
    if isinstance(value, torch.Tensor):
        check_has_shape(value)
        return value.shape, value.dtype, value.requires_grad, _layout(value)
    if type(value) in (list, tuple):
        return tuple(map(_form_of, value))
    if value is None or isinstance(value, int | float | str):
        return repr(value)  # 1 == 1.0 == True, and hash(-1) == hash(-2)
    if pytree.tree_is_leaf(value) or is_block_mask(value):
        return type(value).__name__
    leaves, structure = pytree.tree_flatten(value)
    return str(structure), *map(_form_of, leaves)


def _layout(tensor: torch.Tensor) -> tuple[int, ...] | torch.layout | None:
    """None if contiguous. Strides matter because operators derive the layout of outputs from their inputs."""
    if tensor.layout is not torch.strided:
        return tensor.layout
    return None if tensor.is_nested or tensor.is_contiguous() else tensor.stride()


def _check_request(request: Request, batch: BatchArguments) -> None:
    """Refuse arguments that exclude each other, or are of the wrong kind."""
    if request.target is not None and request.output_grad is not None:
        raise ValueError("target and output_grad are both given: pass a target for loss_fn, or the outputs' gradients")
    own: dict[str, tuple[Any, str]] = {
        "index": (request.index, "the number of the batch, an int"),
        "gather_outputs": (request.gathers_outputs, "whether every rank gets the outputs, a bool"),
        "trace": (request.traces, "whether the result has the times of all ranks, a bool"),
    }
    for name, (value, what) in own.items():
        if value is not None and not isinstance(value, Integral | np.bool_):
            raise ValueError(
                f"{name} is a {type(value).__name__}: it is {what}, and no layer gets it; rename an argument of a "
                "layer that has this name"
            )
    if request.gathers_outputs and not batch.keeps_outputs:
        raise ValueError("gather_outputs: merge=False keeps no outputs; leave one of them out")


def take_inputs(request: Request, batch: BatchArguments, stages: Sequence[Stage]) -> Inputs:
    """Split the inputs of the local stages. Other inputs are not touched, so iterators do not advance on other ranks.

    Raises:
        ValueError: naming the argument, its value, and what to give.
    """
    _check_request(request, batch)
    rules, loss_fn, reduction = batch.split, batch.loss_fn, batch.loss_reduction
    inputs = Inputs(unknown=_unknown_names(rules, request, stages))
    count = request.num_microbatches
    columns: list[list[Any]] = []
    first = next((stage for stage in stages if stage.is_first), None)
    if first is not None:
        _check_input(first, request)
        _check_rules_by_position(first, request, rules)
        names = input_names(len(request.args))
        columns = [_take(inputs, request, x, rules, i, names[i], ROWS) for i, x in enumerate(request.args)]
        inputs.args = by_microbatch(columns, count)
    for name, value in request.kwargs.items():
        if any(stage.accepts is None or name in stage.accepts for stage in stages):
            inputs.kwargs[name] = _take(inputs, request, value, rules, name, name, NAMED)
    if any(stage.is_last for stage in stages):
        _take_for_last(inputs, request, rules, loss_fn)
        if callable(reduction) and inputs.output_grads is None and (loss_fn is None or inputs.targets is not None):
            inputs.divisors = loss_divisors(reduction, None, inputs.targets, count)
    inputs.counted = count_rows(inputs.targets, columns, inputs.kwargs, rules)
    if reduction == "mean" and inputs.counted is not None and not sum(inputs.counted[1]):
        raise ValueError("the microbatches have no rows at all: give at least one, or loss_reduction='sum'")
    return inputs


def _unknown_names(rules: Rules, request: Request, stages: Sequence[Stage]) -> list[str]:
    """Names in the rules that match no argument of a stage; keyword arguments are optional in a step."""
    if not isinstance(rules, Mapping) or any(stage.accepts is None for stage in stages):
        return []
    names = {"target", "output_grad", *request.kwargs}.union(*(stage.accepts or () for stage in stages))
    named = [key for key in rules if isinstance(key, str)]
    by_position = [key for key in named if key in names and _is_by_position(key, request, stages)]
    return [key for key in named if key not in names or key in by_position]


def _is_by_position(name: str, request: Request, stages: Sequence[Stage]) -> bool:
    """Whether layers take the name only as an argument that they get by position: the output of the layer before."""
    if name in ("target", "output_grad", *request.kwargs):
        return False
    for stage in stages:
        for number, layer in enumerate(stage.modules):
            count = 0 if stage.is_first and not number else 1
            if (
                name in (accepted_names(unwrapped(layer)) or ())
                and name not in positional_names(unwrapped(layer))[:count]
            ):
                return False
    return True


def _check_rules_by_position(first: Stage, request: Request, rules: Rules) -> None:
    """Refuse a rule by name for an input that is given by position, and one for a position that has no input."""
    if not isinstance(rules, Mapping):
        return
    last = max((key for key in rules if isinstance(key, int)), default=0)
    if request.args and last >= len(request.args):
        raise ValueError(f"split[{last}]: there are {len(request.args)} positional arguments, counted from 0")
    names = positional_names(unwrapped(first.modules[0]))[: len(request.args)]
    for position, name in enumerate(names):
        if name in rules and name != "target":
            raise ValueError(
                f"split[{name!r}]: step gets this input by position; write split={{{position}: ...}}, or call "
                f"step({name}=...)"
            )


def _check_input(first: Stage, request: Request) -> None:
    """Refuse a step without an input that the first stage needs; tuples of a list may have several."""
    args = request.args
    if any(map(is_list_of_microbatches, args)):
        return
    is_nothing = bool(args) and all(value is None for value in args)
    given = 0 if is_nothing else len(args)
    missing = next((name for name in first.needs[given:] if is_nothing or name not in request.kwargs), None)
    if missing is None and (request.kwargs or len(args) != 1 or args[0] is not None):
        return
    needed = "" if missing is None else f"the model's first layer needs {missing!r}; "
    others = [name for name in request.kwargs if first.accepts is not None and name not in first.accepts]
    needed += f"it does not take {', '.join(map(repr, others))}, given by keyword; " if needed and others else ""
    raise ValueError(
        f"the input is {'None' if args and args[0] is None else 'missing'}: {needed}pass the batch on the rank with "
        "the first stage, or no argument if the model takes none"
    )


def input_names(count: int) -> list[str]:
    """The names of positional arguments in errors."""
    return ["the input"] if count == 1 else [f"input {i}" for i in range(count)]


def by_microbatch(columns: list[list[Any]], count: int) -> list[tuple[Any, ...]]:
    """The positional arguments of every microbatch, from the microbatches of every argument."""
    if not columns:
        return [() for _ in range(count)]
    # a list or an iterator of tuples: each tuple is one microbatch's arguments
    if len(columns) == 1 and all(type(item) is tuple for item in columns[0]):
        return list(columns[0])
    return list(zip(*columns, strict=True))


def _take_for_last(inputs: Inputs, request: Request, rules: Rules, loss_fn: Callable[..., Any] | None) -> None:
    if request.output_grad is not None:
        inputs.output_grads = split(request.output_grad, request.num_microbatches, rules, "output_grad")
        for part in inputs.output_grads:
            tensors_in(part, "output_grad")  # refuses one without a tensor before the step begins
        return
    if request.target is None:
        if loss_fn is not None and request.training:
            name = getattr(loss_fn, "target_name", "target")
            raise ValueError(
                f"{name} = None: loss_fn needs a target on the rank of the last stage; pass {name}=, or leave out "
                "loss_fn and return the loss from the last layer"
            )
        return
    if loss_fn is None:
        raise ValueError("target: there is no loss_fn to give it to; pass loss_fn= to Pipeline, or leave target out")
    inputs.targets = _take(inputs, request, request.target, rules, "target", "target", RULE)


def _take(
    inputs: Inputs, request: Request, value: Any, rules: Rules, key: str | int, name: str, unasked: str
) -> list[Any]:
    """Split an argument, and record in `Inputs.whole` the rows of a whole batch's tensors, one entry per distinct
    number, or those of the user's microbatches if they are not as many in each. Refuse autograd history.

    Args:
        unasked: how it is split without a rule.
    """
    parts = split(value, request.num_microbatches, rules, key, name)
    way = RULE if has_rule(rules, key) else unasked
    rule = rule_for(rules, key)
    is_cut = is_list_of_microbatches(value, rule)
    for leaf, rows in lengths(value, rule, name).items():
        if [rows, way] not in inputs.whole.values():
            inputs.whole[leaf] = [rows, way]
    if (is_cut or callable(rule)) and len(set(cut := rows_of(parts, rule) or [0])) > 1:
        inputs.whole[name] = [cut, PARTS]
    if request.training and request.num_microbatches > 1 and not is_cut:
        _check_history(value, name)
    return parts


def _check_history(value: Any, name: str) -> None:
    history = next((tensor.grad_fn for tensor in tensor_leaves(value) if tensor.grad_fn), None)
    if history is not None:
        raise ValueError(
            f"{name} is the output of {history.name()}, shared by the backwards of all microbatches, and the first "
            "one frees it: make its computation a layer of the pipeline, or give cut = x.detach().requires_grad_(), "
            "and after the step call x.backward(cut.grad) where cut.grad is not None"
        )
