"""What native.py says about every state the extension can be in, with a stand-in for torch: none is imported here."""

import json
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.without_torch

NATIVE = Path(__file__).resolve().parents[2] / "fastpipe" / "runtime" / "native.py"
SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")
ASK = """
import sys
from fastpipe.runtime import native
assert "torch" not in sys.modules
print(native.native_status())
assert native.load() is None and native.load() is None
print("imported" if "torch" in sys.modules else "untouched")
"""


def runtime(**changes: Any) -> dict[str, Any]:
    inputs = {"torch": "2.13.0+cpu", "backend": "CPU", "compiler": "g++ 12"}
    return {"built": True, "reason": "", "inputs": inputs | changes}


def record_of(library: dict[str, Any], **changes: Any) -> str:
    return json.dumps({"suffix": SUFFIX, "python": "3.11.7", "libraries": {"_runtime": library}} | changes)


BUILT = record_of(runtime())


class Installation:
    """A folder with as much of fastpipe and of torch as a state needs."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.write("fastpipe/__init__.py", "")
        self.write("fastpipe/runtime/__init__.py", "")
        shutil.copy(NATIVE, root / "fastpipe/runtime/native.py")

    def write(self, name: str, text: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def add_torch(self, version: str, cuda: str = "None", code: str = "") -> None:
        self.write("torch/__init__.py", code)
        self.write(
            "torch/version.py", f"__version__ = '{version}'\ndebug = False\ncuda: str | None = {cuda}\nhip = None\n"
        )

    def add_record(self, text: str) -> None:
        self.write("fastpipe/_build_info.json", text)

    def add_library(self, content: str) -> None:
        self.write(f"fastpipe/_runtime{SUFFIX}", content)

    def ask(self) -> tuple[str, bool]:
        """The sentence, and whether torch was imported; -S keeps the real torch out of sight."""
        result = subprocess.run([sys.executable, "-S", "-c", ASK], cwd=self.root, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
        sentence, imported = result.stdout.splitlines()  # one sentence: one line
        assert sentence.startswith("native extension not loaded: ")
        return sentence, imported == "imported"


@pytest.fixture
def installation(tmp_path: Path) -> Installation:
    return Installation(tmp_path)


def test_no_torch_and_never_built(installation: Installation) -> None:
    sentence, _ = installation.ask()
    assert "torch is not installed" in sentence
    assert "pip install 'torch>=2.11', then run `pip install --force-reinstall" in sentence


def test_torch_removed_after_the_build(installation: Installation) -> None:
    installation.add_record(BUILT)
    sentence, _ = installation.ask()
    assert sentence.endswith("torch is not installed (planning does without); pip install torch==2.13.0")


def test_a_folder_that_happens_to_be_called_torch(installation: Installation) -> None:
    installation.write("torch/notes.txt", "a namespace package, to Python")
    assert "torch is not installed" in installation.ask()[0]


def test_never_built(installation: Installation) -> None:
    installation.add_torch("2.13.0+cpu")
    sentence, imported = installation.ask()
    assert sentence.endswith(
        "it was never built here; run `pip install --force-reinstall --no-deps --no-cache-dir fastpipe`"
    )
    assert not imported


def test_the_advice_names_what_pip_was_given(installation: Installation) -> None:
    installation.add_torch("2.13.0+cpu")
    installation.write("fastpipe-0.1.0.dist-info/METADATA", "Name: fastpipe\nVersion: 0.1.0\n")
    installation.write(
        "fastpipe-0.1.0.dist-info/direct_url.json", '{"url": "file:///home/me/fastpipe", "dir_info": {}}'
    )
    assert "--no-cache-dir /home/me/fastpipe`" in installation.ask()[0]


def test_in_a_source_tree_the_advice_is_make(installation: Installation) -> None:
    installation.add_torch("2.13.0+cpu")
    installation.write("setup.py", "")
    assert f"run `make build` in {installation.root}" in installation.ask()[0]


@pytest.mark.parametrize("log", [[], ["a.cpp:1:2: error: no", "ninja: build stopped"]])
def test_a_build_that_failed(installation: Installation, log: list[str]) -> None:
    installation.add_torch("2.13.0+cpu")
    installation.add_record(record_of({"built": False, "reason": "a.cpp:1:2: error: no", "log": log}))
    sentence, imported = installation.ask()
    assert "it was not built: a.cpp:1:2: error: no" in sentence
    assert ("_build_info.json" in sentence) == bool(log)
    assert not imported


@pytest.mark.parametrize(
    ("version", "cuda", "named"),
    [
        ("2.13.1+cpu", "None", "torch 2.13.1 (CPU)"),
        ("2.14.0", "None", "torch 2.14.0 (CPU)"),
        ("2.11.0", "None", "torch 2.11.0 (CPU)"),
        ("2.13.0+cu130", "'13.0'", "torch 2.13.0 (CUDA 13.0)"),
    ],
)
def test_another_torch_is_noticed_before_anything_is_loaded(
    installation: Installation, version: str, cuda: str, named: str
) -> None:
    installation.add_torch(version, cuda, code="raise SystemError('imported')")
    installation.add_record(BUILT)
    installation.add_library("loading this would fail")
    sentence, imported = installation.ask()
    assert (
        f"it was built for torch 2.13.0 (CPU), but {named} is installed; run `pip install --force-reinstall" in sentence
    )
    assert not imported


def test_another_cuda_is_noticed(installation: Installation) -> None:
    installation.add_torch("2.13.0+cu130", "'13.0'")
    installation.add_record(record_of(runtime(torch="2.13.0+cu128", backend="CUDA 12.8")))
    sentence, _ = installation.ask()
    assert "built for torch 2.13.0 (CUDA 12.8), but torch 2.13.0 (CUDA 13.0) is installed" in sentence


def test_another_python(installation: Installation) -> None:
    installation.add_torch("2.13.0+cpu")
    installation.add_record(record_of(runtime(), suffix=".cpython-399-x86_64-linux-gnu.so", python="3.99.0"))
    assert "it was built for Python 3.99.0, this is 3." in installation.ask()[0]


def test_a_library_that_is_gone(installation: Installation) -> None:
    installation.add_torch("2.13.0+cpu")
    installation.add_record(BUILT)
    assert f"_runtime{SUFFIX} is gone" in installation.ask()[0]


@pytest.mark.parametrize("version", ["2.13.0+cpu", "2.13.0", "2.13.0a0+git1234"])
def test_a_broken_library_is_tried_and_reported(installation: Installation, version: str) -> None:
    installation.add_torch(version)
    installation.add_record(BUILT)
    installation.add_library("no library at all, although the record fits")
    sentence, imported = installation.ask()
    assert "loading it failed (ImportError: " in sentence
    assert imported


@pytest.mark.parametrize("raised", ["OSError('libcudart.so.13: cannot open\\nshared object file')", "ImportError('x')"])
def test_a_torch_that_cannot_be_imported(installation: Installation, raised: str) -> None:
    installation.add_torch("2.13.0+cpu", code=f"raise {raised}")
    installation.add_record(BUILT)
    installation.add_library("never reached")
    assert "torch cannot be imported (" in installation.ask()[0]


@pytest.mark.parametrize(
    "text",
    ["", "not json", "3", "[]", '{"libraries": 3}', '{"libraries": {"_runtime": {}}}', record_of(runtime(torch=None))],
)
def test_a_record_that_makes_no_sense(installation: Installation, text: str) -> None:
    installation.add_torch("2.13.0+cpu")
    installation.add_record(text)
    sentence, imported = installation.ask()
    assert "its build cannot be compared with the installed torch" in sentence
    assert not imported


@pytest.mark.parametrize("version_file", [None, "", "__version__ = 'unknown'\n"])
def test_a_torch_without_a_version(installation: Installation, version_file: str | None) -> None:
    installation.write("torch/__init__.py", "")
    if version_file is not None:
        installation.write("torch/version.py", version_file)
    installation.add_record(BUILT)
    assert "its build cannot be compared with the installed torch" in installation.ask()[0]
