"""What time and neighbours do to a run: ranks that stop for a while, more ranks than cores, thousands of steps.

python -m tests.distributed.test_endurance    writes the table in docs/reliability.md, of 20,000 steps and 500 pipelines
"""

import contextlib
import gc
import itertools
import os
import random
import signal
import statistics
import threading
import time
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from fastpipe import Pipeline
from tests.conftest import WAYS, skip_without_native
from tests.distributed.hosts import on_hosts
from tests.distributed.page import write_block
from tests.distributed.ranks import GroupOf, on_ranks, ranks
from tests.patience import PATIENCE
from tests.runtime.checks import rows_for, train_and_compare
from tests.runtime.models import CASES
from tests.runtime.test_leaks import Raising, leaves_nothing_of_a_kept_exception

MOST = 8
HOSTS = "abbaabba"
# Pipelines of every size from one to eight, side by side where two are named: whole backwards, split ones, pairs with a
# helper thread; the last ones over two hosts, in shared memory and over groups.
SIDE_BY_SIDE = [
    ((8,), "1f1b", ""),
    ((1, 7), "zb_h1", ""),
    ((2, 6), "dualpipev", ""),
    ((3, 5), "zb_h1", HOSTS),
    ((4, 4), "dualpipev", HOSTS),
]
# Process groups know no hosts, so the last two would be the first three again.
ALL, ON_ONE_HOST = (0, 1, 2, 3, 4), (0, 1, 2)


def in_sizes(numbers: Sequence[int], executor: str, transport: str) -> list[tuple[int, str]]:
    """Runs on every rank; each pipeline is compared with the unsplit model at every step: its size, its transport."""
    found = []
    for sizes, schedule, hosts in [SIDE_BY_SIDE[number] for number in numbers]:
        starts = itertools.accumulate(sizes, initial=0)
        groups = [dist.new_group(range(start, start + size)) for start, size in zip(starts, sizes, strict=False)]
        group = next(group for group in groups if dist.get_rank() in dist.get_process_group_ranks(group))
        size = dist.get_world_size(group)
        options: dict[str, Any] = {"num_ranks": size, "group": group, "executor": executor, "overlap": "always"}
        if size > 1:
            options["transport"] = "auto" if hosts and transport == "shared_memory" else transport
        count = 2 * size if schedule == "dualpipev" else size + 1
        with on_hosts(hosts):
            found.append((size, train_and_compare("plain", schedule, count, **options).transport.kind))
        for group in groups:
            if group is not dist.GroupMember.NON_GROUP_MEMBER:
                dist.destroy_process_group(group)
    return found


@pytest.mark.parametrize(
    ("executor", "transport", "numbers"), [("native", "shared_memory", ALL), ("native", "process_group", ON_ONE_HOST)]
)
def test_one_to_eight_ranks_paused_and_resumed_at_random(
    executor: str, transport: str, numbers: Sequence[int], group_of: GroupOf
) -> None:
    skip_without_native()
    group = group_of(MOST)
    group.start(in_sizes, numbers, executor, transport)
    choice = random.Random(3)
    deadline = time.monotonic() + 60
    while not group.answered() and time.monotonic() < deadline:
        rank = choice.randrange(MOST)
        group.signal(rank, signal.SIGSTOP)
        time.sleep(choice.random() * 0.02)
        group.signal(rank, signal.SIGCONT)
        time.sleep(choice.random() * 0.02)
    kinds = dict(pair for found in group.results() for pair in found)
    assert set(kinds) == {size for number in numbers for size in SIDE_BY_SIDE[number][0]}
    mixed = transport == "shared_memory"
    assert all(kinds[size] == ("mixed" if mixed else transport) for size in (3, 5) if size in kinds)


class Held(NamedTuple):
    """What a process holds: counts, and resident kilobytes; and the median of the seconds of some steps before."""

    descriptors: int
    threads: int
    shared_mappings: int
    resident: int
    seconds: float

    @classmethod
    def now(cls, seconds: Sequence[float]) -> "Held":
        gc.collect()
        shared = Path("/proc/self/maps").read_text().count("memfd:fastpipe")
        resident = int(Path("/proc/self/status").read_text().partition("VmRSS:")[2].split()[0])
        descriptors = len(os.listdir("/proc/self/fd"))
        return cls(descriptors, threading.active_count(), shared, resident, statistics.median(seconds))

    def grown(self, now: "Held") -> list[int]:
        """The differences of the counts."""
        return [then - before for before, then in zip(self[:3], now[:3], strict=True)]


def fewest_threads(expected: int, seconds: float) -> int:
    """Of this process, the system's own among them, in some time: one that has ended is seen a little longer."""
    fewest = len(os.listdir("/proc/self/task"))
    deadline = time.monotonic() + seconds
    while fewest > expected and time.monotonic() < deadline:
        time.sleep(0.01)
        fewest = min(fewest, len(os.listdir("/proc/self/task")))
    return fewest


@pytest.mark.parametrize(("executor", "transport"), WAYS, indirect=["executor"])
@on_ranks(2)
def test_pipelines_that_are_dropped_leave_no_threads(transport: str, executor: str) -> None:
    """Nor descriptors; one of them fails. A process group's threads look for messages a hundred times a second."""
    gc.collect()
    gc.disable()
    case, threads, files = CASES["plain"], [], []
    batch = case.batches(1, rows_for(2))[0]
    for number in range(4):
        layers = case.layers(2)
        if number == 1:
            layers[1] = Raising()
        pipe = Pipeline(layers, "1f1b", 2, case.loss_fn, executor=executor, transport=transport)
        with contextlib.suppress(RuntimeError):
            pipe.step(*batch.args, target=batch.target)
        del pipe, layers
        threads.append(fewest_threads(threads[0], PATIENCE) if threads else fewest_threads(0, 1.0))
        gc.collect()  # descriptors may be in cycles
        files.append(len(os.listdir("/proc/self/fd")))
    gc.enable()
    assert max(threads) == threads[0] and max(files) == files[0], (threads, files)


def endure(what: str, executor: str, transport: str, number: int) -> list[Held]:
    """Runs on every rank: what it holds after some of many steps, or pipelines with a step each, and after all.

    Its process may have trained before.
    """
    torch.manual_seed(0)
    x, y = torch.randn(64, 64), torch.randn(64, 64)

    def made() -> Pipeline:
        layers: list[torch.nn.Module] = [torch.nn.Linear(64, 64) for _ in range(4)]
        options: dict[str, Any] = {"executor": executor, "transport": transport, "num_ranks": 2}
        return Pipeline(layers, "1f1b", 2, CASES["plain"].loss_fn, **options)

    pipe = made() if what == "steps" else None
    found, seconds, some = [], array("d", bytes(8 * number)), number // 5
    for count in range(number):
        start = time.perf_counter()
        (pipe or made()).step(x, target=y)
        seconds[count] = time.perf_counter() - start
        if count in (2 * some, number - 1):
            if pipe is None:
                gc.collect()
                fewest_threads(found[0].threads if found else 0, 1.0)
            found.append(Held.now(seconds[count - some : count]))
    return found


NIGHTLY = [pytest.mark.nightly, pytest.mark.timeout(3600)]


@pytest.mark.parametrize(
    ("what", "number", "kilobytes"),
    [
        ("steps", 250, 3000),
        pytest.param("steps", 20_000, 3000, marks=NIGHTLY),
        ("pipelines", 10, 3200),
        pytest.param("pipelines", 500, 13_000, marks=NIGHTLY),
    ],
)
@pytest.mark.parametrize(("executor", "transport"), WAYS)
def test_nothing_grows(
    executor: str, transport: str, what: str, number: int, kilobytes: int, group_of: GroupOf
) -> None:
    """One microbatch's activations kept at every step would be over 6 MB. What earlier tests left may go meanwhile."""
    skip_without_native()
    for before, after in group_of(2).run(endure, what, executor, transport, number, timeout=3000):
        assert max(before.grown(after)) <= 0, (before, after)
        assert after.resident - before.resident < kilobytes


def test_a_layer_that_keeps_its_exception_keeps_no_pipeline(executor: str, group_of: GroupOf) -> None:
    for keeping in (1, 2):
        assert group_of(2).run(leaves_nothing_of_a_kept_exception, executor, None, keeping) == [True, True]


def write_table() -> None:
    """Run what is long; write what two processes held, and how long their steps took, in the middle and at the end."""
    lines = [
        "| two processes, executor and transport | descriptors, threads, mappings | resident memory | "
        "median of a fifth of them, before and at the end |",
        "|---|---|---|---|",
    ]
    for what, number in (("steps", 20_000), ("pipelines, one step each", 500)):
        for executor, transport in WAYS:
            with ranks(2) as group:
                kind = what.partition(",")[0]
                (before, after), *_ = group.run(endure, kind, executor, transport, number, timeout=3000)
            lines.append(
                f"| {number:,} {what}: {executor}, {transport} | {' '.join(f'{n:+d}' for n in before.grown(after))} | "
                f"{(after.resident - before.resident) / 1024:+.1f} MiB | "
                f"{before.seconds * 1e3:.2f} ms, {after.seconds * 1e3:.2f} ms |"
            )
            print(lines[-1], flush=True)
    write_block("endurance", "\n".join(lines) + "\n")


if __name__ == "__main__":
    from tests.distributed import test_endurance  # ranks find its functions by this name

    test_endurance.write_table()
