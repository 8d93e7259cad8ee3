"""What a plan is worth on the real executor, against every named schedule with the same memory, with stages that sleep.

python benchmarks/plan_real.py --ranks 4

The ranks are processes. A model of layers of unequal cost is cut and ordered by `fastpipe.plan`, and by every schedule
of the registry that fits into the same memory, with the partition that the planner gives it. A layer sleeps for as long
as its costs say, in its F, its I and its W: sleeping ranks do not contend for cores, so the durations are known. Sleep
ends by a deadline, whose last part is awaited awake, since time.sleep takes longer than it is told to.

What the runtime itself takes is measured first, by `Pipeline.profile` of another schedule with the same layers: seconds
beside those that an action sleeps (`launch`), and the latency of a hop. Both are in the costs that all are predicted
with. `--bare` leaves them out.

The memory of a rank is what 1F1B holds, or a fraction of it, and the parameters, of which there is room for a tenth
more than its share: not for two copies of the model. Fused pairs run one half after the other here, and cost the sum:
two sleeps at once would cost nothing. All are made in the same processes and run in turns. A row is one schedule:
what is simulated, the measured makespan (median and quartiles of rounds), their ratio. The plan has to be the shortest,
and as long as it was predicted to be.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from ranks import placing, progress, ranks
from sleeping import KINDS, WIDTH, SleepingStage
from tables import machine, parser, ratio, spread, table
from torch import Tensor, nn

import fastpipe
from fastpipe import LayerCosts, Schedule
from fastpipe.planner.candidates import evaluate, from_registry
from fastpipe.planner.problem import Problem, memory_of

COSTS = ("forward", "backward_input", "backward_weight")
"""Of the kinds F, I and W."""
PARAMETERS = 8e6
AWAKE = 2e-4
"""Seconds at the end of a sleep that are spent looking at the clock."""


def wait(seconds: float) -> None:
    """Sleep until a deadline."""
    end = time.perf_counter() + seconds
    if seconds > AWAKE:
        time.sleep(seconds - AWAKE)
    while time.perf_counter() < end:
        pass


def waiting_stage(seconds: Sequence[float]) -> SleepingStage:
    """It takes so long in its F, I and W."""
    by_kind = dict(zip(KINDS, seconds, strict=True))
    return SleepingStage(lambda kind: wait(by_kind[kind]))


@dataclass(frozen=True)
class Contender:
    """A schedule, its stages, and what is expected of it."""

    name: str
    schedule: Schedule
    seconds: tuple[tuple[float, ...], ...]
    expected: float


def layer_costs(num_layers: int, milliseconds: float, num_ranks: int) -> LayerCosts:
    """An embedding that takes less, a head that takes more, blocks that differ by a fifth; F, I, W as 1, 1.2, 0.8."""
    weights = [0.5, *(1.0 + 0.2 * (layer % 3 - 1) for layer in range(1, num_layers - 1)), 1.6]
    unit = milliseconds / 1e3 * num_ranks / sum(weights)
    seconds = {k: [unit * part * w for w in weights] for k, part in zip(COSTS, (1.0, 1.2, 0.8), strict=True)}
    return LayerCosts(num_layers, **seconds, held_bytes=[1e6 * w for w in weights], parameter_bytes=PARAMETERS)


def limit(costs: LayerCosts, fraction: float, num_ranks: int) -> float:
    """Bytes of a rank."""
    held = sum(costs.stages([range(costs.num_layers)], 1).per_stage("stage_bytes", 1))
    return float(fraction * held + 1.1 * PARAMETERS * costs.num_layers / num_ranks)


def calibrated(costs: LayerCosts, num_ranks: int, count: int, pin: str) -> LayerCosts:
    """With what the runtime takes beside the sleeps, as a profile of a V finds it."""
    schedule = fastpipe.make_schedule("zbv", num_ranks=num_ranks, num_microbatches=count)
    cost = costs.stages(costs.partition(schedule.num_stages), count)
    one = Contender("a profile", schedule, by_stage(cost, schedule), 0.0)

    def tasks(rank: int) -> dict[str, Any]:
        pipe, x, y = pipeline(one, rank)
        return {one.name: lambda: pipe.profile(x, target=y)}

    with ranks(num_ranks, tasks, pin=pin) as group:
        found = group.call(one.name)[0]
    beside = [
        measured - slept
        for kind in COSTS
        for measured, slept in zip(
            found.per_stage(kind, schedule.num_stages), cost.per_stage(kind, schedule.num_stages), strict=True
        )
    ]
    return replace(costs, launch=max(0.0, statistics.median(beside)), comm=found.comm)


def contenders(costs: LayerCosts, num_ranks: int, count: int, fraction: float, effort: float) -> list[Contender]:
    """The plan first. What stages sleep is without the runtime's own time."""
    slept = replace(costs, launch=0.0)
    memory = limit(costs, fraction, num_ranks)
    plan = fastpipe.plan(costs, num_ranks=num_ranks, num_microbatches=count, memory=memory, effort=effort)
    assert plan.partition is not None
    stages = slept.stages(plan.partition, count)
    found = [Contender("the plan", plan.schedule, by_stage(stages, plan.schedule), plan.makespan)]
    problem = Problem(costs, num_ranks, memory_of(memory), "makespan", 4)
    for name, schedule in from_registry(problem, count, problem.stages_per_rank()):
        if isinstance(schedule, str) or any(schedule == one.schedule for one in found[1:]):
            continue
        setting = problem.setting(schedule.placement, count)
        row, timeline = evaluate(problem, name, setting, schedule)
        if row.fits:
            assert setting.parts is not None
            stages = slept.stages(setting.parts, count)
            found.append(Contender(name, schedule, by_stage(stages, schedule), timeline.makespan))
    return [found[0], *sorted(found[1:], key=lambda one: one.expected)]


def by_stage(cost: fastpipe.CostModel, schedule: Schedule) -> tuple[tuple[float, ...], ...]:
    columns = [cost.per_stage(kind, schedule.num_stages).tolist() for kind in COSTS]
    return tuple(zip(*columns, strict=True))


def pipeline(one: Contender, rank: int) -> tuple[fastpipe.Pipeline, Tensor, Tensor]:
    """A contender's, with a batch."""
    held = sorted(one.schedule.placement.stages_of(rank))
    modules = {stage: waiting_stage(one.seconds[stage]) for stage in held}
    loss = nn.functional.mse_loss
    pipe = fastpipe.Pipeline(modules, one.schedule, loss_fn=loss, merge=False, overlap="never")
    x, y = (torch.randn(one.schedule.num_microbatches, WIDTH) for _ in range(2))
    return pipe, x, y


def make_tasks(found: Sequence[Contender]) -> Callable[[int], dict[str, Any]]:
    """For every rank, a task for each contender: one traced step, which gives its makespan."""

    def task(one: Contender, rank: int) -> Callable[[], float]:
        pipe, x, y = pipeline(one, rank)
        return lambda: pipe.step(x, target=y, trace=True).timeline.makespan

    return lambda rank: {one.name: task(one, rank) for one in found}


def measure(found: Sequence[Contender], rounds: int, pin: str) -> dict[str, list[float]]:
    measured: dict[str, list[float]] = {one.name: [] for one in found}
    with ranks(found[0].schedule.num_ranks, make_tasks(found), pin=pin) as group:
        for number in range(rounds + 1):
            progress(f"round {number} of {rounds}")
            for name, values in measured.items():
                makespan = group.call(name)[0]
                if number:  # in the first one shapes are announced
                    values.append(makespan)
    progress("")
    return measured


def main() -> None:
    options = parser(__doc__, rounds=3)
    options.add_argument("--ranks", type=int, default=4)
    options.add_argument("--microbatches", type=int, default=8)
    options.add_argument("--milliseconds", type=float, default=16, help="of a rank's F in the mean (16)")
    options.add_argument("--memory", type=float, default=1.0, help="a fraction of 1F1B's (1.0)")
    options.add_argument("--effort", type=float, default=1.0, help="of the search")
    options.add_argument("--rows", type=int, default=12, help="how many named schedules, the best first (12)")
    options.add_argument("--bare", action="store_true", help="predict without the runtime's own time")
    chosen = options.parse_args()
    costs = layer_costs(4 * chosen.ranks, chosen.milliseconds, chosen.ranks)
    if not chosen.bare:
        costs = calibrated(costs, chosen.ranks, chosen.microbatches, chosen.pin)
        print(f"beside the sleeps: {1e3 * costs.launch:.3f} ms an action; a hop {costs.comm!r} s")
    found = contenders(costs, chosen.ranks, chosen.microbatches, chosen.memory, chosen.effort)[: chosen.rows + 1]
    print(machine())
    print(
        f"{chosen.ranks} ranks, {chosen.microbatches} microbatches, memory {chosen.memory:g}, {chosen.rounds} rounds;\n"
        f"{placing(chosen.ranks, chosen.pin)}\n"
    )
    measured = measure(found, chosen.rounds, chosen.pin)
    rows = []
    for one in found:
        values = measured[one.name]
        expected = [one.expected] * len(values)
        rows.append([one.name, f"{1e3 * one.expected:.1f}", spread(values, 1e3), ratio(values, expected, 3)])
    print(table(["schedule", "simulated, ms", "measured, ms", "measured / simulated"], rows, markdown=chosen.markdown))


if __name__ == "__main__":
    main()
