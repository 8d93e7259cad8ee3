"""How the package builds where there is no torch, a broken compiler, broken code; and what it packs."""

import ctypes
import os
import shutil
import tarfile
import threading
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.native_tree import REPOSITORY, NativeTree

setuptools = pytest.importorskip("setuptools", minversion="77", reason="builds need setuptools>=77")
NO_TORCH = {"built": False, "reason": "torch is not installed"}


@pytest.fixture
def tree(tmp_path: Path) -> NativeTree:
    """Torch is hidden from it, so that a build goes alike where there is none."""
    return NativeTree(tmp_path)


def touch(*paths: Path) -> None:
    """Make files newer than everything built so far, whatever the resolution of the file system's clock."""
    for path in paths:
        os.utime(path, ns=(time.time_ns() + 10**9,) * 2)


@pytest.mark.without_torch
def test_without_torch_the_planning_library_is_built_and_the_other_says_why_not(tree: NativeTree) -> None:
    output = tree.build()
    assert "fastpipe._runtime was not built: torch is not installed" in output
    assert tree.record["_plan"]["built"]
    assert tree.record["_runtime"] == NO_TORCH
    assert ctypes.CDLL(str(tree.library("_plan"))).fastpipe_answer() == 42
    assert not tree.library("_runtime").exists()
    assert "torch is not installed (planning does without)" in tree.status()


def test_insisting_makes_what_is_missing_an_error(tree: NativeTree) -> None:
    output = tree.build(fails=True, FASTPIPE_BUILD_EXT="1")
    assert "fastpipe._runtime was not built: torch is not installed" in output
    assert tree.record["_plan"]["built"], "what could be built is there all the same"


def test_switched_off(tree: NativeTree) -> None:
    tree.build(FASTPIPE_BUILD_EXT="0")
    assert [library["built"] for library in tree.record.values()] == [False, False]
    assert "FASTPIPE_BUILD_EXT=0" in tree.record["_runtime"]["reason"]
    assert not list(tree.root.glob("fastpipe/*.so"))


def test_switched_off_in_a_source_tree_leaves_what_was_built(tree: NativeTree) -> None:
    tree.build()
    before = tree.record
    tree.build(FASTPIPE_BUILD_EXT="0")
    assert tree.record == before
    assert tree.library("_plan").exists()


def test_an_unknown_mode_is_refused(tree: NativeTree) -> None:
    assert "FASTPIPE_BUILD_EXT is 'yes': set it to auto, 1 or 0" in tree.build(fails=True, FASTPIPE_BUILD_EXT="yes")


def test_a_broken_compiler(tree: NativeTree) -> None:
    tree.build(CXX=shutil.which("false") or "false")
    assert "the C++ compiler does not work" in tree.record["_plan"]["reason"]
    assert "exits with 1" in tree.record["_plan"]["reason"]


def test_no_compiler(tree: NativeTree) -> None:
    tree.build(CXX="no-such-compiler")
    reason = tree.record["_plan"]["reason"]
    assert reason == "no C++ compiler was found (no-such-compiler); install g++ or set CXX"


def test_code_that_does_not_compile_removes_the_older_library(tree: NativeTree) -> None:
    tree.build()
    good = tree.record
    touch(tree.write("csrc/plan/plan.cpp", "int broken() { return nothing; }\n"))
    tree.build()
    library = tree.record["_plan"]
    assert "csrc/plan/plan.cpp:1:" in library["reason"] and "error: " in library["reason"]
    assert any("nothing" in line for line in library["log"])
    assert not tree.library("_plan").exists()

    touch(
        tree.write(
            "csrc/plan/plan.cpp", '#include "plan/plan.h"\nextern "C" int fastpipe_answer() { return ANSWER; }\n'
        )
    )
    tree.build()
    assert tree.record == good
    assert tree.library("_plan").exists()


def test_only_what_changed_is_compiled(tree: NativeTree) -> None:
    tree.build()
    first = tree.object_times()
    assert set(first) == {"plan", "other"}

    tree.build()
    assert tree.object_times() == first

    touch(tree.root / "csrc/plan/plan.cpp")
    tree.build()
    second = tree.object_times()
    assert second["plan"] != first["plan"] and second["other"] == first["other"]

    touch(tree.write("csrc/plan/plan.h", "#pragma once\nenum { ANSWER = 43 };\n"))
    tree.build()
    assert ctypes.CDLL(str(tree.library("_plan"))).fastpipe_answer() == 43
    assert tree.object_times()["other"] != second["other"]


def test_who_looks_while_it_is_built_sees_a_whole_library(tree: NativeTree) -> None:
    """A process that opens a library which is being written dies; one that runs it must keep what it has."""
    tree.build()
    library = tree.library("_plan")
    first = library.read_bytes()
    touch(tree.write("csrc/plan/plan.h", "#pragma once\nenum { ANSWER = 43 };\n"))
    seen, done = {first}, threading.Event()

    def look() -> None:
        ends = False
        while not ends:
            ends = done.is_set()  # looks once more after that
            seen.add(library.read_bytes() if library.exists() else b"")

    with library.open("rb") as held, ThreadPoolExecutor() as pool:
        looking = pool.submit(look)
        tree.build()
        done.set()
        looking.result()
        assert held.read() == first
    assert seen == {first, library.read_bytes()} and len(seen) == 2
    assert ctypes.CDLL(str(library)).fastpipe_answer() == 43
    assert not list(tree.root.glob("fastpipe/*.part"))


def test_a_removed_file_and_other_flags_are_noticed(tree: NativeTree) -> None:
    tree.build()
    first = tree.object_times()
    (tree.root / "csrc/plan/other.cpp").unlink()
    tree.build()
    assert not hasattr(ctypes.CDLL(str(tree.library("_plan"))), "fastpipe_other")

    tree.build(FASTPIPE_CXXFLAGS="-O0")
    assert tree.object_times()["plan"] != first["plan"]


def test_warnings_can_be_made_errors(tree: NativeTree) -> None:
    touch(tree.write("csrc/plan/other.cpp", "static int unused;\n"))
    tree.build()
    assert tree.record["_plan"]["built"]
    tree.build(FASTPIPE_CXXFLAGS="-Werror")
    assert "unused" in tree.record["_plan"]["reason"]


def wheel_names(tree: NativeTree) -> set[str]:
    (wheel,) = (tree.root / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if name.startswith("fastpipe/")}
    wheel.unlink()
    return names


def test_a_wheel_never_holds_a_library_of_an_earlier_build(tree: NativeTree) -> None:
    plan = f"fastpipe/{tree.library('_plan').name}"
    tree.setup("bdist_wheel")
    assert {plan, "fastpipe/_build_info.json", "fastpipe/py.typed"} <= wheel_names(tree)

    tree.setup("bdist_wheel", FASTPIPE_BUILD_EXT="0")
    names = wheel_names(tree)
    assert plan not in names
    assert "fastpipe/_build_info.json" in names


def test_the_source_archive_builds(tree: NativeTree, tmp_path: Path) -> None:
    tree.build()  # nothing built in the tree may travel
    tree.setup("sdist")
    (archive,) = (tree.root / "dist").glob("*.tar.gz")
    with tarfile.open(archive) as content:
        content.extractall(tmp_path, filter="data")
    tree.root = tmp_path / archive.name.removesuffix(".tar.gz")
    assert (tree.root / "csrc/plan/plan.h").exists() and (tree.root / "csrc/core/core.h").exists()
    assert not list(tree.root.rglob("*.so")) and not list(tree.root.rglob("_build_info.json"))
    tree.build()
    assert tree.record["_plan"]["built"]


def test_the_wheel_holds_every_file_of_the_package(tmp_path: Path) -> None:
    tree = NativeTree(tmp_path)
    left_out = shutil.ignore_patterns("__pycache__", "*.so", "_build_info.json")
    shutil.copytree(REPOSITORY / "fastpipe", tmp_path / "fastpipe", dirs_exist_ok=True, ignore=left_out)
    package = {path.relative_to(tmp_path).as_posix() for path in tmp_path.glob("fastpipe/**/*") if path.is_file()}
    tree.setup("bdist_wheel", FASTPIPE_BUILD_EXT="0")
    assert wheel_names(tree) - {"fastpipe/_build_info.json"} == package
