"""What time and neighbours do to a run: ranks that stop for a while, more ranks than cores, hundreds of steps."""

import contextlib
import gc
import itertools
import os
import random
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fastpipe import Pipeline
from tests.conftest import WAYS, skip_without_native
from tests.distributed.hosts import on_hosts
from tests.distributed.ranks import GroupOf
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
    ("executor", "transport", "numbers"),
    [("native", "shared_memory", ALL), ("native", "process_group", ON_ONE_HOST)],
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


def held() -> tuple[list[int], int]:
    """Counts of what must stay the same: descriptors, threads, mappings of shared memory; and resident kilobytes."""
    gc.collect()
    maps = Path("/proc/self/maps").read_text().count("memfd:fastpipe")
    resident = int(Path("/proc/self/status").read_text().partition("VmRSS:")[2].split()[0])
    return [len(os.listdir("/proc/self/fd")), threading.active_count(), maps], resident


def fewest_threads(expected: int, seconds: float) -> int:
    """Of this process, the system's own among them, in some time: one that has ended is seen a little longer."""
    fewest = len(os.listdir("/proc/self/task"))
    deadline = time.monotonic() + seconds
    while fewest > expected and time.monotonic() < deadline:
        time.sleep(0.01)
        fewest = min(fewest, len(os.listdir("/proc/self/task")))
    return fewest


def dropped(executor: str, transport: str) -> tuple[list[int], list[int]]:
    """Runs on every rank: its threads, and its descriptors, as pipelines come and go; one of them fails."""
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
    return threads, files


@pytest.mark.parametrize(("executor", "transport"), WAYS, indirect=["executor"])
def test_pipelines_that_are_dropped_leave_no_threads(transport: str, executor: str, group_of: GroupOf) -> None:
    """Those of a process group look for messages a hundred times a second, each."""
    for threads, files in group_of(2).run(dropped, executor, transport):
        assert max(threads) == threads[0] and max(files) == files[0]


def many_steps(executor: str, transport: str, num_steps: int) -> list[tuple[list[int], int]]:
    """Runs on every rank, whose process may have trained before: what it holds after some steps, and after all."""
    layers: list[torch.nn.Module] = [torch.nn.Linear(64, 64) for _ in range(4)]
    pipe = Pipeline(layers, "1f1b", 2, CASES["plain"].loss_fn, executor=executor, transport=transport, num_ranks=2)
    x, y = torch.randn(64, 64), torch.randn(64, 64)
    found = []
    for step in range(num_steps):
        pipe.step(x, target=y)
        if step in (num_steps // 5, num_steps - 1):
            found.append(held())
    return found


def many_pipelines(executor: str, transport: str, number: int) -> list[tuple[list[int], int]]:
    """Runs on every rank: what it holds after some pipelines have come and gone, each after a step, and after all."""
    x, y = torch.randn(64, 64), torch.randn(64, 64)
    found = []
    for count in range(number):
        layers: list[torch.nn.Module] = [torch.nn.Linear(64, 64) for _ in range(4)]
        pipe = Pipeline(layers, "1f1b", 2, CASES["plain"].loss_fn, executor=executor, transport=transport, num_ranks=2)
        pipe.step(x, target=y)
        del pipe, layers
        if count in (number // 5, number - 1):
            gc.collect()
            fewest_threads(found[0][0][1] if found else 0, 1.0)
            found.append(held())
    return found


SOAK = pytest.param(20_000, marks=[pytest.mark.nightly, pytest.mark.timeout(3600)])


@pytest.mark.parametrize("num_steps", [250, SOAK])
@pytest.mark.parametrize(("executor", "transport"), WAYS)
def test_nothing_grows_in_many_steps(executor: str, transport: str, num_steps: int, group_of: GroupOf) -> None:
    """One microbatch's activations kept at every step would be over 6 MB. What earlier tests left may go meanwhile."""
    skip_without_native()
    for (counts, before), (counts_after, after) in group_of(2).run(
        many_steps, executor, transport, num_steps, timeout=3000
    ):
        grown = [now - then for then, now in zip(counts, counts_after, strict=True)]
        assert max(grown) <= 0, f"descriptors, threads, mappings of shared memory: {grown} more than {counts}"
        assert after - before < 3000


@pytest.mark.parametrize("number", [10, pytest.param(500, marks=[pytest.mark.nightly, pytest.mark.timeout(3600)])])
@pytest.mark.parametrize(("executor", "transport"), WAYS)
def test_nothing_grows_in_many_constructions(executor: str, transport: str, number: int, group_of: GroupOf) -> None:
    skip_without_native()
    for (counts, before), (counts_after, after) in group_of(2).run(
        many_pipelines, executor, transport, number, timeout=3000
    ):
        grown = [now - then for then, now in zip(counts, counts_after, strict=True)]
        assert max(grown) <= 0, f"descriptors, threads, mappings of shared memory: {grown} more than {counts}"
        assert after - before < 3000 + 20 * number


def test_a_layer_that_keeps_its_exception_keeps_no_pipeline(executor: str, group_of: GroupOf) -> None:
    for keeping in (1, 2):
        assert group_of(2).run(leaves_nothing_of_a_kept_exception, executor, None, keeping) == [True, True]
