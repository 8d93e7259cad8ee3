"""Forward only: evaluation and inference, on any placement."""

from __future__ import annotations

from typing import Any

from fastpipe.placement import Placement
from fastpipe.schedule import Schedule
from fastpipe.schedules.family import Family, Option
from fastpipe.schedules.interleaved import STAGES_PER_RANK, grouped, microbatch_groups
from fastpipe.schedules.list_scheduling import ListScheduler
from fastpipe.schedules.words import Stream, spell

PLACEMENTS = ("loop", "wave", "bidirectional")


def generate(num_ranks: int, num_microbatches: int, stages_per_rank: int, placement: str | Placement) -> Schedule:
    """In a loop the forwards of interleaved 1F1B; elsewhere every rank runs the lowest microbatch that is there.

    Raises:
        ValueError: for a placement on another number of ranks, or one that is not made of that many stages.
    """
    where = _placement(num_ranks, num_microbatches, stages_per_rank, placement)
    if placement != "loop":
        columns = ListScheduler(where, num_microbatches).run()
        return Schedule("forward_only", where, num_microbatches, columns)
    chunks, microbatches = grouped(stages_per_rank, microbatch_groups(num_ranks, num_microbatches, None))
    columns = [
        spell([("F", len(chunks))], [Stream(chunks * num_ranks + rank, microbatches)], []) for rank in range(num_ranks)
    ]
    return Schedule("forward_only", where, num_microbatches, columns)


def _placement(num_ranks: int, num_microbatches: int, stages_per_rank: int, placement: str | Placement) -> Placement:
    if isinstance(placement, Placement):
        if placement.num_ranks != num_ranks:
            raise ValueError(f"placement has {placement.num_ranks} ranks, and num_ranks = {num_ranks}: give the same")
        where = placement
    elif placement == "bidirectional":
        where = Placement.bidirectional(num_ranks)
    else:
        where = (Placement.loop if placement == "loop" else Placement.wave)(num_ranks, stages_per_rank)
    held = where.num_stages * where.num_routes / num_ranks
    if stages_per_rank not in (1, held):
        raise ValueError(
            f"stages_per_rank = {stages_per_rank}: the placement has {held:g} on a rank; leave stages_per_rank out"
        )
    if where.num_routes == 2 and num_microbatches % 2:
        raise ValueError(
            f"num_microbatches = {num_microbatches}: a bidirectional placement sends half of them each way and needs "
            "an even number"
        )
    return where


def _is_placement(value: Any) -> bool:
    return isinstance(value, Placement) or (isinstance(value, str) and value in PLACEMENTS)


FORWARD_ONLY = Family(
    "forward_only",
    "no backward: for evaluation",
    "any ranks and microbatches; an even number of microbatches over two routes",
    generate,
    {
        "stages_per_rank": Option(1, f"{STAGES_PER_RANK.text}, in a loop or waves", STAGES_PER_RANK.check),
        "placement": Option("loop", "'loop', 'wave', 'bidirectional', or a Placement", _is_placement),
    },
)
