"""The shared-memory transport alone, against memcpy and Gloo, in one run: ``python benchmarks/bandwidth.py``.

Two processes play ping-pong, one message under way at a time; a figure is half a round trip. The transport runs
without torch and Python (bandwidth.cpp, built here with g++), Gloo through torch.distributed. *On the slot* the
receiver has the message where it lies, *copied out* it copies it into a warm buffer, *fresh* into newly allocated
memory. memcpy is between warm buffers of one process; "memcpy, two pairs" takes two pairs of buffers in turn, which are
as much memory as ping and pong use.

What falls short of its aim is named, with the parts of one way that are more than memcpy: the copy into the cell, the
copy out of it, and what is left, which is the wake-up and the transport itself. ``--profile`` prints them for all.

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
from profiles import Aim, Parts, explained, medians, more

ROOT = Path(__file__).resolve().parents[1]
SIZES = [1 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20]
MODES = ("memcpy", "memcpy2", "slot", "copied", "fresh", "gloo")
NAMES = {
    "memcpy": "memcpy",
    "memcpy2": "memcpy, two pairs",
    "slot": "on the slot",
    "copied": "copied out",
    "fresh": "fresh",
    "gloo": "Gloo",
}
IN, OUT, REST = "copy in", "copy out", "wake-up and transport"
SMALL, LARGE = 16 << 10, 1 << 20
"""Bytes: small messages are to be fast, large ones as fast as a copy."""


class Transport:
    """The two processes of bandwidth.cpp."""

    def __init__(self, folder: str) -> None:
        program = str(Path(folder) / "bandwidth")
        sources = [str(ROOT / "benchmarks/bandwidth.cpp"), *map(str, sorted(ROOT.glob("csrc/core/*.cpp")))]
        command = ["g++", "-std=c++17", "-O3", "-pthread", f"-I{ROOT / 'csrc'}", *sources, "-o", program]
        subprocess.run(command, check=True)
        self.process = subprocess.Popen([program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def measure(self, mode: str, size: int, count: int) -> Parts:
        """Seconds of one way."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{mode} {size} {count}\n")
        self.process.stdin.flush()
        whole, copy_in, copy_out = map(float, self.process.stdout.readline().split())
        return {IN: copy_in, OUT: copy_out, REST: whole - copy_in - copy_out}

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


Measurements = dict[tuple[str, int], list[Parts]]
"""By mode and size: seconds of one way by part, one a round."""


def measure(rounds: int, sizes: list[int]) -> Measurements:
    found: Measurements = {(mode, size): [] for mode in MODES for size in sizes}
    with tempfile.TemporaryDirectory() as folder:
        transport, gloo = Transport(folder), Gloo()
        for turn in range(rounds + 1):
            for size in sizes:
                count = max(3, min(1000, (32 << 20) // size))
                for mode in MODES:
                    few = max(3, min(count, 200)) if mode == "gloo" else count
                    took = {REST: gloo.measure(size, few)} if mode == "gloo" else transport.measure(mode, size, few)
                    if turn > 0:  # the first warms up
                        found[mode, size].append(took)
        transport.close()
        gloo.close()
    return found


def seconds(found: Measurements, mode: str, size: int) -> list[float]:
    """Of one way, by round."""
    return [sum(parts.values()) for parts in found[mode, size]]


def text(times: list[float]) -> str:
    low, middle, high = (1e6 * quantile for quantile in statistics.quantiles(times, n=4))
    return f"{middle:,.1f} ({low:,.1f}..{high:,.1f})"


def table(found: Measurements, sizes: list[int]) -> str:
    """Microseconds of one way: median and quartiles; ratios are of medians."""
    heads = ["bytes", *(f"{NAMES[mode]}, us" for mode in MODES), "slot/memcpy", "copied/memcpy", "Gloo/slot"]
    rows = [heads, ["---:"] * len(heads)]
    for size in sizes:
        taken = {mode: seconds(found, mode, size) for mode in MODES}
        middle = {mode: statistics.median(times) for mode, times in taken.items()}
        pairs = (("slot", "memcpy"), ("copied", "memcpy"), ("gloo", "slot"))
        ratios = [f"{middle[a] / middle[b]:.2f}" for a, b in pairs]
        rows.append([f"{size:,}", *(text(times) for times in taken.values()), *ratios])
    return lines(rows)


def profile(found: Measurements, sizes: list[int]) -> str:
    """Microseconds by part: medians."""
    columns = [("slot", IN), ("slot", REST), ("copied", IN), ("copied", OUT), ("copied", REST)]
    heads = ["bytes", *(f"{NAMES[mode]}: {part}" for mode, part in columns)]
    rows = [heads, ["---:"] * len(heads)]
    for size in sizes:
        parts = {mode: medians(found[mode, size]) for mode in ("slot", "copied")}
        rows.append([f"{size:,}", *(f"{1e6 * parts[mode][part]:,.1f}" for mode, part in columns)])
    return lines(rows)


def lines(rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def aims(size: int) -> list[tuple[str, str | None, Aim]]:
    """What is compared with what, None for microseconds; and what that has to be."""
    found: list[tuple[str, str | None, Aim]] = [("gloo", "slot", Aim("Gloo/slot", 10, at_least=True))]
    if size <= SMALL:
        found.append(("slot", None, Aim("one way, us,", 5)))
    if size >= LARGE:
        found += [("slot", "memcpy", Aim("slot/memcpy", 1.2)), ("copied", "memcpy", Aim("copied/memcpy", 2.2))]
    return found


def shortfalls(found: Measurements, size: int) -> list[str]:
    """What falls short with messages of one size, and by which parts."""
    texts = []
    base = medians(found["memcpy", size])[REST]
    for mode, other, aim in aims(size):
        per = 1e-6 if other is None else statistics.median(seconds(found, other, size))
        missed = aim.missed([statistics.median(seconds(found, mode, size)) / per])
        if missed is None:
            continue
        parts = medians(found["slot" if mode == "gloo" else mode, size])
        over = more(parts, {IN: base, OUT: base} if mode == "copied" else {IN: base})
        texts.append(f"{size:,} bytes: {missed}; {explained(over, 1e6, 'us over memcpy')}")
    return texts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--largest", type=int, default=SIZES[-1], help="bytes")
    parser.add_argument("--profile", action="store_true", help="where the time of one way goes, for all sizes")
    options = parser.parse_args()
    sizes = [size for size in SIZES if size <= options.largest]
    load = os.getloadavg()[0]
    found = measure(options.rounds, sizes)
    cores = len(os.sched_getaffinity(0))
    print(f"{platform.machine()}, {cores} cores, load {load:.1f} before, {os.getloadavg()[0]:.1f} after; ", end="")
    print(f"torch {torch.__version__}; {options.rounds} rounds\n")
    print(table(found, sizes))
    if options.profile:
        print(f"\nby part, us\n\n{profile(found, sizes)}")
    print("", *(text for size in sizes for text in shortfalls(found, size)), sep="\n")


if __name__ == "__main__":
    main()
