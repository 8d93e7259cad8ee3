"""What one stage hands to the next, as tensors: the only thing that a transport moves.

A tensor, or a tuple or list of them, crosses as it is. Any other tree is taken apart: its tensors follow a
*treespec*, which says how they belong together and holds the values that are no tensors, as JSON, in a tensor of
bytes. As values may change from one microbatch to the next, the treespec goes with every message. A message whose
first tensor is a line of bytes begins with a treespec, so a stage that returns such a tensor first has it taken
apart, too.

A tensor that is in a tree twice is sent once, and is one tensor behind the boundary, as in the unsplit model: an
in-place change is seen in both places, and the gradients of all its uses are added one after the other. (Sums by
place, added afterwards, would have other last bits.)

On a device with streams, reading a treespec means waiting for the device. So in a step that announces its shapes both
ends note the treespecs that hold no values. In other steps such a treespec is assumed unchanged: the sender checks
that, and the receiver does not read it.

JSON is read as data: nothing in it names code to import or to call. Classes are found among those that this process
has loaded already, and only of kinds that run no code of their own when they are made: named tuples, enumerations, a
few built-in types, and what is registered with torch's pytree.
"""

from __future__ import annotations

import base64
import enum
import functools
import json
import struct
import sys
from collections import namedtuple
from collections.abc import Callable, Mapping
from typing import Any

import torch

from fastpipe.runtime.common import Tensors, pytree
from fastpipe.runtime.model import as_arguments

_FACTORIES = (bool, bytes, complex, dict, float, frozenset, int, list, set, str, tuple)


def to_data(value: Any) -> Any:
    """A value as what `json` writes; numbers of one kind have one length.

    Raises:
        TypeError: for what is no data.
    """
    if value is None or type(value) in (bool, str):
        return value
    name = _name_of_kind(value)
    return [name, _KINDS[name][1](value)]


def from_data(data: Any) -> Any:
    """The way back.

    Raises:
        ValueError: for what `to_data` has not made, or a class that this process does not have.
    """
    if data is None or isinstance(data, bool | str):
        return data
    name, given = data
    if name not in _KINDS:
        raise ValueError(f"{name!r} is no kind of data")
    return _KINDS[name][2](given)


def _name_of_kind(value: Any) -> str:
    kind = type(value)
    if kind is int and not -(2**63) <= value < 2**63:
        return "long"
    if isinstance(value, type | enum.Enum):
        return "class" if isinstance(value, type) else "enum"
    if kind not in _NAMES:
        raise TypeError(f"a {kind.__name__} is no data")
    return _NAMES[kind]


def _sequence(kind: Any) -> tuple[Any, Callable[[Any], Any], Callable[[Any], Any]]:
    return kind, lambda value: list(map(to_data, value)), lambda given: kind(map(from_data, given))


def _steps(kind: Any) -> tuple[Any, Callable[[Any], Any], Callable[[Any], Any]]:
    return (
        kind,
        lambda value: list(map(to_data, (value.start, value.stop, value.step))),
        lambda given: kind(*map(from_data, given)),
    )


def _of_torch(kind: Any) -> tuple[Any, Callable[[Any], Any], Callable[[Any], Any]]:
    def read(name: str) -> Any:
        found = getattr(torch, name, None)
        if type(found) is not kind:
            raise ValueError(f"torch.{name} is no {kind.__name__}")
        return found

    return kind, lambda value: str(value).removeprefix("torch."), read


def _member(given: Any) -> Any:
    found = _class(*given[0])
    if not issubclass(found, enum.Enum):
        raise ValueError(f"{found.__name__} is no enumeration")
    return found[given[1]]


def _name(kind: type) -> list[str]:
    name = [kind.__module__, kind.__qualname__]
    try:
        found = _class(*name)
    except ValueError as error:
        raise TypeError(str(error)) from None
    if found is not kind:
        raise TypeError(f"there is another class of the name {'.'.join(name)}")
    return name


@functools.lru_cache(maxsize=256)
def _class(module: str, name: str) -> type:
    """A class that was imported already, of a kind that may be made of data.

    Raises:
        ValueError: when there is none.
    """
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    known = isinstance(found, type) and (
        found in _FACTORIES or issubclass(found, enum.Enum) or pytree.is_namedtuple_class(found)
    )
    if not known:
        # one that was made in a function is no attribute of its module
        nodes = [kind for kind in reversed(pytree.SUPPORTED_NODES) if _is_called(kind, module, name)]
        if not nodes:
            raise ValueError(f"no class {module}.{name} is registered with torch.utils._pytree in this process")
        found = nodes[0]
    made: type = found
    return made


def _is_called(kind: Any, module: str, name: str) -> bool:
    return bool(kind.__module__ == module and kind.__qualname__ == name)


_KINDS: dict[str, tuple[Any, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "int": (
        int,
        lambda value: value.to_bytes(8, "little", signed=True).hex(),
        lambda given: int.from_bytes(bytes.fromhex(given), "little", signed=True),
    ),
    "long": (None, str, int),
    "float": (
        float,
        lambda value: struct.pack("<d", value).hex(),
        lambda given: struct.unpack("<d", bytes.fromhex(given))[0],
    ),
    "complex": (
        complex,
        lambda value: struct.pack("<dd", value.real, value.imag).hex(),
        lambda given: complex(*struct.unpack("<dd", bytes.fromhex(given))),
    ),
    "bytes": (bytes, lambda value: base64.b64encode(value).decode(), base64.b64decode),
    "dict": (
        dict,
        lambda value: [[to_data(key), to_data(item)] for key, item in value.items()],
        lambda given: {from_data(key): from_data(item) for key, item in given},
    ),
    **{kind.__name__: _sequence(kind) for kind in (list, tuple, set, frozenset)},
    **{kind.__name__: _steps(kind) for kind in (slice, range)},
    **{kind.__name__: _of_torch(kind) for kind in (torch.dtype, torch.layout, torch.memory_format)},
    "device": (torch.device, str, torch.device),
    "class": (None, _name, lambda given: _class(*given)),
    "enum": (None, lambda value: [_name(type(value)), value.name], _member),
}
"""By name, the type of a kind of values, how it is written and how it is read."""
_NAMES = {kind: name for name, (kind, _, _) in _KINDS.items() if kind is not None}


_PLAN_BYTES = 256
"""Treespecs are padded to a multiple of this many bytes, so that a slightly longer one has the announced size."""

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


_Book = dict[tuple[str, int], bytes]


class TreespecCache:
    """Those that one stage sends and receives.

    Args:
        stage: its index.
        device: what it computes on.
    """

    def __init__(self, stage: int, device: torch.device) -> None:
        self.stage = stage
        self.device = device
        self._books: dict[int, _Book] = {}
        self._open: _Book = {}
        self._announcing = True

    def begin(self, signature: int, announce: bool) -> None:
        """Open the page of a step; one that announces starts empty."""
        self._announcing = announce
        if announce:
            self._books[signature] = {}
        self._open = self._books.setdefault(signature, {})

    def make(self, microbatch: int, text: bytes, lasting: bool) -> torch.Tensor:
        """The tensor of a plan that is sent.

        Raises:
            ValueError: when it is not the one that was announced.
        """
        key = ("sent", microbatch)
        if self._announcing and lasting:
            self._open[key] = text
        elif self._open.get(key, text) != text:
            raise ValueError(
                f"stage {self.stage} handed on another tree for microbatch {microbatch} than in the step that had the "
                "same inputs first; let its structure depend on the shapes of the step's inputs alone"
            )
        return _on_device(text, self.device) if lasting else plan_tensor(text).to(self.device)

    def read(self, microbatch: int, plan: torch.Tensor) -> bytes:
        """The text of a plan that was received."""
        key = ("received", microbatch)
        if not self._announcing and key in self._open:
            return self._open[key]
        text = plan_text(plan)
        if self._announcing and is_lasting(text):
            self._open[key] = text
        return text


@functools.lru_cache(maxsize=256)
def _on_device(text: bytes, device: torch.device) -> torch.Tensor:
    # the host has waited for the copy, so any stream may use it
    return plan_tensor(text).to(device)
