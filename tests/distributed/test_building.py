"""A rank that is lost while pipelines are built: the others name it, whatever they wait for."""

import os
import re
import resource
import signal
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fastpipe import Pipeline, StepError
from fastpipe.runtime import construction, pipeline
from fastpipe.runtime.arguments import Arguments
from fastpipe.runtime.common import torch_private
from fastpipe.runtime.coordination.gather import SharedMemoryGather
from fastpipe.runtime.coordination.host import identify
from fastpipe.runtime.coordination.peers import LocalPeers
from fastpipe.runtime.transport import groups
from tests import scripts
from tests.conftest import skip_without_native
from tests.distributed.hosts import on_hosts
from tests.distributed.ranks import on_ranks, ranks
from tests.patience import PATIENCE
from tests.runtime.checks import train_and_compare
from tests.runtime.models import CASES

SIZE = 4
COUNT = 8
TIMEOUT = PATIENCE / 3

# A name, and what is called at that moment: the victim goes no further than that.
MOMENTS: dict[str, tuple[Any, str]] = {
    "began": (Arguments, "check"),
    "told who it is": (LocalPeers, "connect"),
    "connecting": (SharedMemoryGather, "connect"),
    "agreed on the plan": (pipeline, "agree_on_stages"),
    "agreed on the stages": (construction, "check_same_kinds"),
    "making groups": (groups, "make_group"),
    "joining": (construction, "make_copies"),
}


def build(schedule: str = "1f1b", **options: Any) -> Pipeline:
    """What all tests here build; both halves of a V exchange weights when they are joined."""
    case = CASES["plain"]
    return Pipeline(case.layers(2 * SIZE), schedule, COUNT, case.loss_fn, **{"timeout": TIMEOUT, **options})


def stop_at(moment: str, act: Callable[[], None], at_call: int) -> None:
    """From now on this process does something instead of its call with that number."""
    owner, name = MOMENTS[moment]
    real = getattr(owner, name)
    calls = 0

    def hooked(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == at_call:
            setattr(owner, name, real)
            act()
        return real(*args, **kwargs)

    setattr(owner, name, hooked)


def lose_one(victim: int, moment: str, how: str, at_call: int = 1, hosts: str = "", **options: Any) -> dict[str, Any]:
    """Runs on every rank: what it raises."""

    def act() -> None:
        if how != "raised":
            os.kill(os.getpid(), signal.SIGKILL if how == "killed" else signal.SIGSTOP)
        raise ValueError("on purpose")

    if dist.get_rank() == victim:
        stop_at(moment, act, at_call)
    try:
        with on_hosts(hosts):
            build(**options)
    except Exception as error:
        return {"text": f"{type(error).__name__}: {error}", "rank": getattr(error, "rank", None)}
    raise AssertionError("it was built")


def check(answers: list[dict[str, Any]], victim: int, cause: str) -> None:
    """Every survivor named the victim and what became of it."""
    for answer in answers:
        assert answer["rank"] == victim, answer
        assert answer["text"] == f"StepError: rank {victim} could not build the pipeline: {cause}", answer


def others(victim: int) -> list[int]:
    return [rank for rank in range(SIZE) if rank != victim]


def rebuild(survivors: list[int]) -> None:
    """Those that live make a group of their own and train."""
    fresh = dist.new_group(survivors, backend="gloo", use_local_synchronization=True)
    train_and_compare("plain", "1f1b", 4, num_ranks=len(survivors), group=fresh)


@pytest.mark.parametrize(
    ("moment", "how", "options"),
    [
        ("began", "raised", {"transport": "auto"}),
        ("told who it is", "killed", {"transport": "auto", "hosts": "aabb"}),
        ("connecting", "killed", {"transport": "process_group"}),
        ("agreed on the plan", "killed", {"transport": "auto"}),
        ("agreed on the stages", "raised", {"transport": "process_group"}),
        ("making groups", "raised", {"transport": "auto", "schedule": "dualpipe"}),
        ("making groups", "killed", {"transport": "auto", "hosts": "aabb", "at_call": 2}),
        ("joining", "killed", {"transport": "process_group", "schedule": "dualpipe"}),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(map(str, value.values())),
)
def test_lost(moment: str, how: str, options: dict[str, Any]) -> None:
    if options["transport"] == "auto" or moment == "connecting":
        skip_without_native()
    victim = 2
    with ranks(SIZE) as started:
        started.start(lose_one, victim, moment, how, **options)
        alive = others(victim)
        if how == "killed":
            check(started.results(alive), victim, "its process died")
        else:
            answers = started.results()
            assert answers.pop(victim)["text"] == "ValueError: on purpose"
            check(answers, victim, "ValueError: on purpose")
            alive = list(range(SIZE))
        started.start(rebuild, alive)
        started.results(alive)


@pytest.mark.parametrize(("moment", "at_call"), [("connecting", 1), ("making groups", 3)])
def test_stopped(moment: str, at_call: int) -> None:
    """Nobody knows that it will not come: the others wait until the timeout."""
    skip_without_native()
    with ranks(SIZE) as started:
        options = {"transport": "process_group", "timeout": 10.0}
        started.start(lose_one, 2, moment, "stopped", at_call, **options)
        for answer in started.results(others(2)):
            assert answer["text"].startswith("StepError: rank 2 could not build the pipeline: rank 2"), answer


def lose_one_in_a_step(victim: int) -> dict[str, Any]:
    """Runs on every rank: the victim ends when groups for pairs of ranks are made, which is in the first step."""

    def act() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    pipe = build(transport="process_group_coalesced")
    if dist.get_rank() == victim:
        stop_at("making groups", act, 1)
    batch = CASES["plain"].batches(1, 2 * COUNT)[0]
    with pytest.raises(StepError) as caught:
        pipe.step(*batch.args, target=batch.target)
    return {"text": str(caught.value), "rank": caught.value.rank}


def test_killed_while_connections_are_made_in_a_step() -> None:
    with ranks(SIZE) as started:
        started.start(lose_one_in_a_step, 2)
        for answer in started.results(others(2)):
            assert answer["rank"] == 2 and "its process died" in answer["text"], answer


def test_killed_with_the_store() -> None:
    """Started by hand, rank 0 holds the store: with it the others can tell each other nothing."""
    with ranks(SIZE, host="first") as started:
        started.start(lose_one, 0, "making groups", "killed", transport="process_group")
        check(started.results(others(0)), 0, "its process died")


def build_twice(victim: int) -> dict[str, Any]:
    """Runs on every rank: the victim ends between two pipelines."""
    pipe = build()
    dist.barrier()
    if dist.get_rank() == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(StepError) as caught:
        build()
    assert pipe.num_ranks == SIZE
    return {"text": f"StepError: {caught.value}", "rank": caught.value.rank}


def test_who_has_built_one_and_ends_is_missed_at_the_next() -> None:
    with ranks(SIZE) as started:
        started.start(build_twice, 1)
        check(started.results(others(1)), 1, "its process died")


@pytest.mark.parametrize("moment", ["began", "making groups"])
@on_ranks(SIZE)
def test_who_is_slow_is_waited_for(moment: str) -> None:
    """One takes its time, for much longer than it takes to look for it."""
    if dist.get_rank() == 1:
        stop_at(moment, lambda: time.sleep(1.5), 1)
    batch = CASES["plain"].batches(1, 2 * COUNT)[0]
    build(transport="process_group").step(*batch.args, target=batch.target)


@on_ranks(SIZE)
def test_what_all_do_wrong_is_everybodys_own_error() -> None:
    with pytest.raises(ValueError, match="^executor = 'fastest'"):
        build(executor="fastest")


def test_another_process_with_a_number_that_was_free_again() -> None:
    local_peers = LocalPeers()
    try:
        mine = identify()
        local_peers.watch(1, mine)
        local_peers.watch(2, mine | {"started": "1"})
        local_peers.watch(3, mine | {"host": "elsewhere", "started": "1"})
        assert local_peers.ended() == {2} and set(local_peers.processes) == {1}
    finally:
        local_peers.close()


def test_who_parts_is_heard_whatever_is_rung_before_and_by_whom() -> None:
    one, other = LocalPeers(), LocalPeers()
    try:
        assert other.connect(1, [one.identity(), other.identity()]) == [0]
        for _ in range(100):
            other.wake(1)
        one.drain()
        other._send((one.wakeup.getsockname(), "guessed"), "3 4")
        other.report_close(1, 12)
        one.drain()
        assert one.closed == {1: 12}
    finally:
        one.close()
        other.close()


def test_no_process_is_taken_for_ended_because_its_age_is_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mount of /proc may hide other users' processes."""
    local_peers = LocalPeers()
    mine = identify()
    monkeypatch.setattr("fastpipe.runtime.common.torch_private.start_of_process", lambda pid: "")
    try:
        local_peers.watch(1, mine)
        assert not local_peers.ended()
    finally:
        local_peers.close()


@on_ranks(SIZE)
def test_who_is_refused_has_said_who_it_is() -> None:
    """One that is not in the group is told so, and can be seen by those who are."""
    fresh = dist.new_group([0, 1], backend="gloo")
    if dist.get_rank() < 2:
        assert groups.membership(fresh, groups.CPU).size == 2
        dist.barrier()
        return
    with pytest.raises((TypeError, ValueError), match="group"):
        groups.membership(fresh, groups.CPU)
    dist.barrier()
    own = groups.membership(None, groups.CPU)
    assert all(own.identity(rank) is not None for rank in range(SIZE))


def build_while_the_store_is_stopped(note: str) -> str:
    """Runs on every rank: rank 0, which holds the store, is stopped before it builds."""
    if dist.get_rank() == 0:
        Path(note).touch()
        os.kill(os.getpid(), signal.SIGSTOP)
    while not Path(note).exists():
        time.sleep(0.01)
    time.sleep(0.5)
    with pytest.raises((StepError, RuntimeError)) as caught:
        build(timeout=2.0)
    return str(caught.value)


def test_a_store_that_does_not_answer_is_an_error_at_the_timeout(tmp_path: Path) -> None:
    with ranks(2, host="first") as started:
        started.start(build_while_the_store_is_stopped, str(tmp_path / "note"))
        assert "did not answer within 2 s" in started.results([1])[0]


_SCRIPT = """
import os, sys, torch
os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
os.environ.update(dict(one.split("=") for one in sys.argv[2:]))
from fastpipe import Pipeline
try:
    Pipeline([torch.nn.Linear(2, 2)] * 2, "1f1b", 2, torch.nn.MSELoss(), timeout=float(sys.argv[1]))
except Exception as error:
    print(f"{type(error).__name__}: {error}")
"""


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        (
            "MASTER_PORT=1",
            "StepError: rank 1 could not build .* no connection to MASTER_ADDR = '127.0.0.1', MASTER_PORT",
        ),
        ("MASTER_ADDR=no.such.host.invalid", "StepError: .* MASTER_ADDR = 'no.such.host.invalid', .* has no address"),
        ("MASTER_PORT=x", "ValueError: MASTER_PORT = 'x': set it in the environment to a whole number from 0 to 65535"),
        ("RANK=2", "ValueError: RANK = '2': set it in the environment to a whole number from 0 to 1"),
        ("WORLD_SIZE=two", "ValueError: WORLD_SIZE = 'two': set it in the environment to a whole number of 1 or more"),
        ("MASTER_ADDR=", "ValueError: MASTER_ADDR is not set: set it to the address of the host of rank 0"),
    ],
)
def test_a_process_that_cannot_join_says_what_to_set(variables: str, says: str, tmp_path: Path) -> None:
    """At the timeout; torch would wait for half an hour."""
    script = tmp_path / "script.py"
    script.write_text(_SCRIPT)
    common = ["RANK=1", "WORLD_SIZE=2", "MASTER_ADDR=127.0.0.1", "MASTER_PORT=1"]
    assert re.search(says, said := scripts.run(script, "2", *common, variables)), said


def test_processes_of_different_numbers_name_each_other(tmp_path: Path) -> None:
    """Gloo would look for the third one, and not say who wants it."""
    script = tmp_path / "script.py"
    script.write_text(_SCRIPT)
    with socket.create_server(("127.0.0.1", 0)) as free:
        common = ["MASTER_ADDR=127.0.0.1", f"MASTER_PORT={free.getsockname()[1]}"]
    own = [["RANK=0", "WORLD_SIZE=2"], ["RANK=1", "WORLD_SIZE=3"]]
    with ThreadPoolExecutor(2) as threads:
        said = list(threads.map(lambda variables: scripts.run(script, str(PATIENCE), *common, *variables), own))
    assert "rank 1 could not build the pipeline: WORLD_SIZE = 3 on rank 1 and 2 on rank 0" in said[0]
    assert "rank 0 could not build the pipeline: WORLD_SIZE = 2 on rank 0 and 3 on rank 1" in said[1]


def test_a_process_that_does_not_start_is_named(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(_SCRIPT)
    with socket.create_server(("127.0.0.1", 0)) as free:
        common = ["WORLD_SIZE=3", "MASTER_ADDR=127.0.0.1", f"MASTER_PORT={free.getsockname()[1]}"]
    with ThreadPoolExecutor(2) as threads:
        said = list(threads.map(lambda rank: scripts.run(script, "10", *common, f"RANK={rank}"), range(2)))
    assert all("rank 2 did not start within 10 s" in text for text in said), said


def test_a_process_of_another_job_disturbs_nobody(tmp_path: Path) -> None:
    """It is refused before it is taken for one of the processes that are waited for, under their port."""
    script = tmp_path / "script.py"
    script.write_text(_SCRIPT)
    with socket.create_server(("127.0.0.1", 0)) as free:
        common = ["WORLD_SIZE=2", "MASTER_ADDR=127.0.0.1", f"MASTER_PORT={free.getsockname()[1]}"]

    def start(job: str, rank: int) -> str:
        return scripts.run(script, str(PATIENCE), *common, f"TORCHELASTIC_RUN_ID={job}", f"RANK={rank}")

    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(start, "mine", 0)
        assert "ValueError" in (said := start("theirs", 1)) and "of the job TORCHELASTIC_RUN_ID=theirs" in said, said
        assert (start("mine", 1), first.result()) == ("", "")


def test_a_process_that_ends_while_the_group_is_made_is_an_error_at_the_timeout(tmp_path: Path) -> None:
    """torch's own names a key of its store."""
    script = tmp_path / "script.py"
    ends = 'if os.environ["RANK"] == "1":\n    torch.distributed.init_process_group = lambda *_, **__: os._exit(0)\n'
    script.write_text(_SCRIPT.replace("try:", f"{ends}try:"))
    with socket.create_server(("127.0.0.1", 0)) as free:
        common = ["WORLD_SIZE=2", "MASTER_ADDR=127.0.0.1", f"MASTER_PORT={free.getsockname()[1]}"]
    with ThreadPoolExecutor(2) as threads:
        said = list(threads.map(lambda rank: scripts.run(script, "2", *common, f"RANK={rank}"), range(2)))
    assert "StepError" in said[0] and "the process group could not be made" in said[0], said


@on_ranks(2)
def test_groups_leave_no_keys_in_the_store() -> None:
    def keys() -> set[str]:
        return {str(key) for key in torch_private.default_store().list_keys() if "/groups/" in str(key)}

    case, before = CASES["plain"], keys()
    dist.barrier()
    Pipeline(case.layers(2), "1f1b", COUNT, case.loss_fn, transport="process_group")
    dist.barrier()
    assert keys() <= before


def test_ranks_that_connect_late_need_no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch then connects a pair of ranks at its first message; of 6 ranks a barrier leaves out 0 and 3."""
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", "1")
    store, size = dist.HashStore(), 6

    def send(rank: int) -> Any:
        member = groups.Membership(rank, ranks=tuple(range(size)), timeout=PATIENCE)
        gloo = groups._gloo(member, store)
        tensor = torch.full((1,), float(rank))
        if rank in (0, 3):
            (gloo.recv([tensor], 0, 0) if rank else gloo.send([tensor], 3, 0)).wait()
        return gloo, tensor  # until all are done: its end closes the connections

    with ThreadPoolExecutor(size) as threads:
        found = [tensor.item() for _, tensor in list(threads.map(send, range(size)))]
    assert found == [0, 1, 2, 0, 4, 5] and not store.num_keys()


def build_with_few_descriptors(free: int, transport: str) -> str:
    """Runs on every rank; rank 1 may open so many files more."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if dist.get_rank() == 1:
        count = len(os.listdir("/proc/self/fd")) - 1  # without that of the folder
        resource.setrlimit(resource.RLIMIT_NOFILE, (count + free, limits[1]))
    try:
        with pytest.raises((StepError, OSError)) as raised:
            Pipeline(CASES["plain"].layers(2), "1f1b", 2, CASES["plain"].loss_fn, transport=transport)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    is_own = dist.get_rank() == 1
    assert isinstance(raised.value, OSError if is_own else StepError) and (is_own or raised.value.rank == 1)
    return str(raised.value)


@pytest.mark.parametrize(("free", "transport"), [(0, "auto"), (3, "auto"), (17, "process_group")])
def test_a_rank_with_few_descriptors_says_so(free: int, transport: str) -> None:
    """Without a check its connections are attempted until the timeout, and a thread of Gloo ends the process."""
    with ranks(2) as group:
        for text in group.run(build_with_few_descriptors, free, transport):
            assert re.search(r"Too many open files: the limit of this process is \d+, .*\(ulimit -n\)", text), text
