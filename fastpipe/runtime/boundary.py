"""What one stage hands to the next, as tensors: the only thing that a transport moves.

A tensor, or a tuple or list of them, crosses as it is. Any other tree is taken apart: its tensors go after a *plan*,
which says how they belong together and holds what is no tensor, as JSON, in a tensor of bytes. As values may change
from one microbatch to the next, the plan goes with every message. A message whose first tensor is a line of bytes
begins with a plan, so a stage that returns such a tensor first has it taken apart, too.

A tensor that is in a tree twice is sent once, and is one tensor behind the boundary, as it is in the unsplit model:
what is changed in place is changed in both places, and the gradients of all its uses are added one after the other.
(Added up by place first, their sums would have other last bits.)
"""

from __future__ import annotations

import functools
import json
from collections import namedtuple
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

from fastpipe.runtime.carried import as_arguments
from fastpipe.runtime.data import from_data, to_data
from fastpipe.runtime.tensors import Tensors

_PLAN_BYTES = 256
"""Plans are as long as a multiple of this, so that one whose text gets a little longer looks as it was announced."""

_TENSOR, _NONE, _VALUE = "tnv"
_END = b"\n"
"""Between a structure and its values."""


def plan_tensor(text: bytes, lasting: bool = False) -> torch.Tensor:
    """A plan on the host."""
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def plan_text(plan: torch.Tensor) -> bytes:
    """The way back; of a plan on a device the host waits for it."""
    return plan.cpu().numpy().tobytes()


def to_tensors(
    value: Any, carried: Mapping[str, Any], stage: int, make: Callable[[bytes, bool], torch.Tensor] = plan_tensor
) -> Tensors:
    """What a stage returned, and the values that travel on with it, for a transport.

    Args:
        value: what it returned.
        carried: by name.
        stage: which one.
        make: the tensor of a plan, from its text, and whether that holds for every microbatch: it has no values in it.

    Raises:
        ValueError: for what cannot be taken apart and is no data; it names the stage.
    """
    if not carried:
        if isinstance(value, torch.Tensor) and not _is_plan(value):
            return (value,)
        if type(value) in (tuple, list) and _plain(value):
            return tuple(value)
    leaves, structure = pytree.tree_flatten((as_arguments(value), dict(carried)))
    kinds = "".join(map(_kind, leaves))
    found = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    tensors = {id(tensor): tensor for tensor in found}
    order = {key: place for place, key in enumerate(tensors)}
    places = tuple(order[id(tensor)] for tensor in found)
    values = [leaf for leaf, kind in zip(leaves, kinds, strict=True) if kind == _VALUE]
    try:
        text = _padded(_structure_text(structure, kinds, places) + _END + _json([to_data(value) for value in values]))
    except (TypeError, ValueError) as error:
        names = ", ".join(sorted({type(v).__name__ for v in values if not isinstance(v, int | float | str)}))
        raise ValueError(
            f"stage {stage} handed on a {names or 'tree'} that cannot be sent to the next stage ({error}): hand on "
            "tensors, None, numbers, text, and tuples, lists or dicts of them; or register its class by "
            "torch.utils._pytree.register_dataclass or register_pytree_node"
        ) from error
    return make(text, not values), *tensors.values()


def from_tensors(
    tensors: Tensors, read: Callable[[torch.Tensor], bytes] = plan_text
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The positional arguments of a stage, and the values that travel with them; ``read`` gives the text of a plan."""
    if not tensors or not _is_plan(tensors[0]):
        return tensors, {}
    described, _, found = read(tensors[0]).partition(_END)
    structure, kinds, places = _structure(described)
    given, rest = (
        (tensors[1 + place] for place in places),
        map(from_data, () if _is_empty(found) else json.loads(found)),
    )
    leaves = [_leaf(kind, given, rest) for kind in kinds]
    args, carried = pytree.tree_unflatten(leaves, structure)
    return args, carried


def is_lasting(text: bytes) -> bool:
    """Whether a plan has no values in it, so that it may be that of other microbatches, too."""
    return _is_empty(text.partition(_END)[2])


def _is_empty(values: bytes) -> bool:
    return values.startswith(b"[]")


def _is_plan(tensor: torch.Tensor) -> bool:
    return tensor.dtype is torch.uint8 and tensor.dim() == 1


def _plain(values: Any) -> bool:
    """Whether these are tensors alone, none of them twice, that do not begin as with a plan."""
    if not all(isinstance(value, torch.Tensor) for value in values) or (values and _is_plan(values[0])):
        return False
    return len(set(map(id, values))) == len(values)


def _kind(leaf: Any) -> str:
    if isinstance(leaf, torch.Tensor):
        return _TENSOR
    return _NONE if leaf is None else _VALUE


def _leaf(kind: str, tensors: Any, values: Any) -> Any:
    if kind == _NONE:
        return None
    return next(tensors if kind == _TENSOR else values)


def _json(data: Any) -> bytes:
    return json.dumps(data, separators=(",", ":")).encode()


def _padded(text: bytes) -> bytes:
    return text.ljust(-(-len(text) // _PLAN_BYTES) * _PLAN_BYTES)


@functools.lru_cache(maxsize=256)
def _structure_text(structure: pytree.TreeSpec, kinds: str, places: tuple[int, ...]) -> bytes:
    return _json([_shape(structure), kinds, places])


def _shape(structure: pytree.TreeSpec) -> Any:
    """Not torch's own text of it, which knows only classes that were registered under a name."""
    if structure.is_leaf():
        return None
    children = list(map(_shape, structure.children()))
    # of every named tuple the type is this function, and the context the class
    kind = None if structure.type is namedtuple else to_data(structure.type)
    return [kind, to_data(structure.context), children]


@functools.lru_cache(maxsize=256)
def _structure(text: bytes) -> tuple[pytree.TreeSpec, str, tuple[int, ...]]:
    shape, kinds, places = json.loads(text)
    return _spec(shape), kinds, tuple(places)


def _spec(shape: Any) -> pytree.TreeSpec:
    if shape is None:
        return pytree.tree_structure(None)
    kind, context, children = shape
    made = namedtuple if kind is None else from_data(kind)
    return pytree.TreeSpec(made, from_data(context), list(map(_spec, children)))
