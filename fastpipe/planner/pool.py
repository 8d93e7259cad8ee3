"""The pool: orders from everywhere, timed under the real costs, the best of them annealed in rounds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from fastpipe.placement import Placement
from fastpipe.planner import engine, native
from fastpipe.planner.clock import Clock
from fastpipe.planner.keys import Keys, unordered
from fastpipe.planner.model import Problem, Setting
from fastpipe.planner.result import family_of
from fastpipe.planner.starts import computing, split
from fastpipe.planner.tasks import SLACK, Ints, Tasks, fits, held_peaks, tasks_of
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


@dataclass(frozen=True)
class Member:
    """An order in the pool.

    Attributes:
        name: where it comes from.
        setting: what it is ordered for.
        tasks: what is ordered.
        order: of the tasks.
        value: the objective.
    """

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
    schedule = computing(schedule)
    cost = setting.cost
    if cost.backward is None and schedule.splits_backward is False:
        schedule = split(schedule)
    peaks = held_peaks(schedule, setting.counted, setting.begun)
    if not fits(peaks, setting.limit):
        return None
    limit = [max(most, room) for most, room in zip(peaks, setting.room, strict=True)]
    tasks = tasks_of(schedule, cost, setting.counted, limit, setting.begun)
    order = tasks.start
    value = engine.measure(tasks, order, problem.span)
    return Member(name, setting, tasks, order, value) if value < float("inf") else None


class Listing(NamedTuple):
    """What list scheduling is asked for: a setting, the seed of its keys, and how many orders it may try to make."""

    setting: Setting
    seed: int
    tries: int


def constructed(problem: Problem, asked: Listing, keep: int, clock: Clock) -> list[Member]:
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


class _Annealing(NamedTuple):
    """How an order is annealed: so many attempts, within so many seconds, from a heat in mean durations of a task."""

    one: Member
    attempts: int
    seconds: float
    hot: float
    seed: int


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
    if reached(best.value, bound_of(best.setting)):
        yield best
    rounds = _ROUNDS if max(len(one.tasks) for one in pool) > _FEW else _ROUNDS_OF_FEW
    shares = [part / count * engine.turns(count) for count, part, _ in rounds]  # of the time
    ranked, shortest = pool, best.value
    for number, (count, part, hot) in enumerate(rounds):
        shortest = min(shortest, *(one.value for one in ranked))
        ranked = [one for one in ranked if not reached(shortest, bound_of(one.setting))]
        chosen = spread(ranked, count)
        if not chosen:
            return
        seconds = _FOR_ANNEALING * clock.left() * part / count / sum(shares[number:])
        jobs = []
        for index, one in enumerate(chosen):
            attempts = int(work * part / len(chosen) / max(1, len(one.tasks)))
            jobs.append(_Annealing(one, attempts, seconds, hot, seed * 1009 + number * 101 + index))
        ranked = []
        with engine.at_once(lambda job: _annealed(problem, job, clock, bound_of), jobs, clock) as answers:
            for better in answers:
                ranked.append(better)
                yield better
                if clock.is_over():
                    return


def reached(value: float, least: float) -> bool:
    """Whether an objective is its bound, but for rounding, so that nothing shorter can be found."""
    return value <= least * (1 + 1e-9)


def _annealed(problem: Problem, job: _Annealing, clock: Clock, bound_of: Bound) -> Member:
    """The order after an annealing, in slices between which the clock is seen: what is late cools down the sooner."""
    one, attempts, seconds, hot, seed = job
    begin, search = clock.elapsed(), None
    slices = min(attempts, _SLICES + int(attempts * len(one.tasks) / _SLICE_WORK))
    scale = float(one.tasks.seconds.mean()) / max(1, slices)
    number, leg = 0, -1
    while number < slices and not clock.is_over():
        if number * _LEGS // slices > leg:
            one, leg = _found(one, search), number * _LEGS // slices
            if reached(one.value, bound_of(one.setting)):
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


def _found(one: Member, search: native.Search | None) -> Member:
    """What a search has found, if it is better than what it began with."""
    if search is None:
        return one
    order, value = search.found()
    return replace(one, order=order, value=value) if value < one.value else one


def spread(pool: list[Member], count: int) -> list[Member]:
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
