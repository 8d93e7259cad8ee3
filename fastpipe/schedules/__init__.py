"""The schedules that the field knows: one file per family, and the registry of them all.

A generator turns numbers of ranks and microbatches, and its options, into a `Schedule`, the same every time; what it
does not take it refuses with ValueError. Proofs, lowering, simulation and execution know nothing of generators. The
package uses actions, placements, schedules, and the planning library for its searches.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastpipe.schedule import Schedule
from fastpipe.schedules import (
    building_block,
    dualpipe,
    forward_only,
    gpipe,
    interleaved,
    list_scheduling,
    loop_zb,
    one_f_one_b,
    one_f_one_b_v,
    wave,
    zb_auto,
    zbv,
    zero_bubble,
)
from fastpipe.schedules.family import IGNORED_COSTS as IGNORED_COSTS
from fastpipe.schedules.family import Family as Family
from fastpipe.schedules.family import check_size as check_size

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        gpipe.GPIPE,
        one_f_one_b.ONE_F_ONE_B,
        interleaved.INTERLEAVED_1F1B,
        gpipe.LOOPED_BFS,
        one_f_one_b.ONE_F_ONE_B_OVERLAP,
        interleaved.INTERLEAVED_OVERLAP,
        zero_bubble.ZB_H1,
        zero_bubble.ZB_H2,
        zb_auto.ZB_AUTO,
        interleaved.INTERLEAVED_ZB,
        loop_zb.LOOP_ZB,
        zbv.ZBV,
        building_block.V_HALF,
        building_block.V_MIN,
        wave.WAVE_ZB,
        one_f_one_b_v.ONE_F_ONE_B_V,
        dualpipe.DUALPIPE,
        dualpipe.DUALPIPEV,
        list_scheduling.CHIMERA,
        list_scheduling.HANAYO,
        forward_only.FORWARD_ONLY,
    )
}

# what torch's get_schedule_class takes, where it differs
_TORCH_NAMES = {
    "interleaved1f1b": "interleaved_1f1b",
    "interleavedzerobubble": "interleaved_zb",
    "loopedbfs": "looped_bfs",
    "zbvzerobubble": "zbv",
}


def make_schedule(name: str, *, num_ranks: int, num_microbatches: int, **options: Any) -> Schedule:
    """Generate a schedule.

    Args:
        name: one of `list_schedules`, or torch's, such as ``"Interleaved1F1B"``; in lower or upper case.
        num_ranks: the number of pipeline ranks, at least 1.
        num_microbatches: the number of microbatches of a step, at least 1.
        options: those of the schedule, by keyword, for example ``stages_per_rank=2``.

    Raises:
        ValueError: for an unknown name or option, or numbers outside the schedule's limits; it says which are.
    """
    return find(name).make(num_ranks, num_microbatches, options)


def find(name: str) -> Family:
    """The family called ``name``, which may be torch's name of it."""
    if not isinstance(name, str):
        raise TypeError(
            f"schedule name: expected a str, found {type(name).__name__} {getattr(name, '__name__', name)}; give the "
            "name of one of list_schedules(), or to Pipeline a Schedule"
        )
    lower = name.lower()
    family = FAMILIES.get(_TORCH_NAMES.get(lower, lower))
    if family is None:
        is_path = Path(name).suffix or len(Path(name).parts) > 1
        hint = ", or Schedule.from_csv for a file (the command reads .csv and .json)" if is_path else ""
        raise ValueError(f"schedule name = {name!r}: there is no such schedule; use one of {', '.join(FAMILIES)}{hint}")
    return family


def list_schedules() -> list[Family]:
    """Every schedule: its name, what it is in a line, its limits and its options. Print one to read it."""
    return list(FAMILIES.values())
