"""ZB-V: zero bubble on a V of two stages a rank, with the memory of 1F1B (arXiv 2401.10241)."""

from __future__ import annotations

from fastpipe.placement import Placement
from fastpipe.schedule import Schedule
from fastpipe.schedules.family import Family
from fastpipe.schedules.words import Blocks, spell, stream


def generate(num_ranks: int, num_microbatches: int) -> Schedule:
    """The order for F = I = W: stream 0 goes down the V, stream 1 up.

    With fewer than 2p-1 microbatches it is the order of 2p-1 with the surplus left out.
    """
    padded = range(max(2 * num_ranks - 1, num_microbatches))
    columns = []
    for rank in range(num_ranks):
        streams = [stream(stage, padded) for stage in (rank, 2 * num_ranks - 1 - rank)]
        order = spell(_word(num_ranks, rank, len(padded)), streams, streams)
        columns.append(order[:, order[2] < num_microbatches])
    return Schedule("zbv", Placement.v(num_ranks), num_microbatches, columns)


def _word(num_ranks: int, rank: int, num_microbatches: int) -> Blocks:
    ramp = num_ranks - rank
    fed = num_microbatches - 2 * num_ranks + rank + 1
    return [
        ("F0", 2 * ramp - 1),
        ("F1 F0", rank),
        ("F1 I1 W1", ramp),
        ("F0 I0 W0 F1 I1 W1", fed),
        ("I0 W0 F1 I1 W1", ramp - 1),
        ("I0 I1", rank),
        ("I0 W0", ramp),
        ("W1", rank),
        ("W0", rank),
    ]


ZBV = Family(
    "zbv",
    "V placement, split backwards, no bubble within a rank's span at F = I = W",
    "any ranks and microbatches",
    generate,
    stages_per_rank=2,
)
