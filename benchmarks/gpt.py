"""The demo's GPT: fastpipe against torch's schedule of the same name, on the same model and the same text.

python benchmarks/gpt.py --ranks 2 4

Both train from the same weights on the same batches with the optimizer of examples/train_gpt.py, step by step in turns.
Timed is the schedule's step (forward and backward of a batch), from the first rank's start to the last one's end; the
losses of all steps are compared. Ratios are those of steps: median and quartiles.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from contenders import TORCH_NAMES, Work, fastpipe_step, torch_step
from ranks import Ranks, interleaved, placing, ranks
from tables import machine, parser, ratio, spread, table
from torch import Tensor, nn

from fastpipe import Schedule, make_schedule, partition

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from gpt_model import Shape, gpt_layers, loss_fn
from text_data import byte_frequencies, random_batches, read_corpus

NAMES = ("fastpipe", "torch")
HEADS = ["schedule", "fastpipe, ms", "torch, ms", "torch/fastpipe", "loss, first", "last", "largest difference"]


class Contender:
    """One rank's part of one contender: its stages, its optimizer, and the batches that both get."""

    def __init__(self, make_step: Callable[[Schedule, int, Work], Any], model: Model, schedule: Schedule, rank: int):
        self.parameters: list[nn.Parameter] = []
        self.batches = model.batches()
        inputs, targets = next(self.batches)
        self.work = Work(self.make_stage, inputs, targets, loss_fn, torch.empty(0))
        self.model = model
        self.parts = partition([1.0] * model.shape.layers, schedule.num_stages)
        self.step = make_step(schedule, rank, self.work)
        self.optimizer = torch.optim.AdamW(self.parameters, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
        self.losses: list[float] = []

    def make_stage(self, index: int) -> nn.Module:
        layers = self.model.layers()
        stage = nn.Sequential(*(layers[i] for i in self.parts[index]))
        self.parameters += stage.parameters()
        return stage

    def run(self) -> None:
        """What is timed."""
        result = self.step()
        losses = result if isinstance(result, list) else result.losses
        # torch's are where the last stage is; awaited, so that both have done all there is to do
        self.losses.append(torch.stack(losses).mean().item() if losses else float("nan"))

    def update(self) -> None:
        """What is not."""
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.work.inputs, self.work.targets = next(self.batches)


class Model:
    """The demo's model and its text."""

    def __init__(self, layers: int, width: int, context: int, rows: int) -> None:
        self.shape = Shape(layers, width, context)
        self.rows = rows
        self.text = read_corpus().training
        self.frequencies = byte_frequencies(self.text)

    def layers(self) -> list[nn.Module]:
        """The same weights on every call."""
        torch.manual_seed(0)
        return gpt_layers(self.shape, self.frequencies)

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The same on every call."""
        return random_batches(self.text, self.rows, self.shape.context, seed=1)


def measure(
    schedule: Schedule, model: Model, rounds: int, pin: str
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Seconds of every step, and the losses of all steps, by contender."""

    def tasks(rank: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, make_step in zip(NAMES, (fastpipe_step, torch_step), strict=True):
            contender = Contender(make_step, model, schedule, rank)
            found |= {name: contender.run, f"{name} update": contender.update}
            found[f"{name} losses"] = partial(getattr, contender, "losses")
        return found

    def step(group: Ranks, name: str) -> float:
        seconds = group.time(name)
        group.call(f"{name} update")
        return seconds

    label = f"{schedule.num_ranks} ranks, {schedule.name}"
    with ranks(schedule.num_ranks, tasks, pin=pin) as group:
        seconds = interleaved({name: partial(step, group, name) for name in NAMES}, rounds, label)
        losses = {name: _known(group.call(f"{name} losses")) for name in NAMES}
    return seconds, losses


def _known(by_rank: list[list[float]]) -> list[float]:
    """The losses of a rank that has them."""
    return next(losses for losses in by_rank if losses[0] == losses[0])


def row(schedule: Schedule, seconds: dict[str, list[float]], losses: dict[str, list[float]]) -> list[str]:
    ours, theirs = seconds["fastpipe"], seconds["torch"]
    pairs = list(zip(losses["fastpipe"], losses["torch"], strict=True))
    return [
        TORCH_NAMES[schedule.name],
        spread(ours, 1e3),
        spread(theirs, 1e3),
        ratio(theirs, ours),
        f"{pairs[0][0]:.6f}",
        f"{pairs[-1][0]:.6f}",
        f"{max(abs(one - other) for one, other in pairs):.1e}",
    ]


def main() -> None:
    options = parser(__doc__, rounds=5)
    options.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    options.add_argument("--microbatches", type=int, default=8)
    options.add_argument("--layers", type=int, default=8)
    options.add_argument("--width", type=int, default=160)
    options.add_argument("--context", type=int, default=128)
    options.add_argument("--rows", type=int, default=1, help="of a microbatch (1)")
    options.add_argument("--schedules", nargs="+", default=list(TORCH_NAMES), metavar="NAME", help="of those both have")
    chosen = options.parse_args()
    model = Model(chosen.layers, chosen.width, chosen.context, chosen.rows * chosen.microbatches)
    print(machine())
    for num_ranks in chosen.ranks:
        rows = []
        for name in chosen.schedules:
            schedule = make_schedule(name, num_ranks=num_ranks, num_microbatches=chosen.microbatches)
            rows.append(row(schedule, *measure(schedule, model, chosen.rounds, chosen.pin)))
        print(
            f"\n{num_ranks} ranks, {chosen.microbatches} microbatches of {chosen.rows} x {chosen.context} bytes, "
            f"{chosen.layers} layers of width {chosen.width}; {chosen.rounds} rounds;\n"
            f"{placing(num_ranks, chosen.pin)}\n"
        )
        print(table(HEADS, rows, markdown=chosen.markdown), flush=True)


if __name__ == "__main__":
    main()
