"""The public names and their signatures are frozen: who changes one rewrites the file in the same commit, by

python tests/unit/test_public_names.py > tests/unit/public_names.txt

with torch installed (the names that need it are left out of the comparison where there is none).
"""

import enum
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

import fastpipe

pytestmark = pytest.mark.without_torch

FILE = Path(__file__).with_name("public_names.txt")


def lines() -> list[str]:
    """One line a public name and a public member of it."""
    found = []
    for name in sorted(fastpipe.__all__):
        try:
            value = getattr(fastpipe, name)
        except ImportError:
            continue
        found += describe(name, value)
    return found


def describe(name: str, value: Any) -> list[str]:
    if inspect.isclass(value):
        return [f"class {name}{bases(value)}", *members(name, value)]
    if callable(value):
        return [f"{name}{signature_text(value)}"]
    return [f"{name}: {type(value).__name__}"]


def bases(value: type) -> str:
    if issubclass(value, enum.Enum | BaseException):
        return f"({', '.join(base.__name__ for base in value.__bases__)})"
    return signature_text(value) if value.__init__ is not object.__init__ or hasattr(value, "_fields") else "()"


def members(name: str, value: type) -> list[str]:
    if issubclass(value, enum.Enum):
        return [f"    {name}.{member.name} = {member.value!r}" for member in value]
    # what it has of the package's own base classes, too
    own = {member: found for base in reversed(value.__mro__) if is_ours(base) for member, found in vars(base).items()}
    return [f"    {name}.{member}{signature(own[member])}" for member in sorted(own) if not member.startswith("_")]


def is_ours(base: type) -> bool:
    return base.__module__.startswith("fastpipe.") and not issubclass(base, BaseException)


def signature(member: Any) -> str:
    if isinstance(member, classmethod | staticmethod):
        member = member.__func__
    return signature_text(member) if inspect.isfunction(member) else ""


def signature_text(value: Any) -> str:
    """Annotations of a NamedTuple are ForwardRefs before Python 3.14."""
    return re.sub(r"ForwardRef\('([^']*)'\)", r"\1", str(inspect.signature(value)))


def owner(line: str) -> str:
    return line.removeprefix("class ").strip().split("(")[0].split(".")[0].split(":")[0]


def test_the_public_names_are_those_of_the_file() -> None:
    now = lines()
    here = {owner(line) for line in now}
    frozen = [line for line in FILE.read_text().splitlines() if owner(line) in here or owner(line) not in LAZY]
    assert now == frozen, f"a public name changed; see the top of {__file__}"


def test_every_public_name_is_documented() -> None:
    for name in fastpipe.__all__:
        if name in LAZY or name.startswith("__"):
            continue
        assert inspect.getdoc(getattr(fastpipe, name)), name


LAZY = set(fastpipe._LAZY)

if __name__ == "__main__":
    print("\n".join(lines()))
