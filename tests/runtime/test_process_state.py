"""What the fixture finds that every test is under: each kind of thing, while it is otherwise than before."""

import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from fastpipe import Pipeline
from fastpipe.runtime import tune
from tests.process_state import State, shared


@contextmanager
def descriptor() -> Iterator[None]:
    with open(__file__):
        yield


@contextmanager
def thread() -> Iterator[None]:
    """One that must be ended."""
    done = threading.Event()
    waiting = threading.Thread(target=done.wait)
    waiting.start()
    yield
    done.set()
    waiting.join()


@contextmanager
def child() -> Iterator[None]:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as started:
        yield
        started.kill()


def setting(change: Callable[[pytest.MonkeyPatch], Any]) -> Callable[[], Any]:
    @contextmanager
    def changed() -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            change(patch)
            yield

    return changed


@contextmanager
def dtype() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


CHANGED: dict[str, tuple[Callable[[], Any], str]] = {
    "variable": (setting(lambda patch: patch.setenv("FASTPIPE_X", "1")), "FASTPIPE_X .* was None and is '1'"),
    "folder": (setting(lambda patch: patch.chdir("/")), "directory .* is '/'"),
    "function": (setting(lambda patch: patch.setattr(tune, "metered", print)), "metered of .*tune"),
    "method": (setting(lambda patch: patch.setattr(Pipeline, "step", print)), "step of .*Pipeline"),
    "dtype": (dtype, "torch.float32 and is torch.float64"),
    "gradients": (torch.no_grad, "gradients are recorded was True and is False"),
}
LEFT: dict[str, tuple[Callable[[], Any], str]] = {
    "descriptor": (descriptor, f"descriptor: .*{Path(__file__).name}"),
    "thread": (thread, "thread: .*Thread"),
    "child": (child, "child process: .*sleep"),
}


@pytest.mark.parametrize("kind", [*CHANGED, *LEFT])
def test_each_is_found_and_no_longer_when_it_is_undone(kind: str) -> None:
    make, words = (CHANGED | LEFT)[kind]
    before = State.now()
    with make():
        now = State.now()
        found = before.changed(now) if kind in CHANGED else before.left_open(now)
        assert len(found) == 1 and re.search(words, found[0]), found
    assert not before.left_behind()


def test_what_is_shared_may_stay() -> None:
    before = State.now()
    with shared():
        number = os.open(__file__, os.O_RDONLY)
    assert not before.left_open(State.now())
    os.close(number)
    State.now()
    with descriptor():  # the same number, and the same file
        assert len(before.left_open(State.now())) == 1
