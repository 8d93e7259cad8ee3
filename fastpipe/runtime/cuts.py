"""Cuts: where a list of layers is cut into stages, and how far that is from even."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from torch import nn

from fastpipe.partition import partition as partition_layers
from fastpipe.runtime.chain import as_layers
from fastpipe.runtime.layer_costs import layer_costs

MEASURED = {"flops": "FLOPs", "seconds": "seconds", "memory": "bytes"}
"""What ``partition`` may name that takes an example, and what it is counted in."""


def costs_here(stages: Any, partition: Any, example: Any, rank: int) -> list[float] | None:
    """The costs of the layers that ``partition`` asks for; None where it asks for none, or where rank 0 counts them.

    Times differ from process to process, and all have to cut alike, so those of rank 0 decide.

    Raises:
        ValueError: naming ``example`` or ``partition``.
    """
    if not isinstance(partition, str) or partition not in MEASURED:
        if example is not None:
            raise ValueError(
                f"example is given and partition = {partition!r} needs none: leave it out, or set partition to one of "
                f"{', '.join(map(repr, MEASURED))}"
            )
        if partition != "layers" and callable(stages) and not isinstance(stages, nn.Module):
            raise ValueError(f"partition = {partition!r}: stages is a function, which makes whole stages; leave it out")
        return None
    if example is None:
        raise ValueError(
            f"partition = {partition!r}: pass one microbatch as example=, as the first layer takes it; a tuple is "
            "several arguments"
        )
    layers = as_layers(stages)
    if layers is None:
        raise ValueError(f"partition = {partition!r}: give the model's layers as a list; these stages are cut already")
    if rank:
        return None
    return layer_costs(layers, *(example if isinstance(example, tuple) else (example,)), by=partition)


def cut_by(partition: Any, costs: Sequence[float] | None, num_stages: int) -> Any:
    """``partition`` as the number of layers of every stage, where it was costs."""
    if costs is None:
        return partition
    _check_count(len(costs), num_stages)
    return [len(part) for part in partition_layers(costs, num_stages)]


def layer_ranges(layers: Sequence[nn.Module], num_stages: int, partition: Any) -> list[range]:
    """Which layers every stage has."""
    for index, layer in enumerate(layers):
        if not isinstance(layer, nn.Module):
            raise TypeError(f"stages[{index}] is a {type(layer).__name__}: the layers are nn.Modules")
    if partition in ("layers", "parameters"):
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


def layer_counts(stages: Any, num_stages: int, partition: Any) -> list[int] | None:
    """The number of layers of every stage; None where the stages were not made from layers."""
    layers = as_layers(stages)
    return None if layers is None else [len(part) for part in layer_ranges(layers, num_stages, partition)]


def cut_text(stages: Any, num_stages: int, partition: Any, unit: str, costs: Sequence[float] | None) -> str:
    """Where a list of layers is cut, and how far the largest stage is from the mean; empty for other forms.

    Args:
        stages: the layers.
        num_stages: into how many.
        partition: how.
        unit: what costs are counted in.
        costs: of the layers, by which they were cut; their parameters unless given.
    """
    layers = as_layers(stages)
    if layers is None:
        return ""
    ranges = layer_ranges(layers, num_stages, partition)
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
    return f"stage {sums.index(largest)} has most {unit}, {excess:.1%} above the mean"


def _check_count(num_layers: int, num_stages: int) -> None:
    if num_layers < num_stages:
        raise ValueError(
            f"stages has {num_layers} layers and the schedule has {num_stages} stages: give at least one layer a "
            "stage, or use fewer ranks or stages_per_rank"
        )


def _explicit(counts: list[Any], num_layers: int, num_stages: int) -> list[range]:
    counts = [len(count) if isinstance(count, range) else count for count in counts]
    if len(counts) != num_stages or any(not isinstance(c, int) or c < 1 for c in counts) or sum(counts) != num_layers:
        raise ValueError(
            f"partition = {counts}: give {num_stages} numbers of at least 1, one a stage, that sum to the "
            f"{num_layers} layers"
        )
    ends = [sum(counts[: i + 1]) for i in range(num_stages)]
    return [range(end - count, end) for count, end in zip(counts, ends, strict=True)]
