"""Copies beside a matrix product, in one process: how fast they are, and what they take from it.

python benchmarks/gpu/copies.py

Two processes on one device compute in turns, so what a transport takes from compute cannot be seen there. Here one
stream multiplies matrices that fill the GPU, while another one copies without end, in one of these ways:

* to itself: within the device, as cudaMemcpyAsync does it;
* to itself, overlapping: the same, but the driver is told that compute goes on beside it;
* to a process: into the memory of another process, mapped by CUDA IPC, as the copy-engine transport does it;
* to a device: to the next device, where there is one;
* to the host: into pinned memory, which only a copy engine does;
* by a kernel: a kernel that copies and takes SMs, as NCCL's do.

"Product" is its time beside the copies over its time alone, both by events and in turns. GB/s count every byte once.
"""

from __future__ import annotations

import ctypes
import functools
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as processes

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from device import Rows, chosen, finish, forget, options
from tables import ratio, spread

SIZES = (1 << 20, 16 << 20, 64 << 20)
PRODUCTS = 40
LONGER, MOST = 3.0, 5000
"""Copies go on for so many times as long as the products, but there are no more than this."""
HEADS = ["copy", "MiB", "alone, GB/s", "beside the products, GB/s", "product"]
Copy = Callable[[], Any]


class _Location(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class _Attributes(ctypes.Structure):
    _fields_ = [("order", ctypes.c_int), ("source", _Location), ("target", _Location), ("flags", ctypes.c_uint)]


@functools.cache
def cuda_runtime() -> ctypes.CDLL:
    """The library that torch has loaded."""
    return ctypes.CDLL(f"libcudart.so.{str(torch.version.cuda).split('.')[0]}")


def overlapping(to: torch.Tensor, source: torch.Tensor) -> None:
    """Copy on the current stream, which is not the default one, with the hint that compute goes on beside it."""
    in_stream_order, beside_compute = 1, 1
    code = cuda_runtime().cudaMemcpyBatchAsync(
        (ctypes.c_void_p * 1)(to.data_ptr()),
        (ctypes.c_void_p * 1)(source.data_ptr()),
        (ctypes.c_size_t * 1)(source.nbytes),
        ctypes.c_size_t(1),
        (_Attributes * 1)(_Attributes(order=in_stream_order, flags=beside_compute)),
        (ctypes.c_size_t * 1)(0),
        ctypes.c_size_t(1),
        ctypes.c_void_p(torch.cuda.current_stream().cuda_stream),
    )
    if code != 0:
        raise RuntimeError(f"cudaMemcpyBatchAsync gives {code}")


def lend(size: int, out: Any, done: Any) -> None:
    """Another process: gives memory of the device, and waits until nobody needs it."""
    out.put(torch.zeros(size, dtype=torch.uint8, device="cuda"))
    done.wait()


@contextmanager
def borrowed(size: int) -> Iterator[torch.Tensor]:
    """Another process's memory."""
    context = processes.get_context("spawn")
    out, done = context.Queue(), context.Event()
    process = context.Process(target=lend, args=(size, out, done), daemon=True)
    process.start()
    try:
        yield out.get(timeout=120)
    finally:
        done.set()
        process.join(30)


def ways(source: torch.Tensor, other: torch.Tensor | None) -> dict[str, Copy]:
    """Ways to copy, by name."""
    size, device = source.numel(), source.device
    own, host = torch.empty_like(source), torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    words = source.view(torch.int32), own.view(torch.int32)
    found = {
        "to itself": lambda: own.copy_(source),
        "to itself, overlapping": lambda: overlapping(own, source),
        "to the host": lambda: host.copy_(source, non_blocking=True),
        "by a kernel": lambda: torch.add(words[0], 1, out=words[1]),
    }
    if other is not None:
        found["to a process"] = lambda: other[:size].copy_(source)
    if device.type == "cuda" and torch.cuda.device_count() > 1:
        far = source.to("cuda:1")
        found["to a device"] = lambda: far.copy_(source, non_blocking=True)
    return found


class Bench:
    """Products on the current stream, and copies on another one."""

    def __init__(self, side: int) -> None:
        self.matrix = torch.randn(side, side, device="cuda", dtype=torch.bfloat16)
        self.product = torch.empty_like(self.matrix)
        self.side = torch.cuda.Stream()

    def multiply(self) -> None:
        for _ in range(PRODUCTS):
            torch.mm(self.matrix, self.matrix, out=self.product)

    def run(self, copy: Copy | None, copies: int, products: bool) -> tuple[float, float]:
        """Milliseconds of the products and of all copies. Both streams begin some ten milliseconds after the host has
        begun to launch: so it is through with the products, and far ahead with the copies."""
        torch.cuda.synchronize()
        gate, events = torch.cuda.Event(), [torch.cuda.Event(enable_timing=True) for _ in range(4)]
        torch.cuda._sleep(20_000_000)
        gate.record()
        events[0].record()
        if products:
            self.multiply()
        events[1].record()
        with torch.cuda.stream(self.side):
            gate.wait()
            events[2].record()
            for _ in range(copies):
                if copy is not None:
                    copy()
            events[3].record()
        torch.cuda.synchronize()
        return events[0].elapsed_time(events[1]), events[2].elapsed_time(events[3])

    def row(self, copy: Copy, size: int, rounds: int) -> list[str]:
        self.run(copy, 3, products=True)
        alone, _ = self.run(None, 0, products=True)
        _, ten = self.run(copy, 10, products=False)
        count = max(2, min(MOST, int(LONGER * alone / (ten / 10))))
        found = []
        for _ in range(rounds):
            bare, _ = self.run(None, 0, products=True)
            _, copied = self.run(copy, count, products=False)
            beside, copied_beside = self.run(copy, count, products=True)
            found.append((bare, copied, beside, copied_beside))
        bare, copied, beside, copied_beside = zip(*found, strict=True)
        fast = (size * count / milliseconds / 1e6 for milliseconds in copied)
        fast_beside = (size * count / milliseconds / 1e6 for milliseconds in copied_beside)
        # where copies were done before the products, they were beside a part of them alone
        short = statistics.median(copied_beside) < statistics.median(beside)
        return [spread(list(fast)), spread(list(fast_beside)), ratio(beside, bare, 3) + (" in part" if short else "")]


def main() -> None:
    made = options(__doc__, rounds=15)
    made.add_argument("--side", type=int, default=4096, help="of the matrices that are multiplied (4096)")
    given = chosen(made)
    if given.device != "cuda":
        with torch.no_grad():
            for copy in ways(torch.zeros(64, dtype=torch.uint8), None).values():
                if "overlapping" not in copy.__code__.co_names:
                    copy()
        raise SystemExit("copies can be made on a CPU, and not be measured there")
    rows, bench = Rows(HEADS, markdown=given.markdown), Bench(given.side)
    try:
        with borrowed(max(SIZES)) as other:
            measured(bench, other, rows, given.rounds)
            del other
            finish("cuda")
    except Exception as error:  # that there can be no second process says nothing of the other ways
        print(f"no copies to a process: {type(error).__name__} {error}", flush=True)
        measured(bench, None, rows, given.rounds)


def measured(bench: Bench, other: torch.Tensor | None, rows: Rows, rounds: int) -> None:
    """All ways and sizes; one that fails leaves the others."""
    for size in SIZES:
        source = torch.randint(256, (size,), dtype=torch.uint8, device="cuda")
        for name, copy in ways(source, other).items():
            try:
                cells = bench.row(copy, size, rounds)
            except (RuntimeError, OSError, AttributeError) as error:
                cells = [" ".join(str(error).split())[:60], "", ""]
            rows.add([name, f"{size / (1 << 20):g}", *cells])
        forget("cuda")


if __name__ == "__main__":
    main()
