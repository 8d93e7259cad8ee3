"""Checkpoints of processes: four save, two load, one loads."""

import contextlib
import itertools
import os
import re
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext as nothing
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer

from fastpipe import MemoryCheckpoint, Pipeline, checkpoint_folder, latest_checkpoint, load_checkpoint, save_checkpoint
from fastpipe.runtime import checkpoint
from tests.distributed.ranks import GroupOf, on_ranks, ranks
from tests.distributed.test_awkward_errors import ERRORS
from tests.distributed.test_step import caught, refuses
from tests.patience import PATIENCE
from tests.runtime.checks import same_bits
from tests.runtime.models import WIDTH
from tests.runtime.test_checkpoint import (
    CASE,
    adamw,
    all_same,
    fresh,
    momentum,
    pipeline,
    tied_late,
    train,
    uninterrupted,
)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def go_on(
    schedule: str, executor: str, start: int, load: str | None, save: str | None, asynchronous: bool = False
) -> list[torch.Tensor]:
    """Two steps of a training that was saved, or of a new one."""
    num_ranks = None if dist.is_initialized() else 2
    pipe = pipeline(schedule, num_ranks, fresh() if load else None, executor=executor)
    optimizer = adamw(pipe)
    if load:
        assert load_checkpoint(load, pipe, optimizer) == {"step": start}
    losses = train(pipe, optimizer, range(start, start + 2))
    if save:
        writing = save_checkpoint(save, pipe, optimizer, extra={"step": start + 2}, asynchronous=asynchronous)
        train(pipe, optimizer, range(start + 2, start + 3))
        if writing is not None:
            writing.result()
    return losses


def test_training_goes_on_with_fewer_processes(executor: str, group_of: GroupOf, tmp_path: Path) -> None:
    expected = uninterrupted(adamw, range(6))
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    asynchronous = executor == "native"
    for losses in group_of(4).run(go_on, "dualpipev", executor, 0, None, a, asynchronous):
        assert all_same(losses, expected[:2])
    for losses in group_of(2).run(go_on, "1f1b", executor, 2, a, b):
        assert all_same(losses, expected[2:4])
    assert all_same(go_on("zbv", executor, 4, b, None), expected[4:])


def save_after_uneven_groups(folder: str) -> None:
    few = dist.new_group([0, 1], backend="gloo")  # ranks 2 and 3 are in fewer groups than the others
    go_on("dualpipev", "python", 0, None, folder, asynchronous=True)
    if dist.get_rank() < 2:
        dist.destroy_process_group(few)


def test_who_is_in_more_groups_than_another_saves_with_it(group_of: GroupOf, tmp_path: Path) -> None:
    group_of(4).run(save_after_uneven_groups, str(tmp_path / "a"))
    assert (tmp_path / "a" / ".metadata").exists()


def test_stages_held_twice_are_written_once(group_of: GroupOf, tmp_path: Path) -> None:
    """From copies to none and back: with copies the sums have another order, so only states are compared."""
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    group_of(2).run(go_on, "dualpipe", "python", 0, None, a)
    one = pipeline("1f1b", 2, fresh())
    load_checkpoint(a, one, optimizer := adamw(one))
    save_checkpoint(b, one, optimizer, extra={"step": 2})
    from_copies = group_of(2).run(go_on, "dualpipe", "python", 2, a, None)
    again = group_of(2).run(go_on, "dualpipe", "python", 2, b, None)
    assert all(all_same(losses, from_copies[0]) for losses in [*from_copies, *again])


@on_ranks(2)
def test_whoever_cannot_is_an_error_for_all(tmp_path: Path) -> None:
    rank, folder = dist.get_rank(), tmp_path / "a"
    pipe = pipeline("1f1b", None)
    other = torch.nn.Linear(2, 2)
    only = "optimizer: process {} gives one and process {} gives none; give it on every rank, or on none"
    refuses(lambda: save_checkpoint(folder, pipe, momentum(other if rank else pipe)), "", on=1)
    refuses(lambda: load_checkpoint(folder, pipe), "", kind=FileNotFoundError)
    refuses(lambda: save_checkpoint(f"{folder}{rank}", pipe), "do not make the same call")
    refuses(lambda: save_checkpoint(folder, pipe, asynchronous=rank == 1), "rank 1: save_checkpoint .*, asynchronous;")
    refuses(lambda: save_checkpoint(folder, pipe, momentum(pipe) if rank else None), "^" + only.format(1, 0))
    save_checkpoint(folder, pipe, momentum(pipe))
    refuses(lambda: load_checkpoint(folder, pipe, None if rank else momentum(pipe)), "^" + only.format(0, 1))
    before = torch.get_rng_state()
    torch.randn(3)
    load_checkpoint(folder, pipe, momentum(pipe))
    assert same_bits(torch.get_rng_state(), before)


@on_ranks(2)
def test_two_values_are_not_loaded_into_a_weight_of_two_processes(tmp_path: Path) -> None:
    """Each process has the weight under one name, and they would train with different values."""
    save_checkpoint(tmp_path / "different", untied := pipeline("1f1b", None, CASE.layers(12)))
    state = untied.state_dict()
    for key in state.keys() & {"2.linear.weight", "10.linear.weight"}:
        torch.nn.init.ones_(state[key])
    save_checkpoint(tmp_path / "equal", untied)
    pipe = pipeline("1f1b", None, tied_late())
    load_checkpoint(tmp_path / "equal", pipe)
    assert all(same_bits(value, state[key]) for key, value in pipe.state_dict().items())
    said = "2.linear.weight and 10.linear.weight are one weight .* two different values"
    refuses(lambda: load_checkpoint(tmp_path / "different", pipe), said)


@on_ranks(2)
def test_an_optimizer_whose_state_is_within_another_one_is_refused(tmp_path: Path) -> None:
    """Its own state is empty, and so was that of the checkpoint."""
    pipe = pipeline("1f1b", None)
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    zero = ZeroRedundancyOptimizer(pipe.parameters(), torch.optim.AdamW, process_group=alone)
    for call in (save_checkpoint, load_checkpoint):
        with pytest.raises(ValueError, match="optimizer is a ZeroRedundancyOptimizer, whose state"):
            call(tmp_path / "a", pipe, [zero])
    with pytest.raises(ValueError, match="optimizer is a ZeroRedundancyOptimizer, whose state"):
        MemoryCheckpoint(pipe, zero)


@on_ranks(2)
def test_a_group_without_all_ranks_is_refused(tmp_path: Path) -> None:
    """Each process would save its stages as if they were the model, and the last one would stay."""
    folder, pipe = tmp_path / "a", pipeline("1f1b", None)
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    says = r"group has processes \[{}\], and rank {} of the pipeline is none of them: give a group of all"
    for asynchronous in (False, True):
        with pytest.raises(ValueError, match=says.format(dist.get_rank(), 1 - dist.get_rank())):
            save_checkpoint(folder, pipe, group=alone, asynchronous=asynchronous)
    save_checkpoint(folder, pipe)
    with pytest.raises(ValueError, match="is none of them"):
        load_checkpoint(folder, pipe, group=alone)
    load_checkpoint(folder, pipe)


def save_without_a_process_group(folder: str, victims: list[int]) -> list[str]:
    """Runs on every rank; some have ended torch's process group before."""
    pipe = pipeline("1f1b", None)
    save_checkpoint(f"{folder}/a", pipe)
    dist.barrier()
    if dist.get_rank() in victims:
        dist.destroy_process_group()
    calls: list[Callable[[], Any]] = [
        lambda: save_checkpoint(f"{folder}/b", pipe),
        lambda: load_checkpoint(f"{folder}/a", pipe),
        lambda: MemoryCheckpoint(pipe, name="ended", folder=folder),
        lambda: pipe.eval_step(torch.zeros(16, WIDTH), gather_outputs=True),
    ]
    texts = [caught(call)[1] for call in calls]
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # what ran here leaves one
    return texts


@pytest.mark.parametrize("victims", [[1], [0, 1]])
def test_a_process_group_that_has_ended_is_an_error_for_all(victims: list[int], tmp_path: Path) -> None:
    with ranks(2) as started:
        for texts in started.run(save_without_a_process_group, str(tmp_path), victims):
            for text in texts:
                assert "the process group has been destroyed" in text and "after the last " in text, text
    assert not (tmp_path / "b").exists()


def end_the_process_group_during_a_save(folder: str) -> str:
    """Runs on every rank: what a save in the background raises."""
    pipe, ended, write = pipeline("1f1b", None), threading.Event(), checkpoint._write

    def write_late(*args: Any) -> None:
        assert ended.wait(PATIENCE)
        write(*args)

    with mock.patch.object(checkpoint, "_write", write_late):
        writing = save_checkpoint(folder, pipe, asynchronous=True)
        assert writing is not None
        dist.destroy_process_group()
        ended.set()
        text = caught(writing.result)[1]
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # what ran here leaves one
    return text


def test_a_process_group_that_ends_during_a_save_is_named(tmp_path: Path) -> None:
    with ranks(2) as started:
        for text in started.run(end_the_process_group_during_a_save, str(tmp_path / "a")):
            assert "the process group has been destroyed" in text and "after its result()" in text, text
    assert not (tmp_path / "a").exists()  # each rank would have saved its own stages as the whole model


@on_ranks(2)
def test_folders_of_one_name_with_different_checkpoints_are_refused(tmp_path: Path) -> None:
    """As on hosts whose file systems are not shared: each rank would load its stages of another step."""
    pipe = pipeline("1f1b", None)
    for name in ("a", "b"):
        save_checkpoint(tmp_path / name / "saved", pipe)
        pipe.step_count += 1
    said = "path: process 0 has '.*a/saved' and process 1 has '.*b/saved', which are different checkpoints"
    with contextlib.chdir(tmp_path / "ab"[dist.get_rank()]):
        refuses(lambda: load_checkpoint("saved", pipe), said)
    load_checkpoint(tmp_path / "a" / "saved", pipe)


@on_ranks(4)
def test_replicas_that_save_or_load_otherwise_are_refused(tmp_path: Path) -> None:
    """Shards of two checkpoints would be mixed, and a save would be in the folder of process 0 alone."""
    over = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "pp"))
    made = [fully_shard(nn.Linear(4, 4), mesh=over["dp_shard"]) for _ in range(2)]
    pipe, replica = Pipeline(made, "gpipe", 1, mesh=over), over.get_local_rank("dp_shard")
    for number in range(2):
        save_checkpoint(tmp_path / f"step{number}", pipe, momentum(pipe))
        pipe.step_count += 1
    differ = "path: process 0 has '.*{0}0' and process 2 has '.*{0}1', {1}"
    one, only = momentum(pipe) if replica else None, "optimizer: process 2 gives one and process 0 gives none"
    calls: list[tuple[str, Callable[[], Any]]] = [
        (differ.format("step", "which are"), lambda: load_checkpoint(tmp_path / f"step{replica}", pipe)),
        (differ.format("new", "and all"), lambda: save_checkpoint(tmp_path / f"new{replica}", pipe, asynchronous=True)),
        (only, lambda: load_checkpoint(tmp_path / "step0", pipe, one)),
        (only, lambda: save_checkpoint(tmp_path / "step0", pipe, one)),
    ]
    for said, call in calls:
        refuses(call, said)
    load_checkpoint(tmp_path / "step0", pipe)
    save_checkpoint(tmp_path / "step0", pipe)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step0", "step1"]
    alone = Pipeline([nn.Linear(4, 4) for _ in range(2)], "gpipe", 1, group=over["pp"])
    save_checkpoint(tmp_path / f"model{replica}", alone, group=over["pp"].get_group())
    load_checkpoint(tmp_path / f"model{replica}", alone, group=over["pp"].get_group())


@pytest.mark.parametrize("keys", [["0_of_2", "1_of_2"]])
def test_what_is_in_a_checkpoint(keys: list[str], group_of: GroupOf, tmp_path: Path) -> None:
    group_of(2).run(go_on, "dualpipev", "python", 0, None, str(tmp_path))
    from torch.distributed.checkpoint import FileSystemReader

    found = FileSystemReader(tmp_path).read_metadata().state_dict_metadata
    model = {f"model.{key}" for key in pipeline("1f1b", 2).state_dict()}
    assert model == {key for key in found if key.startswith("model.")}
    assert {f"random.{key}" for key in keys} == {key for key in found if key.startswith("random.")}
    assert "optimizer.state.7.linear.bias.exp_avg" in found and "optimizer.param_groups.0.linear.weight.lr" in found


@on_ranks(2)
def test_a_rank_of_which_all_is_frozen_needs_no_condition(tmp_path: Path) -> None:
    """Rank 0 has a stage of frozen layers alone; every rank runs the same lines."""
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4) for _ in range(4)]
    for layer in layers[:2]:
        layer.requires_grad_(False)
    pipe = Pipeline(layers, "1f1b", 4, nn.functional.mse_loss)
    for number, only_trained in enumerate((False, True)):

        def adamw(only_trained: bool = only_trained) -> torch.optim.Optimizer:
            trained = [{"params": [p for p in pipe.parameters() if p.requires_grad]}]
            return torch.optim.AdamW(trained if only_trained else pipe.parameters())

        optimizer = adamw()
        before = [p.detach().clone() for p in pipe.parameters()]
        pipe.step(torch.ones(8, 4), target=torch.ones(8, 4))
        assert pipe.clip_grad_norm_(1.0) > 0
        optimizer.step()
        optimizer.zero_grad()
        unmoved = all(map(torch.equal, before, (p.detach() for p in pipe.parameters())))
        assert unmoved == (dist.get_rank() == 0)
        save_checkpoint(tmp_path / str(number), pipe, optimizer)
        load_checkpoint(tmp_path / str(number), pipe, adamw())


def with_rows(pipe: Pipeline) -> torch.optim.Optimizer:
    """An optimizer with one number for each row of a weight."""
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    for weight in pipe.parameters():
        optimizer.state[weight]["row_var"] = weight.new_zeros(len(weight), 1)
    return optimizer


@on_ranks(2)
def test_state_of_shards_that_is_not_sharded_like_them_is_refused(tmp_path: Path) -> None:
    over = dist.init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "pp"))

    def pipeline(wrap: str) -> Pipeline:
        layer = nn.Linear(4, 4, bias=False)
        parallel = fully_shard(layer, mesh=over["dp"]) if wrap == "fully_shard" else layer
        data_parallel = over["dp"] if wrap == "ddp" else None
        return Pipeline([parallel], "gpipe", 1, group=over["pp"], data_parallel=data_parallel)

    ddp, sharded = pipeline("ddp"), pipeline("fully_shard")
    wrong = r"state of 0.weight has 'row_var', a (DT|t)ensor of shape \(4, 1\), and the parameter is a DTensor of shape"
    with pytest.raises(ValueError, match=wrong):
        save_checkpoint(tmp_path / "sharded", sharded, with_rows(sharded))
    save_checkpoint(tmp_path / "ddp", ddp, with_rows(ddp))
    load_checkpoint(tmp_path / "ddp", ddp, with_rows(ddp))
    with pytest.raises(ValueError, match=wrong):
        load_checkpoint(tmp_path / "ddp", sharded, torch.optim.SGD(sharded.parameters()))


PHASES = {
    "nothing is written": (0, checkpoint._Writer, "prepare_global_plan", 1),
    "some is written": (1, checkpoint._SyncedFile, "write", 3),
    "all is written, but not on disk": (0, checkpoint._SyncedFile, "close", 1),
    "rank 1 is done": (1, checkpoint, "sync_folder", 1),
    "all are done": (0, checkpoint._Writer, "finish", 1),
    "between the renames": (0, os, "rename", 3),  # the first one is DCP's, of its metadata
    "before the old one is removed": (0, checkpoint_folder, "sync_folder", 2),
}
"""Which rank is killed, at which call of what."""


def die_at(owner: Any, name: str, number: int) -> None:
    """Have this process killed at one of its calls of something."""
    original, calls = getattr(owner, name), itertools.count(1)

    def stand_in(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)

    setattr(owner, name, stand_in)


def die_in_the_second_save(folder: str, phase: str, asynchronous: bool) -> str:
    """Runs on every rank: the first save is complete; what the survivors are told of the second one into its path."""
    victim, *where = PHASES[phase]
    pipe = pipeline("1f1b", None)
    optimizer = momentum(pipe)
    train(pipe, optimizer, range(1))
    save_checkpoint(folder, pipe, optimizer, extra=1)
    train(pipe, optimizer, range(1, 2))
    if dist.get_rank() == victim:
        die_at(*where)
    with pytest.raises(RuntimeError) as error:
        writing = save_checkpoint(folder, pipe, optimizer, extra=2, asynchronous=asynchronous)
        if writing is not None:
            writing.result()
    return str(error.value)


IN_THE_BACKGROUND = ["some is written", "between the renames"]


@pytest.mark.parametrize(
    ("phase", "asynchronous"), [*((phase, False) for phase in PHASES), *((phase, True) for phase in IN_THE_BACKGROUND)]
)
def test_killed_in_any_phase_the_one_before_it_loads(phase: str, asynchronous: bool, tmp_path: Path) -> None:
    path = tmp_path / "a"
    victim = PHASES[phase][0]
    with ranks(2) as group:
        group.start(die_in_the_second_save, str(path), phase, asynchronous)
        (text,) = group.results([1 - victim])
        assert f"rank {victim}" in text and "its process died" in text, text
    expected = uninterrupted(momentum, range(3))
    saved = 2 if phase == "before the old one is removed" else 1
    for found in (path, latest_checkpoint(tmp_path)):
        pipe = pipeline("1f1b", 2, fresh())
        assert found is not None and load_checkpoint(found, pipe, optimizer := momentum(pipe)) == saved
        assert all_same(train(pipe, optimizer, range(saved, 3)), expected[saved:])
    save_checkpoint(path, pipe, optimizer, extra=3)
    assert [left.name for left in tmp_path.iterdir()] == ["a"] and load_checkpoint(path, pipe) == 3


REFUSED = {"before": (checkpoint, "check_target"), "within": (checkpoint, "sync_folder")}
"""What raises on process 2: before it joins the collectives of a save, or within one, of which DCP tells all."""


def fail_in_a_save_of_replicas(folder: str, how: str, asynchronous: bool) -> tuple[str, str, int | None]:
    """Runs on every rank of three replicas: what a save raises if process 2 is killed, or raises."""
    over = dist.init_device_mesh("cpu", (3, 2), mesh_dim_names=("dp", "pp"))
    pipe = Pipeline([nn.Linear(4, 4), nn.Linear(4, 4)], "gpipe", 1, group=over["pp"], data_parallel=over["dp"])
    is_victim = dist.get_rank() == 2
    if is_victim and how == "killed":
        die_at(checkpoint._SyncedFile, "write", 1)

    def save() -> None:
        writing = save_checkpoint(folder, pipe, asynchronous=asynchronous)
        if writing is not None:
            writing.result()

    raises = mock.patch.object(*REFUSED[how], side_effect=OSError("no")) if is_victim and how in REFUSED else nothing()
    with raises:
        return caught(save)


@pytest.mark.parametrize(
    ("how", "asynchronous"), [("killed", False), ("killed", True), ("before", False), ("within", True)]
)
def test_no_replica_waits_for_one_that_has_failed_in_a_save(how: str, asynchronous: bool, tmp_path: Path) -> None:
    """Processes that wait for the victim's peer, which lives on, would wait for half an hour."""
    with ranks(6) as group:
        group.start(fail_in_a_save_of_replicas, str(tmp_path / "a"), how, asynchronous)
        survivors = [rank for rank in range(6) if rank != 2]
        for process, (kind, text, rank) in zip(survivors, group.results(survivors), strict=True):
            assert kind == "StepError" and rank == (0 if process == 3 else None), text
            assert re.search("process(es \\[| )2" if process != 3 else "rank 0", text), text
            assert ("OSError: no" in text) == (how != "killed"), text


def spoil_and_load(folder: str) -> tuple[str, str]:
    """Every rank proves a part of the files, and all refuse."""
    pipe = pipeline("1f1b", None)
    save_checkpoint(folder, pipe)
    dist.barrier()
    if dist.get_rank() == 0:
        with open(Path(folder) / "rank1_0.distcp", "r+b") as file:
            file.seek(200)
            file.write(b"?")
    dist.barrier()
    before = [parameter.detach().clone() for parameter in pipe.parameters()]
    kind, text, _ = caught(lambda: load_checkpoint(folder, pipe))
    assert all(map(same_bits, before, pipe.parameters()))
    pipe.step(torch.zeros(16, WIDTH), target=torch.zeros(16, WIDTH))  # goes on
    return kind, text


def test_a_spoilt_file_is_named_on_every_rank(group_of: GroupOf, tmp_path: Path) -> None:
    found = group_of(2).run(spoil_and_load, str(tmp_path / "a"))
    assert sorted(kind for kind, _ in found) == ["StepError", "ValueError"]
    assert all(re.search("a/rank1_0.distcp has been altered since it was saved", text) for _, text in found)


def stop(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


DISTURBED = {"stops": ("sync_folder", stop), "raises": ("save", MemoryError("no room"))}
"""What a rank calls within a save, and what it does instead; DCP does not catch this exception."""


def disturb(folder: str, how: str, asynchronous: bool) -> tuple[str, str, int | None]:
    """Runs on every rank: what a save raises in which the last one is disturbed."""

    def save() -> None:
        writing = save_checkpoint(folder, pipe, asynchronous=asynchronous)
        if writing is not None:
            writing.result()

    dist.barrier()  # so that no rank begins late
    pipe = pipeline("1f1b", None, timeout=5.0)
    name, instead = DISTURBED[how]
    is_last = dist.get_rank() == dist.get_world_size() - 1
    with mock.patch.object(checkpoint, name, side_effect=instead) if is_last else nothing():
        raised = caught(save)
    if how == "raises" and asynchronous:
        dist.barrier()
        save()  # the next one does not use what the failed one has left
    return raised


@pytest.mark.parametrize(
    ("size", "how", "asynchronous", "said"),
    [
        (2, "stops", False, r"rank 1 did not reach the end of call 1 \(save_checkpoint of .*/a\) within 5 s"),
        (2, "raises", False, "failed on rank 1: save_checkpoint of .*/a: MemoryError: no room"),
        (2, "raises", True, "^rank 1 failed in save_checkpoint of .*/a, asynchronous: MemoryError: no room$"),
        (4, "stops", True, "^rank 3 failed in save_checkpoint of .*/a, asynchronous: rank 3 does not answer; see"),
    ],
)
def test_a_save_that_cannot_end_names_the_rank(
    size: int, how: str, asynchronous: bool, said: str, tmp_path: Path
) -> None:
    """Although torch's process group, of the test, would wait for half an hour."""
    with ranks(size) as group:
        group.start(disturb, str(tmp_path / "a"), how, asynchronous)
        for kind, text, rank in group.results(range(size - 1)):
            assert re.search(said, text) and (kind, rank) == ("StepError", size - 1), text
        if how == "raises":
            assert group.results([size - 1]) == [("MemoryError", "no room", None)]


class Refuses:
    """What cannot be pickled, or no longer be unpickled when it is loaded."""

    is_saved = False

    def __init__(self, error: Exception, on_load: bool) -> None:
        self.error, self.on_load = error, on_load

    def __getstate__(self) -> Any:
        if not self.on_load:
            raise self.error
        return {"number": list(ERRORS.values()).index(self.error)}

    def __setstate__(self, state: Any) -> None:
        if self.is_saved:
            raise list(ERRORS.values())[state["number"]]


def save_and_load(folder: str, name: str, on_load: bool) -> str:
    """What is raised on this rank, after which the next step works."""
    pipe = pipeline("1f1b", None)
    with torch.serialization.safe_globals([Refuses]):
        if on_load:
            save_checkpoint(folder, pipe, extra=Refuses(ERRORS[name], on_load))
            with mock.patch.object(Refuses, "is_saved", True):
                kind, text, _ = caught(lambda: load_checkpoint(folder, pipe))
        else:
            kind, text, _ = caught(lambda: save_checkpoint(folder, pipe, extra=Refuses(ERRORS[name], on_load)))
    ERRORS[name].with_traceback(None)
    pipe.step(torch.zeros(16, WIDTH), target=torch.zeros(16, WIDTH))
    return f"{kind}: {text}"


@pytest.mark.parametrize("on_load", [False, True])
@pytest.mark.parametrize("name", ["TakesTwo", "NotPickled"])
def test_an_exception_that_cannot_be_sent_leaves_nobody_waiting(
    name: str, on_load: bool, group_of: GroupOf, tmp_path: Path
) -> None:
    found = group_of(2).run(save_and_load, str(tmp_path / "a"), name, on_load)
    assert all(name in text for text in found), found


@on_ranks(2)
def test_no_room_for_the_copy_of_a_save_in_the_background_is_an_error_for_all() -> None:
    pipe = pipeline("1f1b", None)
    with mock.patch.object(checkpoint, "_copied", side_effect=MemoryError("no room")) if dist.get_rank() else nothing():
        refuses(lambda: save_checkpoint("unused", pipe, asynchronous=True), "no room", on=1, kind=MemoryError)
    pipe.step(torch.zeros(16, WIDTH), target=torch.zeros(16, WIDTH))


@on_ranks(2)
def test_collective_calls_of_two_threads_are_not_mixed(tmp_path: Path) -> None:
    pipe, other = pipeline("1f1b", None), pipeline("1f1b", None)
    x, has_begun, goes_on = torch.zeros(16, WIDTH), threading.Event(), threading.Event()
    write = checkpoint._write

    def write_late(*args: Any) -> None:
        has_begun.set()
        assert goes_on.wait(PATIENCE)
        write(*args)

    with mock.patch.object(checkpoint, "_write", write_late), ThreadPoolExecutor(1) as thread:
        saving = thread.submit(save_checkpoint, tmp_path / "a", pipe)
        try:
            assert has_begun.wait(PATIENCE)
            other.step(x, target=x)  # needs no group of torch's
            calls: list[Callable[[], Any]] = [
                lambda: other.eval_step(x, gather_outputs=True),
                lambda: save_checkpoint(tmp_path / "b", other),
                lambda: load_checkpoint(tmp_path / "a", other),
            ]
            for call in calls:
                with pytest.raises(RuntimeError, match="while another pipeline of this process is in such a call"):
                    call()
        finally:
            goes_on.set()
        saving.result()
    load_checkpoint(tmp_path / "a", other)
    other.eval_step(x, gather_outputs=True)
