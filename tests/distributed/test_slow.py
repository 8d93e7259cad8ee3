"""Slow is not dead: a rank that stalls is waited for, and the others say that they wait for it."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fastpipe import Pipeline
from tests.distributed.ranks import ranks

COUNT = 4


class Stalls(nn.Module):
    """Sleeps in one of its forwards, or is stopped and continued from outside."""

    def __init__(self, at_call: int, how: str, seconds: float) -> None:
        super().__init__()
        self.linear, self.at_call, self.how, self.calls = nn.Linear(4, 4), at_call, how, 0
        self.seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls - 1 == self.at_call:
            if self.how == "stopped":
                own = os.getpid()
                subprocess.Popen(["sh", "-c", f"sleep {self.seconds}; kill -CONT {own}"], start_new_session=True)
                os.kill(own, signal.SIGSTOP)
            else:
                time.sleep(self.seconds)
        return self.linear(x)


def train(
    how: str, transport: str, timeout: float, warn_after: float, seconds: float = 3.0
) -> tuple[list[str], str, str]:
    """Runs on every rank; rank 1 stalls in the second step. What is reported here, and what is raised."""
    reported: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: reported.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("fastpipe").addHandler(handler)
    torch.manual_seed(0)
    own = dist.get_rank()
    layers = [Stalls(COUNT + 1 if own == 1 else -1, how, seconds) for _ in range(dist.get_world_size())]
    options = {"transport": transport, "timeout": timeout, "warn_after": warn_after}
    pipe = Pipeline(layers, "1f1b", COUNT, nn.functional.mse_loss, **options)
    try:
        for _ in range(3):
            pipe.step(torch.randn(4, 4), target=torch.randn(4, 4))
    except Exception as error:
        return reported, f"{type(error).__name__}: {error}", "\n".join(getattr(error, "__notes__", []))
    finally:
        logging.getLogger("fastpipe").removeHandler(handler)
    return reported, "", ""


@pytest.mark.parametrize(("how", "transport"), [("sleeps", "auto"), ("stopped", "process_group"), ("stopped", "auto")])
def test_a_stalled_rank_is_waited_for(how: str, transport: str) -> None:
    with ranks(3) as group:
        answers = group.run(train, how, transport, 100.0, 0.5)
    assert [error for _, error, _ in answers] == ["", "", ""]
    text = "\n".join(line for reported, _, _ in answers for line in reported)
    assert "step 2 has taken" in text
    assert "waits for rank 1 to send the input of stage 2, microbatch 1" in text
    if how == "sleeps":
        assert "rank 1 is at" in text and "computes 1F1" in text and "in forward)" in text
    else:
        assert "rank 1 has not said anything" in text


def test_at_the_timeout_the_error_says_who_waited_for_whom() -> None:
    with ranks(3) as group:
        # building must not take as long as this timeout, on any machine
        answers = group.run(train, "sleeps", "auto", 10.0, 1.0, 25.0)
    for rank, (_, error, notes) in enumerate(answers):
        assert error.startswith("StepError") and "rank 1" in error, error
        assert notes.startswith("fastpipe: when the pipeline ended\nrank 0 "), notes
        if rank == 2:
            assert "rank 2 was at" in notes and "waits for rank 1 to send the input of stage 2" in notes, notes
