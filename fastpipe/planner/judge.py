"""The judge: a schedule lowered and simulated the ordinary way, and held against the memory."""

from __future__ import annotations

import numpy as np

from fastpipe.lower import lower
from fastpipe.planner.model import Problem, Setting
from fastpipe.planner.result import Candidate
from fastpipe.planner.tasks import fits, held_peaks
from fastpipe.program import Op, Program
from fastpipe.schedule import Schedule
from fastpipe.simulate import simulate_program
from fastpipe.timeline import Timeline


def judge(problem: Problem, name: str, setting: Setting, schedule: Schedule) -> tuple[Candidate, Timeline]:
    """The numbers of a schedule, and whether it fits."""
    program = lower(schedule)
    timeline = simulate_program(program, setting.cost)
    stages = setting.placement
    held = held_peaks(schedule, setting.held, setting.kept)
    by_bytes = problem.memory is not None and problem.memory.unit == "bytes"
    row = Candidate(
        name,
        setting.num_microbatches,
        max(map(len, stages.stages_by_rank())),
        timeline.makespan,
        timeline.span,
        timeline.span_bubble_fraction if problem.span else timeline.bubble_fraction,
        max(held) / setting.share,
        max(_bytes(setting, timeline)) if problem.knows_bytes else 0.0,
        _messages(program),
        fits(timeline.peak_bytes if by_bytes else held, setting.limit),
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


def _messages(program: Program) -> int:
    return sum(int(np.count_nonzero(columns[0] == Op.SEND)) for columns in program.columns)
