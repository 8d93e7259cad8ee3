"""A program's JSON, read strictly: what is not exactly a program is refused by the name of its entry."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fastpipe.errors import ProgramError

FORMAT = "fastpipe program 1"
_LIMIT = 2**31


def write(entries: dict[str, Any]) -> str:
    """The text: one entry a line, one rank a line."""
    ranks = ",\n".join("  " + json.dumps(rows) for rows in entries["ranks"])
    head = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in entries.items() if key != "ranks"]
    return "{" + ",\n ".join([f'"format": "{FORMAT}"', *head, f'"ranks": [\n{ranks}\n]']) + "}\n"


def read(text: str) -> dict[str, Any]:
    """The entries, each of the right form; ``ranks`` as int32 columns.

    Raises:
        ProgramError: naming the entry that is wrong.
    """
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ProgramError(f"no JSON: {error}") from None
    if not isinstance(data, dict):
        raise ProgramError("no program: give an object with the entries that Program.to_json writes")
    if data.pop("format", None) != FORMAT:
        raise ProgramError(f"format = {json.loads(text).get('format')!r}: this reads {FORMAT!r}")
    for name in data:
        if name not in _READERS:
            raise ProgramError(f"{name}: there is no such entry; there are {', '.join(_READERS)}")
    for name in _READERS:
        if name not in data:
            raise ProgramError(f"{name} is missing")
    return {name: reader(name, data[name]) for name, reader in _READERS.items()}


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ProgramError(f"{name} = {value!r}: give a string")
    return value


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ProgramError(f"{name} = {value!r}: give true or false")
    return value


def _count(name: str, value: Any) -> int:
    if not _is_whole(value) or value < 1:
        raise ProgramError(f"{name} = {value!r}: give a whole number of at least 1")
    return int(value)


def _routes(name: str, value: Any) -> tuple[tuple[int, ...], ...]:
    if not _is_list(value, lambda route: _is_list(route, _is_whole)):
        raise ProgramError(f"{name}: give lists of whole numbers, the rank of every stage for each route")
    return tuple(tuple(route) for route in value)


def _channels(name: str, value: Any) -> list[tuple[int, int, str]]:
    if not isinstance(value, list):
        raise ProgramError(f"{name}: give a list of channels")
    for number, channel in enumerate(value):
        right = isinstance(channel, list) and len(channel) == 3 and _is_list(channel[:2], _is_whole)
        if not right or channel[2] not in ("activation", "gradient"):
            raise ProgramError(
                f"{name}[{number}] = {channel!r}: give [source, destination, 'activation' or 'gradient']"
            )
    return [(source, destination, kind) for source, destination, kind in value]


def _ranks(name: str, value: Any) -> list[npt.NDArray[np.int32]]:
    if not _is_list(value, lambda rows: isinstance(rows, list)):
        raise ProgramError(f"{name}: give a list of instructions a rank")
    return [_columns(f"{name}[{rank}]", rows) for rank, rows in enumerate(value)]


def _columns(name: str, rows: Sequence[Any]) -> npt.NDArray[np.int32]:
    for position, row in enumerate(rows):
        if not _is_list(row, _is_whole) or len(row) != 7:
            raise ProgramError(f"{name}[{position}]: give 7 whole numbers of 32 bits")
    columns = np.ascontiguousarray(np.array(rows, dtype=np.int32).reshape(-1, 7).T)
    columns.setflags(write=False)
    return columns


def _is_whole(value: Any) -> bool:
    return type(value) is int and -_LIMIT <= value < _LIMIT


def _is_list(value: Any, check: Callable[[Any], bool]) -> bool:
    return isinstance(value, list) and all(map(check, value))


_READERS: dict[str, Callable[[str, Any], Any]] = {
    "name": _text,
    "num_ranks": _count,
    "routes": _routes,
    "num_microbatches": _count,
    "forward_only": _flag,
    "channels": _channels,
    "ranks": _ranks,
}
