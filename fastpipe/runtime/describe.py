"""What a pipeline says of itself."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence

from torch import nn

from fastpipe.program import Program
from fastpipe.runtime.native import native_status
from fastpipe.runtime.random_numbers import describe_random
from fastpipe.runtime.stage import Stage
from fastpipe.runtime.tied import Tie
from fastpipe.runtime.transport import Transport
from fastpipe.runtime.wrappers import unwrapped
from fastpipe.schedule import Schedule


def describe(
    schedule: Schedule,
    program: Program,
    ranks: Mapping[int, Sequence[int]],
    executor: str,
    transport: Transport,
    stages: Sequence[Stage],
    seed: int | None,
    ties: Sequence[Tie],
    cut: str,
) -> str:
    """The schedule, what is local, how it is run, and what to know about it."""
    options = ", ".join(f"{name}={value}" for name, value in schedule.options.items())
    name = f"{schedule.name} ({options})" if options else schedule.name
    held = "; ".join(f"rank {rank}: {', '.join(map(str, stages))}" for rank, stages in ranks.items())
    lines = [
        f"schedule    {name}, {schedule.num_microbatches} microbatches",
        f"ranks       {schedule.num_ranks}, {schedule.num_stages} stages, placement {schedule.placement.name}",
        *([f"partition   {cut}"] if cut else []),
        f"stages here {held}",
        f"executor    {executor}; {native_status()}",
        f"transport   {transport.describe()}",
        "buffers     "
        + "; ".join(f"rank {r}: {program[r].num_slots} slots, {program[r].num_sends} sends" for r in ranks),
    ]
    if schedule.placement.num_routes > 1:
        lines.append("copies      every stage is held twice; parameters stay equal, buffers are each copy's own")
    lines += [f"tied        {' = '.join(tie.names)} (stages {tie.stages})" for tie in ties]
    if seed is not None:
        lines.append("random      " + describe_random(seed))
    lines += [f"replicas    {text}" for text in replica_texts(stages)]
    if schedule.splits_backward:
        lines.append("backward    " + split_text(stages))
    return "\n".join(lines)


def replica_texts(stages: Sequence[Stage]) -> list[str]:
    """How the stages are parallelised, and when their replicas meet."""
    found: dict[str, list[str]] = {}
    for stage in stages:
        if stage.parallel is not None:
            found.setdefault(stage.parallel.description, []).append(str(stage.index))
    return [
        f"{description}: {'stage' if len(indices) == 1 else 'stages'} {', '.join(indices)}; gradients are averaged "
        "once a step, from REDUCE_GRAD on, after a stage's last B or W"
        for description, indices in found.items()
    ]


def split_text(stages: Sequence[Stage]) -> str:
    """What waits for W, what does not, and how much memory waited."""
    if not any(stage.has_split for stage in stages):
        return "split: weights of linears wait for W; which ones is found at the first step"
    named = [(f"{stage.index}.{name}", stage.waits(p)) for stage in stages for name, p in trained(stage)]
    whole = Counter(re.sub(r"\d+", "*", name) for name, waits in named if not waits)
    listed = ", ".join(name if count == 1 else f"{name} ({count})" for name, count in whole.items())
    held = ", ".join(f"{stage.index}: {stage.peak_held_bytes / 2**20:.3g}" for stage in stages)
    return (
        f"split: {sum(waits for _, waits in named)} of {len(named)} parameters wait for W; whole in I "
        f"(stage.name): {listed or 'none'}; at most waiting (MiB), by stage: {held}"
    )


def trained(stage: Stage) -> list[tuple[str, nn.Parameter]]:
    """The parameters of a stage that get a gradient."""
    return [
        (name, parameter) for name, parameter in unwrapped(stage.module).named_parameters() if parameter.requires_grad
    ]
