"""Builds the C++ tests of the core with a sanitizer: no torch, one compilation of the core for all of them."""

from __future__ import annotations

import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SANITIZERS = ["thread", "address,undefined"]
FLAGS = ["-std=c++17", "-O1", "-g1", "-pthread", "-Wall", "-Wextra", "-Werror", "-Icsrc", "-Itests/native"]


class SanitizedCore:
    """The objects of csrc/core for one sanitizer, and the programs that are linked with them.

    Args:
        sanitizer: what ``-fsanitize`` takes.
        folder: where objects and programs go.
    """

    def __init__(self, sanitizer: str, folder: Path) -> None:
        self.folder = folder
        self.flags = [f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all"]
        sources = [*sorted(ROOT.glob("csrc/core/*.cpp")), *sorted(ROOT.glob("tests/native/*_test.cpp"))]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = dict(zip(sources, pool.map(self._compile, sources), strict=True))
        self.core = [file for source, file in objects.items() if source.parent.name == "core"]

    def _compile(self, source: Path) -> Path:
        made = self.folder / f"{source.stem}.o"
        self._run([*FLAGS, "-c", str(source), "-o", str(made)])
        return made

    def _run(self, arguments: list[str]) -> None:
        compiler = shutil.which("g++")
        if compiler is None:
            pytest.skip("needs g++")
        built = subprocess.run([compiler, *self.flags, *arguments], cwd=ROOT, capture_output=True, text=True)
        if "cannot find" in built.stderr:
            pytest.skip("the sanitizer's library is not installed")
        assert built.returncode == 0, built.stderr

    def program(self, name: str) -> Path:
        """The program of ``tests/native/NAME.cpp``."""
        made = self.folder / name
        if not made.exists():
            self._run(["-pthread", str(self.folder / f"{name}.o"), *map(str, self.core), "-o", str(made)])
        return made
