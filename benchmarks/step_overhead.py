"""What a step costs around its actions, by part: ``python benchmarks/step_overhead.py``.

One microbatch of a stage as small as can be, on 1 rank and on 2 and 4 processes of this host. *Agreement* is the
start of a step (inputs are taken and all ranks say so), *preparation* what is done until the executor runs,
*execution* the executor with the stage's forward and backward, and the waiting for other ranks, *report* the end (all
ranks say how it went), *result* what is made of it, *rest* what is between. All sizes take turns, round after round. A
figure is the mean over the ranks of a round's median step, and of these the median and the quartiles of the rounds.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import platform
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fastpipe import Pipeline
from fastpipe.runtime.executor import LocalRanks
from fastpipe.runtime.step import Steps

WIDTH = 4
PARTS = ("agreement", "preparation", "execution", "report", "result", "rest", "step")
TIMED: dict[str, tuple[type, str]] = {
    "agreement": (Steps, "_agree_on_inputs"),
    "preparation": (Steps, "_execute"),
    "execution": (LocalRanks, "run"),
    "report": (Steps, "_finish"),
    "result": (Steps, "_result"),
}
"""The methods that are the parts; preparation holds execution."""


class Clocks:
    """Seconds of every part, summed over one step."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)
        for part, (owner, name) in TIMED.items():
            setattr(owner, name, self._timed(part, getattr(owner, name)))

    def _timed(self, part: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                self.seconds[part] += time.perf_counter() - start

        return timed

    def step(self, call: Callable[[], Any]) -> list[float]:
        """The parts of one step, in the order of `PARTS`."""
        self.seconds = dict.fromkeys(PARTS, 0.0)
        start = time.perf_counter()
        call()
        found = self.seconds
        found["step"] = time.perf_counter() - start
        found["preparation"] -= found["execution"]
        found["rest"] = 2 * found["step"] - sum(found.values())
        return [found[part] for part in PARTS]


def _rank(rank: int, size: int, port: int, options: argparse.Namespace, pipe: Connection) -> None:
    torch.set_num_threads(1)
    if size > 1:
        store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    count = options.microbatches
    torch.manual_seed(0)  # all ranks get one batch
    model = Pipeline(
        lambda _: nn.Linear(WIDTH, WIDTH), "1f1b", count, nn.functional.mse_loss, executor=options.executor
    )
    x, y = torch.randn(count, WIDTH), torch.randn(count, WIDTH)
    clocks = Clocks()
    while (steps := pipe.recv()) is not None:
        found = [clocks.step(lambda: model.step(x, target=y)) for _ in range(steps)]
        pipe.send([statistics.median(column) for column in zip(*found, strict=True)])
    if size > 1:
        dist.destroy_process_group()


class Group:
    """The processes of one pipeline."""

    def __init__(self, size: int, options: argparse.Namespace) -> None:
        context = multiprocessing.get_context("spawn")
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.pipes, self.processes = [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            arguments = (rank, size, self.store.port, options, theirs)
            process = context.Process(target=_rank, args=arguments, daemon=True)
            process.start()
            self.pipes.append(ours)
            self.processes.append(process)

    def measure(self, steps: int) -> list[float]:
        """Microseconds of every part, over the ranks."""
        for pipe in self.pipes:
            pipe.send(steps)
        return [1e6 * statistics.mean(column) for column in zip(*(pipe.recv() for pipe in self.pipes), strict=True)]

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.send(None)
        for process in self.processes:
            process.join(10)


def text(values: list[float]) -> str:
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:,.0f} ({low:,.0f}..{high:,.0f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=100, help="of a round")
    parser.add_argument("--microbatches", type=int, default=1)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--executor", default="auto")
    options = parser.parse_args()
    groups = {size: Group(size, options) for size in options.ranks}
    for group in groups.values():
        group.measure(options.steps)  # warms up
    rounds = [{size: group.measure(options.steps) for size, group in groups.items()} for _ in range(options.rounds)]
    for group in groups.values():
        group.close()
    cores = len(os.sched_getaffinity(0))
    print(f"{platform.machine()}, {cores} cores, load {os.getloadavg()[0]:.1f}; torch {torch.__version__}; ", end="")
    print(f"{options.rounds} rounds of {options.steps} steps of {options.microbatches} microbatches\n")
    rows = [["us", *(f"{size} rank{'s' * (size > 1)}" for size in groups)], [":--"] + ["---:"] * len(groups)]
    for i, part in enumerate(PARTS):
        rows.append([part, *(text([found[size][i] for found in rounds]) for size in groups)])
    print("\n".join("| " + " | ".join(row) + " |" for row in rows))


if __name__ == "__main__":
    main()
