"""Stale: the positions of an order whose times have to be found anew. csrc/plan/stale.h does the same."""

from __future__ import annotations

import heapq

NEVER = float("inf")


class Stale:
    """Positions, each once, with a time each by which the ranks are compared.

    Args:
        num_ranks: how many ranks.
        size: how many positions.
    """

    def __init__(self, num_ranks: int, size: int) -> None:
        self.times = [0.0] * size
        """When the task of a position starts; set for positions that are not stale."""
        self.heaps: list[list[int]] = [[] for _ in range(num_ranks)]
        self.marked = [False] * size

    def mark(self, position: int, rank: int) -> None:
        """Make it stale."""
        if not self.marked[position]:
            self.marked[position] = True
            heapq.heappush(self.heaps[rank], position)

    def time(self, rank: int) -> float:
        """Of a rank's first stale position; never, where it has none."""
        return self.times[self.heaps[rank][0]] if self.heaps[rank] else NEVER

    def earliest_rank(self) -> int | None:
        """The rank whose first stale position is the earliest."""
        time, rank = min((self.time(rank), rank) for rank in range(len(self.heaps)))
        return rank if time < NEVER else None

    def take(self, rank: int) -> int:
        """A rank's first stale position, which is stale no more."""
        position = heapq.heappop(self.heaps[rank])
        self.marked[position] = False
        return position

    def clear(self) -> None:
        """Nothing is stale."""
        for heap in self.heaps:
            for position in heap:
                self.marked[position] = False
            heap.clear()
