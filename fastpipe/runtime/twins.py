"""A layer that stands in several stages of this process: each later stage has a twin of it.

Two ranks run the layer at once, and each has to see its own alias of a weight. So a twin has ``_parameters`` and
``_modules`` of its own. Whatever else the layer has is the twin's, too: its buffers and hooks are in the very same
dicts, a part without parameters is the very same module, and other attributes follow the layer's before every step.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Container, Iterable, Mapping
from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary

import torch.utils._pytree as pytree
from torch import nn

from fastpipe.runtime.chain import Chain

_APART = {"_parameters", "_modules"}
TORCHS_OWN = nn.Module().__dict__.keys() - _APART
"""Torch's own entries, hooks say, which need no look into."""

_NOTHING = object()

Made = dict[int, nn.Module]
"""By ``id`` of the module, the twins in one stage."""

_originals: WeakKeyDictionary[nn.Module, nn.Module] = WeakKeyDictionary()
"""From each twin to what it is a twin of: as an attribute it would be copied with the twin."""


def own_modules(modules: Mapping[int, nn.Module]) -> dict[int, nn.Module]:
    """Stages that share no module with parameters: the later stage gets a twin."""
    seen: set[int] = set()
    own = {}
    for stage, module in sorted(modules.items()):
        made: Made = {}
        for name, child in list(module._modules.items()) if isinstance(module, Chain) else ():
            if child is not None and seen & with_parameters(child):
                module._modules[name] = twin(child, made)
        own[stage] = twin(module, made) if seen & with_parameters(module) else module
        seen |= with_parameters(own[stage])
    return own


def with_parameters(module: nn.Module) -> set[int]:
    """The ``id`` of the modules in it that have parameters of their own."""
    return {id(m) for m in module.modules() if any(p is not None for p in m._parameters.values())}


def twin(module: nn.Module, made: Made) -> nn.Module:
    """The twin of a module that has parameters.

    Args:
        module: it.
        made: the twins that its stage has already; those of the module and of its parts are added.
    """
    new = {}
    for original in module.modules():
        if id(original) not in made and with_parameters(original):
            own = made[id(original)] = new[original] = object.__new__(type(original))
            own.__dict__.update(_parameters={}, _modules={})
            _originals[own] = original
    for original, own in new.items():
        _follow(original, own, {}, made)
    return made[id(module)]


class Twins:
    """All twins in the stages of a process.

    Args:
        stages: their modules.
    """

    def __init__(self, stages: Iterable[nn.Module]) -> None:
        self._stages = [[(_originals[m], m) for m in stage.modules() if m in _originals] for stage in stages]
        self._made: list[Made] = [{id(original): own for original, own in pairs} for pairs in self._stages]
        self._seen: list[list[dict[str, Any]]] = [[{} for _ in pairs] for pairs in self._stages]

    def follow(self) -> None:
        """Between steps: whatever the user changed in the layers is changed in the twins."""
        for pairs, made, seen in zip(self._stages, self._made, self._seen, strict=True):
            for (original, own), before in zip(pairs, seen, strict=True):
                _follow(original, own, before, made)


def _follow(original: nn.Module, own: nn.Module, seen: dict[str, Any], made: Made) -> None:
    """Have a twin be as its original but for what its own forward made of it.

    Args:
        original: a layer.
        own: its twin.
        seen: the original's attributes when this was done last; brought up to date.
        made: see `twin`.
    """
    follow_attributes(original, own, seen, made)
    _become(own._parameters, original._parameters)
    _become(own._modules, {name: made.get(id(child), child) for name, child in original._modules.items()})


def follow_attributes(
    original: nn.Module, own: nn.Module, seen: dict[str, Any], made: Made, apart: Container[str] = _APART
) -> None:
    """The same for all but the entries ``apart``."""
    theirs, ours = vars(original), vars(own)
    for name in seen.keys() - theirs.keys():
        ours.pop(name, None)
        del seen[name]
    for name, value in theirs.items():
        if name not in apart and seen.get(name, _NOTHING) is not value:
            seen[name] = value
            ours[name] = value if name in TORCHS_OWN else _as_seen_by(made, value)


def _become(ours: dict[str, Any], theirs: Mapping[str, Any]) -> None:
    """Have the same entries, in the same order."""
    if list(ours) != list(theirs):
        ours.clear()
    ours.update(theirs)


def _as_seen_by(made: Made, value: Any) -> Any:
    """An attribute of a twin: the very same, unless it leads to a module that has a twin in the stage."""
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
        func, args, keywords = seen = tuple(_as_seen_by(made, part) for part in given)
        return leaf if all(map(operator.is_, seen, given)) else functools.partial(func, *args, **keywords)
    return leaf
