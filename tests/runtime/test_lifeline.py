"""The connections by which processes of several hosts know of each other's end; here both ends are in one process."""

import ctypes
import os
import select
import signal
import socket
import struct
import threading
import time
from types import SimpleNamespace

import pytest

from fastpipe.runtime.common.failure import DIED
from fastpipe.runtime.coordination.peers import BEAT_SECONDS, HANGUP, LEFT, SILENT, Lifeline
from tests.patience import PATIENCE

STORE = SimpleNamespace(underlying_store=SimpleNamespace(host="localhost"))


def connected(far: list[int]) -> list[Lifeline]:
    """That of rank 0, and those of processes that are on other hosts."""
    lines = [Lifeline(rank) for rank in (0, *far)]
    offer = lines[0].offer(STORE)
    threads = [threading.Thread(target=line.connect, args=(offer, far)) for line in lines[1:]]
    for thread in threads:
        thread.start()
    assert sorted(lines[0].connect(offer, far)) == far
    for thread, line in zip(threads, lines[1:], strict=True):
        thread.join()
        line.keep([0])
    lines[0].keep(far)
    return lines


def wait_for_end(line: Lifeline, seconds: float) -> float:
    """Sleep as the watcher does until somebody is gone; how long that took."""
    start = time.monotonic()
    poll = select.poll()
    for descriptor in line.descriptors:
        poll.register(descriptor, HANGUP)
    while not poll.poll(1000 * BEAT_SECONDS) and time.monotonic() < start + seconds:
        line.beat()
    return time.monotonic() - start


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_who_says_goodbye_is_gone_after_its_last_step() -> None:
    before = num_descriptors()
    first, third, fifth = connected([3, 5])
    for line in (first, third, fifth, first):
        line.beat()
    assert first.ended() == third.ended() == fifth.ended() == {}
    third.close(17)
    wait_for_end(first, PATIENCE)
    assert first.ended() == {3: (LEFT, 17)}
    first.close(18)
    wait_for_end(fifth, PATIENCE)
    assert fifth.ended() == {0: (LEFT, 18)}
    fifth.close(18)
    assert num_descriptors() == before


def test_who_dies_is_gone_at_once_though_its_child_lives() -> None:
    """A process that has the other end, forks, and is killed: its child, a worker say, must not keep the end open."""
    first, second = connected([1])
    child = os.fork()
    if child == 0:
        os.read(os.pipe()[0], 1)  # until it is killed
    second.close_descriptors()
    wait_for_end(first, PATIENCE)
    assert first.ended() == {1: (DIED, 0)}
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    first.close(0)


def vanish(line: Lifeline) -> None:
    """The kernel drops what comes on these connections from now on, by SO_ATTACH_FILTER, like a host that is gone."""
    nothing = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))  # BPF: accept 0 bytes
    for connection in line._connections.values():
        connection.setsockopt(socket.SOL_SOCKET, 26, struct.pack("HP", 1, ctypes.addressof(nothing)))


def test_a_host_that_vanishes_is_gone_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTPIPE_SILENCE", "0.5")
    first, second = connected([1])
    first.beat()
    vanish(second)
    assert wait_for_end(first, PATIENCE) > 0.25 and first.ended() == {1: (SILENT, 0)}
    for line in (first, second):
        line.close(0)


@pytest.mark.parametrize("deaf", [0, 1])
def test_a_cut_in_one_direction_is_noticed_at_both_ends(deaf: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What one end hears from the other it cannot acknowledge, or it hears no acknowledgement of what it says."""
    monkeypatch.setenv("FASTPIPE_SILENCE", "0.5")
    lines = connected([1])
    vanish(lines[deaf])
    until = time.monotonic() + PATIENCE
    while not all(line.ended() for line in lines) and time.monotonic() < until:
        for line in lines:
            line.beat()
        time.sleep(0.05)
    assert [line.ended() for line in lines] == [{1: (SILENT, 0)}, {0: (SILENT, 0)}]
    for line in lines:
        line.close(0)


def test_it_listens_where_the_ranks_come() -> None:
    line = Lifeline(0)
    line.offer(STORE)
    assert line._listener is not None and line._listener.getsockname()[0] in ("127.0.0.1", "::1")
    line.close(0)


@pytest.mark.parametrize(
    ("greeting", "count"), [(None, 20), (b"", 1), (b"GET / HTTP/1.1\r\n\r\n", 1), (b"0" * 39 + b"1", 1)]
)
def test_strangers_are_not_let_in(greeting: bytes | None, count: int) -> None:
    """Those who say nothing keep nobody waiting: they are heard at the same time as the others."""
    first, second = Lifeline(0), Lifeline(1)
    offer = first.offer(STORE)
    strangers = [socket.create_connection(offer["address"]) for _ in range(count)]
    for stranger in strangers if greeting is not None else ():
        stranger.sendall(greeting)
        stranger.shutdown(socket.SHUT_WR)
    thread = threading.Thread(target=second.connect, args=(offer, [1]))
    thread.start()
    assert first.connect(offer, [1]) == [1]
    thread.join()
    assert greeting is None or strangers[0].recv(1) == b""
    assert second.ended() == {}
    for stranger in strangers:
        stranger.close()
    for line in (first, second):
        line.close(0)


def test_a_process_that_is_busy_is_not_gone() -> None:
    """It reads nothing for what would be more than an hour."""
    first, second = connected([1])
    for _ in range(20_000):
        first._next_beat = 0.0
        first.beat()
    assert first.ended() == second.ended() == {}
    for line in (first, second):
        line.close(0)


def test_who_cannot_be_reached_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 gives up, and neither end keeps what the other one has not."""
    monkeypatch.setattr("fastpipe.runtime.coordination.peers._CONNECT_SECONDS", 0.2)
    first, second, third = (Lifeline(rank) for rank in range(3))
    offer = first.offer(STORE)
    assert second.connect({**offer, "token": "0" * 32}, [1]) == [0]
    assert third.connect({"no_lifeline": "no address"}, [1, 2]) == []
    assert first.connect(offer, [1, 2]) == []
    for line in (first, second, third):
        line.keep([])
        assert line.descriptors == [] and line.ended() == {}
        line.close(0)


@pytest.mark.parametrize("text", ["soon", "0", "-1", "inf", "nan"])
def test_a_silence_that_is_no_time_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTPIPE_SILENCE", text)
    with pytest.raises(ValueError, match=f"FASTPIPE_SILENCE = '{text}': .*seconds"):
        Lifeline(0)
