"""What a pipeline says of itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fastpipe.program import Program
from fastpipe.runtime.native import native_status
from fastpipe.runtime.transport import Transport
from fastpipe.schedule import Schedule


def describe(
    schedule: Schedule, program: Program, ranks: Mapping[int, Sequence[int]], executor: str, transport: Transport
) -> str:
    """The schedule, what is local, how it is run, and what to know about it."""
    options = ", ".join(f"{name}={value}" for name, value in schedule.options.items())
    name = f"{schedule.name} ({options})" if options else schedule.name
    held = "; ".join(f"rank {rank}: {', '.join(map(str, stages))}" for rank, stages in ranks.items())
    lines = [
        f"schedule    {name}, {schedule.num_microbatches} microbatches",
        f"ranks       {schedule.num_ranks}, {schedule.num_stages} stages, placement {schedule.placement.name}",
        f"stages here {held}",
        f"executor    {executor}; {native_status()}",
        f"transport   {transport.describe()}",
        "buffers     "
        + "; ".join(f"rank {r}: {program[r].num_slots} slots, {program[r].num_sends} sends" for r in ranks),
    ]
    if schedule.placement.num_routes > 1:
        lines.append("copies      every stage is held twice; parameters stay equal, buffers are each copy's own")
    if schedule.splits_backward:
        lines.append("backward    I computes the whole backward and W nothing: weight gradients are not deferred yet")
    return "\n".join(lines)
