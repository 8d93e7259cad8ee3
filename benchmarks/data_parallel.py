"""When gradients are averaged over the replicas of a pipeline: ``python benchmarks/data_parallel.py``.

Two replicas of a pipeline of two ranks, four processes over Gloo. Every block of a stage sleeps in its forward and in
its backward and has one large weight, so cores are free and what is not hidden shows. Compared are a step without
any average (under no_sync), one whose buckets all start at REDUCE_GRAD, after the stage's last backward, one whose
buckets start within it (what fastpipe does), and one in which DistributedDataParallel's reducer is armed before the
last backward, as it would be in a script without a pipeline: it waits for the averages at the end of that backward.
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
from torch.nn.parallel import DistributedDataParallel

from fastpipe import Pipeline
from fastpipe.runtime.data_parallel import DataParallel
from fastpipe.runtime.stage import Stage

WIDTH = 4
WAYS = ("no average", "at REDUCE_GRAD", "within", "armed")


class Sleeps(torch.autograd.Function):
    """Takes as long as it is told to, and gives a weight a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        ctx.save_for_backward(weight)
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        time.sleep(2 * ctx.seconds)
        (weight,) = ctx.saved_tensors
        return grad, weight.detach().clone(), None


class Block(nn.Module):
    def __init__(self, megabytes: float, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.weight = nn.Parameter(torch.randn(int(megabytes * 2**18)))

    def forward(self, x: Tensor) -> Tensor:
        return Sleeps.apply(x, self.weight, self.seconds)  # type: ignore[no-untyped-call,no-any-return]


def arm(stage: Stage, num_microbatches: int) -> None:
    """Have DistributedDataParallel's own reducer average in the stage's last backward (of the Python executor)."""
    parallel: Any = stage.parallel
    backward, done = stage.backward, [0]

    def armed(microbatch: int, grads: Any) -> Any:
        done[0] += 1
        if done[0] % num_microbatches == 0:
            for wrapper in parallel.wrapped:
                wrapper.reducer.prepare_for_backward([])
        return backward(microbatch, grads)

    stage.backward = armed  # type: ignore[method-assign]
    parallel.reduce_grad = lambda failed: None


def bucket_sizes(pipe: Pipeline) -> list[list[int]]:
    """Elements of each bucket of each local stage, as they are now: an armed reducer makes them anew."""
    wrappers = [wrapper for stage in pipe._steps.stages for wrapper in stage.parallel.wrapped]
    return [[b.buffer().numel() for b in wrapper.reducer._get_zeros_like_grad_buckets()] for wrapper in wrappers]


def make_tasks(way: str, options: Any, mesh: Any) -> dict[str, Callable[[], Any]]:
    def stage(_: int) -> nn.Module:
        blocks = [Block(options.megabytes, options.milliseconds / 1e3) for _ in range(options.blocks)]
        group = mesh["dp"].get_group()
        # the reducer that is armed makes its buckets itself, as large as the others', when it has seen a backward
        return DistributedDataParallel(
            nn.Sequential(*blocks),
            process_group=group,
            find_unused_parameters=way != "armed",
            bucket_cap_mb=options.bucket,
        )

    loss_fn = nn.functional.mse_loss
    pipe = Pipeline(
        stage, options.schedule, options.microbatches, loss_fn, group=mesh["pp"], executor="python", timeout=60
    )
    for each in pipe._steps.stages:
        if way == "armed":
            arm(each, options.microbatches)
        elif way == "at REDUCE_GRAD":
            each.parallel.last_backward = partial(DataParallel.last_backward, each.parallel)
    x, y = torch.randn(2, options.microbatches, WIDTH)

    def step() -> None:
        for parameter in pipe.parameters():
            parameter.grad = None
        if way == "no average":
            with pipe.no_sync():
                pipe.step(x, target=y)
        else:
            pipe.step(x, target=y)

    return {way: step, f"buckets {way}": partial(bucket_sizes, pipe)}


def measure(options: Any) -> list[str]:
    """A row of the table."""

    def tasks(_: int) -> dict[str, Any]:
        mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
        return {name: task for way in WAYS for name, task in make_tasks(way, options, mesh).items()}

    with ranks(4, tasks, pin="never") as group:
        found = interleaved({way: partial(group.time, way, 1) for way in WAYS}, options.rounds, options.schedule)
        buckets = {str(group.call(f"buckets {way}")) for way in WAYS}
    if len(buckets) > 1:
        raise RuntimeError(f"the ways have different buckets: {buckets}")
    megabytes = options.megabytes * options.blocks
    name = f"{options.schedule}, {megabytes:g} MB a stage"
    ratios = [ratio(found[way], found["no average"]) for way in WAYS[1:]]
    return [name, *(spread(found[way], 1e3) for way in WAYS), *ratios]


def main() -> None:
    options = parser(__doc__, rounds=9)
    options.add_argument("--schedules", nargs="+", default=["1f1b", "gpipe"])
    options.add_argument("--microbatches", type=int, default=4)
    options.add_argument("--blocks", type=int, default=4, help="of a stage")
    options.add_argument("--megabytes", type=float, nargs="+", default=[1, 4, 16], help="of a block's weight")
    options.add_argument("--milliseconds", type=float, default=10, help="of a block's forward; twice in its backward")
    options.add_argument("--bucket", type=float, default=1, help="megabytes of a bucket")
    chosen = options.parse_args()
    print(machine())
    rows = []
    for schedule in chosen.schedules:
        for megabytes in chosen.megabytes:
            each = dict(vars(chosen), schedule=schedule, megabytes=megabytes)
            rows.append(measure(type(chosen)(**each)))
    heads = ["schedule", *(f"{way}, ms" for way in WAYS), *(f"{way}/none" for way in WAYS[1:])]
    print(table(heads, rows, markdown=chosen.markdown))


if __name__ == "__main__":
    main()
