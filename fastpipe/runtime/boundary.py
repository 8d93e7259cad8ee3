"""What one stage hands to the next, as tensors: the only thing that a transport moves.

A tensor, or a tuple or list of them, crosses as it is. Any other tree is taken apart: its tensors go after a *plan*,
which says how they belong together and holds what is no tensor, pickled, in a tensor of bytes. As values may change
from one microbatch to the next, the plan goes with every message. A message whose first tensor is a line of bytes
begins with a plan, so a stage that returns such a tensor first has it taken apart, too.

A tensor that is in a tree twice is sent once, and is one tensor behind the boundary, as it is in the unsplit model:
what is changed in place is changed in both places, and the gradients of all its uses are added one after the other.
(Added up by place first, their sums would have other last bits.)
"""

from __future__ import annotations

import functools
import io
import pickle
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

from fastpipe.runtime.carried import as_arguments
from fastpipe.runtime.tensors import Tensors

_PLAN_BYTES = 256
"""Plans are as long as a multiple of this, so that one whose text gets a little longer looks as it was announced."""

_TENSOR, _NONE, _INTEGER, _OTHER = b"tnio"


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
        ValueError: for what cannot be taken apart or pickled; it names the stage.
    """
    if not carried:
        if isinstance(value, torch.Tensor) and not _is_plan(value):
            return (value,)
        if type(value) in (tuple, list) and _plain(value):
            return tuple(value)
    leaves, structure = pytree.tree_flatten((as_arguments(value), dict(carried)))
    kinds = bytes(map(_kind, leaves))
    found = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    tensors = {id(tensor): tensor for tensor in found}
    order = {key: place for place, key in enumerate(tensors)}
    places = tuple(order[id(tensor)] for tensor in found)
    # by value, and not by what Python takes for equal: 0.0 and -0.0, 1 and True
    values = [leaf for leaf, kind in zip(leaves, kinds, strict=True) if kind not in (_TENSOR, _NONE)]
    text = _known_plan(structure, kinds, places) if not values else _plan(structure, kinds, places, values, stage)
    return make(text, not values), *tensors.values()


def from_tensors(
    tensors: Tensors, read: Callable[[torch.Tensor], bytes] = plan_text
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The positional arguments of a stage, and the values that travel with them; ``read`` gives the text of a plan."""
    if not tensors or not _is_plan(tensors[0]):
        return tensors, {}
    text = read(tensors[0])
    structure, kinds, places, values = _read_lasting(text)
    given, rest = (tensors[1 + place] for place in places), iter(_read(text)[3] if values else ())
    leaves = [_leaf(kind, given, rest) for kind in kinds]
    args, carried = pytree.tree_unflatten(leaves, structure)
    return args, carried


def is_lasting(text: bytes) -> bool:
    """Whether a plan has no values in it, so that it may be that of other microbatches, too."""
    return not _read_lasting(text)[3]


def _is_plan(tensor: torch.Tensor) -> bool:
    return tensor.dtype is torch.uint8 and tensor.dim() == 1


def _plain(values: Any) -> bool:
    """Whether these are tensors alone, none of them twice, that do not begin as with a plan."""
    if not all(isinstance(value, torch.Tensor) for value in values) or (values and _is_plan(values[0])):
        return False
    return len(set(map(id, values))) == len(values)


def _kind(leaf: Any) -> int:
    if isinstance(leaf, torch.Tensor):
        return _TENSOR
    if leaf is None:
        return _NONE
    return _INTEGER if type(leaf) is int and -(2**63) <= leaf < 2**63 else _OTHER


def _leaf(kind: int, tensors: Any, values: Any) -> Any:
    if kind == _TENSOR:
        return next(tensors)
    if kind == _NONE:
        return None
    value = next(values)
    return int.from_bytes(value, "little", signed=True) if kind == _INTEGER else value


class _Pickler(pickle.Pickler):
    """Refuses tensors: inside of an object that cannot be taken apart they would lose their gradients."""

    def persistent_id(self, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            raise TypeError("it has a tensor in it")


def _plan(structure: pytree.TreeSpec, kinds: bytes, places: tuple[int, ...], values: list[Any], stage: int) -> bytes:
    # the length of an integer's text would depend on its value, and a message has to look as announced
    numbers = zip(values, kinds.translate(None, bytes((_TENSOR, _NONE))), strict=True)
    fixed = [v.to_bytes(8, "little", signed=True) if kind == _INTEGER else v for v, kind in numbers]
    try:
        return _pickled((_shape(structure), kinds, places, fixed))
    except Exception as error:
        names = ", ".join(sorted({type(v).__name__ for v in values if not isinstance(v, int | float | str)}))
        raise ValueError(
            f"stage {stage} handed on a {names or 'tree'} that cannot be sent to the next stage ({error}): hand on "
            "tensors, None, numbers, text, and tuples, lists or dicts of them; or register its class by "
            "torch.utils._pytree.register_dataclass or register_pytree_node"
        ) from error


@functools.lru_cache(maxsize=256)
def _known_plan(structure: pytree.TreeSpec, kinds: bytes, places: tuple[int, ...]) -> bytes:
    return _pickled((_shape(structure), kinds, places, []))


def _shape(structure: pytree.TreeSpec) -> Any:
    """A structure for pickle: torch's own class warns when it is unpickled."""
    return None if structure.is_leaf() else (structure.type, structure.context, list(map(_shape, structure.children())))


def _structure(shape: Any) -> pytree.TreeSpec:
    if shape is None:
        return pytree.tree_structure(None)
    kind, context, children = shape
    return pytree.TreeSpec(kind, context, list(map(_structure, children)))


def _pickled(plan: Any) -> bytes:
    file = io.BytesIO()
    _Pickler(file, pickle.HIGHEST_PROTOCOL).dump(plan)
    text = file.getvalue()
    return text.ljust(-(-len(text) // _PLAN_BYTES) * _PLAN_BYTES, b"\0")


def _read(text: bytes) -> tuple[pytree.TreeSpec, bytes, tuple[int, ...], list[Any]]:
    shape, kinds, places, values = pickle.loads(text)
    return _structure(shape), kinds, places, values


# the values may be objects that a stage changes, and are read anew for every microbatch
_read_lasting = functools.lru_cache(maxsize=256)(_read)
