"""The split backward: I + W against B, by the stage's depth.

python benchmarks/split_backward.py

A stage is a pre-norm transformer of 1 to 16 blocks, in the middle of a pipeline whose three stages are all on one rank.
Each round runs a step of one microbatch with B and one with I and W, in turns, so that both see the same machine; times
are the executor's own spans. Printed are medians, with the quartiles of the ratio of rounds, for a stage so narrow that
the host's time is all there is ("host") and for one whose kernels take most of it ("total"); and the memory that waits
between I and W. What falls short is named, with what of it is a run of autograd's engine that has nothing to do: W is a
run of its own. The rest is arming, and what waits and is counted.

--tp 2 spreads the blocks over as many Gloo processes: column-wise and row-wise linears, whose collectives are in F
and in B or I. Times are those of the first process.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from profiles import Aim, explained
from ranks import Tasks, ranks
from tables import machine, parser, quartiles, table
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

from fastpipe import Pipeline, Timeline, make_schedule
from fastpipe.program import Op

BLOCKS = (1, 2, 4, 8, 16)
SIZES = {"host": (16, 1, 8), "total": (256, 2, 128)}
"""Width, rows, tokens."""
WHOLE, SPLIT = "interleaved_1f1b", "interleaved_zb"
AIM = Aim("(I + W)/B", 1.05)
HEADS = ("stage", "blocks", "B, ms", "I, ms", "W, ms", "(I + W)/B", "F split/F", "held from I to W, MiB")


PLAN = {"qkv": ColwiseParallel(), "out": RowwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}


class Block(nn.Module):
    """Pre-norm attention and a perceptron of four times the width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = max(1, width // 64)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(self.norm1(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def spans(timeline: Timeline) -> dict[Op, float]:
    """Seconds of the middle stage's actions."""
    return {s.instruction.op: s.end - s.start for s in timeline.compute_spans(0) if s.instruction.stage == 1}


class Rounds:
    """Two pipelines with the same stages, and the times of the one in the middle."""

    def __init__(self, size: str, blocks: int, executor: str, mesh: Any = None) -> None:
        width, rows, tokens = SIZES[size]
        self.size, self.blocks = size, blocks
        self.batch = torch.randn(rows, tokens, width)
        self.model = nn.Sequential(
            nn.Linear(width, width), nn.Sequential(*(Block(width) for _ in range(blocks))), nn.Identity()
        )
        if mesh is not None:
            for block in self.model[1].children():
                parallelize_module(block, mesh["tp"], PLAN)
        self.pipes = [
            Pipeline(
                list(self.model),
                make_schedule(name, num_ranks=1, num_microbatches=1, stages_per_rank=3),
                loss_fn=F.mse_loss,
                executor=executor,
                mesh=mesh,
            )
            for name in (WHOLE, SPLIT)
        ]
        self.whole: list[dict[Op, float]] = []
        self.split: list[dict[Op, float]] = []

    def run(self, rounds: int) -> None:
        for number in range(-5, rounds):
            for which in (0, 1) if number % 2 else (1, 0):
                self.model.zero_grad()
                found = spans(self.pipes[which].step(self.batch, target=self.batch).timeline)
                if number >= 0:  # the first ones warm up
                    (self.whole, self.split)[which].append(found)

    def ratios(self) -> list[float]:
        """(I + W) / B of every round."""
        return [(s[Op.I] + s[Op.W]) / w[Op.B] for w, s in zip(self.whole, self.split, strict=True)]

    def row(self) -> list[str]:
        b, i, w = median(self.whole, Op.B), median(self.split, Op.I), median(self.split, Op.W)
        low, _, high = quartiles(self.ratios())
        forwards = median(self.split, Op.F) / median(self.whole, Op.F)
        held = self.pipes[1]._steps.stages[1].peak_held_bytes / 2**20
        cells = [f"{1e3 * seconds:.3f}" for seconds in (b, i, w)]
        both = f"{(i + w) / b:.3f} ({low:.3f}..{high:.3f})"
        return [self.size, str(self.blocks), *cells, both, f"{forwards:.3f}", f"{held:.3f}"]

    def shortfall(self, empty_run: float) -> str | None:
        b, both = median(self.whole, Op.B), median(self.split, Op.I) + median(self.split, Op.W)
        missed = AIM.missed([both / b])
        if missed is None:
            return None
        over = {"a run of the engine": empty_run, "arming and what waits": both - b - empty_run}
        return f"{self.size}, {self.blocks} blocks: {missed}; {explained(over, 1e6, 'us over B')}"


def median(found: Sequence[dict[Op, float]], op: Op) -> float:
    return statistics.median(times[op] for times in found)


def empty_run() -> float:
    """Seconds of a run of autograd's engine through one node."""
    root = torch.zeros(1, requires_grad=True).view(1)
    grad, taken = torch.ones(1), []
    for _ in range(1000):
        start = time.perf_counter()
        torch.autograd.backward(root, grad, retain_graph=True)
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def in_processes(size: str, blocks: int, executor: str, rounds: int, num_ranks: int, rank: int) -> Tasks:
    """The rounds of one process of several that share a stage."""
    torch.manual_seed(0)  # the batch and the weights that are whole are the same on all
    made = Rounds(size, blocks, executor, dist.init_device_mesh("cpu", (1, num_ranks), mesh_dim_names=("pp", "tp")))

    def run() -> tuple[list[str], str | None]:
        made.run(rounds)
        return made.row(), made.shortfall(empty_run())

    return {"run": run}


def main() -> None:
    options = parser(__doc__, rounds=60)
    options.add_argument("--blocks", type=int, nargs="*", default=BLOCKS)
    options.add_argument("--executor", default="native", help="native or python")
    options.add_argument("--tp", type=int, default=1, help="processes that share each linear (1)")
    chosen = options.parse_args()
    torch.set_num_threads(1)
    print(f"{machine()}, one thread; {chosen.executor} executor, {chosen.rounds} rounds, tensor parallel {chosen.tp}\n")
    if chosen.tp > 1:
        found = []
        for size in SIZES:
            for blocks in chosen.blocks:
                make = partial(in_processes, size, blocks, chosen.executor, chosen.rounds, chosen.tp)
                with ranks(chosen.tp, make, pin=chosen.pin) as processes:
                    found.append(processes.call("run")[0])
        print(table(HEADS, [row for row, _ in found], markdown=chosen.markdown))
        print("", *filter(None, (missed for _, missed in found)), sep="\n")
        return
    made = [Rounds(size, blocks, chosen.executor) for size in SIZES for blocks in chosen.blocks]
    rows = []
    for rounds in made:
        rounds.run(chosen.rounds)
        rows.append(rounds.row())
    print(table(HEADS, rows, markdown=chosen.markdown))
    engine = empty_run()
    print("", *filter(None, (rounds.shortfall(engine) for rounds in made)), sep="\n")


if __name__ == "__main__":
    main()
