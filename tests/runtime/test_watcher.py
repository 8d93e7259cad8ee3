"""The watcher's thread: whom it takes for lost, what it hears while it looks, and that nothing it tells ends it."""

import socket
import threading
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from fastpipe.runtime.common.failure import DIED, Failure, FailureError
from fastpipe.runtime.coordination.host import RanksPerHost
from fastpipe.runtime.coordination.peers import LEFT, Lifeline, LocalPeers
from fastpipe.runtime.coordination.processes import Processes, Watcher, read_failure, write_failure
from tests.patience import PATIENCE


def dead(rank: int, cause: str = DIED) -> Failure:
    return Failure(rank, cause, is_fatal=True)


@pytest.fixture
def watcher() -> Iterator[Watcher]:
    local_peers, lifeline = LocalPeers(), Lifeline(0)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True)
    watching = Watcher(store, local_peers, lifeline, dead)
    yield watching
    watching.close()
    lifeline.close(0)
    local_peers.close()


@pytest.mark.parametrize("parts", [True, False])
def test_who_closes_its_pipeline_before_it_ends_is_not_lost(watcher: Watcher, parts: bool) -> None:
    """Not in the step that was its last one; in the next it is missed."""
    other = LocalPeers()
    own = watcher.local_peers
    other.connect(1, [own.identity(), other.identity()])
    if parts:
        other.report_close(1, 4)
    other.close()
    own.gone.add(1)
    assert watcher.find_dead(4) == ({} if parts else {1: dead(1)})
    assert watcher.find_dead(5) == {1: dead(1, LEFT if parts else DIED)}


@pytest.mark.parametrize("text", [b"\xff:1 4", "ä:1 4".encode(), b"stranger:1 4", b"", b":"])
def test_what_a_stranger_sends_is_ignored(watcher: Watcher, text: bytes) -> None:
    """Every process of the host can send to the socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger:
        stranger.sendto(text, watcher.local_peers.wakeup.getsockname())
    assert watcher.find_dead(5) == {}


def test_a_step_that_begins_while_others_look_is_looked_after(watcher: Watcher) -> None:
    """The bell for it is heard together with what has been rung before, or else it wakes the watcher again."""
    told = threading.Event()
    found: dict[int, Failure] = {}

    def find_dead(step: int) -> dict[int, Failure]:
        if not step:
            watcher.begin(1, lambda failure: told.set())
            found[1] = dead(1)
            return {}
        return found

    watcher.find_dead = find_dead  # type: ignore[method-assign]
    watcher.start(True, watcher.store)
    watcher.local_peers.wake_own()
    assert told.wait(PATIENCE)


def test_who_closes_while_others_look_is_not_waited_for(watcher: Watcher) -> None:
    def find_dead(step: int) -> dict[int, Failure]:
        watcher._stopping = True
        watcher.local_peers.wake_own()
        return {}

    watcher.find_dead = find_dead  # type: ignore[method-assign]
    watcher.start(False, watcher.store)
    watcher.local_peers.wake_own()
    assert watcher._thread is not None
    watcher._thread.join(PATIENCE)
    assert not watcher._thread.is_alive()


def test_every_loss_is_told_though_one_cannot_be_dealt_with(caplog: pytest.LogCaptureFixture) -> None:
    told = []

    def fail(failure: Failure) -> None:
        told.append(failure.rank)
        raise RuntimeError("CUDA error: out of its mind")

    watcher = Watcher.__new__(Watcher)
    watcher.causes, watcher._lock, watcher.step = [dead(1), dead(3)], threading.Lock(), 1
    watcher.on_loss = fail
    watcher._report_losses()
    assert told == [1, 3]
    assert "out of its mind" in caplog.text
    watcher._on_failure = fail
    watcher.report(dead(1), 1)
    assert told == [1, 3, 1]


SUSPICION = Failure(1, "rank 1 is dead or silent", is_fatal=True, is_suspected=True)
EXCEPTION = Failure(2, "ValueError: on purpose")


@pytest.mark.parametrize("first", [SUSPICION, EXCEPTION], ids=["suspicion", "exception"])
def test_a_lost_rank_replaces_what_ends_no_wait(watcher: Watcher, first: Failure) -> None:
    """On another host than rank 0's it is known by the store alone, where an earlier failure may stand already."""
    for failure, stored in [
        (first, first),
        (EXCEPTION, first),
        (SUSPICION, first),
        (dead(1), dead(1)),
        (first, dead(1)),
        (dead(2), dead(1)),
    ]:
        assert write_failure(watcher.store, failure, 7) == stored == read_failure(watcher.store, 7)


def test_who_is_elsewhere_is_named_with_its_pipeline() -> None:
    """The numbers of the processes of a mesh go on over its pipelines; ranks do not."""
    control = Processes(dist.HashStore(), 0, 2, 20.0, RanksPerHost(None, 0), pipelines=("tp=0", "tp=1"))
    with pytest.raises(FailureError) as elsewhere:
        control._shared_gather._read(3, 1, "start", b"1 end\n{}")
    control.close()
    failure = elsewhere.value.failure
    assert (failure.rank, failure.pipeline) == (1, "tp=1")
    assert failure.cause.startswith(
        "rank 1 of the pipeline at tp=1 did not reach the start of call 1: it is at the end of call 1; "
    )
