"""All-to-alls of experts beside the other half of a pair: ``python benchmarks/expert_overlap.py``.

Two pipelines of two ranks, four processes over Gloo, whose stages share experts. Compute and network are sleeps, so
cores are free and durations are known: a forward sleeps for attention and for the experts, a backward twice as long,
and an all-to-all arrives a while after it was started. Compared are steps whose pairs run in order
(``overlap="never"``), steps whose pairs take turns at `fastpipe.all_to_all` (what fastpipe does), and steps in order
without that delay. A line for each delay.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from ranks import interleaved, ranks
from tables import machine, parser, ratio, spread, table
from torch import Tensor, nn

import fastpipe
from fastpipe import Pipeline

WIDTH = 4
WAYS = {"in order": "never", "in turns": "auto", "no delay": "never"}


class SlowWork:
    """Rows that arrive ``seconds`` after they were sent."""

    def __init__(self, work: Any, seconds: float) -> None:
        self.work, self.arrival = work, time.perf_counter() + seconds

    def wait(self) -> None:
        self.work.wait()
        time.sleep(max(0.0, self.arrival - time.perf_counter()))


class Network:
    """Stands in for ``all_to_all_single``, and delays it."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.start: Callable[..., Any] = dist.all_to_all_single
        dist.all_to_all_single = self  # type: ignore[assignment]

    def __call__(self, *args: Any, **kwargs: Any) -> SlowWork:
        return SlowWork(self.start(*args, **kwargs), self.seconds)


class Sleeps(torch.autograd.Function):
    """Takes a time in the forward, and twice that in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        time.sleep(2 * ctx.seconds)
        return grad, None


class Block(nn.Module):
    """Attention, then experts, half of them on another rank."""

    def __init__(self, seconds: float, group: Any) -> None:
        super().__init__()
        self.seconds, self.group = seconds, group
        self.attention, self.experts = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention(Sleeps.apply(x, self.seconds))
        there = fastpipe.all_to_all(x, group=self.group)
        there = self.experts(Sleeps.apply(there, self.seconds))
        return x + fastpipe.all_to_all(there, group=self.group)


def make_tasks(milliseconds: float, options: Any, _: int) -> dict[str, Callable[[], Any]]:
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "ep"))
    network, group = Network(), mesh.get_group("ep")

    def stage(_: int) -> nn.Module:
        return nn.Sequential(*(Block(options.compute / 1e3, group) for _ in range(options.blocks)))

    x, y = torch.randn(2, 2 * options.microbatches, WIDTH)

    def step(way: str, pipe: Pipeline) -> None:
        network.seconds = 0.0 if way == "no delay" else milliseconds / 1e3
        pipe.step(x, target=y)

    return {
        way: partial(
            step,
            way,
            Pipeline(
                stage,
                options.schedule,
                options.microbatches,
                nn.functional.mse_loss,
                mesh=mesh,
                overlap=overlap,
                executor=options.executor,
                timeout=60,
            ),
        )
        for way, overlap in WAYS.items()
    }


def measure(milliseconds: float, options: Any) -> list[str]:
    """A row of the table."""
    with ranks(4, partial(make_tasks, milliseconds, options), pin="never") as group:
        measures = {way: partial(group.time, way, 1) for way in WAYS}
        found = interleaved(measures, options.rounds, f"{milliseconds:g} ms", warm_up=3)
    left = [[found[way][i] - found["no delay"][i] for i in range(options.rounds)] for way in ("in order", "in turns")]
    return [
        f"{milliseconds:g}",
        *(spread(found[way], 1e3) for way in WAYS),
        ratio(found["in order"], found["in turns"]),
        ratio(left[1], left[0]),
    ]


def main() -> None:
    options = parser(__doc__, rounds=9)
    options.add_argument("--delays", nargs="+", type=float, default=[2, 5, 10], help="of each all-to-all, ms (2 5 10)")
    options.add_argument("--compute", type=float, default=5, help="ms of a block's attention, and of its experts (5)")
    options.add_argument("--blocks", type=int, default=2, help="of a stage (2)")
    options.add_argument("--microbatches", type=int, default=8)
    options.add_argument("--schedule", default="dualpipev")
    options.add_argument("--executor", default="native", help="native or python")
    chosen = options.parse_args()
    print(machine())
    print(f"{chosen.schedule}, 2 ranks x 2, {chosen.blocks} blocks a stage, {chosen.microbatches} microbatches\n")
    heads = ["delay, ms", *(f"{way}, ms" for way in WAYS), "in order/in turns", "delay that is left"]
    print(table(heads, [measure(each, chosen) for each in chosen.delays], markdown=chosen.markdown))


if __name__ == "__main__":
    main()
