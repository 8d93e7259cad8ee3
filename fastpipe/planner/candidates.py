"""Candidates: every schedule of the registry, with every option that matters, generated for the costs, and judged.

`evaluate` lowers and simulates a schedule as a user would, and compares what it holds with the memory limit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from fastpipe.action import COMPUTE_KINDS, ActionKind
from fastpipe.cost import CostModel
from fastpipe.lower import lower
from fastpipe.placement import Placement
from fastpipe.planner.problem import Problem, Setting
from fastpipe.planner.result import Candidate
from fastpipe.planner.tasks import fits, held_peaks
from fastpipe.program import Op
from fastpipe.schedule import Schedule
from fastpipe.schedules import IGNORED_COSTS, Family, list_schedules
from fastpipe.simulate import simulate_program
from fastpipe.timeline import Timeline

_COSTS = ("forward", "backward_input", "backward_weight", "comm")
_LIMITS = ("memory_limit", "memory")
_SMALLEST = ("loop_zb", "wave_zb")
_FIRST, _LAST = "wave_zb", "loop_zb"
"""A time limit may leave out what comes late: the one is nearly the best for any costs and memory, the other takes
longest to make and is seldom the best."""
_LAST_COMPUTE = int(max(COMPUTE_KINDS))
_B, _I, _W = int(ActionKind.B), int(ActionKind.I), int(ActionKind.W)


def from_registry(problem: Problem, num_microbatches: int, allowed: list[int]) -> Iterator[tuple[str, Schedule | str]]:
    """Every schedule of the registry on these numbers: its name with its options, and it, or why it is not possible."""
    if problem.placement is not None and problem.placement.num_stages % problem.num_ranks:
        return
    for family in sorted(list_schedules(), key=lambda family: (family.name == _LAST) - (family.name == _FIRST)):
        if family.name == "forward_only":
            continue
        for shape in _shapes(problem, family, allowed):
            variants = _variants(problem, num_microbatches, family, shape)
            for options in variants:
                label, schedule = _made(family, problem.num_ranks, num_microbatches, options, shape)
                if isinstance(schedule, str) or problem.allows(schedule.placement):
                    yield label, schedule
            # By default it may hold more than is allowed, but need not. Rounds that hold less are found within less.
            if shape not in variants and "memory" not in family.options:
                label, schedule = _made(family, problem.num_ranks, num_microbatches, shape, shape)
                if isinstance(schedule, Schedule) and _may_fit(problem, schedule):
                    yield label, schedule


def least_memory(problem: Problem, num_microbatches: int, allowed: list[int]) -> Iterator[tuple[str, Schedule]]:
    """One microbatch after the other, nearly: what a rank holds at once of one is the least that any schedule needs."""
    families = {family.name: family for family in list_schedules()}
    for name in _SMALLEST:
        for depth in allowed:
            shape = {"stages_per_rank": depth}
            label, schedule = _made(
                families[name], problem.num_ranks, num_microbatches, {**shape, "memory": depth}, shape
            )
            if isinstance(schedule, Schedule) and problem.allows(schedule.placement):
                yield label, schedule


def _may_fit(problem: Problem, schedule: Schedule) -> bool:
    """Whether its ranks hold no more than they may, if every activation is of the mean size."""
    if not problem.allows(schedule.placement):
        return False
    setting = problem.setting(schedule.placement, schedule.num_microbatches)
    size = math.fsum(setting.held) / len(setting.held)
    return all(
        rank.peak_activations * size <= limit * (1 + 1e-9) for rank, limit in zip(schedule, setting.limit, strict=True)
    )


def _shapes(problem: Problem, family: Family, allowed: list[int]) -> list[dict[str, Any]]:
    """The options that say how many stages a rank holds, for every number that is allowed."""
    if problem.placement is not None and problem.placement.num_routes != family.num_routes:
        return []
    if family.num_routes > 1:
        # a rank holds two stages of p; where they have to be is no question of how many are allowed
        holds = problem.placement is not None or family.stages_per_rank <= problem.max_stages_per_rank
        return [{}] if 1 in allowed and holds else []
    if "stages_per_rank" in family.options:
        # Of one stage per rank zb_auto is as good as loop_zb, but for less memory than 1F1B's.
        one = family.stages_per_rank == 1 or (problem.memory is not None and family.name == "loop_zb")
        return [{"stages_per_rank": v} for v in allowed if v > 1 or one]
    if "waves" in family.options:
        return [{"waves": v // 2} for v in allowed if v % 2 == 0]
    return [{}] if family.stages_per_rank in allowed else []


def _variants(
    problem: Problem, num_microbatches: int, family: Family, shape: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """As it is by default, for the costs, and for the memory: each that makes a difference."""
    limited = next((name for name in _LIMITS if name in family.options), None)
    depth = int(shape.get("stages_per_rank", family.stages_per_rank))
    if limited is None and not any(name in family.options for name in _COSTS):
        return [dict(shape)]
    stages = Placement.loop(problem.num_ranks, depth)
    setting = problem.setting(stages, num_microbatches)
    costs = _costs(family, setting.cost, problem.num_ranks, stages.num_stages)
    found: list[dict[str, Any]] = []
    limits = _limits(setting) if limited is not None else []
    if max(limits, default=0) > stages.num_stages or not limits:
        found = [dict(shape), {**shape, **costs}] if costs else [dict(shape)]
        # what 1F1B holds is what they take by default
        limits = [limit for limit in limits if limit != stages.num_stages]
    if limited is not None:
        found += [{**shape, **costs, limited: limit} for limit in limits]
        # Which messages a rank holds at once depends on the order: of two with the lowest limit either may fit alone.
        if costs and limits and setting.counted != setting.held:
            found.append({**shape, limited: limits[0]})
    return found


def _costs(family: Family, cost: CostModel, num_ranks: int, num_stages: int) -> dict[str, Any]:
    """What a generator that looks at costs is given: one per rank where it takes that, else their mean."""
    found: dict[str, Any] = {}
    if _is_default(cost, num_stages):
        return found
    for name in _COSTS:
        option = family.options.get(name)
        if option is None or option is IGNORED_COSTS[name]:
            continue
        if name == "comm":
            value: Any = _mean_latency(cost, num_ranks, num_stages)
        else:
            values = cost.per_stage(name, num_stages).tolist()
            even = len(set(values)) == 1
            value = values[0] if even else values
            if not even and (num_stages != num_ranks or (option.check is not None and not option.check(value))):
                value = math.fsum(values) / num_stages
        if value != option.default and (option.check is None or option.check(value)):
            found[name] = value
    return found


def _is_default(cost: CostModel, num_stages: int) -> bool:
    """Whether all actions cost the same and transfers nothing, which generators take for granted."""
    seconds = {s for name in _COSTS[:3] for s in cost.per_stage(name, num_stages).tolist()}
    return len(seconds) == 1 and cost.comm == 0 and cost.bandwidth == math.inf


def _mean_latency(cost: CostModel, num_ranks: int, num_stages: int) -> float:
    """Seconds of a transfer between neighbours, with the bytes of an average boundary."""
    if num_ranks == 1:
        return 0.0
    size = float(cost.per_stage("activation_bytes", num_stages).mean())
    links = [cost.link(rank, rank + 1) for rank in range(num_ranks - 1)]
    return math.fsum(latency + size / bandwidth for latency, bandwidth in links) / len(links)


def _limits(setting: Setting) -> list[int]:
    """How many stage activations fit: by the largest stage and by the mean; as many as there can be without a limit."""
    num_ranks, stages = setting.placement.num_ranks, setting.placement.num_stages
    most = setting.num_microbatches * stages // num_ranks
    if math.isinf(min(setting.limit)):
        return sorted({min(most, count * stages // num_ranks) for count in (num_ranks, 2 * num_ranks)})
    found = set()
    for held, limit in ((setting.held, setting.limit), (setting.counted, setting.room)):
        sizes = {max(held), math.fsum(held) / stages}
        found |= {min(most, int(min(limit) / size + 1e-9)) for size in sizes if size > 0}
    return sorted(count for count in found if count > 0)


def _made(
    family: Family, num_ranks: int, num_microbatches: int, options: Mapping[str, Any], shape: Mapping[str, Any]
) -> tuple[str, Schedule | str]:
    shown = {name: value for name, value in options.items() if name not in _COSTS}
    text = ", ".join(f"{name}={value}" for name, value in shown.items())
    label = f"{family.name}({text})" if text else family.name
    if set(options) - set(shape) - set(_LIMITS):
        label += " for the costs"
    try:
        return label, family.make(num_ranks, num_microbatches, options)
    except ValueError as error:
        return label, str(error)


def compute_only(schedule: Schedule) -> Schedule:
    """The same without what names a stage alone, which a loaded schedule may have: a program adds what it lacks."""
    if all((rows[0] <= _LAST_COMPUTE).all() for rows in schedule.columns):
        return schedule
    columns = [rows[:, rows[0] <= _LAST_COMPUTE] for rows in schedule.columns]
    return Schedule(schedule.name, schedule.placement, schedule.num_microbatches, columns, schedule.options)


def split_backwards(schedule: Schedule) -> Schedule:
    """The same with every B as I and W, one after the other: what a search can take apart."""
    columns = []
    for rows in schedule.columns:
        twice = np.repeat(rows, np.where(rows[0] == _B, 2, 1), axis=1)
        both = np.flatnonzero(twice[0] == _B)
        twice[0, both[0::2]], twice[0, both[1::2]] = _I, _W
        columns.append(twice)
    return Schedule(schedule.name, schedule.placement, schedule.num_microbatches, columns, schedule.options)


def join_backwards(schedule: Schedule) -> Schedule:
    """The same with every I that its W follows at once as one B."""
    columns = []
    for rows in schedule.columns:
        pair = (rows[0, :-1] == _I) & (rows[0, 1:] == _W) & (rows[1:3, :-1] == rows[1:3, 1:]).all(axis=0)
        array = rows.copy()
        array[0, :-1][pair] = _B
        columns.append(array[:, ~np.concatenate([[False], pair])])
    return Schedule(schedule.name, schedule.placement, schedule.num_microbatches, columns, schedule.options)


def evaluate(problem: Problem, name: str, setting: Setting, schedule: Schedule) -> tuple[Candidate, Timeline]:
    """The numbers of a schedule, and whether it fits."""
    program = lower(schedule)
    timeline = simulate_program(program, setting.cost)
    stages = setting.placement
    held = held_peaks(schedule, setting.held, setting.kept)
    by_bytes = problem.memory is not None and problem.memory.unit == "bytes"
    row = Candidate(
        name=name,
        num_microbatches=setting.num_microbatches,
        stages_per_rank=max(map(len, stages.stages_by_rank())),
        makespan=timeline.makespan,
        span=timeline.span,
        bubble_fraction=timeline.span_bubble_fraction if problem.span else timeline.bubble_fraction,
        peak_memory=max(held) / setting.share,
        peak_bytes=max(_bytes(setting, timeline)) if problem.knows_bytes else 0.0,
        messages=sum(int(np.count_nonzero(columns[0] == Op.SEND)) for columns in program.columns),
        fits=fits(timeline.peak_bytes if by_bytes else held, setting.limit),
        copies=stages.num_routes,
    )
    return row, timeline


def _bytes(setting: Setting, timeline: Timeline) -> list[float]:
    """Bytes of every rank at most, with what stays."""
    stages = setting.placement.stages_by_rank()
    return [
        most + sum(setting.parameters[stage] for stage in mine)
        for most, mine in zip(timeline.peak_bytes, stages, strict=True)
    ]
