"""Values as JSON and back. What is read is data: nothing in it names code to import or to call.

Classes are found again among those that this process has already, and only of kinds whose making runs no code of
theirs: named tuples, enumerations, a few of Python's own, and what is registered with torch's pytree.
"""

from __future__ import annotations

import base64
import enum
import functools
import struct
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

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
