"""Data parallel times pipeline with FSDP2: every block of a small GPT is sharded over the replicas of its rank.

    torchrun --standalone --nproc-per-node 4 examples/fsdp.py    two replicas of a pipeline of two ranks
    python examples/fsdp.py                                      one process, nothing is sharded: the same losses

With shards a process holds about a quarter of the parameters and of the optimizer's state: half of a half of the model.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Sequence

import torch
import torch.distributed as dist
from gpt_model import Shape, gpt_layers, loss_fn
from text_data import byte_frequencies, random_batches, read_corpus
from torch.distributed.fsdp import fully_shard
from training import positive, replicas_by_ranks, run

import fastpipe

NUM_RANKS, MICROBATCHES, ROWS = 2, 4, 16
SHAPE = Shape(layers=8, width=64, context=32)


def train(num_steps: int, schedule: str) -> list[float]:
    """The losses, each the mean over all replicas."""
    mesh = replicas_by_ranks("dp", NUM_RANKS)
    replica, num_replicas = (0, 1) if mesh is None else (mesh.get_local_rank("dp"), mesh["dp"].size())
    text = read_corpus().training
    torch.manual_seed(0)
    layers = gpt_layers(SHAPE, byte_frequencies(text))
    total = sum(parameter.numel() for layer in layers for parameter in layer.parameters())
    if mesh is not None:
        # the head's output is a view, of which FSDP warns; nobody changes it in place
        warnings.filterwarnings("ignore", "FSDP2-wrapped module", UserWarning)
        for layer in layers:
            fully_shard(layer, mesh=mesh["dp"])
    pipe = fastpipe.Pipeline(
        layers, schedule, MICROBATCHES, loss_fn, num_ranks=NUM_RANKS, group=None if mesh is None else mesh["pp"]
    )
    speaks = pipe.rank == 0 and replica == 0
    if speaks:
        held = sum(local(parameter).numel() for parameter in pipe.parameters())
        print(f"replicas: {num_replicas}; ranks of each: {NUM_RANKS}; {schedule}, {pipe.num_stages} stages")
        print(f"this process holds {held:,} of {total:,} parameters, {held / total:.0%}", flush=True)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=3e-3)
    batches = random_batches(text, ROWS, SHAPE.context, seed=0)
    losses = []
    for step in range(num_steps):
        x, target = (part.chunk(num_replicas)[replica] for part in next(batches))
        optimizer.zero_grad()
        loss = pipe.step(x, target=target).loss
        norm = pipe.clip_grad_norm_(1.0)
        optimizer.step()
        if mesh is not None:
            # each replica has the loss of its own batch
            dist.all_reduce(loss, group=mesh["dp"].get_group())
        losses.append(float(loss) / num_replicas)
        if speaks:
            print(f"step {step:3}  loss {losses[-1]:.5f}  norm of the gradients {norm:.4f}", flush=True)
    return losses


def local(parameter: torch.Tensor) -> torch.Tensor:
    """What of a parameter is on this process."""
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter


def main(arguments: Sequence[str] | None = None) -> list[float]:
    """The command."""
    parser = argparse.ArgumentParser(description="Data parallel times pipeline, with FSDP2.")
    parser.add_argument("--schedule", default="zbv", help="how the stages are run")
    parser.add_argument("--steps", type=positive(int), default=10, help="how many optimizer steps")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    return train(given.steps, given.schedule)


if __name__ == "__main__":
    run(main)
