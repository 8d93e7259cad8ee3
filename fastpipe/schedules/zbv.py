"""ZB-V: zero bubble on a V of two stages a rank, with the memory of 1F1B (arXiv 2401.10241, section 6)."""

from __future__ import annotations

from fastpipe.action import ActionKind
from fastpipe.placement import Placement
from fastpipe.schedule import Columns, Schedule
from fastpipe.schedules.costs import UNIFORM_COSTS, is_number
from fastpipe.schedules.family import Family, Option
from fastpipe.schedules.words import Blocks, columns_of, spell, stream
from fastpipe.schedules.zbv_search import Costs, search

_LIMIT = Option(
    None,
    "live stage activations that a rank may hold until their W, at least and by default twice the number of ranks",
    lambda value: value is None or is_number(value),
)
_KINDS = (ActionKind.F, ActionKind.F, ActionKind.I, ActionKind.I, ActionKind.W, ActionKind.W)


def generate(
    num_ranks: int,
    num_microbatches: int,
    forward: float,
    backward_input: float,
    backward_weight: float,
    comm: float,
    memory_limit: float | None,
) -> Schedule:
    """The order for F = I = W and free transfers, which is torch's.

    For fewer microbatches than 2p-1, other costs, or more memory, the one that the published search finds.

    Raises:
        ValueError: for a memory limit that is too small for a V.
    """
    limit = 2 * num_ranks if memory_limit is None else memory_limit
    if limit < 2 * num_ranks:
        raise ValueError(
            f"memory_limit = {limit}: zbv on {num_ranks} ranks holds {2 * num_ranks} stage activations a rank; "
            "v_half and v_min need less"
        )
    fills_the_ramp = num_microbatches >= 2 * num_ranks - 1
    if fills_the_ramp and forward == backward_input == backward_weight and comm == 0 and limit == 2 * num_ranks:
        columns = [_by_hand(num_ranks, num_microbatches, rank) for rank in range(num_ranks)]
    else:
        costs = Costs(forward, backward_input, backward_weight, comm, limit)
        columns = v_columns(search(num_ranks, num_microbatches, costs))
    return Schedule("zbv", Placement.v(num_ranks), num_microbatches, columns)


def v_columns(orders: list[list[tuple[int, int]]]) -> list[Columns]:
    """The columns of orders on a V, given as (kind, microbatch) with kinds F0, F1, I1, I0, W1 and W0 in that order."""
    columns = []
    for rank, order in enumerate(orders):
        down, up = rank, 2 * len(orders) - 1 - rank
        stages = (down, up, up, down, up, down)
        columns.append(columns_of([(_KINDS[kind], stages[kind], mb) for kind, mb in order]))
    return columns


def _by_hand(num_ranks: int, num_microbatches: int, rank: int) -> Columns:
    """Stream 0 goes down the V, stream 1 up; for at least 2p-1 microbatches."""
    streams = [stream(stage, range(num_microbatches)) for stage in (rank, 2 * num_ranks - 1 - rank)]
    return spell(_word(num_ranks, rank, num_microbatches), streams, streams)


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
    "V placement, split backwards, no bubble within a rank's span at F = I = W; searched for other costs",
    "any ranks and microbatches",
    generate,
    UNIFORM_COSTS | {"memory_limit": _LIMIT},
    stages_per_rank=2,
)
