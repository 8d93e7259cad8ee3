"""What the helper thread of pairs brings: ``python benchmarks/helper.py``.

One process with one rank, one thread in torch's operators, two cores: the pairs of `interleaved_overlap`, a forward of
one stage and a backward of another, one after the other, together (the backward in a helper thread), and as fastpipe
chooses (``overlap="auto"``, which measures both and keeps the faster one). Stages of several sizes, from those that
cost little more than Python, which holds the interpreter's lock, to those that are nearly all compute.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from ranks import interleaved, ranks
from tables import machine, parser, ratio, spread, table
from torch import nn

from fastpipe import Pipeline

WAYS = {"in order": "never", "together": "always", "auto": "auto"}


def make_stage(width: int, _: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))


def make_tasks(width: int, rows: int, options: Any) -> dict[str, Callable[[], Any]]:
    batch = torch.randn(2, rows * options.microbatches, width)
    pipes = {
        way: Pipeline(
            partial(make_stage, width),
            "interleaved_overlap",
            options.microbatches,
            nn.functional.mse_loss,
            num_ranks=1,
            stages_per_rank=options.stages,
            overlap=overlap,
            merge=False,
            executor="native",
        )
        for way, overlap in WAYS.items()
    }
    tasks: dict[str, Callable[[], Any]] = {
        way: partial(pipe.step, batch[0], target=batch[1]) for way, pipe in pipes.items()
    }
    return tasks | {"counts": lambda: pipes["auto"]._steps.ranks.pair_counts()}


def measure(width: int, rows: int, options: Any) -> list[str]:
    """A row of the table."""
    with ranks(1, lambda _: make_tasks(width, rows, options), pin="never") as group:
        measures = {way: partial(group.time, way, options.steps) for way in WAYS}
        found = interleaved(measures, options.rounds, f"width {width}", warm_up=3)
        (before,) = group.call("counts")
        group.call("auto", options.steps)
        (after,) = group.call("counts")
    together, in_order = (after[way] - before[way] for way in ("together", "in order"))
    count = options.stages * options.microbatches
    times = [spread([seconds / count for seconds in found[way]], 1e6) for way in WAYS]
    chosen = f"{100 * together / max(1, together + in_order):.0f} %"
    gains = [ratio(found["in order"], found[way]) for way in ("together", "auto")]
    return [f"{rows} x {width}", *times, *gains, chosen]


def main() -> None:
    options = parser(__doc__, rounds=9)
    options.add_argument("--sizes", nargs="+", default=["8x16", "64x64", "64x256", "256x256", "512x512"])
    options.add_argument("--stages", type=int, default=2)
    options.add_argument("--microbatches", type=int, default=32)
    options.add_argument("--steps", type=int, default=2, help="of a measurement (2)")
    chosen = options.parse_args()
    print(machine())
    print(f"1 rank, {chosen.stages} stages, {chosen.microbatches} microbatches, {chosen.rounds} rounds\n")
    rows = []
    for size in chosen.sizes:
        num_rows, width = map(int, size.split("x"))
        rows.append(measure(width, num_rows, chosen))
    heads = [
        "rows x width",
        *(f"{way}, us" for way in WAYS),
        "in order/together",
        "in order/auto",
        "auto goes together",
    ]
    print(table(heads, rows, markdown=chosen.markdown))


if __name__ == "__main__":
    main()
