"""Pipeline: the user's object, and the one place where planning meets running."""

from __future__ import annotations

import contextlib
import logging
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from fastpipe.cost import CostModel
from fastpipe.runtime import native
from fastpipe.runtime.agreement import agreeing, closing_on_error
from fastpipe.runtime.arguments import check_arguments, check_transport, find_num_microbatches, find_num_ranks
from fastpipe.runtime.clip import clip_grad_norm
from fastpipe.runtime.control import Alone, Control, Reply
from fastpipe.runtime.describe import describe
from fastpipe.runtime.executor import executor_class
from fastpipe.runtime.group import membership
from fastpipe.runtime.held_model import HeldModel
from fastpipe.runtime.inputs import Request
from fastpipe.runtime.loopback import Loopback
from fastpipe.runtime.microbatch import Rules
from fastpipe.runtime.modules import (
    Stages,
    build_modules,
    check_device,
    cut_text,
    find_device,
    find_ties,
)
from fastpipe.runtime.pairs import IN_ORDER, describe_pairs, pair_policy
from fastpipe.runtime.plans import Plans, options_with_stages
from fastpipe.runtime.process_group import ProcessGroups
from fastpipe.runtime.processes import Processes
from fastpipe.runtime.random_numbers import PER_MICROBATCH, RandomNumbers
from fastpipe.runtime.ranks import LocalRanks
from fastpipe.runtime.replicas import Replicas, make_replicas, modules_by_rank
from fastpipe.runtime.result import StepResult
from fastpipe.runtime.shared_memory import SharedMemory, between_processes
from fastpipe.runtime.stage import Stage
from fastpipe.runtime.steps import Settings, Steps
from fastpipe.runtime.tied import between_ranks, check_not_apart, make_tied, own_modules, share
from fastpipe.runtime.transport import Transport
from fastpipe.runtime.wrappers import check_parallel, find_data_parallel, replicate
from fastpipe.schedule import Schedule

logger = logging.getLogger("fastpipe")
__all__ = ["Pipeline", "StepResult"]


class Pipeline(HeldModel):
    """A model cut into stages, and the schedule that trains it.

    The same script runs alone (the ranks are threads), and as one process a rank under torchrun; it needs no
    ``if rank ==``.

    Args:
        stages: the model's layers as a list or ``nn.Sequential``, split by ``partition``; or a function
            ``stage_index -> nn.Module``, called for local stages only; or a dict of the local stages.
        schedule: a name of `fastpipe.list_schedules`, or a `fastpipe.Schedule`.
        num_microbatches: how many microbatches a batch is cut into; a step may say otherwise.
        loss_fn: ``loss_fn(output, target)``, one number for a microbatch. Without it the last stage returns the loss
            (alone, or in a dict as ``"loss"``), or `step` gets ``output_grad``.
        num_ranks: the number of ranks; the size of the group unless given. More than there are processes only when
            there is one process: its ranks are then threads.
        stages_per_rank: how many stages a rank holds, for schedules with that option.
        schedule_options: other options of the schedule.
        partition: ``"layers"`` (as many layers a stage as possible alike), ``"parameters"`` (the largest stage as small
            as possible), the number of layers of every stage (``[3, 2, 2, 1]`` or ``"3,2,2,1"``), or the ranges that
            `fastpipe.partition` returns.
        loss_reduction: ``"mean"`` weighs a microbatch by its rows, ``"sum"`` does not; a function gives the weight of
            a target (its tokens, say).
        split: how arguments are cut into microbatches, by name, position or ``"target"``: a dimension (0 unless
            given), ``"replicate"``, or ``function(value, num_microbatches) -> sequence``.
        merge: how outputs are joined, by name or position: a dimension, ``"replicate"`` or a function; False keeps no
            outputs.
        rng: None: torch's generators, so random numbers depend on the order of actions. ``"per_microbatch"``: a stage's
            forward starts from a state derived from ``torch.initial_seed()`` (of now, the same on all ranks),
            `step_count`, the stage and the microbatch, so that they do not depend on schedule, executor or number of
            ranks; the generators are afterwards as they were.
        timeout: seconds to wait for another rank.
        device: what to compute on; that of the stages unless given.
        group: a process group, or a DeviceMesh of one dimension; all processes unless given.
        data_parallel: the replicas of this rank, one in each of several pipelines: a process group, or a DeviceMesh of
            one dimension. Every stage is then wrapped in DistributedDataParallel. Stages may instead come wrapped, in
            that or by ``fully_shard``; either way gradients are averaged over the replicas once a step.
        executor: ``"auto"``, ``"native"`` or ``"python"``.
        transport: ``"loopback"`` (the ranks are threads), ``"shared_memory"`` (processes of one host, on CPU),
            ``"process_group"`` (any), or ``"auto"``: the first of these that can be. The variable FASTPIPE_TRANSPORT
            says what "auto" means for several processes; set it alike for all. Or a
            `fastpipe.runtime.transport.Transport`.
        stage_to_rank: the rank of every stage, where it is not the schedule's own.
        recv_lookahead: how many compute actions ahead receives are posted; see `fastpipe.lower`.
        tied: weights that are one under several names, as in ``[("0.weight", "11.weight")]``: layers that share a
            Parameter are found where ``stages`` is a list; otherwise say so, with names as `named_parameters` has them.
        overlap: how a pair of a forward and a backward (``OVERLAP_F_B``) runs where the modules have no method of their
            own for it: ``"always"`` together, the backward in a helper thread; ``"never"``; or ``"auto"``: whichever
            is measured to be faster, in order where no core is free. The bits are the same.

    Raises:
        ValueError, TypeError: naming the argument, its value and what to set instead.
    """

    def __init__(
        self,
        stages: Stages,
        schedule: str | Schedule,
        num_microbatches: int | None = None,
        loss_fn: Callable[..., Any] | None = None,
        *,
        num_ranks: int | None = None,
        stages_per_rank: int | None = None,
        schedule_options: Mapping[str, Any] | None = None,
        partition: str | Sequence[int] = "layers",
        loss_reduction: str | Callable[[Any], float] = "mean",
        split: Rules = None,
        merge: Rules | bool = None,
        rng: str | None = None,
        timeout: float = 600,
        device: str | torch.device | None = None,
        group: Any = None,
        data_parallel: Any = None,
        executor: str = "auto",
        transport: str | Transport = "auto",
        stage_to_rank: Sequence[int] | None = None,
        recv_lookahead: int | str = 1,
        tied: Sequence[Sequence[str]] | None = None,
        overlap: str = "auto",
    ) -> None:
        check_arguments(loss_fn, loss_reduction, rng, timeout, overlap)
        self.device = find_device(stages, device)
        self._member = membership(group, self.device)
        self.loss_fn = loss_fn
        self._partition = partition
        self._seed = torch.initial_seed() if rng == PER_MICROBATCH else None
        merge_rules: Rules = None if isinstance(merge, bool) else merge
        settings = Settings(loss_fn, loss_reduction, split, merge_rules, keep_outputs=merge is not False)
        store = self._member.store() if self._member.size > 1 else None
        self._control = self._make_control(store, timeout)
        with agreeing(self._control, self._setup_message, self._adopt):
            self.num_ranks = find_num_ranks(num_ranks, schedule, self._member.size)
            lanes = check_transport(transport, self.num_ranks, self._member.size)
            options = options_with_stages(schedule, schedule_options, stages_per_rank)
            self._plans = Plans(schedule, self.num_ranks, options, stage_to_rank, lanes, recv_lookahead)
            self.num_microbatches = find_num_microbatches(num_microbatches, schedule)
            self.schedule = self._plans.schedule(self.num_microbatches)
            self._plans.program(self.num_microbatches, forward_only=False)
            modules = self._build_stages(stages, partition, tied, data_parallel)
            self._executor = executor_class(executor)
        self._pair_policy = pair_policy(overlap, self._num_ranks_here, len(os.sched_getaffinity(0)), self.device)
        random = self._make_random()
        self.transport = self._make_transport(transport, timeout)
        exchange = self.transport.exchange if isinstance(self.transport, ProcessGroups | SharedMemory) else None
        placement = self.schedule.placement

        def copies() -> Replicas:
            return make_replicas(placement, modules, exchange)

        if exchange is not None and between_ranks(self._ties, placement):
            self.transport.prepare_exchange()
        replicas = make_tied(self._ties, self.stage_modules, placement, self._member.rank, exchange, copies)
        ranks = LocalRanks(
            self._stages_by_rank, self._executor, self.transport, timeout, self._control.publish, self._pair_policy.way
        )
        self._reduces = True
        has_backward = self._plans.has_backward(self.num_microbatches)
        self._steps = Steps(
            settings, self._plans, ranks, self._control, replicas, random, forward_only=not has_backward
        )
        self._finalizer = weakref.finalize(self, _close, self._control, ranks)
        logger.info("%s", self.describe())

    def _setup_message(self) -> Reply:
        """What must be the same on every rank, and what all need to know."""
        apart = [list(tie.names) for tie in self._ties if not {*tie.stages} <= self.stage_modules.keys()]
        plan = f"{self.schedule.name} {dict(self.schedule.options)}, {self.num_microbatches} microbatches"
        plan += f", tied {apart}" if apart else ""
        plan += f", {self._cut.partition(';')[0]}" if self._cut else ""
        parallel = any(stage.parallel is not None for stage in self._stages)
        return {"plan": plan, "seed": self._seed, "parallel": parallel}

    def _adopt(self, replies: Sequence[Reply]) -> None:
        """Take in what all said."""
        self._plans.parallel = any(reply["parallel"] for reply in replies)
        self._num_ranks_here = self._count_ranks_here(replies)

    def _make_transport(self, transport: str | Transport, timeout: float) -> Transport:
        if isinstance(transport, Transport):
            return transport
        if self._member.size == 1:
            return Loopback()
        choice = os.environ.get("FASTPIPE_TRANSPORT", "auto") if transport == "auto" else transport
        with closing_on_error(self._control):
            return between_processes(choice, self._control.exchange, self._member, self.device, timeout)

    def _build_stages(
        self, stages: Stages, partition: Any, tied: Any, data_parallel: Any
    ) -> dict[int, dict[int, nn.Module]]:
        """The local stages; their modules by rank."""
        placement = self.schedule.placement
        alone = self._member.size == 1
        ranks = list(range(self.num_ranks)) if alone else [self._member.rank]
        local = sorted({stage for rank in ranks for stage in placement.stages_of(rank)})
        self._cut = cut_text(stages, placement.num_stages, partition)
        self.stage_modules = own_modules(build_modules(stages, placement.num_stages, local, partition))
        check_device(self.stage_modules, self.device)
        self._ties = find_ties(stages, self.stage_modules, placement.num_stages, partition, tied)
        share(self._ties, self.stage_modules)
        if data_parallel is not None:
            self.stage_modules = replicate(self.stage_modules, data_parallel)
        for stage, module in self.stage_modules.items():
            parallel = find_data_parallel(module, stage)
            check_parallel(stage, parallel, len(ranks), placement.num_routes)
            check_not_apart(stage, self._ties, parallel is not None)
        modules = modules_by_rank(placement, ranks, self.stage_modules)
        self._stages_by_rank = {
            rank: {stage: Stage(stage, module, placement.num_stages, self.loss_fn) for stage, module in held.items()}
            for rank, held in modules.items()
        }
        self._stages = [stage for held in self._stages_by_rank.values() for stage in held.values()]
        return modules

    def _count_ranks_here(self, replies: Sequence[Reply]) -> int:
        """How many ranks share this host."""
        if len(replies) == 1:
            return self.num_ranks
        return sum(reply["host"] == replies[self.rank]["host"] for reply in replies)

    def _make_random(self) -> RandomNumbers:
        threads = len(self._stages_by_rank) > 1
        pairs = self._pair_policy.way != IN_ORDER
        runtime = native.load() if self._executor.__name__ == "NativeExecutor" else None
        return RandomNumbers(self._stages, self.device, seed=self._seed, threads=threads, pairs=pairs, runtime=runtime)

    def _make_control(self, store: Any, timeout: float) -> Control:
        return Alone() if store is None else Processes(store, self._member.rank, self._member.size, timeout)

    @property
    def rank(self) -> int:
        """This process's rank in the pipeline; 0 when all ranks are here."""
        return self._member.rank

    @property
    def step_count(self) -> int:
        """How many training steps there were; `rng="per_microbatch"` draws from it, so set it when training resumes."""
        return self._steps.random.step_count

    @step_count.setter
    def step_count(self, count: int) -> None:
        if not isinstance(count, int) or isinstance(count, bool) or not 0 <= count < 2**63:
            raise ValueError(f"step_count = {count!r}: give a whole number of steps, 0 or more, the same on every rank")
        self._steps.random.step_count = count

    @property
    def num_stages(self) -> int:
        """How many stages the model is cut into."""
        return self.schedule.num_stages

    @property
    def is_first(self) -> bool:
        """Whether this process has the first stage."""
        return any(stage.is_first for stage in self._stages)

    @property
    def is_last(self) -> bool:
        """Whether this process has the last stage."""
        return any(stage.is_last for stage in self._stages)

    @property
    def needs_input(self) -> bool:
        """Whether `step` uses its positional arguments here."""
        return self.is_first

    @property
    def needs_target(self) -> bool:
        """Whether `step` uses its target, or output gradient, here."""
        return self.is_last

    def step(
        self,
        *args: Any,
        target: Any = None,
        output_grad: Any = None,
        num_microbatches: int | None = None,
        trace: bool = False,
        **kwargs: Any,
    ) -> StepResult:
        """Forward and backward of one batch; adds to ``.grad``. Called on every rank alike.

        Args:
            args: the model's inputs: whole batches (cut by ``split``), lists of microbatches, or iterators, which are
                consumed only where they are needed.
            target: the loss function's second argument, in the same forms.
            output_grad: gradients of the outputs, in the same forms, instead of a loss.
            num_microbatches: for this step, if not the pipeline's.
            trace: gather the times of all ranks into ``result.timeline``.
            kwargs: keyword arguments, given to every stage whose forward names them.

        Raises:
            ValueError: for wrong input, naming it; on the other ranks StepError.
            StepError: when the step failed on another rank. Where it failed, what was raised there comes through.
        """
        count = self.num_microbatches if num_microbatches is None else num_microbatches
        request = Request(
            args, kwargs, target, output_grad, count, training=not self._steps.forward_only, reduces=self._reduces
        )
        if self._steps.forward_only and output_grad is not None:
            if not self._plans.has_backward(self.num_microbatches):
                raise ValueError(f"output_grad: {self.schedule.name} has no backward; leave it out")
            request = replace(request, training=True)
        return self._steps.run(request, trace)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within this context steps add to the gradients of this replica alone: nothing is reduced over the replicas.

        As `DistributedDataParallel.no_sync`, for several steps an optimizer's step. The first step outside averages
        what all of them added.

        Raises:
            ValueError: where the schedule holds every stage twice and the stages have replicas.
        """
        if self._plans.parallel and self.schedule.placement.num_routes > 1:
            raise ValueError(
                f"no_sync: {self.schedule.name} holds every stage twice, and a step's gradients are summed over the "
                "holders apart from those of earlier steps; let every step reduce, or use a schedule with one route"
            )
        before, self._reduces = self._reduces, False
        try:
            yield
        finally:
            self._reduces = before

    def eval_step(
        self, *args: Any, target: Any = None, num_microbatches: int | None = None, trace: bool = False, **kwargs: Any
    ) -> StepResult:
        """Forward alone, without gradients; the loss too when a target is given. Arguments as for `step`."""
        count = self.num_microbatches if num_microbatches is None else num_microbatches
        return self._steps.run(Request(args, kwargs, target, None, count, training=False), trace)

    def profile(self, *args: Any, target: Any = None, **kwargs: Any) -> CostModel:
        """Measure the costs of the stages on one batch; gradients are left as they were. Arguments as for `step`."""
        kept = [(parameter, parameter.grad) for parameter in self.parameters()]
        step_count = self.step_count
        for parameter, _ in kept:
            parameter.grad = None
        try:
            result = self.step(*args, target=target, trace=True, **kwargs)
        finally:
            for parameter, grad in kept:
                parameter.grad = grad
            self.step_count = step_count
        return CostModel.from_timeline(result.timeline)

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Scale the gradients so that the norm of all of them together is at most ``max_norm``.

        What `torch.nn.utils.clip_grad_norm_` does to the unsplit model, and on a CPU the same to the last bit. Called
        on every rank alike, between `step` and the optimizer. A stage that two ranks hold counts once, and so does a
        gradient that FSDP spread over processes (that one to rounding only).

        Args:
            max_norm: at least 0; ``float("inf")`` only measures.
            norm_type: the p of the p-norm, or ``"inf"``.
            error_if_nonfinite: whether a norm that is infinite or NaN is an error. Otherwise a warning is logged,
                which names the gradients, and they are scaled by that norm.

        Returns:
            The norm before clipping, the same on every rank.

        Raises:
            StepError: for such a norm, naming parameter, stage and rank; gradients are left as they were. Or when
                another rank could not take part.
            ValueError: for a wrong argument, or one that is not the same on every rank.
        """
        return clip_grad_norm(
            self._steps, self._named_parameters(), self.device, max_norm, norm_type, error_if_nonfinite
        )

    def describe(self) -> str:
        """What runs here and how, in a few lines."""
        program = self._plans.program(self.num_microbatches, forward_only=False)
        ranks = {rank: list(stages) for rank, stages in self._stages_by_rank.items()}
        name = self._executor.__name__
        with self._steps.replicas.in_place():
            text = describe(
                self.schedule, program, ranks, name, self.transport, self._stages, self._seed, self._ties, self._cut
            )
        counts = self._steps.ranks.pair_counts()
        if not self._plans.has_pairs(self.num_microbatches) and not counts.total:
            return text
        fused = sorted({stage.index for stage in self._stages if stage.fuses})
        return f"{text}\npairs       {describe_pairs(self._pair_policy, fused, counts)}"

    def __repr__(self) -> str:
        return f"<Pipeline {self.schedule.name}: {self.num_ranks} ranks, {self.num_stages} stages>"


def _close(control: Control, ranks: LocalRanks) -> None:
    control.close()
    ranks.close()
