"""1F1B: after a warm-up, one forward and one backward in turn (PipeDream-Flush, Megatron: arXiv 2104.04473)."""

from __future__ import annotations

from fastpipe.action import Action, ActionKind
from fastpipe.placement import Placement
from fastpipe.schedule import Schedule
from fastpipe.schedules.family import Family


def generate(num_ranks: int, num_microbatches: int) -> Schedule:
    """min(p-1-r, m) forwards, then F and B in turn, then the remaining backwards."""
    orders = [_rank_order(num_ranks, num_microbatches, rank) for rank in range(num_ranks)]
    return Schedule.from_actions("1f1b", Placement.loop(num_ranks), num_microbatches, orders)


def _rank_order(num_ranks: int, num_microbatches: int, rank: int) -> list[Action]:
    forwards = [Action(ActionKind.F, rank, mb) for mb in range(num_microbatches)]
    backwards = [Action(ActionKind.B, rank, mb) for mb in range(num_microbatches)]
    return alternate(forwards, backwards, min(num_ranks - 1 - rank, num_microbatches))


def alternate(forwards: list[Action], backwards: list[Action], warmup: int) -> list[Action]:
    """``warmup`` forwards, then one forward and one backward in turn, then the remaining backwards."""
    order = forwards[:warmup]
    steady = forwards[warmup:]
    for forward, backward in zip(steady, backwards, strict=False):
        order += [forward, backward]
    return order + backwards[len(steady) :]


ONE_F_ONE_B = Family(
    "1f1b", "after a warm-up, one forward and one backward in turn", "any ranks and microbatches", generate
)
