"""F and B of two stages on one GPU: each stage's own stream, against one stream for both, and against the bare kernels.

One rank holds the pair of stages of DualPipeV. "Overlapped" and "in order" are the same executor and program; "bare" is
F and B of the same blocks and microbatches in plain PyTorch; "recorded" is the overlapped one as a CUDA graph. All take
turns in one process.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

import fastpipe

MICROBATCHES = 8
WARM_UP = 5  # the fourth step is recorded


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return ((output - target) ** 2).mean()


def contenders(width: int, rows: int) -> dict[str, Callable[[], None]]:
    """Steps to time, by name."""
    x, target = (torch.randn(MICROBATCHES * rows, width, device="cuda") for _ in range(2))

    def pipeline(overlap: str, cuda_graph: bool = False) -> Callable[[], None]:
        layers = [Block(width).cuda() for _ in range(8)]
        pipe = fastpipe.Pipeline(
            layers, "dualpipev", MICROBATCHES, loss_fn, num_ranks=1, overlap=overlap, cuda_graph=cuda_graph
        )

        def step() -> None:
            pipe.step(x, target=target)

        return step

    model = nn.Sequential(*[Block(width).cuda() for _ in range(8)])

    def bare() -> None:
        for one, wanted in zip(x.chunk(MICROBATCHES), target.chunk(MICROBATCHES), strict=True):
            (loss_fn(model(one), wanted) / MICROBATCHES).backward()

    recorded = pipeline("auto", cuda_graph=True)
    return {"overlapped": pipeline("auto"), "in order": pipeline("never"), "bare": bare, "recorded": recorded}


def seconds(step: Callable[[], None]) -> float:
    """From the first launch to the end of the last kernel."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    step()
    torch.cuda.synchronize()
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("there is no CUDA device: nothing can be measured")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; {fastpipe.native_status()}")
    print("width  rows  ms overlapped  in order/overlapped  bare/overlapped  bare/recorded")
    for width, rows in ((64, 64), (256, 256), (1024, 512), (2048, 2048)):
        steps = contenders(width, rows)
        for step in steps.values():
            for _ in range(WARM_UP):
                step()
        rounds = [{name: seconds(step) for name, step in steps.items()} for _ in range(arguments.rounds)]
        took = statistics.median(times["overlapped"] for times in rounds)
        pairs = (("in order", "overlapped"), ("bare", "overlapped"), ("bare", "recorded"))
        ratios = [statistics.median(times[one] / times[other] for times in rounds) for one, other in pairs]
        print(f"{width:5}  {rows:4}  {took * 1e3:13.3f}  {ratios[0]:19.3f}  {ratios[1]:15.3f}  {ratios[2]:13.3f}")


if __name__ == "__main__":
    main()
