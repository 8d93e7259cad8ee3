"""A rank is gone, known or not: what then comes out of groups on a device is no message, and their ends know it.

Nobody waits for that rank, neither who makes connections nor who ends them.
"""

import logging
import os
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fastpipe.runtime.common.failure import DIED, Failure, FailureError
from fastpipe.runtime.common.waits import attended
from fastpipe.runtime.transport import groups
from fastpipe.runtime.transport.groups import _WATCHDOG, MeshGroups, OwnGroups, _unless_set, wait_for_all
from fastpipe.runtime.transport.process_group import ProcessGroups
from tests.conftest import skip_without_native
from tests.patience import PATIENCE
from tests.scripts import command


class Waits:
    """Those of one rank."""

    def __init__(self, order: list[object]) -> None:
        self.lose = order.append


@pytest.mark.parametrize(
    ("failure", "rank"), [(Failure(2, DIED, is_fatal=True), 2), (Failure(None, "the store is gone", is_fatal=True), -1)]
)
def test_who_is_let_go_knows_why(failure: Failure, rank: int) -> None:
    order: list[object] = []
    transport = ProcessGroups.__new__(ProcessGroups)
    transport.device, transport.lost, transport.waits = torch.device("cuda"), None, Waits(order)
    transport._own = SimpleNamespace(abort=lambda: order.append("aborted"), groups=[])  # type: ignore[assignment]
    transport.unblock(failure)
    transport.unblock(Failure(0, "another", is_fatal=True))
    assert order == [rank, "aborted", 0, "aborted"]
    assert transport.lost is failure


class Backend:
    """Its abort ends when another one has begun, as on a device for which both wait."""

    def __init__(self, error: str = "") -> None:
        self.error = error
        self.begun = threading.Event()
        self.ended = threading.Event()
        self.other = self

    def abort(self) -> None:
        assert not self.begun.is_set(), "aborted twice"
        self.begun.set()
        assert self.other.begun.wait(PATIENCE)
        self.ended.set()
        if self.error:
            raise RuntimeError(self.error)


def own_groups(*backends: Backend) -> OwnGroups:
    own = OwnGroups.__new__(OwnGroups)
    own.groups = [SimpleNamespace(_get_backend=lambda device, backend=backend: backend) for backend in backends]
    own._member = SimpleNamespace(device=torch.device("cuda"))  # type: ignore[assignment]
    own._lock, own._aborts, own._seconds = threading.Lock(), None, PATIENCE
    return own


def test_no_group_waits_for_another_to_be_aborted(caplog: pytest.LogCaptureFixture) -> None:
    first, second = Backend("no such communicator"), Backend()
    first.other, second.other = second, first
    own = own_groups(first, second)
    own.abort()
    with caplog.at_level(logging.WARNING, "fastpipe"):
        own.end()
    assert first.ended.is_set() and second.ended.is_set() and not own.groups
    assert "a process group could not be aborted (no such communicator)" in caplog.text
    own.abort()


def test_nobody_waits_for_aborts_but_who_ends_the_groups_and_no_longer_than_a_while() -> None:
    stuck, never = Backend(), Backend()
    stuck.other, own = never, own_groups(stuck)
    own.abort()
    assert not stuck.ended.is_set()
    own._seconds = 0.05
    own.end()
    assert stuck.begun.is_set() and not stuck.ended.is_set()
    never.begun.set()
    assert stuck.ended.wait(PATIENCE)


def test_groups_that_are_ended_together_are_aborted_together() -> None:
    first, second = Backend(), Backend()
    first.other, second.other = second, first
    transport = ProcessGroups.__new__(ProcessGroups)
    both = [own_groups(first), own_groups(second)]
    transport._all = lambda: both  # type: ignore[method-assign]
    transport.abort()
    assert first.ended.is_set() and second.ended.is_set()


def test_groups_of_a_mesh_on_a_device_are_aborted_also_if_a_rank_leaves_them_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The watcher aborts in a thread of its own, and the rank may fail at the same time."""
    backend = Backend()
    aborted: list[Backend] = []
    monkeypatch.setattr(groups, "start_aborts", aborted.extend)
    mesh = MeshGroups({}, torch.device("cuda"))
    mesh.groups = [SimpleNamespace(_get_backend=lambda device: backend)]
    # between the first two statements of `abort`
    monkeypatch.setattr(MeshGroups, "_ended", SimpleNamespace(update=lambda names: mesh.leave()))
    mesh.abort()
    assert aborted == [backend]


@pytest.fixture
def exiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interpreter that is about to exit."""

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", start)


@pytest.mark.usefixtures("exiting")
def test_where_there_are_no_more_threads_groups_are_aborted_all_the_same() -> None:
    backends = [Backend("no such communicator"), Backend()]
    own_groups(*backends).end()
    assert all(backend.ended.is_set() for backend in backends)


@pytest.mark.usefixtures("exiting")
def test_where_there_are_no_more_threads_the_others_are_met_all_the_same() -> None:
    said: list[Any] = []
    store = SimpleNamespace(set=lambda *_: said.append("here"), wait=lambda keys, _: said.append(keys))
    store.clone = lambda: store
    wait_for_all(store, 0, 2, PATIENCE)
    assert said == ["here", ["closing/0", "closing/1"]]


def test_what_somebody_has_set_for_all_watchdogs_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """By torch's old name for it, too."""
    monkeypatch.setenv("NCCL_ASYNC_ERROR_HANDLING", "3")
    monkeypatch.setenv("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    monkeypatch.delenv("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", raising=False)
    before = dict(os.environ)
    with _unless_set(_WATCHDOG):
        assert dict(os.environ) == before | {"TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "10"}
    assert dict(os.environ) == before


def test_who_does_not_connect_is_not_waited_for_for_ever() -> None:
    never = threading.Event()
    with pytest.raises(FailureError, match="rank 3 did not connect within 0.05 s") as caught:
        attended(never.wait, lambda: None, timedelta(seconds=0.05), 3)
    assert caught.value.failure.rank == 3
    with pytest.raises(FailureError, match=DIED):
        attended(never.wait, lambda: Failure(3, DIED, is_fatal=True), timedelta(seconds=PATIENCE), 3)
    never.set()


def lost_groups(aborts: list[str]) -> ProcessGroups:
    """Of a device, two, of which the first cannot be aborted."""
    transport = ProcessGroups.__new__(ProcessGroups)
    transport.device, transport.lost, transport.waits = torch.device("cuda"), None, Waits([])

    def fail() -> None:
        raise RuntimeError("no abort")

    parts = [SimpleNamespace(abort=fail), SimpleNamespace(abort=lambda: aborts.append("aborted"))]
    transport._all = lambda: parts  # type: ignore[method-assign, assignment, return-value]
    return transport


def test_all_are_let_go_even_if_one_cannot_be(caplog: pytest.LogCaptureFixture) -> None:
    aborts: list[str] = []
    lost_groups(aborts).unblock(Failure(1, DIED, is_fatal=True))
    assert aborts == ["aborted"] and "no abort" in caplog.text


SOON = 0.3


def test_who_closes_first_waits_for_the_others(tmp_path: Path) -> None:
    store = dist.FileStore(str(tmp_path / "store"), 2)
    first = threading.Thread(target=wait_for_all, args=(store, 0, 2, PATIENCE))
    first.start()
    first.join(SOON)
    assert first.is_alive(), "rank 1 has not come"
    wait_for_all(store, 1, 2, PATIENCE)
    first.join(PATIENCE)
    assert not first.is_alive()


def test_who_does_not_come_is_not_waited_for_long(tmp_path: Path) -> None:
    start = time.monotonic()
    wait_for_all(dist.FileStore(str(tmp_path / "store"), 2), 0, 2, SOON)
    assert SOON <= time.monotonic() - start < PATIENCE


LEAVES = """
import torch
import torch.distributed as dist
import fastpipe
from fastpipe.runtime.transport import leave_groups

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
groups = [dist.new_group([0]) for _ in range(100)]
leave_groups([dist.group.WORLD], torch.device("cpu"))
try:
    fastpipe.Pipeline([torch.nn.Linear(1, 1)], "gpipe", 1, torch.nn.functional.mse_loss)
except RuntimeError as error:
    print(error)
leave_groups(groups, torch.device("cpu"))
"""


def test_a_script_that_exits_when_it_has_left_a_group_exits_in_order(tmp_path: Path) -> None:
    """And not with SIGABRT, as the thread in which the group ends needs the interpreter. A new Pipeline is refused."""
    skip_without_native()
    said = command([sys.executable, "-c", LEAVES], tmp_path)
    assert said.startswith("the default process group was closed after a failure; call destroy_process_group")
