"""csrc/torch under the compiler's sanitizers, which torch and Python know nothing of: steps of small pipelines."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.patience import PATIENCE

pytest.importorskip("torch")
pytest.importorskip("setuptools", minversion="77", reason="builds need setuptools>=77")
ROOT = Path(__file__).parents[2]
OPTIONS = {
    # Python and torch keep what they once have; torch's own threads are not compiled for the sanitizer
    "address": {"ASAN_OPTIONS": "detect_leaks=0", "PYTHONMALLOC": "malloc"},
    "thread": {"TSAN_OPTIONS": "ignore_noninstrumented_modules=1 report_signal_unsafe=0 exitcode=66"},
}
pytestmark = [pytest.mark.nightly, pytest.mark.timeout(12 * PATIENCE)]


def build(sanitizer: str, folder: Path) -> None:
    """The package in a folder, its libraries compiled for a sanitizer."""
    for name in ("fastpipe", "csrc", "building"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("*.so", "_build_info.json"))
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    options = {"FASTPIPE_BUILD_EXT": "1", "FASTPIPE_CXXFLAGS": f"-O1 -g1 -fsanitize={sanitizer}"}
    command = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
    built = subprocess.run(command, cwd=folder, env=os.environ | options, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr


def library(sanitizer: str) -> str:
    """The sanitizer's library, which must be loaded first; skips without it."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++")
    name = f"lib{sanitizer[0]}san.so"
    found = subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, text=True).stdout.strip()
    if found == name:
        pytest.skip(f"{name} is not installed")
    return found


def steps(sanitizer: str, folder: Path, *ranks: dict[str, str]) -> Sequence[tuple[int, str]]:
    """The status and the output of the script, in so many processes."""
    # the C++ library is what the sanitizer's hooks for exceptions look for
    common = {"LD_PRELOAD": f"{library(sanitizer)} libstdc++.so.6", "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    command = [
        *(["setarch", "-R"] if sanitizer == "thread" else []),
        sys.executable,
        str(ROOT / "tests/native/steps.py"),
    ]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "cwd": folder}
    started = [
        subprocess.Popen(command, env=os.environ | common | OPTIONS[sanitizer] | rank, **options)  # type: ignore[call-overload]
        for rank in ranks
    ]
    outputs = [process.communicate(timeout=4 * PATIENCE)[0] for process in started]
    return [(process.returncode, output) for process, output in zip(started, outputs, strict=True)]


@pytest.mark.parametrize("sanitizer", OPTIONS)
def test_steps_run_clean(sanitizer: str, tmp_path: Path) -> None:
    library(sanitizer)
    build(sanitizer, tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    ran = [*steps(sanitizer, tmp_path, {}), *steps(sanitizer, tmp_path, *(place | {"RANK": rank} for rank in "01"))]
    for status, output in ran:
        assert status == 0 and "Sanitizer" not in output, output[-10000:]
        assert len(re.findall("ok$", output, re.MULTILINE)) >= 3
