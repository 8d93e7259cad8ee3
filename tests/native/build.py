"""Builds C++ with a sanitizer, without torch: the core with a stub in torch's place, and the planning library."""

import hashlib
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


def kept_folder(*made_with: str, of: Iterable[str] = ("csrc/core", "csrc/plan", "tests/native")) -> Path:
    """A folder under build/tests, which stays, for what is built of some folders' files as they are now.

    Args:
        made_with: flags and releases on which it depends, too.
        of: the folders.
    """
    digest = hashlib.sha256(repr(made_with).encode())
    files = (path for folder in of for path in (ROOT / folder).iterdir() if path.is_file())
    for path in sorted(path for path in files if not path.name.startswith("test_")):  # which are not built
        digest.update(path.name.encode() + path.read_bytes())
    folder = ROOT / "build/tests" / digest.hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    os.utime(folder)  # .ci/run removes what has not been used for a week
    return folder


class Sanitized:
    """A compiler and one sanitizer; the test is skipped where either is missing.

    Args:
        sanitizer: what ``-fsanitize`` takes.
    """

    def __init__(self, sanitizer: str) -> None:
        self._compiler = shutil.which("g++") or pytest.skip("needs g++")
        # Optimized they take longer to compile than they gain where they run.
        self.flags = ["-O0", f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all"]
        release = subprocess.run([self._compiler, "--version"], capture_output=True, text=True, check=True).stdout
        self.folder = kept_folder(release, *FLAGS, *self.flags)

    def compile(self, sources: Iterable[Path], *flags: str) -> list[Path]:
        """Objects, made as many at a time as there are processors."""
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            return list(pool.map(lambda source: self._compile(source, flags), sources))

    def _compile(self, source: Path, flags: tuple[str, ...]) -> Path:
        return self._make(f"{source.stem}.o", [*FLAGS, *flags, "-c", str(source)])

    def link(self, objects: Iterable[Path], name: str, *flags: str) -> Path:
        return self._make(name, ["-pthread", *flags, *map(str, objects)])

    def _make(self, name: str, arguments: list[str]) -> Path:
        """Unless it is there, of an earlier run."""
        made, part = self.folder / name, self.folder / f"{name}.{os.getpid()}"
        if not made.exists():
            command = [self._compiler, *self.flags, *arguments, "-o", str(part)]
            built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
            if "cannot find" in built.stderr:
                pytest.skip("the sanitizer's library is not installed")
            assert built.returncode == 0, built.stderr
            part.rename(made)
        return made


class SanitizedCore:
    """The programs of tests/native with csrc/core, for one sanitizer, all of them running at once: they mostly sleep.

    The one that counts allocations is built for the first sanitizer alone: its count is the same under any, and what
    it runs runs under all of them in the others.

    Args:
        sanitizer: what ``-fsanitize`` takes.
        arguments: of each program.
    """

    def __init__(self, sanitizer: str, arguments: list[str]) -> None:
        build = Sanitized(sanitizer)
        core = build.folder / "core.cpp"  # in one piece, as setup.py has it compiled
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
