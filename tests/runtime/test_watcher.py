"""The watcher's thread: whom it takes for lost, what it hears while it looks, and that nothing it tells ends it."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from fastpipe.runtime.failure import DIED, Failure
from fastpipe.runtime.host import Neighbours
from fastpipe.runtime.lifeline import Lifeline
from fastpipe.runtime.watcher import Watcher
from tests.promptly import PATIENCE


@pytest.fixture
def watcher() -> Iterator[Watcher]:
    neighbours, lifeline = Neighbours(), Lifeline(0)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True)
    watching = Watcher(store, neighbours, lifeline, lambda *_: None)
    yield watching
    watching.close()
    lifeline.close(0)
    neighbours.close()


@pytest.mark.parametrize("parts", [True, False])
def test_who_parts_and_ends_while_others_look_is_not_lost(watcher: Watcher, parts: bool) -> None:
    lost: list[Failure] = []
    first, again = threading.Event(), threading.Event()

    def find_dead(step: int) -> dict[int, str]:
        """It ends when the watcher has woken, for whatever reason."""
        if first.is_set():
            again.set()
        elif parts:
            os.write(watcher.neighbours._own, b"<1>")
        first.set()
        return {1: DIED}

    watcher.find_dead = find_dead  # type: ignore[method-assign]
    watcher.on_loss = lost.append
    watcher.start(polls=False)
    watcher.neighbours.ring_own()
    assert first.wait(PATIENCE)
    while not again.wait(0.05):
        watcher.neighbours.ring_own()
    watcher.close()
    assert {failure.rank for failure in lost} == (set() if parts else {1})


def test_a_step_that_begins_while_others_look_is_looked_after(watcher: Watcher) -> None:
    """The bell for it is heard together with what has been rung before, or else it wakes the watcher again."""
    told = threading.Event()
    found: dict[int, str] = {}

    def find_dead(step: int) -> dict[int, str]:
        if not step:
            watcher.begin(1, lambda failure: told.set())
            found[1] = DIED
            return {}
        return found

    watcher.find_dead = find_dead  # type: ignore[method-assign]
    watcher.start(polls=True)
    watcher.neighbours.ring_own()
    assert told.wait(PATIENCE)


def test_who_closes_while_others_look_is_not_waited_for(watcher: Watcher) -> None:
    def find_dead(step: int) -> dict[int, str]:
        watcher._stopping = True
        watcher.neighbours.ring_own()
        return {}

    watcher.find_dead = find_dead  # type: ignore[method-assign]
    watcher.start(polls=False)
    watcher.neighbours.ring_own()
    watcher._thread.join(PATIENCE)
    assert not watcher._thread.is_alive()


def watcher_of(dead: dict[int, str]) -> Watcher:
    watcher = Watcher.__new__(Watcher)
    watcher._dead, watcher._lock, watcher.step = dead, threading.Lock(), 1
    neighbours: Any = SimpleNamespace(parted={2})
    watcher.neighbours = neighbours
    return watcher


def test_every_loss_is_told_though_one_cannot_be_dealt_with(caplog: pytest.LogCaptureFixture) -> None:
    told = []

    def fail(failure: Failure) -> None:
        told.append(failure.rank)
        raise RuntimeError("CUDA error: out of its mind")

    watcher = watcher_of({1: DIED, 2: DIED, 3: DIED})
    watcher.on_loss = fail
    watcher._tell_losses()
    assert told == [1, 3], "rank 2 has closed its pipeline"
    assert "out of its mind" in caplog.text
    watcher._on_failure = fail
    watcher._report(Failure(1, DIED, dead=True), 1)
    assert told == [1, 3, 1]
