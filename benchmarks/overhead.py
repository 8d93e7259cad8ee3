"""What the runtime costs when the stages cost nearly nothing: fastpipe, torch's own schedules, and the compute alone.

python benchmarks/overhead.py --ranks 2 4

A stage is two narrow Linears, so that the host's time is all there is. The ranks are processes on this machine;
fastpipe runs its native executor over its default transport. *Compute* is the same stages' F and B in the schedule's
order, in plain PyTorch in as many processes at the same time, on tensors that nobody sent; for schedules that split the
backward it does F and B, too, as I and W together are to cost what B costs. *By hand* is F, I and W with linears that
were split by hand (a Python autograd.Function and a list), the way to split without fastpipe.

A figure is the time of a step, from the first rank's start to the last one's end, by (stage, microbatch) of a rank: the
bubbles at its ends are in it. Ratios are those of rounds: median and quartiles. What falls short of its aim is named,
with the parts of fastpipe's step that are more than the compute, on the rank that waits the least: module calls and
autograd (against the same in plain PyTorch), waiting, messages (with the system calls that wake others), and what is
around the loop. ``--profile`` prints them for all.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from contenders import TORCH_NAMES, Alone, Work, fastpipe_step, torch_step
from profiles import AROUND, AUTOGRAD, MESSAGES, MODULE, WAITING, Aim, Parts, explained, medians, more, of_rank
from ranks import Ranks, interleaved, placing, ranks
from tables import machine, parser, ratio, spread, table
from torch import Tensor, nn
from torch.nn import functional as F

from fastpipe import Schedule, make_schedule

WIDTH = 16
ROWS = 8
"""Of a microbatch."""


def make_stage(index: int) -> nn.Module:
    torch.manual_seed(index)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    """Costs as little as a loss can, so that no rank has much more to do than the others, whose waits would hide."""
    return output.sum()


def make_work(num_microbatches: int) -> Work:
    rows = ROWS * num_microbatches
    batch = torch.randn(rows, WIDTH), torch.randn(rows, WIDTH)
    return Work(make_stage, *batch, loss_fn, torch.randn(ROWS, WIDTH))


class SplitLinear(torch.autograd.Function):
    """A linear whose weight's gradient waits in a list."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, layer: HandSplit) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.layer = layer
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        ctx.layer.waiting.append((x, grad))
        return (grad @ weight if ctx.needs_input_grad[0] else None), None, None, None


class HandSplit(nn.Module):
    """A linear with its backward in two."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.waiting: deque[tuple[Tensor, Tensor]] = deque()

    def forward(self, x: Tensor) -> Tensor:
        # the weight requires a gradient, which makes the output require one where the input does not
        return SplitLinear.apply(x, self.weight, self.bias, self)  # type: ignore[no-untyped-call,no-any-return]

    def backward_weight(self) -> None:
        x, grad = self.waiting.popleft()
        for parameter, part in ((self.weight, grad.t() @ x), (self.bias, grad.sum(0))):
            if parameter.grad is None:
                parameter.grad = part
            else:
                parameter.grad += part


class AloneByHand(Alone):
    """The same with I and W apart."""

    def __init__(self, schedule: Schedule, rank: int, work: Work) -> None:
        super().__init__(schedule, rank, work)
        for stage, module in self.modules.items():
            self.modules[stage] = nn.Sequential(*(HandSplit(layer) for layer in module.children()))

    def backward(self, stage: int, output: Tensor) -> None:
        super().backward(stage, output)
        self.backward_weight(stage)

    @torch.no_grad()
    def backward_weight(self, stage: int) -> None:
        for layer in self.modules[stage].children():
            layer.backward_weight()


RATIOS = (("fastpipe", "compute"), ("fastpipe", "by hand"), ("torch", "fastpipe"))


PARTS = (MODULE, AUTOGRAD, WAITING, MESSAGES, AROUND)


def aims(schedule: Schedule) -> dict[tuple[str, str], Aim]:
    """What the ratios have to be."""
    crowded = schedule.num_ranks > 2
    most = 1.5 if crowded else 1.15 if schedule.name == "1f1b" else 1.3
    return {
        ("fastpipe", "compute"): Aim("fastpipe/compute", most),
        ("torch", "fastpipe"): Aim("torch/fastpipe", 5 if crowded else 6, at_least=True),
    }


class AloneByPart(Alone):
    """The compute, and what of it is in module calls and in autograd."""

    def __init__(self, schedule: Schedule, rank: int, work: Work) -> None:
        super().__init__(schedule, rank, work)
        self.parts: Counter[str] = Counter()

    def forward(self, stage: int, microbatch: int) -> Tensor:
        start = time.perf_counter()
        output = super().forward(stage, microbatch)
        self.parts[MODULE] += time.perf_counter() - start
        return output

    def backward(self, stage: int, output: Tensor) -> None:
        start = time.perf_counter()
        super().backward(stage, output)
        self.parts[AUTOGRAD] += time.perf_counter() - start

    def backward_input(self, stage: int, output: Tensor) -> None:
        self.backward(stage, output)

    def take(self) -> Parts:
        """Of one step."""
        self.parts.clear()
        self()
        return dict(self.parts)


@dataclass
class Measurement:
    """Seconds a (stage, microbatch) of a rank.

    Attributes:
        schedule: whose.
        times: by contender and round.
        parts: of fastpipe's step on the rank that waits the least.
        alone: of the compute on the same rank.
    """

    schedule: Schedule
    times: dict[str, list[float]]
    parts: Parts
    alone: Parts

    def shortfalls(self) -> list[str]:
        pairs = aims(self.schedule).items()
        missed = [
            aim.missed([a / b for a, b in zip(self.times[one], self.times[other], strict=True)])
            for (one, other), aim in pairs
        ]
        return list(filter(None, missed))


def profile(group: Ranks, rounds: int) -> tuple[Parts, Parts]:
    """Where a step of fastpipe and of the compute went, on the rank that waits the least; in seconds."""
    found = [group.call("profile") for _ in range(rounds + 1)][1:]
    by_rank = [[medians(each) for each in zip(*answers, strict=True)] for answers in zip(*found, strict=True)]
    step, alone = min(by_rank, key=lambda both: both[0].get(WAITING, 0.0))
    return step, alone


def measure(schedule: Schedule, options: argparse.Namespace) -> Measurement:
    work = make_work(schedule.num_microbatches)
    makers: dict[str, Callable[[int], Any]] = {"compute": lambda rank: Alone(schedule, rank, work)}
    if schedule.splits_backward:
        makers["by hand"] = lambda rank: AloneByHand(schedule, rank, work)
    makers["fastpipe"] = lambda rank: fastpipe_step(schedule, rank, work, executor="native")
    if options.python:
        makers["python"] = lambda rank: fastpipe_step(schedule, rank, work, executor="python")
    makers["torch"] = lambda rank: torch_step(schedule, rank, work)

    def tasks(rank: int) -> dict[str, Any]:
        made = {name: make(rank) for name, make in makers.items()}
        alone = AloneByPart(schedule, rank, work)

        def by_part() -> tuple[Parts, Parts]:
            start = time.perf_counter()
            result = made["fastpipe"]()
            seconds = time.perf_counter() - start
            return of_rank(result.timeline, rank, seconds), alone.take()

        return {**made, "profile": by_part}

    per_rank = schedule.num_microbatches * schedule.num_stages / schedule.num_ranks
    with ranks(schedule.num_ranks, tasks, pin=options.pin) as group:
        measures = {name: partial(group.time, name, 1 if name == "torch" else options.steps) for name in makers}
        found = interleaved(measures, options.rounds, f"{schedule.num_ranks} ranks, {schedule.name}")
        parts = profile(group, max(5, options.rounds))
    times = {name: [seconds / per_rank for seconds in times] for name, times in found.items()}
    return Measurement(
        schedule, times, *({name: seconds / per_rank for name, seconds in each.items()} for each in parts)
    )


def row(found: Measurement, contenders: Sequence[str]) -> list[str]:
    times = found.times
    cells = [TORCH_NAMES[found.schedule.name]]
    cells += [spread(times[name], 1e6) if name in times else "" for name in contenders]
    return cells + [ratio(times[one], times[other]) if other in times else "" for one, other in RATIOS]


def parts_row(found: Measurement) -> list[str]:
    """Microseconds, and in brackets those of the compute."""
    cells = [TORCH_NAMES[found.schedule.name]]
    for part in PARTS:
        alone = f" ({1e6 * found.alone[part]:.1f})" if part in found.alone else ""
        cells.append(f"{1e6 * found.parts.get(part, 0.0):.1f}{alone}")
    return cells


def parse() -> argparse.Namespace:
    options = parser(__doc__, rounds=5)
    options.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    options.add_argument("--microbatches", type=int, nargs="+", default=[64])
    options.add_argument("--steps", type=int, default=4, help="of a measurement, of all but torch (4)")
    options.add_argument("--schedules", nargs="+", default=list(TORCH_NAMES), metavar="NAME", help="of those both have")
    options.add_argument("--python", action="store_true", help="fastpipe's Python executor as well")
    options.add_argument("--profile", action="store_true", help="where all steps go, by part")
    return options.parse_args()


def report(found: Sequence[Measurement], contenders: Sequence[str], options: argparse.Namespace) -> None:
    """The tables of one size, and what falls short in it."""
    heads = ["schedule", *contenders, *(f"{one}/{other}" for one, other in RATIOS)]
    print(table(heads, [row(one, contenders) for one in found], markdown=options.markdown), flush=True)
    if options.profile:
        print("\nfastpipe's step (the compute) on the rank that waits the least, us a (stage, microbatch)\n")
        print(table(["schedule", *PARTS], [parts_row(one) for one in found], markdown=options.markdown))
    for one in found:
        missed = one.shortfalls()
        if missed:
            over = explained(more(one.parts, one.alone), 1e6, "us over the compute")
            print(f"\n{TORCH_NAMES[one.schedule.name]}: {'; '.join(missed)}; {over}", flush=True)


def main() -> None:
    options = parse()
    contenders = ["compute", "by hand", "fastpipe", *(["python"] if options.python else []), "torch"]
    print(machine())
    for num_ranks in options.ranks:
        for count in options.microbatches:
            print(f"\n{num_ranks} ranks, {count} microbatches, {options.rounds} rounds; us a (stage, microbatch);")
            print(f"{placing(num_ranks, options.pin)}\n")
            made = [make_schedule(name, num_ranks=num_ranks, num_microbatches=count) for name in options.schedules]
            report([measure(schedule, options) for schedule in made], contenders, options)


if __name__ == "__main__":
    main()
