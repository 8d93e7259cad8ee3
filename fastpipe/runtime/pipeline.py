"""Pipeline: training, evaluation, profiling and replanning of a model that is split into stages."""

from __future__ import annotations

import contextlib
import logging
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn, Self

import torch
from torch import nn

from fastpipe.checks import check_counts, check_flags, is_whole
from fastpipe.cost import CostModel
from fastpipe.planner import LayerCosts, Plan
from fastpipe.runtime import native
from fastpipe.runtime.arguments import Arguments, ModelArguments
from fastpipe.runtime.construction import (
    BuildRequest,
    LocalStages,
    agree_on_request,
    agree_on_stages,
    build_stages,
    compare_replicas,
    connect,
    find_world,
    make_steps,
)
from fastpipe.runtime.coordination import Control, Reply, building
from fastpipe.runtime.data_parallel import unwrapped
from fastpipe.runtime.describe import WITHOUT_EXTENSION, describe
from fastpipe.runtime.model import (
    NONE,
    NamedTensor,
    Policy,
    Stages,
    as_inputs,
    assignable,
    check_equal,
    check_spread_alike,
    find_device,
    first_names,
    named_parameters,
    state_prefix,
)
from fastpipe.runtime.stage import ContextFactory
from fastpipe.runtime.step import (
    GradNorms,
    MetricRules,
    Programs,
    Request,
    Rules,
    StepResult,
    clip_grad_norm,
    gather_outputs,
)
from fastpipe.runtime.transport import Transport
from fastpipe.runtime.tune import Units, agree_on_plan, check_fits, check_movable, costs_by_layer, profile, stage_costs
from fastpipe.schedule import Schedule
from fastpipe.timeline import Timeline

logger = logging.getLogger("fastpipe")
__all__ = ["Pipeline", "StepResult"]


_MODULES = "it is no nn.Module; the modules of this process's stages are in stage_modules"
_TRAIN = "step(x, target=y) runs the forward and backward of a batch; then call optimizer.step() yourself"
_MOVE = "pass device= to Pipeline, or convert or compile the layers before you pass them"
_CLOSE = "there is nothing to call: it ends when nothing refers to it any more (del pipe)"
_ELSEWHERE = {
    **dict.fromkeys(("modules", "named_modules", "children", "buffers", "named_buffers", "module", "apply"), _MODULES),
    **dict.fromkeys(("requires_grad_", "register_forward_hook", "register_full_backward_hook"), _MODULES),
    **dict.fromkeys(("forward", "backward", "train_batch", "train_step", "training_step"), _TRAIN),
    **dict.fromkeys(("to", "cuda", "cpu", "half", "bfloat16", "float", "double", "compile"), _MOVE),
    **dict.fromkeys(("close", "shutdown", "stop", "destroy"), _CLOSE),
    **dict.fromkeys(("eval_batch", "evaluate", "inference"), "eval_step(x, target=y) runs the forward of a batch"),
    **{name: f"call fastpipe.{name}(path, pipe)" for name in ("save_checkpoint", "load_checkpoint")},
    "zero_grad": "call optimizer.zero_grad(), of an optimizer made of pipe.parameters()",
    "clip_grad_norm": "it is clip_grad_norm_(max_norm)",
    "training": "train() and eval() set the mode; each of stage_modules has its own",
}
"""Where something is that users of modules and of other pipelines look for here."""


class Pipeline:
    """A model split into stages, and the schedule that trains it.

    The same script runs in a single process, where the ranks are threads, and under torchrun with one process per
    rank. It needs no ``if rank ==``.

    Args:
        stages: the model's layers as a list (as of `fastpipe.split`) or ``nn.Sequential``, split by ``partition``;
            a function ``stage_index -> nn.Module``, called for local stages only; a dict of the local stages; or, of
            torch.distributed.pipelining, the local ``PipelineStage`` objects or a ``Pipe``. All may be on
            the meta device until `to_empty`, `load_checkpoint` or `load_safetensors`.
        schedule: a name from `fastpipe.list_schedules`, or a `fastpipe.Schedule`.
        num_microbatches: the number of microbatches per batch. `step` can override it.
        loss_fn: ``loss_fn(output, target)``; values that layers `carry` are passed by name. It returns a scalar per
            microbatch, ``(loss, dict of metrics)``, or a dict with ``"loss"``. Without it the last stage returns its
            loss (a scalar, or such a dict), or `step` gets ``output_grad``.
        num_ranks: the number of ranks. Default: the size of the group. Can exceed the number of processes only in a
            single process, whose ranks are threads.
        stages_per_rank: the number of stages per rank, for schedules with that option. Default: that of torch's stages,
            or else the schedule's.
        schedule_options: other options of the schedule.
        partition: ``"layers"`` (equal numbers of layers, as far as possible); ``"parameters"``, ``"flops"``,
            ``"seconds"`` or ``"memory"`` (smallest maximum over stages; the last three by `fastpipe.layer_costs` of
            ``example`` on rank 0); the number of layers of every stage (``[3, 2, 2, 1]`` or ``"3,2,2,1"``); or the
            ranges that `fastpipe.partition` returns.
        example: one microbatch as the first layer takes it, or a tuple of arguments. Needed by some ``partition``.
        loss_reduction: ``"mean"`` weights a microbatch by its rows, ``"sum"`` does not; a function maps a target to
            its weight (its number of tokens, for example).
        metrics: the reduction of the loss function's metrics over microbatches, for all or by name: ``"mean"``
            (weighted like a mean loss), ``"sum"``, ``"list"``, or a function of the list.
        split: how arguments are split into microbatches, by name, position or ``"target"``: a dimension (default 0),
            ``"replicate"``, or ``function(value, num_microbatches) -> sequence``.
        merge: how outputs are merged, by name or position: a dimension, ``"replicate"`` or a function. False discards
            the outputs.
        rng: None: torch's generators; random numbers depend on the order of actions. ``"per_microbatch"``: the forward
            of a stage starts from a state derived from ``torch.initial_seed()`` (at construction, the same on all
            ranks), `step_count`, the stage and the microbatch. Random numbers then depend on the cut into stages, but
            not on schedule, executor and number of ranks; generators are restored afterwards.
        timeout: seconds to wait for another rank.
        device: the device to compute on. Default: that of the stages; torch's default device for stages on meta.
        group: a process group, or a DeviceMesh of one dimension. Default: all processes.
        mesh: instead of ``group``, a DeviceMesh of several dimensions; the pipeline is along ``"pp"``. Modules use the
            others: ``"tp"`` and ``"ep"`` for distributed layers; names that begin with ``"dp"``, and ``"cp"``, for the
            stages' wrappers. A stage whose gradients would not be averaged over the latter is refused. Ranks that
            differ only in ``"pp"``, ``"tp"`` or another name must get the same batch.
        data_parallel: the replicas of this rank, one in each of several pipelines: a process group, or a DeviceMesh of
            one dimension. Every stage is wrapped in DistributedDataParallel. Alternatively, pass stages that are
            wrapped in it or by ``fully_shard``. Gradients are averaged over the replicas once per step.
        executor: ``"native"`` (C++), ``"python"`` (the reference: CPU only, over threads or process groups), or
            ``"auto"``: native if the extension loads.
        transport: ``"loopback"`` (ranks are threads), ``"shared_memory"`` (processes of one host, CPU),
            ``"process_group"`` (any processes), or ``"auto"``: per channel the first of these that is possible;
            between processes, the Python executor uses process groups only.
            ``"cuda_ipc"``: copy engines copy between GPUs of one host; experimental, never chosen by "auto".
            ``"process_group_coalesced"``: simultaneous sends and receives between two ranks are one operation (NCCL).
            The environment variable FASTPIPE_TRANSPORT sets the meaning of "auto" for several processes, and must be
            the same on all. Or a `fastpipe.runtime.transport.Transport`.
        stage_to_rank: the rank of every stage. Default: the schedule's.
        recv_lookahead: how many compute actions ahead receives are posted; see `fastpipe.lower`. Coalescing
            transports have their own rule.
        recompute: what stages recompute in the backward instead of keeping it: ``"none"``, ``"full"`` (the whole
            stage; only its input is kept), ``"layers"`` (each layer of a list separately), or a function
            ``(stage index, module)`` that returns one of these. Results are bit-identical.
        grad_dtype: the dtype of ``.grad``, in which gradients are summed. Default: the parameters' dtype. For example
            ``torch.float32`` for bf16 parameters. Clipping supports them; the optimizer must, too.
        fused_weight_grad: W accumulates a linear's weight gradient in ``.grad`` within its matrix product. Saves a
            temporary and a pass over memory, but rounds differently; see docs/training.md.
        cache_carried: if ranks have several stages, send a tensor that requires a gradient and that stages pass on (a
            value of `carry`, for example) to each rank once, and its gradient back once. The gradients of its uses are
            then summed rank by rank, which rounds differently from the unsplit model; see docs/guide.md. Tensors
            without a gradient are sent once in any case.
        tied: groups of names of one weight, as `named_parameters` has them: ``[("0.weight", "11.weight")]``. Not needed
            for layers of a list that share a Parameter.
        overlap: how pairs of a forward and a backward (``OVERLAP_F_B``) run if the modules have no method for them:
            ``"always"``: concurrently, the backward in a helper thread; ``"never"``: in order; ``"auto"``: the faster
            of these by measurement (in order if no core is free, and with the Python executor). In a mesh whose stages
            run collectives ``"auto"`` lets them take turns at `fastpipe.all_to_all`. ``"always"`` is refused there, and
            with the Python executor. Results are bit-identical.
        forward_context: a function that gets the value of `fastpipe.current` and returns a context manager, entered
            for every F (the module and its loss).
        backward_context: the same for every B, I and W.
        warn_after: seconds after which a step that has not ended is reported in the log, with what each rank does and
            which rank it waits for; SIGUSR1 asks for that at once, if nothing else handles it. Default: a tenth of
            `timeout`, at most 60. ``float("inf")`` reports nothing.
        cuda_graph: record a CUDA graph of a step per signature of its inputs, and replay it. Steps that cannot be
            recorded run without; `describe` gives the reason. See docs/training.md for its effects.
        audit: the share of the work, 0.05 for example, that another rank computes again to find hardware that computes
            wrong numbers: a `fastpipe.CorruptionError` on all ranks names the rank. Needs several processes and a list
            of layers. See docs/reliability.md.

    Attributes:
        num_ranks: the number of ranks.
        num_microbatches: the number of microbatches per batch.
        transport: exchanges tensors between ranks.
        device: the device of the computation.
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
        cache_carried: bool = False,
        cuda_graph: bool = False,
        warn_after: float | None = None,
        audit: float | None = None,
    ) -> None:
        arguments = Arguments.of(locals())
        world = find_world(arguments)
        with world.replicas.published(), building(world.control) as undo:
            request = agree_on_request(arguments, world)
            arguments, local = agree_on_stages(arguments, request, world)
            self.transport = connect(arguments, world)
            undo.append(self.transport.abort)
            self.device, self.loss_fn, self.grad_dtype = world.device, loss_fn, grad_dtype
            self.num_ranks = request.schedule.num_ranks
            self._site, self._reduces, self._grad_norms = world, True, GradNorms()
            self._start(arguments, request, local)
        self._log()

    def _log(self) -> None:
        """Log the description, and a warning if W computes nothing."""
        logger.info("%s", self.describe())
        if self.schedule.splits_backward and native.load() is None:
            logger.warning(
                "schedule = %r splits the backward, and %s: the split gains nothing; load the extension, or use a "
                "schedule without W (%s)",
                self.schedule.name,
                WITHOUT_EXTENSION,
                native.native_status(),
            )

    def _start(self, arguments: Arguments, request: BuildRequest, local: LocalStages) -> None:
        """Use these stages and programs from the next step on."""
        steps = make_steps(arguments, request, local, self._site, self.transport)
        if not self._site.is_single_process:
            # it is cut once, so that the caller may free the layers of other processes
            arguments = replace(arguments, model=replace(arguments.model, stages=local.modules))
        self._arguments, self._build, self._local, self._steps = arguments, request, local, steps
        self.num_microbatches = request.num_microbatches
        # what it holds lives until it is called, so it must not hold the stages
        closed = steps.watchdog.close, self._site.control, steps.ranks.closer()
        self._finalizer = weakref.finalize(self, _close, *closed, os.getpid())

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
        """Run forward and backward of one batch; accumulates in ``.grad``. Collective: call it on every rank.

        Args:
            args: the model's inputs: whole batches (split by ``split``), lists of microbatches, or iterators. Iterators
                are consumed only on ranks that need them. A tuple by itself is several inputs.
            target: the second argument of the loss function, in the same forms.
            output_grad: gradients of the outputs, in the same forms, instead of a loss.
            num_microbatches: overrides the pipeline's in this step.
            trace: gather the times of all ranks into ``result.timeline``.
            gather_outputs: return the outputs on every rank, not only on those with the last stage.
            index: the number of the batch in the caller's count. Raises if ranks pass different numbers. Without it,
                different batches are detected only in arguments that several ranks pass.
            kwargs: keyword arguments, passed to every stage whose forward has a parameter of that name.

        Raises:
            ValueError: for an invalid input, naming it; the other ranks raise StepError. For a schedule without
                backwards, on all ranks.
            StepError: if the step failed on another rank. The rank that failed raises its own exception.
        """
        how = {"traces": trace, "gathers_outputs": gather_outputs, "index": index, "reduces": self._reduces}
        return self._run(args, kwargs, target, output_grad, num_microbatches, training=True, **how)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context in which steps accumulate local gradients only: nothing is reduced over the replicas.

        Like `DistributedDataParallel.no_sync`, for several steps per optimizer step. The first step after the context
        averages the sum of all.

        Raises:
            ValueError: if the schedule holds every stage twice and the stages have replicas.
        """
        if self._steps.programs.parallel and self.schedule.placement.num_routes > 1:
            raise ValueError(
                f"no_sync: {self.schedule.name} holds every stage twice, and sums a step's gradients over the holders "
                "separately from those of earlier steps; let every step reduce, or use a schedule with one route"
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

        Equals `torch.nn.utils.clip_grad_norm_` on the unsplit model, bit for bit on a CPU. Collective: call it on every
        rank, between `step` and the optimizer. A stage that two ranks hold counts once, and so does a gradient that
        FSDP shards (equal up to rounding).

        Args:
            max_norm: at least 0; ``float("inf")`` only measures.
            norm_type: the p of the p-norm, or ``"inf"``.
            error_if_nonfinite: raise if the norm is infinite or NaN. Otherwise a warning that names the gradients is
                logged, and they are scaled by that norm. (With a `fastpipe.GradScaler`, which skips such steps, the log
                level is INFO.)

        Returns:
            The norm before clipping, the same on every rank.

        Raises:
            StepError: for a non-finite norm, naming parameter, stage and rank; gradients are unchanged. Or if another
                rank could not take part.
            ValueError: for an invalid argument, or one that differs between ranks.
        """
        named = self._named_parameters()
        return clip_grad_norm(self._steps, self._grad_norms, named, max_norm, norm_type, error_if_nonfinite)

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
        """Run the forward without gradients, and the loss if a target is given. Arguments as for `step`.

        Keeps no activations and changes no gradient, so it may run between a step and its optimizer. It does not change
        the mode of dropout and BatchNorm: see `eval` and `train`.
        """
        how = {"traces": trace, "gathers_outputs": gather_outputs, "index": index}
        return self._run(args, kwargs, target, None, num_microbatches, training=False, **how)

    def _run(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        target: Any,
        output_grad: Any,
        num_microbatches: int | None,
        **how: Any,
    ) -> StepResult:
        """One step; ``how`` are the other attributes of its `Request`."""
        count = self.num_microbatches if num_microbatches is None else num_microbatches
        request = self._with_target(Request(as_inputs(args), kwargs, target, output_grad, count, **how))
        result = self._steps.run(request)
        if request.gathers_outputs:
            steps, member = self._steps, self._site.member
            stage = max(steps.stages, key=lambda stage: stage.index)
            result.raw_outputs = gather_outputs(steps.all_gather, stage, member, result.raw_outputs)
        return result

    def _with_target(self, request: Request) -> Request:
        """Move a keyword argument that is the target of a model with its own loss to ``target``, or copy an input."""
        name = getattr(self.loss_fn, "target_name", "")
        if request.target is not None or name not in request.kwargs:
            return request
        is_input = getattr(self.loss_fn, "target_is_input", False)
        kwargs = {other: value for other, value in request.kwargs.items() if is_input or other != name}
        return replace(request, target=request.kwargs[name], kwargs=kwargs)

    @property
    def step_count(self) -> int:
        """The number of training steps. Set it when training resumes: `rng="per_microbatch"` depends on it."""
        return self._steps.random.step_count

    @step_count.setter
    def step_count(self, count: int) -> None:
        if not is_whole(count) or count >= 2**63:
            raise ValueError(f"step_count = {count!r}: give a whole number of steps, 0 or more, the same on every rank")
        self._steps.random.step_count = int(count)

    @property
    def schedule(self) -> Schedule:
        """The schedule."""
        return self._steps.programs.schedule(self.num_microbatches)

    @property
    def stage_modules(self) -> dict[int, nn.Module]:
        """The modules of this process's stages, by index."""
        return self._local.modules

    @property
    def rank(self) -> int:
        """The rank of this process in the pipeline; 0 in a single process."""
        return self._site.member.rank

    @property
    def num_stages(self) -> int:
        """The number of stages of the model."""
        return int(self.schedule.num_stages)

    @property
    def is_first(self) -> bool:
        """Whether this process has the first stage."""
        return any(stage.is_first for stage in self._steps.stages)

    @property
    def is_last(self) -> bool:
        """Whether this process has the last stage."""
        return any(stage.is_last for stage in self._steps.stages)

    @property
    def needs_input(self) -> bool:
        """Whether `step` uses its positional arguments on this process."""
        return self.is_first

    @property
    def needs_target(self) -> bool:
        """Whether `step` uses its target, or output gradient, on this process."""
        return self.is_last

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of this process's stages."""
        for _, parameter in self.named_parameters():
            yield parameter

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This process's parameters with their names in the whole model; a tied weight once, by its first name."""
        for named in self._named_parameters():
            yield named.name, named.tensor

    def _named_parameters(self) -> list[NamedTensor[nn.Parameter]]:
        return list(named_parameters(self.stage_modules, first_names(self._local.ties)))

    def state_dict(self) -> dict[str, Any]:
        """The state of this process's stages, with the keys of the whole model."""
        state: dict[str, Any] = {}
        for stage, module in sorted(self.stage_modules.items()):
            own = unwrapped(module)
            state.update(own.state_dict(prefix=state_prefix(own, stage)))
        for tie in self._local.ties:
            # only the first of tied shards is trained
            first, *others = [key for key in tie.keys if key in state] or [""]
            state.update({name: state[first] for name in others})
        return state

    def to_empty(self, *, device: str | torch.device | None = None) -> Self:
        """Give memory to this process's stages that were built under ``torch.device("meta")``.

        Like `nn.Module.to_empty`, but tensors that have memory keep their values, and tied weights stay one. Parameters
        stay the same objects, so an optimizer may exist already. Initialise the stages afterwards, with the buffers
        that no checkpoint has (``persistent=False``; stages of `fastpipe.split(model)` of a Hugging Face model compute
        these themselves), or load them. The first step refuses a tensor to which nothing was written.

        Args:
            device: default, and the only one possible: the pipeline's.

        Raises:
            ValueError: for another device.
        """
        if device is not None and find_device(None, device) != self.device:
            raise ValueError(f"device = {str(device)!r}: the pipeline computes on {self.device}; pass it to Pipeline")
        if self._steps.unfilled is not None:
            self._steps.unfilled.to_empty()
        return self

    def load_state_dict(self, state: Mapping[str, Any], *, assign: bool = False) -> None:
        """Load the local part of a state with the keys of the whole model.

        Args:
            state: with the keys of the whole model.
            assign: as in `nn.Module.load_state_dict`: use the tensors of ``state`` themselves instead of copying, for
                stages on meta. Make optimizers afterwards.

        Raises:
            KeyError: for a missing key; if all stages are local, also for a key that no stage has.
            TypeError: if ``state`` is not a mapping.
            ValueError: for a stage on meta, without ``assign``; with it, for a tensor on another device; for a state
                with different values for the names of a tied weight; for a plain tensor where the stage has a DTensor,
                and the reverse.
        """
        if not isinstance(state, Mapping):
            raise TypeError(f"state is a {type(state).__name__}: pass the model's state_dict()")
        check_flags(assign=assign)
        parts: list[tuple[nn.Module, str, list[str]]] = []
        check_equal(state, self._local.ties)
        state = assignable(state, self._local.ties, self.device) if assign else state
        for stage, wrapped in self.stage_modules.items():
            module = unwrapped(wrapped)
            prefix = state_prefix(module, stage)
            own = module.state_dict()
            missing = [prefix + key for key in own if prefix + key not in state]
            if missing:
                raise KeyError(f"the state has no {missing[0]!r}, which stage {stage} needs; its keys are the model's")
            if not assign and any(value.is_meta for value in own.values() if isinstance(value, torch.Tensor)):
                raise ValueError(
                    f"stage {stage} is on the meta device, into which nothing can be copied: call pipe.to_empty() "
                    "before, or pass assign=True"
                )
            for key, value in own.items():
                check_spread_alike(prefix + key, value, state[prefix + key])
            parts.append((module, prefix, list(own)))
        taken = {prefix + key for _, prefix, keys in parts for key in keys}
        left = [key for key in state if key not in taken]
        if left and len(self.stage_modules) == self.schedule.num_stages:
            raise KeyError(f"the state has {left[0]!r}, which no stage has: pass the state of the same model")
        for module, prefix, keys in parts:
            module.load_state_dict({key: state[prefix + key] for key in keys}, assign=assign)
        self._steps.copies.loaded()

    def train(self, mode: bool = True) -> Self:
        """Set the training mode of the local stages."""
        for module in self.stage_modules.values():
            module.train(mode)
        return self

    def eval(self) -> Self:
        """Set the local stages to evaluation mode."""
        return self.train(False)

    def profile(self, *args: Any, target: Any = None, num_steps: int = 3, **kwargs: Any) -> CostModel:
        """Measure the costs of the stages on one batch, as input for `fastpipe.plan`. Collective: call it on every
        rank.

        Seconds are medians over `num_steps` traced steps after one warm-up step. A forward pass then meters the bytes
        that stages keep and send. If the schedule runs whole backwards, B's time is split into I and W in the ratio
        measured in that pass; without the native extension nearly all is I's. Latency and bandwidth are fitted if
        message sizes differ; otherwise the whole transfer is latency. Gradients, buffers, torch's generators and
        `step_count` are restored.

        Args:
            args: as for `step`, but no iterators.
            target: as for `step`.
            num_steps: the number of traced steps.
            kwargs: as for `step`.

        Returns:
            The costs, the same on every rank.
        """
        return stage_costs(*self._measured(args, target, kwargs, num_steps, by_layer=False))

    def profile_layers(self, *args: Any, target: Any = None, num_steps: int = 3, **kwargs: Any) -> LayerCosts:
        """Like `profile`, by layer, so that a plan can split the model differently. Needs a pipeline of a list of
        layers.

        The seconds of a stage are divided among its layers in the ratio of their separate times. Bytes of parameters
        count weights and gradients; the caller adds the optimizer's state.
        """
        return costs_by_layer(*self._measured(args, target, kwargs, num_steps, by_layer=True))

    def _measured(
        self, args: tuple[Any, ...], target: Any, kwargs: Mapping[str, Any], num_steps: int, *, by_layer: bool
    ) -> tuple[list[Timeline], Units]:
        def call(training: bool, trace: bool) -> StepResult:
            run = self.step if training else self.eval_step
            return run(*args, target=target, trace=trace, **kwargs)

        inputs = (*args, target, *kwargs.values())
        given = kwargs.get("num_microbatches")
        (count,) = check_counts(num_microbatches=self.num_microbatches if given is None else given)
        return profile(
            self._steps,
            call,
            inputs=inputs,
            num_steps=num_steps,
            by_layer=by_layer,
            num_microbatches=count,
        )

    def replan(self, plan: Plan | Schedule | None = None) -> None:
        """Continue training with another plan from the next step on. Collective: call it on every rank, between steps.

        A plan for the same stages on the same ranks changes only the order of the work. If all ranks are threads of
        this process, a plan may also split the layers differently, move stages and change which of them recompute;
        parameters, optimizers and checkpoints are unaffected. Loss and gradients are those of the new schedule.

        Args:
            plan: the result of `fastpipe.plan`, or a schedule. Required on rank 0 only; a different plan on another
                rank is refused.

        Raises:
            ValueError: for a plan that does not fit this pipeline, or moves layers between processes, with the remedy.
                The pipeline is unchanged.
        """
        schedule, counts, recompute = agree_on_plan(self._steps, plan)
        present = self._local.layer_counts
        moves = schedule.placement.routes != self.schedule.placement.routes
        rebuilds = moves or counts not in (None, present) or recompute is not None
        made: list[Programs] = []

        def prepare() -> Reply:
            check_fits(schedule, counts, self.schedule, present)
            made.append(self._steps.programs.successor(schedule))
            if rebuilds:
                check_movable(self._steps.stages, self._site.member.size)
            if self._steps.programs.parallel:
                digest = made[0].program(schedule.num_microbatches, forward_only=False).digest()
                compare_replicas(self._steps.stages, {"schedule": schedule.name, "program": digest}, self._site)
            return {}

        self._steps.all_gather("replan, programs", prepare)
        request = replace(self._build, programs=made[0], num_microbatches=schedule.num_microbatches)
        if rebuilds:
            model = replace(self._arguments.model, partition=counts or present or "layers")
            self._rebuild(model if recompute is None else replace(model, recompute=recompute), request)
        else:
            self._build, self.num_microbatches = request, schedule.num_microbatches
            self._steps.follow(request.programs)
        self._log()

    def _rebuild(self, model: ModelArguments, request: BuildRequest) -> None:
        """Build other stages of the same layers; all ranks are threads of this process."""
        if self._local.layer_counts is None:
            model = replace(model, stages=dict(self.stage_modules))
        self._steps.check_filled()
        former, finalizer = self._steps, self._finalizer
        bare = replace(self._arguments, model=replace(model, data_parallel=None))
        local = build_stages(bare, request, self._site)
        self._start(replace(self._arguments, model=model), request, local)
        self._steps.random.step_count, self._steps.loss_scale = former.random.step_count, former.loss_scale
        # only now, as a module may refuse what the plan needs, a copy for example
        finalizer.detach()
        former.watchdog.close()
        former.ranks.retire()

    def describe(self) -> str:
        """A description of the pipeline in a few lines: schedule, placement, executor, transport and options."""
        return describe(self._steps, self._local, self._arguments.execution, self._build.seed, self.num_microbatches)

    def __repr__(self) -> str:
        return f"<Pipeline {self.schedule.name}: {self.num_ranks} ranks, {self.num_stages} stages>"

    if not TYPE_CHECKING:  # a type checker reports these names itself

        def __getattr__(self, name: str) -> Any:
            if name not in _ELSEWHERE:
                return object.__getattribute__(self, name)  # raises Python's own error
            raise AttributeError(f"a Pipeline has no {name!r}: {_ELSEWHERE[name]}", name=name, obj=self)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "a Pipeline cannot be copied or pickled, since it has threads and connections: copy or pickle its layers "
            "or its state_dict(), or use fastpipe.save_checkpoint"
        )


def _close(end_watchdog: Callable[[], None], control: Control, close_ranks: Callable[[], None], process: int) -> None:
    if os.getpid() == process:
        end_watchdog()
        control.close()
        close_ranks()
