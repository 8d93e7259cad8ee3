"""Cutting a list of layers into stages, and the cost of each layer: counted, or measured on an example."""

from __future__ import annotations

import contextlib
import logging
import re
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from fastpipe.checks import is_whole
from fastpipe.partition import partition as partition_layers
from fastpipe.runtime.common import (
    KeptAttributes,
    SavedBytes,
    cause_text,
    check_shapes,
    cuda_devices,
    keep_state,
    local_part,
    on_meta,
    pytree,
    tensor_leaves,
    tensors_of,
    time_when_idle,
    torch_private,
)
from fastpipe.runtime.model.chain import (
    WholeNames,
    accepted_names,
    as_arguments,
    as_inputs,
    as_layers,
    check_modules,
    selected,
    split_carried,
)
from fastpipe.runtime.model.torch_stages import torch_stages

_REPEATS = 5
logger = logging.getLogger("fastpipe")


def layer_costs(
    layers: Sequence[nn.Module] | nn.Sequential | nn.ModuleList, *args: Any, by: str = "flops", **kwargs: Any
) -> list[float]:
    """The cost of every layer, for `fastpipe.partition`.

    ``Pipeline(layers, ..., partition=fastpipe.partition(costs, num_stages))`` then cuts the model so that the cost of
    the most expensive stage is minimal. Parameters, their gradients, buffers and random generators do not change.

    Args:
        layers: the model's layers, in order.
        args: one microbatch, as the first layer takes it; not needed for ``"parameters"``.
        by: ``"parameters"``: their number. ``"flops"``: operations of forward and backward by torch's counter: matrix
            products, convolutions and attention; other operations count 0. Counted without computing, also on the meta
            device, unless a layer reads values. ``"seconds"``: of forward and backward, median of five runs on this
            machine. Times differ between processes, and all must cut alike: measure on one process, and broadcast.
            ``"activation_bytes"``: bytes that forward saves for backward, without parameters. ``"memory"``: the same,
            plus parameters and their gradients.
        kwargs: keyword arguments, given to every layer whose forward names them.

    Returns:
        One number per layer.

    Raises:
        ValueError: for an unknown ``by``, no layers, a missing example, or a keyword argument that no layer takes.
    """
    measures = {"flops": _flops, "seconds": _seconds, "activation_bytes": _activation_bytes, "memory": _memory}
    listed = list(layers) if isinstance(layers, Iterable) else layers
    check_modules("layers", listed)
    if not listed:
        raise ValueError("layers is empty: give the list of the model's layers")
    for i, layer in enumerate(listed):
        check_shapes(f"layer {i} of the model", layer)
    if by == "parameters":
        return [float(sum(parameter.numel() for parameter in layer.parameters())) for layer in listed]
    if not isinstance(by, str) or by not in measures:
        raise ValueError(f"by = {by!r}: use 'parameters', {', '.join(map(repr, measures))}")
    if not args:
        raise ValueError(f"by = {by!r}: give one microbatch, as the first layer takes it")
    _check_taken(listed, kwargs)
    if by == "flops":
        counted = _flops_of_fakes(listed, args, kwargs)
        if counted is not None:
            return counted
    if on_meta(listed):
        why = "a layer reads values (the logger has its error)" if by == "flops" else "it is measured in a run"
        raise ValueError(
            f"by or partition = {by!r}: layers are on the meta device, and {why}; use 'parameters', or the number of "
            "layers of every stage"
        )
    with torch.random.fork_rng(devices=cuda_devices(listed)):
        return _by_layer(listed, args, kwargs, measures[by])


def _check_taken(layers: Sequence[nn.Module], kwargs: Iterable[str]) -> None:
    names = [accepted_names(layer) for layer in layers]
    for name in kwargs:
        if not any(own is None or name in own for own in names):
            raise ValueError(f"{name}: no layer's forward takes this keyword argument; leave it out")


Measure = Callable[[nn.Module, tuple[Any, ...], Mapping[str, Any]], float]


def _by_layer(layers: Sequence[nn.Module], args: Any, kwargs: Mapping[str, Any], measure: Measure) -> list[float]:
    """Measure each layer on the output of the previous one."""
    costs = []
    value: Any = args
    carried: dict[str, Any] = {}
    with torch.enable_grad():
        for layer in layers:
            inputs = tuple(map(_leaves_of_a_graph, as_arguments(value)))
            named = selected({**kwargs, **_leaves_of_a_graph(carried)}, accepted_names(layer))
            with restored(layer):
                costs.append(float(measure(layer, inputs, named)))
                value, values = split_carried(layer(*inputs, **named))
                carried |= values
    return costs


class _Fake(WholeNames):
    """A layer whose parameters and buffers have shapes and no values."""

    def __init__(self, layer: nn.Module, mode: Any) -> None:
        super().__init__()
        # not a child, whose tensors are real
        self._layer = [layer]
        self._tensors = {name: _faked(tensor, mode) for name, tensor in tensors_of(layer)}

    def accepts(self) -> frozenset[str] | None:
        """The layer's keyword arguments."""
        return accepted_names(self._layer[0])

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer on such tensors."""
        return torch.func.functional_call(self._layer[0], self._tensors, args, kwargs)


def _faked(tensor: torch.Tensor, mode: Any) -> torch.Tensor:
    if tensor.is_meta:
        # on the CPU, as attention on meta runs other operators
        with mode:
            tensor = torch.empty_like(tensor, device="cpu").requires_grad_(tensor.requires_grad)
    fake: torch.Tensor = mode.from_tensor(tensor)
    return fake


def _flops_of_fakes(layers: Sequence[nn.Module], args: Any, kwargs: Mapping[str, Any]) -> list[float] | None:
    """FLOPs without computing; None if a layer reads values."""
    mode = torch_private.fake_tensor_mode()
    device = next((p.device for layer in layers for p in layer.parameters() if not p.is_meta), torch.device("cpu"))

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        return _faked(tensor if tensor.is_meta else tensor.to(device), mode)

    try:
        fakes = [_Fake(layer, mode) for layer in layers]
        inputs, named = pytree.tree_map_only(torch.Tensor, fake, (tuple(args), dict(kwargs)))
        with mode:
            return _by_layer(fakes, inputs, named, _flops)
    except Exception as error:  # logged
        # errors of the layers themselves appear again when they are run
        logger.info("FLOPs are counted in a real run, as the layers do not run without values: %s", error)
        return None


def _flops(layer: nn.Module, inputs: tuple[Any, ...], named: Mapping[str, Any]) -> float:
    with FlopCounterMode(display=False) as counter:
        _forward_and_backward(layer, inputs, named)
    return float(counter.get_total_flops())


def _seconds(layer: nn.Module, inputs: tuple[Any, ...], named: Mapping[str, Any]) -> float:
    _forward_and_backward(layer, inputs, named)
    devices, times = cuda_devices([layer]), []
    for _ in range(_REPEATS):
        start = time_when_idle(devices)
        _forward_and_backward(layer, inputs, named)
        times.append(time_when_idle(devices) - start)
    return statistics.median(times)


def _activation_bytes(layer: nn.Module, inputs: tuple[Any, ...], named: Mapping[str, Any]) -> float:
    saved = SavedBytes(layer)
    with saved.counted():
        outputs = layer(*inputs, **named)
    total = sum(saved.by_address.values())
    del outputs
    return total


def _memory(layer: nn.Module, inputs: tuple[Any, ...], named: Mapping[str, Any]) -> float:
    held = sum(local_part(p).nbytes * (2 if p.requires_grad else 1) for p in layer.parameters())
    return held + _activation_bytes(layer, inputs, named)


def _forward_and_backward(layer: nn.Module, inputs: tuple[Any, ...], named: Mapping[str, Any]) -> None:
    outputs = [t for t in tensor_leaves(layer(*inputs, **named)) if t.requires_grad]
    if outputs:
        torch.autograd.backward(outputs, [torch.ones_like(t) for t in outputs])


def _leaves_of_a_graph(value: Any) -> Any:
    """An input as a stage gets it: detached, with its gradient flag."""
    return pytree.tree_map_only(torch.Tensor, lambda t: t.detach().requires_grad_(t.requires_grad), value)


@contextlib.contextmanager
def restored(*modules: nn.Module, followed: Iterable[dict[str, Any]] = ()) -> Iterator[None]:
    """Within it there are no gradients; restore them, and the state that a forward changes, afterwards.

    Args:
        followed: see `StageCopies.followed`.
    """
    put_back, attributes = keep_state(modules), KeptAttributes([*modules, *followed])
    grads = [(parameter, parameter.grad) for module in modules for parameter in module.parameters()]
    for parameter, _ in grads:
        parameter.grad = None
    try:
        yield
    finally:
        attributes.put_back()
        put_back()
        for parameter, grad in grads:
            parameter.grad = grad


MEASURED = {"flops": "FLOPs", "seconds": "seconds", "memory": "bytes"}
"""Values of ``partition`` that take an example, and their units."""


def costs_here(stages: Any, partition: Any, example: Any, rank: int) -> list[float] | None:
    """The costs of the layers for ``partition``; None if it needs none, or if rank 0 computes them.

    Times differ between processes, and all must cut alike, so rank 0's are used.
    """
    if not isinstance(partition, str) or partition not in MEASURED:
        if example is not None:
            raise ValueError(
                f"example is passed but partition = {partition!r} does not use it: omit it, or set partition to one of "
                f"{', '.join(map(repr, MEASURED))}"
            )
        return None
    if example is None:
        raise ValueError(
            f"partition = {partition!r}: pass one microbatch as example=, as the first layer takes it, or a "
            "tuple of its arguments"
        )
    layers = None if torch_stages(stages) else as_layers(stages)
    if layers is None:
        raise _cut_already(partition)
    if rank:
        return None
    try:
        return layer_costs(layers, *as_inputs((example,)), by=partition)
    except Exception as error:  # raised again with the argument's name
        if on_meta(layers):
            raise
        given = [
            tuple(e.shape) if isinstance(e, torch.Tensor) else type(e).__name__ for e in pytree.tree_leaves(example)
        ]
        raise ValueError(
            f"example has {given}, on which the layers fail ({cause_text(error)}): pass one microbatch as the first "
            "layer takes it, or a tuple of its arguments"
        ) from error


def cut_by(partition: Any, costs: Sequence[float] | None, num_stages: int) -> Any:
    """``partition`` as the number of layers per stage, if it was a kind of cost."""
    if costs is None:
        return partition
    _check_count(len(costs), num_stages)
    return [len(part) for part in partition_layers(costs, num_stages)]


def _cut_already(partition: Any) -> ValueError:
    return ValueError(
        f"partition = {partition!r}: these stages are cut already; omit partition, or give the model's layers as a list"
    )


def layer_ranges(layers: Sequence[nn.Module] | None, num_stages: int, partition: Any) -> list[range]:
    """The layers of every stage; none if the stages were given."""
    if layers is None:
        if isinstance(partition, str) and partition == "layers":  # an array is compared by element
            return []
        raise _cut_already(partition)
    check_modules("stages", layers)
    if isinstance(partition, str) and partition in ("layers", "parameters"):
        _check_count(len(layers), num_stages)
        return partition_layers(len(layers) if partition == "layers" else layer_costs(layers, by=partition), num_stages)
    if isinstance(partition, str) and re.fullmatch(r"\s*\d+(\s*,\s*\d+)*\s*", partition):
        partition = [int(count) for count in partition.split(",")]
    if isinstance(partition, str) or not isinstance(partition, Sequence):
        raise ValueError(
            f"partition = {partition!r}: use 'layers', 'parameters', {', '.join(map(repr, MEASURED))}, or the number "
            "of layers of every stage, as a list or as text like '3,2,2,1'"
        )
    return _explicit(list(partition), len(layers), num_stages)


def cut_text(layers: Sequence[nn.Module], ranges: Sequence[range], unit: str, costs: Sequence[float] | None) -> str:
    """The cut of a list of layers, and the ratio of the largest stage to the mean.

    Args:
        costs: of the layers, used for the cut; default: their parameters.
    """
    listed = " | ".join(f"{part[0]}-{part[-1]}" if len(part) > 1 else str(part[0]) for part in ranges)
    if costs is None:
        return f"layers {listed}; {_imbalance(layer_costs(layers, by='parameters'), ranges, 'parameters')}"
    return f"layers {listed}; {_imbalance(costs, ranges, unit)}"


def _imbalance(costs: Sequence[float], ranges: Sequence[range], unit: str) -> str:
    sums = [sum(costs[layer] for layer in part) for part in ranges]
    if not sum(sums):
        return f"no {unit}"
    largest = max(sums)
    excess = largest * len(sums) / sum(sums) - 1
    if excess < 0.0005:
        return f"equal {unit} in all stages"
    return f"stage {sums.index(largest)} has most {unit}, {excess:.1%} above the mean"


def _check_count(num_layers: int, num_stages: int) -> None:
    if num_layers < num_stages:
        raise ValueError(
            f"stages has {num_layers} layers but the schedule has {num_stages} stages: give at least one layer "
            "per stage, or use fewer ranks or stages_per_rank"
        )


def _explicit(given: list[Any], num_layers: int, num_stages: int) -> list[range]:
    counts = [len(count) if isinstance(count, range) else count for count in given]
    if len(counts) != num_stages or not all(is_whole(c, least=1) for c in counts) or sum(counts) != num_layers:
        raise ValueError(
            f"partition = {counts}: give {num_stages} numbers of at least 1, one per stage, that sum to the "
            f"{num_layers} layers; for a stage that computes nothing add an nn.Identity() to the layers"
        )
    ends = [sum(counts[: i + 1]) for i in range(num_stages)]
    ranges = [range(end - count, end) for count, end in zip(counts, ends, strict=True)]
    if any(isinstance(part, range) and part != own for part, own in zip(given, ranges, strict=True)):
        raise ValueError(f"partition = {given}: stages are consecutive layers; give {ranges}, or list the layers anew")
    return ranges
