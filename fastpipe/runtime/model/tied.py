"""Tied weights: one weight with several names, for example embedding and output layer, in one or several stages.

Within a process the names share one Parameter. During a step every later stage uses an alias: the same memory with its
own gradient. So each stage's uses are summed separately, whatever the order of threads, and after the step the sums are
added in the order of a backward, the last stage's first. Each process has its own Parameter; the processes swap the
sums and add them in the same order, so the weights stay bit-equal.

The result may differ from the unsplit model's in the last bits, as autograd adds all uses of one microbatch before the
next one. To match it, one gradient per microbatch would have to be kept and sent.

With DistributedDataParallel the gradient of each stage's uses is averaged over its replicas, and then the averages are
added: the same numbers in the same order on every replica. With ``fully_shard`` every stage has its own parameters, and
each later stage's shard follows the first one's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import InitVar, dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fastpipe.placement import Placement
from fastpipe.runtime.common import (
    alias_of,
    bind_alias,
    bytes_of,
    dense_grad,
    digest_of,
    grad_dtype_of,
    is_dtensor,
    local_part,
    parameters_of,
    torch_private,
)
from fastpipe.runtime.data_parallel import is_sharded, unwrapped
from fastpipe.runtime.model.copies import (
    FROZEN,
    Changes,
    Exchange,
    StageCopies,
    Twins,
    accumulated,
    added,
    follow_twin,
    holders_of,
    placed,
    twins_in,
    with_local_part,
)

REPLICATED, SHARDED = "DistributedDataParallel", "fully_shard"

Places = list[tuple[nn.Module, str]]
"""The places of a parameter: modules and attribute names."""

Grads = Mapping[int, torch.Tensor | None]
"""The gradients of a weight's uses, by stage."""


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

    @property
    def keys(self) -> list[str]:
        """The names in a state."""
        return [torch_private.name_in_state(name) for name in self.names]


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
        ValueError: if the stages have different wrappers, or distribute the weight differently.
    """
    check_same_kinds([{tie.names[0]: text} for text in _texts_of_kinds(tie, modules)])
    return next((kind_of(modules[stage]) for stage in tie.stages if stage in modules), "")


def _texts_of_kinds(tie: Tie, modules: Mapping[int, nn.Module]) -> Iterator[str]:
    """For each local name, the wrapper of its stage and how the weight is distributed there."""
    for name, (stage, local) in zip(tie.names, tie.members, strict=True):
        if stage in modules:
            weight: Any = parameter_of(unwrapped(modules[stage]), local, name)
            spread = "a plain tensor"
            if is_dtensor(weight):
                spread = f"a DTensor with {weight.placements} over {weight.device_mesh.mesh_dim_names}"
            yield f"{kind_of(modules[stage]) or 'no wrapper'} and {spread}"


def kinds_of_ties(ties: Sequence[Tie], modules: Mapping[int, nn.Module]) -> dict[str, str]:
    """By weight with local stages, what must be the same in all of its stages."""
    found = {tie.names[0]: next(_texts_of_kinds(tie, modules), "") for tie in ties}
    return {name: text for name, text in found.items() if text}


def check_same_kinds(found: Sequence[Mapping[str, str]]) -> None:
    """Refuse a weight whose stages have different wrappers, or that they distribute differently."""
    kinds: dict[str, str] = {}
    for name, kind in ((name, kind) for part in found for name, kind in part.items()):
        if kinds.setdefault(name, kind) != kind:
            raise ValueError(
                f"stages: the tied weight {name} is in {kinds[name]} in one stage but in {kind} in another; use one "
                "wrapper for all of them, and distribute the weight alike (parallelize_module of both, for example)"
            )


def check_own_replicas(tie: Tie, stage: int, module: nn.Module) -> None:
    """Refuse a new Parameter in a wrapped module: the wrapper would still reduce the old one."""
    if kind_of(module):
        raise ValueError(
            f"tied: stage {stage} was wrapped in {kind_of(module)} while its {tie.names[0]} was a Parameter of its "
            "own; let the names share one Parameter before you wrap one module around all of them (layers that are "
            "wrapped one by one get a Parameter each), or leave the wrapping to data_parallel="
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


class Shared:
    """One weight on this process: a Parameter (`agreed`, equal on all its processes), and an alias per later stage.

    With ``fully_shard``, which owns the Parameters, an alias is the stage's own shard, which follows the first one's.

    Args:
        modules: the user's modules by local stage, after `share`.
        kind: the wrapper of its stages, if there are several; see `kind_of_tie`.

    Attributes:
        places: of its names, by local stage.
    """

    def __init__(self, tie: Tie, modules: Mapping[int, nn.Module], kind: str = "") -> None:
        self.tie = tie
        self.is_averaged, self.is_sharded = kind == REPLICATED, kind == SHARDED
        self.places: dict[int, Places] = {}
        for stage, local in tie.members:
            if stage in modules:
                inner, _, name = local.rpartition(".")
                self.places.setdefault(stage, []).append((unwrapped(modules[stage]).get_submodule(inner), name))
        self.stages = list(self.places)
        module, name = self.places[self.stages[0]][0]
        self.parameter = self.agreed = module.get_parameter(name)
        self.aliases = {stage: self._alias(stage) for stage in self.stages[1:]}
        self.kept: torch.Tensor | None = None

    def _alias(self, stage: int) -> nn.Parameter:
        if not self.is_sharded:
            return alias_of(self.parameter)
        module, name = self.places[stage][0]
        shard = module.get_parameter(name)
        if local_part(shard).shape != local_part(self.parameter).shape:
            raise ValueError(
                f"tied: {self.tie.names[0]} is sharded differently in stages {stage} and {self.stages[0]}; apply "
                "fully_shard with the same arguments to both"
            )
        return shard

    def adopt(self) -> None:
        """Use another Parameter from now on, if the user has set one under all names; called between steps.

        Raises:
            ValueError: if the names have different ones.
        """
        if self.is_sharded:
            return
        found = [parameters_of(module).get(name) for places in self.places.values() for module, name in places]
        first = found[0]
        if first is None or any(own is not first for own in found):
            members = zip(self.tie.names, self.tie.members, strict=True)
            names = [name for name, (stage, _) in members if stage in self.places]
            changed = [name for name, own in zip(names, found, strict=True) if own is not self.parameter]
            raise ValueError(
                f"tied: {' and '.join(self.tie.names)} are one weight in this Pipeline, and since the last step "
                f"{', '.join(changed)} got another Parameter, or none; assign the same nn.Parameter to all of them "
                "(instead of module.to_empty() call pipe.to_empty(), which keeps it), or build a new Pipeline for "
                "weights that are no longer tied"
            )
        if first is not self.parameter:
            self.parameter = first
            self.aliases = {stage: self._alias(stage) for stage in self.aliases}

    def check_hooks(self) -> None:
        """Refuse hooks that were added after the Pipeline was built; see `check_no_hooks`."""
        for parameter in (self.parameter, *self.aliases.values()):
            check_no_hooks(parameter, self.tie.names[0])

    def replaced(self) -> str | None:
        """A digest of the new Parameter's value, if it is not agreed yet."""
        if self.parameter is self.agreed:
            return None
        return f"{self.parameter.dtype} {tuple(self.parameter.shape)} {digest_of(self.parameter)}"

    def bind_alias(self) -> None:
        """Set the aliases in the later stages; copy the first stage's shard to theirs."""
        for stage, alias in self.aliases.items():
            if self.is_sharded:
                with torch.no_grad():
                    local_part(alias).copy_(local_part(self.parameter))
                alias.requires_grad_(self.parameter.requires_grad)
            else:
                bind_alias(alias, self.parameter)
                put(self.places[stage], alias)

    def unbind_alias(self) -> None:
        """Set the Parameter in all stages; each keeps its shard."""
        for stage in self.aliases if not self.is_sharded else ():
            put(self.places[stage], self.parameter)

    def grads(self) -> dict[int, torch.Tensor | None]:
        """The gradient of each local stage's uses."""
        return {self.stages[0]: self.parameter.grad} | {stage: alias.grad for stage, alias in self.aliases.items()}

    def set_aside(self) -> None:
        """Save the existing gradient, so that the step's own is separate.

        DistributedDataParallel averages all of ``.grad``, with earlier steps: there the existing gradient stays, as a
        part of the step's gradient of the tie's first stage only.
        """
        if not self.is_averaged:
            self.kept = self.parameter.grad
        if not self.is_averaged or self.stages[0] != self.tie.stages[0]:
            self.parameter.grad = None
        for alias in self.aliases.values():
            alias.grad = None

    def add_up(self, grads: Grads) -> None:
        """Add the stages' gradients, the last stage's first as in a backward, to the saved one."""
        self.parameter.grad = accumulated(self.kept, sum_of_uses(grads))
        self.kept = None
        for alias in self.aliases.values():
            alias.grad = None


def sum_of_uses(grads: Grads) -> torch.Tensor | None:
    """The sum over the stages' uses, the last stage's first as in a backward."""
    total = None
    for stage in sorted(grads, reverse=True):
        total = added(total, grads[stage])
    return total


def tied_names(layers: nn.Module | None, declared: Sequence[Sequence[str]] | None) -> list[list[str]]:
    """The names of every tied weight, declared or shared, in the model's order if that is available.

    Args:
        layers: the unsplit model, if this process has it; names that share a Parameter are tied.

    Raises:
        ValueError: for an invalid group.
    """
    found: dict[int, list[str]] = {}
    place: dict[str, int] = {}
    for name, parameter in layers.named_parameters(remove_duplicate=False) if layers is not None else ():
        found.setdefault(id(parameter), []).append(name)
        place[name] = len(place)
    groups: list[list[str]] = []
    for group in [*(declared or ()), *(names for names in found.values() if len(names) > 1)]:
        if isinstance(group, str) or len(set(group)) < 2 or not all(isinstance(name, str) for name in group):
            raise ValueError(f"tied has {group!r}: give groups of two or more names, as in [('0.weight', '5.weight')]")
        joined = [other for other in groups if set(other) & set(group)]
        groups = [other for other in groups if other not in joined]
        names = {name for names in (*joined, group) for name in names}
        groups.append(sorted(names, key=lambda name: (place.get(name, len(place)), name)))
    return sorted(groups)


def make_ties(groups: Sequence[Sequence[str]], locate: Callable[[str], tuple[int, str]]) -> list[Tie]:
    """The ties of a model that is cut into stages.

    Args:
        groups: names in the unsplit model.
        locate: from such a name to the stage and the name in its module.
    """
    ties = []
    for group in groups:
        # sorted by name within a stage: the weight's first name does not depend on the cut
        placed = sorted(((locate(name), name) for name in group), key=lambda found: found[0][0])
        ties.append(Tie(tuple(name for _, name in placed), tuple(member for member, _ in placed)))
    return ties


def named_as_held(ties: Sequence[Tie], prefixes: Mapping[int, str]) -> list[Tie]:
    """The ties under the unsplit model's names.

    Args:
        ties: of the model; if stages are not cut from a list, every name begins with the stage's number.
        prefixes: by stage, the prefix of its module's keys.
    """
    return [Tie(tuple(prefixes[stage] + local for stage, local in tie.members), tie.members) for tie in ties]


def share(ties: Sequence[Tie], modules: Mapping[int, nn.Module]) -> None:
    """Make the local names of every weight share the first one's Parameter; shards stay separate.

    Raises:
        ValueError: for a name without a parameter; for weights that differ in shape, dtype or replicas, or have hooks.
    """
    for tie in ties:
        first: nn.Parameter | None = None
        sharded = kind_of_tie(tie, modules) == SHARDED
        for name, (stage, local) in zip(tie.names, tie.members, strict=True):
            if stage not in modules:
                continue
            parameter = parameter_of(unwrapped(modules[stage]), local, name)
            if len(tie.stages) > 1:
                check_no_hooks(parameter, name)
            if first is None:
                first = parameter
            if parameter is first:
                continue
            if parameter.shape != first.shape or parameter.dtype != first.dtype:
                raise ValueError(
                    f"tied: {name} is {parameter.dtype} {tuple(parameter.shape)} but {tie.names[0]} is {first.dtype} "
                    f"{tuple(first.shape)}; tied weights need equal dtypes and shapes"
                )
            if not sharded or stage == tie.stages[0]:
                check_own_replicas(tie, stage, modules[stage])
                put(places_of(modules[stage], parameter), first)


def parameter_of(module: nn.Module, local: str, name: str) -> nn.Parameter:
    """A parameter by its name in the module.

    Raises:
        ValueError: if there is none, with its name in the unsplit model.
    """
    try:
        return module.get_parameter(local)
    except AttributeError as error:
        raise ValueError(f"tied: {name} is no parameter of the model: {error}") from error


def places_of(module: nn.Module, parameter: nn.Parameter) -> Places:
    """All places of a parameter in a module."""
    return [(m, name) for m in module.modules() for name, found in parameters_of(m).items() if found is parameter]


@dataclass(eq=False)
class TiedWeights(StageCopies):
    """The work around a step for tied weights, and inside of it the work for stages that are held twice.

    Args:
        rank: of this process, if there are others.
        exchange: exchanges tensors of equal shapes and dtypes with another process; None if all ranks are here.
        twins: of layers that are in several local stages.
        make: creates the inner work, while the stages use their aliases, so that it applies to these.

    Attributes:
        sees_aliases: whether the stages use their aliases now.
    """

    _written = (
        "tied: the step wrote to {} (nn.Embedding(max_norm=) does, for example), which several stages share: when each "
        "of them sees that depends on the schedule, and other processes never do; load the weights again, and change "
        "them between steps, or cut the model so that one stage has all uses"
    )

    shared: Sequence[Shared]
    placement: Placement
    rank: int
    exchange: Exchange | None
    twins: Twins
    make: InitVar[Callable[[], StageCopies]]
    sees_aliases: bool = field(default=False, init=False)

    def __post_init__(self, make: Callable[[], StageCopies]) -> None:
        with self.in_place():
            self.base = make()

    def equalise(self, *, initialised: bool = False) -> None:
        """Give all processes the value of a weight's first stage, or of its last."""
        with self.in_place():
            self.base.equalise(initialised=initialised)
        for weight in self.shared if self.exchange is not None else ():
            stage = weight.tie.stages[-1 if initialised else 0]
            own = weight.parameter.detach()
            value = self._gathered(weight, dict.fromkeys(weight.stages, own), own)[stage]
            assert value is not None
            local_part(own).copy_(local_part(value))

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Use the aliases within this context."""
        self._adopt()
        self._put_in()
        try:
            yield
        finally:
            self.release()

    def _adopt(self) -> None:
        for twin in self.twins:
            follow_twin(*twin)
        for weight in self.shared:
            weight.adopt()

    def _put_in(self) -> None:
        self.sees_aliases = True
        for weight in self.shared:
            weight.bind_alias()

    def followed(self) -> list[dict[str, Any]]:
        """The attributes that copies and twins have taken over."""
        return [*self.base.followed(), *(seen for _, _, seen, _ in self.twins)]

    def prepare(self) -> Changes:
        """Take over weights that the user replaced."""
        self._adopt()
        for weight in self.shared:
            weight.check_hooks()
        changes = self.base.prepare()
        for weight in self.shared if self.exchange is not None else ():
            name, holders = weight.tie.names[0], list(users_of(weight.tie, self.placement))
            if (digest := weight.replaced()) is not None:
                changes[name] = digest, holders
            if not weight.parameter.requires_grad:
                changes[FROZEN + name] = "False", holders
        return changes

    def agreed(self) -> None:
        """All processes have replaced their weights alike."""
        for weight in self.shared:
            weight.agreed = weight.parameter

    def follow(self) -> None:
        """Set the aliases before a step; they stay until `release`."""
        self._put_in()
        self.base.follow()
        self._note(parameter for _, parameter in self._named())

    def _named(self) -> Iterable[tuple[str, torch.Tensor]]:
        return ((w.tie.names[0], p) for w in self.shared for p in (w.parameter, *w.aliases.values()))

    def check_unwritten(self) -> None:
        """The tied weights, then the others."""
        super().check_unwritten()
        self.base.check_unwritten()

    def loaded(self) -> None:
        """Tied weights are one; the others as they are without ties."""
        self.base.loaded()

    def before_step(self) -> None:
        """Save the gradients."""
        for weight in self.shared:
            weight.set_aside()
        self.base.before_step()

    def after_step(self, succeeded: bool) -> None:
        """Add the gradients of all stages' uses."""
        self.base.after_step(succeeded)
        for weight in self.shared:
            grads = weight.grads()
            weight.add_up(self._gathered(weight, grads, weight.parameter) if succeeded else grads)

    def release(self) -> None:
        """Restore the user's modules."""
        # do not overwrite changes of the user that `prepare` refused
        for weight in self.shared if self.sees_aliases else ():
            weight.unbind_alias()
        self.sees_aliases = False

    def whole_sums(self, whole: Callable[[nn.Parameter], torch.Tensor | None]) -> dict[str, torch.Tensor | None]:
        """By name, the gradient of every sharded weight: the sum over its stages' uses. Collective over their mesh.

        Args:
            whole: from a stage's shard to the gradient of its uses, for the whole weight.
        """
        found = {}
        for weight in self.shared:
            if weight.is_sharded:
                own: dict[int, Any] = {weight.stages[0]: whole(weight.parameter)}
                own |= {stage: whole(shard) for stage, shard in weight.aliases.items()}
                own = {stage: grad.full_tensor() if is_dtensor(grad) else grad for stage, grad in own.items()}
                like = torch.empty(weight.parameter.shape, dtype=weight.parameter.dtype, device=weight.parameter.device)
                found[weight.tie.names[0]] = sum_of_uses(self._gathered(weight, own, like))
        return found

    def _gathered(self, weight: Shared, own: Grads, like: torch.Tensor) -> Grads:
        """The gradients of all stages' uses, also in other processes. ``like`` has the weight's shape and dtype.

        Every pair of processes with different stages exchanges once. All processes go through the pairs in the same
        order, so no cycle of waits can form.
        """
        held = users_of(weight.tie, self.placement)
        pairs = sorted((a, b) for a in held for b in held if a < b and set(held[a]) != set(held[b]))
        peers = [b if self.rank == a else a for a, b in pairs if self.rank in (a, b)]
        if self.exchange is None or not peers:
            return own
        found = dict(own)
        mine = [own[stage] for stage in sorted(own)]
        mine += [None] * (max(map(len, held.values())) - len(mine))
        there = torch.tensor([grad is not None for grad in mine])
        empty = torch.zeros_like(local_part(like), dtype=grad_dtype_of(like))
        tensors = [there, *(empty if grad is None else dense_grad(local_part(placed(grad, like))) for grad in mine)]
        for peer in peers:
            given, *theirs = self.exchange(peer, tensors)
            found |= {s: with_local_part(like, theirs[i]) if given[i] else None for i, s in enumerate(held[peer])}
        return {stage: found[stage] for stage in weight.tie.stages}


def users_of(tie: Tie, placement: Placement) -> dict[int, list[int]]:
    """Per rank, its stages that use the weight."""
    found: dict[int, list[int]] = {}
    for stage in tie.stages:
        for rank in holders_of(placement, stage):
            found.setdefault(rank, []).append(stage)
    return found


def between_ranks(ties: Sequence[Tie], placement: Placement) -> bool:
    """Whether a weight is used by stages of different ranks."""
    return any(set(stages) != set(tie.stages) for tie in ties for stages in users_of(tie, placement).values())


def make_tied(
    ties: Sequence[Tie],
    modules: Mapping[int, nn.Module],
    placement: Placement,
    rank: int,
    exchange: Exchange | None,
    make: Callable[[], StageCopies],
) -> StageCopies:
    """The work around a step: for ties across stages, and inside of it the result of ``make``.

    Args:
        modules: the user's modules by local stage, after `share`.
    """
    across = [tie for tie in ties if len(tie.stages) > 1 and any(stage in modules for stage in tie.stages)]
    if not across:
        return make()
    shared = [Shared(tie, modules, kind_of_tie(tie, modules)) for tie in across]
    return TiedWeights(shared, placement, rank, exchange, twins_in(modules.values()), make)


def first_names(ties: Sequence[Tie]) -> dict[str, tuple[int, str]]:
    """From each further name of a tied weight to the weight's first stage and name."""
    return {name: (tie.members[0][0], tie.names[0]) for tie in ties for name in tie.names[1:]}


def with_all_names(state: Mapping[str, Any], ties: Sequence[Tie], device: str | None = None) -> dict[str, Any]:
    """A state to load values into: every name of a tied weight, also of other processes' stages, with its own memory.

    So a checkpoint of untied weights does not overwrite one value by another before `check_equal` has compared them.

    Args:
        device: of the added tensors: "meta" if only shapes are compared; default: the weight's.
    """
    found = dict(state)
    for tie in ties:
        if own := [key for key in tie.keys if key in state]:
            found |= {key: torch.empty_like(state[own[0]], device=device) for key in tie.keys if key != own[0]}
    return found


def check_equal(state: Mapping[str, Any], ties: Sequence[Tie]) -> None:
    """Refuse a state with different values for the names of a tied weight: only one of them would remain."""
    for tie in ties:
        values = [(key, state.get(key)) for key in tie.keys]
        there = [(key, value) for key, value in values if isinstance(value, torch.Tensor) and not value.is_meta]
        for (first, own), (key, other) in zip(there, there[1:], strict=False):
            # bits, as NaN is not equal to itself
            if not torch.equal(bytes_of(local_part(own)), bytes_of(local_part(placed(other, own)))):
                raise ValueError(
                    f"tied: {first} and {key} are one weight in this Pipeline, and the loaded state has two different "
                    "values for them, of which one would be lost: build the Pipeline of a model in which they are not "
                    "tied, or save one value for both"
                )


def split_name(name: Any, num_stages: int) -> tuple[int, str]:
    """A name as stage and name in its module, if stages are not cut from a list of layers.

    Raises:
        ValueError: for a name that does not begin with a stage.
    """
    stage, _, local = str(name).partition(".")
    if not stage.isdigit() or int(stage) >= num_stages or not local:
        raise ValueError(f"tied: {name!r} names no parameter; names are '<stage>.<name in its module>'")
    return int(stage), local
