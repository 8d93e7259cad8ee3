"""The planning functions that compose the others: what a user calls with a schedule, whatever stage it is at."""

from __future__ import annotations

from fastpipe.cost import CostModel
from fastpipe.lower import lower as _lower
from fastpipe.machine import Lanes
from fastpipe.program import Program
from fastpipe.schedule import Schedule
from fastpipe.simulate import simulate_program
from fastpipe.timeline import Timeline
from fastpipe.validate import validate_schedule
from fastpipe.validate_program import validate_program


def lower(schedule: Schedule, *, recv_lookahead: int | str = 1) -> Program:
    """Turn a schedule into the program that every rank executes, both proved on the way.

    Args:
        schedule: generated, loaded or written by hand.
        recv_lookahead: how many compute actions before its consumer a receive is posted: 0 is just in time,
            ``"all"`` posts everything at the start of the step.

    Raises:
        ScheduleError: when the schedule is incomplete or cannot run.
        ProgramError: when the program could hang.
    """
    return validate_program(_lower(validate_schedule(schedule), recv_lookahead=recv_lookahead))


def simulate(work: Schedule | Program, cost: CostModel | None = None, *, lanes: Lanes = "directed") -> Timeline:
    """When every action starts and ends under the given costs.

    Args:
        work: a schedule, or its program.
        cost: seconds per stage action and transfer; one second for F, I and W each unless given.
        lanes: which channels a transport executes in one order: ``"directed"``, ``"pair"``, ``"group"``.
    """
    program = lower(work) if isinstance(work, Schedule) else work
    return simulate_program(program, cost, lanes=lanes)
