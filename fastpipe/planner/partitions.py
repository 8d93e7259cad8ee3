"""Layers moved from stage to stage, and stages that recompute no more, under the order's own times."""

from __future__ import annotations

from dataclasses import replace

from fastpipe.planner import engine
from fastpipe.planner.clock import Clock
from fastpipe.planner.model import Problem
from fastpipe.planner.pool import Member
from fastpipe.planner.tasks import fits, tasks_of

_PASSES = 3


def improve(problem: Problem, one: Member, clock: Clock) -> Member:
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
            tried = None if moved is None else with_parts(problem, one, moved)
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


def with_parts(problem: Problem, one: Member, parts: tuple[range, ...]) -> Member | None:
    """The same order for another partition; None where it does not fit."""
    return _with(problem, one, parts, one.setting.recomputes)


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
