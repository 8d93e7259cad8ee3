"""What no schedule of these ranks can be below, whatever its placement and partition."""

from __future__ import annotations

from fastpipe.planner.model import Problem, Setting


def lower_bound(problem: Problem, setting: Setting) -> float:
    """Seconds of the objective, for the number of microbatches that was chosen."""
    cost, stages = setting.cost, setting.placement.num_stages
    split = cost.per_stage("backward_input", stages) + cost.per_stage("backward_weight", stages)
    backward = cost.per_stage("backward", stages).clip(max=split)
    forward = cost.per_stage("forward", stages)
    return float((forward + backward).sum()) * setting.num_microbatches / problem.num_ranks
