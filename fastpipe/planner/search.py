"""The search: orders from list scheduling, timed under the real costs, the best of them annealed in rounds.

What comes out of the annealing gets another partition of its layers, and stages that recompute no more, where that is
shorter under the order's own times.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fastpipe.action import NONE, ActionKind
from fastpipe.placement import Placement
from fastpipe.planner import engine
from fastpipe.planner.candidates import compute_only, split_backwards
from fastpipe.planner.engine import Clock
from fastpipe.planner.problem import Problem, Setting
from fastpipe.planner.result import family_of
from fastpipe.planner.tasks import SLACK, Floats, Ints, Tasks, fits, held_peaks, tasks_of
from fastpipe.schedule import Schedule

WORK = 4e8
"""Attempts times tasks of a whole search: some half a second natively."""
_ROUNDS = ((4, 0.15, 0.5), (2, 0.15, 0.5), (1, 0.7, 0.5))
"""How many orders are annealed, with what part of the attempts, and the heat at the start, in mean durations of a task.
One long annealing brings more than several, but not of few tasks: there many hot ones find what one does not,
and they may take longer in all."""
_ROUNDS_OF_FEW = ((32, 0.6, 3.0), (12, 0.5, 2.0), (4, 0.5, 1.0))
_FEW = 300
"""Tasks."""
_COLD = 0.03
"""The heat at the end."""
_SLICES, _SLICE_WORK = 16, 1e7
"""Parts of an annealing, after each of which the clock is read, and attempts times tasks for which there is one more:
what does not run out of time does not depend on it."""
_LEGS = 4
"""How often an annealing begins at the best order that it has found."""
_FOR_ANNEALING = 0.9
"""Of the time that is left; the rest is for what comes behind."""
_PASSES = 3
"""Over the boundaries of stages, at most."""
_KINDS = (int(ActionKind.F), int(ActionKind.I), int(ActionKind.W))
_F, _I, _W = range(3)
_FAR = 1e7
_RANKINGS = ((1, 0, 2), (0, 1, 2), (2, 0, 1), (1, 2, 0), (1, 1, 2), (0, 0, 1))
"""Which of F, I and W goes first."""


@dataclass(frozen=True)
class Member:
    """An order in the pool."""

    name: str
    setting: Setting
    tasks: Tasks
    order: Ints
    value: float

    def schedule(self) -> Schedule:
        """It, as a schedule."""
        return self.tasks.ordered(self.order, "plan")


def member(problem: Problem, name: str, setting: Setting, schedule: Schedule) -> Member | None:
    """A schedule as a member; None where it does not fit into memory or cannot run."""
    schedule = compute_only(schedule)
    cost = setting.cost
    if cost.backward is None and schedule.splits_backward is False:
        schedule = split_backwards(schedule)
    peaks = held_peaks(schedule, setting.counted, setting.begun)
    if not fits(peaks, setting.limit):
        return None
    limit = [max(most, room) for most, room in zip(peaks, setting.room, strict=True)]
    tasks = tasks_of(schedule, cost, setting.counted, limit, setting.begun)
    order = tasks.start
    value = engine.measure(tasks, order, problem.span)
    return Member(name, setting, tasks, order, value) if value < float("inf") else None


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
    """Draws keys for the tasks of `unordered`."""

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


class Construction(NamedTuple):
    """What list scheduling is asked for: a setting, the seed of its keys, and how many orders it may try to make."""

    setting: Setting
    seed: int
    tries: int


def constructed(problem: Problem, asked: Construction, keep: int, clock: Clock) -> list[Member]:
    """The best orders that list scheduling makes on a placement."""
    setting, placement = asked.setting, asked.setting.placement
    if not asked.tries or clock.is_over():
        return []
    tasks = tasks_of(
        unordered(placement, setting.num_microbatches), setting.cost, setting.counted, setting.room, setting.begun
    )
    if not len(tasks) or (tasks.take > np.repeat(tasks.limit, np.diff(tasks.first)) + SLACK).any():
        return []
    found = sorted(Keys(tasks, asked.seed).orders(asked.tries, problem.span), key=lambda one: one[1])[:keep]
    name = f"list scheduling on {describe(placement)}"
    return [Member(name, setting, tasks, order, value) for order, value in found]


def describe(placement: Placement) -> str:
    """The placement in words."""
    depth = placement.num_stages // placement.num_ranks
    return f"{placement.name} of {depth}" if placement.num_stages > placement.num_ranks else placement.name


Bound = Callable[[Setting], float]
"""What no order of a setting is shorter than."""


def anneal(
    problem: Problem, pool: list[Member], work: float, seed: int, clock: Clock, bound_of: Bound
) -> Iterator[Member]:
    """Better orders, round by round: many for a short time, then the best of them for longer. None without the
    planning library. Orders of settings whose bound has been reached, there or elsewhere, are left alone."""
    if not pool or not engine.is_native():
        return
    best = min(pool, key=lambda one: one.value)
    if reaches_bound(best.value, bound_of(best.setting)):
        yield best
    rounds = _ROUNDS if max(len(one.tasks) for one in pool) > _FEW else _ROUNDS_OF_FEW
    shares = [part / count * engine.items_a_worker(count) for count, part, _ in rounds]  # of the time
    ranked, shortest = pool, best.value
    for number, (count, part, hot) in enumerate(rounds):
        shortest = min(shortest, *(one.value for one in ranked))
        ranked = [one for one in ranked if not reaches_bound(shortest, bound_of(one.setting))]
        chosen = pick_diverse(ranked, count)
        if not chosen:
            return
        seconds = _FOR_ANNEALING * clock.left() * part / count / sum(shares[number:])
        jobs = []
        for index, one in enumerate(chosen):
            attempts = int(work * part / len(chosen) / max(1, len(one.tasks)))
            own_seed = seed * 1009 + number * 101 + index
            jobs.append(partial(_annealed, problem, one, attempts, seconds, hot, own_seed, clock, bound_of))
        ranked = []
        with engine.in_parallel(jobs, clock) as answers:
            for better in answers:
                ranked.append(better)
                yield better
                if clock.is_over():
                    return


def reaches_bound(value: float, least: float) -> bool:
    """Whether an objective is its bound, but for rounding, so that nothing shorter can be found."""
    return value <= least * (1 + 1e-9)


def _annealed(
    problem: Problem,
    one: Member,
    attempts: int,
    seconds: float,
    hot: float,
    seed: int,
    clock: Clock,
    bound_of: Bound,
) -> Member:
    """The order after so many attempts within so many seconds, from a heat in mean durations of a task; in slices
    between which the clock is seen: what is late cools down the sooner."""
    begin, search = clock.elapsed(), None
    slices = min(attempts, _SLICES + int(attempts * len(one.tasks) / _SLICE_WORK))
    scale = float(one.tasks.seconds.mean()) / max(1, slices)
    number, leg = 0, -1
    while number < slices and not clock.is_over():
        if number * _LEGS // slices > leg:
            one, leg = _found(one, search), number * _LEGS // slices
            if reaches_bound(one.value, bound_of(one.setting)):
                return one
            search = engine.search(one.tasks, one.order, span=problem.span, seed=seed * 17 + leg)
        if search is None:
            return one
        heat = [scale * (hot * (slices - at) + _COLD * at) for at in (number, number + 1)]
        search.improve(attempts // slices, *heat)
        number, late = number + 1, slices * (clock.elapsed() - begin) / seconds if seconds else slices
        if late > number + 1:
            clock.cut, number = True, int(min(slices, late))
    return _found(one, search)


def _found(one: Member, search: engine.Search | None) -> Member:
    """What a search has found, if it is better than what it began with."""
    if search is None:
        return one
    order, value = search.found()
    return replace(one, order=order, value=value) if value < one.value else one


def pick_diverse(pool: list[Member], count: int) -> list[Member]:
    """The best, but one of each origin and placement before there is a second.

    How short an order is says little of how short annealing makes it, which depends on its pattern. What list
    scheduling makes is often shorter than a wave of the registry, and then gets less far.
    """
    ranked, taken = sorted(pool, key=lambda one: one.value), set[tuple[object, ...]]()
    chosen: list[Member] = []
    rest: list[Member] = []
    for one in ranked:
        key = (one.setting.placement, one.setting.num_microbatches, family_of(one.name))
        (rest if key in taken else chosen).append(one)
        taken.add(key)
    return (chosen + rest)[:count]


def move_layers(problem: Problem, one: Member, clock: Clock) -> Member:
    """The order with the best partition that moves of single layers reach; itself where there are no layers."""
    if one.setting.parts is None:
        return one
    for _ in range(_PASSES):
        better = _passed(problem, one, clock)
        if better.value >= one.value:
            break
        one = better
    return one


def _passed(problem: Problem, one: Member, clock: Clock) -> Member:
    """Every boundary tried one layer earlier and one later."""
    for boundary in range(one.setting.placement.num_stages - 1):
        for step in (-1, 1):
            if clock.is_over():
                return one
            moved = _moved(one.setting.parts or (), boundary, step)
            tried = None if moved is None else _with(problem, one, moved, one.setting.recomputes)
            if tried is not None and tried.value < one.value:
                one = tried
    return one


def _moved(parts: tuple[range, ...], boundary: int, step: int) -> tuple[range, ...] | None:
    """The partition with one boundary moved by a layer; None where a stage would be empty."""
    left, right = parts[boundary], parts[boundary + 1]
    end = left.stop + step
    if not left.start < end < right.stop:
        return None
    return (*parts[:boundary], range(left.start, end), range(end, right.stop), *parts[boundary + 2 :])


def recompute_less(problem: Problem, one: Member, clock: Clock) -> Member:
    """The order with fewer stages that recompute: one after the other keeps all, where that fits and is shorter."""
    for stage in range(one.setting.placement.num_stages):
        flags = one.setting.recomputes
        if flags is None or clock.is_over():
            return one
        if flags[stage]:
            tried = _with(problem, one, one.setting.parts, (*flags[:stage], False, *flags[stage + 1 :]))
            if tried is not None and tried.value < one.value:
                one = tried
    return one


def _with(
    problem: Problem, one: Member, parts: tuple[range, ...] | None, recomputes: tuple[bool, ...] | None
) -> Member | None:
    placement, count = one.setting.placement, one.setting.num_microbatches
    setting = problem.setting(placement, count, parts, recomputes)
    tasks = tasks_of(one.tasks.schedule, setting.cost, setting.counted, setting.room, setting.begun)
    if not fits(tasks.peaks(one.order), setting.limit):
        return None
    return replace(one, setting=setting, tasks=tasks, value=engine.measure(tasks, one.order, problem.span))
