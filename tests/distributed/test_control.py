"""Control between processes: what they tell each other, on a board or over the store, and how they learn of trouble."""

import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from fastpipe.runtime.common.failure import Failure, FailureError
from fastpipe.runtime.coordination.gather import Gather
from fastpipe.runtime.coordination.processes import Processes
from fastpipe.runtime.transport.groups import membership, ranks_per_host
from tests.conftest import skip_without_native
from tests.distributed.hosts import on_hosts
from tests.distributed.ranks import Ranks, ranks
from tests.patience import PATIENCE

WAYS = ["board", "store"]


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> str:
    """How the processes meet."""
    if request.param == "board":
        skip_without_native()
    return str(request.param)


@contextmanager
def control(way: str, timeout: float = 20.0, *, bells: bool = True) -> Iterator[Processes]:
    """This process's, connected to the others."""
    member = membership(None, torch.device("cpu")).named()
    made = Processes(member.store(), member.rank, member.size, timeout, ranks_per_host())
    if way == "store":
        made._shared_gather.offer = lambda: {"no_board": "a test"}  # type: ignore[method-assign]
    if not bells and "FASTPIPE_HOST" not in os.environ:
        made._local_peers.identity = lambda: {"host": "", "pid": 0, "can_watch": True}  # type: ignore[method-assign]
    try:
        replies = made.setup({"own": member.rank})
        assert [reply["own"] for reply in replies] == list(range(member.size))
        assert (made._gather is made._shared_gather) == (way == "board")
        assert made._watcher.polls != bells
        yield made
    finally:
        made.close()


def talk(way: str, sizes: list[int]) -> None:
    """Messages of every size, another from every rank, several steps long."""
    rank, size = dist.get_rank(), dist.get_world_size()
    with control(way) as own:
        for number, length in enumerate(sizes):
            own.begin(lambda failure: pytest.fail(str(failure)))
            for phase in ("start", "end"):
                replies = own.exchange(phase, {"text": "ä" * (length + rank), "number": number})
                assert [len(reply["text"]) for reply in replies] == [length + other for other in range(size)]
                assert {reply["number"] for reply in replies} == {number}
            own.end()


def test_messages_of_any_size(way: str, group_of: Callable[[int], Ranks]) -> None:
    group_of(4).run(talk, way, [0, 1, 5000, 8189, 8192, 300000, 3, 16383, 16384, 16385, 0])


def lose(call: Callable[[], Any]) -> Failure:
    """The failure behind what is lost."""
    with pytest.raises(FailureError) as lost:
        call()
    return lost.value.failure


@contextmanager
def late_is(*others: int) -> Iterator[None]:
    """The timeout passes once these ranks alone are missing, however slow the machine is."""
    overdue = Gather._overdue

    def by_arrivals(gather: Gather, missing: Callable[[], Sequence[int]]) -> Sequence[int]:
        gather._deadline = -math.inf if list(missing()) == list(others) else math.inf
        return overdue(gather, missing)

    with mock.patch.object(Gather, "_overdue", by_arrivals):
        yield


def come_late(way: str) -> Failure:
    """Rank 1 comes when the others have given up."""
    heard: list[Failure] = []
    told = threading.Event()
    with control(way) as own, late_is(1):
        if dist.get_rank() == 1:
            dist.barrier()
            own.begin(lambda failure: (heard.append(failure), told.set()))
            assert told.wait(PATIENCE)
        else:
            own.begin(lambda failure: None)
            heard.append(lose(lambda: own.exchange("start", {})))
            dist.barrier()
        dist.barrier()
        end_waits(own, "1/start/1")
    return heard[0]


def end_waits(own: Processes, key: str) -> None:
    """Until twice the timeout a thread would wait in the store for this key, and keep its connection."""
    own._store.set(key, "{}")


def test_who_does_not_come_is_named(way: str, group_of: Callable[[int], Ranks]) -> None:
    """On that rank, too, as soon as it comes: it would wait for the others."""
    words = "rank 1 did not reach the start of call 1 within 20 s; make the same calls on every rank"
    for failure in group_of(3).run(come_late, way):
        assert failure.cause.startswith(words) and failure.rank == 1


def go_elsewhere(way: str) -> Failure:
    with control(way) as own, late_is(1 - dist.get_rank()) if way == "store" else nullcontext():
        own.publish = lambda failure: failure  # type: ignore[method-assign]  # both name the other one
        own.begin(lambda failure: None)
        found = lose(lambda: own.exchange("start" if dist.get_rank() else "end", {}))
        dist.barrier()
        end_waits(own, "1/end/1")
        end_waits(own, "1/start/0")
    return found


def test_who_is_elsewhere_is_named(way: str, group_of: Callable[[int], Ranks]) -> None:
    first, second = group_of(2).run(go_elsewhere, way)
    assert first.cause.startswith("rank 1 did not reach the end of call 1") and first.rank == 1
    assert second.cause.startswith("rank 0 did not reach the start of call 1") and second.rank == 0
    assert way == "store" or "it is at the start of call 1" in first.cause


def report(way: str, bells: bool) -> tuple[list[Failure], float, Failure | None, bool]:
    """Rank 1 fails in the second step; what every rank heard, and when."""
    heard: list[Failure] = []
    told = threading.Event()
    with control(way, bells=bells) as own:
        for step in range(2):
            own.begin(lambda failure: (heard.append(failure), told.set()))
            own.exchange("start", {})
            first = None
            if step == 1 and dist.get_rank() == 1:
                first = own.publish(Failure(1, "Boom", stage=3, action="3F0", microbatch=0))
                again = own.publish(Failure(1, "Boom again"))
                assert again == first
            if step == 1 and dist.get_rank() != 1:
                told.wait(PATIENCE)
            own.exchange("end", {})
            own.end()
        own.begin(heard.append)
        own.exchange("start", {})
        own.end()
        return heard, first, own._watcher.polls


def publishes_a_consequence() -> str:
    """Both ranks fail, rank 1 because of rank 0; its watcher has not looked at the store yet."""
    rank = dist.get_rank()
    with control("store") as own, mock.patch.object(own._watcher, "_look", lambda *args: True):
        own.begin(lambda failure: None)
        if rank == 1:
            dist.barrier()
        own.publish(Failure(rank, f"of rank {rank}", is_fatal=True))
        if rank == 0:
            dist.barrier()
        lost = own.lost()
        dist.barrier()
        own.end()
    return "" if lost is None else lost.cause


def test_a_rank_that_fails_because_of_another_waits_for_nobody_because_of_that_one() -> None:
    with ranks(2) as group:
        assert group.run(publishes_a_consequence) == ["of rank 0"] * 2


@pytest.mark.parametrize("bells", [True, False], ids=["bells", "polling"])
def test_a_failure_reaches_the_others_in_the_midst_of_a_step(bells: bool, group_of: Callable[[int], Ranks]) -> None:
    way = "board" if bells else "store"
    if bells:
        skip_without_native()
    answers = group_of(3).run(report, way, bells)
    failure = Failure(1, "Boom", stage=3, action="3F0", microbatch=0)
    assert answers[1][1] == failure
    for heard, _, _ in (answers[0], answers[2]):
        assert heard and set(heard) == {failure}


def rest(way: str, steps: int) -> tuple[int, int]:
    """How often the watcher looks in steps, and what the steps leave in the store."""
    looks = 0
    with control(way) as own:
        look, store = own._watcher.find_dead, own._watcher.store

        def counted(step: int) -> list[Failure]:
            nonlocal looks
            looks += 1
            return look(step)

        own._watcher.find_dead = counted  # type: ignore[method-assign]
        before = store.list_keys()  # the pipeline's own; num_keys counts those of torch, which come when they like
        for _ in range(steps):
            own.begin(lambda failure: pytest.fail(str(failure)))
            own.exchange("start", {})
            time.sleep(0.15)
            own.exchange("end", {})
            own.end()
        found = looks, len(set(store.list_keys()) - set(before))
        dist.barrier()  # a rank that closes wakes the others
    return found


def test_nothing_is_done_in_a_step_where_nothing_happens(group_of: Callable[[int], Ranks]) -> None:
    skip_without_native()
    assert group_of(2).run(rest, "board", 3) == [(0, 0), (0, 0)]


def die(way: str, hosts: str = "") -> tuple[Failure, list[Failure]]:
    """Rank 1 dies in a step; what the others heard while they computed, and what they find at its end."""
    heard: list[Failure] = []
    told = threading.Event()
    with on_hosts(hosts), control(way, bells=not hosts) as own:
        own.begin(lambda failure: (heard.append(failure), told.set()))
        own.exchange("start", {})
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        told.wait(PATIENCE)
        lost = lose(lambda: own.exchange("end", {}))
        own.end()
        own.begin(heard.append)
        return lose(lambda: own.exchange("start", {})), [lost, *heard]


def die_while_waited_for(way: str, hosts: str) -> Failure:
    """Rank 1 dies when all others wait for it already."""
    with on_hosts(hosts), control(way, bells=not hosts) as own:
        own.begin(lambda failure: None)
        if dist.get_rank() == 1:
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL)
        return lose(lambda: own.exchange("start", {}))


# The last two: a neighbour of the dead one tells the others; it has none, and only rank 0 has a connection to it.
@pytest.mark.parametrize(("way", "hosts"), [("board", ""), ("store", ""), ("store", "abb"), ("store", "abc")])
def test_a_death_wakes_who_waits(way: str, hosts: str) -> None:
    skip_without_native()
    with ranks(3) as group:
        group.start(die_while_waited_for, way, hosts)
        for found in group.results([0, 2]):
            assert found == Failure(1, "its process died", is_fatal=True)


# The last: rank 0 is alone on its host, and in no transfer with the one that dies; a neighbour of that one tells it.
@pytest.mark.parametrize(("way", "hosts"), [("board", ""), ("store", ""), ("store", "abb")])
def test_a_death_is_noticed(way: str, hosts: str) -> None:
    skip_without_native()
    with ranks(3) as group:
        group.start(die, way, hosts)
        for again, failures in group.results([0, 2]):
            assert again == Failure(1, "its process died", is_fatal=True)
            assert len(failures) > 1 and set(failures) == {again}


def leave_early(hosts: str) -> tuple[list[Failure], Failure | None]:
    """Rank 1 closes its end when it has taken part in a step, and the others go on: what they hear."""
    heard: list[Failure] = []
    lost = None
    with on_hosts(hosts), control("store", bells=False) as own:
        own.begin(heard.append)
        own.exchange("start", {})
        own.exchange("end", {})
        if dist.get_rank() != 1:
            time.sleep(0.3)  # it is still being read here what the one that is gone said
        own.end()
        early = list(heard)
        if dist.get_rank() != 1:
            own.begin(heard.append)
            lost = lose(lambda: own.exchange("start", {}))
    dist.barrier()
    end_waits(own, "2/start/1")
    return early, lost


def test_who_leaves_is_missed_in_the_next_step(group_of: Callable[[int], Ranks]) -> None:
    for rank, (early, reply) in enumerate(group_of(3).run(leave_early, "aba")):
        assert early == []
        assert rank == 1 or (reply == Failure(1, "its process ended or closed the pipeline", is_fatal=True))
