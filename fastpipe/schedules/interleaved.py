"""Interleaved 1F1B: several stages a rank in a loop, microbatches in groups (Megatron: arXiv 2104.04473)."""

from __future__ import annotations

from collections.abc import Sequence

from fastpipe.action import Action, ActionKind
from fastpipe.placement import Placement
from fastpipe.schedule import Schedule
from fastpipe.schedules.family import Family, Option, is_count
from fastpipe.schedules.one_f_one_b import alternate

STAGES_PER_RANK = Option(2, "the number of stages a rank holds, at least 1", is_count)
GROUP_SIZE = Option(
    None,
    "the microbatches that run through one local stage before the next, G: at least the number of ranks, and m <= G "
    "or m mod G = 0 or m mod G >= ranks; by default m is cut into max(1, m // ranks) groups",
    lambda value: value is None or is_count(value),
)


def generate(
    num_ranks: int, num_microbatches: int, stages_per_rank: int, microbatch_group_size: int | None
) -> Schedule:
    """Group by group, local stage by local stage; the backward with the local stages reversed."""
    groups = microbatch_groups(num_ranks, num_microbatches, microbatch_group_size)
    placement = Placement.loop(num_ranks, stages_per_rank)
    orders = []
    for rank in range(num_ranks):
        stages = placement.stages_of(rank)
        forwards = by_group(ActionKind.F, stages, groups)
        backwards = by_group(ActionKind.B, stages[::-1], groups)
        warmup = 2 * (num_ranks - 1 - rank) + (stages_per_rank - 1) * len(groups[0])
        orders.append(alternate(forwards, backwards, min(warmup, len(forwards))))
    return Schedule.from_actions("interleaved_1f1b", placement, num_microbatches, orders)


def by_group(kind: ActionKind, stages: Sequence[int], groups: Sequence[range]) -> list[Action]:
    """Every microbatch through every local stage: group by group, in a group stage by stage."""
    return [Action(kind, stage, mb) for group in groups for stage in stages for mb in group]


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
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return [range(end - size, end) for size, end in zip(sizes, ends, strict=True)]


INTERLEAVED_1F1B = Family(
    "interleaved_1f1b",
    "1F1B with several stages a rank, in a loop",
    "any ranks and microbatches",
    generate,
    {"stages_per_rank": STAGES_PER_RANK, "microbatch_group_size": GROUP_SIZE},
)
