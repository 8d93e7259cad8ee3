"""What no order can be below: fastpipe/bounds.py, asked for a plan's stages and memory."""

from __future__ import annotations

from dataclasses import replace
from math import isinf

from fastpipe.bounds import any_placement_bounds, best, bounds
from fastpipe.planner.model import Problem, Setting


def of_placement(problem: Problem, setting: Setting) -> float:
    """Seconds of the objective, for every order of these stages where they are."""
    return max(_where_they_are(problem, setting), of_any_placement(problem, setting))


def _where_they_are(problem: Problem, setting: Setting) -> float:
    cost = replace(setting.cost, stage_bytes=setting.held)
    limited = not isinf(min(setting.limit))
    found = bounds(
        setting.placement,
        cost,
        num_microbatches=setting.num_microbatches,
        memory=setting.limit if limited else None,
        in_bytes=limited,
        measure=problem.objective,
    )
    return best(found).seconds


def of_any_placement(problem: Problem, setting: Setting) -> float:
    """The same wherever the stages are; over one route, since with two every rank has a first stage."""
    cost = replace(setting.cost, stage_bytes=setting.held)
    limit = max(setting.limit)
    if setting.placement.num_routes > 1:
        return _where_they_are(problem, setting)
    found = any_placement_bounds(
        cost,
        num_ranks=problem.num_ranks,
        num_stages=setting.placement.num_stages,
        num_microbatches=setting.num_microbatches,
        memory=None if isinf(limit) else limit,
        in_bytes=not isinf(limit),
        measure=problem.objective,
    )
    return best(found).seconds
