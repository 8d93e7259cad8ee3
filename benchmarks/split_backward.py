"""The split backward: I + W against B, by the stage's depth.

python benchmarks/split_backward.py

A stage is a pre-norm transformer of 1 to 16 blocks. Each round runs F, B and then F, I, W of one microbatch, one after
the other in turns, so that both see the same machine; the gradients are dropped before each. Printed are medians, with
the quartiles of the ratio of rounds, for a stage so narrow that the host's time is all there is ("host") and for one
whose kernels take most of it ("total"); and the memory that waits between I and W.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

from fastpipe.runtime.native import native_status
from fastpipe.runtime.stage import Stage, StageWork

BLOCKS = (1, 2, 4, 8, 16)
SIZES = {"host": (16, 1, 8), "total": (256, 2, 128)}
"""Width, rows, tokens."""


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


def timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


class Rounds:
    """One stage in the middle of a pipeline, and the times of its actions."""

    def __init__(self, blocks: int, width: int, rows: int, tokens: int) -> None:
        self.stage = Stage(1, nn.Sequential(*(Block(width) for _ in range(blocks))), 3)
        self.stage.begin(StageWork())
        self.input = torch.randn(rows, tokens, width, requires_grad=True)
        self.grad = torch.randn(rows, tokens, width)
        self.seconds: dict[str, list[float]] = {name: [] for name in ("F", "B", "F split", "I", "W")}

    def whole(self) -> None:
        self.stage.module.zero_grad()
        self._note("F", lambda: self.stage.forward(0, (self.input,)))
        self._note("B", lambda: self.stage.backward(0, (self.grad,)))

    def split(self) -> None:
        self.stage.module.zero_grad()
        self._note("F split", lambda: self.stage.forward(0, (self.input,), splits=True))
        self._note("I", lambda: self.stage.backward_input(0, (self.grad,)))
        self._note("W", lambda: self.stage.backward_weight(0))

    def _note(self, name: str, call: Callable[[], object]) -> None:
        self.seconds[name].append(timed(call))

    def run(self, rounds: int) -> None:
        for number in range(rounds):
            for part in (self.whole, self.split) if number % 2 else (self.split, self.whole):
                part()

    def forget(self) -> None:
        for times in self.seconds.values():
            times.clear()


def report(blocks: int, rounds: Rounds) -> None:
    """One line of the table."""
    seconds = rounds.seconds
    ratios = [(i + w) / b for i, w, b in zip(seconds["I"], seconds["W"], seconds["B"], strict=True)]
    low, _, high = statistics.quantiles(ratios, n=4)
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    held = rounds.stage.peak_held_bytes / 2**20
    both = medians["I"] + medians["W"]
    print(
        f"  {blocks:>6}"
        + "".join(f"{1000 * medians[name]:>10.3f}" for name in ("B", "I", "W"))
        + f"{both / medians['B']:>10.3f}{low:>8.3f} to {high:.3f}"
        + f"{medians['F split'] / medians['F']:>12.3f}{held:>12.3f}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--blocks", type=int, nargs="*", default=BLOCKS)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{native_status()}\ntorch {torch.__version__}, one thread; milliseconds")
    for name, (width, rows, tokens) in SIZES.items():
        print(f"\n{name}: width {width}, {rows} x {tokens} tokens")
        heads = "".join(f"{head:>10}" for head in ("B", "I", "W", "(I+W)/B"))
        print(f"  {'blocks':>6}{heads}{'quartiles':>17}{'F split/F':>12}{'held MiB':>12}")
        for blocks in chosen.blocks:
            rounds = Rounds(blocks, width, rows, tokens)
            rounds.run(5)
            rounds.forget()
            rounds.run(chosen.rounds)
            report(blocks, rounds)


if __name__ == "__main__":
    main()
