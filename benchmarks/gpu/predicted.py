"""Predicted and measured makespan, with stages whose kernels take a known time and next to nothing of the device.

python benchmarks/gpu/predicted.py

Four ranks are threads of one process and share the device; a stage keeps one thread of it busy for a while in its F,
its I and its W, so all ranks compute at once as if each had a device of its own. The costs are medians of one step's
spans, which are times of events on the device (`CostModel.from_timeline`); with them the schedule is simulated, and
compared with the makespans of other steps.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import fastpipe
from fastpipe import CostModel, Schedule, make_schedule

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from device import Rows, chosen, finish, forget, options
from sleeping import WIDTH, SleepingStage
from tables import ratio, spread

SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "interleaved_zb", "zbv", "dualpipev")
HEADS = ["schedule", "predicted, ms", "measured, ms", "measured/predicted"]
CYCLES_PER_SECOND = 1.5e9
"""About; nothing depends on how exact it is, as the times are measured."""


def pauses(device: str, seconds: float) -> Callable[[str], None]:
    """Something that takes time in F, I and W."""
    if device == "cpu":
        return lambda _: time.sleep(seconds)
    return lambda _: torch.cuda._sleep(int(seconds * CYCLES_PER_SECOND))


def row(schedule: Schedule, device: str, seconds: float, rounds: int) -> list[str]:
    pause = pauses(device, seconds * schedule.num_ranks / schedule.num_stages)
    stages = [SleepingStage(pause).to(device) for _ in range(schedule.num_stages)]
    pipe = fastpipe.Pipeline(
        stages,
        schedule,
        loss_fn=nn.functional.mse_loss,
        num_ranks=schedule.num_ranks,
        device=device,
        partition="layers",
    )
    batch = torch.randn(2, schedule.num_microbatches, WIDTH, device=device)

    def timeline() -> fastpipe.Timeline:
        found = pipe.step(batch[0], target=batch[1], trace=True).timeline
        assert found is not None
        return found

    for _ in range(3):
        timeline()
    predicted, measured = [], []
    for _ in range(rounds):
        costs = CostModel.from_timeline(timeline())
        predicted.append(fastpipe.simulate(schedule, costs).makespan)
        measured.append(timeline().makespan)
    finish(device)
    return [schedule.name, spread(predicted, 1e3, 2), spread(measured, 1e3, 2), ratio(measured, predicted, 3)]


def main() -> None:
    made = options(__doc__, rounds=7)
    made.add_argument("--ranks", type=int, default=4)
    made.add_argument("--microbatches", type=int, default=16)
    made.add_argument("--milliseconds", type=float, default=1.0, help="of a rank's F, its I and its W (1)")
    given = chosen(made)
    rows = Rows(HEADS, markdown=given.markdown)
    for name in SCHEDULES:
        schedule = make_schedule(name, num_ranks=given.ranks, num_microbatches=given.microbatches)
        rows.add(row(schedule, given.device, given.milliseconds / 1e3, given.rounds))
        forget(given.device)


if __name__ == "__main__":
    main()
