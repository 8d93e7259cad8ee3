"""List scheduling: every rank that is free takes the best of what is ready. For orders that no closed form gives.

Chimera has two pipelines in opposite directions over two copies of the model (arXiv 2107.06925): half of the
microbatches run stage s on rank s, the others on rank p-1-s. Hanayo lays one copy over the ranks in waves, down and up
again (arXiv 2308.15762). In both F takes 1 and B 2, and at most S - s activations of stage s are alive in each
direction, S the number of stages. With as many microbatches as ranks Chimera's order is the paper's unit, idle for
(p-2)/(1.5p+p-2) of the time.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

from fastpipe.action import ActionKind
from fastpipe.dependencies import feeds
from fastpipe.placement import Placement
from fastpipe.schedule import Columns, Schedule
from fastpipe.schedules.family import Family, Option, check_both_ways, is_count
from fastpipe.schedules.words import columns_of

Task = tuple[int, int, int]
"""(microbatch within its route, -stage, microbatch): the lowest goes first, the later stage of equals."""


class ListScheduler:
    """Plays a step: backward before forward, lower microbatch first.

    Args:
        backward: the duration of B, if that of F is 1; None for a step of forwards alone.
        limit: how many activations of a stage and route may live; any number unless given.
    """

    def __init__(
        self,
        placement: Placement,
        num_microbatches: int,
        *,
        backward: int | None = None,
        limit: Callable[[int], int] | None = None,
    ) -> None:
        self.placement, self.num_microbatches = placement, num_microbatches
        self.seconds = [1, backward or 0]
        self.train = backward is not None
        self.limit = None if limit is None else [limit(stage) for stage in range(placement.num_stages)]
        ranks = range(placement.num_ranks)
        self.ready: list[list[list[Task]]] = [[[] for _ in ranks] for _ in self.seconds]  # by kind and rank
        self.route = [placement.route_of(mb, num_microbatches) for mb in range(num_microbatches)]
        self.live = [[0] * placement.num_stages for _ in placement.routes]
        self.orders: list[list[tuple[ActionKind, int, int]]] = [[] for _ in ranks]
        self.running: list[tuple[int, int, ActionKind, int, int]] = []
        self.idle = [True for _ in ranks]
        self.per_route = -(-num_microbatches // placement.num_routes)

    def run(self) -> list[Columns]:
        """The columns of every rank."""
        with_news = {self._make_ready(ActionKind.F, 0, mb) for mb in range(self.num_microbatches)}
        now = 0
        while True:
            for rank in with_news:  # only they may find something to start that they did not before
                if self.idle[rank]:
                    self._start(rank, now)
            if not self.running:
                return [columns_of(order) for order in self.orders]
            now, with_news = self.running[0][0], set()
            while self.running and self.running[0][0] == now:
                _, rank, kind, stage, mb = heapq.heappop(self.running)
                self.idle[rank] = True
                with_news.add(rank)
                with_news.add(self._finish(kind, stage, mb, rank))

    def _make_ready(self, kind: ActionKind, stage: int, mb: int) -> int:
        """The rank that can start it now."""
        rank = self.placement.routes[self.route[mb]][stage]
        heapq.heappush(self.ready[kind][rank], (mb % self.per_route, -stage, mb))
        return rank

    def _start(self, rank: int, now: int) -> None:
        """Begin the best that is ready, if there is any."""
        for kind in (ActionKind.B, ActionKind.F):
            task = self._take(kind, rank)
            if task is not None:
                _, negative, mb = task
                self.live[self.route[mb]][-negative] += kind is ActionKind.F
                self.orders[rank].append((kind, -negative, mb))
                self.idle[rank] = False
                heapq.heappush(self.running, (now + self.seconds[kind], rank, kind, -negative, mb))
                return

    def _take(self, kind: ActionKind, rank: int) -> Task | None:
        """The best task of a kind; a forward only where its stage may hold one more activation."""
        ready = self.ready[kind][rank]
        passed: list[Task] = []
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
        return self.limit is None or self.live[self.route[task[2]]][-task[1]] < self.limit[-task[1]]

    def _finish(self, kind: ActionKind, stage: int, mb: int, rank: int) -> int:
        """The rank that can start what comes next, or this one."""
        after = feeds(kind, stage, self.placement.num_stages)
        if kind is ActionKind.B:
            self.live[self.route[mb]][stage] -= 1
        if after >= 0:
            return self._make_ready(kind, after, mb)
        if kind is ActionKind.F and self.train:
            return self._make_ready(ActionKind.B, stage, mb)
        return rank


def generate_chimera(num_ranks: int, num_microbatches: int) -> Schedule:
    """Both directions.

    Raises:
        ValueError: for odd numbers.
    """
    check_both_ways("chimera", num_ranks, num_microbatches)
    return _schedule("chimera", Placement.bidirectional(num_ranks), num_microbatches)


def generate_hanayo(num_ranks: int, num_microbatches: int, waves: int) -> Schedule:
    """``waves`` times down and up the ranks."""
    return _schedule("hanayo", Placement.wave(num_ranks, 2 * waves), num_microbatches)


def _schedule(name: str, placement: Placement, num_microbatches: int) -> Schedule:
    num_stages = placement.num_stages
    scheduler = ListScheduler(placement, num_microbatches, backward=2, limit=lambda stage: num_stages - stage)
    return Schedule(name, placement, num_microbatches, scheduler.run())


CHIMERA = Family(
    "chimera",
    "two directions over two copies of the model, half the bubble of 1F1B at microbatches = ranks",
    "even ranks, even microbatches; made for as many microbatches as ranks",
    generate_chimera,
    stages_per_rank=2,
    num_routes=2,
)
HANAYO = Family(
    "hanayo",
    "waves: 2 x waves stages per rank, down the ranks and up again",
    "any ranks and microbatches; made for as many microbatches as ranks",
    generate_hanayo,
    {"waves": Option(1, "the number of waves, at least 1: a rank holds twice as many stages", is_count)},
    stages_per_rank=2,
)
