"""Replannable: a pipeline that measures what its stages cost, and goes on by another plan."""

from __future__ import annotations

import logging
import weakref
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from fastpipe.cost import CostModel
from fastpipe.planner import LayerCosts, Plan
from fastpipe.runtime.model import Policy, Stages
from fastpipe.runtime.stage import Stage
from fastpipe.runtime.step import LocalModelState, Plans, StepResult, Steps
from fastpipe.runtime.transport import Membership
from fastpipe.runtime.tune import Measured, profile, replanning
from fastpipe.schedule import Schedule

logger = logging.getLogger("fastpipe")


class Replannable(LocalModelState):
    """The part of `fastpipe.Pipeline` that is about plans.

    Attributes:
        schedule: what runs.
        num_ranks: how many ranks there are.
        num_microbatches: into how many microbatches a batch is cut.
    """

    schedule: Schedule
    num_ranks: int
    num_microbatches: int
    _steps: Steps
    _plans: Plans
    _stages: list[Stage]
    _member: Membership
    _partition: Any
    _recompute: Policy
    _layers: Stages | None
    _layer_counts: list[int] | None
    _declared_ties: Sequence[Sequence[str]] | None
    _finalizer: weakref.finalize[Any, Any]

    @abstractmethod
    def step(self, *args: Any, **kwargs: Any) -> StepResult:
        """Forward and backward of one batch."""

    @abstractmethod
    def eval_step(self, *args: Any, **kwargs: Any) -> StepResult:
        """Forward alone."""

    @abstractmethod
    def describe(self) -> str:
        """What runs, in a few lines."""

    @abstractmethod
    def _build_stages(
        self, stages: Stages, partition: Any, tied: Any, data_parallel: Any
    ) -> dict[int, dict[int, nn.Module]]:
        """The local stages; their modules by rank."""

    @abstractmethod
    def _join(self, modules: dict[int, dict[int, nn.Module]]) -> None:
        """Make of modules, programs and a transport what runs steps."""

    def profile(self, *args: Any, target: Any = None, num_steps: int = 3, **kwargs: Any) -> CostModel:
        """Measure what the stages cost with one batch: what `fastpipe.plan` asks for. Called on every rank alike.

        Seconds are medians over `num_steps` traced steps, after one to warm up. A pass without backward then meters
        what stages hold and hand on, in bytes. Where the schedule runs whole backwards, I and W share B's time in the
        proportion that this pass finds. Latency and bandwidth are told apart where messages differ in size; otherwise
        all of a transfer is latency. Gradients, buffers, torch's generators and `step_count` are left as they were.

        Args:
            args: as for `step`, but no iterators.
            target: as for `step`.
            num_steps: how many steps are traced.
            kwargs: as for `step`.

        Returns:
            The same on every rank.
        """
        return self._measured(args, target, kwargs, num_steps, by_layer=False).stage_costs()

    def profile_layers(self, *args: Any, target: Any = None, num_steps: int = 3, **kwargs: Any) -> LayerCosts:
        """The same by layer, so that a plan may cut the model otherwise; for pipelines made from a list of layers.

        Layers share the seconds of their stage in the proportion in which they take time by themselves. Bytes of
        parameters are those of weights and gradients: what the optimizer keeps is for the caller to add.
        """
        return self._measured(args, target, kwargs, num_steps, by_layer=True).layer_costs()

    def _measured(
        self, args: tuple[Any, ...], target: Any, kwargs: Mapping[str, Any], num_steps: int, *, by_layer: bool
    ) -> Measured:
        def call(training: bool, trace: bool) -> StepResult:
            run = self.step if training else self.eval_step
            return run(*args, target=target, trace=trace, **kwargs)

        inputs = (*args, target, *kwargs.values())
        count = int(kwargs.get("num_microbatches") or self.num_microbatches)
        return profile(
            self, self._steps, call, inputs=inputs, num_steps=num_steps, by_layer=by_layer, num_microbatches=count
        )

    def replan(self, plan: Plan | Schedule | None = None) -> None:
        """Train on by another plan, from the next step on. Called on every rank alike, between steps.

        A plan for the same stages on the same ranks changes the order of the work and nothing else. Where all ranks
        are threads of this process it may also cut the layers otherwise, put stages elsewhere or have other ones
        recompute: parameters, optimizers and checkpoints do not notice. Loss and gradients are those of the new
        schedule.

        Args:
            plan: what `fastpipe.plan` returned, or a schedule. Only rank 0 has to give one; a rank that gives another
                one is refused.

        Raises:
            ValueError: for a plan that does not fit this pipeline, or moves layers where they cannot move; it says how
                to go on. The pipeline is then as it was.
        """
        agreed = replanning.agree(self._steps, plan, self._member.rank)
        schedule, counts = agreed.schedule, agreed.counts
        replanning.check_fits(schedule, counts, self.schedule, self._layer_counts)
        plans = replanning.successor(self._plans, schedule, self.num_ranks)
        moves = schedule.placement.routes != self.schedule.placement.routes
        if moves or counts not in (None, self._layer_counts) or not agreed.keeps:
            reason = replanning.why_it_stays(self._stages, self._member.size)
            if reason is not None:
                raise replanning.refusal(reason)
            if not agreed.keeps:
                self._recompute = agreed.recompute
            self._rebuild(plans, schedule, counts or self._layer_counts)
        else:
            self._plans, self.schedule, self.num_microbatches = plans, schedule, schedule.num_microbatches
            self._steps.follow(plans, forward_only=not plans.has_backward(schedule.num_microbatches))
        logger.info("%s", self.describe())

    def _rebuild(self, plans: Plans, schedule: Schedule, counts: list[int] | None) -> None:
        """The same layers as other stages on the ranks of this process."""
        pieces = dict(self.stage_modules) if self._layers is None else self._layers
        step_count = self._steps.random.step_count
        self._finalizer.detach()
        self._steps.ranks.retire()
        self._plans, self.schedule, self.num_microbatches = plans, schedule, schedule.num_microbatches
        self._partition = counts or "layers"
        self._join(self._build_stages(pieces, self._partition, self._declared_ties, None))
        self._steps.random.step_count = step_count
