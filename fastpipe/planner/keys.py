"""Orders made from nothing: list scheduling with keys drawn at random from families that are known to be good."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from fastpipe.action import NONE, ActionKind
from fastpipe.placement import Placement
from fastpipe.planner import engine
from fastpipe.planner.tasks import Floats, Ints, Tasks
from fastpipe.schedule import Schedule

_KINDS = (int(ActionKind.F), int(ActionKind.I), int(ActionKind.W))
_F, _I, _W = range(3)
_FAR = 1e7
_RANKINGS = ((1, 0, 2), (0, 1, 2), (2, 0, 1), (1, 2, 0), (1, 1, 2), (0, 0, 1))
"""Which of F, I and W goes first."""


def unordered(placement: Placement, num_microbatches: int) -> Schedule:
    """All F, I and W of every rank, for `tasks_of`: an order that says nothing and may not run."""
    columns = []
    numbers = np.arange(num_microbatches, dtype=np.int32)
    for rank in range(placement.num_ranks):
        stages = placement.stages_of(rank)
        lines = [(kind, stage) for kind in _KINDS for stage in (stages if kind == _KINDS[_F] else stages[::-1])]
        rows = np.full((5, len(lines) * num_microbatches), NONE, dtype=np.int32)
        rows[:2] = np.repeat(np.array(lines, dtype=np.int32).T, num_microbatches, axis=1)
        rows[2] = np.tile(numbers, len(lines))
        columns.append(rows)
    return Schedule("plan", placement, num_microbatches, columns)


class Keys:
    """Draws keys for the tasks of `unordered`.

    Args:
        tasks: with their seconds, and what they hold.
        seed: of the random numbers.
    """

    def __init__(self, tasks: Tasks, seed: int) -> None:
        self.tasks, self.random = tasks, np.random.default_rng(seed)
        placement = tasks.schedule.placement
        rows = np.concatenate(tasks.schedule.columns, axis=1)
        self.kind = np.searchsorted(_KINDS, rows[0])
        self.stage, self.microbatch = rows[1], rows[2]
        self.num_ranks, self.num_stages = placement.num_ranks, placement.num_stages
        self.local = np.zeros(self.num_stages, dtype=np.int64)
        for rank in range(self.num_ranks):
            stages = placement.stages_of(rank)
            self.local[list(stages)] = np.arange(len(stages))
        self.depth = self.num_stages // self.num_ranks
        self.period = float(tasks.seconds.sum()) / self.num_ranks / tasks.schedule.num_microbatches
        self.ladder = self._ladder(placement)

    def _ladder(self, placement: Placement) -> Floats:
        """What the later stages of the rank need to have free for one microbatch: with that, no order comes to a stop.

        Of all forwards that lack memory take one of the latest stage. What its rank holds of later stages is of
        microbatches that are past all forwards that wait, so they come back and free it; what it holds of earlier ones
        left this much free. So it did not lack memory.
        """
        held = np.zeros(self.num_stages)
        forwards = self.kind == _F
        held[self.stage[forwards]] = self.tasks.take[forwards]
        after = np.zeros(self.num_stages)
        for rank in range(self.num_ranks):
            stages = placement.stages_of(rank)
            for index, stage in enumerate(stages):
                after[stage] = held[list(stages[index + 1 :])].sum()
        # and what one backward takes for a while where it recomputes
        again = self.tasks.take[~forwards].max(initial=0.0)
        return np.where(forwards, after[self.stage] + again, 0.0)

    def orders(self, count: int, span: bool) -> list[tuple[Ints, float]]:
        """The orders that can be made in so many tries, and their objectives."""
        keys, reserves, patience = [], [], []
        for _ in range(count):
            keys.append(self.draw())
            reserves.append(self.ladder * float(self.random.choice([1.0, 1.0, 1.0, 2.0, 3.0])))
            patience.append(float(self.random.choice([0.0, 0.0, 0.3, 0.6, 0.99])))
        made = engine.construct(self.tasks, keys, reserves, patience, span) if count else []
        return [(order, objective) for order, objective in made if objective < math.inf]

    def draw(self) -> Floats:
        """Keys of either family."""
        return self._periodic() if self.random.random() < 0.5 else self._grouped()

    def _periodic(self) -> Floats:
        """Every microbatch the same, one period after the one before; the slopes of F and I, and W's delay, vary."""
        random, seconds = self.random, self.tasks.seconds
        forward, backward, weight = (float(seconds[self.kind == kind].mean()) for kind in (_F, _I, _W))
        rise, fall = forward * random.uniform(1, 3), backward * random.uniform(1, 3)
        turn = self.num_stages * rise + random.uniform(-1, 1) * self.period
        delays = (
            0.0,
            weight * self.depth * random.uniform(0, 3),
            weight * self.num_ranks * random.uniform(0, 2),
            _FAR * self.period,
        )
        delay = delays[int(random.integers(len(delays)))]
        offset = np.where(self.kind == _F, self.stage * rise, turn + (self.num_stages - 1 - self.stage) * fall)
        return np.asarray(self.period * self.microbatch + offset + np.where(self.kind == _W, delay, 0.0))

    def _grouped(self) -> Floats:
        """Kinds by rank; within a kind, groups of microbatches through one local stage after the other."""
        groups = self.random.integers(1, 2 * self.num_ranks + 1, size=2).tolist()
        ranking = np.array(_RANKINGS[int(self.random.integers(len(_RANKINGS)))])
        local = self.local[self.stage]
        forward = self._lexical(groups[0], local)
        backward = self._lexical(groups[1], self.depth - 1 - local)
        return np.asarray(ranking[self.kind] * _FAR + np.where(self.kind == _F, forward, backward))

    def _lexical(self, group: int, local: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        number, within = np.divmod(self.microbatch.astype(np.int64), group)
        return np.asarray(number * (group * self.depth) + local * group + within)
