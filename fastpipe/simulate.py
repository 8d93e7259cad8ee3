"""Simulation: a program and costs in, a timeline out."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from fastpipe import native_plan
from fastpipe.cost import CostModel, check_links
from fastpipe.errors import ProgramError
from fastpipe.machine import COALESCED, Lanes, Machine, lane_numbers
from fastpipe.memory import peak_bytes
from fastpipe.program import Program
from fastpipe.timeline import Seconds, Timeline


def simulate_program(program: Program, cost: CostModel | None = None, *, lanes: Lanes = "directed") -> Timeline:
    """When every instruction starts and ends under the given costs.

    Args:
        program: what to run.
        cost: seconds per stage action and transfer; one second for F, I and W each unless given.
        lanes: which channels share an in-order lane; see `fastpipe.machine.lane_numbers`.

    Raises:
        ProgramError: when the program is none, or does not come to its end.
        ValueError: for costs of other stages or ranks.
    """
    cost = CostModel() if cost is None else cost
    if not isinstance(cost, CostModel):
        raise TypeError(f"cost: expected a CostModel, found {type(cost).__name__}")
    cost.check(program.num_stages)
    check_links(cost, program.num_ranks)
    channels, numbers = program.channels, lane_numbers(lanes, program.channels)
    native = None if lanes == COALESCED else native_plan.simulate(program, channels, numbers, cost)
    times = native or _times(program, cost, lanes)
    return Timeline(program, *times, lanes=numbers, memory=partial(peak_bytes, program, cost))


def _times(program: Program, cost: CostModel, lanes: Lanes) -> tuple[Sequence[Seconds], Sequence[Seconds]]:
    """The run in Python: what csrc/plan does too, and where the error comes from."""
    channels = program.channels
    seconds = cost.compute_seconds, lambda channel, stage, _: cost.transfer_seconds(channels[channel], stage)
    try:
        outcome = Machine(program, lanes, *seconds).run()
    except (LookupError, ValueError):  # a slot that was never posted, a channel or a stage that there is not
        raise ProgramError(f"{program.name} is no valid program; validate_program names what is wrong") from None
    if outcome.blocked:
        raise ProgramError(f"{program.name} does not come to its end; validate_program names the cycle")
    return outcome.starts, outcome.ends
