"""Ranks on several hosts: shared memory within each, process groups between them, in one step of one program."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fastpipe import Pipeline
from fastpipe.runtime import native
from fastpipe.runtime.transport import shared_memory as between
from tests.distributed.hosts import on_hosts
from tests.distributed.ranks import GroupOf, on_ranks, ranks
from tests.distributed.test_death import COUNT, SIZE, lose
from tests.distributed.test_failure import check, fail_and_recover
from tests.runtime.checks import same_bits, train_and_compare
from tests.runtime.faults import Scenario
from tests.runtime.models import CASES

pytestmark = pytest.mark.skipif(native.load() is None, reason=native.native_status())
TWO_AND_TWO = "aabb"


def compare(executors: list[str], hosts: str, schedule: str, case: str = "plain") -> str:
    """Runs on every rank, with an executor each."""
    executor = executors[dist.get_rank() % len(executors)]
    with on_hosts(hosts):
        return train_and_compare(case, schedule, 8, executor=executor).describe()


@pytest.mark.parametrize("schedule", ["zbv", "dualpipev", "dualpipe"])
def test_bits(schedule: str, group_of: GroupOf) -> None:
    for rank, text in enumerate(group_of(4).run(compare, ["native"], TWO_AND_TWO, schedule)):
        words = "mixed, lanes directed: shared memory within ranks (0, 1), (2, 3), four gloo groups elsewhere"
        assert f"{words} (they are not all on one host); rank {rank}: shared memory with {rank ^ 1}, groups" in text


# One rank is alone; a loop that crosses hosts at every step, whose next neighbour but one is near; two routes.
@pytest.mark.parametrize(
    ("hosts", "schedule", "case"),
    [("abbb", "zbv", "two_tensors"), ("abab", "interleaved_1f1b", "plain"), ("aaba", "dualpipe", "plain")],
)
def test_any_ranks_may_be_on_a_host(hosts: str, schedule: str, case: str, group_of: GroupOf) -> None:
    for text in group_of(4).run(compare, ["native"], hosts, schedule, case):
        assert "mixed, lanes directed" in text


def test_one_with_the_python_executor_shares_memory_with_nobody(group_of: GroupOf) -> None:
    executors = ["native", "native", "native", "python"]
    for text in group_of(4).run(compare, executors, "aaaa", "dualpipev"):
        assert (
            "mixed, lanes directed: shared memory within ranks (0, 1, 2), four gloo groups elsewhere (rank 3:" in text
        )


def choose(hosts: str, without: int, transport: str) -> str:
    """Runs on every rank; one cannot load the extension."""
    load = native.load
    if dist.get_rank() == without:
        native.load = lambda: None
    try:
        with on_hosts(hosts):
            pipe = train_and_compare("plain", "1f1b", 4, transport=transport)
        dist.barrier()  # it must not be gone while others still connect to it
        return pipe.transport.describe()
    except ValueError as error:
        return str(error)
    finally:
        native.load = load


@pytest.mark.parametrize(
    ("hosts", "without", "expected"),
    [
        ("abcd", -1, "process_group, lanes directed (no shared memory: they are not all on one host)"),
        ("aabb", 2, "mixed, lanes directed: shared memory within ranks (0, 1), four gloo groups elsewhere (rank 2:"),
        ("abbc", 2, "process_group, lanes directed (no shared memory: rank 2: native extension"),
    ],
)
def test_what_is_chosen(hosts: str, without: int, expected: str, group_of: GroupOf) -> None:
    assert all(text.startswith(expected) for text in group_of(4).run(choose, hosts, without, "auto"))


def test_auto_never_chooses_copy_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(between, "ProcessGroups", lambda member: "process groups")
    member: Any = SimpleNamespace(rank=0, size=2, device=torch.device("cuda"))
    offers: Any = pytest.fail  # nothing is offered to the others, either
    assert between.select_transport("auto", offers, member, 2) == "process groups"


def test_shared_memory_alone_is_refused(group_of: GroupOf) -> None:
    expected = "transport = 'shared_memory': they are not all on one host; use 'auto' or 'process_group'"
    assert group_of(4).run(choose, TWO_AND_TWO, -1, "shared_memory") == [expected] * 4


def test_copy_engines_of_cpus_are_refused(group_of: GroupOf) -> None:
    expected = (
        "transport = 'cuda_ipc': rank 0: the stages are on cpu, which has no copy engines; use 'auto' or 'process"
    )
    assert all(text.startswith(expected) for text in group_of(4).run(choose, "aaaa", -1, "cuda_ipc"))


def forbid(hosts: str) -> str:
    """Runs on every rank; rank 3 may not open what rank 2 offers."""
    runtime: Any = native.load()
    link = runtime.SharedMemoryLink

    class Forbidden(link):  # type: ignore[misc, valid-type]
        def connect(self, *_: Any) -> None:
            raise RuntimeError("shared memory: not permitted")

    if dist.get_rank() == 3:
        runtime.SharedMemoryLink = Forbidden
    try:
        with on_hosts(hosts):
            return train_and_compare("plain", "1f1b", 4).transport.describe()
    finally:
        runtime.SharedMemoryLink = link


def test_a_host_where_it_is_forbidden_does_without(group_of: GroupOf) -> None:
    two, one = group_of(4).run(forbid, TWO_AND_TWO), group_of(4).run(forbid, "aaaa")
    assert all(text.startswith("mixed, lanes directed: shared memory within ranks (0, 1), four gloo") for text in two)
    assert all("(no shared memory: rank 3: shared memory: not permitted)" in text for text in one)


@on_ranks(4)
def test_sizes_and_kinds_of_steps_change() -> None:
    """Training and evaluation by turns, with inputs of several sizes, large ones among them."""
    layers = [torch.nn.Linear(64, 64) for _ in range(2 * SIZE)]
    with on_hosts(TWO_AND_TWO):
        pipe = Pipeline(layers, "interleaved_1f1b", COUNT, CASES["plain"].loss_fn)
    for rows in (COUNT, 3000, 16, 6000):
        x = torch.randn(rows, 64, generator=torch.Generator().manual_seed(rows))
        losses = [call(x, target=x).loss for call in (pipe.step, pipe.step, pipe.eval_step, pipe.eval_step)]
        assert all(same_bits(losses[0], other) for other in losses[1:])


# --- failures


def fail_on_hosts(scenario: Scenario, hosts: str) -> dict[str, Any]:
    """Runs on every rank."""
    with on_hosts(hosts):
        return fail_and_recover(scenario, "auto")


# What is drained over each kind of link is in test_failure.py; here it is told from host to host.


# What is drained over each kind of link is in test_failure.py; here it is told from host to host.
@pytest.mark.parametrize(
    ("schedule", "stage", "backward", "step"),
    [("1f1b", 2, True, 0), ("dualpipev", 3, True, 2), ("interleaved_1f1b", 5, False, 0)],
)
def test_a_failure_is_known_on_all_hosts(
    schedule: str, stage: int, backward: bool, step: int, group_of: GroupOf
) -> None:
    scenario = Scenario(schedule, stage, 1, step, backward, "native")
    check(group_of(4).run(fail_on_hosts, scenario, TWO_AND_TWO), scenario)


# --- deaths


@pytest.mark.parametrize(
    ("victim", "at_call", "hosts"),
    [
        (1, 3, TWO_AND_TWO),  # in the first step
        (2, 2 * COUNT + 3, TWO_AND_TWO),
        # alone on its host, where nobody sees it die
        (0, 2 * COUNT + 3, "abbb"),
        (3, -1, "aaab"),  # between steps
    ],
)
def test_killed(victim: int, at_call: int, hosts: str, tmp_path: Path) -> None:
    """Everybody says so at once, on its own host and on the other one."""
    with ranks(SIZE) as group:
        lose(group, victim, at_call, tmp_path / "note", transport="auto", hosts=hosts)
