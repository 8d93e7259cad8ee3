"""What the benchmarks of this folder share: the device, its clock, rows that are there as soon as they are measured.

Times are the host's, taken when the device has nothing left to do. With ``--device cpu`` a script can be tried where
there is no GPU; what it prints then is no result.
"""

from __future__ import annotations

import argparse
import gc
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tables import aligned, header, machine, parser

Step = Callable[[], Any]


def options(description: str | None, *, rounds: int) -> argparse.ArgumentParser:
    """What every benchmark here takes."""
    made = parser(description, rounds=rounds)
    made.add_argument("--device", default="cuda", help="cpu: only to try the script")
    return made


def chosen(made: argparse.ArgumentParser) -> argparse.Namespace:
    """The arguments, and what the figures are of; ends where there is no such device."""
    found = made.parse_args()
    if found.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("there is no CUDA device: nothing can be measured (--device cpu tries the script)")
    if os.environ.get("RANK", "0") == "0":
        what = gpus() if found.device == "cuda" else "NO RESULT, the script is only tried"
        print(f"{Path(sys.argv[0]).name}: {what}; {machine()}", flush=True)
    return found


def gpus() -> str:
    """What they are, and what drives them."""
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    try:
        asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
        driver = subprocess.run(asked, capture_output=True, text=True, timeout=30).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        driver = ""
    return (
        f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}, driver {driver or 'unknown'}, "
        f"CUDA {torch.version.cuda}, NCCL {nccl}"
    )


def alone() -> None:
    """Make this process a group of its own, which torch's schedules want."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def finish(device: str) -> None:
    """Wait until the device has nothing to do."""
    if device == "cuda":
        torch.cuda.synchronize()


def forget(device: str) -> None:
    """Give back the memory of what is not held any more."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def seconds(step: Step, device: str) -> tuple[float, float]:
    """Until the host had launched everything, and until the device was done."""
    finish(device)
    begin = time.perf_counter()
    step()
    launched = time.perf_counter()
    finish(device)
    return launched - begin, time.perf_counter() - begin


def rounds_of(steps: dict[str, Step], device: str, rounds: int, warm_up: int) -> dict[str, list[tuple[float, float]]]:
    """`seconds` of all, in turns."""
    for step in steps.values():
        for _ in range(warm_up):
            step()
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    gc.collect()
    gc.freeze()  # to look at all that is there takes Python as long as many a step
    try:
        for number in range(rounds):
            names = list(steps)
            for name in names if number % 2 else reversed(names):
                found[name].append(seconds(steps[name], device))
    finally:
        gc.unfreeze()
    return found


class Rows:
    """A table whose rows are printed as they come, so that a run that is cut short has said what it knew.

    Args:
        heads: of the columns.
        markdown: whether README.md is to have it.
        width: of a column, unless its head is wider.
    """

    def __init__(self, heads: Sequence[str], *, markdown: bool, width: int = 25) -> None:
        self.widths = None if markdown else [max(len(head), width) for head in heads]
        print(*header(heads, self.widths), sep="\n", flush=True)

    def add(self, cells: Sequence[str]) -> None:
        """Print a row."""
        print(aligned(cells, self.widths), flush=True)


__all__ = ["Rows", "Step", "alone", "chosen", "finish", "forget", "options", "rounds_of", "seconds"]
