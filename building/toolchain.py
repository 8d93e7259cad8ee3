"""What a build needs, and where it is on this machine: torch, a compiler, headers, a CUDA toolkit."""

import contextlib
import importlib.util
import os
import platform
import re
import shlex
import shutil
import site
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType


class CannotBuildError(Exception):
    """Something a build needs is not there; the message says what."""


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
