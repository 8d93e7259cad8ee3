"""What a device has later than a step ends: told when it is there, read when asked for, dropped when nobody can."""

import gc
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from fastpipe import StepError
from fastpipe.runtime.common.failure import DIED, Failure
from fastpipe.runtime.coordination.deferred import DeferredResults
from tests.patience import PATIENCE


@pytest.fixture
def store(tmp_path: Path) -> dist.Store:
    return dist.FileStore(str(tmp_path / "store"), 1)


@pytest.fixture
def sender(store: dist.Store) -> Iterator[DeferredResults]:
    results = DeferredResults(store, 1, PATIENCE)
    yield results
    results.close()


@pytest.fixture
def reader(store: dist.Store) -> DeferredResults:
    return DeferredResults(store, 0, PATIENCE)


def test_nobody_waits_but_who_asks(sender: DeferredResults, reader: DeferredResults) -> None:
    there = threading.Event()

    def ready() -> dict[str, int]:
        assert there.wait(PATIENCE)
        return {"losses": 3}

    sender.post(5, ready)
    result = reader.result(5, 1)
    threading.Timer(0.05, there.set).start()
    assert result() == {"losses": 3}
    assert there.is_set() and result() is result()


def test_what_may_still_be_asked_for_is_kept(
    store: dist.Store, sender: DeferredResults, reader: DeferredResults
) -> None:
    results = {}
    for step in range(1, 5):
        sender.post(step, lambda step=step: {"losses": step})
        results[step] = reader.result(step, 1)
    results.pop(1)  # the result is gone, and nobody has read it
    gc.collect()
    results[3]()
    assert reader.wanted() == 2
    sender.forget(4, [None, reader.wanted()])
    assert results[2]() == {"losses": 2}
    assert reader.wanted() == 4
    sender.forget(4, [None, reader.wanted()])
    sender.close()
    assert [store.check([f"{step}/found/1"]) for step in range(1, 5)] == [False, False, False, True]
    assert results[4]() == {"losses": 4} and reader.wanted() is None


def test_what_does_not_come_is_an_error(store: dist.Store) -> None:
    result = DeferredResults(store, 0, 0.05).result(1, 1)
    with pytest.raises(StepError, match="rank 1 .*losses .* 0.05 s") as caught:
        result()
    assert caught.value.rank == 1


def test_who_waits_warns_of_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    """Torch does so whenever a store is waited for in vain."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True)
    sender, reader = DeferredResults(store, 1, PATIENCE), DeferredResults(store, 0, PATIENCE)
    result = reader.result(1, 1)
    later = threading.Timer(0.5, sender.post, (1, lambda: {"losses": 1}))
    later.start()
    assert result() == {"losses": 1}
    later.join()
    sender.close()
    assert capfd.readouterr().err == ""


def test_who_is_dead_is_not_waited_for(store: dist.Store, sender: DeferredResults) -> None:
    """But what it posted before is read, and so is what others post."""
    reader = DeferredResults(store, 0, PATIENCE, lambda: [Failure(1, DIED, is_fatal=True)])
    with pytest.raises(StepError, match="the step failed on rank 1: its process died") as caught:
        reader.result(1, 1)()
    assert caught.value.rank == 1
    sender.post(2, lambda: {"losses": 2})
    store.wait(["2/found/1"], timedelta(seconds=PATIENCE))
    assert reader.result(2, 1)() == {"losses": 2}
    other = DeferredResults(store, 2, PATIENCE)
    threading.Timer(0.5, other.post, (2, lambda: {"losses": 3})).start()
    assert reader.result(2, 2)() == {"losses": 3}
    other.close()


def test_what_cannot_be_trusted_is_an_error_for_who_reads_it(sender: DeferredResults, reader: DeferredResults) -> None:
    def ready() -> dict[str, int]:
        raise Failure(2, DIED, is_fatal=True).error()

    sender.post(1, ready)
    with pytest.raises(StepError, match="the step failed on rank 2: its process died") as caught:
        reader.result(1, 1)()
    assert caught.value.rank == 2


def test_whatever_keeps_a_process_from_telling_is_told(sender: DeferredResults, reader: DeferredResults) -> None:
    """An error of its device, say: nobody waits for the whole timeout. And the next result goes as ever."""

    def ready() -> dict[str, int]:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nof which it says more")

    sender.post(1, ready)
    sender.post(2, lambda: {"losses": 2})
    with pytest.raises(StepError, match="rank 1: RuntimeError: CUDA error: an illegal .*new one"):
        reader.result(1, 1)()
    assert reader.result(2, 1)() == {"losses": 2}


def test_what_cannot_be_sent_is_told(sender: DeferredResults, reader: DeferredResults) -> None:
    sender.post(5, lambda: {"losses": object()})  # type: ignore[dict-item]
    sender.post(6, lambda: {"losses": 4})
    with pytest.raises(StepError, match="rank 1: TypeError: .*JSON"):
        reader.result(5, 1)()
    assert reader.result(6, 1)() == {"losses": 4}
