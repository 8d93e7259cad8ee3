"""Schedules and programs that the planning tests share; imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from hypothesis import strategies as st

import fastpipe
from fastpipe import Channel, Instruction, Placement, Program, Schedule

SMALL = [
    ("gpipe", 1, 1, {}),
    ("gpipe", 3, 2, {}),
    ("gpipe", 4, 5, {"reverse_backward": True}),
    ("1f1b", 1, 3, {}),
    ("1f1b", 4, 2, {}),
    ("1f1b", 4, 7, {}),
    ("interleaved_1f1b", 2, 3, {"stages_per_rank": 2}),
    ("interleaved_1f1b", 4, 6, {"stages_per_rank": 2}),
    ("interleaved_1f1b", 3, 7, {"stages_per_rank": 3}),
    ("dualpipev", 1, 2, {}),
    ("dualpipev", 2, 5, {}),
    ("dualpipev", 4, 9, {}),
]
"""(name, ranks, microbatches, options)"""


def hand(orders: Sequence[str], stage_to_rank: Sequence[int], num_microbatches: int) -> Schedule:
    """A schedule written by hand: one string of actions a rank."""
    placement = Placement.custom(stage_to_rank)
    return Schedule.from_actions("mine", placement, num_microbatches, [order.split() for order in orders])


def forward_only(num_ranks: int, num_microbatches: int) -> Schedule:
    """Every rank runs its one stage forward."""
    orders = [[f"{r}F{m}" for m in range(num_microbatches)] for r in range(num_ranks)]
    return Schedule.from_actions("stream", Placement.loop(num_ranks), num_microbatches, orders)


def two_routes(num_ranks: int, num_microbatches: int) -> Schedule:
    """Both routes of a bidirectional placement, one after the other: all forwards, then all backwards."""
    placement = Placement.bidirectional(num_ranks)
    half = num_microbatches // 2
    orders = []
    for rank in range(num_ranks):
        near = [(rank, m) for m in range(half)]
        far = [(num_ranks - 1 - rank, m) for m in range(half, num_microbatches)]
        first, second = (near, far) if rank < num_ranks // 2 else (far, near)
        order = [f"{s}F{m}" for s, m in first + second]
        orders.append(order + [f"{s}B{m}" for s, m in second + first])
    return Schedule.from_actions("both", placement, num_microbatches, orders)


def small_schedules() -> list[Schedule]:
    """Every family, with few and with odd numbers; by hand: forward only, two routes, stage-only actions."""
    found = [fastpipe.make_schedule(n, num_ranks=p, num_microbatches=m, **options) for n, p, m, options in SMALL]
    found += [forward_only(4, 6), two_routes(4, 6)]
    found.append(hand(["0UNSHARD 0F0 0I0 0RESHARD 0W0 0REDUCE_GRAD", "1F0 1I0 1W0"], [0, 1], 1))
    found.append(hand(["0F0 1F0 0F1 1F1 (0F2;1B0)OVERLAP_F_B 1F2 0B0 1B1 0B1 1B2 0B2"], [0, 0], 3))
    return found


@st.composite
def random_schedules(draw: st.DrawFn) -> Schedule:
    """An order drawn at random among those that can run, over a placement drawn at random."""
    num_ranks = draw(st.integers(1, 4))
    stage_to_rank = [*range(num_ranks), *draw(st.lists(st.integers(0, num_ranks - 1), max_size=3))]
    stage_to_rank = draw(st.permutations(stage_to_rank))
    num_microbatches, split = draw(st.integers(1, 4)), draw(st.booleans())
    orders = random_orders(stage_to_rank, num_microbatches, split, draw(st.integers(0, 2**32 - 1)))
    return Schedule.from_actions("random", Placement.custom(stage_to_rank), num_microbatches, orders)


def random_orders(stage_to_rank: Sequence[int], num_microbatches: int, split: bool, seed: int) -> list[list[str]]:
    """Take one action after the other among those whose inputs exist; what can be taken in that order can run."""
    random = np.random.default_rng(seed)
    orders: list[list[str]] = [[] for _ in range(max(stage_to_rank) + 1)]
    last = len(stage_to_rank) - 1
    backward = "I" if split else "B"
    ready = [(0, "F", m) for m in range(num_microbatches)]
    while ready:
        stage, kind, microbatch = ready.pop(int(random.integers(len(ready))))
        orders[stage_to_rank[stage]].append(f"{stage}{kind}{microbatch}")
        if kind == "F":
            ready.append((stage + 1, "F", microbatch) if stage < last else (stage, backward, microbatch))
        elif kind == backward:
            ready += [(stage - 1, backward, microbatch)] if stage else []
            ready += [(stage, "W", microbatch)] if split else []
    return orders


def rebuilt(program: Program, rank: int, change: Callable[[list[Instruction]], None]) -> Program:
    """The program with one rank's instructions changed in place by `change`."""
    instructions = list(program[rank])
    change(instructions)
    rows = np.array([list(map(int, i)) for i in instructions], dtype=np.int32).reshape(-1, 7)
    columns = list(program.columns)
    columns[rank] = np.ascontiguousarray(rows.T)
    return with_columns(program, columns)


def with_columns(
    program: Program, columns: Sequence[np.ndarray], channels: tuple[Channel, ...] | None = None
) -> Program:
    """The program with other columns, and other channels if given."""
    return Program(
        program.name,
        program.placement,
        program.num_microbatches,
        program.channels if channels is None else channels,
        tuple(columns),
        program.forward_only,
    )
