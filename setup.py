"""Builds the native libraries; everything else about the package stands in pyproject.toml.

``fastpipe._runtime`` (csrc/core, csrc/torch and, with CUDA, csrc/cuda) is an extension module built against the torch
that is installed. ``fastpipe._plan`` (csrc/plan) is a plain C library, opened by ctypes, that needs no torch.

Both are optional: a library that cannot be built does not fail the install, unless FASTPIPE_BUILD_EXT=1. pip hides
what a build prints, so what was built, or why not, is written into the package (``_build_info.json``), where
``fastpipe.native_status()`` reads it.

Environment: FASTPIPE_BUILD_EXT=auto|1|0 (try, insist, leave it), FASTPIPE_CXXFLAGS, CXX, MAX_JOBS, CUDA_HOME.
"""

import contextlib
import importlib.util
import json
import os
import platform
import re
import shlex
import shutil
import site
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import setuptools

if int(setuptools.__version__.split(".")[0]) < 77:  # without build isolation, nobody has looked at pyproject.toml
    raise SystemExit(
        f"fastpipe is built by setuptools>=77, here is {setuptools.__version__}: pip install -U setuptools"
    )

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError
from setuptools.modified import newer_group

RECORD = "_build_info.json"
NUM_BUNDLES = 2
LOG_LINES = 40  # of a failed build, kept in the record

# Python's own flags bring -g, which makes a file a third slower to compile and twenty times as large. What is in
# FASTPIPE_CXXFLAGS comes last and wins: "-O0 -g" for a debugger, "-Werror" in CI.
COMMON_FLAGS = ["-O3", "-g0", "-Wall", "-Wextra", *shlex.split(os.environ.get("FASTPIPE_CXXFLAGS", ""))]
# No -std here: torch's own build step adds the one its headers need.
RUNTIME_FLAGS = [*COMMON_FLAGS, "-fvisibility=hidden"]
# Lets torch's headers name the operators they need instead of including all of them.
RUNTIME_MACROS = [("AT_PER_OPERATOR_HEADERS", None)]
# Sums of seconds come out as Python's do, to the last bit: nothing is fused.
PLAN_FLAGS = ["-ffp-contract=off", *COMMON_FLAGS, "-std=c++17"]


# ninja prints a kilobyte a file; a failing command it prints again.
NINJA_STEP = re.compile(r"^(\[\d+/\d+\]) .* -c \S*?(csrc/\S+) -o .*")


class CannotBuildError(Exception):
    """Something a build needs is not there; the message says what."""


def build_mode() -> str:
    """What FASTPIPE_BUILD_EXT asks for: "auto" (try), "1" (insist) or "0" (leave it)."""
    mode = os.environ.get("FASTPIPE_BUILD_EXT") or "auto"
    if mode not in ("auto", "1", "0"):
        raise SystemExit(f"FASTPIPE_BUILD_EXT is {mode!r}: set it to auto, 1 or 0")
    return mode


def files_in(folder: str, *patterns: str) -> list[str]:
    """The files of a folder of csrc/, relative to this file, as setuptools wants them."""
    return sorted(path.as_posix() for pattern in patterns for path in Path("csrc", folder).glob(pattern))


# --- finding what a build needs ---------------------------------------------------------------------------------------


def site_folders() -> Iterator[str]:
    """Where the packages of this very interpreter lie, which pip's build isolation hides."""
    yield sysconfig.get_path("platlib")
    if sys.prefix != sys.base_prefix:
        settings = Path(sys.prefix, "pyvenv.cfg").read_text().lower().replace(" ", "")
        if "include-system-site-packages=true" not in settings:
            return
        yield sysconfig.get_path("platlib", vars={"platbase": sys.base_exec_prefix, "base": sys.base_prefix})
    yield site.getusersitepackages()


def import_torch() -> ModuleType:
    """The torch that the package will run with, although an isolated build does not see it."""
    for folder in site_folders():
        if importlib.util.find_spec("torch") is not None:
            break
        if os.path.isdir(folder):
            site.addsitedir(folder)  # appends, so what the isolated build brings goes first
            importlib.invalidate_caches()
    if importlib.util.find_spec("torch") is None:
        raise CannotBuildError("torch is not installed")
    try:
        import torch
        import torch.utils.cpp_extension
    except Exception as error:  # a broken torch raises what it likes: OSError for a missing library, for one
        raise CannotBuildError(f"torch cannot be imported ({type(error).__name__}: {error})") from error
    return torch


def torch_backend(torch: ModuleType) -> str:
    """What torch was compiled for, in the words that fastpipe/runtime/native.py finds for the installed one."""
    for name in ("cuda", "hip", "xpu"):
        if version := getattr(torch.version, name, None):
            return f"{name.upper()} {version}"
    return "CPU"


def find_compiler() -> str:
    """The C++ compiler's command; also put into CXX, since torch and setuptools have different defaults."""
    asked = os.environ.get("CXX")
    for command in [asked] if asked else [sysconfig.get_config_var("CXX") or "c++", "c++", "g++", "clang++"]:
        if shutil.which(shlex.split(command)[0]):
            os.environ["CXX"] = command
            return command
    raise CannotBuildError(f"no C++ compiler was found ({asked or 'c++, g++, clang++'}); install g++ or set CXX")


def compiler_version(command: str) -> str:
    """The compiler's own first line about itself."""
    answer = subprocess.run([*shlex.split(command), "--version"], capture_output=True, text=True)
    lines = answer.stdout.splitlines()
    if answer.returncode != 0 or not lines:
        raise CannotBuildError(f"the C++ compiler does not work ({command} --version exits with {answer.returncode})")
    return lines[0]


def check_python_headers() -> None:
    """Name the missing package, since the compiler would only say that a file is missing."""
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        raise CannotBuildError(f"the C headers of Python {platform.python_version()} are missing; install python3-dev")


def put_ninja_on_path() -> None:
    """Let torch find the ninja that pip installed beside an interpreter whose environment is not activated."""
    with contextlib.suppress(ImportError, AttributeError):
        import ninja

        os.environ["PATH"] = os.pathsep.join([ninja.BIN_DIR, os.environ.get("PATH", "")])


# --- what is built ----------------------------------------------------------------------------------------------------


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
    """Files that include those of csrc/torch, in their place: a compiler takes ten seconds for torch's headers alone.

    So a name in an anonymous namespace must be the only one of its kind in csrc/torch.
    """
    heavy = [source for source in sources if source.startswith("csrc/torch/")]
    size = -(-len(heavy) // NUM_BUNDLES) or 1
    bundles = []
    for start in range(0, len(heavy), size):
        text = "".join(f'#include "{source.removeprefix("csrc/")}"\n' for source in heavy[start : start + size])
        bundle = Path(folder, f"torch-{len(bundles) + 1}.cpp")
        bundle.parent.mkdir(parents=True, exist_ok=True)
        if not bundle.exists() or bundle.read_text() != text:  # a newer file would be compiled again
            bundle.write_text(text)
        bundles.append(bundle.as_posix())
    return [source for source in sources if source not in heavy] + bundles


def find_toolkit(torch: ModuleType) -> str | None:
    """The CUDA toolkit that csrc/cuda is compiled with; None where this torch has no CUDA, or there is none."""
    tools = torch.utils.cpp_extension
    if not torch.version.cuda or not tools.CUDA_HOME:
        return None
    home = str(tools.CUDA_HOME)
    if not Path(home, "include", "cuda_runtime_api.h").exists():  # an nvcc that only calls another one
        asked = subprocess.run([f"{home}/bin/nvcc", "--dryrun", "none.cu"], capture_output=True, text=True).stderr
        found = re.search(r"^#\$ _HERE_=(.*)/bin$", asked, flags=re.MULTILINE)
        home = found.group(1) if found else home
    tools.CUDA_HOME = home
    return home if Path(home, "include", "cuda_runtime_api.h").exists() else None


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


# --- building ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def output_copied_to(lines: list[str]) -> Iterator[None]:
    """Keep a copy of all that this process and the compilers it starts print: they do not say it in an exception."""
    sys.stdout.flush()
    sys.stderr.flush()
    read_end, write_end = os.pipe()
    saved = {fd: os.dup(fd) for fd in (1, 2)}
    for fd in saved:
        os.dup2(write_end, fd)
    os.close(write_end)

    def copy() -> None:
        with os.fdopen(read_end, errors="replace") as stream:
            for line in stream:
                lines.append(line.rstrip())
                os.write(saved[1], NINJA_STEP.sub(r"\1 \2", line).encode())

    reader = threading.Thread(target=copy, daemon=True)
    reader.start()
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for fd, copy_of_fd in saved.items():
            os.dup2(copy_of_fd, fd)
        reader.join(timeout=5)  # a compiler cache's server may keep the pipe open for good


@contextlib.contextmanager
def only_one_build_in(folder: str) -> Iterator[None]:
    """Two builds in one source tree would write the same object files."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, ".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def put_in_place(source: str, target: str) -> None:
    """Copy a file at one go: a process that opens or runs the target finds the old one or the new one, never a part."""
    part = f"{target}.{os.getpid()}.part"
    shutil.copy(source, part)
    os.replace(part, target)


def headline(log: list[str], error: Exception) -> str:
    """The one line that says most about a failed build."""
    return next((line for line in log if "error:" in line or "ERROR" in line), f"{type(error).__name__}: {error}")


class BuildNative(build_ext):
    """Builds each library by the command that knows how, and writes down how it went."""

    def run(self) -> None:
        """Build what can be built; raise only if FASTPIPE_BUILD_EXT=1 and something could not."""
        mode = build_mode()
        if mode == "0" and self.inplace and Path(self._package_folder(in_source=True), RECORD).exists():
            self.extensions = []  # what was built in this source tree stays, with its record
            return
        with only_one_build_in(self.get_finalized_command("build").build_base):
            record = self._build_all(mode)
            if self.inplace:
                self._copy_to_source()
        failed = {name: library["reason"] for name, library in record["libraries"].items() if not library["built"]}
        for name, reason in failed.items():
            self.warn(f"fastpipe.{name} was not built: {reason}")
        if failed and mode == "1":
            raise CompileError("; ".join(f"fastpipe.{name} was not built: {why}" for name, why in failed.items()))

    def _build_all(self, mode: str) -> dict[str, Any]:
        previous = self._read_record()
        record: dict[str, Any] = {
            "fastpipe": self.distribution.get_version(),
            "python": platform.python_version(),
            "suffix": sysconfig.get_config_var("EXT_SUFFIX"),
            "mode": mode,
            "libraries": {},
        }
        for declared in list(self.extensions):
            name = declared.name.rpartition(".")[2]
            before = previous.get("libraries", {}).get(name, {})
            library = self._build_one(declared, mode, before.get("inputs"))
            record["libraries"][name] = library
            if not library["built"]:
                self._forget(declared)
        self._write_record(record)
        return record

    def _build_one(self, declared: Extension, mode: str, previous: Any) -> dict[str, Any]:
        """Build one library; whatever goes wrong becomes its entry in the record."""
        library: dict[str, Any] = {"built": False, "reason": "FASTPIPE_BUILD_EXT=0 switched the build off"}
        if mode == "0":
            return library
        log: list[str] = []
        try:
            extension, builder, library["inputs"] = self._recipe(declared)
            with output_copied_to(log):
                self._delegate(builder, extension, library["inputs"], previous)
        except CannotBuildError as error:
            return library | {"reason": str(error)}
        except Exception as error:  # whatever a compiler, ninja or torch's build step raises
            return library | {"reason": headline(log, error), "log": log[-LOG_LINES:]}
        return library | {"built": True, "reason": ""}

    def _recipe(self, declared: Extension) -> tuple[Extension, type[build_ext], dict[str, Any]]:
        """The extension, the command that builds it, and what makes an earlier result stale (beside files' times)."""
        torch = None if declared.name.endswith("._plan") else import_torch()
        compiler = compiler_version(find_compiler())
        if torch is None:
            extension, builder = plan_extension(declared), PlanBuilder
        else:
            check_python_headers()
            put_ninja_on_path()
            extension = runtime_extension(declared, torch, os.path.join(self.build_temp, "csrc"))
            builder = torch.utils.cpp_extension.BuildExtension
        inputs = {
            "compiler": compiler,
            "torch": torch and torch.__version__,
            "backend": torch and torch_backend(torch),
            "sources": declared.sources,
            "flags": extension.extra_compile_args,
            "cuda": torch is not None and ("FASTPIPE_WITH_CUDA", None) in extension.define_macros,
        }
        return extension, builder, inputs

    def _delegate(self, builder: type[build_ext], extension: Extension, inputs: dict[str, Any], previous: Any) -> None:
        """Run another build_ext for one extension, with this one's options."""
        command = builder(self.distribution)
        for option in ("build_lib", "compiler", "debug", "parallel"):
            setattr(command, option, getattr(self, option))
        # Objects compiled against one torch must never be linked for another, and ninja looks at files' times alone.
        command.build_temp = os.path.join(self.build_temp, f"torch-{inputs['torch']}" if inputs["torch"] else "plan")
        declared, self.distribution.ext_modules = self.distribution.ext_modules, [extension]
        try:
            command.ensure_finalized()
            command.force = bool(self.force or previous != inputs)
            command.run()
        finally:
            self.distribution.ext_modules = declared

    # The record, and the libraries that are not there: neither may be older than the other.

    def _package_folder(self, in_source: bool) -> str:
        build_py = self.get_finalized_command("build_py")
        return build_py.get_package_dir("fastpipe") if in_source else os.path.join(self.build_lib, "fastpipe")

    def _read_record(self) -> dict[str, Any]:
        with contextlib.suppress(OSError, ValueError):
            return json.loads(Path(self._package_folder(in_source=False), RECORD).read_text())
        return {}

    def _write_record(self, record: dict[str, Any]) -> None:
        path = Path(self._package_folder(in_source=False), RECORD)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(record, indent=2) + "\n")

    def _forget(self, declared: Extension) -> None:
        """Drop a library that was not built: an older one must not be packed, nor loaded."""
        self.extensions = [extension for extension in self.extensions if extension.name != declared.name]
        in_source, packed = self._get_inplace_equivalent(self.get_finalized_command("build_py"), declared)
        Path(packed).unlink(missing_ok=True)
        if self.inplace:
            Path(in_source).unlink(missing_ok=True)

    def _copy_to_source(self) -> None:
        for extension in self.extensions:
            in_source, packed = self._get_inplace_equivalent(self.get_finalized_command("build_py"), extension)
            put_in_place(packed, in_source)
        put_in_place(*(os.path.join(self._package_folder(in_source), RECORD) for in_source in (False, True)))

    def get_outputs(self) -> list[str]:
        """The built libraries and the record."""
        if self.inplace:
            return sorted(self.get_output_mapping())
        return sorted([*super().get_outputs(), os.path.join(self.build_lib, "fastpipe", RECORD)])

    def get_output_mapping(self) -> dict[str, str]:
        """For an editable install: where in the source tree each output lies."""
        mapping = super().get_output_mapping()
        packed = os.path.join(self._package_folder(in_source=False), RECORD)
        if self.inplace and os.path.exists(packed):
            mapping[packed] = os.path.join(self._package_folder(in_source=True), RECORD)
        return mapping


setup(
    ext_modules=[extension for extension in declared_extensions() if extension.sources],
    cmdclass={"build_ext": BuildNative},
)
