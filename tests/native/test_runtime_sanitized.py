"""The whole extension, csrc/torch included, under the sanitizers: tests that use it run again with it, beside torch."""

import os
import shutil
import subprocess

import pytest

from tests.native.build import ROOT, kept_folder
from tests.native_tree import run_python
from tests.patience import PATIENCE

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.nightly, pytest.mark.timeout(40 * PATIENCE)]

TESTS = [
    "tests/runtime/test_step.py",
    "tests/runtime/test_failure.py",
    "tests/runtime/test_pairs.py",
    "tests/runtime/test_weight_grad.py",
    "tests/runtime/test_native_core.py",
    "tests/runtime/test_native_core_process_group.py",
    "tests/runtime/test_boundary.py",
    "tests/runtime/test_recompute.py",
    "tests/runtime/test_random_numbers.py",
    "tests/distributed/test_shared_memory.py",
]

# An error and a data race, each of them on purpose: what runs the tests must be able to find such.
PLANTED = """
#include <thread>
extern "C" int past_the_end(int index) {
    int* numbers = new int[4]();
    int read = numbers[index];
    delete[] numbers;
    return read;
}
extern "C" int raced() {
    int number = 0;
    std::thread other([&] { for (int i = 0; i < 1000; ++i) ++number; });
    for (int i = 0; i < 1000; ++i) ++number;
    other.join();
    return number;
}
"""

# torch and the interpreter are not built with the sanitizers: what they do among themselves is not looked at.
OPTIONS = {
    "address": {"ASAN_OPTIONS": "detect_leaks=0"},
    "thread": {"TSAN_OPTIONS": "ignore_noninstrumented_modules=1"},
}


class SanitizedTree:
    """The package and its tests in a folder of their own, which is kept, with the extension built for a sanitizer."""

    def __init__(self, sanitizer: str) -> None:
        compiler = shutil.which("g++") or pytest.skip("needs g++")
        library = {"address": "libasan.so", "thread": "libtsan.so"}[sanitizer]
        found = [self._output(compiler, f"-print-file-name={name}") for name in (library, "libstdc++.so")]
        if not all(map(os.path.isabs, found)):
            pytest.skip("the sanitizer's library is not installed")
        self.folder = kept_folder(sanitizer, torch.__version__, of=("csrc/core", "csrc/plan", "csrc/torch", "building"))
        flags = f"-fsanitize={sanitizer}"
        self.environment = {
            **os.environ,
            "PYTHONPATH": str(self.folder),
            "FASTPIPE_BUILD_EXT": "1",
            "FASTPIPE_REQUIRE_NATIVE": "1",
            "FASTPIPE_CXXFLAGS": f"-O1 -g1 -fno-omit-frame-pointer {flags}",
            "LDFLAGS": flags,
            "MAX_JOBS": "1",  # a compiler of torch's headers takes two gigabytes with a sanitizer
        }
        self.sanitized = {**self.environment, **OPTIONS[sanitizer], "LD_PRELOAD": " ".join(found)}
        for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "LICENSE", "README.md"):
            shutil.copy(ROOT / name, self.folder / name)
        compiled = shutil.ignore_patterns("__pycache__", "*.so", "_build_info.json")
        for name in ("building", "csrc", "fastpipe", "tests"):
            shutil.copytree(ROOT / name, self.folder / name, dirs_exist_ok=True, ignore=compiled)
        self.run(self.environment, "setup.py", "--quiet", "build_ext", "--inplace", clean=True)
        planted = self.folder / "planted.cpp"
        planted.write_text(PLANTED)
        self._output(compiler, "-g1", flags, "-shared", "-fPIC", "-pthread", str(planted), "-o", "planted.so")

    def _output(self, *command: str) -> str:
        folder = getattr(self, "folder", None)
        return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout.strip()

    def run(self, environment: dict[str, str], *arguments: str, clean: bool) -> str:
        """Run Python in the folder; return what it printed, and fail if it did not end as expected."""
        ran = run_python(self.folder, environment, *arguments)
        assert (ran.returncode == 0) == clean, ran.stdout
        return ran.stdout


@pytest.mark.parametrize(
    ("sanitizer", "error", "call"),
    [("address", "heap-buffer-overflow", "past_the_end(4)"), ("thread", "data race", "raced()")],
)
def test_the_extension_runs_clean_beside_torch(sanitizer: str, error: str, call: str) -> None:
    """Under the thread sanitizer a process that reported anything ends with an exit status other than 0."""
    tree = SanitizedTree(sanitizer)
    planted = f"import torch, ctypes; ctypes.CDLL('./planted.so').{call}"
    assert error in tree.run(tree.sanitized, "-c", planted, clean=False)
    printed = tree.run(tree.sanitized, "-m", "pytest", "-p", "no:cacheprovider", *TESTS, clean=True)
    assert "Sanitizer" not in printed
    assert "fastpipe._runtime, built for" in printed
