"""What of this process a test must leave as it found it, and what a test has left behind.

Nothing here imports torch: its state is looked at once something else has imported it.
"""

import contextlib
import functools
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from operator import is_not
from pathlib import Path
from types import FunctionType
from typing import Any

# pytest says which test runs, and in which phase; torch's compiler, once it was used, where its cache is.
_NOT_OF_TESTS = {"PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR"}

# How long what ends by itself may take; a test that leaves nothing open never waits.
_SECONDS = 60.0

_INSTALLED = tuple({f"{os.path.realpath(prefix)}/" for prefix in (sys.prefix, sys.base_prefix)})

Things = dict[Any, str]
"""What there is of one kind: a key that no later thing of the kind takes over, and words for it."""

_shared: dict[str, Things] = {"descriptor": {}, "thread": {}, "child process": {}}


@dataclass(frozen=True)
class State:
    """The process between two tests."""

    environment: dict[str, str]
    settings: dict[str, Any]
    code: list[tuple[Any, dict[str, Any]]]
    things: dict[str, Things]

    @classmethod
    def now(cls) -> "State":
        things = _things()
        for kind, shared_ones in _shared.items():
            # what has ended is shared no more: a later descriptor may have its number, and lead to the same file
            for key in shared_ones.keys() - things[kind].keys():
                del shared_ones[key]
        return cls(
            dict(os.environ), _settings(), [(owner, vars(owner).copy()) for owner in _owners(len(sys.modules))], things
        )

    def changed(self, now: "State") -> list[str]:
        """What is not as it was in the environment, in settings and in the code of fastpipe, in words."""
        changed = [
            f"{name} in the environment was {self.environment.get(name)!r} and is {now.environment.get(name)!r}"
            for name in (self.environment | now.environment).keys() - _NOT_OF_TESTS
            if self.environment.get(name) != now.environment.get(name)
        ]
        changed += [
            f"{name} of {owner} was replaced"
            for owner, before in self.code
            if any(map(is_not, before.values(), vars(owner).values()))
            for name, value in before.items()
            if vars(owner).get(name) is not value and isinstance(value, (FunctionType, staticmethod, classmethod, type))
            if not name.startswith("__compiled_fn")  # torch.compile's own
        ]
        # torch's are looked at from the first test on that finds it imported
        return changed + [
            f"{name} was {value!r} and is {now.settings[name]!r}"
            for name, value in self.settings.items()
            if now.settings[name] != value
        ]

    def left_open(self, now: "State") -> list[str]:
        """What has been opened or started, and not ended, in words."""
        return [
            f"{kind}: {words}"
            for kind, things in now.things.items()
            for key, words in things.items()
            if key not in self.things[kind] and key not in _shared[kind]
        ]

    def left_behind(self, *, open_ones: bool = True) -> list[str]:
        """Both of now, when what ends by itself has had its time: cycles, threads that were told to end.

        Args:
            open_ones: whether what has been opened or started counts.
        """
        if not open_ones:
            return self.changed(State.now())
        until, pause = time.monotonic() + _SECONDS, 0.001
        while (left := self.left_open(now := State.now())) and time.monotonic() < until:
            gc.collect()
            time.sleep(pause)
            pause = min(2 * pause, 0.1)
        return self.changed(now) + left


@contextlib.contextmanager
def shared() -> Iterator[None]:
    """What is opened or started within this context is shared by tests, and stays."""
    before = _things()
    try:
        yield
    finally:
        for kind, things in _things().items():
            _shared[kind].update({key: words for key, words in things.items() if key not in before[kind]})


@functools.cache
def _owners(num_modules: int) -> list[Any]:
    """The modules of fastpipe, and their classes, when so many modules are imported."""
    modules = [module for name, module in sys.modules.items() if name.partition(".")[0] == "fastpipe"]
    classes = [
        value
        for module in modules
        for value in vars(module).values()
        if isinstance(value, type) and value.__module__ == module.__name__
    ]
    return [*modules, *classes]


def _settings() -> dict[str, Any]:
    found: dict[str, Any] = {
        "the working directory": os.getcwd(),
        "the handler of SIGINT": signal.getsignal(signal.SIGINT),
        "sys.path": list(sys.path),
        "the collector's state": gc.isenabled(),
    }
    return found | (_torch_settings() if "torch" in sys.modules else {})


def _torch_settings() -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    return {
        "the default dtype": torch.get_default_dtype(),
        "the default device": torch.get_default_device(),
        "the number of threads": torch.get_num_threads(),
        "whether gradients are recorded": torch.is_grad_enabled(),
        "whether autocast is on": torch.is_autocast_enabled("cpu"),
        "whether anomalies are detected": torch.is_anomaly_enabled(),
        "whether algorithms are deterministic": torch.are_deterministic_algorithms_enabled(),
        "whether there is a default process group": dist.is_available() and dist.is_initialized(),
    }


def _things() -> dict[str, Things]:
    return {"descriptor": _descriptors(), "thread": _threads(), "child process": _children()}


def _descriptors() -> Things:
    found: Things = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself
            target = os.readlink(f"/proc/self/fd/{name}")
            # files of what is installed (fonts, say) a library opens once and keeps
            if not target.startswith(_INSTALLED):
                found[name, target] = f"{name} -> {target}"
    return found


def _threads() -> Things:
    """A daemon that is not fastpipe's is a library's, which starts one for good."""
    alive = threading.enumerate()
    return {thread: str(thread) for thread in alive if not thread.daemon or thread.name.startswith("fastpipe")}


def _children() -> Things:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return {}
    found: Things = {}
    # a kernel may not list them; to look through all processes takes longer than many a test
    listed = [number for file in Path("/proc/self/task").glob("*/children") for number in _text(file).split()]
    for number in listed or filter(str.isdigit, os.listdir("/proc")):
        entry = Path("/proc", number)
        status = _text(entry / "stat").rpartition(")")[2].split()
        if status and int(status[1]) == os.getpid():
            command = _text(entry / "cmdline").replace("\0", " ").strip()
            found[int(number), status[19]] = f"{number} {command or '(ended, and not waited for)'}"
    return found


def _text(file: Path) -> str:
    """What is in a file of /proc; nothing once its process is gone."""
    try:
        return file.read_text(errors="replace")
    except OSError:
        return ""
