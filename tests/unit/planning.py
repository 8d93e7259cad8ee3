"""Schedules and programs that the planning tests share; imports no torch."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

import fastpipe
from fastpipe import Channel, Instruction, Placement, Program, Schedule
from fastpipe.planner import engine
from fastpipe.planner.tasks import Ints, Tasks

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


def improved(tasks: Tasks, order: Ints, *, span: bool, seed: int, attempts: int, hot: float, cold: float) -> Any:
    """The best order that an annealing finds, and its objective; None if the order given cannot run or fit."""
    if not engine.is_native():
        pytest.skip("annealing needs the planning library")
    search = engine.search(tasks, order, span=span, seed=seed)
    if search is None:
        return None
    search.improve(attempts, hot, cold)
    return search.found()


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
def random_schedules(draw: st.DrawFn, *, pairs: bool = False, in_order: bool = False) -> Schedule:
    """An order drawn at random among those that can run, over a placement drawn at random.

    Args:
        draw: hypothesis's.
        pairs: let a forward and a backward that a rank could run as well be one action, now and then.
        in_order: let all stages run the backwards, whole or split, in one order of the microbatches, which is drawn.
    """
    num_ranks = draw(st.integers(1, 4))
    stage_to_rank = [*range(num_ranks), *draw(st.lists(st.integers(0, num_ranks - 1), max_size=3))]
    stage_to_rank = draw(st.permutations(stage_to_rank))
    num_microbatches = draw(st.integers(1, 4))
    seed = draw(st.integers(0, 2**32 - 1))
    options = {"split": draw(st.sampled_from(["never", "always", "at random"])), "pairs": pairs, "in_order": in_order}
    orders = random_orders(stage_to_rank, num_microbatches, seed, **options)
    return Schedule.from_actions("random", Placement.custom(stage_to_rank), num_microbatches, orders)


def random_orders(
    stage_to_rank: Sequence[int],
    num_microbatches: int,
    seed: int,
    *,
    split: str = "never",
    pairs: bool = False,
    in_order: bool = False,
) -> list[list[str]]:
    """Take one action after the other among those whose inputs exist; what can be taken in that order can run."""
    drawn = _Drawn(len(stage_to_rank), num_microbatches, np.random.default_rng(seed), split, in_order)
    orders: list[list[str]] = [[] for _ in range(max(stage_to_rank) + 1)]
    while ready := drawn.ready():
        first = ready[int(drawn.random.integers(len(ready)))]
        rank, partner = stage_to_rank[first[0]], None
        if pairs and first[1] == "F" and drawn.random.random() < 0.5:
            partner = next((a for a in ready if a[1] == "B" and stage_to_rank[a[0]] == rank), None)
        texts = ["{}{}{}".format(*action) for action in (first, partner) if action is not None]
        orders[rank].append(f"({';'.join(texts)})OVERLAP_F_B" if partner else texts[0])
        drawn.made |= {first} | ({partner} if partner else set())
    return orders


class _Drawn:
    """What has been taken of a random order, and what may come next."""

    def __init__(
        self, num_stages: int, num_microbatches: int, random: np.random.Generator, split: str, in_order: bool
    ) -> None:
        self.random = random
        self.num_stages = num_stages
        self.made: set[tuple[int, str, int]] = set()
        order = random.permutation(num_microbatches)
        # the microbatch whose backwards come first
        self.before = {int(b): int(a) for a, b in itertools.pairwise(order)} if in_order else {}
        likely = {"never": 0.0, "at random": 0.5, "always": 1.0}[split]
        self.actions = []
        for stage in range(self.num_stages):
            for microbatch in range(num_microbatches):
                kinds = "FIW" if random.random() < likely else "FB"
                self.actions += [(stage, kind, microbatch) for kind in kinds]

    def ready(self) -> list[tuple[int, str, int]]:
        return [action for action in self.actions if action not in self.made and self._may_come(*action)]

    def _may_come(self, stage: int, kind: str, microbatch: int) -> bool:
        if kind == "F":
            return stage == 0 or (stage - 1, "F", microbatch) in self.made
        before = self.before.get(microbatch)
        if before is not None and not self._is_done(stage, "I" if kind == "I" else "W", before):
            return False
        if kind == "W":
            return (stage, "I", microbatch) in self.made
        last = stage == self.num_stages - 1
        return (stage, "F", microbatch) in self.made and (last or self._is_done(stage + 1, "I", microbatch))

    def _is_done(self, stage: int, kind: str, microbatch: int) -> bool:
        return not self.made.isdisjoint({(stage, "B", microbatch), (stage, kind, microbatch)})


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
