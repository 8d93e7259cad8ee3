"""All forwards, then all backwards: GPipe (arXiv 1811.06965), and breadth-first with several stages per rank
(arXiv 2211.05953).
"""

from __future__ import annotations

import numpy as np

from fastpipe.placement import Placement
from fastpipe.schedule import Schedule
from fastpipe.schedules.family import Family, Option
from fastpipe.schedules.interleaved import STAGES_PER_RANK
from fastpipe.schedules.words import Stream, spell, stream


def generate(num_ranks: int, num_microbatches: int, reverse_backward: bool) -> Schedule:
    """All forwards ascending; then all backwards, ascending or descending."""
    backward = range(num_microbatches)[:: -1 if reverse_backward else 1]
    blocks = [("F", num_microbatches), ("B", num_microbatches)]
    columns = [
        spell(blocks, [stream(rank, range(num_microbatches))], [stream(rank, backward)]) for rank in range(num_ranks)
    ]
    return Schedule("gpipe", Placement.loop(num_ranks), num_microbatches, columns)


def generate_looped(num_ranks: int, num_microbatches: int, stages_per_rank: int) -> Schedule:
    """Every local stage runs all its forwards; then all backwards, stages and microbatches reversed."""
    total = num_microbatches * stages_per_rank
    chunks, microbatches = np.divmod(np.arange(total, dtype=np.int32), np.int32(num_microbatches))
    columns = []
    for rank in range(num_ranks):
        forward = Stream(chunks * np.int32(num_ranks) + np.int32(rank), microbatches)
        backward = Stream(forward.stages[::-1], microbatches[::-1])
        columns.append(spell([("F", total), ("B", total)], [forward], [backward]))
    return Schedule("looped_bfs", Placement.loop(num_ranks, stages_per_rank), num_microbatches, columns)


GPIPE = Family(
    "gpipe",
    "all forwards, then all backwards",
    "any ranks and microbatches",
    generate,
    {
        "reverse_backward": Option(
            False, "True or False: the last microbatch's backward first", lambda value: isinstance(value, bool)
        )
    },
)
LOOPED_BFS = Family(
    "looped_bfs",
    "several stages per rank in a loop; every stage runs all microbatches before the next",
    "any ranks and microbatches",
    generate_looped,
    {"stages_per_rank": STAGES_PER_RANK},
)
