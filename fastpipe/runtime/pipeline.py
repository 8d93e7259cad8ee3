"""Pipeline: the user's object, and the one place where planning meets running."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn, Self

import torch
from torch import nn

from fastpipe.cost import CostModel
from fastpipe.hardware_queues import VARIABLE
from fastpipe.placement import is_whole
from fastpipe.planner import LayerCosts, Plan
from fastpipe.runtime.arguments import (
    Arguments,
    BatchArguments,
    ExecutionArguments,
    ModelArguments,
    ScheduleArguments,
)
from fastpipe.runtime.common import ForkGuard
from fastpipe.runtime.construction import (
    LocalStages,
    agree_on_stages,
    build_stages,
    connect,
    find_world,
    make_engine,
    plan_build,
)
from fastpipe.runtime.coordination import Control, building
from fastpipe.runtime.data_parallel import unwrapped
from fastpipe.runtime.describe import describe, pairs_text
from fastpipe.runtime.executor import LocalRanks
from fastpipe.runtime.model import NONE, Named, Policy, Stages, first_names, named_parameters, state_prefix
from fastpipe.runtime.stage import ContextFactory
from fastpipe.runtime.step import (
    GradNorms,
    MetricRules,
    Programs,
    Request,
    Rules,
    StepResult,
    clip_grad_norm,
    gather,
)
from fastpipe.runtime.transport import Transport
from fastpipe.runtime.tune import Measured, profile, replanning
from fastpipe.schedule import Schedule

logger = logging.getLogger("fastpipe")
__all__ = ["Pipeline", "StepResult"]


class Pipeline:
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
        mesh: instead of ``group``, a DeviceMesh of several dimensions, of which the pipeline is along ``"pp"``. The
            others belong to the modules: ``"tp"`` and ``"ep"`` to layers that are spread, those that begin with
            ``"dp"`` and ``"cp"`` to the stages' wrappers. A stage whose gradients would not be averaged over the latter
            is refused. Ranks that differ in ``"tp"``, ``"ep"`` or ``"pp"`` alone are given the same batch.
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

    Attributes:
        schedule: what runs.
        num_ranks: the number of ranks.
        num_microbatches: into how many microbatches a batch is cut.
        stage_modules: the modules of this process's stages, by index.
        transport: how the ranks exchange tensors.
        device: what is computed on.
        loss_fn, grad_dtype: as given.

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
        mesh: Any = None,
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
        arguments = Arguments(
            ModelArguments(
                stages, partition, example, tied, recompute, grad_dtype, fused_weight_grad, data_parallel, device
            ),
            ScheduleArguments(
                schedule, num_microbatches, num_ranks, stages_per_rank, schedule_options, stage_to_rank, recv_lookahead
            ),
            BatchArguments(loss_fn, loss_reduction, metrics, split, merge, rng),
            ExecutionArguments(
                executor, transport, timeout, group, mesh, overlap, forward_context, backward_context, cuda_graph
            ),
        )
        world = find_world(arguments)
        with building(world.control) as undo:
            plan = plan_build(arguments, world)
            model, local, made_by = agree_on_stages(arguments, plan, world)
            self.transport = connect(arguments, world, made_by)
            undo.append(self.transport.abort)
            self.device, self.loss_fn, self.grad_dtype = world.device, loss_fn, grad_dtype
            self.num_ranks = plan.num_ranks
            self._arguments, self._world, self._build, self._executor = arguments, world, plan, made_by
            self._reduces, self._grad_norms = True, GradNorms()
            self._start(model, local, plan.programs, plan.num_microbatches)
        logger.info("%s", self.describe())

    def _start(self, model: ModelArguments, local: LocalStages, programs: Programs, num_microbatches: int) -> None:
        """Run these stages by these programs from now on."""
        engine = make_engine(
            self._arguments,
            programs,
            num_microbatches,
            self._build.seed,
            local,
            self._world,
            self.transport,
            self._executor,
        )
        self._model, self._local, self._engine = model, local, engine
        self._steps, self._stages, self._ties = engine.steps, local.stages, local.ties
        self.stage_modules = local.modules
        self._follow(programs, num_microbatches)
        self._finalizer = weakref.finalize(self, _close, self._world.control, engine.steps.ranks, ForkGuard())

    def _follow(self, programs: Programs, num_microbatches: int) -> None:
        self._programs, self.num_microbatches = programs, num_microbatches
        self.schedule = programs.schedule(num_microbatches)

    def step(
        self,
        *args: Any,
        target: Any = None,
        output_grad: Any = None,
        num_microbatches: int | None = None,
        trace: bool = False,
        gather_outputs: bool = False,
        index: int | None = None,
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
            gather_outputs: whether every rank gets the outputs, and not only those with the last stage.
            index: the number of the batch, counted as you like. Ranks whose numbers differ raise; without it they find
                out only where they were given the same argument.
            kwargs: keyword arguments, given to every stage whose forward names them.

        Raises:
            ValueError: for wrong input, naming it; on the other ranks StepError.
            StepError: when the step failed on another rank. Where it failed, what was raised there comes through.
        """
        count = self.num_microbatches if num_microbatches is None else num_microbatches
        request = Request(
            args,
            kwargs,
            target,
            output_grad,
            count,
            training=not self._steps.forward_only,
            reduces=self._reduces,
            gathers_outputs=gather_outputs,
            index=index,
        )
        if self._steps.forward_only and output_grad is not None:
            if not self._programs.has_backward(self.num_microbatches):
                raise ValueError(f"output_grad: {self.schedule.name} has no backward; leave it out")
            request = replace(request, training=True)
        return self._run(request, trace)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within this context steps add to the gradients of this replica alone: nothing is reduced over the replicas.

        As `DistributedDataParallel.no_sync`, for several steps an optimizer's step. The first step outside averages
        what all of them added.

        Raises:
            ValueError: where the schedule holds every stage twice and the stages have replicas.
        """
        if self._programs.parallel and self.schedule.placement.num_routes > 1:
            raise ValueError(
                f"no_sync: {self.schedule.name} holds every stage twice, and a step's gradients are summed over the "
                "holders apart from those of earlier steps; let every step reduce, or use a schedule with one route"
            )
        before, self._reduces = self._reduces, False
        try:
            yield
        finally:
            self._reduces = before

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
                which names the gradients, and they are scaled by that norm. (With a `fastpipe.GradScaler`, which skips
                such steps, it is logged as information.)

        Returns:
            The norm before clipping, the same on every rank.

        Raises:
            StepError: for such a norm, naming parameter, stage and rank; gradients are left as they were. Or when
                another rank could not take part.
            ValueError: for a wrong argument, or one that is not the same on every rank.
        """
        named = self._named_parameters()
        return clip_grad_norm(
            self._steps, self._grad_norms, named, self.device, max_norm, norm_type, error_if_nonfinite
        )

    def eval_step(
        self,
        *args: Any,
        target: Any = None,
        num_microbatches: int | None = None,
        trace: bool = False,
        gather_outputs: bool = False,
        index: int | None = None,
        **kwargs: Any,
    ) -> StepResult:
        """Forward alone, without gradients; the loss too when a target is given. Arguments as for `step`.

        Nothing is kept, and no gradient is touched, so it may come between a step and its optimizer. Whether dropout
        and BatchNorm train is the modules' own affair: see `eval` and `train`.
        """
        count = self.num_microbatches if num_microbatches is None else num_microbatches
        request = Request(
            args, kwargs, target, None, count, training=False, gathers_outputs=gather_outputs, index=index
        )
        return self._run(request, trace)

    def _run(self, request: Request, trace: bool) -> StepResult:
        if request.gathers_outputs and self._arguments.batch.merge is False:
            raise ValueError("gather_outputs: merge=False keeps no outputs; leave one of them out")
        result = self._steps.run(self._with_target(request), bool(trace))
        if request.gathers_outputs:
            result.found = gather(self._steps, self._world.member, self.device, result.found)
        return result

    def _with_target(self, request: Request) -> Request:
        """A loss of a model that takes its target by a name finds it among the keyword arguments."""
        name = getattr(self.loss_fn, "target_name", "")
        if request.target is not None or name not in request.kwargs:
            return request
        kwargs = {other: value for other, value in request.kwargs.items() if other != name}
        return replace(request, target=request.kwargs[name], kwargs=kwargs)

    @property
    def step_count(self) -> int:
        """How many training steps there were; `rng="per_microbatch"` draws from it, so set it when training resumes."""
        return self._steps.random.step_count

    @step_count.setter
    def step_count(self, count: int) -> None:
        if not is_whole(count) or count >= 2**63:
            raise ValueError(f"step_count = {count!r}: give a whole number of steps, 0 or more, the same on every rank")
        self._steps.random.step_count = int(count)

    @property
    def rank(self) -> int:
        """This process's rank in the pipeline; 0 when all ranks are here."""
        return self._world.member.rank

    @property
    def num_stages(self) -> int:
        """How many stages the model is cut into."""
        return int(self.schedule.num_stages)

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

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of this process's stages."""
        for _, parameter in self.named_parameters():
            yield parameter

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The same with their names in the whole model; a tied weight once, under its first name."""
        for named in self._named_parameters():
            yield named.name, named.parameter

    def _named_parameters(self) -> list[Named]:
        return list(named_parameters(self.stage_modules, first_names(self._ties)))

    def state_dict(self) -> dict[str, Any]:
        """The state of this process's stages, under the keys of the whole model."""
        state: dict[str, Any] = {}
        for stage, module in sorted(self.stage_modules.items()):
            own = unwrapped(module)
            state.update(own.state_dict(prefix=state_prefix(own, stage)))
        for tie in self._ties:
            # of tied shards the first is the one that is trained
            first, *others = [name for name in tie.names if name in state] or [""]
            state.update({name: state[first] for name in others})
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the local part of a state under the keys of the whole model.

        Raises:
            KeyError: for a key that is missing; where all stages are here, also for one that no stage has.
            TypeError: for what is no state.
        """
        if not isinstance(state, Mapping):
            raise TypeError(f"state is a {type(state).__name__}: give what state_dict() of the model returns")
        taken: set[str] = set()
        for stage, wrapped in self.stage_modules.items():
            module = unwrapped(wrapped)
            prefix = state_prefix(module, stage)
            own = module.state_dict()
            missing = [prefix + key for key in own if prefix + key not in state]
            if missing:
                raise KeyError(f"the state has no {missing[0]!r}, which stage {stage} needs; its keys are the model's")
            module.load_state_dict({key: state[prefix + key] for key in own})
            taken.update(prefix + key for key in own)
        left = [key for key in state if key not in taken]
        if left and len(self.stage_modules) == self.schedule.num_stages:
            raise KeyError(f"the state has {left[0]!r}, which is of no stage: is it of another model?")

    def train(self, mode: bool = True) -> Self:
        """Put the local stages into training mode, or out of it."""
        for module in self.stage_modules.values():
            module.train(mode)
        return self

    def eval(self) -> Self:
        """Put the local stages into evaluation mode."""
        return self.train(False)

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
        modules, parameters = self.stage_modules.values(), list(self.parameters())
        return profile(
            self._steps,
            call,
            modules,
            parameters,
            inputs=inputs,
            num_steps=num_steps,
            by_layer=by_layer,
            num_microbatches=count,
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
        agreed = replanning.agree(self._steps, plan, self.rank)
        schedule, counts = agreed.schedule, agreed.counts
        present = self._local.layer_counts
        replanning.check_fits(schedule, counts, self.schedule, present)
        programs = replanning.successor(self._programs, schedule, self.num_ranks)
        moves = schedule.placement.routes != self.schedule.placement.routes
        if moves or counts not in (None, present) or not agreed.keeps:
            reason = replanning.why_it_stays(self._stages, self._world.member.size)
            if reason is not None:
                raise replanning.refusal(reason)
            recompute = self._model.recompute if agreed.keeps else agreed.recompute
            self._rebuild(
                programs, schedule, replace(self._model, recompute=recompute, partition=counts or present or "layers")
            )
        else:
            self._follow(programs, schedule.num_microbatches)
            self._steps.follow(programs, forward_only=not programs.has_backward(schedule.num_microbatches))
        logger.info("%s", self.describe())

    def _rebuild(self, programs: Programs, schedule: Schedule, model: ModelArguments) -> None:
        """The same layers as other stages on the ranks of this process."""
        present = self._local
        pieces = dict(self.stage_modules) if present.layers is None else present.layers
        model = replace(model, stages=pieces, tied=present.declared_ties)
        step_count = self._steps.random.step_count
        self._finalizer.detach()
        self._steps.ranks.retire()
        local = build_stages(replace(model, data_parallel=None), self.loss_fn, schedule, self._build, self._world)
        self._start(model, local, programs, schedule.num_microbatches)
        self._steps.random.step_count = step_count

    def describe(self) -> str:
        """What runs here and how, in a few lines."""
        steps, engine = self._steps, self._engine
        program = self._programs.program(self.num_microbatches, forward_only=False)
        ranks = {rank: list(stages) for rank, stages in self._local.by_rank.items()}
        name, seed, cut = self._executor.__name__, self._build.seed, self._local.cut
        with steps.replicas.in_place():
            text = describe(self.schedule, program, ranks, name, self.transport, self._stages, seed, self._ties, cut)
        if self._programs.queues is not None:
            text += f"\nqueues      proved for {self._programs.queues} of the hardware's ({VARIABLE})"
        if where := str(self._world.cores):
            text += f"\ncores       {where}"
        if self._world.control.remark:
            text += f"\ncontrol     {self._world.control.remark}"
        if self._arguments.execution.cuda_graph:
            text += f"\ncuda graph  {steps.ranks.recording_text() or 'no: ' + engine.graph_refusal}"
        counts = steps.ranks.pair_counts()
        if not self._programs.has_pairs(self.num_microbatches) and not counts.total:
            return text
        usage = steps.random.in_pairs()
        return f"{text}\npairs       {pairs_text(engine.pair_policy, program, self._local.by_rank, counts, usage)}"

    def __repr__(self) -> str:
        return f"<Pipeline {self.schedule.name}: {self.num_ranks} ranks, {self.num_stages} stages>"

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "a Pipeline cannot be copied or pickled, since it has threads and connections: copy or pickle its layers "
            "or its state_dict(), or use fastpipe.save_checkpoint"
        )


def _close(control: Control, ranks: LocalRanks, home: ForkGuard) -> None:
    if home.here:
        control.close()
        ranks.close()
