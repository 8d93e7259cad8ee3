"""Chimera: two pipelines in opposite directions over two copies of the model (arXiv 2107.06925).

Half of the microbatches run stage s on rank s, the others on rank p-1-s. The order is list scheduling with F = 1 and
B = 2: backward before forward, lower microbatch first, at most p - s activations of stage s alive in each direction.
With as many microbatches as ranks that is the paper's unit, idle for (p-2)/(1.5p+p-2) of the time.
"""

from __future__ import annotations

from fastpipe.placement import Placement
from fastpipe.schedule import Schedule
from fastpipe.schedules.family import Family
from fastpipe.schedules.list_scheduling import ListScheduler


def generate(num_ranks: int, num_microbatches: int) -> Schedule:
    """The list schedule.

    Raises:
        ValueError: for odd numbers.
    """
    if num_ranks % 2 or num_microbatches % 2:
        raise ValueError(
            f"num_ranks = {num_ranks}, num_microbatches = {num_microbatches}: chimera sends half of the microbatches "
            "each way and needs an even number of both"
        )
    placement = Placement.bidirectional(num_ranks)
    scheduler = ListScheduler(placement, num_microbatches, backward=2, limit=lambda stage: num_ranks - stage)
    return Schedule("chimera", placement, num_microbatches, scheduler.run())


CHIMERA = Family(
    "chimera",
    "two directions over two copies of the model, half the bubble of 1F1B at microbatches = ranks",
    "even ranks, even microbatches; made for as many microbatches as ranks",
    generate,
    stages_per_rank=2,
    num_routes=2,
)
