"""List scheduling: every rank that is free takes the best of what is ready. For orders that no closed form gives."""

from __future__ import annotations

import heapq
from collections.abc import Callable

from fastpipe.action import ActionKind
from fastpipe.dependencies import feeds
from fastpipe.placement import Placement
from fastpipe.schedule import Columns
from fastpipe.schedules.words import columns_of

Task = tuple[int, int, int]
"""(microbatch within its route, -stage, microbatch): the lowest goes first, the later stage of equals."""


class ListScheduler:
    """Plays a step: backward before forward, lower microbatch first.

    Args:
        placement: the stages and routes.
        num_microbatches: of the step.
        forward: the duration of F.
        backward: the duration of B; None for a step of forwards alone.
        limit: how many activations of a stage and route may live; any number unless given.
    """

    def __init__(
        self,
        placement: Placement,
        num_microbatches: int,
        *,
        forward: int = 1,
        backward: int | None = None,
        limit: Callable[[int], int] | None = None,
    ) -> None:
        self.placement, self.num_microbatches = placement, num_microbatches
        self.seconds = {ActionKind.F: forward, ActionKind.B: backward or 0}
        self.train, self.limit = backward is not None, limit
        ranks = range(placement.num_ranks)
        self.ready: dict[ActionKind, list[list[Task]]] = {kind: [[] for _ in ranks] for kind in self.seconds}
        self.live = [[0] * placement.num_stages for _ in placement.routes]
        self.orders: list[list[tuple[ActionKind, int, int]]] = [[] for _ in ranks]
        self.running: list[tuple[int, int, ActionKind, int, int]] = []
        self.per_route = -(-num_microbatches // placement.num_routes)

    def run(self) -> list[Columns]:
        """The columns of every rank."""
        for mb in range(self.num_microbatches):
            self._make_ready(ActionKind.F, 0, mb)
        idle = set(range(self.placement.num_ranks))
        now = 0
        while True:
            idle -= {rank for rank in sorted(idle) if self._start(rank, now)}
            if not self.running:
                return [columns_of(order) for order in self.orders]
            now = self.running[0][0]
            while self.running and self.running[0][0] == now:
                _, rank, kind, stage, mb = heapq.heappop(self.running)
                self._finish(kind, stage, mb)
                idle.add(rank)

    def _route(self, mb: int) -> int:
        return self.placement.route_of(mb, self.num_microbatches)

    def _make_ready(self, kind: ActionKind, stage: int, mb: int) -> None:
        rank = self.placement.rank_of(stage, self._route(mb))
        heapq.heappush(self.ready[kind][rank], (mb % self.per_route, -stage, mb))

    def _start(self, rank: int, now: int) -> bool:
        """Begin the best that is ready, if there is any."""
        for kind in (ActionKind.B, ActionKind.F):
            task = self._take(kind, rank)
            if task is not None:
                _, negative, mb = task
                self.live[self._route(mb)][-negative] += kind is ActionKind.F
                self.orders[rank].append((kind, -negative, mb))
                heapq.heappush(self.running, (now + self.seconds[kind], rank, kind, -negative, mb))
                return True
        return False

    def _take(self, kind: ActionKind, rank: int) -> Task | None:
        """The best task of a kind; a forward only where its stage may hold one more activation."""
        ready, passed = self.ready[kind][rank], []
        found = None
        while ready and found is None:
            task = heapq.heappop(ready)
            if kind is ActionKind.F and not self._has_room(task):
                passed.append(task)
            else:
                found = task
        for task in passed:
            heapq.heappush(ready, task)
        return found

    def _has_room(self, task: Task) -> bool:
        return self.limit is None or self.live[self._route(task[2])][-task[1]] < self.limit(-task[1])

    def _finish(self, kind: ActionKind, stage: int, mb: int) -> None:
        after = feeds(kind, stage, self.placement.num_stages)
        if kind is ActionKind.B:
            self.live[self._route(mb)][stage] -= 1
        if after >= 0:
            self._make_ready(kind, after, mb)
        elif kind is ActionKind.F and self.train:
            self._make_ready(ActionKind.B, stage, mb)
