"""Hanayo: one copy of the model laid over the ranks in waves, down and up again (arXiv 2308.15762).

The order is list scheduling with F = 1 and B = 2 as for Chimera: backward before forward, lower microbatch first, at
most S - s activations of stage s alive, S the number of stages.
"""

from __future__ import annotations

from fastpipe.placement import Placement
from fastpipe.schedule import Schedule
from fastpipe.schedules.family import Family, Option, is_count
from fastpipe.schedules.list_scheduling import ListScheduler


def generate(num_ranks: int, num_microbatches: int, waves: int) -> Schedule:
    """The list schedule over ``waves`` times down and up the ranks."""
    placement = Placement.wave(num_ranks, 2 * waves)
    num_stages = placement.num_stages
    scheduler = ListScheduler(placement, num_microbatches, backward=2, limit=lambda stage: num_stages - stage)
    return Schedule("hanayo", placement, num_microbatches, scheduler.run())


HANAYO = Family(
    "hanayo",
    "waves: 2 x waves stages per rank, down the ranks and up again",
    "any ranks and microbatches; made for as many microbatches as ranks",
    generate,
    {"waves": Option(1, "the number of waves, at least 1: a rank holds twice as many stages", is_count)},
    stages_per_rank=2,
)
