"""wave_zb: waves of 2, 4, 6 ... stages per rank with split backwards, within any memory from one microbatch's on.

docs/waves.md explains the family, and proves the bound that its compact form attains at F = I = W and free transfers
from half of 1F1B's memory on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import nsmallest
from itertools import islice, product

import numpy as np

from fastpipe.placement import Placement
from fastpipe.schedule import Schedule
from fastpipe.schedules.family import MEMORY, UNIFORM_COSTS, Family, Option, is_count, live_limit
from fastpipe.schedules.rounds import (
    NEVER,
    F,
    Filled,
    I,
    Seconds,
    Spread,
    all_groupings,
    even,
    filled,
    num_timed,
    shortest,
    spread_of,
)
from fastpipe.schedules.wave_ticks import RULES, SLACK_RULES, Job, Model, Rule, Starts, beam, compact, slack

FORMS = ("auto", "compact", "slack", "even")
_TICKS = 120_000
"""Ticks that a search plays at most, which takes less than a tenth of a second; the likely candidates come first."""
_WIDTHS, _CHOICES = (100, 400), 300_000
"""Of the beam search that goes on where waves can be as short as the bound and no rule was: as long again."""


@dataclass(frozen=True)
class _Wave:
    """What is asked for; ``limit`` in live stage activations."""

    num_ranks: int
    stages_per_rank: int
    num_microbatches: int
    limit: int

    @property
    def placement(self) -> Placement:
        return Placement.wave(self.num_ranks, self.stages_per_rank)

    @property
    def fewest_slots(self) -> int:
        """A makespan at F = I = W = 1 and free transfers that nothing beats: docs/waves.md, the bound."""
        p, v, k = self.num_ranks, self.stages_per_rank, self.limit
        stages, work = p * v, 3 * self.num_microbatches * v
        if k >= self.num_microbatches * v:
            return max(work + p - 1, 2 * stages + 1)
        return work + p - 1 + max(0, stages - k) + max(0, stages + p - 2 * k)

    @property
    def may_attain(self) -> bool:
        """Whether waves are known to be that short: docs/waves.md, for even k from half of 1F1B's memory on."""
        return self.limit % 2 == 0 and self.limit >= self.num_ranks * self.stages_per_rank // 2


def generate(
    num_ranks: int,
    num_microbatches: int,
    stages_per_rank: int,
    memory: float | int,
    form: str,
    forward: float,
    backward_input: float,
    backward_weight: float,
    comm: float,
) -> Schedule:
    """The best order found within the memory, for the costs.

    Raises:
        ValueError: for less memory than one microbatch takes.
    """
    limit = live_limit("wave_zb", memory, num_ranks, stages_per_rank, num_microbatches)
    wave = _Wave(num_ranks, stages_per_rank, num_microbatches, limit)
    seconds = Seconds(forward, backward_input, backward_weight, comm)
    count = num_timed(wave.placement, num_microbatches)
    orders: list[Filled] = []
    if form in ("auto", "compact"):
        orders += _compact(wave, 1 if seconds.equal else count, seconds)
    if form == "slack" or (form == "auto" and not seconds.equal):
        orders += _slack(wave, count, seconds)
    if form == "even" or (form == "auto" and not seconds.equal):
        orders += even(wave.placement, num_microbatches, 2 * num_ranks, limit, seconds)
    if not orders:
        raise ValueError(
            f"form = {form!r}: no such order keeps memory = {memory!r}; give more, or leave the form to 'auto'"
        )
    return shortest("wave_zb", wave.placement, num_microbatches, orders)


def _compact(wave: _Wave, count: int, seconds: Seconds) -> Iterator[Filled]:
    """The orders of the shortest compact rounds, in the slots 2t + r and 2t + 2p - 1 - r of a round at tick t."""
    offsets = range(2 * wave.num_ranks)
    found = nsmallest(count, _search(wave, compact, RULES, (0,), count), key=lambda starts: starts.length)
    if count == 1 and wave.may_attain:
        found = [_beamed(wave, *found)]
    for starts in found:
        order = filled(_spread(wave, starts, 2, offsets), wave.limit, seconds)
        assert order is not None, "the W of a tick leave room for the F behind them on every rank: docs/waves.md"
        yield order


def _slack(wave: _Wave, count: int, seconds: Seconds) -> Iterator[Filled]:
    """The orders of the shortest slack rounds, in the slots 3t + 2r and 3t + 3p - 2 - r, that keep the limit.

    Ticks count memory as if a rank's two slots of a round were at once. That is too careful, so they may go a little
    beyond the limit, and the ranks are asked.
    """
    p = wave.num_ranks
    offsets = [*range(0, 2 * p, 2), *range(2 * p - 1, 3 * p - 1)]
    found = sorted(_search(wave, slack, SLACK_RULES, (0, 1, 2), 8 * count), key=lambda starts: starts.length)
    orders = (filled(_spread(wave, starts, 3, offsets), wave.limit, seconds) for starts in found)
    return islice((order for order in orders if order is not None), count)


def _search(wave: _Wave, model: Model, rules: Sequence[Rule], extras: Sequence[int], keep: int) -> list[Starts]:
    """Play groups, rules and a little more memory, until one is as short as the bound or the time is up.

    What is longer than the ``keep`` best so far is given up.
    """
    p, rounds = wave.num_ranks, wave.stages_per_rank // 2
    found: list[Starts] = []
    shortest: list[int] = []
    left = _TICKS
    for groups in all_groupings(wave.num_microbatches, (max(1, p // 2), p), 2 * p):
        for rule, extra in product(rules, extras):
            give_up = shortest[-1] if len(shortest) == keep else NEVER
            starts = model(Job(p, rounds, groups, wave.limit + extra), rule, give_up)
            if starts is not None:
                found.append(starts)
                shortest = sorted([*shortest, starts.length])[:keep]
                if keep == 1 and starts.length <= wave.fewest_slots:
                    return found
        left -= 3 * rounds * wave.num_microbatches * len(rules) * len(extras)
        if left < 0 and found:
            return found
    return found


def _beamed(wave: _Wave, known: Starts) -> Starts:
    """Shorter starts, if a beam search finds any: as short as the bound, else by halving what lies between."""
    job = Job(wave.num_ranks, wave.stages_per_rank // 2, (wave.num_microbatches,), wave.limit)
    budget = _CHOICES
    for width in _WIDTHS:
        least = target = wave.fewest_slots
        while least < known.length and budget:
            found, budget = beam(job, width, target, budget)
            if found is None:
                least = target + 1
            else:
                known = found
            target = (least + known.length - 1) // 2
    return known


def _spread(wave: _Wave, starts: Starts, tick: int, offsets: Sequence[int]) -> Spread:
    """The F and I of every rank: a round's i-th stage comes ``offsets[i]`` slots after the round's start."""
    placement, m = wave.placement, wave.num_microbatches
    half, last = placement.num_stages * m // len(offsets), placement.num_stages - 1
    ticks, keys = np.array(starts.rounds, dtype=np.int64).reshape(-1, 2, 1).swapaxes(0, 1)
    backward = keys >= half
    number, microbatch = np.divmod(keys - half * backward, m)
    place = number * len(offsets) + np.arange(len(offsets))
    kinds = np.where(backward, int(I), int(F))
    return spread_of(
        placement, m, tick * ticks + np.array(offsets), kinds, np.where(backward, last - place, place), microbatch
    )


WAVE_ZB = Family(
    "wave_zb",
    "waves with split backwards: a third to a half less bubble than a V in the same memory",
    "any ranks and microbatches, even stages_per_rank",
    generate,
    {
        "stages_per_rank": Option(
            4, "the number of stages a rank holds, even, at least 2", lambda value: is_count(value) and value % 2 == 0
        ),
        "memory": MEMORY,
        "form": Option(
            "auto",
            "'compact', for F = I = W and free transfers; 'slack', for other costs; 'even', for other costs in little "
            "memory; 'auto', the best of them for the costs",
            lambda value: value in FORMS,
        ),
        **UNIFORM_COSTS,
    },
    stages_per_rank=4,
)
