"""What a device has later than a step ends: told when it is there, read when asked for, dropped when nobody can."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from fastpipe import StepError
from fastpipe.runtime.mail import Mail
from tests.promptly import PATIENCE


@pytest.fixture
def store(tmp_path: Path) -> dist.Store:
    return dist.FileStore(str(tmp_path / "store"), 1)


@pytest.fixture
def sender(store: dist.Store) -> Iterator[Mail]:
    mail = Mail(store, 1, PATIENCE)
    yield mail
    mail.close()


@pytest.fixture
def reader(store: dist.Store) -> Mail:
    return Mail(store, 0, PATIENCE)


def test_nobody_waits_but_who_asks(sender: Mail, reader: Mail) -> None:
    there = threading.Event()

    def ready() -> dict[str, int]:
        assert there.wait(PATIENCE)
        return {"losses": 3}

    sender.post(5, ready)
    letter = reader.letter(5, 1)
    threading.Timer(0.05, there.set).start()
    assert letter() == {"losses": 3}
    assert there.is_set() and letter() is letter()


def test_what_may_still_be_asked_for_is_kept(store: dist.Store, sender: Mail, reader: Mail) -> None:
    letters = {}
    for step in range(1, 5):
        sender.post(step, lambda step=step: {"losses": step})
        letters[step] = reader.letter(step, 1)
    letters.pop(1)  # the result is gone, and nobody has read it
    gc.collect()
    letters[3]()
    assert reader.wanted() == 2
    sender.forget(4, [None, reader.wanted()])
    assert letters[2]() == {"losses": 2}
    assert reader.wanted() == 4
    sender.forget(4, [None, reader.wanted()])
    sender.close()
    assert [store.check([f"{step}/found/1"]) for step in range(1, 5)] == [False, False, False, True]
    assert letters[4]() == {"losses": 4} and reader.wanted() is None


def test_what_does_not_come_is_an_error(store: dist.Store) -> None:
    letter = Mail(store, 0, 0.05).letter(1, 1)
    with pytest.raises(StepError, match="rank 1 has not told the losses of a step within 0.05 s") as caught:
        letter()
    assert caught.value.rank == 1
