"""What a training loop over several ranks needs beside the pipeline: a device, a common clock, a progress line."""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import fastpipe

DEVICES = ["auto", "cpu", "cuda"]


def own_device(wanted: str) -> torch.device:
    """This process's GPU, which it shares where there are fewer than processes; the CPU if there is none."""
    count = 0 if wanted == "cpu" else torch.cuda.device_count()
    if wanted == "cuda" and count == 0:
        raise ValueError("device = 'cuda': torch finds no GPU; give 'cpu', or a build of torch for GPUs")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % count) if count else torch.device("cpu")


def replicas_by_ranks(name: str, num_ranks: int) -> DeviceMesh | None:
    """The processes as replicas x ranks of a pipeline; None where there is one, whose threads are the ranks.

    Args:
        name: of the mesh's dimension of the replicas.
        num_ranks: of each pipeline.
    """
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    if processes == 1:
        return None
    if processes % num_ranks:
        raise ValueError(f"{processes} processes: a pipeline has {num_ranks} ranks; start a multiple of that, or one")
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    return dist.init_device_mesh("cpu", (processes // num_ranks, num_ranks), mesh_dim_names=(name, "pp"))


def positive(kind: type) -> Callable[[str], float]:
    """A type for argparse that takes numbers above 0 alone."""

    def read(text: str) -> float:
        number = kind(text)
        if not number > 0:
            raise argparse.ArgumentTypeError(f"{text} is not above 0")
        return number

    read.__name__ = kind.__name__
    return read


def run(main: Callable[[], object]) -> None:
    """A command, which a wrong argument ends with one line."""
    try:
        main()
    except (ValueError, OSError) as error:
        sys.exit(f"{Path(sys.argv[0]).name}: {error}")


class Budget:
    """How much of the training is behind us, from 0 to 1, the same on every rank: steps if given, else seconds."""

    def __init__(self, steps: int | None, seconds: float) -> None:
        self.steps = steps
        self.seconds = seconds
        self.start = time.monotonic()

    def elapsed(self) -> float:
        return time.monotonic() - self.start

    def spent(self, step: int) -> float:
        if self.steps is not None:
            return min(1.0, step / self.steps)
        # If one rank's clock stopped it a step before the others, they would wait for it for ever.
        latest = torch.tensor(self.elapsed())
        if dist.is_initialized():
            dist.all_reduce(latest, dist.ReduceOp.MAX)
        return min(1.0, latest.item() / self.seconds)


def learning_rate(highest: float, spent: float, warm_up: float = 0.05) -> float:
    """Up in a straight line, then down along a cosine to a twentieth."""
    if spent < warm_up:
        return highest * (0.05 + 0.95 * spent / warm_up)
    return highest * (0.525 + 0.475 * math.cos(math.pi * (spent - warm_up) / (1 - warm_up)))


@dataclass
class Meter:
    """What the progress line shows."""

    started: float = field(default_factory=time.monotonic)
    tokens: int = 0
    loss: float = math.nan
    bubble: float = math.nan

    def update(self, result: fastpipe.StepResult, tokens: int, traced: bool) -> None:
        self.tokens += tokens
        loss = result.loss.item()
        self.loss = loss if math.isnan(self.loss) else 0.95 * self.loss + 0.05 * loss
        if traced:
            self.bubble = result.timeline.bubble_fraction

    def line(self, step: int, spent: float) -> str:
        rate = self.tokens / (time.monotonic() - self.started)
        return (
            f"{spent:>4.0%}   step {step:>5}   loss {self.loss:.3f}   {rate:>6,.0f} tokens/s   "
            f"measured bubble {self.bubble:.0%}"
        )
