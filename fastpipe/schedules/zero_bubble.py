"""Zero bubble with one stage per rank: ZB-H1 in the memory of 1F1B, ZB-H2 in twice as much (arXiv 2401.10241)."""

from __future__ import annotations

from collections.abc import Callable

from fastpipe.placement import Placement
from fastpipe.schedule import Schedule
from fastpipe.schedules.family import Family
from fastpipe.schedules.words import Blocks, delayed_weights, spell, stream


def generate_h1(num_ranks: int, num_microbatches: int) -> Schedule:
    """1F1B with I for B; the first W of rank r after r+1 of its I, so that every rank holds p in flight."""

    def word(rank: int) -> Blocks:
        warmup = min(num_ranks - 1 - rank, num_microbatches)
        return [("F", warmup), *delayed_weights("F I", "F I W", num_microbatches - warmup, warmup, rank)]

    return _schedule("zb_h1", num_ranks, num_microbatches, word)


def generate_h2(num_ranks: int, num_microbatches: int) -> Schedule:
    """2p-1-2r forwards; then I, W and F in turn, the first W after 2r+1 of the I."""

    def word(rank: int) -> Blocks:
        warmup = min(2 * num_ranks - 1 - 2 * rank, num_microbatches)
        return [("F", warmup), *delayed_weights("I F", "I W F", num_microbatches - warmup, warmup, 2 * rank)]

    return _schedule("zb_h2", num_ranks, num_microbatches, word)


def _schedule(name: str, num_ranks: int, num_microbatches: int, word: Callable[[int], Blocks]) -> Schedule:
    lines = [stream(rank, range(num_microbatches)) for rank in range(num_ranks)]
    columns = [spell(word(rank), [line], [line]) for rank, line in enumerate(lines)]
    return Schedule(name, Placement.loop(num_ranks), num_microbatches, columns)


ZB_H1 = Family(
    "zb_h1", "1F1B with W delayed to fill bubbles, within 1F1B's memory", "any ranks and microbatches", generate_h1
)
ZB_H2 = Family("zb_h2", "zero bubble with twice 1F1B's warm-up and memory", "any ranks and microbatches", generate_h2)
