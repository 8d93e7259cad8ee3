"""The planning functions that compose the others: what a user calls with a schedule, whatever stage it is at."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

from fastpipe import visualize
from fastpipe.checks import check_counts, check_flags, check_type
from fastpipe.cost import CostModel, shared_out
from fastpipe.lower import lower as _lower
from fastpipe.machine import COALESCED, Lanes, lane_numbers
from fastpipe.program import Program
from fastpipe.schedule import Schedule
from fastpipe.schedules import check_size, find, make_schedule
from fastpipe.simulate import simulate_program
from fastpipe.timeline import Timeline
from fastpipe.validate import validate_schedule
from fastpipe.validate_program import validate_program


def lower(schedule: Schedule, *, recv_lookahead: int | str = 1, coalesce: bool = False) -> Program:
    """Turn a schedule into the program that every rank executes, both proved on the way.

    Args:
        schedule: generated, loaded or written by hand.
        recv_lookahead: how many compute actions before its consumer a receive is posted: 0 is just in time,
            ``"all"`` posts everything at the start of the step.
        coalesce: post receives in the order in which messages are made instead, beside the sends to the same peer, for
            transports with coalesced lanes.

    Raises:
        ScheduleError: when the schedule is incomplete or cannot run.
        ProgramError: when the program could hang.
    """
    program = _lower(validate_schedule(schedule), recv_lookahead=recv_lookahead, coalesce=coalesce)
    return validate_program(program, lanes=COALESCED if coalesce else "directed")


def simulate(work: Schedule | Program, cost: CostModel | None = None, *, lanes: Lanes = "directed") -> Timeline:
    """When every action starts and ends under the given costs.

    Args:
        work: a schedule, or its program.
        cost: seconds per stage action and transfer; one second for F, I and W each unless given.
        lanes: which channels a transport executes in one order: ``"directed"`` (every channel by itself), ``"pair"``
            (all between two ranks), ``"coalesced"`` (the same, with a send and a receive at one time as one operation)
            or ``"group"`` (all).

    Returns:
        The timeline, in seconds from the start of the step.

    Raises:
        ScheduleError: when the schedule is incomplete or cannot run.
        ProgramError: when the program could hang with these lanes.
        ValueError: for costs of another number of stages.
    """
    check_type(Schedule | Program, "see make_schedule", work=work)
    program = lower(work, coalesce=lanes == COALESCED) if isinstance(work, Schedule) else work
    return simulate_program(program, cost, lanes=lanes)


def plot(timeline: Timeline, path: str | Path, **options: Any) -> Path:
    """Draw a timeline into a PNG, SVG or PDF file; see `fastpipe.visualize.plot` for the options."""
    return visualize.plot(timeline, path, **options)


class Comparison(NamedTuple):
    """One schedule among others, all with the same model, ranks, microbatches and costs.

    Attributes:
        name: the schedule's.
        makespan: seconds.
        bubble_fraction: 1 - busy / (ranks * makespan).
        peak_memory: the most activations that a rank holds, counted in activations of a rank's share of the model
            (1/ranks of it) and one microbatch: a stage of a schedule with two stages per rank counts half.
        peak_activations: the same in stage activations.
        exposed_communication: seconds that the rank which waits longest for transfers under way waits for them.
        best: no other has both a smaller makespan and a smaller peak memory.
        refused: why it is not possible with these numbers; the rest is then NaN.
    """

    name: str
    makespan: float = float("nan")
    bubble_fraction: float = float("nan")
    peak_memory: float = float("nan")
    peak_activations: int = 0
    exposed_communication: float = float("nan")
    best: bool = False
    refused: str | None = None


def compare(
    schedules: Iterable[str | Schedule],
    *,
    num_ranks: int,
    num_microbatches: int,
    cost: CostModel | None = None,
    lanes: Lanes = "directed",
    skip_impossible: bool = False,
) -> list[Comparison]:
    """Simulate schedules side by side.

    Args:
        schedules: names, or schedules.
        num_ranks, num_microbatches: for schedules that are given by name.
        cost: of a rank's whole share of the model; the stages of a schedule with two stages per rank cost half.
        lanes: see `simulate`.
        skip_impossible: give schedules that refuse the numbers, or have no backward, a row that says why.

    Returns:
        A row for each schedule, the shortest makespan first, then those that were refused.

    Raises:
        ValueError: when a schedule refuses the numbers, or costs are given by stage.
    """
    if isinstance(schedules, str) or not isinstance(schedules, Iterable):
        raise TypeError(f"schedules: expected a list of names, found the {type(schedules).__name__} {schedules!r}")
    check_flags(skip_impossible=skip_impossible)
    if isinstance(lanes, str) or not isinstance(lanes, Sequence):
        lane_numbers(lanes, ())
    cost = CostModel() if cost is None else cost
    check_one_cost(cost)
    rows = []
    for work in schedules:
        if not isinstance(work, Schedule):  # a misspelt name is no impossible schedule
            find(work)
            check_size(*check_counts(num_ranks=num_ranks, num_microbatches=num_microbatches))
        try:
            rows.append(_row(_with_costs(work, num_ranks, num_microbatches, cost), cost, lanes))
        except ValueError as error:
            if not skip_impossible:
                raise
            rows.append(Comparison(str(work), refused=str(error)))
    possible = sorted((row for row in rows if row.refused is None), key=lambda row: (row.makespan, row.peak_memory))
    refused = [row for row in rows if row.refused is not None]
    return [row._replace(best=not any(_beats(other, row) for other in possible)) for row in possible] + refused


def _with_costs(work: str | Schedule, num_ranks: int, num_microbatches: int, cost: CostModel) -> Schedule:
    """Generate, for these costs where the generator looks at costs."""
    if isinstance(work, Schedule):
        return work
    options = generator_costs(work, shared_out(cost, find(work).stages_per_rank))
    return make_schedule(work, num_ranks=num_ranks, num_microbatches=num_microbatches, **options)


def generator_costs(name: str, cost: CostModel) -> dict[str, Any]:
    """The options of a generator that looks at costs, as far as it takes what the costs of a stage are given as.

    Costs by stage go to a generator that takes one per rank and has one stage per rank; others build for their default.
    """
    found = {}
    for option in ("forward", "backward_input", "backward_weight", "comm"):
        known, value = find(name).options.get(option), getattr(cost, option)
        if known is not None and value != known.default and (known.check is None or known.check(value)):
            found[option] = value
    return found


def _row(schedule: Schedule, cost: CostModel, lanes: Lanes) -> Comparison:
    if schedule.forward_only:
        raise ValueError(f"{schedule.name} has no backward")
    parts = schedule.num_stages / schedule.num_ranks
    timeline = simulate(schedule, shared_out(cost, parts), lanes=lanes)
    peak = max(timeline.peak_activations)
    exposed = max(timeline.exposed_communication)
    return Comparison(schedule.name, timeline.makespan, timeline.bubble_fraction, peak / parts, peak, exposed)


def check_one_cost(cost: CostModel) -> None:
    """Refuse costs by stage where schedules with other stages stand side by side."""
    check_type(CostModel, cost=cost)
    by_stage = [f.name for f in fields(cost) if isinstance(getattr(cost, f.name), Sequence)]
    if by_stage:
        raise ValueError(f"{by_stage[0]}: give one number for all stages, as the schedules compared differ in theirs")


def _beats(other: Comparison, row: Comparison) -> bool:
    """Whether ``other`` is as good in both and better in one; a millionth is no difference."""
    shorter, smaller = row.makespan - other.makespan, row.peak_memory - other.peak_memory
    slack = 1e-6 * row.makespan
    return shorter >= -slack and smaller >= -1e-9 and (shorter > slack or smaller > 1e-9)
