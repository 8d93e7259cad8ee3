"""How a batch is split, weighted and merged; from the arguments of a step to the work of every local stage."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any

import torch
from torch import nn

from fastpipe.runtime.common import bytes_of, is_block_mask, pytree, tensor_leaves, tensors_in
from fastpipe.runtime.data_parallel import unwrapped
from fastpipe.runtime.model import accepted_names, positional_names, selected
from fastpipe.runtime.stage import PER_MICROBATCH, Stage, StageWork
from fastpipe.runtime.step.microbatch import (
    Counted,
    Rules,
    check_split_and_merge,
    count_rows,
    has_rule,
    is_list_of_microbatches,
    lengths,
    rows_of_split,
    rule_for,
    split,
    split_argument,
)
from fastpipe.runtime.step.result import MetricRules, Weights, check_reduction, check_rules, loss_divisors
from fastpipe.schedule import Schedule

ROWS, NAMED, RULE = "rows", "named", "rule"
"""How a whole batch is split: positional inputs, and keyword inputs, by rows if they have the batch's number of rows;
others by a rule of `split`; targets in any proportion."""
_SAMPLE = 4096


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


def batch_digests(request: Request, inputs: Inputs, whole: bool) -> dict[str, list[Any]]:
    """The form and a checksum of the values of every argument of this rank, needed here or not.

    Args:
        inputs: the inputs taken from it. An iterator's items count on ranks that consumed them.
        whole: checksum all elements, also on a device, which waits for it. Otherwise some thousand elements of every
            CPU tensor, which takes microseconds.
    """
    given = dict(zip(_input_names(request), request.args, strict=True))
    given |= {name: inputs.kwargs.get(name, v) if isinstance(v, Iterator) else v for name, v in request.kwargs.items()}
    given |= {"target": request.target, "output_grad": request.output_grad}
    found = {}
    for name, value in given.items():
        if value is not None and not isinstance(value, Iterator):
            form = [type(value).__name__, *getattr(value, "shape", [len(value)] if isinstance(value, list) else [])]
            found[name] = [form, _digest(value, 0, whole)]
    return found


def _digest(value: Any, found: int, whole: bool) -> int:
    if type(value) in (tuple, list):
        for item in value:
            found = _digest(item, found, whole)
    elif type(value) is dict:
        found = _digest(list(value.values()), found, whole)
    elif type(value) in (bool, int, float, str):
        found = zlib.crc32(repr(value).encode(), found)
    elif type(value) in (torch.Tensor, nn.Parameter) and _is_read(value, whole):
        found = zlib.crc32(bytes_of(value if whole else _sampled(value)).numpy().data, found)
    elif is_block_mask(value):
        found = _digest(value.kv_num_blocks, found, whole)
    # other objects may have state that differs between ranks, such as a key-value cache
    return found


def _is_read(tensor: torch.Tensor, whole: bool) -> bool:
    return tensor.layout is torch.strided and not tensor.is_meta and (whole or tensor.device.type == "cpu")


def _sampled(tensor: torch.Tensor) -> torch.Tensor:
    """At most some thousand elements, evenly spaced."""
    tensor, size = tensor.detach(), tensor.numel()
    if size <= _SAMPLE:
        return tensor
    stride = size // _SAMPLE | 1  # odd: an even stride would sample the same columns of every row
    if tensor.is_contiguous():
        return tensor.view(-1)[::stride]
    return tensor[torch.unravel_index(torch.arange(0, size, stride), tensor.shape)]


def check_batches(digests: Mapping[str, Mapping[str, list[Any]]]) -> None:
    """Refuse a step if ranks were given different batches.

    Args:
        digests: of every rank, from `batch_digests`, by its number, with its place in another pipeline of a mesh.
            Arguments of different types are not compared.
    """
    for name in sorted({name for own in digests.values() for name in own}):
        by_type: dict[str, dict[str, list[Any]]] = {}
        for rank, own in digests.items():
            if name in own:
                by_type.setdefault(own[name][0][0], {})[rank] = own[name]
        for found in by_type.values():
            first, *_ = found
            others = [rank for rank, own in found.items() if own != found[first]]
            if others:
                raise ValueError(
                    f"{name} has other values on ranks [{', '.join(others)}] than on rank {first}: in every call of "
                    "step give all ranks of a pipeline the same batch, or None where a rank does not need it, and so "
                    "along other dimensions of a mesh (name one whose ranks have data of their own 'cp', 'ep' or a "
                    "name that begins with 'dp'). Shuffle by the same seed on all of them, give a DistributedSampler "
                    "the pipelines as its replicas, and let no rank leave out a call (see Loading data in "
                    "docs/guide.md)"
                )


def signature_of(request: Request, inputs: Inputs, rules: Rules) -> tuple[Any, ...]:
    """Everything that shapes between stages may depend on: the form of every argument that this process takes.

    Of a batch that is split by its shape, the form of the whole; otherwise that of every microbatch.
    """
    taken: list[tuple[str | int, Any, Sequence[Any] | None]] = [(i, x, inputs.args) for i, x in enumerate(request.args)]
    taken += [(name, request.kwargs[name], microbatches) for name, microbatches in inputs.kwargs.items()]
    taken += [("target", request.target, inputs.targets), ("output_grad", request.output_grad, inputs.output_grads)]
    found = []
    for key, value, microbatches in taken:
        is_cut = not is_list_of_microbatches(value) and not callable(rule_for(rules, key))
        found.append((key, _form_of(value if is_cut and microbatches is not None else microbatches)))
    return tuple(found)


def _form_of(value: Any) -> Any:
    # pytree takes several times as long as all other work on a step's inputs
    if isinstance(value, torch.Tensor):
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
    if request.gathers_outputs and not batch.keeps_outputs:
        raise ValueError("gather_outputs: merge=False keeps no outputs; leave one of them out")
    index: Any = request.index
    if index is not None and not isinstance(index, Integral):
        raise ValueError(
            f"index is a {type(index).__name__}: it is the number of the batch, an int, and no layer gets it; "
            "rename an argument of a layer that has this name"
        )


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
        columns = _split_args(request, rules)
        inputs.args = by_microbatch(columns, count)
        for i, value in enumerate(request.args):
            _note_whole(inputs, request, value, rules, i, f"input {i}" if i else "the input", ROWS)
    for name, value in request.kwargs.items():
        if any(stage.accepts is None or name in stage.accepts for stage in stages):
            inputs.kwargs[name] = split_argument(value, count, rules, name, name)
            _note_whole(inputs, request, value, rules, name, name, NAMED)
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
            count = len(request.args) if stage.is_first and not number else 1
            if (
                name in (accepted_names(unwrapped(layer)) or ())
                and name not in positional_names(unwrapped(layer))[:count]
            ):
                return False
    return True


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
    raise ValueError(
        f"the input is {'None' if args and args[0] is None else 'missing'}: {needed}pass the batch on the rank with "
        "the first stage, or no argument if the model takes none"
    )


def _split_args(request: Request, rules: Rules) -> list[list[Any]]:
    count = request.num_microbatches
    positions = [key for key in rules if isinstance(key, int)] if isinstance(rules, Mapping) else []
    if request.args and positions and max(positions) >= len(request.args):
        raise ValueError(f"split[{max(positions)}]: there are {len(request.args)} positional arguments, counted from 0")
    names = _input_names(request)
    return [split_argument(value, count, rules, i, names[i]) for i, value in enumerate(request.args)]


def _input_names(request: Request) -> list[str]:
    """The names of positional arguments in errors."""
    count = len(request.args)
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
    count = request.num_microbatches
    if request.output_grad is not None:
        inputs.output_grads = split(request.output_grad, count, rule_for(rules, "output_grad"), "output_grad")
        for part in inputs.output_grads:
            tensors_in(part, "output_grad")  # refuses one without a tensor before the step begins
        return
    if request.target is None:
        if loss_fn is not None and request.training:
            raise ValueError(
                "target = None: loss_fn needs a target on the rank of the last stage; pass target=, or leave out "
                "loss_fn and return the loss from the last layer"
            )
        return
    if loss_fn is None:
        raise ValueError("target: there is no loss_fn to give it to; pass loss_fn= to Pipeline, or leave target out")
    inputs.targets = split(request.target, count, rule_for(rules, "target"), "target")
    _note_whole(inputs, request, request.target, rules, "target", "target", RULE)


def _note_whole(
    inputs: Inputs, request: Request, value: Any, rules: Rules, key: str | int, name: str, unasked: str
) -> None:
    """Record the rows of a whole batch's tensors, one entry per distinct number. Refuse inputs with autograd history.

    Args:
        unasked: how it is split without a rule.
    """
    way = RULE if has_rule(rules, key) else unasked
    for leaf, rows in lengths(value, rule_for(rules, key), name).items():
        if [rows, way] not in inputs.whole.values():
            inputs.whole[leaf] = [rows, way]
    if request.training and request.num_microbatches > 1 and not is_list_of_microbatches(value):
        _check_history(value, name)


def _check_history(value: Any, name: str) -> None:
    history = next((tensor.grad_fn for tensor in tensor_leaves(value) if tensor.grad_fn), None)
    if history is not None:
        raise ValueError(
            f"{name} is the output of {history.name()}, shared by the backwards of all microbatches, and the first "
            "one frees it: make its computation a layer of the pipeline, or give cut = x.detach().requires_grad_(), "
            "and after the step call x.backward(cut.grad) where cut.grad is not None"
        )


def check_splits(whole: Mapping[str, list[Any]], num_microbatches: int) -> None:
    """Refuse arguments whose microbatches do not match.

    Args:
        whole: the rows of each, and how they are split: `ROWS`, `NAMED` or `RULE`.

    Raises:
        ValueError: if an input without a rule does not have the batch's rows, or if rows are not in the same proportion
            in every microbatch.
    """
    if num_microbatches == 1:
        return
    rows = {name: found for name, (found, _) in whole.items()}
    batch = [name for way in (ROWS, NAMED) for name, found in whole.items() if found[1] == way and rows[name] != 1]
    shared = [name for name, found in whole.items() if found[1] == NAMED and rows[name] == 1]
    if shared and not batch and RULE not in (way for _, way in whole.values()):
        raise ValueError(
            f"{shared[0]} has 1 row but num_microbatches = {num_microbatches}: give at least one row per microbatch, "
            "or fewer microbatches"
        )
    for name in batch:
        if rows[name] != rows[batch[0]]:
            raise ValueError(
                f"{name} has {rows[name]} rows (dimension 0) but {batch[0]} has {rows[batch[0]]}: give as many, "
                f"or a rule for {name} in split=: 'replicate' to share it between all microbatches, a dimension, or a "
                "function"
            )
    cut = [name for name, found in whole.items() if name in batch or found[1] == RULE]
    first = batch[0] if batch else next(iter(cut), "")
    for name in cut:
        if rows[name] == rows[first]:
            continue
        own, others = (list(rows_of_split(count, num_microbatches)) for count in (rows[name], rows[first]))
        if any(mine * rows[first] != rows[name] * other for mine, other in zip(own, others, strict=True)):
            raise ValueError(
                f"{name} has {rows[name]} rows but {first} has {rows[first]}: microbatches of {own} rows do "
                f"not match microbatches of {others} rows; give batches of the same length, lists of microbatches, or "
                "split= with another dimension or 'replicate' for an input that is not a batch"
            )


def check_given(given: Sequence[Mapping[str, list[bool]]]) -> None:
    """Refuse a keyword argument that some stages get and others do not (`Inputs.given` of every rank)."""
    for name in sorted({name for own in given for name in own}):
        found = {rank: own[name] for rank, own in enumerate(given) if name in own}
        if len(set(map(tuple, found.values()))) > 1:
            without = [rank for rank, values in found.items() if not all(values)]
            others = [rank for rank in found if rank not in without]
            where = f"but not on ranks {others}" if others else "for different microbatches"
            raise ValueError(
                f"{name} is None on ranks {without} {where}; stages on all of these ranks take it, so pass the same "
                "value on each"
            )


def stage_works(
    inputs: Inputs,
    stages: Sequence[Stage],
    request: Request,
    weights: Weights,
    keep_outputs: bool,
    loss_scale: torch.Tensor | None,
) -> list[StageWork]:
    """The work of every local stage.

    Args:
        weights: of the microbatches, the same on all ranks.
        loss_scale: multiplies the roots of the backward.
    """
    works = []
    for stage in stages:
        names = selected(inputs.kwargs, stage.accepts)
        work = StageWork(
            keep_outputs=keep_outputs,
            reduces=request.reduces,
            divisors=weights.loss,
            loss_scale=loss_scale,
        )
        if stage.is_first:
            work.args = inputs.args
        if names:
            count = request.num_microbatches
            work.kwargs = [{name: values[i] for name, values in names.items()} for i in range(count)]
        if stage.is_last:
            work.targets, work.output_grads = inputs.targets, inputs.output_grads
        works.append(work)
    return works
