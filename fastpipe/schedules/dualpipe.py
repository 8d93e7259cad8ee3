"""DualPipe, and DualPipeV: the same cut in half and folded into a V (arXiv 2412.19437 and deepseek-ai's repository).

DualPipe has two routes. Half of the microbatches start at rank 0 and run stage s on rank s, the others start at the
last rank and run it on rank p-1-s, so that every rank holds two stages and the model exists twice. DualPipeV has one
route: rank r holds stage r and stage 2p-1-r. In the steady phase forwards are fused with full backwards of the
opposite direction.
"""

from __future__ import annotations

from fastpipe.placement import Placement
from fastpipe.schedule import Schedule
from fastpipe.schedules.family import Family, check_both_ways
from fastpipe.schedules.words import Blocks, spell, stream


def generate(num_ranks: int, num_microbatches: int) -> Schedule:
    """DualPipe. Direction 0 of a rank is the one that starts at its nearer end.

    Raises:
        ValueError: for odd numbers, or fewer than two microbatches a rank.
    """
    check_both_ways("dualpipe", num_ranks, num_microbatches)
    _check_microbatches("dualpipe", num_ranks, num_microbatches)
    half = num_microbatches // 2
    columns = []
    for rank in range(num_ranks):
        height = min(rank, num_ranks - 1 - rank)
        routes = [stream(rank, range(half)), stream(num_ranks - 1 - rank, range(half, num_microbatches))]
        directions = routes if rank == height else routes[::-1]
        word = phases(num_ranks // 2 - height - 1, height, half - num_ranks + height + 1)
        columns.append(spell(word, directions, directions))
    return Schedule("dualpipe", Placement.bidirectional(num_ranks), num_microbatches, columns)


def generate_v(num_ranks: int, num_microbatches: int) -> Schedule:
    """DualPipeV. Direction 0 goes down the V, direction 1 up.

    Raises:
        ValueError: for fewer than two microbatches a rank.
    """
    _check_microbatches("dualpipev", num_ranks, num_microbatches)
    columns = []
    for rank in range(num_ranks):
        directions = [stream(stage, range(num_microbatches)) for stage in (rank, 2 * num_ranks - 1 - rank)]
        word = phases(num_ranks - rank - 1, rank, num_microbatches - 2 * num_ranks + rank + 1)
        columns.append(spell(word, directions, directions))
    return Schedule("dualpipev", Placement.v(num_ranks), num_microbatches, columns)


def phases(ramp: int, height: int, steady: int) -> Blocks:
    """The eight phases.

    Args:
        ramp: the number of ranks between this one and the turning point, where the directions meet.
        height: the number of ranks between this one and the outer end.
        steady: the number of double steps of fused pairs; the rank at the turning point runs the first pair unfused.
    """
    full = (height + 1) // 2
    return [
        ("F0", 2 * ramp),
        ("F0 F1", height + 1),
        ("I1 W F1", ramp),
        ("F0&B1 F1&B0" if ramp else "F0 B1 F1&B0", 1),
        ("F0&B1 F1&B0", steady - 1),
        ("B1 F1&B0", ramp),
        ("B1 B0", full),
        ("I1 I0" if height % 2 else "B1 I0", 1),
        ("I1 I0", height - full),
        ("W I0", ramp),
        ("W", height + 1),
    ]


def _check_microbatches(name: str, num_ranks: int, num_microbatches: int) -> None:
    if num_microbatches < 2 * num_ranks:
        raise ValueError(
            f"num_microbatches = {num_microbatches}: {name} on {num_ranks} ranks needs at least {2 * num_ranks} "
            "(two a rank), or it would deadlock"
        )


DUALPIPE = Family(
    "dualpipe",
    "two directions over two copies of the model, forwards fused with backwards of the other direction",
    "even ranks, even microbatches >= 2 x ranks",
    generate,
    stages_per_rank=2,
    num_routes=2,
)
DUALPIPEV = Family(
    "dualpipev",
    "V placement, forwards fused with backwards of the other direction",
    "microbatches >= 2 x ranks",
    generate_v,
    stages_per_rank=2,
)
