"""The host's time, where launches are what takes it: small GPT blocks, all stages on one rank.

python benchmarks/gpu/launch.py

"Host" is the time until everything has been launched, by (stage, microbatch), and what it is over the same F and B in
plain PyTorch in the same order. "Step" is until the device is done: torch's own schedule against fastpipe's step as it
comes, and against the step as a CUDA graph. All take turns in one process.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

from fastpipe import Schedule, make_schedule

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from contenders import TORCH_NAMES, Alone, Work, fastpipe_step, torch_step
from device import Rows, alone, chosen, forget, options, rounds_of
from overlap import make_work
from tables import ratio, spread

SIZE = (64, 1, 32)
"""Width, rows of a microbatch, tokens."""
WARM_UP = 5  # the fourth step is recorded
SCHEDULES = ("interleaved_1f1b", "interleaved_zb", "dualpipev")
HEADS = [
    "schedule",
    "host of F + B, us",
    "fastpipe over it, us",
    "torch over it, us",
    "step, ms",
    "torch/fastpipe",
    "recorded step, ms",
    "torch/recorded",
]


def row(schedule: Schedule, work: Work, device: str, rounds: int) -> list[str]:
    ours = partial(fastpipe_step, schedule, 0, work, device=work.inputs.device)
    steps = {
        "alone": Alone(schedule, 0, work),
        "fastpipe": ours(),
        "recorded": ours(cuda_graph=True),
        "torch": torch_step(schedule, 0, work),
    }
    found = rounds_of(steps, device, rounds, WARM_UP)
    count = schedule.num_stages * schedule.num_microbatches
    host = {name: [launched / count for launched, _ in times] for name, times in found.items()}
    step = {name: [seconds for _, seconds in times] for name, times in found.items()}
    over = [[one - bare for one, bare in zip(host[name], host["alone"], strict=True)] for name in ("fastpipe", "torch")]
    return [
        TORCH_NAMES[schedule.name],
        spread(host["alone"], 1e6),
        *(spread(each, 1e6) for each in over),
        spread(step["fastpipe"], 1e3, 3),
        ratio(step["torch"], step["fastpipe"]),
        spread(step["recorded"], 1e3, 3),
        ratio(step["torch"], step["recorded"]),
    ]


def main() -> None:
    made = options(__doc__, rounds=31)
    made.add_argument("--microbatches", type=int, default=8)
    given = chosen(made)
    alone()
    rows = Rows(HEADS, markdown=given.markdown)
    for name in SCHEDULES:
        more = {} if name == "dualpipev" else {"stages_per_rank": 4}
        schedule = make_schedule(name, num_ranks=1, num_microbatches=given.microbatches, **more)
        work = make_work(given.device, SIZE, 1, given.microbatches)
        rows.add(row(schedule, work, given.device, given.rounds))
        forget(given.device)


if __name__ == "__main__":
    main()
