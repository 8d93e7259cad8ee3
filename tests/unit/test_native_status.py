"""What native.py says about every state the extension can be in, with a stand-in for torch: none is imported here."""

import json
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


RECORD, LIBRARY = "fastpipe/_build_info.json", f"fastpipe/_runtime{SUFFIX}"
READY = {RECORD: BUILT, LIBRARY: "no library at all, although the record fits"}


def torch(version: str = "2.13.0+cpu", cuda: str = "None", code: str = "") -> dict[str, str]:
    numbers = f"__version__ = '{version}'\ndebug = False\ncuda: str | None = {cuda}\nhip = None\n"
    return {"torch/__init__.py": code, "torch/version.py": numbers}


def built_for_another(version: str, named: str, cuda: str = "None") -> tuple[dict[str, str], str]:
    said = f"built for torch 2.13.0 (CPU), but {named} is installed; run `pip install --force-reinstall"
    return torch(version, cuda, "raise SystemError('imported')") | READY, said


METADATA = "fastpipe-0.1.0.dist-info"
FAILED = {"built": False, "reason": "a.cpp:1:2: error: no", "log": []}
LOGGED = FAILED | {"log": ["a.cpp:1:2: error: no", "ninja: build stopped"]}
STATES: dict[str, tuple[dict[str, str], str]] = {
    "no torch, never built": (
        {},
        "torch is not installed (planning does without); pip install 'torch>=2.11', then run `pip install --force-rei",
    ),
    "torch removed": ({RECORD: BUILT}, "torch is not installed (planning does without); pip install torch==2.13.0\n"),
    "a folder called torch": ({"torch/notes.txt": "a namespace package, to Python"}, "torch is not installed"),
    "never built": (
        torch(),
        "it was never built here; run `pip install --force-reinstall --no-deps --no-cache-dir fastpipe`\n",
    ),
    "what pip was given": (
        torch()
        | {
            f"{METADATA}/METADATA": "Name: fastpipe\nVersion: 0.1.0\n",
            f"{METADATA}/direct_url.json": '{"url": "file:///home/me/fastpipe", "dir_info": {}}',
        },
        "--no-cache-dir /home/me/fastpipe`",
    ),
    "in a source tree": (torch() | {"setup.py": ""}, "run `make build` in FOLDER"),
    "a failed build": (torch() | {RECORD: record_of(FAILED)}, "it was not built: a.cpp:1:2: error: no; "),
    "a failed build with a log": (
        torch() | {RECORD: record_of(LOGGED)},
        f"it was not built: a.cpp:1:2: error: no (the end of the build's output is in FOLDER/{RECORD})",
    ),
    "a later patch": built_for_another("2.13.1+cpu", "torch 2.13.1 (CPU)"),
    "a later torch": built_for_another("2.14.0", "torch 2.14.0 (CPU)"),
    "an earlier torch": built_for_another("2.11.0", "torch 2.11.0 (CPU)"),
    "a torch for CUDA": built_for_another("2.13.0+cu130", "torch 2.13.0 (CUDA 13.0)", "'13.0'"),
    "another CUDA": (
        torch("2.13.0+cu130", "'13.0'") | {RECORD: record_of(runtime(torch="2.13.0+cu128", backend="CUDA 12.8"))},
        "built for torch 2.13.0 (CUDA 12.8), but torch 2.13.0 (CUDA 13.0) is installed",
    ),
    "another Python": (
        torch() | {RECORD: record_of(runtime(), suffix=".cpython-399-x86_64-linux-gnu.so", python="3.99.0")},
        "it was built for Python 3.99.0, this is 3.",
    ),
    "a library that is gone": (torch() | {RECORD: BUILT}, f"_runtime{SUFFIX} is gone"),
    **{
        f"a broken library, {version}": (torch(version) | READY, "loading it failed (ImportError: ")
        for version in ("2.13.0+cpu", "2.13.0", "2.13.0a0+git1234")
    },
    **{
        f"a torch that raises {raised}": (torch(code=f"raise {raised}") | READY, "torch cannot be imported (")
        for raised in ("OSError('libcudart.so.13: cannot open\\nshared object file')", "ImportError('x')")
    },
    **{
        f"the record {text[:40]}": (torch() | {RECORD: text}, "its build cannot be compared with the installed torch")
        for text in (
            *("", "not json", "3", "[]", '{"libraries": 3}', '{"libraries": {"_runtime": {}}}'),
            record_of(runtime(torch=None)),
        )
    },
    **{
        f"the version {version}": (
            {"torch/__init__.py": "", RECORD: BUILT, **version},
            "its build cannot be compared with the installed torch",
        )
        for version in ({}, {"torch/version.py": ""}, {"torch/version.py": "__version__ = 'unknown'\n"})
    },
}
"""As much of fastpipe and of torch as a folder has, and what is said of it; a newline is the end of the sentence."""


@pytest.mark.parametrize("state", STATES)
def test_what_is_said(state: str, tmp_path: Path) -> None:
    """Torch is imported only where the library is tried; -S keeps the real torch out of sight."""
    files, expected = STATES[state]
    files = {"fastpipe/__init__.py": "", "fastpipe/runtime/__init__.py": "", **files}
    for name, text in {**files, "fastpipe/runtime/native.py": NATIVE.read_text()}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    done = subprocess.run([sys.executable, "-S", "-c", ASK], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    sentence, imported = done.stdout.splitlines()  # one sentence: one line
    assert sentence.startswith("native extension not loaded: ")
    assert expected.replace("FOLDER", str(tmp_path)) in f"{sentence}\n"
    assert (imported == "imported") == state.startswith("a broken library")
