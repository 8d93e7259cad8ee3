"""How much longer a step takes than its schedule says, with stages that sleep.

python benchmarks/efficiency.py

The ranks are processes, and a stage sleeps for as long as it is told to, in its F, its I and its W: a rank spends the
same time in each of the three for a microbatch, however many stages it has. So there is no contention for the cores,
the durations are known, and what a step takes beyond the schedule's makespan is the runtime's: its loop, its messages,
its wake-ups.

time.sleep takes longer than it is told to. Every stage therefore measures its own sleeps, and the schedule is simulated
with their means over the step, with transfers that cost nothing: all that is not sleep counts against the runtime. (A
fused pair of F and B has no duration of its own to sleep; it is simulated with the median that was measured.) A figure
is measured / simulated makespan: median and quartiles of rounds. What a step takes more is told apart along its
critical path, whose parts add up to the makespan: sleeps that were longer than the mean, what module calls and autograd
take beside their sleeps, messages, wake-ups (from a message's end to the start of what waited for it), and the loop.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from contenders import TORCH_NAMES, Work, fastpipe_step, torch_step
from profiles import AUTOGRAD, LOOP, MESSAGES, MODULE, SLEEP, WAKE_UP, Aim, Parts, explained, medians, more, of_path
from ranks import Ranks, placing, progress, ranks
from sleeping import KINDS, WIDTH, SleepingStage
from tables import machine, parser, ratio, spread, table
from torch import nn

import fastpipe
from fastpipe import CostModel, Schedule, Timeline, make_schedule

Sleeps = dict[str, list[tuple[float, float]]]
"""Start and end, by kind."""
PARTS = (SLEEP, MODULE, AUTOGRAD, MESSAGES, WAKE_UP, LOOP)
AIM = Aim("measured/simulated", 1.03)
"""With the longest of the durations."""


class Sleeper:
    """Sleeps for a rank's stages, and notes from when to when."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.sleeps: Sleeps = {kind: [] for kind in KINDS}

    def sleep(self, kind: str) -> None:
        start = time.perf_counter()
        time.sleep(self.seconds)
        self.sleeps[kind].append((start, time.perf_counter()))

    def take(self) -> Sleeps:
        """The sleeps since the last call."""
        taken, self.sleeps = self.sleeps, {kind: [] for kind in KINDS}
        return taken


def make_tasks(schedule: Schedule, durations: Sequence[float], with_torch: bool) -> Callable[[int], dict[str, Any]]:
    """For every rank, a task for each duration (of a rank's F, in seconds): one step."""
    share = schedule.num_ranks / schedule.num_stages

    def tasks(rank: int) -> dict[str, Any]:
        sleeper = Sleeper()
        batch = [torch.randn(schedule.num_microbatches, WIDTH) for _ in range(2)]
        work = Work(lambda _: SleepingStage(sleeper.sleep), *batch, nn.functional.mse_loss, torch.randn(1, WIDTH))
        step = fastpipe_step(schedule, rank, work)
        other = torch_step(schedule, rank, work) if with_torch else None

        def run(seconds: float, step: Callable[..., Any], **kwargs: Any) -> Any:
            sleeper.seconds = seconds * share
            sleeper.take()
            return step(**kwargs)

        def traced(seconds: float) -> tuple[Timeline | None, Sleeps]:
            timeline = run(seconds, step, trace=True).timeline
            return timeline if rank == 0 else None, sleeper.take()

        def untraced(seconds: float) -> Sleeps:
            assert other is not None
            run(seconds, other)
            return sleeper.take()

        found: dict[str, Any] = {f"fastpipe {s}": lambda s=s: traced(s) for s in durations}
        if other is not None:
            found |= {f"torch {s}": lambda s=s: untraced(s) for s in durations}
        return found

    return tasks


def simulated(schedule: Schedule, sleeps: Sequence[Sleeps], fused: float = math.nan) -> float:
    """The makespan with the mean of every kind's sleeps."""
    means = {}
    for kind in KINDS:
        lengths = [end - start for one in sleeps for start, end in one[kind]]
        means[kind] = statistics.fmean(lengths) if lengths else 0.0
    costs = CostModel(
        forward=means["F"],
        backward_input=means["I"],
        backward_weight=means["W"],
        overlapped=None if math.isnan(fused) else fused,
    )
    return fastpipe.simulate(schedule, costs).makespan


class Result:
    """Measured and simulated makespans of one duration, and what the measured ones consist of, by round."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.measured: list[float] = []
        self.expected: list[float] = []
        self.parts: list[Parts] = []

    def add_fastpipe(self, answers: Sequence[tuple[Timeline | None, Sleeps]]) -> None:
        timeline, sleeps = answers[0][0], [taken for _, taken in answers]
        assert timeline is not None
        fused = CostModel.from_timeline(timeline).overlapped
        expected = simulated(self.schedule, sleeps, math.nan if fused is None else statistics.fmean(fused))
        self.measured.append(timeline.makespan)
        self.expected.append(expected)
        parts = of_path(timeline, [[span for kind in KINDS for span in one[kind]] for one in sleeps])
        self.parts.append({name: value / expected for name, value in parts.items()})

    def add_torch(self, sleeps: Sequence[Sleeps]) -> None:
        spans = [span for one in sleeps for kind in KINDS for span in one[kind]]
        self.measured.append(max(end for _, end in spans) - min(start for start, _ in spans))
        self.expected.append(simulated(self.schedule, sleeps))


def measure(
    schedule: Schedule, durations: Sequence[float], rounds: int, with_torch: bool, pin: str
) -> dict[str, Result]:
    names = [*(f"fastpipe {s}" for s in durations), *(f"torch {s}" for s in durations if with_torch)]
    found = {name: Result(schedule) for name in names}

    def once(group: Ranks, name: str) -> None:
        answers = group.call(name)
        result = found[name]
        (result.add_torch if name.startswith("torch") else result.add_fastpipe)(answers)

    with ranks(schedule.num_ranks, make_tasks(schedule, durations, with_torch), pin=pin) as group:
        for name in names[:: len(durations)]:
            group.call(name)  # shapes are announced, memory is made
        for number in range(rounds):
            progress(f"{schedule.name}: round {number + 1} of {rounds}")
            for name in names:
                once(group, name)
    progress("")
    return found


def row(schedule: Schedule, durations: Sequence[float], found: dict[str, Result], with_torch: bool) -> list[str]:
    longest = found[f"fastpipe {max(durations)}"]
    cells = [schedule.name, spread(longest.expected, 1e3), spread(longest.measured, 1e3)]
    for name in ("fastpipe", "torch") if with_torch else ("fastpipe",):
        for seconds in durations:
            result = found.get(f"{name} {seconds}")
            cells.append(ratio(result.measured, result.expected, 3) if result else "")
    return cells


def profile(result: Result) -> list[str]:
    """By how much each part of the critical path lengthens the simulated makespan, in per cent."""
    over = more(medians(result.parts), {SLEEP: 1.0})
    return [result.schedule.name, *(f"{100 * over.get(part, 0.0):.2f}" for part in PARTS)]


def shortfall(result: Result) -> str | None:
    missed = AIM.missed([one / other for one, other in zip(result.measured, result.expected, strict=True)])
    if missed is None:
        return None
    return f"{result.schedule.name}: {missed}; {explained(more(medians(result.parts), {SLEEP: 1.0}), 100, '%', 2)}"


def parse() -> argparse.Namespace:
    options = parser(__doc__, rounds=2)
    options.add_argument("--ranks", type=int, default=4)
    options.add_argument("--microbatches", type=int, default=16)
    options.add_argument("--milliseconds", type=float, nargs="+", default=[10, 3, 1], help="of a rank's F, I and W")
    names = [family.name for family in fastpipe.list_schedules()]
    options.add_argument("--schedules", nargs="+", default=names, metavar="NAME", help="every one")
    options.add_argument("--torch", action="store_true", help="torch's schedules, too, where it has them")
    options.add_argument("--profile", action="store_true", help="what every step takes more, by part")
    return options.parse_args()


def main() -> None:
    chosen = parse()
    durations = [number / 1e3 for number in chosen.milliseconds]
    print(machine(), file=sys.stdout)
    print(f"{chosen.ranks} ranks, {chosen.microbatches} microbatches, {chosen.rounds} rounds;")
    print(f"{placing(chosen.ranks, chosen.pin)}\n")
    rows, longest = [], []
    for name in chosen.schedules:
        schedule = make_schedule(name, num_ranks=chosen.ranks, num_microbatches=chosen.microbatches)
        with_torch = chosen.torch and name in TORCH_NAMES
        found = measure(schedule, durations, chosen.rounds, with_torch, chosen.pin)
        rows.append(row(schedule, durations, found, chosen.torch))
        longest.append(found[f"fastpipe {max(durations)}"])
    duration = f"{max(chosen.milliseconds):g} ms"
    heads = ["schedule", f"simulated at {duration}, ms", f"measured at {duration}, ms"]
    for name in ("fastpipe", "torch") if chosen.torch else ("fastpipe",):
        heads += [f"{name} at {number:g} ms" for number in chosen.milliseconds]
    print(table(heads, rows, markdown=chosen.markdown))
    if chosen.profile:
        print(f"\nat {duration}, what lengthens the critical path, % of the simulated makespan\n")
        print(table(["schedule", *PARTS], [profile(result) for result in longest], markdown=chosen.markdown))
    print("", *filter(None, map(shortfall, longest)), sep="\n")


if __name__ == "__main__":
    main()
