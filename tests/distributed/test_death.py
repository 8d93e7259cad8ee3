"""A rank that is killed, or silent: the others name it, nothing hangs, and survivors can start anew."""

import contextlib
import gc
import os
import signal
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from fastpipe import Pipeline, StepError
from fastpipe.runtime.common.failure import Failure, FailureError
from fastpipe.runtime.common.waits import pauses
from fastpipe.runtime.step import result
from fastpipe.runtime.transport import groups
from tests.conftest import skip_without_native
from tests.distributed.hosts import on_hosts
from tests.distributed.ranks import Ranks, ranks
from tests.patience import PATIENCE
from tests.runtime.checks import rows_for, train_and_compare
from tests.runtime.models import CASES, DEVICE, Block

SIZE = 4
COUNT = 8


class Stopping(torch.nn.Module):
    """Sends its own process a signal in one of its forwards, and writes down when; if asked to, after another one."""

    def __init__(self, at_call: int, number: int, note: str, after: str = "") -> None:
        super().__init__()
        self.block = Block().to(DEVICE)
        self.at_call = at_call
        self.number = number
        self.note = note
        self.after = after
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls - 1 == self.at_call:
            while self.after and not Path(self.after).exists():
                time.sleep(0.01)
            Path(self.note).write_text(str(time.monotonic()))
            os.kill(os.getpid(), self.number)
        return self.block(x)


def train_until(
    victim: int,
    at_call: int,
    note: str,
    *,
    number: int = signal.SIGKILL,
    executor: str = "native",
    schedule: str = "1f1b",
    timeout: float = 60.0,
    transport: str = "process_group",
    hosts: str = "",
) -> dict[str, Any]:
    """Runs on every rank; rank ``victim`` gets the signal in the midst of a step, or before the fourth one."""
    case = CASES["plain"]
    mine = dist.get_rank() == victim
    stages = [Stopping(at_call if mine else -1, number, note) for _ in range(2 * SIZE)]
    with on_hosts(hosts):
        options = {"executor": executor, "transport": transport, "timeout": timeout}
        pipe = Pipeline(stages, schedule, COUNT, case.loss_fn, **options)
    assert pipe.transport.kind == ("mixed" if hosts else transport)
    try:
        for batch in case.batches(3, rows_for(COUNT)):
            pipe.step(*batch.args, target=batch.target)
        if at_call < 0 and mine:
            Path(note).write_text(str(time.monotonic()))
            os.kill(os.getpid(), number)
        pipe.step(*batch.args, target=batch.target)
    except Exception as error:
        seconds = time.monotonic() - float(Path(note).read_text())
        return report(pipe, error, seconds)
    raise AssertionError("nothing was raised")


def report(pipe: Pipeline, error: Exception, seconds: float) -> dict[str, Any]:
    """What the failing step and the next one raise."""
    batch = CASES["plain"].batches(1, rows_for(COUNT))[0]
    try:
        pipe.step(*batch.args, target=batch.target)
    except Exception as raised:
        again = str(raised)
    else:
        again = "nothing was raised"
    text = f"{type(error).__name__}: {error}"
    return {"text": text, "rank": getattr(error, "rank", None), "seconds": seconds, "again": again}


def check(answers: list[dict[str, Any]], victim: int) -> None:
    """Every survivor named the victim, and the next step says what to do."""
    for answer in answers:
        assert answer["text"].startswith("StepError") and answer["rank"] == victim, answer
        assert "build a new one" in answer["text"] and "build a new one" in answer["again"], answer


def others(victim: int) -> list[int]:
    return [rank for rank in range(SIZE) if rank != victim]


def lose(group: Ranks, victim: int, at_call: int, note: Path, **options: Any) -> list[dict[str, Any]]:
    """Have a rank killed, or stopped, and the others name it: what they say."""
    group.start(train_until, victim, at_call, str(note), **options)
    answers = group.results(others(victim))
    check(answers, victim)
    return answers


def rebuild(survivors: list[int], executor: str) -> None:
    """The survivors make a group of their own and go on."""
    group = dist.new_group(survivors, backend="gloo", use_local_synchronization=True)
    train_and_compare("plain", "1f1b", 4, num_ranks=len(survivors), group=group, executor=executor)


def train_after_a_close(victim: int, steps: int, note: str, hosts: str) -> dict[str, Any]:
    """Runs on every rank; one closes its pipeline, as a script does that drops it, and does something else."""
    case = CASES["plain"]
    # who closes waits so long for the others, which do not
    with on_hosts(hosts), mock.patch.object(groups, "_CLOSING", 0.5):
        pipe = Pipeline(case.layers(SIZE), "1f1b", COUNT, case.loss_fn, timeout=PATIENCE)
    batch = case.batches(1, rows_for(COUNT))[0]
    for _ in range(steps):
        pipe.step(*batch.args, target=batch.target)
    if dist.get_rank() == victim:
        del pipe
        gc.collect()
        Path(note).write_text(str(time.monotonic()))
        for seconds in pauses(2 * PATIENCE):
            if len(list(Path(note).parent.glob("named*"))) == SIZE - 1:
                return {}
            time.sleep(seconds)
    while not Path(note).exists():
        time.sleep(0.01)
    try:
        pipe.step(*batch.args, target=batch.target)
    except StepError as error:
        Path(note).with_name(f"named{dist.get_rank()}").touch()
        return report(pipe, error, time.monotonic() - float(Path(note).read_text()))
    raise AssertionError("nothing was raised")


@pytest.mark.parametrize(("steps", "hosts", "victim"), [(0, "", 1), (2, "", 3), (2, "aabb", 0), (0, "aabb", 2)])
def test_a_rank_that_has_closed_its_pipeline_and_lives_is_named_at_once(
    steps: int, hosts: str, victim: int, tmp_path: Path
) -> None:
    with ranks(SIZE) as group:
        answers = group.run(train_after_a_close, victim, steps, str(tmp_path / "note"), hosts)
    answers = [answers[rank] for rank in others(victim)]
    check(answers, victim)
    assert all("closed the pipeline" in answer["text"] and answer["seconds"] < PATIENCE / 2 for answer in answers)


KILLS = [
    (0, 3, "parent", {"schedule": "dualpipev"}),  # in the first step
    (2, 2 * COUNT + 3, "parent", {}),
    (3, -1, "parent", {}),  # between steps
    # started by hand, rank 0 holds the store: with it the others lose their control plane, too
    (0, COUNT + 3, "first", {}),
]
COALESCED: Any = (2, 2 * COUNT + 3, "parent", {"transport": "process_group_coalesced"})


@pytest.mark.parametrize(
    ("victim", "at_call", "host", "options", "executor"),
    [*((*kill, executor) for kill in KILLS for executor in ("native", "python")), (*COALESCED, "native")],
    indirect=["executor"],
)
def test_killed(victim: int, at_call: int, host: str, options: Any, executor: str, tmp_path: Path) -> None:
    with ranks(SIZE, host=host) as group:
        lose(group, victim, at_call, tmp_path / "note", executor=executor, **options)
        if victim == 2 and not options:
            group.start(rebuild, others(victim), executor)
            group.results(others(victim))


def hear_of_losses(closes: bool) -> list[int | None]:
    """Runs on both ranks: rank 1 ends between two steps, and rank 0 says whom it was told to be lost until then."""
    case = CASES["plain"]
    pipe = Pipeline(case.layers(2), "1f1b", COUNT, case.loss_fn)
    heard: list[Failure] = []
    pipe._site.control.on_loss(heard.append)
    (batch,) = case.batches(1, rows_for(COUNT))
    pipe.step(*batch.args, target=batch.target)
    if dist.get_rank() == 1:
        if closes:
            pipe._finalizer()
        os.kill(os.getpid(), signal.SIGKILL)
    until = time.monotonic() + PATIENCE
    watcher: Any = pipe._site.control._watcher  # type: ignore[attr-defined]
    ended = watcher.local_peers.ended
    while not (heard or (closes and ended())) and time.monotonic() < until:
        time.sleep(0.01)
    if closes:
        time.sleep(0.2)  # in which it would be told
    return sorted({failure.rank for failure in heard}, key=str)


@pytest.mark.parametrize(("closes", "lost"), [(True, []), (False, [1])])
def test_who_has_closed_the_pipeline_may_end(closes: bool, lost: list[int]) -> None:
    """The others may still read results of the last step; with one that has not, what they wait for is given up."""
    with ranks(2) as group:
        group.start(hear_of_losses, closes)
        assert group.results([0]) == [lost]


def lose_the_store(executor: str) -> str:
    """Runs on every rank: the store is lost when all but rank 1 have begun the step."""
    case = CASES["plain"]
    pipe = Pipeline(case.layers(SIZE), "1f1b", COUNT, case.loss_fn, executor=executor, transport="process_group")
    first, second = case.batches(2, rows_for(COUNT))
    pipe.step(*first.args, target=first.target)
    exchange = pipe._site.control.exchange

    def lost(phase: str, message: Any) -> Any:
        replies = exchange(phase, message) if phase == "start" else []
        if phase == "start" and pipe.rank != 1:
            return replies
        raise FailureError(Failure(0, "its process died", is_fatal=True))

    pipe._site.control.exchange = lost  # type: ignore[method-assign]
    with pytest.raises(StepError) as caught:
        pipe.step(*second.args, target=second.target)
    return str(caught.value)


def test_who_never_begins_keeps_nobody_waiting(executor: str) -> None:
    """It ends its connections, since those who have begun the step wait for its messages."""
    with ranks(SIZE) as group:
        for text in group.run(lose_the_store, executor):
            assert "rank 0: its process died; the pipeline is closed" in text


@pytest.mark.parametrize(
    ("executor", "victim", "at_call", "host"),
    [
        ("native", 3, COUNT + 3, "parent"),
        ("python", 3, COUNT + 3, "parent"),
        # between steps only the control plane waits, and it knows nothing of executors
        ("python", 0, -1, "parent"),
        # started by hand, rank 0 holds the store: stopped, it does not answer who wants to tell the others of it
        ("python", 0, COUNT + 3, "first"),
    ],
)
def test_silent(executor: str, victim: int, at_call: int, host: str, tmp_path: Path) -> None:
    """A stopped process is alive and says nothing: after the timeout the others give up; it knows of that when it goes
    on, if the store answered them."""
    if executor == "native" or host == "first":  # without shared memory only the store tells who is silent
        skip_without_native()
    with ranks(SIZE, host=host) as group:
        lose(group, victim, at_call, tmp_path / "note", number=signal.SIGSTOP, executor=executor, timeout=10.0)
        if host == "parent":
            while not group._pipes[victim].poll(0.1):  # each of its layers stops it
                group.signal(victim, signal.SIGCONT)
            check(group.results([victim]), victim)


def train_unwatched(victim: int, note: str) -> dict[str, Any]:
    """Runs on every rank, where the kernel grants no process descriptors."""
    with mock.patch.object(os, "pidfd_open", side_effect=PermissionError("pidfd_open")):
        return train_until(victim, COUNT + 3, note, executor="python", timeout=PATIENCE)


def lose_before_outputs(victim: int, number: int) -> dict[str, Any]:
    """Runs on both ranks; one gets a signal when the others gather the outputs of a step that has succeeded."""
    case = CASES["plain"]
    pipe = Pipeline(case.layers(2), "1f1b", COUNT, case.loss_fn, timeout=10.0)
    (batch,) = case.batches(1, rows_for(COUNT))
    faulty = mock.patch.object(result, "_broadcast", lambda *_: os.kill(os.getpid(), number))
    with faulty if dist.get_rank() == victim else contextlib.nullcontext():
        try:
            pipe.eval_step(*batch.args, gather_outputs=True)
        except StepError as error:
            return report(pipe, error, 0.0)
    raise AssertionError("nothing was raised")


@pytest.mark.parametrize(("victim", "number"), [(0, signal.SIGSTOP), (1, signal.SIGSTOP), (1, signal.SIGKILL)])
def test_lost_while_outputs_are_gathered(victim: int, number: int) -> None:
    """Whether it was to send or to receive them."""
    with ranks(2) as group:
        group.start(lose_before_outputs, victim, number)
        check(group.results([1 - victim]), victim)


@pytest.mark.parametrize("victim", [0, 2])
def test_killed_where_no_process_can_be_watched(victim: int, tmp_path: Path) -> None:
    """A sandbox may deny pidfds: then connections tell, as between hosts."""
    with ranks(SIZE) as group:
        group.start(train_unwatched, victim, str(tmp_path / "note"))
        check(group.results(others(victim)), victim)


def train_with_a_late_one(note: str, transport: str, hosts: str) -> dict[str, Any]:
    """Runs on every rank: rank 2 is killed; rank 1 has sent it what it needs by then, and is stopped for good."""
    at_call, number = {1: (COUNT + 2, signal.SIGSTOP), 2: (COUNT + 1, signal.SIGKILL)}.get(dist.get_rank(), (-1, 0))
    case = CASES["plain"]
    after = f"{note}{signal.SIGKILL:d}" if dist.get_rank() == 1 else ""
    stages = [Stopping(at_call, number, f"{note}{number:d}", after) for _ in range(SIZE)]
    with on_hosts(hosts):
        pipe = Pipeline(stages, "1f1b", COUNT, case.loss_fn, timeout=PATIENCE, transport=transport)
    try:
        for batch in case.batches(2, rows_for(COUNT)):
            pipe.step(*batch.args, target=batch.target)
    except Exception as error:
        return report(pipe, error, 0.0)
    raise AssertionError("nothing was raised")


@pytest.mark.parametrize(("transport", "hosts"), [("auto", ""), ("process_group", ""), ("process_group", "abcd")])
def test_a_death_is_told_while_another_rank_is_late(transport: str, hosts: str, tmp_path: Path) -> None:
    skip_without_native()  # Python's Work has no abort: the wait for the late one ends with the timeout
    with ranks(SIZE) as group:
        group.start(train_with_a_late_one, str(tmp_path / "note"), transport, hosts)
        check(group.results([0, 3]), 2)


def clip_after_the_others(folder: str, hosts: str) -> str:
    """Runs on every rank: rank 2 comes when the others have given it up, and still finds what they have sent."""
    case, own = CASES["plain"], Path(folder) / str(dist.get_rank())
    with on_hosts(hosts):
        pipe = Pipeline(case.layers(3), "1f1b", COUNT, case.loss_fn, timeout=5.0)
    batch = case.batches(1, rows_for(COUNT))[0]
    pipe.step(*batch.args, target=batch.target)
    while dist.get_rank() == 2 and len(list(Path(folder).iterdir())) < 2:
        time.sleep(0.01)
    with pytest.raises(StepError) as raised:
        pipe.clip_grad_norm_(1.0)
    del pipe
    text = str(raised.value)
    raised.value.__traceback__ = None  # its frames have the pipeline, which is to be closed
    own.touch()
    return text


@pytest.mark.parametrize("hosts", ["", "aab"])
def test_a_rank_that_is_late_is_told_why_the_others_have_closed_the_pipeline(hosts: str, tmp_path: Path) -> None:
    with ranks(3) as group:
        for text in group.run(clip_after_the_others, str(tmp_path), hosts):
            assert "rank 2 did not reach the start of call 2 (clip_grad_norm_) within 5 s" in text
