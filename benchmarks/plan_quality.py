"""How good plans are: against every named schedule under the same costs and memory, and against the bound.

python benchmarks/plan_quality.py --ranks 4 8 --worst 12
python benchmarks/plan_quality.py --save before.json     # and later, with another planner
python benchmarks/plan_quality.py --against before.json
python benchmarks/plan_quality.py --proved               # waves where the optimum is known

A case is a number of ranks and microbatches, costs of F, I and W, the latency of a hop, a memory and an objective. Its
opponents are made and timed apart from the planner: every schedule of the registry with one to four stages per rank, as
it is by default and made for the costs and the memory, the searched ones of the zero-bubble papers among them; and the
orders that torch generates, where torch is installed. Those that fit into the memory count. No opponent may be shorter
than the plan, and the plan must not be below its bound: either is an error. How far the plan is above the bound is an
upper bound of what it lacks: the bound itself may not be attainable.

`--proved`: F = I = W, free hops, at least half of 1F1B's memory and an even number of activations: there the bound of
docs/waves.md is attained, so what a plan is above it is lost. In slots of a stage's F.

Seconds are processor seconds of all threads.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import fastpipe
from fastpipe import CostModel, Plan, Schedule
from fastpipe.planner import Memory

SECONDS = {"equal": (1.0, 1.0, 1.0), "1, 1.2, 0.8": (1.0, 1.2, 0.8), "1, 1.5, 0.5": (1.0, 1.5, 0.5)}
HOPS = (0.0, 0.05, 0.1, 0.25, 0.5)
MEMORY = (0.5, 0.625, 0.75, 1.0, 1.5)
DEPTHS = (1, 2, 3, 4)
TORCH = {
    "ScheduleInterleaved1F1B": DEPTHS,
    "ScheduleInterleavedZeroBubble": DEPTHS,
    "ScheduleLoopedBFS": DEPTHS,
    "ScheduleZBVZeroBubble": (2,),
    "ScheduleDualPipeV": (2,),
}
UNEVEN = "a light first stage and a heavy last one"


@dataclass(frozen=True)
class Case:
    """What is planned for; `seconds` of a rank's share."""

    ranks: int
    microbatches: int
    costs: str
    hop: float
    memory: float
    objective: str

    def cost(self, depth: int) -> CostModel:
        """By stage."""
        if self.costs != UNEVEN:
            return CostModel(*(s / depth for s in SECONDS[self.costs]), comm=self.hop)
        count = self.ranks * depth
        weights = [0.6, *[1.0] * (count - 2), 1.4] if count > 2 else [1.0] * count
        return CostModel(*([s / depth * w for w in weights] for s in SECONDS["1, 1.2, 0.8"]), comm=self.hop)

    def plan(self, effort: float) -> Plan:
        """Over all depths; of stages that differ, whose number is given with their costs, two a rank."""
        costs = self.cost(2 if self.costs == UNEVEN else 1)
        return fastpipe.plan(
            costs,
            num_ranks=self.ranks,
            num_microbatches=self.microbatches,
            memory=self.memory,
            objective=self.objective,
            effort=effort,
        )

    def depths(self) -> tuple[int, ...]:
        return (2,) if self.costs == UNEVEN else DEPTHS


@dataclass(frozen=True)
class Examined:
    """A case's plan, the best of its opponents, the bound, and what planning took; bubbles as fractions."""

    case: Case
    value: float
    bubble: float
    bound: float
    name: str
    named: str
    named_value: float
    seconds: float

    @property
    def above(self) -> float:
        """How far above the bound, as a fraction of it."""
        return self.value / self.bound - 1

    @property
    def gained(self) -> float:
        """How much shorter than the best opponent."""
        return 1 - self.value / self.named_value


def cases(ranks: Sequence[int], full: bool) -> Iterator[Case]:
    """All of the grid, or the part of it in which each value meets the others often enough."""
    for p in ranks:
        for number, (m, (costs, hop), memory) in enumerate(
            product((p, 2 * p + 1, 4 * p), product((*SECONDS, UNEVEN), HOPS), MEMORY)
        ):
            objectives = ("makespan", "span") if full else (("makespan", "span")[number % 11 == 0],)
            if full or number % 7 == p % 7:
                for objective in objectives:
                    yield Case(p, m, costs, hop, memory, objective)


@cache
def torch_orders(p: int, m: int) -> tuple[tuple[str, Schedule], ...]:
    """What torch generates; nothing without torch."""
    try:
        from torch.distributed.pipelining import schedules
    except ImportError:
        return ()
    found = []
    for name, depth in ((name, depth) for name, depths in TORCH.items() for depth in depths):
        whole = m % max(1, m // p) == 0 or name in ("ScheduleLoopedBFS", "ScheduleZBVZeroBubble", "ScheduleDualPipeV")
        if not whole or (name == "ScheduleDualPipeV" and m < 2 * p):
            continue
        made: Any = object.__new__(getattr(schedules, name))  # the constructor wants live stages
        made.pp_group_size, made._n_microbatches = p, m
        made.n_local_stages, made._stages = depth, [None] * depth
        made._num_stages = made.num_stages = p * depth
        made.number_of_rounds = max(1, m // p)
        made.microbatches_per_round = m // made.number_of_rounds
        rows = [made._calculate_single_rank_operations(rank) for rank in range(p)]
        texts = [[str(a) for a in row if a is not None and "REDUCE" not in str(a)] for row in rows]
        is_v = name in ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")
        placement = fastpipe.Placement.v(p) if is_v else fastpipe.Placement.loop(p, depth)
        found.append((f"torch's {name}, {depth}", Schedule.from_actions(name, placement, m, texts)))
    return tuple(found)


def named(case: Case) -> Iterator[tuple[str, Schedule]]:
    """Every schedule of the registry, by default, for the costs, and for the memory."""
    yield from torch_orders(case.ranks, case.microbatches)
    numbers = {"num_ranks": case.ranks, "num_microbatches": case.microbatches}
    for family in fastpipe.list_schedules():
        depths = case.depths() if "stages_per_rank" in family.options else (family.stages_per_rank,)
        for depth in depths:
            shape = {"stages_per_rank": depth} if "stages_per_rank" in family.options else {}
            for options in variants(case, family.options, depth):
                try:
                    yield family.name, fastpipe.make_schedule(family.name, **numbers, **shape, **options)
                except ValueError:
                    continue


def variants(case: Case, options: Any, depth: int) -> Iterator[dict[str, Any]]:
    seconds = dict(
        zip(("forward", "backward_input", "backward_weight"), SECONDS.get(case.costs, (1, 1.2, 0.8)), strict=True)
    )
    costs = {name: value / depth for name, value in seconds.items() if name in options}
    costs |= {"comm": case.hop} if "comm" in options else {}
    yield {}
    if costs:
        yield costs
    for name in ("memory", "memory_limit"):
        if name in options:
            yield {**costs, name: int(case.memory * case.ranks * depth + 1e-9)}


def best_named(case: Case) -> tuple[float, str]:
    """The objective of the shortest opponent that fits."""
    found = [(float("inf"), "none fits")]
    for name, schedule in named(case):
        depth = schedule.num_stages // case.ranks
        if depth not in case.depths() or schedule.forward_only:
            continue
        timeline = fastpipe.simulate(schedule, case.cost(depth))
        if max(timeline.peak_activations) <= case.memory * case.ranks * depth + 1e-9:
            found.append((float(getattr(timeline, case.objective)), f"{name}, {depth}"))
    return min(found)


def examine(case: Case, effort: float) -> Examined | None:
    """None where nothing fits."""
    started = time.process_time()
    try:
        plan = case.plan(effort)
    except ValueError:
        value, name = best_named(case)
        if value < float("inf"):
            raise SystemExit(f"{case}: no plan was found, and {name} takes {value}") from None
        return None
    seconds = time.process_time() - started
    value, name = best_named(case)
    found = Examined(case, plan.value, plan.bubble_fraction, plan.bound, plan.chosen.name, name, value, seconds)
    if found.value > value * (1 + 1e-9) or found.value < found.bound * (1 - 1e-9):
        raise SystemExit(f"{found}: shorter than the bound, or longer than an opponent")
    return found


def proved(ranks: Sequence[int], effort: float) -> None:
    """Waves whose optimum is known, and the plan on the same stages."""
    count, missed = 0, []
    for p, v, share in product(ranks, (2, 4, 6), (0.5, 0.625, 0.75, 1.0)):
        k = int(share * p * v) // 2 * 2
        for m in (2 * p, 2 * p + 3, 4 * p):
            if 2 * k < p * v:
                continue
            memory = Memory("activations", k / v)
            numbers = {"num_ranks": p, "num_microbatches": m, "placement": fastpipe.Placement.wave(p, v)}
            made = fastpipe.make_schedule("wave_zb", num_ranks=p, num_microbatches=m, stages_per_rank=v, memory=k)
            least = 3 * m * v + fastpipe.formulas.wave_bubble_bound(k, num_ranks=p, stages_per_rank=v)
            started = time.process_time()
            found = fastpipe.plan(CostModel(), memory=memory, effort=effort, **numbers).makespan * v
            seconds = time.process_time() - started
            count += 1
            if found > least + 1e-6:
                missed.append((p, v, m, k))
                generated = fastpipe.simulate(made).makespan - least
                print(f"  p {p}, v {v}, m {m}, k {k}: plan +{found - least:g}, wave_zb +{generated:g}, {seconds:.2f} s")
    print(f"{count} cases, {count - len(missed)} at the optimum")


def key(case: Case) -> str:
    return f"{case.ranks} {case.microbatches} {case.costs} {case.hop} {case.memory} {case.objective}"


def show(title: str, rows: Sequence[Examined]) -> None:
    """A line a case."""
    print(f"\n{title}")
    heads = ("plan", "bound", "above", "gained")
    print(f"  {'p':>2} {'m':>3} {'F, I, W':<12} {'hop':>5} {'mem.':>5}  {'':<8}" + "".join(f"{h:>10}" for h in heads))
    for one in rows:
        case = one.case
        print(
            f"  {case.ranks:>2} {case.microbatches:>3} {case.costs[:12]:<12} {case.hop:>5} {case.memory:>5}  "
            f"{case.objective:<8}{one.value:>10.3f}{one.bound:>10.3f}{one.above:>10.2%}{one.gained:>10.2%}  "
            f"{one.name}; next {one.named}"
        )


def summary(found: Sequence[Examined]) -> None:
    """Of all cases."""
    count, seconds = len(found), [one.seconds for one in found]
    above, gained = [one.above for one in found], [one.gained for one in found]
    print(f"{count} cases; torch's orders among the opponents: {'yes' if torch_orders(4, 8) else 'no torch here'}")
    print(f"processor seconds of a plan: mean {sum(seconds) / count:.2f}, most {max(seconds):.2f}")
    print(f"at the bound: {sum(one < 1e-9 for one in above)}; above it in the mean {sum(above) / count:.2%}")
    print(f"shorter than all opponents: {sum(one > 1e-9 for one in gained)}, in the mean {sum(gained) / count:.2%}")


def compare(found: Sequence[Examined], before: dict[str, float]) -> None:
    """Ratios of what plans take now and took before."""
    ratios = sorted((one.value / before[key(one.case)], key(one.case)) for one in found if key(one.case) in before)
    if ratios:
        mean = sum(ratio for ratio, _ in ratios) / len(ratios)
        print(f"\nagainst before, {len(ratios)} cases: mean {mean:.5f}, best {ratios[0]}, worst {ratios[-1]}")
        print(f"  longer by more than 0.1 %: {sum(ratio > 1.001 for ratio, _ in ratios)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 5, 6, 8, 12, 16])
    parser.add_argument("--full", action="store_true", help="the whole grid: hours")
    parser.add_argument("--every", type=int, default=1, help="only each n-th case")
    parser.add_argument("--effort", type=float, default=1.0)
    parser.add_argument("--worst", type=int, default=15, help="how many cases are shown (15)")
    parser.add_argument("--save", type=Path, help="keep what plans take")
    parser.add_argument("--against", type=Path, help="compare with what was kept")
    parser.add_argument("--proved", action="store_true", help="waves whose optimum is known, alone")
    chosen = parser.parse_args()
    if chosen.proved:
        return proved(chosen.ranks, chosen.effort)
    found: list[Examined] = []
    for case in list(cases(chosen.ranks, chosen.full))[:: chosen.every]:
        one = examine(case, chosen.effort)
        if one is not None:
            found.append(one)
            print(f"{len(found)} {key(case)}: {one.value:.4f}", file=sys.stderr)
    if not found:
        raise SystemExit("nothing fits in any case")
    summary(found)
    show("farthest above the bound", sorted(found, key=lambda one: -one.above)[: chosen.worst])
    if chosen.save:
        chosen.save.write_text(json.dumps({key(one.case): one.value for one in found}))
    if chosen.against:
        compare(found, json.loads(chosen.against.read_text()))


if __name__ == "__main__":
    main()
