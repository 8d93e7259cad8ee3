"""A script that goes on with as many ranks as it is started with, by a plan for them.

python tests/distributed/resized.py FOLDER UNTIL     under torchrun, or as one; the folder is that of the checkpoints
"""

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from torch import nn

import fastpipe

WIDTH, LAYERS, MICROBATCHES = 16, 12, 8


def batch_of(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The batch of a step, whoever asks."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(2 * MICROBATCHES, WIDTH, generator=generator)
    return x, x.roll(1, dims=1).tanh()


def main(folder: Path, until: int) -> None:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(LAYERS)]
    profile, num_ranks = folder / "layers.json", int(os.environ["WORLD_SIZE"])
    schedule: fastpipe.Schedule | str = "1f1b"
    partition: Sequence[int] | str = "layers"
    if planned := profile.exists():
        plan = fastpipe.plan(
            profile, num_ranks=num_ranks, num_microbatches=MICROBATCHES, max_stages_per_rank=1, effort=0.01
        )
        schedule, partition = plan.schedule, plan.partition
    pipe = fastpipe.Pipeline(layers, schedule, MICROBATCHES, nn.functional.mse_loss, partition=partition)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=3e-3)
    found = fastpipe.latest_checkpoint(folder)
    start = fastpipe.load_checkpoint(found, pipe, optimizer)["step"] if found else 0
    losses = []
    for step in range(start, until):
        x, target = batch_of(step)
        optimizer.zero_grad()
        losses.append(float(pipe.step(x, target=target).loss))
        pipe.clip_grad_norm_(1.0)
        optimizer.step()
        fastpipe.save_checkpoint(folder / f"step{step + 1}", pipe, optimizer, extra={"step": step + 1}, keep=2)
    costs = pipe.profile_layers(x, target=target)
    if pipe.rank == 0:
        profile.write_text(json.dumps(asdict(costs)))
        print(json.dumps({"ranks": pipe.num_ranks, "planned": planned, "losses": losses}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
