"""Problem: what is planned for, what its stages cost on a placement, what memory allows, and what no order beats."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import isinf
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np

from fastpipe.cost import LARGEST, CostModel, found_in, json_of, shared_out
from fastpipe.placement import Placement
from fastpipe.planner.layer_costs import LayerCosts
from fastpipe.theory import bounds

Costs = CostModel | LayerCosts
Floats = tuple[float, ...]
_SECONDS = ("forward", "backward_input", "backward_weight", "backward", "overlapped")
_STAGES = (*_SECONDS, "activation_bytes", "stage_bytes", "recompute", "kept_bytes")
RECOMPUTE = ("none", "full", "auto")
SHARES = {"none": 0.0, "half": 0.5, "full": 1.0}
"""The part of the stages, from the first on, that recompute to begin with: the first hold longest what they keep."""
OBJECTIVES = ("makespan", "span")
UNITS = {
    **{unit + "B": 1000.0**power for power, unit in enumerate(("", "K", "M", "G", "T"))},
    **{unit + "iB": 1024.0**power for power, unit in enumerate(("K", "M", "G", "T"), 1)},
}
_MOST_FRACTION, _LEAST_BYTES = 1000.0, 1e6
_TEXT = re.compile(r"\s*([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z]*)\s*")
_HELP = "give a fraction of 1F1B's (0.625), activations ('5 activations'), or bytes of a rank ('40GiB')"


@dataclass(frozen=True)
class Memory:
    """What a rank may hold.

    Attributes:
        unit: ``"fraction"`` of 1F1B's memory, ``"activations"`` of a rank's share of the model and one microbatch (1F1B
            holds as many as there are ranks), or ``"bytes"``, parameters and receive buffers included.
        amount: how much.
    """

    unit: str
    amount: float

    def of_activations(self, held_by_model: float, num_ranks: int) -> float:
        """The limit in the unit of what stages hold, given what the whole model holds of one microbatch."""
        if self.unit == "bytes":
            return self.amount
        share = self.amount if self.unit == "fraction" else self.amount / num_ranks
        return share * held_by_model

    def __str__(self) -> str:
        if self.unit == "fraction":
            return f"{self.amount:.4g} of 1F1B's"
        return f"{self.amount:.4g} activations a rank" if self.unit == "activations" else f"{human(self.amount)} a rank"


def is_number(value: Any) -> bool:
    """Whether it is one, of Python or numpy; a bool is none."""
    return isinstance(value, Real) and not isinstance(value, bool)


def memory_of(value: Any) -> Memory | None:
    """What `fastpipe.plan` takes for memory.

    Raises:
        ValueError: for what is none of the three.
    """
    if value is None or isinstance(value, Memory):
        return value
    if isinstance(value, str):
        return _read(value)
    amount = value if isinstance(value, int) else float(value) if is_number(value) else 0.0  # an int may be too large
    if isinstance(value, bool) or not 0 < amount <= LARGEST:
        raise ValueError(f"memory = {value!r}: {_HELP}")
    amount = float(amount)
    if amount <= _MOST_FRACTION:
        return Memory("fraction", amount)
    if amount >= _LEAST_BYTES:
        return Memory("bytes", amount)
    raise ValueError(f"memory = {value!r} is too much for a fraction and too little for bytes: {_HELP}")


def _read(text: str) -> Memory:
    match = _TEXT.fullmatch(text)
    number, unit = (float(match[1]), match[2]) if match else (0.0, "")
    if not 0 < number <= LARGEST:
        raise ValueError(f"memory = {text!r}: {_HELP}")
    if not unit:
        return memory_of(number) or Memory("fraction", number)
    if unit in ("activation", "activations"):
        return Memory("activations", number)
    factors = {name.lower(): factor for name, factor in UNITS.items()}
    if unit.lower() not in factors:
        raise ValueError(f"memory = {text!r}: there is no unit {unit!r}; use one of {', '.join(UNITS)} or activations")
    return Memory("bytes", number * factors[unit.lower()])


def human(count: float) -> str:
    """Bytes for people."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if count >= UNITS[unit]:
            return f"{count / UNITS[unit]:.4g} {unit}"
    return f"{count:.4g} B"


@dataclass(frozen=True)
class Setting:
    """What stages cost on one placement, and what their ranks may hold.

    Attributes:
        held: what a stage holds of a microbatch: bytes where they are known, else in activations of a rank's share.
        kept: the same up to its backward, where it recomputes the rest.
        limit: what a rank may hold, in the same unit; infinite where memory is no matter.
        counted: `held` as the search counts it: where memory is in bytes, with the messages that a stage has received
            and needs until its W.
        room: `limit` in the same way: less what is received while another action runs.
        share: one activation of a rank's share of the model, in the same unit.
        recomputes: of every stage whether it recomputes its forward, where that was for the planner to choose.
    """

    placement: Placement
    num_microbatches: int
    cost: CostModel
    held: tuple[float, ...]
    kept: tuple[float, ...]
    limit: tuple[float, ...]
    counted: tuple[float, ...]
    begun: tuple[float, ...]
    room: tuple[float, ...]
    share: float
    parts: tuple[range, ...] | None = None
    parameters: tuple[float, ...] = ()
    recomputes: tuple[bool, ...] | None = None


@dataclass(frozen=True)
class Problem:
    """What is planned for.

    Attributes:
        costs: of a rank's share of the model or of stages (`CostModel`), or of layers.
        placement: where all stages have to be; None for anywhere.
        recompute: one of `RECOMPUTE`, or of `SHARES` while the planner tries them.
    """

    costs: Costs
    num_ranks: int
    memory: Memory | None
    objective: str
    max_stages_per_rank: int
    placement: Placement | None = None
    recompute: str = "none"

    @property
    def span(self) -> bool:
        """Whether the span is the objective."""
        return self.objective == "span"

    @property
    def fixed_stages(self) -> int | None:
        """The number of stages, where the costs name each."""
        if isinstance(self.costs, LayerCosts):
            return None
        for name in _STAGES:
            value = getattr(self.costs, name)
            if isinstance(value, Sequence):
                return len(value)
        return None

    def stages_per_rank(self) -> list[int]:
        """How many stages a rank may have: every number that the model allows.

        Raises:
            ValueError: when there is none.
        """
        fixed = self.fixed_stages
        if self.placement is not None:
            return [self._depth_of(self.placement, fixed)]
        if fixed is not None:
            if fixed % self.num_ranks:
                raise ValueError(
                    f"costs name {fixed} stages, which num_ranks = {self.num_ranks} does not divide: give costs of as "
                    "many stages as ranks or a multiple, or of layers (LayerCosts)"
                )
            return [fixed // self.num_ranks]
        most = self.max_stages_per_rank
        if isinstance(self.costs, LayerCosts):
            most = min(most, self.costs.num_layers // self.num_ranks)
            if most == 0:
                raise ValueError(
                    f"num_ranks = {self.num_ranks}: there are only {self.costs.num_layers} layers; give at most as many"
                )
        return list(range(1, most + 1))

    def _depth_of(self, placement: Placement, fixed: int | None) -> int:
        """How many stages a rank holds in the mean where they have to be, of one route, rounded up."""
        stages = placement.num_stages
        layers = self.costs.num_layers if isinstance(self.costs, LayerCosts) else None
        if placement.num_ranks != self.num_ranks:
            raise ValueError(f"placement has {placement.num_ranks} ranks and num_ranks = {self.num_ranks}: use one")
        if fixed not in (None, stages):
            raise ValueError(f"placement has {stages} stages and the costs name {fixed}: give costs of these stages")
        if layers is not None and layers < stages:
            raise ValueError(f"placement has {stages} stages and there are only {layers} layers; give at least as many")
        return -(-stages // self.num_ranks)

    def allows(self, placement: Placement) -> bool:
        """Whether there may be so many stages, and there."""
        if self.placement is not None:
            return self.placement.routes == placement.routes
        return self.fixed_stages in (None, placement.num_stages)

    def setting(
        self,
        placement: Placement,
        num_microbatches: int,
        parts: Sequence[range] | None = None,
        recomputes: Sequence[bool] | None = None,
    ) -> Setting:
        """What the stages of a placement cost, with the given partition of layers or the most even one.

        Args:
            recomputes: the stages that recompute their forward; as the costs say unless given.
        """
        num_stages, costs = placement.num_stages, self.costs
        parameters: Sequence[float] = (0.0,) * num_stages
        if isinstance(costs, LayerCosts):
            parts = costs.partition(num_stages) if parts is None else parts
            cost, parameters = costs.stages(parts, num_microbatches), costs.parameters(parts)
            sizes = [len(part) / costs.num_layers * self.num_ranks for part in parts]
        else:
            by_stage = self.fixed_stages is not None
            cost = costs if by_stage else shared_out(costs, num_stages / self.num_ranks)
            sizes = [self.num_ranks / num_stages] * num_stages
        if recomputes is None and self.recompute != "none":
            recomputes = [stage < SHARES[self.recompute] * num_stages for stage in range(num_stages)]
        if recomputes is not None:
            cost = replace(cost, recompute=[float(again) for again in recomputes])
        held = cost.per_stage("stage_bytes", num_stages).tolist()
        inputs = [0.0, *cost.per_stage("activation_bytes", num_stages).tolist()[:-1]]
        if not any(held):
            held, inputs = sizes, [0.0] * num_stages
        parts_kept = 1 - cost.per_stage("recompute", num_stages)
        kept = [min(whole, whole * part + own) for whole, part, own in zip(held, parts_kept, inputs, strict=True)]
        limit = self._limit(placement, sum(held), parameters)
        by_bytes = self.memory is not None and self.memory.unit == "bytes"
        plain = tuple(held), tuple(map(float, kept)), limit
        counted, begun, room = _with_messages(placement, cost, limit) if by_bytes else plain
        return Setting(
            placement,
            num_microbatches,
            cost,
            *plain,
            counted,
            begun,
            room,
            sum(held) / self.num_ranks,
            None if parts is None else tuple(parts),
            tuple(parameters),
            None if recomputes is None else tuple(map(bool, recomputes)),
        )

    def _limit(self, placement: Placement, held: float, parameters: Sequence[float]) -> tuple[float, ...]:
        if self.memory is None:
            return (float("inf"),) * self.num_ranks
        limit = self.memory.of_activations(held, self.num_ranks)
        if self.memory.unit != "bytes":
            return (limit,) * self.num_ranks
        return tuple(limit - sum(parameters[s] for s in stages) for stages in placement.stages_by_rank())

    @property
    def knows_bytes(self) -> bool:
        """Whether the costs say what stages hold in bytes."""
        name = "held_bytes" if isinstance(self.costs, LayerCosts) else "stage_bytes"
        value = getattr(self.costs, name)
        return any(value) if isinstance(value, Sequence) else bool(value)


def _with_messages(placement: Placement, cost: CostModel, limit: Floats) -> tuple[Floats, Floats, Floats]:
    """`Setting.counted`, `begun` and `room`: what `peak_bytes` counts of a program, where no order says it."""
    num_stages = placement.num_stages
    whole, kept, boundary = (
        cost.per_stage(name, num_stages) for name in ("stage_bytes", "kept_bytes", "activation_bytes")
    )
    meets = [[a != b for a, b in zip(route, route[1:], strict=False)] for route in placement.routes]
    remote = np.array(meets, dtype=np.bool_).reshape(len(placement.routes), num_stages - 1).any(axis=0)
    inputs = np.concatenate([[0.0], np.where(remote, boundary[:-1], 0.0)])
    gradients = np.concatenate([np.where(remote, boundary[:-1], 0.0), [0.0]])
    # what is handed over within a rank is copied nowhere; but who recomputes holds it alone
    again = np.divide(whole - kept, whole, out=np.zeros(num_stages), where=whole > 0)
    handed = np.concatenate([[0.0], np.where(remote, 0.0, boundary[:-1])]) * again
    room = [
        most - max((max(inputs[s], gradients[s]) for s in stages), default=0.0)
        for most, stages in zip(limit, placement.stages_by_rank(), strict=True)
    ]
    begun = kept + inputs + handed
    counted = whole + inputs + handed + gradients
    return tuple(counted.tolist()), tuple(begun.tolist()), tuple(map(float, room))


def read_costs(costs: Any) -> Costs:
    """Costs from what the user gives: a model of either kind, a mapping of its attributes, or a JSON file.

    Raises:
        ValueError: naming the file and what is wrong.
        TypeError: for anything else.
    """
    if isinstance(costs, CostModel | LayerCosts):
        return costs
    if isinstance(costs, Mapping):
        return _from_dict(costs)
    if not isinstance(costs, str | Path):
        raise TypeError(f"costs: expected a CostModel, LayerCosts, a dict or a file, found {type(costs).__name__}")
    with json_of(costs) as data:
        if not isinstance(data, dict):
            raise ValueError("give an object with the attributes of CostModel or of LayerCosts")
        return _from_dict(data)


def _from_dict(costs: Mapping[str, Any]) -> Costs:
    if "num_layers" in costs:
        return LayerCosts.from_dict(costs)
    layers = {field.name for field in fields(LayerCosts)} - {field.name for field in fields(CostModel)}
    named = sorted(layers & set(costs))
    if named:
        raise ValueError(f"costs: {named[0]} is of layers; say num_layers too")
    with found_in("costs"):
        return CostModel.from_dict(costs)


def bound_of(problem: Problem, setting: Setting) -> float:
    """Seconds of the objective, for every order of these stages where they are."""
    return max(_bound_where_they_are(problem, setting), bound_anywhere(problem, setting))


def _bound_where_they_are(problem: Problem, setting: Setting) -> float:
    cost = replace(setting.cost, stage_bytes=setting.held)
    limited = not isinf(min(setting.limit))
    found = bounds.bounds(
        setting.placement,
        cost,
        num_microbatches=setting.num_microbatches,
        memory=setting.limit if limited else None,
        in_bytes=limited,
        measure=problem.objective,
    )
    return bounds.best(found).seconds


def bound_anywhere(problem: Problem, setting: Setting) -> float:
    """The same wherever the stages are; over one route, since with two every rank has a first stage."""
    cost = replace(setting.cost, stage_bytes=setting.held)
    limit = max(setting.limit)
    if setting.placement.num_routes > 1:
        return _bound_where_they_are(problem, setting)
    found = bounds.any_placement_bounds(
        cost,
        num_ranks=problem.num_ranks,
        num_stages=setting.placement.num_stages,
        num_microbatches=setting.num_microbatches,
        memory=None if isinf(limit) else limit,
        in_bytes=not isinf(limit),
        measure=problem.objective,
    )
    return bounds.best(found).seconds
