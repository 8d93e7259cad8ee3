"""Writes the table of packages in docs/design.md from the imports of the code.

    python docs/write_layout.py              rewrite the table
    python docs/write_layout.py --check      say whether it is current

`make lint` runs the check. Nothing here needs torch.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

from pages import finish, with_blocks

PAGE = Path(__file__).with_name("design.md")
CODE = Path(__file__).resolve().parents[1] / "fastpipe"
SINGLE = {("api",): "api", ("runtime", "native"): "runtime/native"}
"""Modules beside packages that import far more, or far less, than those they stand beside."""


def package_of(parts: tuple[str, ...]) -> str:
    """The package that a module belongs to; modules that stand alone count as the one they stand in."""
    for module, name in SINGLE.items():
        if parts[: len(module)] == module:
            return name
    if parts[:1] == ("runtime",):
        return "runtime/" + parts[1] if len(parts) > 2 or (CODE / "runtime" / parts[-1]).is_dir() else "runtime"
    return parts[0] if len(parts) > 1 or (parts and (CODE / parts[0]).is_dir()) else "fastpipe"


def imported(path: Path) -> Iterator[tuple[str, ...]]:
    """What of fastpipe a file imports, as parts of the path below it.

    Without imports for type checkers alone, and without those by which methods of the planning core delegate upwards
    (`Schedule.validate`, `Timeline.plot` and the like).
    """
    delegates = path.parent == CODE and path.stem != "api"
    waiting: list[ast.AST] = [ast.parse(path.read_text())]
    while waiting:
        node = waiting.pop()
        if delegates and isinstance(node, ast.FunctionDef):
            continue
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            continue
        waiting += ast.iter_child_nodes(node)
        if isinstance(node, ast.Import) and any(name.name == "fastpipe" for name in node.names):
            yield ("runtime",)  # all public names, of which the Pipeline is on top
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "fastpipe":
            parts = tuple(node.module.split(".")[1:])
            for name in node.names:
                whole = (*parts, name.name)
                is_module = CODE.joinpath(*whole).with_suffix(".py").exists() or CODE.joinpath(*whole).is_dir()
                yield whole if is_module else parts


def packages() -> dict[str, set[str]]:
    """By package those that it imports."""
    found: dict[str, set[str]] = {}
    for path in sorted(CODE.rglob("*.py")):
        parts = path.relative_to(CODE).with_suffix("").parts
        own = package_of(parts[:-1] if parts[-1] == "__init__" else parts)
        if parts in (("__init__",), ("__main__",), ("bounds",), ("formulas",)):  # the public names, from everywhere
            continue
        uses = {package_of(other) for other in imported(path) if other} - {own}
        found[own] = found.get(own, set()) | uses
    return found


def levels(found: dict[str, set[str]]) -> dict[str, int]:
    """How far each package is from those that import none.

    Raises:
        ValueError: naming packages that import each other in a circle.
    """
    level: dict[str, int] = {}
    while len(level) < len(found):
        ready = [p for p, uses in found.items() if p not in level and uses <= level.keys()]
        if not ready:
            raise ValueError(f"packages import each other in a circle: {sorted(found.keys() - level.keys())}")
        level |= {p: max((level[other] + 1 for other in found[p]), default=0) for p in ready}
    return level


def table() -> str:
    """The packages from the top down."""
    found = packages()
    level = levels(found)
    order = sorted(found, key=lambda package: (-level[package], package))
    lines = ["| package | imports |", "|---|---|"]
    for package in order:
        listed = ", ".join(other for other in order if other in found[package])
        lines.append(f"| {package} | {listed or 'nothing'} |")
    return "\n".join(lines)


def main() -> int:
    """Write the table, or check it."""
    return finish(PAGE, with_blocks(PAGE.read_text(encoding="utf-8"), {"packages": table}))


if __name__ == "__main__":
    sys.exit(main())
