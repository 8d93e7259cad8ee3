"""Rounds: schedules whose microbatches travel over the ranks without ever waiting, as docs/waves.md explains.

A *round* is one trip of a microbatch over the ranks: through p stages of a loop, or through 2p stages of a wave, to the
last rank and back. Once a round has started, every stage of it has its slot. So an order is found by deciding when
rounds start, on one machine instead of p, and W fills the slots that are left.

`fastpipe.schedules.filling` puts W between them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain

import numpy as np
import numpy.typing as npt

from fastpipe.placement import Placement
from fastpipe.schedules import native

Groups = tuple[int, ...]
"""Sizes of groups of microbatches, in order: a whole group starts its first rounds, then its second ones, and so on."""

Rounds = list[tuple[int, int]] | npt.NDArray[np.int64]
"""When rounds start, and which: pairs."""

NEVER = 1 << 60
_PLACES = 3
"""Where among the groups the odd one stands: so many places from the front, and from the back."""


@dataclass(frozen=True)
class Seconds:
    """What an order is looked for: seconds of F, I and W of a stage and of a hop."""

    forward: float = 1.0
    backward_input: float = 1.0
    backward_weight: float = 1.0
    comm: float = 0.0

    @property
    def equal(self) -> bool:
        """Whether F = I = W and hops are free: the slots are then the times."""
        return self.forward == self.backward_input == self.backward_weight and self.comm == 0


def all_groupings(num_microbatches: int, likely: Sequence[int], longest: int) -> Iterator[Groups]:
    """Groups to try, none twice: of the likely sizes first, then of all up to ``longest``, the nearest first."""
    sizes = [size for size in range(1, longest + 1) if size <= num_microbatches]
    sizes.sort(key=lambda size: (size not in likely, abs(size - likely[0])))
    yield from dict.fromkeys(chain.from_iterable(groupings(num_microbatches, size) for size in sizes))


def groupings(num_microbatches: int, size: int) -> Iterator[Groups]:
    """Groups of ``size``; a remainder is a group of its own or enlarges one, here or there, or all differ by one."""
    full, rest = divmod(num_microbatches, size)
    if not rest or not full:
        yield (size,) * full + (rest,) * (rest > 0)
        return
    for place in _places(full + 1):
        yield (size,) * place + (rest,) + (size,) * (full - place)
    for place in _places(full):
        yield (size,) * place + (size + rest,) + (size,) * (full - 1 - place)
    for count in (full + 1, full):
        small, larger = divmod(num_microbatches, count)
        yield (small + 1,) * larger + (small,) * (count - larger)
        yield (small,) * (count - larger) + (small + 1,) * larger


def _places(count: int) -> list[int]:
    return sorted({*range(min(count, _PLACES)), *range(max(0, count - _PLACES), count)})


@lru_cache(maxsize=4)
def stream(first_round: int, num_rounds: int, groups: Groups) -> tuple[int, ...]:
    """Rounds in the order in which they start, each as ``round * m + microbatch``: group by group, round by round."""
    total, start = sum(groups), 0
    keys: list[int] = []
    for size in groups:
        for number in range(first_round, first_round + num_rounds):
            keys += range(number * total + start, number * total + start + size)
        start += size
    return tuple(keys)


@lru_cache(maxsize=4)
def streams(num_rounds: int, groups: Groups) -> native.Streams:
    """The rounds of F and of I, for the library: `stream` by a sort that keeps the order within a group."""
    total = sum(groups)
    group = np.repeat(np.arange(len(groups)), groups)
    forward = np.argsort(np.tile(group, num_rounds), kind="stable")
    return native.Streams(forward, forward + num_rounds * total, total)


def num_timed(placement: Placement, num_microbatches: int) -> int:
    """How many candidates are timed: six of a small step, one of a large one."""
    return max(1, min(6, 8_000 // (placement.num_stages * num_microbatches)))
