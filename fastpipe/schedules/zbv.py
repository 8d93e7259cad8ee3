"""ZB-V: zero bubble on a V of two stages per rank, with the memory of 1F1B (arXiv 2401.10241, section 6).

For other costs than F = I = W it is searched as sail-sg's zero-bubble repository does: a warm-up, then one I and one F
a rank in turn, chosen by what has arrived, with a W wherever it fits into a wait or memory asks for it. A wait may stay
open as long as the longest bubble of any rank; every order is built again with the bubbles of the one before as given,
until that no longer helps. Four orders are tried, the first of the best is taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from fastpipe.action import ActionKind
from fastpipe.checks import is_number
from fastpipe.placement import Placement
from fastpipe.schedule import Columns, Schedule
from fastpipe.schedules.family import UNIFORM_COSTS, Family, Option
from fastpipe.schedules.words import Blocks, columns_of, spell, stream

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


F0, F1, I1, I0, W1, W0 = range(6)
"""What a rank does for one microbatch, in the order of the V: 0 is its stage on the way down, 1 on the way up."""


@dataclass(frozen=True)
class Costs:
    """Seconds of F, I and W of a stage and of a transfer; the activations a rank may hold, at least twice the ranks."""

    forward: float
    backward_input: float
    backward_weight: float
    comm: float
    limit: float


class Attempt:
    """One order, built by appending to the ranks; every rank's clock runs along.

    Args:
        fill: whether a wait shorter than a W is filled before an I1, and before a forward.
        approved: every rank's bubble in an order that is known.
    """

    def __init__(
        self,
        num_ranks: int,
        num_microbatches: int,
        costs: Costs,
        fill: tuple[bool, bool],
        approved: Sequence[float],
    ) -> None:
        self.num_ranks, self.num_microbatches, self.costs = num_ranks, num_microbatches, costs
        self.fill = {I1: fill[0], F0: fill[1], F1: fill[1], I0: True}
        self.slack = [max(approved) - bubble for bubble in approved]
        self.orders: list[list[tuple[int, int]]] = [[] for _ in range(num_ranks)]
        self.ends: list[list[list[float]]] = [[[] for _ in range(num_ranks)] for _ in range(4)]
        self.inputs: list[list[tuple[int, int]]] = [[] for _ in range(num_ranks)]
        self.num_weights = [0] * num_ranks
        self.clock = [0.0] * num_ranks
        self.bubble = [0.0] * num_ranks
        self.longest = 0.0
        self.seconds = [costs.forward] * 2 + [costs.backward_input] * 2

    def run(self) -> Attempt:
        """Build the order."""
        self._ramp_down()
        self._ramp_up()
        for _ in range(2 * self.num_microbatches):
            self._backwards()
            self._forwards()
        for rank in range(self.num_ranks):
            while self._has_weight(rank):
                self._put_weight(rank)
        return self

    def _count(self, kind: int, rank: int) -> int:
        return len(self.ends[kind][rank])

    def _live(self, rank: int) -> int:
        return self._count(F0, rank) + self._count(F1, rank) - self.num_weights[rank]

    def _has_weight(self, rank: int) -> bool:
        return self.num_weights[rank] < len(self.inputs[rank])

    def _arrived(self, kind: int, rank: int) -> bool:
        """Whether the neighbour has done what the rank's next action of this kind needs."""
        source = rank - 1 if kind in (F0, I1) else rank + 1
        return not 0 <= source < self.num_ranks or self._count(kind, source) > self._count(kind, rank)

    def _arrival(self, kind: int, rank: int) -> float:
        """When that is there; before everything where the rank itself provides it."""
        source = rank - 1 if kind in (F0, I1) else rank + 1
        if not 0 <= source < self.num_ranks:
            return float("-inf")
        return self.ends[kind][source][self._count(kind, rank)] + self.costs.comm

    def _put(self, kind: int, rank: int) -> None:
        seconds = self.seconds[kind]
        busy = self.clock[rank] + seconds
        end = max(busy, self._arrival(kind, rank) + seconds)
        if self._count(F0, rank):
            self.bubble[rank] += end - busy
            self.longest = max(self.longest, self.bubble[rank])
        action = (kind, self._count(kind, rank))
        self.orders[rank].append(action)
        self.clock[rank] = end
        self.ends[kind][rank].append(end)
        if kind in (I1, I0):
            self.inputs[rank].append(action)

    def _put_weight(self, rank: int) -> None:
        """The oldest W that waits."""
        kind, mb = self.inputs[rank][self.num_weights[rank]]
        self.num_weights[rank] += 1
        self.orders[rank].append((W1 if kind == I1 else W0, mb))
        self.clock[rank] += self.costs.backward_weight

    def _ramp_down(self) -> None:
        """The first F0 of every rank, then more of them while the first F1 comes back up."""
        last = self.num_ranks - 1
        for rank in range(self.num_ranks):
            self._put(F0, rank)
        self._put(F1, last)
        for rank in reversed(range(last)):
            while (
                self._live(rank) + 2 + 2 * rank <= self.costs.limit
                and self.clock[rank] + self.costs.forward <= self._arrival(F1, rank)
                and self._count(F0, rank) < self.num_microbatches
            ):
                for earlier in range(rank + 1):
                    self._put(F0, earlier)
            self._put(F1, rank)

    def _ramp_up(self) -> None:
        """F0 and F1 in turn, until every rank has as many forwards as the one before it."""
        kind = F0
        for rank in range(1, self.num_ranks):
            while self._is_behind(rank):
                for later in reversed(range(rank, self.num_ranks)):
                    if self._count(kind, later) < self.num_microbatches:
                        self._put(kind, later)
                kind = F1 if kind == F0 else F0

    def _is_behind(self, rank: int) -> bool:
        forwards = [self._count(F0, r) + self._count(F1, r) for r in (rank - 1, rank)]
        before = self._count(F1, rank - 1)
        return forwards[1] < forwards[0] or self._count(F1, rank) <= before < self.num_microbatches

    def _backwards(self) -> None:
        """One I a rank: those of the way down from the last rank on, then those of the way up from the first."""
        down = [self._goes_down(rank) for rank in range(self.num_ranks)]
        turns = [(rank, I0) for rank in reversed(range(self.num_ranks)) if down[rank]]
        turns += [(rank, I1) for rank in range(self.num_ranks) if not down[rank]]
        for rank, kind in turns:
            self._fill_wait(kind, rank)
            self._put(kind, rank)

    def _goes_down(self, rank: int) -> bool:
        if self._count(I0, rank) >= self._count(I1, rank):
            return False
        return self._arrived(I0, rank) or self._count(I1, rank) >= self.num_microbatches

    def _forwards(self) -> None:
        for rank in range(self.num_ranks):
            kind = self._next_forward(rank)
            if kind is not None:
                while self._live(rank) + 1 > self.costs.limit:
                    self._put_weight(rank)
                self._fill_wait(kind, rank)
                self._put(kind, rank)

    def _next_forward(self, rank: int) -> int | None:
        down, up = self._count(F0, rank), self._count(F1, rank)
        if up >= self.num_microbatches:
            return None
        if up >= down:
            return F0
        if self._arrived(F1, rank):
            return F1
        return F0 if down < self.num_microbatches and self._arrived(F0, rank) else None

    def _fill_wait(self, kind: int, rank: int) -> None:
        """Put W where the rank would wait: those that fit, and one more where a longer bubble does not hide it."""
        arrival = self._arrival(kind, rank)
        while self._has_weight(rank) and arrival >= self.clock[rank] + self.costs.backward_weight:
            self._put_weight(rank)
        hidden = max(self.longest, self.slack[rank]) - self.bubble[rank]
        if self._has_weight(rank) and arrival - self.clock[rank] > hidden and self.fill[kind]:
            self._put_weight(rank)


def search(num_ranks: int, num_microbatches: int, costs: Costs) -> list[list[tuple[int, int]]]:
    """Every rank's order of (kind, microbatch)."""
    found = []
    for choices in product((True, False), (True, False)):
        best = Attempt(num_ranks, num_microbatches, costs, choices, [0.0] * num_ranks).run()
        while True:
            again = Attempt(num_ranks, num_microbatches, costs, choices, best.bubble).run()
            if again.longest >= best.longest:
                break
            best = again
        found.append(best)
    return min(found, key=lambda attempt: attempt.longest).orders
