"""Writes the tables and pictures of docs/waves.md, so that every number on that page comes from the code.

    python docs/write_waves.py              rewrite them, between their marks
    python docs/write_waves.py --check      say whether they are current

`make lint` runs the check. Nothing here needs torch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

from pages import finish, with_blocks

import fastpipe
from fastpipe import CostModel, Schedule, formulas

PAGE = Path(__file__).with_name("waves.md")
RANKS, MICROBATCHES = 8, 32
MEMORIES = (0.5, 0.625, 0.75, 1.0)
Costs = tuple[float, float, float, float]
"""F, I, W of a rank's share of the model, and a hop."""
EVEN: Costs = (1.0, 1.0, 1.0, 0.0)


def cost_of(costs: Costs, stages_per_rank: int) -> CostModel:
    """The costs of a stage."""
    forward, inputs, weights, comm = costs
    return CostModel(forward / stages_per_rank, inputs / stages_per_rank, weights / stages_per_rank, comm)


def idle(schedule: Schedule, costs: Costs) -> float:
    """Makespan less the work of a rank."""
    per_rank = schedule.num_stages // schedule.num_ranks
    return fastpipe.simulate(schedule, cost_of(costs, per_rank)).makespan - MICROBATCHES * sum(costs[:3])


@cache
def capped(name: str, stages_per_rank: int, memory: float, costs: Costs = EVEN, form: str = "") -> float:
    """The idle time of a schedule built within a memory, for the costs."""
    cost = cost_of(costs, stages_per_rank)
    options = {"form": form} if form else {}
    schedule = fastpipe.make_schedule(
        name,
        num_ranks=RANKS,
        num_microbatches=MICROBATCHES,
        stages_per_rank=stages_per_rank,
        memory=memory,
        forward=cost.forward,
        backward_input=cost.backward_input,
        backward_weight=cost.backward_weight,
        comm=cost.comm,
        **options,
    )
    return idle(schedule, costs)


@cache
def best_v(memory: float, costs: Costs) -> tuple[float, str]:
    """The least idle time of a V in the memory, and whose it is."""
    cost = cost_of(costs, 2)
    numbers = {"num_ranks": RANKS, "num_microbatches": MICROBATCHES}
    found = [(capped("wave_zb", 2, memory, costs), "wave_zb")]
    named = [fastpipe.make_schedule(name, **numbers) for name in ("v_half", "v_min")]
    if memory >= 1:
        seconds = {key: getattr(cost, key) for key in ("forward", "backward_input", "backward_weight", "comm")}
        named.append(fastpipe.make_schedule("zbv", **numbers, **seconds))
    for schedule in named:
        if max(fastpipe.simulate(schedule).peak_activations) <= memory * 2 * RANKS:
            found.append((idle(schedule, costs), schedule.name))
    return min(found)


def table(header: str, rows: Iterator[str]) -> str:
    """A table of Markdown: the first column to the left, numbers to the right."""
    columns = header.count("|") - 1
    return "\n".join([header, "|---|" + "---:|" * (columns - 1), *rows])


def change(ours: float, theirs: float) -> str:
    """By how much ours is less."""
    return f"{100 * (ours / theirs - 1):+.0f} %"


def attained() -> str:
    """Idle time of waves of four stages, the bound, and Vs in the same memory."""

    def rows() -> Iterator[str]:
        for memory in MEMORIES:
            vee, wave, loop = capped("wave_zb", 2, memory), capped("wave_zb", 4, memory), capped("loop_zb", 4, memory)
            least = formulas.wave_bubble_bound(int(memory * 32), num_ranks=RANKS, stages_per_rank=4, unit=0.25)
            yield f"| {memory:g} | {vee:g} | {wave:g} | {least:g} | {change(wave, vee)} | {loop:g} |"

    return table("| memory | V | wave of 4 | its bound | against the V | loop of 4 |", rows())


def latency() -> str:
    """The forms where hops take time, or costs differ."""

    def rows() -> Iterator[str]:
        for text, costs in (
            ("hop 0.05", (1.0, 1.0, 1.0, 0.05)),
            ("1, 1.15, 0.75", (1.0, 1.15, 0.75, 0.0)),
            ("1, 1.3, 0.7, hop 0.05", (1.0, 1.3, 0.7, 0.05)),
        ):
            for memory in MEMORIES:
                forms = [capped("wave_zb", 4, memory, costs, form) for form in ("compact", "slack", "even")]
                vee, name = best_v(memory, costs)
                loop = capped("loop_zb", 4, memory, costs)
                numbers = " | ".join(f"{number:.1f}" for number in (*forms, vee))
                yield f"| {text} | {memory:g} | {numbers} ({name}) | {change(min(forms), vee)} | {loop:.1f} |"

    return table("| costs | memory | compact | slack | even | best V | against it | loop of 4 |", rows())


def cell(kind: str, microbatch: int) -> str:
    """A slot in a picture."""
    return f"{kind}{microbatch}"


def picture(width: int, offsets: list[tuple[int, int]], rounds: list[tuple[int, str]], ranks: int) -> str:
    """Ranks by slots: every round in the slots of its two passes."""
    slots: list[dict[int, str]] = [{} for _ in range(ranks)]
    for tick, name in rounds:
        for rank, passes in enumerate(offsets):
            for offset in passes:
                assert width * tick + offset not in slots[rank]
                slots[rank][width * tick + offset] = name
    length = max(max(row) for row in slots) + 1
    head = "slot   " + " ".join(f"{slot:<2}" for slot in range(length))
    lines = [
        f"rank {rank} " + " ".join(row.get(slot, ".").ljust(2) for slot in range(length))
        for rank, row in enumerate(slots)
    ]
    return "```text\n" + "\n".join(line.rstrip() for line in [head, *lines]) + "\n```"


def compact_rounds() -> str:
    """Three rounds that start at ticks 0, 1 and 2 on four ranks."""
    offsets = [(rank, 7 - rank) for rank in range(4)]
    return picture(2, offsets, [(0, "a"), (1, "b"), (2, "c")], 4)


def slack_rounds() -> str:
    """The same with three slots a tick."""
    offsets = [(2 * rank, 10 - rank) for rank in range(4)]
    return picture(3, offsets, [(0, "a"), (1, "b"), (2, "c")], 4)


def even_rounds() -> str:
    """Rounds of F and of I at an even pace."""
    offsets = [(-(-3 * rank // 2), -(-3 * (7 - rank) // 2)) for rank in range(4)]
    return picture(3, offsets, [(0, "a"), (1, "b"), (2, "c")], 4)


BLOCKS: dict[str, Callable[[], str]] = {
    block.__name__: block for block in (attained, latency, compact_rounds, slack_rounds, even_rounds)
}


def main() -> int:
    """Write the page, or check it."""
    return finish(PAGE, with_blocks(PAGE.read_text(encoding="utf-8"), BLOCKS))


if __name__ == "__main__":
    sys.exit(main())
