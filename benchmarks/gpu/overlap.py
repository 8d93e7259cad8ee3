"""F and B of two stages on one GPU: each stage's own stream, against one stream for both, and against others.

python benchmarks/gpu/overlap.py

One rank holds the pair of stages of DualPipeV, of GPT blocks from small to large, in bf16. "In order" is the same
executor and program with F and B of a pair one after the other; "torch" is torch's own DualPipeV; "bare" is F and B of
the same blocks and microbatches in plain PyTorch; these ratios are to fastpipe's step as it comes ("overlapped").
"Recorded" is fastpipe's step as a CUDA graph, for which the host has nothing to launch: what is gained there by overlap
("recorded in order" to it) is gained on the device. All take turns in one process.

With ``--streams`` a step of each size is profiled at the end: in how much of the time in which kernels run, they do in
more than one stream.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from fastpipe import Schedule, make_schedule

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from contenders import Alone, Work, fastpipe_step, torch_step
from device import Rows, Step, alone, chosen, finish, forget, options, rounds_of
from split_backward import Block
from tables import ratio, spread

SIZES = ((64, 1, 64), (256, 1, 256), (1024, 1, 1024), (2048, 1, 1024), (2048, 4, 1024))
"""Width, rows of a microbatch, tokens. Of the first two the host's launches take longer than the kernels, which fill
the GPU in the last."""
WARM_UP = 5  # the fourth step is recorded
DTYPES = {"cuda": torch.bfloat16, "cpu": torch.float32}
HEADS = [
    "width x rows x tokens",
    "overlapped, ms",
    "in order",
    "torch",
    "bare",
    "recorded, ms",
    "recorded in order",
    "torch/recorded",
]


def make_work(device: str, size: tuple[int, int, int], blocks: int, microbatches: int) -> Work:
    """Blocks of a GPT and a batch for them."""
    width, rows, tokens = size
    dtype = DTYPES[device]

    def make_stage(index: int) -> nn.Module:
        torch.manual_seed(index)
        return nn.Sequential(*(Block(width) for _ in range(blocks))).to(device, dtype)

    x, target = torch.randn(2, microbatches * rows, tokens, width, device=device, dtype=dtype)
    boundary = torch.randn(rows, tokens, width, device=device, dtype=dtype)
    return Work(make_stage, x, target, nn.functional.mse_loss, boundary)


def contenders(schedule: Schedule, work: Work) -> dict[str, Step]:
    """Steps to time, by name."""
    ours = partial(fastpipe_step, schedule, 0, work, device=work.inputs.device)
    return {
        "overlapped": ours(),
        "in order": ours(overlap="never"),
        "recorded": ours(cuda_graph=True),
        "recorded in order": ours(cuda_graph=True, overlap="never"),
        "torch": torch_step(schedule, 0, work),
        "bare": Alone(schedule, 0, work),
    }


def row(schedule: Schedule, work: Work, device: str, rounds: int) -> list[str]:
    found = rounds_of(contenders(schedule, work), device, rounds, WARM_UP)
    whole = {name: [seconds for _, seconds in times] for name, times in found.items()}
    ours, recorded = whole["overlapped"], whole["recorded"]
    return [
        spread(ours, 1e3, 3),
        *(ratio(whole[name], ours, 3) for name in ("in order", "torch", "bare")),
        spread(recorded, 1e3, 3),
        ratio(whole["recorded in order"], recorded, 3),
        ratio(whole["torch"], recorded),
    ]


def several_streams(step: Step) -> str:
    """In how much of a step's time with kernels they run in more than one stream, in per cent."""
    for _ in range(WARM_UP):
        step()
    finish("cuda")
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        step()
        finish("cuda")
    events = [
        (event.device_resource_id(), event.start_ns(), event.start_ns() + event.duration_ns())
        for event in profiled.profiler.kineto_results.events()
        if event.device_type() == torch.autograd.DeviceType.CUDA and not event.is_user_annotation()
    ]
    some, several = shared(events)
    return f"{100 * several / some:.1f}" if some else "no kernels seen"


def shared(events: Iterable[tuple[int, float, float]]) -> tuple[float, float]:
    """How long at least one stream, and how long more than one of them, was busy: of ``(stream, start, end)``."""
    edges = sorted(
        (time, change, stream) for stream, *span in events for time, change in zip(span, (1, -1), strict=True)
    )
    running: dict[int, int] = {}
    some = several = before = 0.0
    for time, change, stream in edges:
        busy = sum(count > 0 for count in running.values())
        some += (time - before) * (busy > 0)
        several += (time - before) * (busy > 1)
        running[stream] = running.get(stream, 0) + change
        before = time
    return some, several


def profiled(schedule: Schedule, works: Mapping[str, Work], markdown: bool) -> None:
    """The shares of `several_streams` by size."""
    names = {"overlapped": {}, "in order": {"overlap": "never"}, "recorded": {"cuda_graph": True}}
    rows = Rows(["in several streams, %", *names], markdown=markdown, width=16)
    for size, work in works.items():
        steps = (fastpipe_step(schedule, 0, work, device=work.inputs.device, **more) for more in names.values())
        rows.add([size, *(several_streams(step) for step in steps)])


def main() -> None:
    made = options(__doc__, rounds=15)
    made.add_argument("--blocks", type=int, default=4, help="of a stage (4)")
    made.add_argument("--microbatches", type=int, default=8)
    made.add_argument("--sizes", type=int, default=len(SIZES), help="only so many, the smallest first")
    made.add_argument("--streams", action="store_true", help="look by a profiler how long several streams are busy")
    given = chosen(made)
    alone()
    schedule = make_schedule("dualpipev", num_ranks=1, num_microbatches=given.microbatches)
    rows = Rows(HEADS, markdown=given.markdown)
    works = {}
    for size in SIZES[: given.sizes]:
        work = make_work(given.device, size, given.blocks, given.microbatches)
        works[" x ".join(map(str, size))] = work
        rows.add([" x ".join(map(str, size)), *row(schedule, work, given.device, given.rounds)])
        forget(given.device)
    if given.streams and given.device == "cuda":
        profiled(schedule, works, given.markdown)


if __name__ == "__main__":
    main()
