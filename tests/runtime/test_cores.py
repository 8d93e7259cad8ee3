"""Ranks on cores of their own, where FASTPIPE_PIN asks for it: how cores are shared out, and when they are not."""

import errno
import os
from collections.abc import Collection

import pytest

torch = pytest.importorskip("torch")

from fastpipe.runtime.coordination import host  # noqa: E402
from fastpipe.runtime.coordination.host import Cores, by_place, find_cores  # noqa: E402

CPU = torch.device("cpu")
SECOND_OF_TWO = {"FASTPIPE_PIN": "1", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}


class Machine:
    """Which cores this process and its parent may use, without a machine that has them."""

    def __init__(self, own: Collection[int], parents: Collection[int] | None = None) -> None:
        self.masks = {0: set(own), os.getppid(): set(own if parents is None else parents)}
        self.denied = False

    def get(self, process: int) -> set[int]:
        return set(self.masks[process])

    def set(self, process: int, cores: Collection[int]) -> None:
        if self.denied:
            raise PermissionError(errno.EPERM, "Operation not permitted")
        self.masks[process] = set(cores)


def on(machine: Machine, monkeypatch: pytest.MonkeyPatch, threads: int = 1) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", machine.get)
    monkeypatch.setattr(os, "sched_setaffinity", machine.set)
    monkeypatch.setattr(host, "_TOPOLOGY", "/nowhere/{}/{}")
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)


@pytest.mark.parametrize("rank, own", [(0, {4, 5}), (1, {6, 7}), (2, {8, 9})])
def test_each_rank_has_an_equal_share(rank: int, own: set[int], monkeypatch: pytest.MonkeyPatch) -> None:
    on(Machine({10, 9, 8, 7, 6, 5, 4}), monkeypatch, threads=2)
    found = find_cores(2, CPU, {"FASTPIPE_PIN": "1", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "3"})
    assert found == Cores(frozenset(own))
    assert str(found) == f"{min(own)}, {max(own)} while a step runs (FASTPIPE_PIN)"


def test_nothing_is_done_unless_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine({0, 1})
    on(machine, monkeypatch)
    for environment in ({}, {**SECOND_OF_TWO, "FASTPIPE_PIN": "0"}):
        found = find_cores(2, CPU, environment)
        assert found == Cores() and str(found) == ""
        with found.kept():
            assert machine.get(0) == {0, 1}
    with pytest.raises(ValueError, match="FASTPIPE_PIN = 'yes': set it to 1 .*, or to 0"):
        find_cores(2, CPU, {"FASTPIPE_PIN": "yes"})


@pytest.mark.parametrize(
    "machine, processes, device, threads, environment, why",
    [
        (Machine({0, 1}), 1, "cpu", 1, {}, "the ranks are threads of one process"),
        (Machine({0, 1}), 2, "meta", 1, {}, "the stages are on meta"),
        (Machine({0, 1}), 2, "cpu", 1, {"LOCAL_RANK": ""}, "torchrun has not started the processes"),
        (Machine({0, 1}), 2, "cpu", 1, {"OMP_PROC_BIND": "close"}, "OpenMP places threads (OMP_PROC_BIND)"),
        (Machine({0, 1}, {0, 1, 2, 3}), 2, "cpu", 1, {}, "this process is pinned to 0, 1"),
        (Machine({0}), 2, "cpu", 1, {}, "2 ranks have 1 cores"),
        (Machine({0, 1, 2}), 2, "cpu", 4, {}, "a rank has 4 threads and 1 of 3 cores; set OMP_NUM_THREADS=1"),
    ],
)
def test_why_it_is_not_done(
    machine: Machine,
    processes: int,
    device: str,
    threads: int,
    environment: dict[str, str],
    why: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on(machine, monkeypatch, threads)
    found = find_cores(processes, torch.device(device), {**SECOND_OF_TWO, **environment})
    assert found.own is None
    assert str(found).startswith(f"any: FASTPIPE_PIN is set, but {why}")


def test_a_system_that_does_not_allow_it(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine({0, 1})
    machine.denied = True
    on(machine, monkeypatch)
    assert "the system does not allow it (Operation not permitted)" in str(find_cores(2, CPU, SECOND_OF_TWO))


def test_the_thread_is_kept_for_a_while_and_then_has_what_it_had(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine({0, 1, 2, 3})
    on(machine, monkeypatch)
    own = find_cores(2, CPU, SECOND_OF_TWO)
    assert machine.get(0) == {0, 1, 2, 3}
    with pytest.raises(KeyError), own.kept():
        assert machine.get(0) == {2, 3}
        with own.kept():
            assert machine.get(0) == {2, 3}
        assert machine.get(0) == {2, 3}
        raise KeyError
    assert machine.get(0) == {0, 1, 2, 3}
    machine.set(0, {1, 2})
    with own.kept():
        assert machine.get(0) == {1, 2}, "somebody has placed it since"


def test_siblings_stay_together(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sockets of two cores with two threads each, numbered as Linux does."""
    for core in range(8):
        folder = os.path.join(str(tmp_path), str(core))
        os.mkdir(folder)
        for name, number in (("physical_package_id", core // 2 % 2), ("core_id", core % 2)):
            with open(os.path.join(folder, name), "w") as file:
                file.write(f"{number}\n")
    monkeypatch.setattr(host, "_TOPOLOGY", f"{tmp_path}/{{}}/{{}}")
    assert by_place(range(8)) == [0, 4, 1, 5, 2, 6, 3, 7]
    monkeypatch.setattr(host, "_TOPOLOGY", "/nowhere/{}/{}")
    assert by_place({3, 1, 2}) == [1, 2, 3]
