"""Agreement on another plan for a running pipeline, and what the plan must keep."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fastpipe.planner import Plan
from fastpipe.runtime.coordination import Reply
from fastpipe.runtime.model import FULL, NONE
from fastpipe.runtime.stage import Stage
from fastpipe.runtime.step import Programs, Steps
from fastpipe.schedule import Schedule

Counts = list[int] | None
"""The number of layers of every stage."""


@dataclass(frozen=True)
class Agreed:
    """The plan of rank 0, on every rank.

    Attributes:
        counts: its partition; None keeps the present one.
        recomputes: for every stage whether it recomputes; None keeps the present choice.
        keeps: whether all stages already do that.
    """

    schedule: Schedule
    counts: Counts
    recomputes: Sequence[bool] | None
    keeps: bool

    def recompute(self, stage: int, module: Any = None) -> str:
        """The recompute policy of a stage, in the form of `Pipeline`."""
        return FULL if self.recomputes is not None and self.recomputes[stage] else NONE


def agree(steps: Steps, plan: Plan | Schedule | None, rank: int) -> Agreed:
    """Distribute the plan of rank 0.

    Args:
        plan: on this rank; optional except on rank 0.

    Raises:
        ValueError: if rank 0 has none, or another rank has a different one.
    """
    replies = steps.all_gather("replan", lambda: _offer(steps, plan, rank))
    for other, reply in enumerate(replies):
        if reply["digest"] not in (None, replies[0]["digest"]):
            raise ValueError(
                f"plan: rank {other} has a different one than rank 0 (with a time limit, a search may stop elsewhere); "
                "plan on rank 0, and call replan() without a plan on the others"
            )
    text = replies[0]["text"]
    schedule = _schedule_of(plan) if plan is not None else Schedule.from_csv(text["csv"], name=text["name"])
    recomputes, ways = text["recomputes"], dict(pair for reply in replies for pair in reply["ways"])
    keeps = recomputes is None or (
        len(recomputes) == len(ways) and all(again == (ways[stage] != NONE) for stage, again in enumerate(recomputes))
    )
    return Agreed(schedule, text["counts"], recomputes, keeps)


def _offer(steps: Steps, plan: Plan | Schedule | None, rank: int) -> Reply:
    """The plan of rank 0, and on all ranks its digest and what their stages recompute."""
    ways = [[stage.index, stage.recompute] for stage in steps.stages]
    if plan is None:
        if rank == 0:
            raise ValueError("plan = None on rank 0: give what fastpipe.plan returned; other ranks may leave it out")
        return {"digest": None, "ways": ways}
    if not isinstance(plan, Plan | Schedule):
        raise TypeError(f"plan is a {type(plan).__name__}: give what fastpipe.plan returned, or a Schedule")
    schedule = _schedule_of(plan).validate()
    partition, recomputes = (None, None) if isinstance(plan, Schedule) else (plan.partition, plan.recomputes)
    counts = None if partition is None else [len(part) for part in partition]
    text = {"csv": schedule.to_csv(), "counts": counts, "name": schedule.name, "recomputes": recomputes}
    digest = hashlib.sha256(json.dumps(text, sort_keys=True).encode()).hexdigest()
    return {"digest": digest, "ways": ways} | ({"text": text} if rank == 0 else {})


def _schedule_of(plan: Plan | Schedule) -> Schedule:
    return (plan if isinstance(plan, Schedule) else plan.schedule).without_transfers()


def check_fits(new: Schedule, counts: Counts, old: Schedule, old_counts: Counts) -> None:
    """Refuse a plan for another pipeline."""
    if new.num_ranks != old.num_ranks:
        raise ValueError(f"plan is for {new.num_ranks} ranks, and the pipeline has {old.num_ranks}: plan for these")
    if old_counts is None and (counts is not None or new.num_stages != old.num_stages):
        raise ValueError(
            f"plan has {new.num_stages} stages of its own partition, and this pipeline was given {old.num_stages} "
            "stages ready made: plan with the costs of these (pipe.profile), or build a Pipeline of a list of layers"
        )
    if counts is None and new.num_stages != old.num_stages:
        raise ValueError(
            f"plan has {new.num_stages} stages, and the model is cut into {old.num_stages}: plan with pipe.profile's "
            "costs, or with pipe.profile_layers's, which allow another partition"
        )
    if counts is not None and old_counts is not None and sum(counts) != sum(old_counts):
        raise ValueError(f"plan is for {sum(counts)} layers, and the model has {sum(old_counts)}: plan with its costs")


def why_not_movable(stages: Sequence[Stage], num_processes: int) -> str | None:
    """Why stages cannot change rank or partition; None if they can."""
    if num_processes > 1:
        return "its ranks are processes"
    if any(stage.parallel is not None for stage in stages):
        return "its stages have replicas"
    return None


def refusal(reason: str) -> ValueError:
    """The error for a plan that moves stages, with the alternatives."""
    return ValueError(
        f"plan moves layers to other ranks, or changes which stages recompute: not possible, as {reason}. To "
        "change the order alone, plan with placement=pipe.schedule and the costs of pipe.profile(...). For more, save "
        "with fastpipe.save_checkpoint, build a Pipeline with schedule=plan.schedule, partition=plan.partition, "
        "recompute=plan.recompute, and load with fastpipe.load_checkpoint"
    )


def successor(plans: Programs, schedule: Schedule, num_ranks: int) -> Programs:
    """The programs of another schedule for the same transport; the first one is proved."""
    made = Programs(schedule, num_ranks, {}, None, plans.lanes, plans.recv_lookahead, plans.queues)
    made.parallel = plans.parallel
    made.program(schedule.num_microbatches, forward_only=False)
    return made
