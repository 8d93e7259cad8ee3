"""Problem: what is planned for, and what its stages cost when a placement and a partition are chosen."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from fastpipe.cost import CostModel, shared_out
from fastpipe.placement import Placement
from fastpipe.planner.budget import Memory
from fastpipe.planner.layer_costs import LayerCosts

Costs = CostModel | LayerCosts
_STAGES = ("forward", "backward_input", "backward_weight", "backward", "overlapped", "activation_bytes", "stage_bytes")
OBJECTIVES = ("makespan", "span")


@dataclass(frozen=True)
class Setting:
    """What stages cost on one placement, and what their ranks may hold.

    Attributes:
        placement: of the stages.
        num_microbatches: of a step.
        cost: by stage.
        held: what a stage holds of a microbatch: bytes where they are known, else in activations of a rank's share.
        limit: what a rank may hold, in the same unit; infinite where memory is no matter.
        share: one activation of a rank's share of the model, in the same unit.
        parts: the layers of every stage; None where there are no layers.
        parameters: bytes that stay, by stage.
    """

    placement: Placement
    num_microbatches: int
    cost: CostModel
    held: tuple[float, ...]
    limit: tuple[float, ...]
    share: float
    parts: tuple[range, ...] | None = None
    parameters: tuple[float, ...] = ()


@dataclass(frozen=True)
class Problem:
    """What is planned for.

    Attributes:
        costs: of a rank's share of the model or of stages (`CostModel`), or of layers.
        num_ranks: how many ranks.
        memory: what a rank may hold; None for any amount.
        objective: ``"makespan"`` or ``"span"``.
        max_stages_per_rank: at most so many.
    """

    costs: Costs
    num_ranks: int
    memory: Memory | None
    objective: str
    max_stages_per_rank: int

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

    def setting(self, placement: Placement, num_microbatches: int, parts: Sequence[range] | None = None) -> Setting:
        """What the stages of a placement cost, with the given partition of layers or the most even one."""
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
        held = cost.per_stage("stage_bytes", num_stages).tolist()
        held = held if any(held) else sizes
        return Setting(
            placement,
            num_microbatches,
            cost,
            tuple(held),
            self._limit(placement, sum(held), parameters),
            sum(held) / self.num_ranks,
            None if parts is None else tuple(parts),
            tuple(parameters),
        )

    def _limit(self, placement: Placement, held: float, parameters: Sequence[float]) -> tuple[float, ...]:
        if self.memory is None:
            return (float("inf"),) * self.num_ranks
        limit = self.memory.of_activations(held, self.num_ranks)
        if self.memory.unit != "bytes":
            return (limit,) * self.num_ranks
        return tuple(limit - sum(parameters[s] for s in placement.stages_of(r)) for r in range(self.num_ranks))

    @property
    def knows_bytes(self) -> bool:
        """Whether the costs say what stages hold in bytes."""
        name = "held_bytes" if isinstance(self.costs, LayerCosts) else "stage_bytes"
        value = getattr(self.costs, name)
        return any(value) if isinstance(value, Sequence) else bool(value)


def read_costs(costs: Any) -> Costs:
    """Costs from what the user gives: a model of either kind, a mapping of its attributes, or a JSON file.

    Raises:
        ValueError: naming what is wrong.
        TypeError: for anything else.
    """
    if isinstance(costs, CostModel | LayerCosts):
        return costs
    if isinstance(costs, str | Path):
        path = Path(costs)
        try:
            costs = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}: no JSON: {error}") from None
    if not isinstance(costs, Mapping):
        raise TypeError(f"costs: expected a CostModel, LayerCosts, a dict or a file, found {type(costs).__name__}")
    if "num_layers" in costs:
        return LayerCosts.from_dict(costs)
    layers = {field.name for field in fields(LayerCosts)} - {field.name for field in fields(CostModel)}
    named = sorted(layers & set(costs))
    if named:
        raise ValueError(f"costs: {named[0]} is of layers; say num_layers too")
    return CostModel.from_json(json.dumps(dict(costs)) + "\n")
