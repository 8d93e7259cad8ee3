"""W by products that add to .grad themselves (``fused_weight_grad=True``), against W that makes a gradient and adds it.

python benchmarks/gpu/weight_grad.py

A stage in the middle of one rank's three is a run of linears; their gradients are fp32, and their operands bf16
(``grad_dtype``). Times are the spans of W, by events on the device, of steps in turns; of the smallest size they are
times of launches. "Difference" is the largest of any gradient's, relative to the norm of the plain one.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

import torch
from torch import nn

from fastpipe import Pipeline, make_schedule
from fastpipe.program import Op

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from device import Rows, chosen, forget, options
from tables import ratio, spread

SIZES = ((256, 256), (1024, 1024), (4096, 4096), (8192, 2048))
"""Width, and rows of a microbatch."""
HEADS = ["width x rows", "plain W, ms", "fused W, ms", "plain/fused", "difference"]


class Contender:
    """One pipeline, and the time of its middle stage's W."""

    def __init__(self, fused: bool, device: str, width: int, linears: int, microbatches: int) -> None:
        torch.manual_seed(0)
        stages = [nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(linears))) for _ in range(3)]
        self.pipe = Pipeline(
            [stage.to(device, torch.bfloat16) for stage in stages],
            make_schedule("interleaved_zb", num_ranks=1, num_microbatches=microbatches, stages_per_rank=3),
            loss_fn=nn.functional.mse_loss,
            num_ranks=1,
            device=device,
            grad_dtype=torch.float32,
            fused_weight_grad=fused,
        )

    def seconds(self, x: torch.Tensor) -> float:
        """The median of a step's W."""
        for parameter in self.pipe.parameters():
            parameter.grad = None
        timeline = self.pipe.step(x, target=x, trace=True).timeline
        assert timeline is not None
        found = [span for span in timeline.compute_spans(0) if span.instruction.stage == 1]
        return statistics.median(span.end - span.start for span in found if span.instruction.op == Op.W)

    def gradients(self) -> list[torch.Tensor]:
        return [parameter.grad for parameter in self.pipe.parameters() if parameter.grad is not None]


def row(device: str, width: int, rows: int, linears: int, microbatches: int, rounds: int) -> list[str]:
    plain, fused = (Contender(kind, device, width, linears, microbatches) for kind in (False, True))
    x = torch.randn(microbatches * rows, width, device=device, dtype=torch.bfloat16)
    ones: list[float] = []
    others: list[float] = []
    for number in range(-3, rounds):  # the first ones warm up
        for contender, times in ((plain, ones), (fused, others))[:: 1 if number % 2 else -1]:
            taken = contender.seconds(x)
            if number >= 0:
                times.append(taken)
    pairs = zip(plain.gradients(), fused.gradients(), strict=True)
    difference = max(float((one - other).norm() / one.norm()) for one, other in pairs)
    return [
        f"{width} x {rows}",
        spread(ones, 1e3, 3),
        spread(others, 1e3, 3),
        ratio(ones, others, 3),
        f"{difference:.1e}",
    ]


def main() -> None:
    made = options(__doc__, rounds=15)
    made.add_argument("--linears", type=int, default=4, help="of a stage (4)")
    made.add_argument("--microbatches", type=int, default=4)
    made.add_argument("--sizes", type=int, default=len(SIZES), help="only so many, the smallest first")
    given = chosen(made)
    found = Rows(HEADS, markdown=given.markdown)
    for width, rows in SIZES[: given.sizes]:
        found.add(row(given.device, width, rows, given.linears, given.microbatches, given.rounds))
        forget(given.device)


if __name__ == "__main__":
    main()
