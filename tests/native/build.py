"""Builds C++ with a sanitizer, without torch: the core with a stub in torch's place, and the planning library."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.patience import PATIENCE

ROOT = Path(__file__).parents[2]
ALONE = "allocation_test"
TOGETHER = sorted({file.stem for file in ROOT.glob("tests/native/*_test.cpp")} - {ALONE})
SANITIZERS = ["thread", "address,undefined"]
FLAGS = ["-std=c++17", "-g1", "-pthread", "-Wall", "-Wextra", "-Werror", "-Icsrc", "-Itests/native"]


class Sanitized:
    """A compiler and one sanitizer; the test is skipped where either is missing.

    Args:
        sanitizer: what ``-fsanitize`` takes.
        folder: where objects and programs go.
    """

    def __init__(self, sanitizer: str, folder: Path) -> None:
        self.folder = folder
        # The checks of undefined behaviour take half as long again to compile where they are optimized.
        optimized = "-O0" if "undefined" in sanitizer else "-O1"
        self.flags = [optimized, f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all"]

    def compile(self, sources: Iterable[Path], *flags: str) -> list[Path]:
        """Objects, made as many at a time as there are processors."""
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            return list(pool.map(lambda source: self._compile(source, flags), sources))

    def _compile(self, source: Path, flags: tuple[str, ...]) -> Path:
        made = self.folder / f"{source.stem}.o"
        self._run([*FLAGS, *flags, "-c", str(source), "-o", str(made)])
        return made

    def link(self, objects: Iterable[Path], name: str, *flags: str) -> Path:
        made = self.folder / name
        self._run(["-pthread", *flags, *map(str, objects), "-o", str(made)])
        return made

    def _run(self, arguments: list[str]) -> None:
        compiler = shutil.which("g++")
        if compiler is None:
            pytest.skip("needs g++")
        built = subprocess.run([compiler, *self.flags, *arguments], cwd=ROOT, capture_output=True, text=True)
        if "cannot find" in built.stderr:
            pytest.skip("the sanitizer's library is not installed")
        assert built.returncode == 0, built.stderr


class SanitizedCore:
    """The programs of tests/native with csrc/core, for one sanitizer, all of them running at once: they mostly sleep.

    The one that counts allocations is built for the first sanitizer alone: its count is the same under any, and what
    it runs runs under all of them in the others.

    Args:
        sanitizer: what ``-fsanitize`` takes.
        folder: where objects and programs go.
        arguments: of each program.
    """

    def __init__(self, sanitizer: str, folder: Path, arguments: list[str]) -> None:
        build = Sanitized(sanitizer, folder)
        core = folder / "core.cpp"  # in one piece, as setup.py has it compiled
        core.write_text("".join(f'#include "core/{file.name}"\n' for file in sorted(ROOT.glob("csrc/core/*.cpp"))))
        mains = ["programs", ALONE] if sanitizer == SANITIZERS[0] else ["programs"]
        core_object, *others = build.compile([core, *(ROOT / f"tests/native/{name}.cpp" for name in mains)])
        linked = {other.stem: build.link([core_object, other], other.stem) for other in others}
        together, *alone = linked.values()
        commands = {name: [together, name] for name in TOGETHER}
        if alone:
            commands[ALONE] = alone
        # started here, and not by the threads that wait for them: what there is then is shared by the tests
        started = {
            name: subprocess.Popen([*command, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            for name, command in commands.items()
        }
        pool = ThreadPoolExecutor(len(started))
        self.runs: dict[str, Future[subprocess.CompletedProcess[str]]] = {
            name: pool.submit(_finish, process) for name, process in started.items()
        }
        pool.shutdown(wait=False)


def _finish(process: subprocess.Popen[str]) -> subprocess.CompletedProcess[str]:
    with process:
        try:
            out, err = process.communicate(timeout=PATIENCE)
        finally:
            process.kill()
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)
