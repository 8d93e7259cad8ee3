"""Copies in memory of several processes: on the own host and on others, fetched by whoever lost its host."""

import contextlib
import errno
import os
import re
import shutil
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from fastpipe import MemoryCheckpoint, Pipeline, save_checkpoint
from fastpipe.runtime import memory_checkpoint
from fastpipe.runtime.common import packing
from fastpipe.runtime.memory_checkpoint import _holders
from tests.distributed.hosts import on_hosts
from tests.distributed.meshes import mesh_and_replica
from tests.distributed.ranks import GroupOf, ranks
from tests.distributed.test_sharded_training import sharded
from tests.distributed.test_sharded_training import train as train_sharded
from tests.distributed.test_step import caught
from tests.patience import PATIENCE
from tests.runtime.test_checkpoint import adamw, all_same, fresh, pipeline, train, uninterrupted
from tests.runtime.test_memory_checkpoint import spoil


def test_copies_are_on_as_many_hosts() -> None:
    assert _holders("aabb", 1) == [[], [], [], []]
    assert _holders("aabb", 2) == [[2], [3], [0], [1]]
    assert _holders("aab", 2) == [[2], [2], [0]]
    assert _holders("abc", 3) == [[1, 2], [2, 0], [0, 1]]
    assert _holders("ab", 5) == [[1], [0]]


def save(folder: str, hosts: str, steps: int, disk: str = "") -> None:
    """Train and save each step, at last perhaps on disk."""
    with on_hosts(hosts):
        pipe = pipeline("1f1b", None)
        optimizer = adamw(pipe)
        memory = MemoryCheckpoint(pipe, optimizer, keep=2, name="test", folder=folder)
        for step in range(steps):
            train(pipe, optimizer, range(step, step + 1))
            memory.save({"step": step + 1})
        memory._finish()
        if disk:
            save_checkpoint(disk, pipe, optimizer, extra={"step": steps})


def go_on(
    folder: str, hosts: str, steps: int, disk: str | None = None, schedule: str = "1f1b"
) -> tuple[Any, list[torch.Tensor]]:
    """Load into a pipeline with other weights, train on, and close: what was loaded, and the losses."""
    with on_hosts(hosts):
        pipe = pipeline(schedule, None, fresh())
        optimizer = adamw(pipe)
        memory = MemoryCheckpoint(pipe, optimizer, keep=2, name="test", folder=folder)
        extra = memory.load(disk)
        start = extra["step"] if extra else 0
        losses = train(pipe, optimizer, range(start, steps))
        memory.save({"step": steps})
        memory.close()
        return extra, losses


def save_two(folder: str) -> None:
    """Copies of two pipelines with other weights; those of the first one are sent late on rank 1."""
    with on_hosts("ab"):
        pipes = [pipeline("1f1b", None), pipeline("1f1b", None, fresh())]
        first, second = (MemoryCheckpoint(pipe, keep=2, name=str(i), folder=folder) for i, pipe in enumerate(pipes))
        second_has_sent = threading.Event()

        def late(self: MemoryCheckpoint, generation: int) -> None:
            if self is first and dist.get_rank() == 1:
                assert second_has_sent.wait(PATIENCE)
            exchange(self, generation)

        exchange = MemoryCheckpoint._exchange
        with mock.patch.object(MemoryCheckpoint, "_exchange", late):
            first.save()
            second.save()
            second._finish()
            second_has_sent.set()
            first._finish()


def test_two_that_send_at_the_same_time_keep_their_own_copies(group_of: GroupOf, tmp_path: Path) -> None:
    group_of(2).run(save_two, str(tmp_path))
    contents: dict[tuple[str, str], list[bytes]] = {}
    for path in tmp_path.glob("*/*-*"):
        contents.setdefault((path.parent.name.split("-")[-1], path.name), []).append(path.read_bytes())
    assert len(contents) == 4  # of two pipelines, two ranks
    assert all(len(copies) == 2 and copies[0] == copies[1] for copies in contents.values())


def folders(folder: Path) -> list[Path]:
    return sorted(folder.glob("fastpipe-*"))


@pytest.mark.parametrize(
    "lost",
    [
        "host",
        pytest.param("last copy of rank 0", marks=pytest.mark.nightly),
        pytest.param("sum of rank 1", marks=pytest.mark.nightly),
    ],
)
def test_what_is_lost_comes_from_the_other_host_or_is_a_step_older(
    lost: str, group_of: GroupOf, tmp_path: Path
) -> None:
    group = group_of(2)
    group.run(save, str(tmp_path), "ab", 3)
    found = folders(tmp_path)
    assert [sorted(path.name for path in folder.iterdir()) for folder in found] == 2 * [["0-2", "0-3", "1-2", "1-3"]]
    assert all(file.stat().st_mode & 0o777 == 0o600 for folder in found for file in folder.iterdir())
    if lost == "host":
        shutil.rmtree(found[0])
    for folder in found if lost != "host" else ():
        if lost == "sum of rank 1":
            spoil(folder / "1-3")
        else:
            (folder / "0-3").unlink()
    start = 3 if lost == "host" else 2
    for extra, losses in group.run(go_on, str(tmp_path), "ab", 5):
        assert extra == {"step": start}
        assert all_same(losses, uninterrupted(adamw, range(start, 5)))
    assert folders(tmp_path) == []


@pytest.mark.nightly
def test_the_newer_one_of_memory_and_disk_is_loaded(group_of: GroupOf, tmp_path: Path) -> None:
    group, memory, disk = group_of(2), tmp_path / "memory", tmp_path / "disk"
    memory.mkdir()
    group.run(save, str(memory), "aa", 2, str(disk / "two"))
    assert [sorted(path.name for path in folder.iterdir()) for folder in folders(memory)] == [
        ["0-1", "0-2", "1-1", "1-2"]
    ]
    for folder in folders(memory):
        for path in folder.glob("*-2"):
            path.unlink()
    for extra, losses in group.run(go_on, str(memory), "aa", 4, str(disk / "two")):
        assert extra == {"step": 2} and all_same(losses, uninterrupted(adamw, range(2, 4)))
    group.run(save, str(memory), "aa", 3)
    for extra, losses in group.run(go_on, str(memory), "aa", 4, str(disk / "two")):
        assert extra == {"step": 3} and all_same(losses, uninterrupted(adamw, range(3, 4)))


@pytest.mark.nightly
def test_copies_of_other_layers_are_not_used(group_of: GroupOf, tmp_path: Path) -> None:
    """Of another cut, or of another number of processes."""
    group_of(2).run(save, str(tmp_path), "aa", 1)
    for extra, losses in group_of(2).run(go_on, str(tmp_path), "aa", 0, None, "zbv"):
        assert extra is None and losses == []
    group_of(2).run(save, str(tmp_path), "aa", 1)
    for extra, _ in group_of(4).run(go_on, str(tmp_path), "aaaa", 0):
        assert extra is None


def go_on_sharded(folder: str, schedule: str) -> list[bool]:
    """Two replicas that `fully_shard` has sharded: each process has a copy of its shards."""
    over, replica = mesh_and_replica()
    pipe, optimizer = sharded(schedule, "python", over)
    memory = MemoryCheckpoint(pipe, optimizer, name="shards", folder=folder)
    for step in range(2):
        train_sharded(pipe, optimizer, replica, range(step, step + 1), checks=False)
        memory.save({"step": step + 1})
    expected = train_sharded(pipe, optimizer, replica, range(2, 3), checks=False)
    del memory
    pipe, optimizer = sharded(schedule, "python", over)
    memory = MemoryCheckpoint(pipe, optimizer, name="shards", folder=folder)
    assert memory.load() == {"step": 2}
    found = train_sharded(pipe, optimizer, replica, range(2, 3), checks=False)
    memory.close()
    return list(map(torch.equal, found, expected))


@pytest.mark.nightly
def test_shards_of_replicas(group_of: GroupOf, tmp_path: Path) -> None:
    for same in group_of(4).run(go_on_sharded, str(tmp_path), "zbv"):
        assert same and all(same)
    assert folders(tmp_path) == []


def refuse(folder: str, num_saved: int) -> Any:
    """One rank has no room for its first or second file."""
    pipe = pipeline("1f1b", None)
    memory = MemoryCheckpoint(pipe, adamw(pipe), name="test", folder=folder)
    for _ in range(num_saved):
        memory.save()
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(os, "posix_fallocate", no_room)
        error = caught(memory.save)
    memory.save()
    memory.close()
    return error


def raise_while_others_gather(folder: str) -> Any:
    """Runs on every rank: rank 1 raises within the collective part of the construction."""
    pipe = pipeline("1f1b", None, timeout=4.0)
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(memory_checkpoint, "host_name", no_room)
        return caught(lambda: MemoryCheckpoint(pipe, adamw(pipe), name="test", folder=folder))


def test_an_error_within_a_collective_is_named_before_the_timeout(tmp_path: Path) -> None:
    with ranks(2) as group:
        zero, one = group.run(raise_while_others_gather, str(tmp_path))
    assert one[0] == "OSError" and zero[0] == "StepError" and zero[2] == 1
    assert "rank 1: MemoryCheckpoint: OSError: [Errno 28] No space left on device" in zero[1]


def fail_in_one_of_two_pipelines(folder: str) -> list[Any]:
    """Runs on two replicas: what each call raises if process 1 is given a wrong argument, or has no room."""
    over = dist.init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "pp"))
    wrong, errors = dist.get_rank() == 1, []
    for how in ("extra", "room", "path", "nothing", "keep"):  # after the last one, nobody can use the default group
        pipe = Pipeline([torch.nn.Linear(4, 4)], "gpipe", 1, group=over["pp"], data_parallel=over["dp"])

        def call(pipe: Pipeline = pipe, how: str = how) -> None:
            memory = MemoryCheckpoint(pipe, name=how, folder=folder, keep=0 if wrong and how == "keep" else 1)
            with pytest.MonkeyPatch.context() as patch:
                if wrong and how == "room":
                    patch.setattr(os, "posix_fallocate", no_room)
                memory.save(object() if wrong and how == "extra" else None)
            memory.load(3 if wrong and how == "path" else None)

        errors.append(caught(call) if how != "nothing" else call())
    return errors


def test_an_error_in_one_pipeline_reaches_the_others(tmp_path: Path) -> None:
    """They would wait in a collective, by default for ten minutes."""
    with ranks(2) as group:
        zero, one = group.run(fail_in_one_of_two_pipelines, str(tmp_path))
    assert [error and error[0] for error in one] == ["ValueError", "OSError", "TypeError", None, "ValueError"]
    for found, raised in zip(zero, one, strict=True):
        assert found is raised is None or found[0] == "StepError" and f"pipeline: {raised[0]}" in found[1], found


def load_where_replicas_find_others(folder: str, path: str | None) -> tuple[str, str, int | None]:
    """Runs on two replicas with copies of step 1: the first has a checkpoint of step 2 on a disk of its own."""
    over = dist.init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "pp"))
    pipe = Pipeline([torch.nn.Linear(4, 4)], "gpipe", 1, group=over["pp"], data_parallel=over["dp"], timeout=20)
    memory = MemoryCheckpoint(pipe, name=str(path), folder=folder)
    is_first = dist.get_rank() == 0
    pipe.step_count = 1
    memory.save()
    pipe.step_count = 2 if is_first else 0
    with contextlib.chdir(Path(folder) / "ab"[dist.get_rank()]):
        save_checkpoint("saved", pipe, group=over["pp"].get_group())
        return caught(lambda: memory.load("saved" if is_first else path))


@pytest.mark.parametrize(
    ("path", "says"),
    [
        (None, r"the processes have \['None', 'saved'\]; give the same path in all replicas"),
        ("saved", "process 0 has '.*/a/saved' and process 1 has '.*/b/saved', which are different checkpoints"),
    ],
)
def test_replicas_that_find_different_checkpoints_are_refused(path: str | None, says: str, tmp_path: Path) -> None:
    """One would load from disk and wait for the other one, which goes on with its copy in memory."""
    for name in "ab":
        (tmp_path / name).mkdir()
    with ranks(2) as group:
        for _, text, _ in group.run(load_where_replicas_find_others, str(tmp_path), path):
            assert re.search(says, text), text


def no_room(*_: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("num_saved", [0, 1])
def test_no_room_is_an_error_on_all_ranks(num_saved: int, group_of: GroupOf, tmp_path: Path) -> None:
    zero, one = group_of(2).run(refuse, str(tmp_path), num_saved)
    assert zero[0] == "StepError" and zero[2] == 1 and one[0] == "OSError"
    assert (
        "no room in" in one[1] and "it needs 2 x 0.1 MB" in one[1] and "--shm-size" in one[1] and "no room" in zero[1]
    )


def fail_to_copy(folder: str, hosts: str) -> tuple[Any, Any]:
    """Runs on every rank: the copy of step 3 fails on rank 1 alone, and that of step 4 on all; then load."""
    with on_hosts(hosts):
        pipe = pipeline("1f1b", None, timeout=20.0)
        memory = MemoryCheckpoint(pipe, adamw(pipe), keep=2, name="test", folder=folder)
        for step in range(1, 3):
            memory.save({"step": step})
        with pytest.MonkeyPatch.context() as patch:
            if dist.get_rank() == 1:
                patch.setattr(packing, "pack", no_room)
            first = caught(lambda: memory.save({"step": 3})) if dist.get_rank() or hosts == "ab" else memory.save()
            patch.setattr(packing, "pack", no_room)
            caught(lambda: memory.save({"step": 4}))
        extra = memory.load()
        memory.save()
        memory.close()
    return first, extra


@pytest.mark.parametrize("hosts", ["aa", "ab"])
def test_a_copy_that_fails_on_one_rank_leaves_the_last_one_of_all(
    hosts: str, group_of: GroupOf, tmp_path: Path
) -> None:
    """And where copies go to other hosts no rank waits for it."""
    (zero, extra), (one, _) = group_of(2).run(fail_to_copy, str(tmp_path), hosts)
    assert one[0] == "OSError" and extra == {"step": 2}
    assert zero is None if hosts == "aa" else zero[0] == "StepError" and zero[2] == 1
