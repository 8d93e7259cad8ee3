"""The shared-memory transport alone, against memcpy and Gloo, in one run: ``python benchmarks/bandwidth.py``.

Two processes play ping-pong, one message under way at a time; a figure is half a round trip. The transport runs
without torch and Python (bandwidth.cpp, built here with g++), Gloo through torch.distributed. *On the slot* the
receiver has the message where it lies, *copied out* it copies it into a warm buffer, *fresh* into newly allocated
memory. memcpy is between warm buffers of one process.

All measurements take turns, round after round, so that whatever disturbs the machine disturbs all of them; a figure is
the median of the rounds, with the first and third quartile behind it.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import platform
import statistics
import subprocess
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[1]
SIZES = [1 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20]
MODES = ("memcpy", "slot", "copied", "fresh", "gloo")
NAMES = {"memcpy": "memcpy", "slot": "on the slot", "copied": "copied out", "fresh": "fresh", "gloo": "Gloo"}


class Transport:
    """The two processes of bandwidth.cpp."""

    def __init__(self, folder: str) -> None:
        program = str(Path(folder) / "bandwidth")
        sources = [str(ROOT / "benchmarks/bandwidth.cpp"), *map(str, sorted(ROOT.glob("csrc/core/*.cpp")))]
        command = ["g++", "-std=c++17", "-O3", "-pthread", f"-I{ROOT / 'csrc'}", *sources, "-o", program]
        subprocess.run(command, check=True)
        self.process = subprocess.Popen([program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def measure(self, mode: str, size: int, count: int) -> float:
        """Seconds of one way."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{mode} {size} {count}\n")
        self.process.stdin.flush()
        return float(self.process.stdout.readline())

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(10)


class Gloo:
    """Two processes of a Gloo group."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.store, self.pipes, self.processes = store, [], []
        for rank in range(2):
            ours, theirs = context.Pipe()
            process = context.Process(target=_gloo, args=(rank, store.port, theirs), daemon=True)
            process.start()
            self.pipes.append(ours)
            self.processes.append(process)

    def measure(self, size: int, count: int) -> float:
        """Seconds of one way."""
        for pipe in self.pipes:
            pipe.send((size, count))
        return max(pipe.recv() for pipe in self.pipes)

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.send(None)
        for process in self.processes:
            process.join(10)


def _gloo(rank: int, port: int, pipe: Connection) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    buffers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    while (order := pipe.recv()) is not None:
        size, count = order
        out, back = buffers.setdefault(size, (torch.ones(size, dtype=torch.uint8), torch.ones(size, dtype=torch.uint8)))
        start = time.perf_counter()
        for i in range(-3, count):
            if i == 0:
                start = time.perf_counter()
            if rank == 0:
                dist.send(out, 1)
            dist.recv(back, 1 - rank)
            if rank == 1:
                dist.send(out, 0)
        pipe.send((time.perf_counter() - start) / count / 2)
    dist.destroy_process_group()


def measure(rounds: int, sizes: list[int]) -> dict[tuple[str, int], list[float]]:
    """All figures, by mode and size."""
    found: dict[tuple[str, int], list[float]] = {(mode, size): [] for mode in MODES for size in sizes}
    with tempfile.TemporaryDirectory() as folder:
        transport, gloo = Transport(folder), Gloo()
        for turn in range(rounds + 1):
            for size in sizes:
                count = max(3, min(1000, (32 << 20) // size))
                for mode in MODES:
                    few = max(3, min(count, 200)) if mode == "gloo" else count
                    took = gloo.measure(size, few) if mode == "gloo" else transport.measure(mode, size, few)
                    if turn > 0:  # the first warms up
                        found[mode, size].append(took)
        transport.close()
        gloo.close()
    return found


def text(times: list[float]) -> str:
    low, middle, high = (1e6 * quantile for quantile in statistics.quantiles(times, n=4))
    return f"{middle:,.1f} ({low:,.1f}..{high:,.1f})"


def table(found: dict[tuple[str, int], list[float]], sizes: list[int]) -> str:
    """Microseconds of one way: median and quartiles; ratios are of medians."""
    heads = ["bytes", *(f"{NAMES[mode]}, us" for mode in MODES), "slot/memcpy", "copied/memcpy", "Gloo/slot"]
    rows = [heads, ["---:"] * len(heads)]
    for size in sizes:
        middle = {mode: statistics.median(found[mode, size]) for mode in MODES}
        pairs = (("slot", "memcpy"), ("copied", "memcpy"), ("gloo", "slot"))
        ratios = [f"{middle[a] / middle[b]:.2f}" for a, b in pairs]
        rows.append([f"{size:,}", *(text(found[mode, size]) for mode in MODES), *ratios])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--largest", type=int, default=SIZES[-1], help="bytes")
    options = parser.parse_args()
    sizes = [size for size in SIZES if size <= options.largest]
    load = os.getloadavg()[0]
    found = measure(options.rounds, sizes)
    cores = len(os.sched_getaffinity(0))
    print(f"{platform.machine()}, {cores} cores, load {load:.1f} before, {os.getloadavg()[0]:.1f} after; ", end="")
    print(f"torch {torch.__version__}; {options.rounds} rounds\n")
    print(table(found, sizes))


if __name__ == "__main__":
    main()
