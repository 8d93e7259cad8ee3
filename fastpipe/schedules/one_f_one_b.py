"""1F1B: after a warm-up, one forward and one backward in turn (PipeDream-Flush, Megatron: arXiv 2104.04473).

``1f1b_overlap`` has about twice the warm-up and fuses each forward with a backward, so that the transfers of the one
hide behind the compute of the other (PP-Schedule-Visualization, after Megatron's batch-level overlapping).
"""

from __future__ import annotations

from fastpipe.placement import Placement
from fastpipe.schedule import Schedule
from fastpipe.schedules.family import Family
from fastpipe.schedules.words import Blocks, spell, stream


def generate(num_ranks: int, num_microbatches: int) -> Schedule:
    """min(p-1-r, m) forwards, then F and B in turn, then the remaining backwards."""
    warmups = [num_ranks - 1 - rank for rank in range(num_ranks)]
    return _from_warmups("1f1b", "F B", warmups, num_microbatches)


def generate_overlap(num_ranks: int, num_microbatches: int) -> Schedule:
    """min(2(p-1-r)+1, m) forwards, then fused pairs, then the remaining backwards."""
    warmups = [2 * (num_ranks - 1 - rank) + 1 for rank in range(num_ranks)]
    return _from_warmups("1f1b_overlap", "F&B", warmups, num_microbatches)


def _from_warmups(name: str, steady: str, warmups: list[int], num_microbatches: int) -> Schedule:
    columns = []
    for rank, warmup in enumerate(warmups):
        line = stream(rank, range(num_microbatches))
        columns.append(spell(alternate(steady, warmup, num_microbatches), [line], [line]))
    return Schedule(name, Placement.loop(len(warmups)), num_microbatches, columns)


def alternate(steady: str, warmup: int, total: int) -> Blocks:
    """At most ``warmup`` of ``total`` forwards, then one forward and one backward in turn, then the other backwards."""
    warmup = min(warmup, total)
    return [("F", warmup), (steady, total - warmup), ("B", warmup)]


ONE_F_ONE_B = Family(
    "1f1b", "after a warm-up, one forward and one backward in turn", "any ranks and microbatches", generate
)
ONE_F_ONE_B_OVERLAP = Family(
    "1f1b_overlap",
    "1F1B with twice the warm-up, each forward fused with a backward",
    "any ranks and microbatches",
    generate_overlap,
)
