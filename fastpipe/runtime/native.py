"""Loads the compiled extension, or says in one sentence why it is not loaded.

A library compiled against another torch fails with anything from an undefined symbol to a wrong number. So the record
that the build left in the package is compared with the installed torch *before* the library is loaded. A missing or
broken library raises nothing here, and torch is imported only to load a matching library: ``native_status()`` works
without torch.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import importlib.util
import json
import re
import sys
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import Any

_PACKAGE = Path(__file__).resolve().parents[1]
_RECORD = "_build_info.json"  # written by setup.py
_LIBRARY = "_runtime"
_FLOOR = "2.11"


def load() -> ModuleType | None:
    """Return the native extension, or None if none matches; ``native_status()`` then gives the reason."""
    return _outcome()[0]


def native_status() -> str:
    """Say in one sentence which native extension is loaded, or why none is and the remedy."""
    return _outcome()[1]


@functools.cache
def _outcome() -> tuple[ModuleType | None, str]:
    """The extension, if it is loaded, and the sentence about it."""
    try:
        record = _read_record()
        if obstacle := _obstacle(record, _installed_torch(), _PACKAGE):
            return _not_loaded(obstacle)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        return _not_loaded(f"its build cannot be compared with the installed torch ({_one_line(error)}); {_rebuild()}")
    return _import(record)


def _import(record: dict[str, Any]) -> tuple[ModuleType | None, str]:
    try:
        importlib.import_module("torch")  # loads the libraries that define our symbols
    except Exception as error:  # reported by `native_status`
        return _not_loaded(f"torch cannot be imported ({_one_line(error)})")
    try:
        module = importlib.import_module(f"fastpipe.{_LIBRARY}")
    except Exception as error:  # a missing symbol, or any error of its initialisation
        return _not_loaded(f"loading it failed ({_one_line(error)}); {_rebuild()}")
    built_for = _torch_of(record)
    compiler = record["libraries"][_LIBRARY]["inputs"]["compiler"]
    return module, f"native extension loaded: fastpipe.{_LIBRARY}, built for {built_for} by {compiler}"


def _obstacle(record: dict[str, Any], installed: str | None, package: Path) -> str | None:
    """Why the library must not be loaded, or None."""
    library = record.get("libraries", {}).get(_LIBRARY)
    if installed is None:
        built = bool(library and library["built"])
        wanted = f"torch=={_release(library['inputs']['torch'])}" if built else f"'torch>={_FLOOR}'"
        then = "" if built else f", then {_rebuild()}"
        return f"torch is not installed (planning does without); pip install {wanted}{then}"
    if library is None:
        return f"it was never built here; {_rebuild()}"
    if not library["built"]:
        return f"it was not built: {library['reason']}{_where_the_log_is(library, package)}; {_rebuild()}"
    if record["suffix"] != sysconfig.get_config_var("EXT_SUFFIX"):
        return f"it was built for Python {record['python']}, this is {sys.version.split()[0]}; {_rebuild()}"
    if (built_for := _torch_of(record)) != installed:
        return f"it was built for {built_for}, but {installed} is installed; {_rebuild()}"
    if not (file := package / f"{_LIBRARY}{record['suffix']}").exists():
        return f"{file} is gone; {_rebuild()}"
    return None


def _read_record() -> dict[str, Any]:
    path = _PACKAGE / _RECORD
    if not path.exists():
        return {}
    record: dict[str, Any] = json.loads(path.read_text())
    return record


def _torch_of(record: dict[str, Any]) -> str:
    """The torch that the library was built for, as `_torch_text` says it."""
    inputs = record["libraries"][_LIBRARY]["inputs"]
    return _torch_text(inputs["torch"], inputs["backend"])


def _torch_text(version: str, backend: str) -> str:
    """A build of torch: what a library must match of it, such as "torch 2.13.0 (CUDA 13.0)"."""
    return f"torch {_release(version)} ({backend})"


def _installed_torch() -> str | None:
    """The torch of torch's version.py, read as text: importing torch takes seconds and may fail."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    text = Path(spec.origin).with_name("version.py").read_text()
    values = dict(re.findall(r"^(\w+)[^=\n]*= *'([^'\n]*)'", text, flags=re.MULTILINE))
    backends = (f"{name.upper()} {values[name]}" for name in ("cuda", "hip", "xpu") if name in values)
    return _torch_text(values["__version__"], next(backends, "CPU"))


def _release(version: str) -> str:
    """Major, minor and patch: "2.13.0" of "2.13.0+cpu" and of "2.13.0a0+git1234"."""
    match = re.match(r"\d+(\.\d+)*", version)
    if match is None:
        raise ValueError(f"torch calls its version {version!r}")
    return match.group()


def _not_loaded(why: str) -> tuple[ModuleType | None, str]:
    return None, f"native extension not loaded: {why}"


def _where_the_log_is(library: dict[str, Any], package: Path) -> str:
    return f" (the end of the build's output is in {package / _RECORD})" if library.get("log") else ""


def _rebuild() -> str:
    source = _PACKAGE.parent
    if (source / "setup.py").exists():
        return f"run `make build` in {source}"
    # Without --no-cache-dir pip may reuse a wheel built for another torch.
    return f"run `pip install --force-reinstall --no-deps --no-cache-dir {_installed_from()}`"


def _installed_from() -> str:
    """The folder or archive that pip installed from, if any."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError, ValueError, KeyError):
        origin = json.loads(importlib.metadata.distribution("fastpipe").read_text("direct_url.json") or "{}")
        return str(origin["url"]).removeprefix("file://")
    return "fastpipe"


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
