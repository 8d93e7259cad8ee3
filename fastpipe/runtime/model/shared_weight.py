"""A weight that several stages use, all in this process or some in others.

Its handling depends on the stages' replicas. Without replicas, and with DistributedDataParallel, a later stage uses an
alias during the step. With ``fully_shard`` every stage has its own parameters, and each later stage's shard follows the
first one's.

The gradient of each stage's uses is averaged over its replicas, and then the averages are added: the same numbers in
the same order on every replica.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fastpipe.runtime.common import alias_of, digest_of, local_part, parameters_of, torch_private
from fastpipe.runtime.data_parallel import is_sharded

REPLICATED, SHARDED = "DistributedDataParallel", "fully_shard"

Places = list[tuple[nn.Module, str]]
"""The places of a parameter: modules and attribute names."""


@dataclass(frozen=True)
class Tie:
    """The names of one weight.

    Attributes:
        names: in the unsplit model, in the order of the stages.
        members: for each name, the stage and the name in the stage's module.
    """

    names: tuple[str, ...]
    members: tuple[tuple[int, str], ...]

    @property
    def stages(self) -> list[int]:
        """The stages that use the weight, ascending."""
        return sorted({stage for stage, _ in self.members})


def put(places: Places, parameter: nn.Parameter) -> None:
    """Set the parameter in all places."""
    for module, name in places:
        parameters_of(module)[name] = parameter


def kind_of(module: nn.Module) -> str:
    """The wrapper of a stage's module, if any."""
    if any(map(is_sharded, module.modules())):
        return SHARDED
    return REPLICATED if any(isinstance(inner, DistributedDataParallel) for inner in module.modules()) else ""


def kind_of_tie(tie: Tie, modules: Mapping[int, nn.Module]) -> str:
    """The wrapper of the weight's local stages.

    Raises:
        ValueError: if the stages have different wrappers.
    """
    found = [{tie.names[0]: kind_of(modules[stage])} for stage in tie.stages if stage in modules]
    check_alike(found)
    return found[0][tie.names[0]] if found else ""


def kinds_of_ties(ties: Sequence[Tie], modules: Mapping[int, nn.Module]) -> dict[str, str]:
    """By weight with local stages, their wrapper."""
    return {tie.names[0]: kind_of_tie(tie, modules) for tie in ties if modules.keys() & set(tie.stages)}


def check_alike(found: Sequence[Mapping[str, str]]) -> None:
    """Refuse a weight whose stages have different wrappers."""
    kinds: dict[str, str] = {}
    for name, kind in ((name, kind) for part in found for name, kind in part.items()):
        if kinds.setdefault(name, kind) != kind:
            raise ValueError(
                f"stages: one stage with the tied weight {name} is in {kinds[name] or 'no wrapper'} but another in "
                f"{kind or 'no wrapper'}; use one wrapper for all of them"
            )


def check_own_replicas(tie: Tie, stage: int, module: nn.Module) -> None:
    """Refuse a new Parameter in a wrapped module: the wrapper would still reduce the old one."""
    if kind_of(module):
        raise ValueError(
            f"tied: stage {stage} was wrapped in {kind_of(module)} while its {tie.names[0]} was a Parameter of its "
            "own; let the names share one Parameter before you wrap it, or leave the wrapping to data_parallel="
        )


def check_no_hooks(parameter: nn.Parameter, name: str) -> None:
    """Refuse the user's hooks on a weight of several stages: they would run on the gradient of one stage's uses.

    Hooks of reductions exist only within a step.
    """
    hooks_of, post_hooks_of = torch_private.hooks_of, torch_private.post_hooks_of
    for method, find in (("register_hook", hooks_of), ("register_post_accumulate_grad_hook", post_hooks_of)):
        if find(parameter):
            raise ValueError(
                f"tied: {name} has a hook of {method}, which would receive the gradient of one stage, and not "
                "of all stages that share the weight; remove it, and change .grad after pipe.step, before the "
                "optimizer's step"
            )


def with_local_part(like: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """A DTensor like another one, with this local part; or the local tensor itself."""
    spread: Any = like
    if local_part(like) is like:
        return local
    from torch.distributed.tensor import DTensor

    mesh, placements = spread.device_mesh, spread.placements
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=spread.shape, stride=spread.stride())


class Shared:
    """One weight on this process: a Parameter (`agreed`, equal on all its processes), and an alias per later stage."""

    def __init__(self, tie: Tie, places: Mapping[int, Places]) -> None:
        self.tie = tie
        self.stages = sorted(places)
        module, name = places[self.stages[0]][0]
        self.parameter = self.agreed = module.get_parameter(name)
        self.everywhere = places
        self.places = {stage: places[stage] for stage in self.stages[1:]}
        self.aliases = {stage: alias_of(self.parameter) for stage in self.places}
        self.kept: torch.Tensor | None = None

    def adopt(self) -> None:
        """Use another Parameter from now on, if the user has set one in all places; called between steps.

        Raises:
            ValueError: if the places have different ones.
        """
        standing = {stage: [parameters_of(m).get(name) for m, name in self.everywhere[stage]] for stage in self.stages}
        first = standing[self.stages[0]][0]
        if first is None or any(found is not first for stage in self.stages for found in standing[stage]):
            changed = {stage for stage in self.stages if any(p is not self.parameter for p in standing[stage])}
            raise ValueError(_no_longer_one(self.tie, changed))
        if first is not self.parameter or any(alias.is_meta != first.is_meta for alias in self.aliases.values()):
            self.parameter = first
            self.aliases = {stage: alias_of(first) for stage in self.aliases}

    def check_hooks(self) -> None:
        """Refuse hooks that were added after the Pipeline was built; see `check_no_hooks`."""
        for parameter in (self.parameter, *self.aliases.values()) if len(self.tie.stages) > 1 else ():
            check_no_hooks(parameter, self.tie.names[0])

    def replaced(self) -> str | None:
        """A digest of the new Parameter's value, if it is not agreed yet."""
        if self.parameter is self.agreed:
            return None
        return f"{self.parameter.dtype} {tuple(self.parameter.shape)} {digest_of(self.parameter)}"

    def bind_alias(self) -> None:
        """Set the aliases in the later stages."""
        for stage, alias in self.aliases.items():
            # its memory and gradient flag may have changed
            alias.data = self.parameter.data
            alias.requires_grad_(self.parameter.requires_grad)
            put(self.places[stage], alias)

    def unbind_alias(self) -> None:
        """Set the Parameter in all stages."""
        for places in self.places.values():
            put(places, self.parameter)

    def grads(self) -> dict[int, torch.Tensor | None]:
        """The gradient of each local stage's uses."""
        return {self.stages[0]: self.parameter.grad} | {stage: alias.grad for stage, alias in self.aliases.items()}

    def set_aside(self) -> None:
        """Save the existing gradient, so that the step's own is separate."""
        self.kept = self.parameter.grad
        for parameter in (self.parameter, *self.aliases.values()):
            parameter.grad = None

    def add_up(self, grads: Mapping[int, torch.Tensor | None]) -> None:
        """Add the stages' gradients, the last stage's first as in a backward, to the saved one."""
        self.parameter.grad = _added(self.kept, sum_of_uses(grads))
        self.kept = None
        for alias in self.aliases.values():
            alias.grad = None


def sum_of_uses(grads: Mapping[int, torch.Tensor | None]) -> torch.Tensor | None:
    """The sum over the stages' uses, the last stage's first as in a backward."""
    total = None
    for stage in sorted(grads, reverse=True):
        total = _added(total, grads[stage])
    return total


class SharedReplicas(Shared):
    """A weight of stages in DistributedDataParallel, which averages all of ``.grad``, with earlier steps.

    So the existing gradient stays there, and is part of the step's gradient of the tie's first stage only.
    """

    def set_aside(self) -> None:
        """Keep the existing gradient only on the holder of the tie's first stage."""
        if self.stages[0] != self.tie.stages[0]:
            self.parameter.grad = None
        for alias in self.aliases.values():
            alias.grad = None


class SharedShards(Shared):
    """A weight of stages with ``fully_shard``: each later stage has a shard that follows the first one's."""

    def __init__(self, tie: Tie, places: Mapping[int, Places]) -> None:
        super().__init__(tie, places)
        self.aliases = {stage: module.get_parameter(name) for stage, [(module, name), *_] in self.places.items()}
        for stage, alias in self.aliases.items():
            if local_part(alias).shape != local_part(self.parameter).shape:
                raise ValueError(
                    f"tied: {tie.names[0]} is sharded differently in stages {stage} and {self.stages[0]}; "
                    "apply fully_shard with the same arguments to both"
                )

    def adopt(self) -> None:
        """Nothing to do: ``fully_shard`` owns the Parameters."""

    def bind_alias(self) -> None:
        """Copy the first stage's shard to the later ones."""
        with torch.no_grad():
            for alias in self.aliases.values():
                local_part(alias).copy_(local_part(self.parameter))
                alias.requires_grad_(self.parameter.requires_grad)

    def unbind_alias(self) -> None:
        """Nothing to do: every stage keeps its shard."""


def shared_weight(tie: Tie, places: Mapping[int, Places], kind: str) -> Shared:
    """The weight of stages with a kind of wrapper."""
    return {REPLICATED: SharedReplicas, SHARDED: SharedShards}.get(kind, Shared)(tie, places)


def _no_longer_one(tie: Tie, changed: Container[int]) -> str:
    """The remedy if only some names of a weight have a new Parameter."""
    names = [name for name, (stage, _) in zip(tie.names, tie.members, strict=True) if stage in changed]
    return (
        f"tied: {' and '.join(tie.names)} are one weight in this Pipeline, and since the last step {', '.join(names)} "
        "got another Parameter, or none; assign the same nn.Parameter to all of them, or build a new Pipeline for "
        "weights that are no longer tied"
    )


def _added(first: torch.Tensor | None, second: torch.Tensor | None) -> torch.Tensor | None:
    if first is None or second is None:
        return second if first is None else first
    return first + second
