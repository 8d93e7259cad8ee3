"""Who may import whom: design.md's table, walked by ast; and torch only where it is allowed."""

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from tests.patience import PATIENCE

pytestmark = pytest.mark.without_torch

PACKAGE = Path(__file__).resolve().parents[2] / "fastpipe"

CORE = (
    *(
        "_version",
        "errors",
        "hardware_queues",
        "checks",
        "checkpoint_folder",
        "action",
        "placement",
        "dependencies",
        "schedule",
        "program",
    ),
    *("timeline", "cost", "native_plan", "machine", "partition", "collectives"),
    *("lower", "validate", "shared_queue", "validate_program", "simulate"),
)
"""The modules of planning that are no package, in their order: each imports only those before it."""


def up_to(last: str) -> set[str]:
    """The core as far as a module."""
    return set(CORE[: CORE.index(last) + 1])


PLANNING = {name: set(CORE[:number]) for number, name in enumerate(CORE)} | {
    "bounds": {"theory"},
    "formulas": {"theory"},
}
"""What each module of the planning side may import; `api`, the command line and the Pipeline import anything."""

FOLDERS = {
    "theory": {"theory", *up_to("cost")},
    "schedules": {"schedules", *up_to("native_plan")},
    "visualize": {"visualize", *up_to("timeline")},
    "planner": {"planner", "theory", "schedules", *CORE},
}
RUNTIME = [
    "common",
    "coordination",
    "data_parallel",
    "model",
    "transport",
    "stage",
    "executor",
    "step",
]
"""The packages of the runtime from the bottom up: each may use those before it, through what they export."""
PROGRAMS = {
    "program",
    "checks",
    "placement",
    "action",
    "dependencies",
    "machine",
    "errors",
    "hardware_queues",
    "partition",
}
"""What the packages below ``step`` may use of the planning side: programs, and neither schedules nor the simulator."""
COMPOSERS = {"__init__", "__main__", "api", "cli", "testing", "runtime", "integrations"}

UPWARD = {
    ("schedule", "validate", "Schedule.validate"),
    ("schedule", "visualize", "Schedule.__str__"),
    ("timeline", "visualize", "Timeline.plot"),
    ("timeline", "visualize", "Timeline.to_html"),
    ("timeline", "visualize", "Timeline.to_chrome_trace"),
    ("planner.result", "visualize", "Plan.plot"),
}
"""The six methods that delegate upward, each by one import inside the function."""


def modules() -> dict[str, Path]:
    """``schedules.gpipe`` to its file."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)] = path
    return found


@cache
def imports(path: Path) -> list[tuple[str, str]]:
    """What a file imports: (module, qualified name of the function around it or "")."""
    return Imports(path).found


class Imports(ast.NodeVisitor):
    """Collects them."""

    def __init__(self, path: Path) -> None:
        self.found: list[tuple[str, str]] = []
        self.scope: list[str] = []
        self.function_depth = 0
        self.skips_typing = "runtime" in path.relative_to(PACKAGE).parts
        self.visit(ast.parse(path.read_text()))

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._inside(node, 0)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._inside(node, 1)

    def _inside(self, node: ast.ClassDef | ast.FunctionDef, depth: int) -> None:
        self.scope.append(node.name)
        self.function_depth += depth
        self.generic_visit(node)
        self.function_depth -= depth
        self.scope.pop()

    def visit_If(self, node: ast.If) -> None:
        """Imports for types count too, but in the runtime."""
        is_typing = isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        if not (is_typing and self.skips_typing):
            self.generic_visit(node)

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self._add(alias.name)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        assert node.level == 0, "imports name the package in full"
        if node.module == "fastpipe":
            for alias in node.names:
                self._add(f"fastpipe.{alias.name}")
        else:
            self._add(node.module or "")

    def _add(self, module: str) -> None:
        self.found.append((module, ".".join(self.scope) if self.function_depth else ""))


def own(module: str) -> str:
    """The first part of a module of the package, or ''."""
    return module.split(".")[1] if module.startswith("fastpipe.") else ""


def allowed(name: str) -> set[str] | None:
    if name in COMPOSERS or name.split(".")[0] in COMPOSERS:
        return None
    return FOLDERS.get(name.split(".")[0], PLANNING.get(name))


def test_every_module_has_its_rule() -> None:
    missing = [name for name in modules() if name.split(".")[0] not in COMPOSERS and not allowed(name)]
    assert [name for name in missing if PLANNING.get(name) is None and name.split(".")[0] not in FOLDERS] == []


def test_modules_import_only_what_lies_below_them() -> None:
    wrong = []
    for name, path in modules().items():
        rule = allowed(name)
        for module, scope in imports(path) if rule is not None else ():
            part = own(module)
            if part and part not in rule and (name, part, scope) not in UPWARD:
                wrong.append(f"{name} imports {module}{' in ' + scope if scope else ''}")
    assert wrong == []


def test_packages_of_the_runtime_import_downwards_and_through_exports() -> None:
    wrong = []
    for name, path in modules().items():
        package = name.split(".")[1] if name.count(".") and name.split(".")[1] in RUNTIME else "top"
        if not name.startswith(("runtime.", "testing")):
            continue
        below = RUNTIME[: RUNTIME.index(package)] if package != "top" else RUNTIME
        for module, scope in imports(path):
            parts = module.split(".")[1:] if own(module) else []
            if scope and own(module) == "runtime":
                wrong.append(f"{name} imports {module} within {scope}")
            if package in RUNTIME[: RUNTIME.index("step")] and parts[:1] not in ([], ["runtime"]):
                wrong += [f"{name} imports {module}"] if parts[0] not in PROGRAMS else []
            if parts[:1] != ["runtime"] or parts[1:] in ([], ["native"]) or parts[1] == package:
                continue
            if parts[1] in RUNTIME and (parts[1] not in below or len(parts) > 2):
                wrong.append(f"{name} imports {module}")
            if package != "top" and parts[1] not in RUNTIME:
                wrong.append(f"{name} imports {module}")
    assert wrong == []


def test_the_rule_has_no_cycle() -> None:
    order: set[str] = set()
    remaining = PLANNING | {name: below - {name} for name, below in FOLDERS.items()}
    while remaining:
        free = {name for name, below in remaining.items() if below <= order}
        assert free, f"a cycle among {sorted(remaining)}"
        order |= free
        remaining = {name: below for name, below in remaining.items() if name not in free}


def test_packages_of_planning_are_imported_by_their_name() -> None:
    """What others use of a package stands in its ``__init__.py``; the two public paths lead to modules of `theory`."""
    past = [
        f"{name} imports {module}"
        for name, path in modules().items()
        for module, _ in imports(path)
        if own(module) in FOLDERS.keys() - {name.split(".")[0]} and module.count(".") > 1
    ]
    assert past == ["bounds imports fastpipe.theory.bounds", "formulas imports fastpipe.theory.formulas"]


def test_no_function_of_planning_imports_but_the_five_that_reach_upward() -> None:
    inside = {
        (name, own(module), scope)
        for name, path in modules().items()
        for module, scope in imports(path)
        if scope and own(module) and name.split(".")[0] not in {"runtime", "testing"}
    }
    assert inside == UPWARD


def test_integrations_use_what_the_package_exports_and_nothing_imports_them() -> None:
    for name, path in modules().items():
        found = {module for module, _ in imports(path) if module.split(".")[0] == "fastpipe"}
        if name == "integrations.transformers":  # its Trainer is built on Accelerate
            found -= {"fastpipe.integrations.accelerate"}
        if name.startswith("integrations"):
            assert found <= {"fastpipe"}, name
        assert not [module for module in found if module.startswith("fastpipe.integrations")], name


def test_torch_is_imported_under_runtime_alone() -> None:
    for name, path in modules().items():
        if not name.startswith(("runtime", "testing", "integrations")):
            assert [m for m, _ in imports(path) if m.split(".")[0] == "torch"] == [], name


PLAN_WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None  # `import torch` raises ImportError
import fastpipe
schedule = fastpipe.make_schedule("dualpipev", num_ranks=4, num_microbatches=8)
program = fastpipe.lower(schedule.validate())
timeline = fastpipe.simulate(program)
assert fastpipe.Schedule.from_csv(schedule.to_csv()) == schedule
assert len(str(program)) and len(str(timeline)) and fastpipe.native_status()
assert fastpipe.list_schedules() and fastpipe.partition(10, 3)
assert not [name for name in sys.modules if name.startswith("torch.")]
print(timeline.makespan)
"""


def test_planning_needs_no_torch() -> None:
    done = subprocess.run([sys.executable, "-c", PLAN_WITHOUT_TORCH], capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) > 0


def test_importing_the_package_imports_no_torch() -> None:
    ask = "import sys, fastpipe; print('torch' in sys.modules, 'matplotlib' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, timeout=PATIENCE, check=True)
    assert done.stdout.split() == ["False", "False"]


def test_whoever_catches_everything_says_who_is_told() -> None:
    broad = re.compile(r"(except (Base)?Exception\b|suppress\((Base)?Exception\b)(?!.*#)")
    found = [
        f"{path.name}: {line.strip()}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for line in path.read_text().splitlines()
        if broad.search(line)
    ]
    assert not found
