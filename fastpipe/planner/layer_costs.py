"""LayerCosts: what every layer of a model costs, from which the planner cuts stages."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from fastpipe.checks import check_counts, check_type, plain
from fastpipe.cost import LARGEST, CostModel, PerLink, found_in, is_cost, json_of
from fastpipe.partition import partition

PerLayer = float | Sequence[float]
"""A number for every layer, or a sequence with one each."""

_BY_LAYER = (
    "forward",
    "backward_input",
    "backward_weight",
    "activation_bytes",
    "held_bytes",
    "parameter_bytes",
)
_NUMBERS = ("launch", "fused")
_COUNTS = ("num_layers", "microbatch_size", "batch_size")


@dataclass(frozen=True)
class LayerCosts:
    """The costs of a model's layers for one microbatch of `microbatch_size` rows, in seconds and bytes.

    A number is for every layer, a sequence has one for each; the first and the last often differ (embedding, head).

    Attributes:
        num_layers: the number of layers.
        forward: seconds of a layer's forward.
        backward_input: seconds of its backward for the input.
        backward_weight: seconds of its backward for the weights.
        activation_bytes: bytes of a layer's output; its gradient has as many.
        held_bytes: bytes that a layer holds of a microbatch from its forward to its backward for the weights.
        parameter_bytes: bytes of weights, gradients, and the optimizer's state.
        comm: seconds of latency between two ranks, as in `CostModel`.
        bandwidth: bytes per second of a link, as in `CostModel`.
        launch: fixed seconds of every action of a stage, besides those of its layers: the cost of small stages and
            small microbatches.
        fused: seconds of a fused F and B as a fraction of the two. Default: 1.
        microbatch_size: the rows of a microbatch for which these costs hold.
        batch_size: the rows of a step. With it the planner may choose the number of microbatches: seconds of layers,
            and bytes except those of parameters, are proportional to the rows of a microbatch.
    """

    num_layers: int
    forward: PerLayer = 1.0
    backward_input: PerLayer = 1.0
    backward_weight: PerLayer = 1.0
    activation_bytes: PerLayer = 0.0
    held_bytes: PerLayer = 0.0
    parameter_bytes: PerLayer = 0.0
    comm: PerLink = 0.0
    bandwidth: PerLink = math.inf
    launch: float = 0.0
    fused: float = 1.0
    microbatch_size: int = 1
    batch_size: int | None = None

    def __post_init__(self) -> None:
        for name in _COUNTS:
            count = getattr(self, name)
            if count is not None or name != "batch_size":
                object.__setattr__(self, name, check_counts(**{name: count})[0])
        for name in _BY_LAYER:
            object.__setattr__(self, name, _per_layer(name, plain(getattr(self, name)), self.num_layers))
        for name in _NUMBERS:
            number = plain(getattr(self, name))
            if not is_cost(number):
                raise ValueError(f"{name} = {number!r}: give a number from 0 to {LARGEST:g}")
            object.__setattr__(self, name, number)
        links = CostModel(comm=self.comm, bandwidth=self.bandwidth)  # which checks them
        object.__setattr__(self, "comm", links.comm)
        object.__setattr__(self, "bandwidth", links.bandwidth)

    def rows(self, num_microbatches: int) -> float:
        """The rows of a microbatch if a step has `num_microbatches`."""
        (num_microbatches,) = check_counts(num_microbatches=num_microbatches)
        if self.batch_size is None:
            return float(self.microbatch_size)
        return self.batch_size / num_microbatches

    def partition(self, num_stages: int) -> list[range]:
        """Layers to stages, the longest stage as short as possible."""
        seconds = zip(self._all("forward"), self._all("backward_input"), self._all("backward_weight"), strict=True)
        return partition([sum(layer) for layer in seconds], num_stages)

    def stages(self, parts: Sequence[range], num_microbatches: int) -> CostModel:
        """The costs of the stages of a partition."""
        _check_parts(parts, self.num_layers)
        scale = self.rows(num_microbatches) / self.microbatch_size
        seconds = {
            name: [self.launch + scale * self._sum(name, part) for part in parts]
            for name in ("forward", "backward_input", "backward_weight")
        }
        backward = [self.launch + scale * (self._sum(_BY_LAYER[1], p) + self._sum(_BY_LAYER[2], p)) for p in parts]
        overlapped = None
        if self.fused != 1.0:
            overlapped = [self.fused * (f + b) for f, b in zip(seconds["forward"], backward, strict=True)]
        return CostModel(
            **seconds,
            backward=backward if self.launch else None,
            overlapped=overlapped,
            comm=self.comm,
            bandwidth=self.bandwidth,
            activation_bytes=[scale * self._all("activation_bytes")[part[-1]] for part in parts],
            stage_bytes=[scale * self._sum("held_bytes", part) for part in parts],
        )

    def parameters(self, parts: Sequence[range]) -> list[float]:
        """`parameter_bytes`, by stage."""
        _check_parts(parts, self.num_layers)
        return [self._sum("parameter_bytes", part) for part in parts]

    def _all(self, name: str) -> tuple[float, ...]:
        values: tuple[float, ...] = getattr(self, name)
        return values

    def _sum(self, name: str, part: range) -> float:
        return math.fsum(self._all(name)[part.start : part.stop])

    @classmethod
    def from_json(cls, path: str | Path) -> LayerCosts:
        """Read it from JSON, an object with the attributes' names: path, text and links as in `CostModel.from_json`.

        Raises:
            ValueError: naming the file and the entry that is wrong.
        """
        with json_of(path) as data:
            return cls.from_dict(data)

    @classmethod
    def from_dict(cls, data: Any) -> LayerCosts:
        """Build it from what JSON gives.

        Raises:
            ValueError: naming the entry that is wrong.
        """
        if not isinstance(data, Mapping) or "num_layers" not in data:
            raise ValueError("costs: give an object with num_layers and the other attributes of LayerCosts")
        known = [field.name for field in fields(cls)]
        for name in data:
            if name not in known:
                raise ValueError(f"costs: there is no {name!r}; there are {', '.join(known)}")
        links = {name: data[name] for name in ("comm", "bandwidth") if name in data}
        with found_in("costs"):
            model = CostModel.from_dict(links)
        return cls(**{**data, **{name: getattr(model, name) for name in links}})


def _check_parts(parts: Any, num_layers: int) -> None:
    hint = "LayerCosts.partition gives them"
    check_type(Sequence, hint, parts=parts)
    for part in parts:
        check_type(range, hint, part=part)
        if not 0 <= part.start < part.stop <= num_layers:
            raise ValueError(f"part = {part}: give layers of 0 to {num_layers - 1}, at least one of them")


def _per_layer(name: str, value: Any, num_layers: int) -> tuple[float, ...]:
    values = (value,) * num_layers if isinstance(value, int | float) else value
    if isinstance(values, str) or not isinstance(values, Sequence) or len(values) != num_layers:
        raise ValueError(f"{name} = {value!r}: give a number, or one for each of {num_layers} layers")
    for layer, number in enumerate(values):
        if not is_cost(number):
            raise ValueError(f"{name}[{layer}] = {number!r}: give a number from 0 to {LARGEST:g}")
    return tuple(map(float, values))
