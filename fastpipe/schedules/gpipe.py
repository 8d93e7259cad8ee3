"""GPipe: all forwards, then all backwards (arXiv 1811.06965)."""

from __future__ import annotations

from fastpipe.action import Action, ActionKind
from fastpipe.placement import Placement
from fastpipe.schedule import Schedule
from fastpipe.schedules.family import Family, Option


def generate(num_ranks: int, num_microbatches: int, reverse_backward: bool) -> Schedule:
    """All forwards ascending; then all backwards, ascending or descending."""
    backward = range(num_microbatches)[:: -1 if reverse_backward else 1]
    orders = [
        [Action(ActionKind.F, rank, mb) for mb in range(num_microbatches)]
        + [Action(ActionKind.B, rank, mb) for mb in backward]
        for rank in range(num_ranks)
    ]
    return Schedule.from_actions("gpipe", Placement.loop(num_ranks), num_microbatches, orders)


GPIPE = Family(
    "gpipe",
    "all forwards, then all backwards",
    "any ranks and microbatches",
    generate,
    {
        "reverse_backward": Option(
            False, "True or False: the last microbatch's backward first", lambda v: isinstance(v, bool)
        )
    },
)
