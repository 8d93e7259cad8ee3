"""Checks of arguments. An error names the argument, its value, and what to give instead."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from numbers import Integral
from os import PathLike, fspath
from pathlib import Path
from types import NoneType
from typing import Any, get_args

import numpy as np

_MOST = {
    "num_ranks": 1_000_000,
    "max_stages_per_rank": 1_000,
    "num_stages": 10_000_000,
    "num_ranks * stages_per_rank": 10_000_000,
    "num_layers": 1_000_000,
}
"""Of what is planned for: of more, lists would not fit into memory."""


def is_whole(value: Any, least: int = 0) -> bool:
    """Whether it is a whole number of at least ``least``, Python's own or NumPy's."""
    return not isinstance(value, bool) and isinstance(value, Integral) and int(value) >= least


def is_number(value: Any, least: float = 0, most: float = sys.float_info.max) -> bool:
    """Whether it is a number of Python's, an int or a float, from ``least`` to ``most``."""
    # an int may be too large to become a float, so it is compared as it is
    return isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most


def check_counts(**counts: Any) -> list[int]:
    """The counts as Python's own, which do not overflow; refuses, by name, what is none of at least 1, or too large."""
    for name, value in counts.items():
        if not is_whole(value, least=1):
            raise ValueError(f"{name} = {value!r}: give a whole number of at least 1")
        most = _MOST.get(name, 10**18)
        if int(value) > most:
            raise ValueError(f"{name} = {value}: there are at most {most:,}; ask for fewer")
    return list(map(int, counts.values()))


def check_index(name: str, value: Any, count: int) -> int:
    """The index as Python's own; refuses, by name, what is no whole number below ``count``: -1 is not the last one."""
    if not (is_whole(value) and value < count):
        raise ValueError(f"{name} = {value!r}: give a whole number from 0 to {count - 1}")
    return int(value)


def check_type(expected: Any, hint: str = "", /, **given: Any) -> None:
    """Refuse, by name, what is of none of these types.

    Args:
        expected: a type, or a union of types; None may be one of them.
        hint: where to get one.
    """
    for name, value in given.items():
        if not isinstance(value, expected):
            names = ["None" if kind is NoneType else f"a {kind.__name__}" for kind in get_args(expected) or [expected]]
            more = hint and f"; {hint}"
            raise TypeError(f"{name}: expected {' or '.join(names)}, found {type(value).__name__}{more}")


def as_path(path: Any, name: str = "path", what: str = "file") -> Path:
    """The path of a file or folder; refuses, by name, what is none."""
    if not (isinstance(path, str | PathLike) and isinstance(fspath(path), str) and fspath(path)):
        raise TypeError(f"{name} = {path!r}: give the name of a {what}, a str or a Path")
    return Path(path)


def check_flags(**flags: Any) -> None:
    """Refuse, by name, what is neither True nor False: any text, "no" too, would count as True."""
    for name, value in flags.items():
        if not isinstance(value, bool | np.bool_):
            raise ValueError(f"{name} = {value!r}: give True or False")


def plain(value: Any) -> Any:
    """A copy that nobody else can change, of Python's own numbers, so that JSON can be written."""
    if isinstance(value, np.generic | np.ndarray):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {plain(link): plain(number) for link, number in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return tuple(map(plain, value))
    return value
