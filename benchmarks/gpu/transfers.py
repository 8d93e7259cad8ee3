"""Transfers between two processes: how fast, how much of them compute hides, and what they take from it.

torchrun --nproc-per-node 2 benchmarks/gpu/transfers.py

Each process has a device of its own, or both share one. GPipe's steps, in which compute can hide all messages but the
first activation and the last gradient. A stage multiplies matrices in its F and its B and hands on memory that is there
already, so a message is the transfer and nothing else. For every transport and size:

* transfer: a step that computes nothing, by message;
* exposed: what a step takes more than with messages of a few bytes and the same compute, which takes twice as long as
  a transfer, in per cent of all transfers' time. The first and the last message are 100 / microbatches of it;
* compute beside it: the median span of F under such messages over that under small ones, on the slower of the ranks.

The three steps take turns; figures are medians of rounds, of which there are fewer where a step takes long (--seconds).

Two processes that share a device compute in turns, a few milliseconds each, and NCCL, which would refuse them, talks
over sockets: of its messages only the smaller ones are measured there, and none of its figures is one of NCCL's speed.
What copies take from compute, without turns, is what copies.py measures in one process.
"""

from __future__ import annotations

import math
import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fastpipe
from fastpipe.program import Op

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from device import Rows, chosen, forget, options, seconds

SIZES = (1 << 20, 4 << 20, 16 << 20, 64 << 20)
OVER_SOCKETS = 2
"""So many of them."""
SMALL = 64
DTYPES = {"cuda": torch.bfloat16, "cpu": torch.float32}
GROUPS = ("process_group", "process_group_coalesced")
TRANSPORTS = {"cuda": (*GROUPS, "cuda_ipc"), "cpu": (*GROUPS, "shared_memory")}
"""What is experimental comes last, as it may use up the time there is."""
HEADS = ["transport", "MiB", "transfer, us", "GB/s", "compute of F, us", "exposed, %", "compute beside it"]


class Load:
    """What a rank's stage does and hands on; changed between steps."""

    def __init__(self, device: str, side: int) -> None:
        self.matrix = torch.randn(side, side, device=device, dtype=DTYPES[device])
        self.product = torch.empty_like(self.matrix)
        self.memory = torch.zeros(max(SIZES), dtype=torch.uint8, device=device).view(torch.float32)
        self.multiplications = 0
        self.bytes = SMALL

    def compute(self) -> None:
        for _ in range(self.multiplications):
            torch.mm(self.matrix, self.matrix, out=self.product)

    def message(self) -> Tensor:
        return self.memory[: self.bytes // 4].view(1, -1)


class Handing(torch.autograd.Function):
    """Computes in F and B; gives the message of the stage that it is in for an output, or for a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, load: Load, first: bool) -> Tensor:
        ctx.load, ctx.first, ctx.shape = load, first, x.shape
        load.compute()
        return load.message() if first else x[:, :1].clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        ctx.load.compute()
        return None if ctx.first else ctx.load.message(), grad[0, :1].clone(), None, None


class Stage(nn.Module):
    """One of the two."""

    def __init__(self, load: Load, first: bool) -> None:
        super().__init__()
        self.load, self.first = load, first
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return Handing.apply(x, self.weight, self.load, self.first)  # type: ignore[no-untyped-call,no-any-return]


class Bench:
    """One transport's pipeline on this rank."""

    def __init__(self, transport: str, given: Any) -> None:
        rank = dist.get_rank()
        self.given, self.load = given, Load(given.device, given.side)
        # what a stage sends may change with the looks of a step's input alone, so every size has its own
        sizes = (SMALL, *SIZES)
        self.inputs = {
            size: torch.randn(given.microbatches, 1 + i, device=given.device) for i, size in enumerate(sizes)
        }
        stage = Stage(self.load, first=rank == 0).to(given.device)
        self.pipe = fastpipe.Pipeline(
            {rank: stage},
            "gpipe",
            given.microbatches,
            lambda output, target: (output - target).sum(),
            device=given.device,
            transport=transport,
            merge=False,
        )

    def step(self, multiplications: int, size: int, trace: bool = False) -> fastpipe.StepResult:
        self.load.multiplications, self.load.bytes = multiplications, size
        x = self.inputs[size]
        return self.pipe.step(x, target=x, trace=trace)

    def times(self, *loads: tuple[int, int]) -> list[float]:
        """Median seconds of a step under each of them, of the slower rank."""
        for load in loads:
            for _ in range(2):
                self.step(*load)
        found: list[list[float]] = [[] for _ in loads]
        for _ in range(self.rounds(sum(agreed([self.time(load) for load in loads])))):
            for load, times in zip(loads, found, strict=True):
                times.append(self.time(load))
        return agreed([statistics.median(times) for times in found])

    def time(self, load: tuple[int, int]) -> float:
        """Seconds of a step that both begin together."""
        dist.barrier()
        return seconds(lambda: self.step(*load), self.given.device)[1]

    def rounds(self, seconds: float) -> int:
        """How many rounds that take so long are worth it."""
        return max(1, min(self.given.rounds, int(self.given.seconds / seconds)))

    def forwards(self, load: tuple[int, int]) -> list[float]:
        """The median span of F by rank."""
        timeline = self.step(*load, trace=True).timeline
        assert timeline is not None
        return [
            statistics.median(s.end - s.start for s in timeline.compute_spans(rank) if s.instruction.op == Op.F)
            for rank in range(2)
        ]


def agreed(values: list[float]) -> list[float]:
    """The larger of both ranks', so that both go on alike."""
    found = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return [float(value) for value in found]


def row(bench: Bench, transport: str, size: int) -> list[str]:
    messages = 2 * bench.given.microbatches
    (bare,) = bench.times((0, size))
    transfer = bare / messages
    few, many = bench.times((8, SMALL), (72, SMALL))
    one = (many - few) / (64 * messages)
    count = max(1, math.ceil(2 * transfer / one))
    small, large = (count, SMALL), (count, size)
    without, beside = bench.times(small, large)
    rounds = bench.rounds(without + beside)
    spans = [[bench.forwards(load) for load in (small, large)] for _ in range(rounds)]
    slowed = [statistics.median(b[rank] / a[rank] for a, b in spans) for rank in range(2)]
    return [
        transport.removeprefix("process_group_"),
        f"{size / (1 << 20):g}",
        f"{transfer * 1e6:.1f}",
        f"{size / transfer / 1e9:.1f}",
        f"{count * one * 1e6:.1f}",
        f"{100 * (beside - without) / (messages * transfer):.1f}",
        f"{max(slowed):.3f}",
    ]


def shared(device: str) -> bool:
    """Whether both processes are on one device."""
    return device == "cuda" and torch.cuda.device_count() < 2


def place(device: str) -> Callable[[], None]:
    """This rank's device; two ranks on one pass NCCL's check when each seems to be on a host of its own."""
    rank = int(os.environ["RANK"])
    if device == "cuda":
        if shared(device):
            os.environ |= {"NCCL_HOSTID": str(rank), "NCCL_NET": "Socket", "NCCL_MNNVL_ENABLE": "0"}
            os.environ |= {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}
            os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
        torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group("gloo")
    return dist.destroy_process_group


def main() -> None:
    made = options(__doc__, rounds=7)
    made.add_argument("--microbatches", type=int, default=64)
    made.add_argument("--side", type=int, default=2048, help="of the matrices that are multiplied (2048)")
    made.add_argument("--seconds", type=float, default=8.0, help="for the rounds of one comparison (8)")
    made.add_argument("--sizes", type=int, default=len(SIZES), help="only so many, the smallest first")
    if os.environ.get("WORLD_SIZE") != "2":
        raise SystemExit("two processes measure: torchrun --nproc-per-node 2 benchmarks/gpu/transfers.py")
    given = chosen(made)
    end = place(given.device)
    rows = Rows(HEADS, markdown=given.markdown, width=17) if dist.get_rank() == 0 else None
    for transport in TRANSPORTS[given.device]:
        bench = Bench(transport, given)
        few = transport in GROUPS and shared(given.device)
        for size in SIZES[: min(given.sizes, OVER_SOCKETS) if few else given.sizes]:
            cells = row(bench, transport, size)
            if rows is not None:
                rows.add(cells)
        del bench
        forget(given.device)
    end()


if __name__ == "__main__":
    main()
