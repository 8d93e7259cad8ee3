"""Writes the table of docs/choosing-a-schedule.md: plans beside the best schedules of the registry.

    python docs/write_choosing.py               rewrite the table (less than half a minute)

Nothing here needs torch.
"""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path

from pages import finish, with_blocks

import fastpipe
from fastpipe import Candidate, CostModel, Plan

PAGE = Path(__file__).with_name("choosing-a-schedule.md")
RANKS, MICROBATCHES, EFFORT = 8, 32, 1.0
COSTS = {
    "1, 1, 1; 0": CostModel(),
    "1, 1.2, 0.8; 0.05": CostModel(1.0, 1.2, 0.8, comm=0.05),
    "1, 1.1, 0.9; 0.2": CostModel(1.0, 1.1, 0.9, comm=0.2),
}
HEADER = ("F, I, W; transfer", "memory", "best named schedule", "bubble", "plan", "bubble", "bound")
MEMORY = (0.5, 0.75, 1.0, 1.5)


def table() -> str:
    """One row a memory and cost model."""
    lines = [
        f"| {' | '.join(HEADER)} |",
        "|" + "---|" * len(HEADER),
    ]
    for text, costs in COSTS.items():
        for memory in MEMORY:
            lines.append(row(text, memory, plan(costs, memory)))
    return "\n".join(lines)


@cache
def plan(costs: CostModel, memory: float) -> Plan:
    """The plan of a row."""
    return fastpipe.plan(costs, num_ranks=RANKS, num_microbatches=MICROBATCHES, memory=memory, effort=EFFORT)


def best_named(found: Plan) -> Candidate:
    """The best schedule of the registry in the memory."""
    fitting = [one for one in found.candidates if one.fits and not one.name.startswith("plan")]
    return min(fitting, key=lambda one: one.makespan)


def gain() -> str:
    """How much shorter a step is by the plan, at most."""
    plans = [plan(costs, memory) for costs in COSTS.values() for memory in MEMORY]
    return f"{max(1 - found.makespan / best_named(found).makespan for found in plans):.1%}"


def row(text: str, memory: float, found: Plan) -> str:
    """A row of the table."""
    best = best_named(found)
    work = found.makespan * (1 - found.bubble_fraction)
    chosen = found.chosen
    start = chosen.name.removeprefix("plan from ")
    name = "the same" if chosen.name == best.name else "its order improved" if start == best.name else start
    cells = (
        *(text, f"{memory:g}", f"`{best.name.removesuffix(' for the costs')}`", f"{best.bubble_fraction:.2%}"),
        *(name, f"{chosen.bubble_fraction:.2%}", f"{max(0.0, 1 - work / found.bound):.2%}"),
    )
    return f"| {' | '.join(cells)} |"


def main() -> int:
    """Put the table between its marks."""
    return finish(PAGE, with_blocks(PAGE.read_text(encoding="utf-8"), {"plans": table, "gain": gain}))


if __name__ == "__main__":
    sys.exit(main())
