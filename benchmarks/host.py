"""The host's own time in the executor: one rank with several stages, and no transport.

python benchmarks/host.py

Launch-bound stages (two narrow Linears each), all on one rank: what a step takes beyond the stages' F and B, in plain
PyTorch in the same order, is the runtime's own, by (stage, microbatch). The same for torch's schedule. Rows with more
microbatches show what is paid once a step and what for each of them.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

from contenders import TORCH_NAMES, Alone, fastpipe_step, torch_step
from overhead import make_work
from ranks import interleaved, ranks
from tables import machine, parser, spread, table

from fastpipe import Schedule, make_schedule

SCHEDULES = ("interleaved_1f1b", "looped_bfs", "interleaved_zb")
HEADS = [
    "schedule",
    "microbatches",
    "F + B, us",
    "fastpipe, us",
    "torch, us",
    "fastpipe over F + B",
    "torch over F + B",
]


def measure(schedule: Schedule, options: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds a (stage, microbatch), by contender and round."""
    work = make_work(schedule.num_microbatches)

    def tasks(rank: int) -> dict[str, Any]:
        return {
            "alone": Alone(schedule, rank, work),
            "fastpipe": fastpipe_step(schedule, rank, work, executor=options.executor),
            "torch": torch_step(schedule, rank, work),
        }

    with ranks(1, tasks, pin=options.pin) as group:
        measures = {name: partial(group.time, name, options.steps) for name in ("alone", "fastpipe", "torch")}
        found = interleaved(measures, options.rounds, f"{schedule.name}, {schedule.num_microbatches} microbatches")
    count = schedule.num_stages * schedule.num_microbatches
    return {name: [seconds / count for seconds in times] for name, times in found.items()}


def row(schedule: Schedule, found: dict[str, list[float]]) -> list[str]:
    alone = found["alone"]
    over = [[time - base for time, base in zip(found[name], alone, strict=True)] for name in ("fastpipe", "torch")]
    times = [spread(found[name], 1e6) for name in ("alone", "fastpipe", "torch")]
    name = TORCH_NAMES[schedule.name]
    return [name, str(schedule.num_microbatches), *times, *(spread(each, 1e6) for each in over)]


def main() -> None:
    options = parser(__doc__, rounds=15)
    options.add_argument("--stages", type=int, default=4)
    options.add_argument("--microbatches", type=int, nargs="+", default=[16, 64, 256])
    options.add_argument("--steps", type=int, default=2, help="of a measurement (2)")
    options.add_argument("--executor", default="native", help="native or python")
    options.add_argument("--schedules", nargs="+", default=SCHEDULES, metavar="NAME")
    chosen = options.parse_args()
    print(machine())
    rows = []
    for name in chosen.schedules:
        for count in chosen.microbatches:
            schedule = make_schedule(name, num_ranks=1, num_microbatches=count, stages_per_rank=chosen.stages)
            rows.append(row(schedule, measure(schedule, chosen)))
    print(f"1 rank, {chosen.stages} stages; microseconds a (stage, microbatch); {chosen.rounds} rounds\n")
    print(table(HEADS, rows, markdown=chosen.markdown))


if __name__ == "__main__":
    main()
