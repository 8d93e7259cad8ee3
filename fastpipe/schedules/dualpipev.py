"""DualPipeV: DualPipe cut in half and folded into a V (deepseek-ai's DualPipe repository; arXiv 2412.19437).

Rank r holds stage r (direction 0) and stage 2p-1-r (direction 1). The eight phases and their counts are those of the
reference; forwards and full backwards of opposite directions are fused in the steady phase.
"""

from __future__ import annotations

from collections import deque

from fastpipe.action import Action, ActionKind
from fastpipe.placement import Placement
from fastpipe.schedule import Schedule
from fastpipe.schedules.family import Family


class Directions:
    """Writes one rank's order by direction: counts microbatches, and keeps the weight gradients still to be done.

    Args:
        stages: the rank's stage in direction 0 and in direction 1.
        first: the first microbatch of each direction.
    """

    def __init__(self, stages: tuple[int, int], first: tuple[int, int] = (0, 0)) -> None:
        self.stages = stages
        self.next_forward = list(first)
        self.next_backward = list(first)
        self.weights: deque[Action] = deque()
        self.order: list[Action] = []

    def forward(self, direction: int) -> None:
        """F of the direction's next microbatch."""
        self.order.append(self._take(ActionKind.F, self.next_forward, direction))

    def backward(self, direction: int, split: bool = False) -> None:
        """B of the direction's next microbatch, or I with its W queued."""
        action = self._take(ActionKind.I if split else ActionKind.B, self.next_backward, direction)
        self.order.append(action)
        if split:
            self.weights.append(action._replace(kind=ActionKind.W))

    def weight(self) -> None:
        """The oldest W that is queued, of either direction."""
        self.order.append(self.weights.popleft())

    def overlapped(self, forward: int, backward: int) -> None:
        """The fused pair of a forward and a backward, each of its direction."""
        pair = (
            self._take(ActionKind.F, self.next_forward, forward),
            self._take(ActionKind.B, self.next_backward, backward),
        )
        self.order.append(Action.overlap(*pair))

    def _take(self, kind: ActionKind, counters: list[int], direction: int) -> Action:
        counters[direction] += 1
        return Action(kind, self.stages[direction], counters[direction] - 1)


def phases(work: Directions, ramp: int, height: int, steady: int, parity: int, unfused_first: bool) -> list[Action]:
    """The eight phases shared by DualPipe and DualPipeV.

    Args:
        work: the rank's directions.
        ramp: the ranks between this one and the turning point.
        height: the ranks from the outer end to this one, itself included.
        steady: the number of fused double steps.
        parity: of the rank; decides where phase 6 turns from B to I.
        unfused_first: whether the first pair of the steady phase runs unfused.
    """
    for _ in range(2 * ramp):
        work.forward(0)
    for _ in range(height):
        work.forward(0)
        work.forward(1)
    for _ in range(ramp):
        work.backward(1, split=True)
        work.weight()
        work.forward(1)
    for step in range(steady):
        if step == 0 and unfused_first:
            work.forward(0)
            work.backward(1)
        else:
            work.overlapped(0, 1)
        work.overlapped(1, 0)
    for _ in range(ramp):
        work.backward(1)
        work.overlapped(1, 0)
    _turn(work, height, parity)
    for _ in range(ramp):
        work.weight()
        work.backward(0, split=True)
    while work.weights:
        work.weight()
    return work.order


def _turn(work: Directions, height: int, parity: int) -> None:
    """Phase 6: both directions' backwards in turn, full ones first, split ones from the middle on."""
    for step in range(height):
        work.backward(1, split=step > height // 2 or (step == height // 2 and parity == 1))
        work.backward(0, split=step >= height // 2)


def generate(num_ranks: int, num_microbatches: int) -> Schedule:
    """The reference's order.

    Raises:
        ValueError: for fewer than two microbatches a rank.
    """
    if num_microbatches < 2 * num_ranks:
        raise ValueError(
            f"num_microbatches = {num_microbatches}: dualpipev on {num_ranks} ranks needs at least "
            f"{2 * num_ranks} (two a rank)"
        )
    orders = []
    for rank in range(num_ranks):
        work = Directions((rank, 2 * num_ranks - 1 - rank))
        ramp, steady = num_ranks - rank - 1, num_microbatches - 2 * num_ranks + rank + 1
        orders.append(phases(work, ramp, rank + 1, steady, rank % 2, unfused_first=rank == num_ranks - 1))
    return Schedule.from_actions("dualpipev", Placement.v(num_ranks), num_microbatches, orders)


DUALPIPEV = Family(
    "dualpipev",
    "V placement, forwards fused with backwards of the other direction",
    "microbatches >= 2 x ranks",
    generate,
    stages_per_rank=2,
)
