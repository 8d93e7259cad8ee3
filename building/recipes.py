"""What is built, of which files and with which flags."""

import os
import shlex
from pathlib import Path
from types import ModuleType
from typing import Any

from setuptools import Extension
from setuptools.command.build_ext import build_ext
from setuptools.modified import newer_group

from building.toolchain import find_toolkit

BUNDLES = {"torch": 2, "core": 1}  # by folder of csrc/, what takes longest first

# Python's own flags bring -g, which makes a file a third slower to compile and twenty times as large. What is in
# FASTPIPE_CXXFLAGS comes last and wins: "-O0 -g" for a debugger, "-Werror" in CI.
COMMON_FLAGS = ["-O3", "-g0", "-Wall", "-Wextra", *shlex.split(os.environ.get("FASTPIPE_CXXFLAGS", ""))]
# No -std here: torch's own build step adds the one its headers need.
RUNTIME_FLAGS = [*COMMON_FLAGS, "-fvisibility=hidden"]
# Lets torch's headers name the operators they need instead of including all of them.
RUNTIME_MACROS = [("AT_PER_OPERATOR_HEADERS", None)]
# Sums of seconds come out as Python's do, to the last bit: nothing is fused.
PLAN_FLAGS = ["-ffp-contract=off", *COMMON_FLAGS, "-std=c++17"]


def files_in(folder: str, *patterns: str) -> list[str]:
    """The files of a folder of csrc/, relative to setup.py, as setuptools wants them."""
    return sorted(path.as_posix() for pattern in patterns for path in Path("csrc", folder).glob(pattern))


def declared_extensions() -> list[Extension]:
    """Names and files, for the metadata and the source archive: torch is imported only when something is built."""
    headers = files_in("plan", "*.h")
    plan = Extension("fastpipe._plan", files_in("plan", "*.cpp"), depends=headers, language="c++")
    sources = files_in("core", "*.cpp") + files_in("torch", "*.cpp")
    headers = [*headers, *files_in("core", "*.h"), *files_in("torch", "*.h"), *files_in("cuda", "*.h", "*.cuh")]
    return [plan, Extension("fastpipe._runtime", sources, depends=headers, language="c++")]


def plan_extension(declared: Extension) -> Extension:
    """csrc/plan: no torch, no pybind11, no Python header."""
    return Extension(
        declared.name,
        declared.sources,
        depends=declared.depends,
        include_dirs=["csrc"],
        extra_compile_args=PLAN_FLAGS,
        language="c++",
    )


def bundled(sources: list[str], folder: str) -> list[str]:
    """Files that include others, in their place: a compiler takes ten seconds for torch's headers alone, and of a small
    file most is the standard library's.

    So a name in an anonymous namespace must be the only one of its kind in its folder of csrc/.
    """
    bundles = []
    for name, number in BUNDLES.items():
        files = [source for source in sources if source.startswith(f"csrc/{name}/")]
        size = -(-len(files) // number) or 1
        for start in range(0, len(files), size):
            text = "".join(f'#include "{source.removeprefix("csrc/")}"\n' for source in files[start : start + size])
            bundle = Path(folder, f"{name}-{start // size + 1}.cpp")
            bundle.parent.mkdir(parents=True, exist_ok=True)
            if not bundle.exists() or bundle.read_text() != text:  # a newer file would be compiled again
                bundle.write_text(text)
            bundles.append(bundle.as_posix())
    return bundles


def runtime_extension(declared: Extension, torch: ModuleType, folder: str) -> Extension:
    """csrc/core and csrc/torch, with csrc/cuda if this torch has CUDA and there is a toolkit (a GPU is not needed).

    What is generated goes into `folder`.
    """
    tools = torch.utils.cpp_extension
    cuda_sources = files_in("cuda", "*.cpp", "*.cu")
    with_cuda = bool(cuda_sources and find_toolkit(torch))
    # Named as system folders, torch's headers keep their warnings to themselves.
    paths = tools.include_paths(*(["cuda"] if with_cuda else []))
    system = [part for path in paths for part in ("-isystem", path)]
    flags: Any = [*RUNTIME_FLAGS, *system]
    if with_cuda:
        flags = {"cxx": flags, "nvcc": ["-O3", *system]}
    make = tools.CUDAExtension if with_cuda else tools.CppExtension
    return make(
        declared.name,
        bundled(declared.sources, folder) + (cuda_sources if with_cuda else []),
        depends=[*declared.depends, *declared.sources],  # a bundle does not change when what it includes does
        include_dirs=[os.path.abspath("csrc")],
        define_macros=[*RUNTIME_MACROS, *([("FASTPIPE_WITH_CUDA", None)] if with_cuda else [])],
        extra_compile_args=flags,
    )


class PlanBuilder(build_ext):
    """setuptools' own build, which compiles every file again, taught to leave those that have not changed."""

    def build_extension(self, ext: Extension) -> None:
        """Build one library as setuptools does, but for the objects newer than their source and all headers."""
        compile_one = self.compiler._compile

        def compile_if_stale(obj: str, src: str, *rest: Any) -> None:
            if self.force or newer_group([src, *ext.depends], obj):
                compile_one(obj, src, *rest)

        self.compiler._compile = compile_if_stale
        super().build_extension(ext)
