"""Interleaved: several stages per rank in a loop, microbatches in groups.

``interleaved_1f1b`` is Megatron's (arXiv 2104.04473), ``interleaved_overlap`` fuses its forwards with its backwards
(PP-Schedule-Visualization), and ``interleaved_zb`` splits its backwards (zero bubble: arXiv 2401.10241).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from fastpipe.placement import Placement
from fastpipe.schedule import Schedule
from fastpipe.schedules.family import Family, Option, is_count
from fastpipe.schedules.one_f_one_b import alternate
from fastpipe.schedules.words import Blocks, Ints, Stream, delayed_weights, spell

STAGES_PER_RANK = Option(2, "the number of stages a rank holds, at least 1", is_count)
GROUP_SIZE = Option(
    None,
    "the microbatches that run through one local stage before the next, G: at least the number of ranks, and m <= G "
    "or m mod G = 0 or m mod G >= ranks; by default m is cut into max(1, m // ranks) groups",
    lambda value: value is None or is_count(value),
)
OPTIONS = {"stages_per_rank": STAGES_PER_RANK, "microbatch_group_size": GROUP_SIZE}


def generate(
    num_ranks: int, num_microbatches: int, stages_per_rank: int, microbatch_group_size: int | None
) -> Schedule:
    """Group by group, local stage by local stage; the backward with the local stages reversed."""
    groups = microbatch_groups(num_ranks, num_microbatches, microbatch_group_size)

    def word(rank: int, chunked: int, total: int) -> Blocks:
        return alternate("F B", 2 * (num_ranks - 1 - rank) + chunked, total)

    return _interleave("interleaved_1f1b", num_ranks, stages_per_rank, groups, word)


def generate_overlap(
    num_ranks: int, num_microbatches: int, stages_per_rank: int, microbatch_group_size: int | None
) -> Schedule:
    """Interleaved 1F1B with one more forward in the warm-up, and fused pairs after it."""
    groups = microbatch_groups(num_ranks, num_microbatches, microbatch_group_size)

    def word(rank: int, chunked: int, total: int) -> Blocks:
        return alternate("F&B", 2 * (num_ranks - 1 - rank) + chunked + 1, total)

    return _interleave("interleaved_overlap", num_ranks, stages_per_rank, groups, word)


def generate_zb(
    num_ranks: int, num_microbatches: int, stages_per_rank: int, microbatch_group_size: int | None
) -> Schedule:
    """Half the warm-up of interleaved 1F1B, I for B, and a W after each I from the (r+1)-th on."""
    groups = microbatch_groups(num_ranks, num_microbatches, microbatch_group_size)

    def word(rank: int, chunked: int, total: int) -> Blocks:
        warmup = min(num_ranks - 1 - rank + chunked, total)
        return [("F", warmup), *delayed_weights("F I", "F I W", total - warmup, warmup, rank)]

    return _interleave("interleaved_zb", num_ranks, stages_per_rank, groups, word)


def _interleave(
    name: str, num_ranks: int, stages_per_rank: int, groups: Sequence[range], word: Callable[[int, int, int], Blocks]
) -> Schedule:
    """Spell every rank's word over the streams of grouped microbatches.

    Args:
        word: of a rank, the forwards of the first group before its last local stage, and the number of all forwards.
    """
    chunks, microbatches = grouped(stages_per_rank, groups)
    chunked, total = (stages_per_rank - 1) * len(groups[0]), stages_per_rank * groups[-1].stop
    columns = []
    for rank in range(num_ranks):
        forward = Stream(chunks * np.int32(num_ranks) + np.int32(rank), microbatches)
        last = np.int32((stages_per_rank - 1) * num_ranks + rank)
        backward = Stream(last - chunks * np.int32(num_ranks), microbatches)
        columns.append(spell(word(rank, chunked, total), [forward], [backward]))
    return Schedule(name, Placement.loop(num_ranks, stages_per_rank), groups[-1].stop, columns)


def grouped(stages_per_rank: int, groups: Sequence[range]) -> tuple[Ints, Ints]:
    """Local stage and microbatch of every step: group by group, in a group local stage by local stage."""
    chunks = [np.repeat(np.arange(stages_per_rank, dtype=np.int32), len(group)) for group in groups]
    microbatches = [np.tile(np.asarray(group, dtype=np.int32), stages_per_rank) for group in groups]
    return np.concatenate(chunks), np.concatenate(microbatches)


def microbatch_groups(num_ranks: int, num_microbatches: int, group_size: int | None) -> list[range]:
    """The microbatches of each group.

    By default max(1, m // p) groups whose sizes differ by at most one, the larger first (the smaller first can
    deadlock). With a given size, groups of that size and a remainder.

    Raises:
        ValueError: for a size with which a rank would wait for a microbatch that waits for it.
    """
    if group_size is None:
        count = max(1, num_microbatches // num_ranks)
        small, larger = divmod(num_microbatches, count)
        sizes = [small + 1] * larger + [small] * (count - larger)
    else:
        rest = num_microbatches % group_size
        if group_size < num_ranks or not (num_microbatches <= group_size or rest == 0 or rest >= num_ranks):
            raise ValueError(
                f"microbatch_group_size = {group_size}: with num_ranks = {num_ranks} and num_microbatches = "
                f"{num_microbatches} (remainder {rest}) it can deadlock; give a size G >= {num_ranks} with "
                f"{num_microbatches} <= G, {num_microbatches} mod G = 0 or {num_microbatches} mod G >= {num_ranks}"
            )
        sizes = [group_size] * (num_microbatches // group_size) + ([rest] if rest else [])
    ends = np.cumsum(sizes).tolist()
    return [range(end - size, end) for size, end in zip(sizes, ends, strict=True)]


INTERLEAVED_1F1B = Family(
    "interleaved_1f1b",
    "1F1B with several stages per rank, in a loop",
    "any ranks and microbatches",
    generate,
    OPTIONS,
)
INTERLEAVED_OVERLAP = Family(
    "interleaved_overlap",
    "interleaved 1F1B, each forward fused with a backward",
    "any ranks and microbatches",
    generate_overlap,
    OPTIONS,
)
INTERLEAVED_ZB = Family(
    "interleaved_zb",
    "interleaved 1F1B with split backwards and half the warm-up",
    "any ranks and microbatches",
    generate_zb,
    OPTIONS,
)
