"""One weight that several stages of this process use, or one of this process and others elsewhere.

What a step does with it depends on the stages' replicas. Without any, and with DistributedDataParallel, a later stage
sees an alias while the step runs. ``fully_shard`` keeps parameters of its own for every stage, so there each later
stage has a shard that follows the first one's.

The gradient of each stage's uses is averaged over its replicas first, and the averages are added then: the same numbers
in the same order on every replica.
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
"""Where a parameter stands: modules and the attributes' names."""


@dataclass(frozen=True)
class Tie:
    """Names of one weight.

    Attributes:
        names: in the whole model, in the order of the stages.
        members: stage and name in the stage's module, for each name.
    """

    names: tuple[str, ...]
    members: tuple[tuple[int, str], ...]

    @property
    def stages(self) -> list[int]:
        """The stages that use the weight, ascending."""
        return sorted({stage for stage, _ in self.members})


def put(places: Places, parameter: nn.Parameter) -> None:
    """Have a parameter stand there."""
    for module, name in places:
        parameters_of(module)[name] = parameter


def kind_of(module: nn.Module) -> str:
    """What a stage's module is wrapped in, if anything."""
    if any(map(is_sharded, module.modules())):
        return SHARDED
    return REPLICATED if any(isinstance(inner, DistributedDataParallel) for inner in module.modules()) else ""


def kind_of_tie(tie: Tie, modules: Mapping[int, nn.Module]) -> str:
    """What the stages of a weight are wrapped in, those that are here.

    Raises:
        ValueError: when one is not wrapped as another.
    """
    found = [{tie.names[0]: kind_of(modules[stage])} for stage in tie.stages if stage in modules]
    check_alike(found)
    return found[0][tie.names[0]] if found else ""


def kinds_of_ties(ties: Sequence[Tie], modules: Mapping[int, nn.Module]) -> dict[str, str]:
    """By name, what the stages of each weight are wrapped in that this process has a stage of."""
    return {tie.names[0]: kind_of_tie(tie, modules) for tie in ties if modules.keys() & set(tie.stages)}


def check_alike(found: Sequence[Mapping[str, str]]) -> None:
    """Refuse a weight whose stages are not all wrapped in the same.

    Raises:
        ValueError: with what to do instead.
    """
    kinds: dict[str, str] = {}
    for name, kind in ((name, kind) for part in found for name, kind in part.items()):
        if kinds.setdefault(name, kind) != kind:
            raise ValueError(
                f"stages: of those that share the tied weight {name} one is in {kinds[name] or 'no wrapper'} and "
                f"another in {kind or 'no wrapper'}; wrap all of them alike"
            )


def check_own_replicas(tie: Tie, stage: int, module: nn.Module) -> None:
    """Refuse to exchange a weight of a wrapped module: the wrapper would go on to reduce the one it knows.

    Raises:
        ValueError: with what to do instead.
    """
    if kind_of(module):
        raise ValueError(
            f"tied: stage {stage} was wrapped in {kind_of(module)} while its {tie.names[0]} was a Parameter of its "
            "own; let the names share one Parameter before you wrap it, or leave the wrapping to data_parallel="
        )


def check_no_hooks(parameter: nn.Parameter, name: str) -> None:
    """Refuse a user's hooks on a weight of several stages: they would run on the gradient of one stage's uses.

    Those that reductions need are there within a step alone.

    Raises:
        ValueError: with what to do instead.
    """
    hooks_of, post_hooks_of = torch_private.hooks_of, torch_private.post_hooks_of
    for method, find in (("register_hook", hooks_of), ("register_post_accumulate_grad_hook", post_hooks_of)):
        if find(parameter):
            raise ValueError(
                f"tied: {name} has a hook of {method}, which would see what one stage gives to the gradient, and not "
                "what all stages that share the weight do; remove it, and change .grad after pipe.step, before the "
                "optimizer's step"
            )


def with_local_part(like: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """A tensor spread over processes as another one, of which this part is here."""
    spread: Any = like
    if local_part(like) is like:
        return local
    from torch.distributed.tensor import DTensor

    mesh, placements = spread.device_mesh, spread.placements
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=spread.shape, stride=spread.stride())


class Shared:
    """One weight on this process: a Parameter, and an alias for every later stage.

    Args:
        tie: its names.
        places: where it stands, for every stage here.

    Attributes:
        agreed: the Parameter that the processes which have the weight know to be equal.
    """

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
        """Between steps: go on with another Parameter, if the user put one in all places.

        Raises:
            ValueError: where not all places have the same.
        """
        standing = {stage: [parameters_of(m).get(name) for m, name in self.everywhere[stage]] for stage in self.stages}
        first = standing[self.stages[0]][0]
        if first is None or any(found is not first for stage in self.stages for found in standing[stage]):
            changed = {stage for stage in self.stages if any(p is not self.parameter for p in standing[stage])}
            raise ValueError(_no_longer_one(self.tie, changed))
        if first is not self.parameter:
            self.parameter = first
            self.aliases = {stage: alias_of(first) for stage in self.aliases}

    def check_hooks(self) -> None:
        """Refuse hooks that came since the Pipeline was built; see `check_no_hooks`."""
        for parameter in (self.parameter, *self.aliases.values()) if len(self.tie.stages) > 1 else ():
            check_no_hooks(parameter, self.tie.names[0])

    def replaced(self) -> str | None:
        """A digest of the value of a Parameter that the other processes have not been told of."""
        if self.parameter is self.agreed:
            return None
        return f"{self.parameter.dtype} {tuple(self.parameter.shape)} {digest_of(self.parameter)}"

    def bind_alias(self) -> None:
        """Let the later stages see their aliases."""
        for stage, alias in self.aliases.items():
            # the memory may be another by now, and so may the wish for a gradient
            alias.data = self.parameter.data
            alias.requires_grad_(self.parameter.requires_grad)
            put(self.places[stage], alias)

    def unbind_alias(self) -> None:
        """Let all stages see the Parameter."""
        for places in self.places.values():
            put(places, self.parameter)

    def grads(self) -> dict[int, torch.Tensor | None]:
        """What each local stage's uses gave."""
        return {self.stages[0]: self.parameter.grad} | {stage: alias.grad for stage, alias in self.aliases.items()}

    def set_aside(self) -> None:
        """Keep the gradient there is, so that the step's own stands alone."""
        self.kept = self.parameter.grad
        for parameter in (self.parameter, *self.aliases.values()):
            parameter.grad = None

    def add_up(self, grads: Mapping[int, torch.Tensor | None]) -> None:
        """The last stage's uses first, as in a backward; then to what was there."""
        self.parameter.grad = _added(self.kept, sum_of_uses(grads))
        self.kept = None
        for alias in self.aliases.values():
            alias.grad = None


def sum_of_uses(grads: Mapping[int, torch.Tensor | None]) -> torch.Tensor | None:
    """What the stages' uses gave together: the last one first, as in a backward."""
    total = None
    for stage in sorted(grads, reverse=True):
        total = _added(total, grads[stage])
    return total


class SharedReplicas(Shared):
    """A weight of stages in DistributedDataParallel, which averages all that is in ``.grad``, earlier steps' too.

    So what was there stays there, and goes into the step's gradient of the tie's first stage alone.
    """

    def set_aside(self) -> None:
        """Only the holder of the tie's first stage goes on with the gradient there is."""
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
                    f"tied: {tie.names[0]} is sharded in another way in stage {stage} than in stage {self.stages[0]}; "
                    "apply fully_shard to both alike"
                )

    def adopt(self) -> None:
        """Which Parameters there are is for ``fully_shard`` to say."""

    def bind_alias(self) -> None:
        """Copy what the optimizer made of the first stage's shard."""
        with torch.no_grad():
            for alias in self.aliases.values():
                local_part(alias).copy_(local_part(self.parameter))
                alias.requires_grad_(self.parameter.requires_grad)

    def unbind_alias(self) -> None:
        """Every stage keeps its own."""


def shared_weight(tie: Tie, places: Mapping[int, Places], kind: str) -> Shared:
    """A weight whose stages are wrapped in that."""
    return {REPLICATED: SharedReplicas, SHARDED: SharedShards}.get(kind, Shared)(tie, places)


def _no_longer_one(tie: Tie, changed: Container[int]) -> str:
    """What to do where only some of a weight's names have a new Parameter."""
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
