"""Shared memory between processes: the same bits, whoever runs what; nothing hangs, nothing is left, whoever dies."""

import os
import resource
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from fastpipe import Pipeline, StepError
from fastpipe.runtime import native
from tests.distributed.ranks import GroupOf, ranks
from tests.distributed.test_death import SIZE, lose
from tests.patience import PATIENCE
from tests.runtime.checks import rows_for
from tests.runtime.models import CASES

pytestmark = pytest.mark.skipif(native.load() is None, reason=native.native_status())
SHARED = {"FASTPIPE_TRANSPORT": "shared_memory"}


def choose(without: int, transport: str, executor: str = "auto") -> str:
    """Runs on every rank; one cannot load the extension."""
    if dist.get_rank() == without:
        native.load, keep = lambda: None, native.load
    try:
        layers = CASES["plain"].layers(2 * dist.get_world_size())
        pipe = Pipeline(layers, "1f1b", 4, CASES["plain"].loss_fn, executor=executor, transport=transport)
        dist.barrier()  # it must not be gone while others still connect to it
        return pipe.describe()
    except (StepError, ValueError) as error:
        return str(error)
    finally:
        if dist.get_rank() == without:
            native.load = keep


@pytest.mark.parametrize("without", [-1, 0, 2])
def test_all_choose_the_same(without: int, group_of: GroupOf) -> None:
    """Those that can share memory do; who insists that all do is told who cannot."""
    auto = group_of(4).run(choose, without, "auto")
    shared = group_of(4).run(choose, without, "shared_memory")
    chosen = insisted = "shared_memory, lanes directed, 4 processes of one host"
    if without >= 0:
        able = ", ".join(str(rank) for rank in range(4) if rank != without)
        chosen = f"mixed, lanes directed: shared memory within ranks ({able}), four gloo groups elsewhere"
        insisted = f"transport = 'shared_memory': rank {without}: native extension"
    assert all(chosen in text for text in auto)
    assert all(insisted in text for text in shared)


def test_the_python_executor_goes_over_process_groups(group_of: GroupOf) -> None:
    for text in group_of(4).run(choose, -1, "auto", "python"):
        assert "process_group, lanes directed (no shared memory: rank 0: executor = 'python')" in text
    for transport in ("shared_memory", "cuda_ipc", "process_group_coalesced"):
        for text in group_of(4).run(choose, -1, transport, "python"):
            assert f"executor = 'python': transport = '{transport}'" in text and "set executor='native', or" in text
    with ranks(2) as group:
        for text in group.run(choose, 1, "process_group_coalesced"):
            assert "transport = 'process_group_coalesced': native extension" in text and "use 'auto' or" in text


def test_the_variable_says_what_auto_means() -> None:
    for value, expected in (("process_group", "process_group, lanes"), ("nonsense", "FASTPIPE_TRANSPORT = 'nonsense'")):
        with ranks(2, environment={"FASTPIPE_TRANSPORT": value}) as group:
            assert all(expected in text for text in group.run(choose, -1, "auto"))


def disagree() -> None:
    """Runs on every rank; the first wants shared memory alone."""
    transport = "process_group" if dist.get_rank() else "shared_memory"
    said = r"^transport: .*shared_memory on ranks \[0\].*process_group on ranks \[1\]"
    with pytest.raises(ValueError, match=said):
        Pipeline(CASES["plain"].layers(4), "1f1b", 4, CASES["plain"].loss_fn, transport=transport, timeout=PATIENCE)


def test_all_are_told_of_one_who_chose_otherwise() -> None:
    with ranks(2) as group:
        group.run(disagree)


@pytest.mark.parametrize(("victim", "at_call"), [(0, 3), (2, 20)])
def test_killed(victim: int, at_call: int, tmp_path: Path) -> None:
    """In the first step, which announces, and in a later one."""
    with ranks(SIZE) as group:
        lose(group, victim, at_call, tmp_path / "note", transport="shared_memory")


def starve() -> None:
    """Runs on every rank: two steps, in the first of which one rank may open one file more."""
    case = CASES["plain"]
    pipe = Pipeline(case.layers(9), "1f1b", 8, case.loss_fn, transport="shared_memory", timeout=2 * PATIENCE)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if dist.get_rank() == 1:
        lowest = os.dup(0)  # free again at once, as are those above it
        os.close(lowest)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + 1, limits[1]))
    said = set()
    for _ in range(2):
        batch = case.batches(1, rows_for(8))[0]
        with pytest.raises((StepError, RuntimeError), match="Too many open files.*build a new one") as caught:
            pipe.step(*batch.args, target=batch.target)
        assert isinstance(caught.value, StepError) and caught.value.rank == 1
        said.add(str(caught.value))
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert len(said) == 1


def test_out_of_descriptors() -> None:
    """What cannot be opened cannot be received, then or later: all are told why, and that it is over."""
    with ranks(3) as group:
        group.run(starve)


def train(num_steps: int) -> None:
    """Runs on every rank."""
    case = CASES["plain"]
    pipe = Pipeline(case.layers(9), "1f1b", 8, case.loss_fn)
    batch = case.batches(1, rows_for(8))[0]
    for _ in range(num_steps):
        pipe.step(*batch.args, target=batch.target)


def test_nothing_is_left_when_all_are_killed() -> None:
    with ranks(4, environment=SHARED) as group:
        group.start(train, 100000)
        deadline = time.monotonic() + PATIENCE
        folders = [Path(f"/proc/{process.pid}") for process in group.processes]
        while not all("memfd:fastpipe" in (folder / "maps").read_text() for folder in folders):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        time.sleep(0.5)
        assert not set().union(*map(named, folders))
        group.kill()


def named(folder: Path) -> set[str]:
    """The shared memory and the Unix sockets of a process that have a name, and so would outlive it."""
    maps = (folder / "maps").read_text().splitlines()
    found = {line.split()[-1] for line in maps if "/dev/shm/" in line}
    opened = {os.readlink(path) for path in (folder / "fd").iterdir()}
    sockets = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    # the last column is the name: with an @ it is no file, and goes with the socket; pymp are the tests' own
    names = {row[7] for row in sockets if len(row) > 7 and f"socket:[{row[6]}]" in opened}
    return found | {name for name in names if not name.startswith("@") and "pymp-" not in name}
