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
    others = [(f"rank {other}", reply) for other, reply in enumerate(replies)]
    others += [(f"the pipeline at {reply['pipeline']}", reply) for reply in steps.control.elsewhere]
    for other, reply in others:
        if reply["digest"] not in (None, replies[0]["digest"]):
            raise ValueError(
                f"plan differs between rank 0 and {other} (measurements, and searches with a time limit, need not end "
                "alike): pass rank 0's plan on every rank, also of the other pipelines of a mesh, or none on other "
                "ranks than 0"
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
            raise ValueError("plan = None on rank 0: pass the result of fastpipe.plan; only other ranks may omit it")
        return {"digest": None, "ways": ways}
    if not isinstance(plan, Plan | Schedule):
        raise TypeError(f"plan is a {type(plan).__name__}: pass the result of fastpipe.plan, or a Schedule")
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
        raise ValueError(
            f"plan is for {new.num_ranks} ranks but the pipeline has {old.num_ranks}: pass the pipeline's costs to plan"
        )
    if old_counts is None and (counts is not None or new.num_stages != old.num_stages):
        raise ValueError(
            f"plan has {new.num_stages} stages but this pipeline was given {old.num_stages} finished stages, which "
            "cannot be partitioned again: plan with the costs of pipe.profile, or build a Pipeline from a list of "
            "layers"
        )
    if counts is None and new.num_stages != old.num_stages:
        raise ValueError(
            f"plan has {new.num_stages} stages but the model is cut into {old.num_stages}: plan with the costs of "
            "pipe.profile, or, for another partition, of pipe.profile_layers"
        )
    if counts is not None and old_counts is not None and sum(counts) != sum(old_counts):
        raise ValueError(
            f"plan is for {sum(counts)} layers but the model has {sum(old_counts)}: pass its costs to plan"
        )


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
        f"plan moves layers to other ranks or changes which stages recompute, which is not possible, as {reason}. To "
        "change only the order, plan with placement=pipe.schedule and the costs of pipe.profile(...). Otherwise save "
        "with fastpipe.save_checkpoint, build a Pipeline with schedule=plan.schedule, partition=plan.partition, "
        "recompute=plan.recompute, and load with fastpipe.load_checkpoint"
    )


def successor(plans: Programs, schedule: Schedule, num_ranks: int) -> Programs:
    """The programs of another schedule for the same transport; the first one is proved."""
    made = Programs(schedule, num_ranks, {}, None, plans.lanes, plans.recv_lookahead, plans.queues)
    made.parallel = plans.parallel
    made.program(schedule.num_microbatches, forward_only=False)
    return made
