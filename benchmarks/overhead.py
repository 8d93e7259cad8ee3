"""What the runtime costs when the stages cost nearly nothing: fastpipe, torch's own schedules, and the compute alone.

python benchmarks/overhead.py --ranks 2 4

A stage is two narrow Linears, so that the host's time is all there is. The ranks are processes on this machine;
fastpipe runs its native executor over its default transport. *Compute* is the same stages' F and B in the schedule's
order, in plain PyTorch in as many processes at the same time, on tensors that nobody sent; for schedules that split the
backward it does F and B, too, as I and W together are to cost what B costs. *By hand* is F, I and W with linears that
were split by hand (a Python autograd.Function and a list), the way to split without fastpipe.

A figure is the time of a step, from the first rank's start to the last one's end, by (stage, microbatch) of a rank: the
bubbles at its ends are in it. Ratios are those of rounds: median and quartiles.
"""

from __future__ import annotations

import argparse
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from contenders import TORCH_NAMES, Alone, Work, fastpipe_step, torch_step
from ranks import interleaved, ranks
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


def measure(schedule: Schedule, options: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds a (stage, microbatch) of a rank, by contender and round."""
    work = make_work(schedule.num_microbatches)
    makers: dict[str, Callable[[int], Any]] = {"compute": lambda rank: Alone(schedule, rank, work)}
    if schedule.splits_backward:
        makers["by hand"] = lambda rank: AloneByHand(schedule, rank, work)
    makers["fastpipe"] = lambda rank: fastpipe_step(schedule, rank, work, executor="native")
    if options.python:
        makers["python"] = lambda rank: fastpipe_step(schedule, rank, work, executor="python")
    makers["torch"] = lambda rank: torch_step(schedule, rank, work)

    def tasks(rank: int) -> dict[str, Any]:
        return {name: make(rank) for name, make in makers.items()}

    per_rank = schedule.num_microbatches * schedule.num_stages / schedule.num_ranks
    with ranks(schedule.num_ranks, tasks, pin=options.pin) as group:
        measures = {name: partial(group.time, name, 1 if name == "torch" else options.steps) for name in makers}
        found = interleaved(measures, options.rounds, f"{schedule.num_ranks} ranks, {schedule.name}")
    return {name: [seconds / per_rank for seconds in times] for name, times in found.items()}


def row(schedule: Schedule, found: dict[str, list[float]], contenders: Sequence[str]) -> list[str]:
    cells = [TORCH_NAMES[schedule.name]]
    cells += [spread(found[name], 1e6) if name in found else "" for name in contenders]
    return cells + [ratio(found[one], found[other]) if other in found else "" for one, other in RATIOS]


def parse() -> argparse.Namespace:
    options = parser(__doc__, rounds=5)
    options.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    options.add_argument("--microbatches", type=int, nargs="+", default=[64])
    options.add_argument("--steps", type=int, default=4, help="of a measurement, of all but torch (4)")
    options.add_argument("--schedules", nargs="+", default=list(TORCH_NAMES), metavar="NAME", help="of those both have")
    options.add_argument("--python", action="store_true", help="fastpipe's Python executor as well")
    return options.parse_args()


def main() -> None:
    options = parse()
    contenders = ["compute", "by hand", "fastpipe", *(["python"] if options.python else []), "torch"]
    heads = ["schedule", *contenders, *(f"{one}/{other}" for one, other in RATIOS)]
    print(machine())
    for num_ranks in options.ranks:
        for count in options.microbatches:
            made = [make_schedule(name, num_ranks=num_ranks, num_microbatches=count) for name in options.schedules]
            rows = [row(schedule, measure(schedule, options), contenders) for schedule in made]
            print(f"\n{num_ranks} ranks, {count} microbatches, {options.rounds} rounds; us a (stage, microbatch)\n")
            print(table(heads, rows, markdown=options.markdown), flush=True)


if __name__ == "__main__":
    main()
