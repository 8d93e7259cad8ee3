"""What the benchmarks of this folder share: the device, its clock, and a process group of one.

Times are the host's, taken when the device has nothing left to do. With ``--device cpu`` a script can be tried where
there is no GPU; what it prints then is no result.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from typing import Any

from tables import machine, parser

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
    what = "NO RESULT, the script is only tried"
    if found.device == "cuda":
        what = f"{torch.cuda.get_device_name()}, {torch.cuda.device_count()} of them"
    if os.environ.get("RANK", "0") == "0":
        print(f"{what}; {machine()}", flush=True)
    return found


def alone() -> None:
    """Make this process a group of its own, which torch's schedules want."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def finish(device: str) -> None:
    """Wait until the device has nothing to do."""
    if device == "cuda":
        torch.cuda.synchronize()


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
    for number in range(rounds):
        names = list(steps)
        for name in names if number % 2 else reversed(names):
            found[name].append(seconds(steps[name], device))
    return found


__all__ = ["Step", "alone", "chosen", "finish", "options", "rounds_of", "seconds"]
