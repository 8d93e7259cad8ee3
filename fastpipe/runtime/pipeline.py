"""Pipeline: the user's object, and the one place where planning meets running."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from fastpipe._version import __version__
from fastpipe.runtime import native
from fastpipe.runtime.arguments import (
    alike_text,
    asked_transport,
    check_arguments,
    check_loss_parameters,
    check_transport,
    checked_timeout,
    find_num_microbatches,
    find_num_ranks,
)
from fastpipe.runtime.common import ForkGuard, set_grad_dtype, wants_streams
from fastpipe.runtime.coordination import Alone, Control, Postponed, Processes, Reply, agreeing, building
from fastpipe.runtime.data_parallel import check_not_sharded, check_parallel, find_data_parallel, replicate
from fastpipe.runtime.describe import describe, pairs_text
from fastpipe.runtime.executor import LocalRanks, RecordedRanks, executor_class, why_not
from fastpipe.runtime.model import (
    MEASURED,
    NONE,
    Policy,
    StageCopies,
    Stages,
    between_ranks,
    build_modules,
    check_alike,
    check_device,
    costs_here,
    cut_by,
    cut_text,
    find_device,
    find_ties,
    from_torch,
    group_of,
    kinds_of_ties,
    layer_counts,
    make_copies,
    make_tied,
    modules_by_rank,
    named_as_held,
    names_message,
    own_modules,
    prefixes_message,
    prefixes_of,
    share,
    tell_later,
    way_of,
)
from fastpipe.runtime.replannable import Replannable
from fastpipe.runtime.stage import (
    IN_ORDER,
    PER_MICROBATCH,
    ContextFactory,
    RandomNumbers,
    Stage,
    TreespecCache,
    checked_contexts,
    pair_policy,
)
from fastpipe.runtime.step import (
    GradNorms,
    MetricRules,
    Plans,
    Rules,
    Settings,
    StepResult,
    Steps,
    check_split_and_merge,
    options_with_stages,
)
from fastpipe.runtime.training import Trains
from fastpipe.runtime.transport import (
    Loopback,
    Mixed,
    ProcessGroups,
    SharedMemory,
    Transport,
    membership,
    ranks_per_host,
    select_transport,
)
from fastpipe.schedule import Schedule

logger = logging.getLogger("fastpipe")
__all__ = ["Pipeline", "StepResult"]


class Pipeline(Trains, Replannable):
    """A model cut into stages, and the schedule that trains it.

    The same script runs alone (the ranks are threads), and as one process a rank under torchrun; it needs no
    ``if rank ==``.

    Args:
        stages: the model's layers as a list or ``nn.Sequential``, split by ``partition``; or a function
            ``stage_index -> nn.Module``, called for local stages only; or a dict of the local stages; or the local
            ``PipelineStage`` objects of torch.distributed.pipelining, or its ``Pipe``.
        schedule: a name of `fastpipe.list_schedules`, or a `fastpipe.Schedule`.
        num_microbatches: how many microbatches a batch is cut into; a step may say otherwise.
        loss_fn: ``loss_fn(output, target)``, and by name what layers `carry`: one number for a microbatch, or that and
            metrics: ``(loss, dict)``, or all in one dict with ``"loss"``. Without it the last stage returns the loss
            (alone, or in a dict under ``"loss"``), or `step` gets ``output_grad``.
        num_ranks: the number of ranks; the size of the group unless given. More than there are processes only when
            there is one process: its ranks are then threads.
        stages_per_rank: how many stages a rank holds, for schedules with that option.
        schedule_options: other options of the schedule.
        partition: ``"layers"`` (as many layers a stage as possible alike), ``"parameters"`` (the largest stage as small
            as possible), ``"flops"``, ``"seconds"`` or ``"memory"`` (the same, by `fastpipe.layer_costs` of the
            ``example``; rank 0's decide), the number of layers of every stage (``[3, 2, 2, 1]`` or ``"3,2,2,1"``), or
            the ranges that `fastpipe.partition` returns.
        example: one microbatch as the first layer takes it, or a tuple of arguments, where ``partition`` needs it.
        loss_reduction: ``"mean"`` weighs a microbatch by its rows, ``"sum"`` does not; a function gives the weight of
            a target (its tokens, say).
        metrics: how the metrics of the loss function are reduced over microbatches, for all or by name: ``"mean"``
            (weighed as a mean loss is), ``"sum"``, ``"list"``, or a function of the list.
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
        executor: ``"native"`` (C++), ``"python"`` (the reference: on CPUs, over threads or process groups), or
            ``"auto"``: native where the extension can be loaded.
        transport: ``"loopback"`` (the ranks are threads), ``"shared_memory"`` (processes of one host, on CPU),
            ``"process_group"`` (any), or ``"auto"``: channel by channel the first of these that can be; of processes
            with the Python executor process groups alone.
            ``"cuda_ipc"``: processes of one host copy from GPU to GPU by copy engines; experimental, and never chosen.
            ``"process_group_coalesced"``: sends and receives between two ranks that are due at one time are one
            operation (NCCL). The variable FASTPIPE_TRANSPORT says what "auto" means for several processes; set it
            alike for all. Or a `fastpipe.runtime.transport.transport.Transport`.
        stage_to_rank: the rank of every stage, where it is not the schedule's own.
        recv_lookahead: how many compute actions ahead receives are posted; see `fastpipe.lower`. A transport that
            coalesces has its own rule.
        recompute: what stages do not keep for their backward but compute again: ``"none"``, ``"full"`` (each stage as a
            whole: it keeps its input), ``"layers"`` (each layer of a list by itself), or a function
            ``(stage index, module)`` that returns one of these. The bits are the same.
        grad_dtype: what gradients are summed in and ``.grad`` is, where that is not the parameters' dtype:
            ``torch.float32`` for bf16 parameters. Clipping takes them as they are, and so has the optimizer to.
        fused_weight_grad: W adds a linear's weight gradient to ``.grad`` by the matrix product that makes it, which
            saves a temporary and a pass over memory, but rounds differently: docs/training.md says when.
        tied: weights that are one under several names, as in ``[("0.weight", "11.weight")]``: layers that share a
            Parameter are found where ``stages`` is a list; otherwise say so: the stage's number, and the name in it.
        overlap: how a pair of a forward and a backward (``OVERLAP_F_B``) runs where the modules have no method of their
            own for it: ``"always"`` together, the backward in a helper thread; ``"never"``; or ``"auto"``: whichever
            is measured to be faster, in order where no core is free. The bits are the same.
        forward_context: a function of what `fastpipe.current` gives, which returns a context manager to be put around
            every F: the module and its loss.
        backward_context: the same around every B, I and W.
        cuda_graph: steps are recorded once for each look of their inputs, as a CUDA graph, and replayed; where that
            cannot be they run as ever, and `describe` says why. docs/training.md says what it changes.

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
        example: Any = None,
        loss_reduction: str | Callable[[Any], float] = "mean",
        metrics: MetricRules = "mean",
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
        recompute: Policy = NONE,
        forward_context: ContextFactory | None = None,
        backward_context: ContextFactory | None = None,
        grad_dtype: torch.dtype | None = None,
        fused_weight_grad: bool = False,
        cuda_graph: bool = False,
    ) -> None:
        postponed = Postponed()
        timeout = postponed.value(lambda: checked_timeout(timeout), 600.0)
        self.device = postponed.value(lambda: find_device(stages, device), torch.device("cpu"))
        self._member = membership(group_of(stages) if group is None else group, self.device, timeout)
        self.loss_fn = loss_fn
        self._partition = partition
        self._recompute, self.grad_dtype, self._fused_weight_grad = recompute, grad_dtype, fused_weight_grad
        self._unit = MEASURED.get(partition, "") if isinstance(partition, str) else ""
        self._also_alike = alike_text(transport, loss_reduction, grad_dtype)
        self._seed = torch.initial_seed() if rng == PER_MICROBATCH else None
        merge_rules: Rules = None if isinstance(merge, bool) else merge
        settings = Settings(loss_fn, loss_reduction, split, merge_rules, merge is not False, metrics, self.device)
        store = self._member.store() if self._member.size > 1 else None
        self._ranks_per_host = ranks_per_host(timeout)
        self._control = self._make_control(store, timeout)
        with building(self._control) as undo:
            with agreeing(self._control, self._plan_message, self._adopt_plan):
                postponed.refuse()
                switches = (fused_weight_grad, cuda_graph)
                check_arguments(loss_fn, loss_reduction, metrics, rng, overlap, recompute, grad_dtype, *switches)
                check_split_and_merge(split, merge_rules)
                self._contexts = checked_contexts(forward_context, backward_context)
                self.num_ranks = find_num_ranks(num_ranks, schedule, self._member.size)
                self._ranks_per_host.join(self.num_ranks if self._member.size == 1 else 1)
                lanes = check_transport(transport, self.num_ranks, self._member.size, executor)
                options = options_with_stages(schedule, schedule_options, stages_per_rank)
                plans = Plans(schedule, self.num_ranks, options, stage_to_rank, lanes, recv_lookahead)
                self._settle(plans, find_num_microbatches(num_microbatches, schedule))
                check_loss_parameters(loss_fn, self.schedule)
                self._costs = costs_here(stages, partition, example, self._member.rank)
            with agreeing(self._control, self._setup_message, self._adopt, part="stages"):
                self._partition = cut_by(partition, self._costs, self.schedule.num_stages)
                modules = self._build_stages(stages, self._partition, tied, data_parallel)
                self._executor = executor_class(executor, self.device)
            self.transport = self._make_transport(transport, timeout)
            undo.append(self.transport.abort)
            self._settings, self._timeout, self._overlap, self._cuda_graph = settings, timeout, overlap, cuda_graph
            self._reduces, self._grad_norms = True, GradNorms()
            self._join(modules)
        logger.info("%s", self.describe())

    def _settle(self, plans: Plans, num_microbatches: int) -> None:
        """Make the schedule, and prove its program, for so many microbatches."""
        self._plans, self.num_microbatches = plans, num_microbatches
        self.schedule = plans.schedule(num_microbatches)
        plans.program(num_microbatches, forward_only=False)

    def _join(self, modules: dict[int, dict[int, nn.Module]]) -> None:
        """Make of modules, programs and a transport what runs steps."""
        streams = wants_streams(self.device, self._overlap, self._stages_by_rank.values())
        cores = len(os.sched_getaffinity(0))
        self._pair_policy = pair_policy(self._overlap, self._ranks_per_host.count(), cores, self.device, streams)
        random = self._make_random()
        exchange = self.transport.exchange if isinstance(self.transport, ProcessGroups | SharedMemory | Mixed) else None
        placement = self.schedule.placement

        def copies() -> StageCopies:
            return make_copies(placement, modules, exchange)

        if exchange is not None and between_ranks(self._ties, placement):
            self.transport.prepare_exchange()
        replicas = make_tied(self._ties, self.stage_modules, placement, self._member.rank, exchange, copies)
        self._graph_refusal = why_not(self.device, self._stages_by_rank, self.transport, replicas)
        if self._cuda_graph and self._graph_refusal:
            logger.warning("cuda_graph: %s; steps run as ever", self._graph_refusal)
        ranks = (RecordedRanks if self._cuda_graph and not self._graph_refusal else LocalRanks)(
            self._stages_by_rank,
            self._executor,
            self.transport,
            self._timeout,
            self._control.publish,
            self._pair_policy.way,
            self.device,
            streams,
        )
        has_backward = self._plans.has_backward(self.num_microbatches)
        self._steps = Steps(
            self._settings, self._plans, ranks, self._control, replicas, random, forward_only=not has_backward
        )
        # not all ranks need all others until here, and nobody is to wait in a step for one that has no pipeline
        self._control.exchange("joining", {})
        self._finalizer = weakref.finalize(self, _close, self._control, ranks, ForkGuard())

    def _plan_message(self) -> Reply:
        """What must be the same on every rank before there are stages; what rank 0 says by which they are cut."""
        plan = f"{self.schedule.name} {dict(self.schedule.options)}, {self.num_microbatches} microbatches"
        plan += f", cut by {self._unit}" if self._unit else ""
        plan += self._also_alike
        if self._member.size > 1:
            program = self._plans.program(self.num_microbatches, forward_only=False)
            plan += f", recv_lookahead {self._plans.recv_lookahead}, stages on ranks {program.placement.routes}"
            plan += f", program {program.digest()}, fastpipe {__version__}"
        return {"plan": plan, "seed": self._seed, "costs": self._costs}

    def _adopt_plan(self, replies: Sequence[Reply]) -> None:
        self._costs = replies[0]["costs"]

    def _setup_message(self) -> Reply:
        """What must be the same on every rank, and what all need to know."""
        apart = [list(tie.names) for tie in self._ties if between_ranks([tie], self.schedule.placement)]
        plan = self._plan_message()["plan"]
        plan += f", tied {apart}" if apart else ""
        plan += f", {self._cut.partition(';')[0]}" if self._cut else ""
        parallel = any(stage.parallel is not None for stage in self._stages)
        kinds = kinds_of_ties(self._ties, self.stage_modules)
        names, prefixes = names_message(self._stages), prefixes_message(self.stage_modules)
        common = {"plan": plan, "seed": self._seed, "parallel": parallel}
        return {**common, "tied": kinds, "names": names, "prefixes": prefixes}

    def _adopt(self, replies: Sequence[Reply]) -> None:
        """Take in what all said."""
        check_alike([reply["tied"] for reply in replies])
        self._ties = named_as_held(self._ties, prefixes_of(reply["prefixes"] for reply in replies))
        self._plans.parallel = any(reply["parallel"] for reply in replies)
        tell_later(self._stages, [reply["names"] for reply in replies])

    def _make_transport(self, transport: str | Transport, timeout: float) -> Transport:
        if isinstance(transport, Transport):
            return transport
        if self._member.size == 1:
            return Loopback()
        choice = asked_transport(transport)
        member = replace(self._member, lost=self._control.lost)
        exchange, by_python = self._control.exchange, self._executor.__name__ == "PythonExecutor"
        return select_transport(choice, exchange, member, self.device, timeout, self._ranks_per_host.count(), by_python)

    def _build_stages(
        self, stages: Stages, partition: Any, tied: Any, data_parallel: Any
    ) -> dict[int, dict[int, nn.Module]]:
        """The local stages; their modules by rank."""
        placement = self.schedule.placement
        stages, tied = from_torch(stages, placement.num_stages, tied)
        alone = self._member.size == 1
        ranks = list(range(self.num_ranks)) if alone else [self._member.rank]
        local = sorted({stage for rank in ranks for stage in placement.stages_of(rank)})
        self._cut = cut_text(stages, placement.num_stages, partition, self._unit, self._costs)
        self._layer_counts = layer_counts(stages, placement.num_stages, partition)
        self._declared_ties = tied
        self._layers = stages if alone and self._layer_counts is not None else None
        self.stage_modules = own_modules(build_modules(stages, placement.num_stages, local, partition))
        check_device(self.stage_modules, self.device)
        self._ties = find_ties(stages, self.stage_modules, placement.num_stages, partition, tied)
        share(self._ties, self.stage_modules)
        if data_parallel is not None:
            self.stage_modules = replicate(self.stage_modules, data_parallel)
        for stage, module in self.stage_modules.items():
            parallel = find_data_parallel(module, stage)
            check_parallel(stage, parallel, len(ranks), placement.num_routes)
        modules = modules_by_rank(placement, ranks, self.stage_modules)
        self._stages_by_rank = {
            rank: {stage: self._stage(stage, module, placement.num_stages) for stage, module in held.items()}
            for rank, held in modules.items()
        }
        self._stages = [stage for held in self._stages_by_rank.values() for stage in held.values()]
        for made in self._stages:
            made.bare = data_parallel is not None and made.parallel is None
        if alone:
            self._ties = named_as_held(self._ties, prefixes_of([prefixes_message(self.stage_modules)]))
            tell_later(self._stages, [names_message(self._stages)])
        return modules

    def _stage(self, index: int, module: nn.Module, num_stages: int) -> Stage:
        recompute = way_of(self._recompute, index, module)
        stage = Stage(index, module, num_stages, self.loss_fn, recompute, self._contexts)
        if self.device.type != "cpu":
            stage.plans = TreespecCache(index, self.device)
        stage.fused_weight_grad, stage.grad_dtype = self._fused_weight_grad, self.grad_dtype
        if self.grad_dtype is not None:
            check_not_sharded(index, stage.parallel, self.grad_dtype)
            set_grad_dtype(module, self.grad_dtype)
        return stage

    def _make_random(self) -> RandomNumbers:
        threads = len(self._stages_by_rank) > 1
        pairs = self._pair_policy.way != IN_ORDER
        runtime = native.load() if self._executor.__name__ == "NativeExecutor" else None
        return RandomNumbers(self.device, seed=self._seed, threads=threads, pairs=pairs, runtime=runtime)

    def _make_control(self, store: Any, timeout: float) -> Control:
        if store is None:
            return Alone()
        member = self._member
        return Processes(store, member.rank, member.size, timeout, self._ranks_per_host, member.identity)

    def describe(self) -> str:
        """What runs here and how, in a few lines."""
        program = self._plans.program(self.num_microbatches, forward_only=False)
        ranks = {rank: list(stages) for rank, stages in self._stages_by_rank.items()}
        name = self._executor.__name__
        with self._steps.replicas.in_place():
            text = describe(
                self.schedule, program, ranks, name, self.transport, self._stages, self._seed, self._ties, self._cut
            )
        if self._control.remark:
            text += f"\ncontrol     {self._control.remark}"
        if self._cuda_graph:
            text += f"\ncuda graph  {self._steps.ranks.recording_text() or 'no: ' + self._graph_refusal}"
        counts = self._steps.ranks.pair_counts()
        if not self._plans.has_pairs(self.num_microbatches) and not counts.total:
            return text
        usage = self._steps.random.in_pairs()
        return f"{text}\npairs       {pairs_text(self._pair_policy, program, self._stages_by_rank, counts, usage)}"

    def __repr__(self) -> str:
        return f"<Pipeline {self.schedule.name}: {self.num_ranks} ranks, {self.num_stages} stages>"


def _close(control: Control, ranks: LocalRanks, home: ForkGuard) -> None:
    if home.here:
        control.close()
        ranks.close()
