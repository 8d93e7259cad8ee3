"""A small source tree with the real setup.py and stand-ins for the C++: builds in a second, breaks on demand."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")

PLAN = '#include "plan/plan.h"\nextern "C" int fastpipe_answer() { return ANSWER; }\n'
BINDINGS = """
#include <Python.h>
#include "core/core.h"
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_runtime", core(), -1, NULL, NULL, NULL, NULL, NULL};
PyMODINIT_FUNC PyInit__runtime() { return PyModule_Create(&definition); }
"""
SOURCES = {
    "csrc/plan/plan.h": "#pragma once\nenum { ANSWER = 42 };\n",
    "csrc/plan/plan.cpp": PLAN,
    "csrc/plan/other.cpp": '#include "plan/plan.h"\nextern "C" int fastpipe_other() { return ANSWER; }\n',
    "csrc/core/core.h": "#pragma once\nconst char* core();\n",
    "csrc/core/core.cpp": '#include "core/core.h"\nconst char* core() { return "stand-in"; }\n',
    "csrc/torch/bindings.cpp": BINDINGS,
    "csrc/torch/alone.cpp": "int alone() { return 0; }\n",
    "fastpipe/__init__.py": "",
}


def run_python(folder: Path, environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run this interpreter in a folder and return what it did, output and errors together."""
    pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.run([sys.executable, *arguments], cwd=folder, env=environment, text=True, **pipes)


class NativeTree:
    """A source tree in `root`; `torch=False` hides the torch of this interpreter from everything that is run."""

    def __init__(self, root: Path, torch: bool = False) -> None:
        self.root = root
        self.environment = {**os.environ, "PYTHONPATH": str(root / "site"), "FASTPIPE_BUILD_EXT": "auto"}
        self.environment.pop("FASTPIPE_CXXFLAGS", None)
        self.environment.pop("CXX", None)
        for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "LICENSE"):
            shutil.copy(REPOSITORY / name, root / name)
        shutil.copytree(REPOSITORY / "building", root / "building", ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("_version.py", "py.typed", "runtime/__init__.py", "runtime/native.py"):
            self.write(f"fastpipe/{name}", (REPOSITORY / "fastpipe" / name).read_text())
        for name, text in SOURCES.items():
            self.write(name, text)
        self.write("README.md", "# stand-in\n")
        self.write("site/sitecustomize.py", "" if torch else "import sys\nsys.modules['torch'] = None\n")

    def write(self, name: str, text: str) -> Path:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def python(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return run_python(self.root, {**self.environment, **environment}, *arguments)

    def setup(self, *arguments: str, fails: bool = False, **environment: str) -> str:
        result = self.python("setup.py", *arguments, **environment)
        assert (result.returncode != 0) == fails, result.stdout
        return result.stdout

    def build(self, fails: bool = False, **environment: str) -> str:
        return self.setup("build_ext", "--inplace", fails=fails, **environment)

    def status(self) -> str:
        result = self.python("-c", "from fastpipe.runtime import native; print(native.native_status())")
        assert result.returncode == 0, result.stdout
        return result.stdout.strip()

    @property
    def record(self) -> dict[str, Any]:
        return json.loads((self.root / "fastpipe/_build_info.json").read_text())["libraries"]

    def library(self, name: str) -> Path:
        return self.root / "fastpipe" / f"{name}{SUFFIX}"

    def object_times(self) -> dict[str, int]:
        return {path.stem: path.stat().st_mtime_ns for path in self.root.glob("build/temp*/**/*.o")}
