"""How fast planning is: against torch's own planner, its growth with the number of actions, and one very large plan.

python benchmarks/plan_scale.py            # against torch (where it is installed), and the growth
python benchmarks/plan_scale.py --large    # 1,024 ranks x 2 stages x 4,096 microbatches: about 5 GB of memory

Seconds are processor seconds: all of it is one thread, and so they do not depend on what else the machine does.
"""

from __future__ import annotations

import argparse
import gc
import math
import resource
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import fastpipe
from fastpipe import Schedule, native_plan, validate_program, validate_schedule
from fastpipe.lower import lower
from fastpipe.simulate import simulate_program

Result = TypeVar("Result")
Seconds = dict[str, float]

COMPARED = (32, 4, 256)
"""Ranks, stages per rank, microbatches; interleaved 1F1B, as everywhere here."""
LARGE = (1024, 2, 4096)
GROWTH = [(64, 2, microbatches) for microbatches in (64, 128, 256, 512, 1024, 2048)]


def timed(seconds: Seconds, name: str, call: Callable[[], Result]) -> Result:
    """Run it and note how long it took under its name."""
    start = time.process_time()
    result = call()
    seconds[name] = time.process_time() - start
    return result


def plan(ranks: int, stages: int, microbatches: int) -> tuple[Seconds, int, int]:
    """Every phase once: seconds by phase, compute actions, instructions."""
    seconds: Seconds = {}
    schedule: Schedule = timed(
        seconds,
        "generate",
        lambda: fastpipe.make_schedule(
            "interleaved_1f1b", num_ranks=ranks, num_microbatches=microbatches, stages_per_rank=stages
        ),
    )
    timed(seconds, "validate", lambda: validate_schedule(schedule))
    program = timed(seconds, "lower", lambda: lower(schedule))
    timed(seconds, "validate program", lambda: validate_program(program))
    timeline = timed(seconds, "simulate", lambda: simulate_program(program))
    assert timeline.makespan >= 3 * stages * microbatches  # the busiest rank's work
    return seconds, schedule.num_actions, program.num_instructions


def best(runs: int, call: Callable[[], tuple[Seconds, int, int]]) -> tuple[Seconds, int, int]:
    """Of several runs the fastest of every phase."""
    found = [call() for _ in range(runs)]
    return {name: min(seconds[name] for seconds, *_ in found) for name in found[0][0]}, *found[0][1:]


def plan_with_torch(ranks: int, stages: int, microbatches: int) -> tuple[Seconds, int]:
    """The same phases of torch's planner, as far as it has them, and its actions with transfers."""
    from unittest import mock

    from torch.distributed.pipelining import schedules
    from torch.distributed.pipelining.stage import PipelineStage

    stage = mock.create_autospec(PipelineStage, instance=True)
    stage.group_rank, stage.group_size, stage.submod, stage.num_stages = 0, ranks, None, stages * ranks
    # its constructor generates and lowers; the phases are then run again, one by one
    made: Any = schedules.ScheduleInterleaved1F1B([stage] * stages, microbatches)
    seconds: Seconds = {}
    orders = timed(
        seconds, "generate", lambda: {rank: made._calculate_single_rank_operations(rank) for rank in range(ranks)}
    )
    computes = {rank: [action for action in order if action is not None] for rank, order in orders.items()}
    lowered = timed(seconds, "lower", lambda: schedules._add_send_recv(computes, lambda s: s % ranks, stages * ranks))
    count = sum(map(len, lowered.values()))
    timed(seconds, "simulate", lambda: schedules._simulate_comms_compute(lowered, lambda s: s % ranks, stages * ranks))
    return seconds, count


def compare() -> None:
    """Both planners on one plan, in this process."""
    ranks, stages, microbatches = COMPARED
    print(f"interleaved 1F1B, {ranks} ranks x {stages} stages x {microbatches} microbatches")
    try:
        theirs, count = plan_with_torch(*COMPARED)
    except ImportError:
        print("  torch is not installed: nothing to compare with\n")
        return
    mine, _, _ = best(3, lambda: plan(*COMPARED))
    print(f"  {count:,} actions with transfers in torch's form; seconds:")
    print(f"  {'':<18}{'torch':>9}{'fastpipe':>10}{'ratio':>8}")
    for name, seconds in mine.items():
        other = f"{theirs[name]:>9.3f}" if name in theirs else f"{'-':>9}"
        ratio = f"{theirs[name] / seconds:>7.0f}x" if name in theirs else ""
        print(f"  {name:<18}{other}{seconds:>10.4f}{ratio}")
    total = sum(mine.values())
    print(f"  {'all':<18}{sum(theirs.values()):>9.3f}{total:>10.4f}{sum(theirs.values()) / total:>7.0f}x\n")


def slope(actions: Sequence[int], seconds: Sequence[float]) -> float:
    """The exponent: slope of the least-squares line through the logarithms."""
    x, y = [math.log(a) for a in actions], [math.log(s) for s in seconds]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    above = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    return above / sum((a - mean_x) ** 2 for a in x)


def growth() -> None:
    """Seconds by size, and the exponent of each phase."""
    found = [best(3, lambda size=size: plan(*size)) for size in GROWTH]
    names = list(found[0][0])
    print(f"growth, {GROWTH[0][0]} ranks x {GROWTH[0][1]} stages; seconds:")
    print(f"  {'actions':>12}" + "".join(f"{name:>18}" for name in names) + f"{'all':>10}")
    for seconds, actions, _ in found:
        cells = "".join(f"{seconds[name]:>18.4f}" for name in names)
        print(f"  {actions:>12,}{cells}{sum(seconds.values()):>10.4f}")
    sizes = [actions for _, actions, _ in found]
    slopes = "".join(f"{slope(sizes, [seconds[name] for seconds, *_ in found]):>18.2f}" for name in names)
    print(f"  {'exponent':>12}{slopes}{slope(sizes, [sum(seconds.values()) for seconds, *_ in found]):>10.2f}\n")


def large() -> None:
    """One plan of the largest size, with its peak memory."""
    ranks, stages, microbatches = LARGE
    gc.disable()  # nothing here is a cycle, and a collection would be counted
    start = time.perf_counter()
    seconds, actions, instructions = plan(*LARGE)
    elapsed = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"interleaved 1F1B, {ranks:,} ranks x {stages} stages x {microbatches:,} microbatches:")
    print(f"  {actions:,} compute actions, {instructions:,} instructions")
    for name, value in seconds.items():
        print(f"  {name:<18}{value:>8.2f} s")
    print(f"  {'all':<18}{sum(seconds.values()):>8.2f} s ({elapsed:.0f} s by the clock), at most {peak:.1f} GiB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--large", action="store_true", help="the very large plan alone")
    chosen = parser.parse_args()
    print(native_plan.status() + "\n")
    if chosen.large:
        large()
    else:
        compare()
        growth()


if __name__ == "__main__":
    main()
