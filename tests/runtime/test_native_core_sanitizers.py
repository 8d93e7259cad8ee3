"""The C++ core, with a stub in place of torch, under the compiler's sanitizers."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAMS = 60


@pytest.mark.timeout(300)
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_random_programs_run_clean(sanitizer, tmp_path):
    program = tmp_path / "core_stub_test"
    sources = ["tests/native/core_stub_test.cpp", *sorted(str(path) for path in ROOT.glob("csrc/core/*.cpp"))]
    flags = ["-std=c++17", "-O1", "-g", "-pthread", "-Wall", "-Wextra", "-Werror"]
    flags += [f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all", "-Icsrc", "-Itests/native"]
    built = subprocess.run(
        ["g++", *flags, *sources, "-o", program], cwd=ROOT, capture_output=True, text=True, timeout=200
    )
    if "cannot find" in built.stderr:
        pytest.skip(f"the {sanitizer} sanitizer's library is not installed")
    assert built.returncode == 0, built.stderr
    ran = subprocess.run([program, str(PROGRAMS)], capture_output=True, text=True, timeout=90)
    assert ran.returncode == 0, ran.stdout + ran.stderr
