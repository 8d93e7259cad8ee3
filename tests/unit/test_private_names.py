"""Private names of torch and Linux are used behind one door, `fastpipe.runtime.common.torch_private`; walked by ast."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "fastpipe"
DOOR = PACKAGE / "runtime" / "common" / "torch_private.py"
DOCUMENTED = {"_replace", "_fields", "_asdict", "_exit"}
"""Methods of named tuples, which begin with an underscore so that no field has their name; and that of os."""
REFLECTION = {"getattr", "hasattr", "setattr", "delattr"}
OF_LINUX = ("/proc", "/dev/shm")
"""Not /sys/devices/system/cpu, which the kernel documents as stable."""


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__") and name != "_" and name not in DOCUMENTED


def names_defined(tree: ast.AST) -> Iterator[str]:
    """Functions, classes, attributes of classes, and of ``self``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        if isinstance(node, ast.ClassDef):
            for line in node.body:
                targets = line.targets if isinstance(line, ast.Assign) else [getattr(line, "target", None)]
                yield from (target.id for target in targets if isinstance(target, ast.Name))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_own(node.value):
            yield node.attr


def is_own(owner: ast.expr) -> bool:
    by_super = isinstance(owner, ast.Call) and isinstance(owner.func, ast.Name) and owner.func.id == "super"
    return by_super or (isinstance(owner, ast.Name) and owner.id in ("self", "cls"))


def names_behind_the_door() -> set[str]:
    """What it uses of others, as attributes and in texts."""
    found = set()
    for node in ast.walk(ast.parse(DOOR.read_text())):
        if isinstance(node, ast.Attribute) and not is_own(node.value):
            found.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found |= set(node.value.replace(".", " ").replace("|", " ").split())
    return {name for name in found if is_private(name)}


@cache
def trees() -> dict[Path, ast.Module]:
    """All files but the door; parsed once, and not when tests are collected."""
    return {path: ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py")) if path != DOOR}


@cache
def names() -> tuple[set[str], set[str]]:
    """The package's own, and those of others behind the door."""
    return {name for tree in trees().values() for name in names_defined(tree)}, names_behind_the_door()


def private_names(tree: ast.AST) -> Iterator[str]:
    """The private names of others that a file uses, with their lines."""
    own, others = names()
    texts = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}  # docstrings
    for node in ast.walk(tree):
        found: list[str] = []
        if isinstance(node, ast.Attribute):
            is_others = node.attr not in own or (node.attr in others and not is_own(node.value))
            found = [node.attr] if (is_others and is_private(node.attr)) or node.attr == "pidfd_open" else []
        elif isinstance(node, ast.Import | ast.ImportFrom):
            module = getattr(node, "module", None)
            paths = [f"{module}.{alias.name}" if module else alias.name for alias in node.names]
            others_paths = [path.split(".") for path in paths if not path.startswith("fastpipe.")]
            found = [".".join(path) for path in others_paths if any(map(is_private, path))]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in REFLECTION:
            (name,) = [arg.value for arg in node.args[1:2] if isinstance(arg, ast.Constant)] or [""]
            found = [name] if is_private(str(name)) else []
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in texts:
            found = [node.value] if node.value.startswith(OF_LINUX) or node.value in others else []
        yield from (f"line {getattr(node, 'lineno', 0)}: {name}" for name in found)


def test_only_the_door_uses_private_names() -> None:
    found = {str(path.relative_to(PACKAGE)): list(private_names(tree)) for path, tree in trees().items()}
    assert {path: lines for path, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    "line",
    [
        "torch._C._current_graph_task_id()",
        "dist.distributed_c10d._world.pg_map",
        "from torch.utils import _pytree as pytree",
        "from torch._dynamo.utils import counters",
        "import torch._inductor",
        "from torch.distributed.utils import _sync_module_states",
        "module._parameters['weight'] = alias",
        "state._fsdp_param_group",
        "options._timeout = timeout",
        "getattr(leaf, '_post_accumulate_grad_hooks', None)",
        "self.wrapper._ddp_init_helper()",
        "apart = {'_buffers'}",
        "sys._getframe(1)",
        "os.pidfd_open(pid)",
        "open('/proc/self/stat')",
        "Path(f'/proc/{pid}/stat')",
    ],
)
def test_a_private_name_elsewhere_is_found(line: str) -> None:
    assert list(private_names(ast.parse(line)))


@pytest.mark.parametrize("line", ["self._stages", "row._replace(a=1)", "from fastpipe._version import __version__"])
def test_what_is_own_or_documented_is_not(line: str) -> None:
    assert list(private_names(ast.parse(line))) == []
