"""Train, save, and resume with another number of ranks and another schedule: the losses are those of one run.

Start it any number of times, with any schedule and number of ranks or processes; it resumes where it stopped:

    python examples/resume.py --folder checkpoints --ranks 4 --schedule dualpipev --until 6
    torchrun --standalone --nproc-per-node 2 examples/resume.py --folder checkpoints --schedule 1f1b --until 12
    python examples/resume.py --folder checkpoints --ranks 1 --schedule gpipe --until 18

Every third step it saves in the background, into a folder of its own.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn
from training import run

import fastpipe

ROWS, WIDTH, LAYERS, MICROBATCHES, EVERY = 32, 32, 8, 8, 3


def make_layers() -> list[nn.Module]:
    """The model: the same on every rank until a checkpoint is loaded."""
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU()) for _ in range(LAYERS)]


def batch_of(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The batch of a step, whoever asks."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(ROWS, WIDTH, generator=generator)
    return x, x.roll(1, dims=1).tanh()


def train(folder: Path, schedule: str, num_ranks: int | None, until: int) -> list[float]:
    """Go on from the latest checkpoint, up to a step; the losses of the steps that were done."""
    pipe = fastpipe.Pipeline(make_layers(), schedule, MICROBATCHES, nn.functional.mse_loss, num_ranks=num_ranks)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    start = 0
    found = fastpipe.latest_checkpoint(folder)
    if found is not None:
        extra = fastpipe.load_checkpoint(found, pipe, optimizer)
        start = extra["step"]
        scheduler.load_state_dict(extra["scheduler"])
    if pipe.rank == 0:
        print(f"{schedule} on {pipe.num_ranks} ranks, {f'from {found.name}' if found else 'from the start'}")
        if start >= until:
            print(f"  it is at step {start} already: go on with --until {start + 6}, or start anew with --folder")
    losses = []
    writing = None
    for step in range(start, until):
        x, target = batch_of(step)
        optimizer.zero_grad()
        loss = float(pipe.step(x, target=target).loss)
        pipe.clip_grad_norm_(1.0)
        optimizer.step()
        scheduler.step()
        losses.append(loss)
        if pipe.rank == 0:
            print(f"  step {step:3}  loss {loss:.9f}")
        if (step + 1) % EVERY == 0 or step + 1 == until:
            extra = {"step": step + 1, "scheduler": scheduler.state_dict()}
            path = folder / f"step{step + 1}"
            writing = fastpipe.save_checkpoint(path, pipe, optimizer, extra=extra, asynchronous=True)
    if writing is not None:
        writing.result()  # raises if the checkpoint could not be written
    return losses


def main(arguments: Sequence[str] | None = None) -> list[float]:
    """The command."""
    parser = argparse.ArgumentParser(description="Train, save, and go on with another number of ranks.")
    parser.add_argument("--folder", type=Path, default=Path("checkpoints"), help="where checkpoints are")
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--ranks", type=int, help="in one process, whose threads they are; otherwise the processes")
    parser.add_argument("--until", type=int, default=6, help="the step to stop before")
    given = parser.parse_args(arguments)
    return train(given.folder, given.schedule, given.ranks, given.until)


if __name__ == "__main__":
    run(main)
