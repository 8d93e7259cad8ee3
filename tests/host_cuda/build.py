"""Builds the libraries, and says what a process needs to run over them."""

import fcntl
import logging
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from building.toolchain import find_toolkit, import_torch

SOURCES = Path(__file__).parent
FLAGS = ["-std=c++17", "-O1", "-g1", "-fPIC", "-shared", "-pthread", "-Wall", "-Wextra", "-Werror"]
WITH_TORCH = "operators.cpp"
"""The rest is loaded before torch is, under the name of the driver's library."""


def variables(folder: Path) -> dict[str, str]:
    """Of the environment of a process that is to run over the libraries in a folder."""
    return {"LD_PRELOAD": str(folder / "libcuda.so.1")}


def build(folder: Path) -> None:
    """Build the libraries in a folder, unless they are there.

    Raises:
        RuntimeError: This torch has no CUDA, there is no toolkit or no compiler, or a library cannot be built.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        runtime = [path for path in SOURCES.glob("*.cpp") if path.name != WITH_TORCH]
        _compile(folder / "libcuda.so.1", runtime, ["-Wl,-soname,libcuda.so.1"])
        libraries = Path(_torch().__file__).parent / "lib"
        names = ["-lc10", "-lc10_cuda", "-ltorch_cpu", "-ltorch_cuda"]
        _compile(folder / "operators.so", [SOURCES / WITH_TORCH], [f"-L{libraries}", *names])


def _compile(library: Path, sources: list[Path], flags: list[str]) -> None:
    if library.exists():
        return
    compiler = shutil.which("g++")
    if compiler is None:
        raise RuntimeError("CUDA on the host needs g++")
    system = [part for path in _includes() for part in ("-isystem", str(path))]
    part = library.with_suffix(f".{os.getpid()}")
    command = [compiler, *FLAGS, *system, *map(str, sources), *flags, "-o", str(part)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{library.name} of CUDA on the host cannot be built:\n{done.stderr}")
    part.replace(library)


def _torch() -> Any:
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # there is no device here: that is known
    return import_torch()


def _includes() -> Iterator[str]:
    """The toolkit's headers, torch's, and those of NCCL and cuBLAS, which come with torch."""
    torch = _torch()
    toolkit = find_toolkit(torch)
    if toolkit is None:
        raise RuntimeError("CUDA on the host needs a torch with CUDA, and a CUDA toolkit (nvcc, or CUDA_HOME)")
    yield str(Path(toolkit, "include"))
    yield from torch.utils.cpp_extension.include_paths()
    yield from map(str, Path(torch.__file__).parents[1].glob("nvidia/*/include"))
