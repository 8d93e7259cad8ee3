"""What the runtime costs when the stages cost nearly nothing: fastpipe, torch's own schedules, and the compute alone.

python benchmarks/overhead.py --ranks 2 4

A stage is two narrow Linears, so that the host's time is all there is. The ranks are processes on this machine; fastpipe
runs its native executor over its default transport. *Compute* is the same stages' F and B in the schedule's order, in
plain PyTorch in as many processes at the same time, on tensors that nobody sent; for schedules that split the backward
it does F and B, too, as I and W together are to cost what B costs. *By hand* is F, I and W with linears that were split
by hand (a Python autograd.Function and a list), the way to split without fastpipe.

A figure is the time of a step, from the first rank's start to the last one's end, by (stage, microbatch) of a rank: the
bubbles at its ends are in it. Ratios are those of rounds: median and quartiles.
"""

from __future__ import annotations

from collections import deque
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


def make_work(num_microbatches: int) -> Work:
    rows = ROWS * num_microbatches
    batch = torch.randn(rows, WIDTH), torch.randn(rows, WIDTH)
    return Work(make_stage, *batch, F.mse_loss, torch.randn(ROWS, WIDTH))


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


def make_schedules(names: list[str], num_ranks: int, num_microbatches: int) -> list[Schedule]:
    return [make_schedule(name, num_ranks=num_ranks, num_microbatches=num_microbatches) for name in names]


def measure(schedule: Schedule, rounds: int, steps: int, executors: list[str]) -> dict[str, list[float]]:
    """Seconds a (stage, microbatch) of a rank, by contender and round."""
    work = make_work(schedule.num_microbatches)

    def tasks(rank: int) -> dict[str, Any]:
        found: dict[str, Any] = {"compute": Alone(schedule, rank, work)}
        if schedule.splits_backward:
            found["by hand"] = AloneByHand(schedule, rank, work)
        for executor in executors:
            found[executor] = fastpipe_step(schedule, rank, work, executor=executor)
        found["torch"] = torch_step(schedule, rank, work)
        return found

    names = ["compute", *(["by hand"] if schedule.splits_backward else []), *executors, "torch"]
    per_rank = schedule.num_microbatches * schedule.num_stages / schedule.num_ranks
    with ranks(schedule.num_ranks, tasks) as group:
        measures = {name: partial(group.time, name, 1 if name == "torch" else steps) for name in names}
        label = f"{schedule.num_ranks} ranks, {schedule.name}"
        found = interleaved(measures, rounds, label)
    return {name: [seconds / per_rank for seconds in times] for name, times in found.items()}


def row(schedule: Schedule, found: dict[str, list[float]]) -> list[str]:
    native, alone, other = found["native"], found["compute"], found["torch"]
    by_hand = found.get("by hand")
    return [
        TORCH_NAMES[schedule.name],
        *(spread(times, 1e6) if times else "" for times in (alone, by_hand, native, found.get("python"), other)),
        ratio(native, alone),
        ratio(native, by_hand) if by_hand else "",
        ratio(other, native),
    ]


HEADS = ["schedule", "compute, us", "by hand, us", "fastpipe, us", "python, us", "torch, us"]
RATIOS = ["fastpipe/compute", "fastpipe/by hand", "torch/fastpipe"]


def main() -> None:
    options = parser(__doc__, rounds=9)
    options.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    options.add_argument("--microbatches", type=int, default=64)
    options.add_argument("--steps", type=int, default=4, help="of a measurement, of all but torch (4)")
    options.add_argument("--schedules", nargs="+", default=list(TORCH_NAMES), metavar="NAME", help="of those both have")
    options.add_argument("--python", action="store_true", help="fastpipe's Python executor as well")
    chosen = options.parse_args()
    executors = ["native", "python"] if chosen.python else ["native"]
    print(machine())
    for num_ranks in chosen.ranks:
        schedules = make_schedules(chosen.schedules, num_ranks, chosen.microbatches)
        rows = [row(one, measure(one, chosen.rounds, chosen.steps, executors)) for one in schedules]
        print(f"\n{num_ranks} ranks, {chosen.microbatches} microbatches; microseconds a (stage, microbatch)\n")
        print(table([*HEADS, *RATIOS], rows, markdown=chosen.markdown), flush=True)


if __name__ == "__main__":
    main()
