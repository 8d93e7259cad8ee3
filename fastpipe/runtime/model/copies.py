"""Stages held by two ranks, and layers used in several stages.

Bidirectional schedules hold every stage twice, with equal parameters, and each holder computes its half of the
microbatches. After the step both have the same gradient: the first half's sum plus the second half's, added to the
earlier ``.grad``. If one process has both holders, the second is a hidden copy that follows the first; its parameters
are aliases, on the same memory with their own gradients. Between processes the two exchange their gradients, and both
optimizers apply the same step to the same numbers. Each holder has its own buffers.

A layer in several stages of one process runs on two ranks at once, and each needs its own alias of a weight. So each
later stage has a twin of the layer with its own ``_parameters`` and ``_modules``. The twin shares the rest: buffers and
hooks are the same dicts, submodules without parameters are the same modules, and other attributes are updated from the
layer's before every step.
"""

from __future__ import annotations

import copy
import functools
import operator
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from fastpipe.placement import Placement
from fastpipe.runtime.common import (
    OF_TORCH,
    alias_of,
    allocate,
    bind_alias,
    children_of,
    dense_grad,
    is_dtensor,
    local_part,
    on_meta,
    parameters_of,
    pytree,
    torch_private,
    version_of,
    zero_grad_of,
)
from fastpipe.runtime.model.chain import Chain, WholeNames

Made = dict[int, nn.Module]
"""The twins in one stage, by ``id`` of the original."""

_originals: WeakKeyDictionary[nn.Module, nn.Module] = WeakKeyDictionary()
"""From each twin to its original; an attribute would be copied with the twin."""


def own_modules(modules: Mapping[int, nn.Module]) -> dict[int, nn.Module]:
    """Stages that share no module with parameters: the later stage gets a twin."""
    seen: set[int] = set()
    own = {}
    for stage, module in sorted(modules.items()):
        made: Made = {}
        for name, child in list(children_of(module).items()) if isinstance(module, Chain) else ():
            if child is not None and seen & with_parameters(child):
                children_of(module)[name] = twin(child, made)
        own[stage] = twin(module, made) if seen & with_parameters(module) else module
        seen |= with_parameters(own[stage])
    return own


def with_parameters(module: nn.Module) -> set[int]:
    """The ``id`` of the submodules that have parameters of their own."""
    return {id(m) for m in module.modules() if any(p is not None for p in parameters_of(m).values())}


def twin(module: nn.Module, made: Made) -> nn.Module:
    """The twin of a module that has parameters.

    Args:
        made: existing twins in the stage; new ones are added.
    """
    new = {}
    for original in module.modules():
        if id(original) not in made and with_parameters(original):
            own = made[id(original)] = new[original] = object.__new__(type(original))
            own.__dict__.update({name: {} for name in torch_private.MEMBERS})
            _originals[own] = original
    for original, own in new.items():
        follow_twin(original, own, {}, made)
    return made[id(module)]


Twins = list[tuple[nn.Module, nn.Module, dict[str, Any], Made]]
"""The twins in the stages of a process: original, twin, the original's attributes when it was last followed, and all
twins of the stage."""


def twins_in(stages: Iterable[nn.Module]) -> Twins:
    """All twins in these stages."""
    found: Twins = []
    for stage in stages:
        own = [(_originals[m], m) for m in stage.modules() if m in _originals]
        made = {id(original): twin for original, twin in own}
        found += [(original, twin, {}, made) for original, twin in own]
    return found


def follow_twin(original: nn.Module, own: nn.Module, seen: dict[str, Any], made: Made) -> None:
    """Apply the user's changes of a layer to its twin, except where that one's forward made its own; between steps.

    Args:
        seen: the original's attributes at the last call; updated.
    """
    follow_attributes(original, own, seen, made)
    _set_entries(parameters_of(own), parameters_of(original))
    _set_entries(children_of(own), {name: made.get(id(child), child) for name, child in children_of(original).items()})


def follow_attributes(
    original: nn.Module, own: nn.Module, seen: dict[str, Any], made: Made, apart: Container[str] = torch_private.MEMBERS
) -> None:
    """Update all entries except those in ``apart``."""
    theirs, ours = vars(original), vars(own)
    for name in seen.keys() - theirs.keys():
        ours.pop(name, None)
        del seen[name]
    for name, value in theirs.items():
        if name not in apart and (name not in seen or seen[name] is not value):
            seen[name] = value
            # twins share hooks, and what else torch keeps
            ours[name] = value if name in OF_TORCH else _for_twin(made, value)


def _set_entries(ours: dict[str, Any], theirs: Mapping[str, Any]) -> None:
    """Make the entries equal, in the same order."""
    if list(ours) != list(theirs):
        ours.clear()
    ours.update(theirs)


def _for_twin(made: Made, value: Any) -> Any:
    """An attribute for a twin: the same object, unless it refers to a module with a twin in the stage."""
    leaves, shape = pytree.tree_flatten(value)
    own = [_own_leaf(made, leaf) for leaf in leaves]
    if all(map(operator.is_, own, leaves)):
        return value
    return pytree.tree_unflatten(own, shape)


def _own_leaf(made: Made, leaf: Any) -> Any:
    if isinstance(leaf, nn.Module):
        return made.get(id(leaf), leaf)
    if isinstance(leaf, MethodType) and id(leaf.__self__) in made:
        return MethodType(leaf.__func__, made[id(leaf.__self__)])
    if isinstance(leaf, functools.partial):
        given = (leaf.func, leaf.args, leaf.keywords)
        func, args, keywords = seen = tuple(_for_twin(made, part) for part in given)
        return leaf if all(map(operator.is_, seen, given)) else functools.partial(func, *args, **keywords)
    return leaf


Exchange = Callable[[int, list[torch.Tensor]], list[torch.Tensor]]
"""``(peer, tensors)`` to the peer's tensors, which have the same shapes and dtypes."""


def holders_of(placement: Placement, stage: int) -> list[int]:
    """The ranks that hold a stage; the one with the first half of the microbatches is first."""
    return list(dict.fromkeys(route[stage] for route in placement.routes))


Changes = dict[str, tuple[str, list[int]]]
"""Changes since the last step by key, for example the name of a replaced tied weight: a digest, and the ranks that must
report the same."""

FROZEN = "requires_grad of "
"""Prefix of the key for gradient flags that are not all True."""


class StageCopies:
    """The work around a step for stages that several places hold; as it stands here, for stages held once: nothing."""

    _noted: Sequence[tuple[torch.Tensor, int]] = ()
    _written = (
        "stages: the step wrote to the parameter {} (nn.Embedding(max_norm=) does, for example), and the schedule "
        "holds its stage twice: each copy wrote what follows from half of the microbatches; load the weights again, "
        "and change them between steps, or use a schedule that holds every stage once"
    )

    def followed(self) -> list[dict[str, Any]]:
        """The attributes that copies have taken over, by name; whoever restores the copies' attributes restores them,
        too."""
        return []

    def prepare(self) -> Changes:
        """Apply the user's changes, and return those that other ranks must match; called before the ranks agree on a
        step."""
        return {}

    def agreed(self) -> None:
        """Called when all ranks have made the same changes."""

    def equalise(self, *, initialised: bool = False) -> None:
        """Make values equal that several places hold; called once, when the stages have values.

        Args:
            initialised: whether they were initialised after the Pipeline was built: then the last stage of a tied
                weight wins, as it does in an unsplit model whose layers are initialised in order.
        """

    def follow(self) -> None:
        """Make the parameters of both holders equal; called before every step, also without gradients."""

    def loaded(self) -> None:
        """Take over the state of the user's modules, into which one was loaded: buffers and extra states, too."""

    def before_step(self) -> None:
        """Save existing gradients, so that the step's own are separate."""

    def _note(self, parameters: Iterable[torch.Tensor]) -> None:
        """Note the version counters of parameters, at the begin of a step."""
        self._noted = [(parameter, version_of(parameter)) for parameter in parameters]

    def _named(self) -> Iterable[tuple[str, torch.Tensor]]:
        """The parameters that are noted, with the names that an error gives them."""
        return ()

    def check_unwritten(self) -> None:
        """Refuse a step in which a forward has written to a parameter that several places hold: each would follow the
        microbatches that it has seen. Called when the step has run."""
        for parameter, version in self._noted:
            if version_of(parameter) != version:
                unnamed = f"of shape {tuple(parameter.shape)} that it also replaced"
                raise ValueError(self._written.format(next((n for n, p in self._named() if p is parameter), unnamed)))

    def after_step(self, succeeded: bool) -> None:
        """Sum the two halves, and add the saved gradients."""

    def in_place(self) -> AbstractContextManager[None]:
        """Context in which the modules are as during a step."""
        return nullcontext()

    def release(self) -> None:
        """Restore the user's modules after a step, also a failed one."""


def check_changes(replies: Sequence[Changes]) -> None:
    """Refuse a tied weight that differs between the ranks that have it."""
    for rank, changes in enumerate(replies):
        for name, (digest, holders) in changes.items():
            for other in holders:
                given, _ = replies[other].get(name, (None, []))
                if given != digest and name.startswith(FROZEN):
                    raise ValueError(
                        f"{name} differs between ranks {rank} and {other}, which both hold the weight: set the same "
                        "value on every rank"
                    )
                if given != digest:
                    how = "was not" if given is None else "has other values, shape or dtype"
                    raise ValueError(
                        f"tied: {name} was replaced by another Parameter on rank {rank}, and {how} on rank {other}: "
                        "assign one of the same values on every rank that has a stage with it"
                    )


def check_no_post_hooks(module: nn.Module) -> None:
    """Refuse hooks that would receive half of a gradient."""
    for name, parameter in parameters_of(module).items():
        if torch_private.post_hooks_of(parameter):
            raise ValueError(
                f"stages: {name} of a {type(module).__name__} has a hook of register_post_accumulate_grad_hook, and "
                "the schedule holds its stage twice: the hook would receive the gradient of one half of the "
                "microbatches; remove it, and change .grad after pipe.step, before the optimizer's step"
            )


def check_registered(module: nn.Module) -> None:
    """Refuse a tensor that is trained and that torch does not know as a parameter of the stage: the halves of its
    gradient would not be added, and a copy would not follow it."""
    registered = {id(parameter) for parameter in module.parameters()}
    for inner in module.modules():
        for name, value in vars(inner).items():
            # what begins with _ is torch's, such as the flat weights that an LSTM keeps for a while
            if not name.startswith("_") and any(id(t) not in registered for t in _trained_in(value)):
                raise ValueError(
                    f"stages: {name} of a {type(inner).__name__} holds a tensor that requires a gradient and is no "
                    "parameter of its stage, and the schedule holds this stage twice: assign the Parameter, or its "
                    "module, as an attribute of the layer by itself (a list hides it), or use a schedule that holds "
                    "every stage once"
                )


def _trained_in(value: Any) -> Iterator[torch.Tensor]:
    """The trained tensors, and those of modules, in an attribute."""
    for leaf in pytree.tree_leaves(value):
        for tensor in leaf.parameters() if isinstance(leaf, nn.Module) else (leaf,):
            if isinstance(tensor, torch.Tensor) and tensor.is_leaf and tensor.requires_grad:
                yield tensor


class LocalCopies(StageCopies):
    """Both holders are in this process."""

    def __init__(self, pairs: Sequence[tuple[nn.Module, nn.Module]]) -> None:
        self._stages = pairs
        scripted = [m for stage, _ in pairs for m in stage.modules() if isinstance(m, torch.jit.ScriptModule)]
        if scripted:
            raise ValueError(
                f"stages: {scripted[0].original_name} is a scripted module, which cannot follow another one, and the "
                "schedule holds its stage twice: give the nn.Module that was scripted, use one process for each rank, "
                "or a schedule that holds every stage once"
            )
        self.modules = [pair for a, b in pairs for pair in zip(a.modules(), b.modules(), strict=True)]
        self._made = {id(original): copied for original, copied in self.modules}
        self._children = [dict(children_of(original)) for original, _ in self.modules]
        # entries that are copies in the copy (a GraphModule's lacks some); hooks are the original's, so that they are
        # called for both halves
        self._seen = [{k: v for k, v in vars(a).items() if k not in OF_TORCH and k in vars(b)} for a, b in self.modules]
        self.parameters: list[tuple[nn.Parameter, nn.Parameter]] = []
        self.kept: list[torch.Tensor | None] = []

    def followed(self) -> list[dict[str, Any]]:
        """The attributes that the copies have taken over."""
        return self._seen

    def prepare(self) -> Changes:
        """Refuse changes that the copies cannot follow."""
        for (original, _), children in zip(self.modules, self._children, strict=True):
            if children_of(original) != children:
                raise self._changed("a part", original, "replaced")
            check_no_post_hooks(original)
        for stage, copied in self._stages:
            theirs, own = _first_names(stage), _first_names(copied)
            if theirs != own:
                name = min(name for name in theirs | own if theirs.get(name) != own.get(name))
                both = name in theirs and name in own
                how = "tied to another one, or separated from it," if both else "added or removed"
                holder, _, local = name.rpartition(".")
                raise self._changed(f"the parameter {local}", stage.get_submodule(holder), how)
        return {}

    @staticmethod
    def _changed(what: str, module: nn.Module, how: str) -> ValueError:
        return ValueError(
            f"stages: {what} of a {type(module).__name__} was {how} since the Pipeline was built, and the schedule "
            "holds its stage twice; build a new Pipeline"
        )

    def equalise(self, *, initialised: bool = False) -> None:
        """Give the copies' buffers on meta the originals' values."""
        for original, copied in self.modules:
            for name, own in torch_private.buffers_of(copied).items():
                theirs = torch_private.buffers_of(original).get(name)
                if own is not None and own.is_meta and theirs is not None:
                    allocate(own, theirs.device)
                    own.copy_(theirs)

    def loaded(self) -> None:
        """Load the originals' states into the copies; those on meta get theirs in `equalise`."""
        for original, copied in self._stages:
            if not on_meta([copied]):
                copied.load_state_dict(original.state_dict())

    def follow(self) -> None:
        """Apply the user's changes, such as `eval`, to the copies; their parameters are on the originals' memory."""
        for (original, copied), seen in zip(self.modules, self._seen, strict=True):
            follow_attributes(original, copied, seen, self._made, torch_private.OWN_STATE)
        # the current ones: any may have been replaced
        self.parameters = _pairs_of_parameters(self.modules)
        for first, second in self.parameters:
            bind_alias(second, first)
            torch_private.share_hooks(second, first)
        self._note(parameter for pair in self.parameters for parameter in pair)

    def _named(self) -> Iterable[tuple[str, torch.Tensor]]:
        return (named for pair in self._stages for held in pair for named in held.named_parameters())

    def before_step(self) -> None:
        """Save the gradients."""
        self.kept = [first.grad for first, _ in self.parameters]
        for first, second in self.parameters:
            first.grad = second.grad = None

    def after_step(self, succeeded: bool) -> None:
        """Add the first half plus the second half to the saved gradients."""
        for (first, second), kept in zip(self.parameters, self.kept, strict=True):
            first.grad = accumulated(kept, added(first.grad, second.grad))
            second.grad = None
        self.kept = []


def _first_names(stage: nn.Module) -> dict[str, str]:
    """For each name of a parameter, the first name of the same one."""
    firsts: dict[int, str] = {}
    named = stage.named_parameters(remove_duplicate=False)
    return {name: firsts.setdefault(id(parameter), name) for name, parameter in named}


def _pairs_of_parameters(modules: Sequence[tuple[nn.Module, nn.Module]]) -> list[tuple[nn.Parameter, nn.Parameter]]:
    """Each parameter of the copies with its counterpart in the original, once."""
    found: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
    for original, copied in modules:
        for name, second in parameters_of(copied).items():
            first = parameters_of(original).get(name)
            if first is not None and second is not None:
                found.setdefault(id(second), (first, second))
    return list(found.values())


class RemoteCopies(StageCopies):
    """The other holder of each stage is another process.

    Args:
        modules: the stages held twice, ascending.
        holders: their ranks; the one with the first half is first.
    """

    def __init__(
        self, rank: int, modules: Mapping[int, nn.Module], holders: Mapping[int, Sequence[int]], exchange: Exchange
    ) -> None:
        self.rank = rank
        self.stages = [(modules[s], holders[s]) for s in sorted(modules)]
        self.exchange = exchange
        self.parameters: list[list[nn.Parameter]] = []
        self.kept: list[tuple[nn.Parameter, torch.Tensor | None]] = []

    def equalise(self, *, initialised: bool = False) -> None:
        """Copy the first holder's parameters to the second."""
        for module, holders in self.stages:
            own = [local_part(p.detach()) for p in module.parameters()]
            theirs = self.exchange(self._peer(holders), own)
            if holders[0] != self.rank:
                for mine, given in zip(own, theirs, strict=True):
                    mine.copy_(given)

    def prepare(self) -> Changes:
        """Refuse hooks that would receive half of a gradient, and gradient flags that differ between the holders."""
        changes: Changes = {}
        for module, holders in self.stages:
            for inner in module.modules():
                check_no_post_hooks(inner)
            frozen = [name for name, parameter in module.named_parameters() if not parameter.requires_grad]
            if frozen:
                changes[f"{FROZEN}{frozen[0]}"] = ",".join(frozen), list(holders)
        return changes

    def _peer(self, holders: Sequence[int]) -> int:
        return holders[1] if holders[0] == self.rank else holders[0]

    def follow(self) -> None:
        """Find the parameters. Nothing to update: both optimizers applied the same step to the same numbers."""
        self.parameters = [list(module.parameters()) for module, _ in self.stages]
        self._note(parameter for own in self.parameters for parameter in own)

    def _named(self) -> Iterable[tuple[str, torch.Tensor]]:
        return (named for module, _ in self.stages for named in module.named_parameters())

    def before_step(self) -> None:
        """Save the gradients."""
        self.kept = [(parameter, parameter.grad) for own in self.parameters for parameter in own]
        for parameter, _ in self.kept:
            parameter.grad = None

    def after_step(self, succeeded: bool) -> None:
        """Swap gradients with the other holder, and sum them in the same order on both."""
        for (_, holders), own in zip(self.stages, self.parameters, strict=True) if succeeded else ():
            self._sum(own, holders)
        for parameter, before in self.kept:
            parameter.grad = accumulated(before, parameter.grad)
        self.kept = []

    def _sum(self, parameters: Sequence[nn.Parameter], holders: Sequence[int]) -> None:
        kinds = torch.tensor([_kind(p.grad) for p in parameters] or [_NONE])
        grads = (zero_grad_of(p) if p.grad is None else placed(p.grad, p) for p in parameters)
        own = [dense_grad(local_part(grad)) for grad in grads]
        (their_kinds, *theirs) = self.exchange(self._peer(holders), [kinds, *own])
        for i, parameter in enumerate(parameters):
            mine = own[i] if kinds[i] else None
            given = theirs[i] if their_kinds[i] else None
            total = added(mine, given) if holders[0] == self.rank else added(given, mine)
            stays_sparse = _DENSE not in (kinds[i], their_kinds[i])
            if total is not None:
                total = total.to_sparse(1) if stays_sparse else with_local_part(parameter, total)
            parameter.grad = total


_NONE, _DENSE, _SPARSE = range(3)


def _kind(grad: torch.Tensor | None) -> int:
    """The layout of a gradient, for the other holder."""
    if grad is None:
        return _NONE
    return _DENSE if grad.layout is torch.strided else _SPARSE


def with_local_part(like: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """A DTensor like another one, with this local part; or the local tensor itself."""
    if not is_dtensor(like):
        return local
    from torch.distributed.tensor import DTensor

    spread: Any = like
    mesh, placements = spread.device_mesh, spread.placements
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=spread.shape, stride=spread.stride())


def placed(grad: Any, like: Any) -> torch.Tensor:
    """A gradient, distributed like the weight; that of an embedding that is cut into rows, for example, is not."""
    if is_dtensor(grad) and grad.placements != like.placements:
        grad = grad.redistribute(placements=like.placements)
    found: torch.Tensor = grad
    return found


def added(first: torch.Tensor | None, second: torch.Tensor | None) -> torch.Tensor | None:
    """The sum of two gradients, of which either may be missing."""
    if first is None or second is None:
        return second if first is None else first
    return first + second


def accumulated(grad: torch.Tensor | None, more: torch.Tensor | None) -> torch.Tensor | None:
    """Add in place, as autograd does: other objects may hold the gradient, such as a bucket of all gradients."""
    if grad is None or more is None or grad.layout is not torch.strided:
        return added(grad, more)
    with torch.no_grad():
        return grad.add_(more)


def make_copies(
    placement: Placement, modules: Mapping[int, Mapping[int, nn.Module]], exchange: Exchange | None
) -> StageCopies:
    """The copies for a placement.

    Args:
        modules: per local rank, its modules by stage.
        exchange: swaps tensors with another process; None if all ranks are here.
    """
    doubled = [s for s in range(placement.num_stages) if len(holders_of(placement, s)) > 1]
    if not doubled:
        return StageCopies()
    for module in {id(own[s]): own[s] for own in modules.values() for s in doubled if s in own}.values():
        check_registered(module)
    if exchange is None:
        ranks = {stage: holders_of(placement, stage) for stage in doubled}
        return LocalCopies([(modules[a][stage], modules[b][stage]) for stage, (a, b) in ranks.items()])
    ((rank, own),) = modules.items()
    held = {stage: module for stage, module in own.items() if stage in doubled}
    return RemoteCopies(rank, held, {stage: holders_of(placement, stage) for stage in held}, exchange)


def modules_by_rank(
    placement: Placement, ranks: Sequence[int], modules: Mapping[int, nn.Module]
) -> dict[int, dict[int, nn.Module]]:
    """The modules of every local rank; if both holders are in this process, the second gets a copy."""
    found: dict[int, dict[int, nn.Module]] = {rank: {} for rank in ranks}
    for stage, module in modules.items():
        local = [rank for rank in holders_of(placement, stage) if rank in found]
        for number, rank in enumerate(local):
            found[rank][stage] = module if number == 0 else _copied(module)
    return found


def _copied(module: nn.Module) -> nn.Module:
    """A deep copy, whose parameters are aliases, and which has its modes with the module. What a forward has left on a
    module, such as a loss, is copied without its graph."""
    memo: dict[int, Any] = {id(parameter): alias_of(parameter) for parameter in module.parameters()}
    for value in pytree.tree_leaves([vars(m) for m in module.modules()]):
        if isinstance(value, torch.Tensor) and not value.is_leaf:
            memo[id(value)] = value.detach().clone()
    copied = copy.deepcopy(module, memo)
    for inner in module.modules():
        if isinstance(inner, WholeNames):
            inner.share_original(memo)
    return copied
