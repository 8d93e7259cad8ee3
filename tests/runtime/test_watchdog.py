"""Slow steps are reported with what each rank does; errors say where the ranks were."""

import logging
import re
import threading
import time

import pytest
import torch
from torch import nn

from fastpipe import Pipeline, lower, make_schedule
from fastpipe.runtime.step.watchdog import MAX_RANKS, folded, place_text, places_text
from fastpipe.testing import Fault
from tests.patience import PATIENCE


class Waits(nn.Module):
    """Waits in one of its forwards until it is told to go on."""

    def __init__(self, at_call: int) -> None:
        super().__init__()
        self.at_call, self.calls, self.go_on = at_call, 0, threading.Event()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls - 1 == self.at_call:
            assert self.go_on.wait(PATIENCE)
        return x * 1


class GoesOn(logging.Handler):
    """Tells it as soon as something is reported that has all these parts."""

    def __init__(self, layer: Waits, parts: list[str]) -> None:
        super().__init__(logging.WARNING)
        self.layer, self.parts = layer, parts

    def emit(self, record: logging.LogRecord) -> None:
        if all(part in record.getMessage() for part in self.parts):
            self.layer.go_on.set()


def run(layers: list[nn.Module], executor: str, steps: int, **options: object) -> None:
    pipe = Pipeline(layers, "1f1b", 4, nn.functional.mse_loss, num_ranks=4, executor=executor, **options)
    for _ in range(steps):
        pipe.step(torch.randn(4, 4), target=torch.randn(4, 4))


def test_who_waits_for_whom_is_reported_and_waited_for(executor):
    layer = Waits(at_call=4 + 1)
    parts = [
        "call 2 of the pipeline has taken",
        "\nrank 1 is at 7 of 48: computes 1F1; before that: ",
        "\nrank 2 is at 6 of 48: waits for rank 1 to send the input of stage 2, microbatch 1; before that",
    ]
    handler = GoesOn(layer, parts)
    logging.getLogger("fastpipe").addHandler(handler)
    try:
        run([nn.Linear(4, 4), layer, nn.Linear(4, 4), nn.Linear(4, 4)], executor, 3, warn_after=0.2)
    finally:
        logging.getLogger("fastpipe").removeHandler(handler)
    assert layer.go_on.is_set()


def test_an_error_says_where_the_ranks_were(executor):
    layers = [nn.Linear(4, 4), Fault(nn.Linear(4, 4), 1, OverflowError("on purpose")), nn.Linear(4, 4), nn.Linear(4, 4)]
    with pytest.raises(OverflowError) as caught:
        run(layers, executor, 1)
    place, note = caught.value.__notes__
    assert place == "fastpipe: raised on rank 1, stage 1, action 1F1, microbatch 1"
    assert "rank 1 was at 7 of 48: computes 1F1; before that: POST_RECV(1,0) POST_RECV(1,1)" in note


def test_nothing_is_watched_without_end():
    before = threading.active_count()
    run([nn.Linear(4, 4) for _ in range(4)], "python", 1, warn_after=float("inf"))
    deadline = time.monotonic() + PATIENCE
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not [thread for thread in threading.enumerate() if thread.name == "fastpipe-watchdog"]


@pytest.mark.parametrize("seconds", [0, -1, "soon", True, float("nan")])
def test_a_wrong_time_is_refused(seconds):
    with pytest.raises(ValueError, match=r"warn_after = .*: give seconds, more than 0"):
        run([nn.Linear(4, 4) for _ in range(4)], "python", 1, warn_after=seconds)


def test_every_place_has_words():
    program = lower(make_schedule("dualpipev", num_ranks=4, num_microbatches=8))
    for rank in range(4):
        texts = [place_text(program, rank, position) for position in range(len(program[rank]) + 1)]
        assert len(set(texts)) == len(texts)
        assert texts[-1].startswith("at the end of its program")


def unfolded(text: str) -> list[str]:
    """The instructions of a folded text: microbatches count up in what is repeated."""
    found = []
    for repeated, count, single in re.findall(r"\[(.*?)\]x(\d+)|(\S+)", text):
        for number in range(int(count or 1)):
            words = (repeated or single).split()
            found += [re.sub(r"(?<=[FBIW,])\d+", lambda at, n=number: str(int(at[0]) + n), word) for word in words]
    return found


@pytest.mark.parametrize("schedule", ["1f1b", "zbv", "dualpipev"])
def test_a_folded_text_has_all_instructions(schedule):
    instructions = list(lower(make_schedule(schedule, num_ranks=4, num_microbatches=40))[1])
    text, whole = folded(instructions), " ".join(folded([it]) for it in instructions)
    assert unfolded(text) == unfolded(whole) and len(unfolded(text)) == len(instructions)
    assert len(text) < len(whole)


def test_an_error_has_the_last_hundred_instructions():
    program = lower(make_schedule("1f1b", num_ranks=4, num_microbatches=40))
    _, before, those = places_text(program, {1: 200}).splitlines()[1].split("; before ")
    assert unfolded(before.removeprefix("that: ")) == [folded([it]) for it in list(program[1])[190:200]]
    assert unfolded(those.removeprefix("those: ")) == [folded([it]) for it in list(program[1])[100:190]]


def test_the_text_is_bounded():
    size = MAX_RANKS + 6
    program = lower(make_schedule("gpipe", num_ranks=size, num_microbatches=4))
    lines = places_text(program, dict.fromkeys(range(size), 3)).splitlines()
    assert len(lines) == MAX_RANKS + 2 and lines[-1] == "and 6 more ranks"
