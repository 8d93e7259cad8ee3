"""F and B of two stages on one GPU: each stage's own stream, against one stream for both, and against others.

python benchmarks/gpu/overlap.py

One rank holds the pair of stages of DualPipeV, of GPT blocks from small to large. "In order" is the same executor and
program with F and B of a pair one after the other; "torch" is torch's own DualPipeV; "bare" is F and B of the same
blocks and microbatches in plain PyTorch; "recorded" is fastpipe's step as a CUDA graph. Ratios are to fastpipe's step
as it comes ("overlapped"), but the last, which is to the recorded one. All take turns in one process.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import torch
from torch import nn

from fastpipe import Schedule, make_schedule

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from contenders import Alone, Work, fastpipe_step, torch_step
from device import Step, alone, chosen, options, rounds_of
from split_backward import Block
from tables import ratio, spread, table

SIZES = ((64, 1, 64), (256, 1, 256), (1024, 1, 1024), (2048, 4, 1024))
"""Width, rows of a microbatch, tokens."""
WARM_UP = 5  # the fourth step is recorded
HEADS = ["width x rows x tokens", "overlapped, ms", "in order", "torch", "bare", "recorded, ms", "torch/recorded"]


def make_work(device: str, size: tuple[int, int, int], blocks: int, microbatches: int) -> Work:
    """Blocks of a GPT and a batch for them."""
    width, rows, tokens = size

    def make_stage(index: int) -> nn.Module:
        torch.manual_seed(index)
        return nn.Sequential(*(Block(width) for _ in range(blocks))).to(device)

    x, target = torch.randn(2, microbatches * rows, tokens, width, device=device)
    return Work(make_stage, x, target, nn.functional.mse_loss, torch.randn(rows, tokens, width, device=device))


def contenders(schedule: Schedule, work: Work) -> dict[str, Step]:
    """Steps to time, by name."""
    ours = partial(fastpipe_step, schedule, 0, work, device=work.inputs.device)
    return {
        "overlapped": ours(),
        "in order": ours(overlap="never"),
        "recorded": ours(cuda_graph=True),
        "torch": torch_step(schedule, 0, work),
        "bare": Alone(schedule, 0, work),
    }


def main() -> None:
    made = options(__doc__, rounds=15)
    made.add_argument("--blocks", type=int, default=4, help="of a stage (4)")
    made.add_argument("--microbatches", type=int, default=8)
    made.add_argument("--sizes", type=int, default=len(SIZES), help="only so many, the smallest first")
    given = chosen(made)
    alone()
    schedule = make_schedule("dualpipev", num_ranks=1, num_microbatches=given.microbatches)
    rows = []
    for size in SIZES[: given.sizes]:
        steps = contenders(schedule, make_work(given.device, size, given.blocks, given.microbatches))
        found = rounds_of(steps, given.device, given.rounds, WARM_UP)
        whole = {name: [seconds for _, seconds in times] for name, times in found.items()}
        ours, recorded = whole["overlapped"], whole["recorded"]
        ratios = [ratio(whole[name], ours, 3) for name in ("in order", "torch", "bare")]
        size_text = " x ".join(map(str, size))
        rows.append(
            [size_text, spread(ours, 1e3, 3), *ratios, spread(recorded, 1e3, 3), ratio(whole["torch"], recorded)]
        )
    print(table(HEADS, rows, markdown=given.markdown))


if __name__ == "__main__":
    main()
