"""Slow is not dead: a rank that stalls is waited for, and the others say that they wait for it."""

import contextlib
import faulthandler
import logging
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fastpipe import Pipeline
from tests.distributed.ranks import ranks
from tests.patience import PATIENCE

COUNT = 4


class Stalls(nn.Module):
    """Sleeps in one of its forwards, for some seconds or until the other ranks have given up, which a folder shows; or
    is stopped and continued from outside."""

    def __init__(self, at_call: int, how: str, until: float | Path) -> None:
        super().__init__()
        self.linear, self.at_call, self.how, self.calls = nn.Linear(4, 4), at_call, how, 0
        self.until = until

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls - 1 == self.at_call:
            if self.how == "stopped":
                own = os.getpid()
                subprocess.Popen(["sh", "-c", f"sleep {self.until}; kill -CONT {own}"], start_new_session=True)
                os.kill(own, signal.SIGSTOP)
            elif isinstance(self.until, Path):
                while len(list(self.until.iterdir())) < dist.get_world_size() - 1:
                    time.sleep(0.05)
            else:
                time.sleep(self.until)
        return self.linear(x)


def is_complete(text: str) -> bool:
    """Whether a report has the ranks that matter: one that is late is missing."""
    return "computes 1F1" in text and "waits for rank 1 to send the input of stage 2, microbatch 1" in text


class Asks(nn.Module):
    """Asks every process for a report, in one of the forwards, until one has a line of all ranks, if any is to come."""

    def __init__(self, at_call: int, all_processes: Sequence[int], there: Path | None) -> None:
        super().__init__()
        self.linear, self.at_call, self.calls, self.all_processes = nn.Linear(4, 4), at_call, 0, all_processes
        self.there = there

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls - 1 == self.at_call:
            end = time.monotonic() + (PATIENCE if self.there else 4.0)
            while time.monotonic() < end and not (self.there and self.there.exists()):
                for process in self.all_processes:
                    os.kill(process, signal.SIGUSR1)
                time.sleep(2.0)
        return self.linear(x)


def ask(used_by: str, there: Path) -> tuple[list[str], bool]:
    """Runs on every rank; rank 1 asks in the second step. What is reported here, and whether a handler here ran."""
    called: list[int] = []
    if used_by != "faulthandler":  # which tests/distributed/ranks.py registers
        faulthandler.unregister(signal.SIGUSR1)
    if used_by == "the application":
        signal.signal(signal.SIGUSR1, lambda number, frame: called.append(number))
    processes: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(processes, os.getpid())
    torch.manual_seed(0)
    with reports(lambda text: there.touch() if is_complete(text) else None) as reported:
        at_call = COUNT + 1 if dist.get_rank() == 1 else -1
        layers = [Asks(at_call, processes, there if used_by == "nobody" else None) for _ in processes]
        pipe = Pipeline(layers, "1f1b", COUNT, nn.functional.mse_loss, warn_after=1e3)
        for _ in range(3):
            pipe.step(torch.randn(4, 4), target=torch.randn(4, 4))
        del pipe, layers
    return reported, bool(called)


@pytest.mark.parametrize("used_by", ["nobody", "faulthandler", "the application"])
def test_a_signal_asks_for_a_report_unless_it_is_used(used_by: str, tmp_path: Path) -> None:
    with ranks(3) as group:
        answers = group.run(ask, used_by, tmp_path / "there")
    assert [called for _, called in answers] == [used_by == "the application"] * 3
    if used_by != "nobody":
        assert [reported for reported, _ in answers] == [[], [], []]
        return
    text = next(text for reported, _ in answers for text in reported if is_complete(text))
    assert "call 2 of the pipeline has taken" in text and "in forward)" in text


@contextlib.contextmanager
def reports(then: Callable[[str], None] = lambda text: None) -> Iterator[list[str]]:
    """What fastpipe warns of; ``then`` is called with each warning."""
    reported: list[str] = []

    def emit(record: logging.LogRecord) -> None:
        reported.append(record.getMessage())
        then(record.getMessage())

    handler = logging.Handler(logging.WARNING)
    handler.emit = emit  # type: ignore[method-assign]
    logging.getLogger("fastpipe").addHandler(handler)
    try:
        yield reported
    finally:
        logging.getLogger("fastpipe").removeHandler(handler)


def train(
    how: str, transport: str, timeout: float, warn_after: float, until: float | Path = 3.0
) -> tuple[list[str], str, str]:
    """Runs on every rank; rank 1 stalls in the second step. What is reported here, and what is raised."""
    torch.manual_seed(0)
    own = dist.get_rank()
    layers = [Stalls(COUNT + 1 if own == 1 else -1, how, until) for _ in range(dist.get_world_size())]
    options = {"transport": transport, "timeout": timeout, "warn_after": warn_after}
    pipe = Pipeline(layers, "1f1b", COUNT, nn.functional.mse_loss, **options)
    with reports() as reported:
        try:
            for _ in range(3):
                pipe.step(torch.randn(4, 4), target=torch.randn(4, 4))
        except Exception as error:
            if isinstance(until, Path) and own != 1:
                (until / str(own)).touch()
            return reported, f"{type(error).__name__}: {error}", "\n".join(getattr(error, "__notes__", []))
    return reported, "", ""


@pytest.mark.parametrize(("how", "transport"), [("sleeps", "auto"), ("stopped", "process_group"), ("stopped", "auto")])
def test_a_stalled_rank_is_waited_for(how: str, transport: str) -> None:
    with ranks(3) as group:
        answers = group.run(train, how, transport, 100.0, 0.5)
    assert [error for _, error, _ in answers] == ["", "", ""]
    text = "\n".join(line for reported, _, _ in answers for line in reported)
    assert "call 2 of the pipeline has taken" in text
    assert "waits for rank 1 to send the input of stage 2, microbatch 1" in text
    if how == "sleeps":
        assert "rank 1 is at" in text and "computes 1F1" in text and "in forward)" in text
    else:
        # if it was slow before it was stopped, it has
        assert "rank 1 has not reported" in text or "rank 1 is at" in text


def test_at_the_timeout_the_error_says_who_waited_for_whom(tmp_path: Path) -> None:
    with ranks(3) as group:
        # building must not take as long as this timeout, on any machine
        answers = group.run(train, "sleeps", "auto", 10.0, 1.0, tmp_path)
    for rank, (_, error, notes) in enumerate(answers):
        assert error.startswith("StepError") and "rank 1" in error, error
        assert notes.startswith("fastpipe: when the pipeline ended\nrank 0 "), notes
        if rank == 2:
            assert "rank 2 was at" in notes and "waits for rank 1 to send the input of stage 2" in notes, notes
