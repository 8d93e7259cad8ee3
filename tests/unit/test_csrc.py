"""Which folder of csrc/ may include what, and where torch's private parts stand."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2] / "csrc"
FILES = [path for path in sorted(ROOT.rglob("*")) if path.suffix in {".h", ".cpp", ".cu", ".cuh"}]
BELOW = {"plan": {"plan"}, "core": {"core"}, "cuda": {"cuda", "core"}, "torch": {"torch", "core", "cuda"}}
OF_TORCH = ("torch/", "ATen/", "c10/", "pybind11/", "Python.h")
# What torch/extension.h, which is documented, includes of them.
PUBLIC = {"torch/csrc/utils/pybind.h"}
PRIVATE_HEADERS = (
    "torch/csrc/",
    "c10/core/impl/",
    "c10/core/AutogradState.h",
    "ATen/SavedTensorHooks.h",
    "ATen/SequenceNumber.h",
)
PRIVATE_NAMES = r"\b(torch::autograd|c10d|c10::impl|at::native|at::impl)::|\bTHP\w+|\bpython_error\b|DebugInfoKind"


def includes(path: Path) -> list[str]:
    return re.findall(r'^#include [<"](.*)[>"]', path.read_text(), flags=re.MULTILINE)


def without_comments(path: Path) -> str:
    return re.sub(r"//.*", "", path.read_text())


def test_a_folder_includes_only_those_below() -> None:
    for path, name in ((file, name) for file in FILES for name in includes(file)):
        folder, (first, *rest) = path.parent.name, name.split("/")
        is_below = not rest or first not in BELOW or first in BELOW[folder] or name.startswith("torch/csrc")
        assert is_below and (folder not in ("plan", "core") or not name.startswith(OF_TORCH)), (path, name)


def test_private_parts_of_torch_stand_behind_one_header() -> None:
    for path in (file for file in FILES if file.stem != "torch_private"):
        private = [name for name in includes(path) if name.startswith(PRIVATE_HEADERS) and name not in PUBLIC]
        assert not private and not re.search(PRIVATE_NAMES, without_comments(path)), path


def test_that_header_is_where_they_are() -> None:
    """So the patterns above match what they are meant to."""
    door = ROOT / "torch/torch_private.h"
    assert re.search(PRIVATE_NAMES, without_comments(door))
    assert [name for name in includes(door) if name.startswith(PRIVATE_HEADERS)]
