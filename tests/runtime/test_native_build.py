"""The extension built against the torch that is installed: found, rebuilt when it must be, loaded when it fits."""

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fastpipe.runtime import native
from tests.native_tree import NativeTree

torch = pytest.importorskip("torch")
pytest.importorskip("setuptools", minversion="77", reason="builds need setuptools>=77")


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> NativeTree:
    """One tree, built; who changes it builds it again."""
    tree = NativeTree(tmp_path_factory.mktemp("tree"), torch=True)
    tree.build(FASTPIPE_BUILD_EXT="1")
    return tree


def touch(path: Path) -> None:
    time.sleep(0.02)  # the clock of files has ticks of some milliseconds
    os.utime(path)


def test_built_recorded_and_loaded(tree: NativeTree) -> None:
    inputs = tree.record["_runtime"]["inputs"]
    assert inputs["torch"] == torch.__version__
    assert not any(flag.startswith("-std") for flag in inputs["flags"])
    release = torch.__version__.partition("+")[0]
    code = "from fastpipe.runtime.native import *; print(load().__doc__, load() is load(), native_status())"
    found = tree.python("-c", code).stdout
    loaded = f"native extension loaded: fastpipe._runtime, built for torch {release} ("
    assert found.startswith(f"stand-in True {loaded}")


def test_only_what_depends_on_a_change_is_compiled(tree: NativeTree) -> None:
    """The files of csrc/torch and csrc/core are compiled in bundles; bindings.cpp is in torch's second, and includes
    core.h."""
    first = tree.object_times()
    assert set(first) == {"plan", "other", "core-1", "torch-1", "torch-2"}

    touch(tree.root / "csrc/core/core.h")
    tree.build()
    second = tree.object_times()
    assert {name for name in first if second[name] != first[name]} == {"core-1", "torch-2"}

    touch(tree.root / "csrc/torch/alone.cpp")
    tree.build()
    third = tree.object_times()
    assert {name for name in first if third[name] != second[name]} == {"torch-1"}


def test_another_torch_means_a_new_build(tree: NativeTree) -> None:
    before = tree.library("_runtime").stat().st_mtime_ns
    for record in tree.root.glob("**/_build_info.json"):
        content = json.loads(record.read_text())
        content["libraries"]["_runtime"]["inputs"]["torch"] = "2.0.0"
        record.write_text(json.dumps(content))
    assert "it was built for torch 2.0.0 (" in tree.status()

    tree.build()
    assert tree.library("_runtime").stat().st_mtime_ns != before
    assert tree.record["_runtime"]["inputs"]["torch"] == torch.__version__


@pytest.fixture
def core(tree: NativeTree) -> Iterator[Path]:
    """A source to be broken; it is whole again, and built, behind the test."""
    source = tree.root / "csrc/core/core.cpp"
    good = source.read_text()
    yield source
    source.write_text(good)
    tree.build()


@pytest.mark.nightly
def test_a_missing_symbol_is_reported_when_it_is_loaded(tree: NativeTree, core: Path) -> None:
    core.write_text("")  # a shared library may link although core() is nowhere
    touch(core)
    tree.build()
    status = tree.status()
    assert "loading it failed (ImportError: " in status and "undefined symbol" in status


@pytest.mark.nightly
def test_an_isolated_build_finds_the_installed_torch(tmp_path: Path) -> None:
    """`pip install .` as users type it: pip hides torch from the build, which must neither miss nor download it.

    .ci/run installs fastpipe itself in this way, and uses it.
    """
    tree = NativeTree(tmp_path, torch=True)
    result = tree.python("-m", "pip", "wheel", "--no-deps", "--wheel-dir", "dist", ".", FASTPIPE_BUILD_EXT="1")
    if "No matching distribution found for setuptools" in result.stdout and not os.environ.get("CI"):
        pytest.skip("no package index can be reached, and an isolated build begins with setuptools")
    assert result.returncode == 0, result.stdout
    assert len(list(tmp_path.glob("dist/fastpipe-*.whl"))) == 1


def test_this_installation() -> None:
    """The status of the package under test is one of the two sentences, and load() agrees with it."""
    status = native.native_status()
    assert status.startswith("native extension ")
    assert (native.load() is not None) == status.startswith("native extension loaded: ")
    if os.environ.get("FASTPIPE_BUILD_EXT") == "1":
        assert native.load() is not None, status
