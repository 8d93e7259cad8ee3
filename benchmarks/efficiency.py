"""How much longer a step takes than its schedule says, with stages that sleep.

python benchmarks/efficiency.py

The ranks are processes, and a stage sleeps for as long as it is told to, in its F, its I and its W: a rank spends the
same time in each of the three for a microbatch, however many stages it has. So there is no contention for the cores,
the durations are known, and what a step takes beyond the schedule's makespan is the runtime's: its loop, its messages,
its wake-ups.

time.sleep takes longer than it is told to. Every stage therefore measures its own sleeps, and the schedule is simulated
with their means over the step, with transfers that cost nothing: all that is not sleep counts against the runtime. (A
fused pair of F and B has no duration of its own to sleep; it is simulated with the median that was measured.) A figure
is measured / simulated makespan: median and quartiles of rounds.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from contenders import TORCH_NAMES, Work, fastpipe_step, torch_step
from ranks import Ranks, progress, ranks
from tables import machine, parser, ratio, spread, table
from torch import Tensor, nn

import fastpipe
from fastpipe import CostModel, Schedule, make_schedule

WIDTH = 4
KINDS = ("F", "I", "W")
Sleeps = dict[str, list[tuple[float, float]]]
"""Start and end, by kind."""


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


class SleepInBackward(torch.autograd.Function):
    """Belongs to I, as it has no weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sleeper: Sleeper) -> Tensor:
        ctx.sleeper = sleeper
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        ctx.sleeper.sleep("I")
        return grad, None


class SleepingStage(nn.Module):
    """A tiny linear between sleeps: a hook of its weight sleeps when the weight's gradient comes, which is in W."""

    def __init__(self, sleeper: Sleeper) -> None:
        super().__init__()
        self.sleeper = sleeper
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)
        self.linear.weight.register_hook(lambda _: sleeper.sleep("W"))

    def forward(self, x: Tensor) -> Tensor:
        self.sleeper.sleep("F")
        return SleepInBackward.apply(self.linear(x), self.sleeper)  # type: ignore[no-untyped-call,no-any-return]


def make_tasks(schedule: Schedule, durations: Sequence[float], with_torch: bool) -> Callable[[int], dict[str, Any]]:
    """For every rank, a task for each duration (of a rank's F, in seconds): one step."""
    share = schedule.num_ranks / schedule.num_stages

    def tasks(rank: int) -> dict[str, Any]:
        sleeper = Sleeper()
        batch = [torch.randn(schedule.num_microbatches, WIDTH) for _ in range(2)]
        work = Work(lambda _: SleepingStage(sleeper), *batch, nn.functional.mse_loss, torch.randn(1, WIDTH))
        step = fastpipe_step(schedule, rank, work)
        other = torch_step(schedule, rank, work) if with_torch else None

        def run(seconds: float, step: Callable[..., Any], **kwargs: Any) -> Any:
            sleeper.seconds = seconds * share
            sleeper.take()
            return step(**kwargs)

        def traced(seconds: float) -> tuple[float, float, Sleeps]:
            timeline = run(seconds, step, trace=True).timeline
            fused = CostModel.from_timeline(timeline).overlapped
            return timeline.makespan, math.nan if fused is None else statistics.fmean(fused), sleeper.take()

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
    """Measured and simulated makespans of one duration, by round."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.measured: list[float] = []
        self.expected: list[float] = []

    def add_fastpipe(self, answers: Sequence[tuple[float, float, Sleeps]]) -> None:
        makespan, fused, _ = answers[0]
        self.measured.append(makespan)
        self.expected.append(simulated(self.schedule, [sleeps for _, _, sleeps in answers], fused))

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


def main() -> None:
    options = parser(__doc__, rounds=2)
    options.add_argument("--ranks", type=int, default=4)
    options.add_argument("--microbatches", type=int, default=16)
    options.add_argument("--milliseconds", type=float, nargs="+", default=[10, 3, 1], help="of a rank's F, I and W")
    names = [family.name for family in fastpipe.list_schedules()]
    options.add_argument("--schedules", nargs="+", default=names, metavar="NAME", help="every one")
    options.add_argument("--torch", action="store_true", help="torch's schedules, too, where it has them")
    chosen = options.parse_args()
    durations = [number / 1e3 for number in chosen.milliseconds]
    print(machine(), file=sys.stdout)
    print(f"{chosen.ranks} ranks, {chosen.microbatches} microbatches, {chosen.rounds} rounds\n")
    rows = []
    for name in chosen.schedules:
        schedule = make_schedule(name, num_ranks=chosen.ranks, num_microbatches=chosen.microbatches)
        with_torch = chosen.torch and name in TORCH_NAMES
        found = measure(schedule, durations, chosen.rounds, with_torch, chosen.pin)
        rows.append(row(schedule, durations, found, chosen.torch))
    longest = f"{max(chosen.milliseconds):g} ms"
    heads = ["schedule", f"simulated at {longest}, ms", f"measured at {longest}, ms"]
    for name in ("fastpipe", "torch") if chosen.torch else ("fastpipe",):
        heads += [f"{name} at {number:g} ms" for number in chosen.milliseconds]
    print(table(heads, rows, markdown=chosen.markdown))


if __name__ == "__main__":
    main()
