"""Builds the native libraries; everything else about the package stands in pyproject.toml.

``fastpipe._runtime`` (csrc/core, csrc/torch and, with CUDA, csrc/cuda) is an extension module built against the torch
that is installed. ``fastpipe._plan`` (csrc/plan) is a plain C library, opened by ctypes, that needs no torch.

Both are optional: a library that cannot be built does not fail the install, unless FASTPIPE_BUILD_EXT=1. pip hides
what a build prints, so what was built, or why not, is written into the package (``_build_info.json``), where
``fastpipe.native_status()`` reads it.

Environment: FASTPIPE_BUILD_EXT=auto|1|0 (try, insist, leave it), FASTPIPE_CXXFLAGS, CXX, MAX_JOBS, CUDA_HOME.
"""

import contextlib
import json
import os
import platform
import sys
import sysconfig
from pathlib import Path
from typing import Any

import setuptools

if int(setuptools.__version__.split(".")[0]) < 77:  # without build isolation, nobody has looked at pyproject.toml
    raise SystemExit(
        f"fastpipe is built by setuptools>=77, here is {setuptools.__version__}: pip install -U setuptools"
    )

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

sys.path.insert(0, str(Path(__file__).resolve().parent))  # setuptools runs this file without its folder in the path

from building import recipes, toolchain
from building.output import headline, only_one_build_in, output_copied_to, put_in_place

del sys.path[0]

RECORD = "_build_info.json"
LOG_LINES = 40  # of a failed build, kept in the record


def build_mode() -> str:
    """What FASTPIPE_BUILD_EXT asks for: "auto" (try), "1" (insist) or "0" (leave it)."""
    mode = os.environ.get("FASTPIPE_BUILD_EXT") or "auto"
    if mode not in ("auto", "1", "0"):
        raise SystemExit(f"FASTPIPE_BUILD_EXT is {mode!r}: set it to auto, 1 or 0")
    return mode


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
        except toolchain.CannotBuildError as error:
            return library | {"reason": str(error)}
        except Exception as error:  # whatever a compiler, ninja or torch's build step raises
            return library | {"reason": headline(log, error), "log": log[-LOG_LINES:]}
        return library | {"built": True, "reason": ""}

    def _recipe(self, declared: Extension) -> tuple[Extension, type[build_ext], dict[str, Any]]:
        """The extension, the command that builds it, and what makes an earlier result stale (beside files' times)."""
        torch = None if declared.name.endswith("._plan") else toolchain.import_torch()
        compiler = toolchain.compiler_version(toolchain.find_compiler())
        if torch is None:
            extension, builder = recipes.plan_extension(declared), recipes.PlanBuilder
        else:
            toolchain.check_python_headers()
            toolchain.put_ninja_on_path()
            extension = recipes.runtime_extension(declared, torch, os.path.join(self.build_temp, "csrc"))
            builder = torch.utils.cpp_extension.BuildExtension
        inputs = {
            "compiler": compiler,
            "torch": torch and torch.__version__,
            "backend": torch and toolchain.torch_backend(torch),
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
    ext_modules=[extension for extension in recipes.declared_extensions() if extension.sources],
    cmdclass={"build_ext": BuildNative},
)
