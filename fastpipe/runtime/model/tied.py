"""Tied weights: one weight under several names, an output layer that is the embedding say, in one stage or in several.

Within a process the names share one Parameter. While a step runs, every stage after the first that uses it sees an
alias: the same memory with a gradient of its own (`shared_weight.py`). So each stage's uses are summed by themselves,
whatever the threads do, and after the step they are added in the order of a backward, the last stage's first. Where
stages are on several processes each has a Parameter, and they swap these sums; all add them in the same order, so the
weights stay the same to the last bit.

The sum is not that of the unsplit model to the last bit, for autograd adds a microbatch's uses to each other before it
goes on to the next one. To do the same, a gradient a microbatch would have to be kept and sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from fastpipe.placement import Placement
from fastpipe.runtime.common import dense, grad_dtype_of, local_part, parameters_of
from fastpipe.runtime.data_parallel import unwrapped
from fastpipe.runtime.model.copies import FROZEN, Exchange, StageCopies, Told, Twins, holders_of
from fastpipe.runtime.model.shared_weight import (
    Places,
    Shared,
    SharedShards,
    Tie,
    check_no_hooks,
    check_own_replicas,
    kind_of_tie,
    put,
    shared_weight,
    sum_of_uses,
    with_local_part,
)


def tied_names(layers: nn.Module | None, declared: Sequence[Sequence[str]] | None) -> list[list[str]]:
    """The names of every tied weight, as declared and as found, in the model's order where that is known.

    Args:
        layers: the whole model, where this process has it; what shares a Parameter in it is tied.
        declared: groups of names.

    Raises:
        ValueError: for a group that is none.
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
        groups: names in the whole model.
        locate: from such a name to the stage and the name in its module.
    """
    ties = []
    for group in groups:
        # within a stage in the order of the names: the first is the weight's own, wherever the model is cut
        placed = sorted(((locate(name), name) for name in group), key=lambda found: found[0][0])
        ties.append(Tie(tuple(name for _, name in placed), tuple(member for member, _ in placed)))
    return ties


def named_as_held(ties: Sequence[Tie], prefixes: Mapping[int, str]) -> list[Tie]:
    """The ties under the names that the parameters have in the whole model.

    Args:
        ties: of the whole model; where stages are not cut from a list, every name begins with the stage's number.
        prefixes: what goes before the keys of every stage's module, which the process knows that holds it.
    """
    return [Tie(tuple(prefixes[stage] + local for stage, local in tie.members), tie.members) for tie in ties]


def share(ties: Sequence[Tie], modules: Mapping[int, nn.Module]) -> None:
    """Have the local names of every weight be one Parameter, that of the first; shards stay what they are.

    Raises:
        ValueError: for a name that is no parameter, or weights of other looks or other replicas, or with hooks.
    """
    for tie in ties:
        first: nn.Parameter | None = None
        sharded = kind_of_tie(tie, modules) == "fully_shard"
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
                    f"tied: {name} is {parameter.dtype} {tuple(parameter.shape)} and {tie.names[0]} is {first.dtype} "
                    f"{tuple(first.shape)}; only weights that look alike can be one"
                )
            if not sharded or stage == tie.stages[0]:
                check_own_replicas(tie, stage, modules[stage])
                put(places_of(modules[stage], parameter), first)


def parameter_of(module: nn.Module, local: str, name: str) -> nn.Parameter:
    """A parameter by its name in the module.

    Raises:
        ValueError: when there is none, with its name in the whole model.
    """
    try:
        return module.get_parameter(local)
    except AttributeError as error:
        raise ValueError(f"tied: {name} is no parameter of the model: {error}") from error


def places_of(module: nn.Module, parameter: nn.Parameter) -> Places:
    """Every place of a module where a parameter stands."""
    return [(m, name) for m in module.modules() for name, found in parameters_of(m).items() if found is parameter]


class TiedWeights(StageCopies):
    """What has to be done around a step for tied weights, around what is done for stages that are held twice.

    Args:
        shared: the weights that this process has.
        swaps: per weight, the other processes that have uses of it.
        twins: of layers that stand in several stages here.

    Attributes:
        sees_aliases: whether the stages do now.
    """

    def __init__(self, shared: Sequence[Shared], swaps: Swaps | None, twins: Twins) -> None:
        self.shared = shared
        self.swaps = swaps
        self.twins = twins
        self.base: StageCopies | None = None
        self.sees_aliases = False

    def around(self, make: Callable[[], StageCopies]) -> TiedWeights:
        """Make what is inside while the stages see their aliases, so that it works on these."""
        with self.in_place():
            self.base = make()
        for weight in self.shared if self.swaps is not None else ():
            first = weight.tie.stages[0]
            value = self._gathered(weight, dict.fromkeys(weight.stages, weight.parameter.detach()))[first]
            assert value is not None
            local_part(weight.parameter.detach()).copy_(local_part(value))
        return self

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The stages see their aliases."""
        self._adopt()
        self._put_in()
        try:
            yield
        finally:
            self.release()

    def _adopt(self) -> None:
        self.twins.follow()
        for weight in self.shared:
            weight.adopt()

    def _put_in(self) -> None:
        self.sees_aliases = True
        for weight in self.shared:
            weight.bind_alias()

    def prepare(self) -> Told:
        """Weights that the user replaced go on as the new ones."""
        self._adopt()
        for weight in self.shared:
            weight.check_hooks()
        told = self._inside.prepare()
        for weight in self.shared if self.swaps is not None else ():
            assert self.swaps is not None
            name, holders = weight.tie.names[0], self.swaps.holders(weight.tie)
            if (digest := weight.replaced()) is not None:
                told[name] = digest, holders
            if not weight.parameter.requires_grad:
                told[FROZEN + name] = "False", holders
        return told

    def agreed(self) -> None:
        """The others have replaced theirs alike."""
        for weight in self.shared:
            weight.agreed = weight.parameter

    def follow(self) -> None:
        """Before every step; the aliases stay until `release`."""
        self._put_in()
        self._inside.follow()

    def before_step(self) -> None:
        """Put gradients aside."""
        for weight in self.shared:
            weight.set_aside()
        self._inside.before_step()

    def after_step(self, succeeded: bool) -> None:
        """Add up the uses of all stages."""
        self._inside.after_step(succeeded)
        for weight in self.shared:
            grads = weight.grads()
            weight.add_up(self._gathered(weight, grads) if succeeded else grads)

    def release(self) -> None:
        """The modules are as the user knows them."""
        # nothing is overwritten that the user put there and `prepare` refused
        for weight in self.shared if self.sees_aliases else ():
            weight.unbind_alias()
        self.sees_aliases = False

    def whole_sums(self, whole: Callable[[nn.Parameter], torch.Tensor | None]) -> dict[str, torch.Tensor | None]:
        """By name, the gradient of every weight of which only shards are held here: the sum of its stages' uses.

        Args:
            whole: from a stage's shard to what its uses gave, for the whole weight.
        """
        found = {}
        for weight in self.shared:
            if isinstance(weight, SharedShards):
                shards = {weight.stages[0]: weight.parameter, **weight.aliases}
                own = {stage: whole(shard) for stage, shard in shards.items()}
                like = torch.empty(weight.parameter.shape, dtype=weight.parameter.dtype, device=weight.parameter.device)
                gathered = own if self.swaps is None else self.swaps.gather(weight.tie, own, like)
                found[weight.tie.names[0]] = sum_of_uses(gathered)
        return found

    @property
    def _inside(self) -> StageCopies:
        assert self.base is not None
        return self.base

    def _gathered(self, weight: Shared, own: Mapping[int, torch.Tensor | None]) -> Mapping[int, torch.Tensor | None]:
        return own if self.swaps is None else self.swaps.gather(weight.tie, own, weight.parameter)


def users_of(tie: Tie, placement: Placement) -> dict[int, list[int]]:
    """Per rank, the stages it has of those that use the weight."""
    found: dict[int, list[int]] = {}
    for stage in tie.stages:
        for rank in holders_of(placement, stage):
            found.setdefault(rank, []).append(stage)
    return found


def between_ranks(ties: Sequence[Tie], placement: Placement) -> bool:
    """Whether some rank uses a weight that another one uses elsewhere."""
    return any(set(stages) != set(tie.stages) for tie in ties for stages in users_of(tie, placement).values())


class Swaps:
    """How the processes that have a weight tell each other what their stages' uses gave.

    Every pair that has to swaps once, and each process goes through its pairs in one order that is the same for all,
    so none waits in a circle.

    Args:
        rank: this rank.
        placement: where stages are.
        exchange: how two ranks swap tensors that look alike.
    """

    def __init__(self, rank: int, placement: Placement, exchange: Exchange) -> None:
        self.rank = rank
        self.placement = placement
        self.exchange = exchange

    def holders(self, tie: Tie) -> list[int]:
        """The ranks that have a weight."""
        return list(users_of(tie, self.placement))

    def gather(
        self, tie: Tie, own: Mapping[int, torch.Tensor | None], like: torch.Tensor
    ) -> dict[int, torch.Tensor | None]:
        """What every stage's uses gave, those of other processes too.

        Args:
            tie: the weight.
            own: what those of this process gave.
            like: a tensor that looks as each of them.
        """
        held = users_of(tie, self.placement)
        found = dict(own)
        for a, b in sorted((a, b) for a in held for b in held if a < b):
            if self.rank in (a, b) and set(held[a]) != set(held[b]):
                peer = b if self.rank == a else a
                found |= self._swap(peer, held[peer], max(map(len, held.values())), own, like)
        return {stage: found[stage] for stage in tie.stages}

    def _swap(
        self, peer: int, stages: Sequence[int], count: int, own: Mapping[int, torch.Tensor | None], like: torch.Tensor
    ) -> dict[int, torch.Tensor | None]:
        mine = [own[stage] for stage in sorted(own)] + [None] * (count - len(own))
        there = torch.tensor([grad is not None for grad in mine])
        empty = torch.zeros_like(local_part(like), dtype=grad_dtype_of(like))
        tensors = [empty if grad is None else dense(local_part(grad)) for grad in mine]
        given, *theirs = self.exchange(peer, [there, *tensors])
        return {stage: with_local_part(like, theirs[i]) if given[i] else None for i, stage in enumerate(stages)}


def make_tied(
    ties: Sequence[Tie],
    modules: Mapping[int, nn.Module],
    placement: Placement,
    rank: int,
    exchange: Exchange | None,
    make: Callable[[], StageCopies],
) -> StageCopies:
    """What is to be done around a step: for ties that concern several stages, and inside what ``make`` returns.

    Args:
        ties: of the whole model.
        modules: the user's module of every local stage, in which `share` has been.
        placement: where stages are.
        rank: this rank.
        exchange: how to reach other processes; None when all ranks are here.
        make: makes what is done for stages held twice.
    """
    shared = []
    for tie in ties:
        names = {stage: name for stage, name in reversed(tie.members) if stage in modules}
        if len(tie.stages) > 1 and names:
            own = {stage: unwrapped(modules[stage]) for stage in names}
            places = {stage: places_of(own[stage], own[stage].get_parameter(name)) for stage, name in names.items()}
            shared.append(shared_weight(tie, places, kind_of_tie(tie, modules)))
    if not shared:
        return make()
    swaps = None if exchange is None else Swaps(rank, placement, exchange)
    return TiedWeights(shared, swaps, Twins(modules.values())).around(make)


def first_names(ties: Sequence[Tie]) -> dict[str, tuple[int, str]]:
    """From each further name of a tied weight to the stage and name under which the weight is known."""
    return {name: (tie.members[0][0], tie.names[0]) for tie in ties for name in tie.names[1:]}


def split_name(name: Any, num_stages: int) -> tuple[int, str]:
    """Stage and name in its module, where the stages are not cut from a list of layers.

    Raises:
        ValueError: for a name that does not begin with a stage.
    """
    stage, _, local = str(name).partition(".")
    if not stage.isdigit() or int(stage) >= num_stages or not local:
        raise ValueError(f"tied: {name!r} names no parameter; names are '<stage>.<name in its module>'")
    return int(stage), local
