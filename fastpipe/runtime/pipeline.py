"""Pipeline: the user's object, and the one place where planning meets running."""

from __future__ import annotations

import contextlib
import logging
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, NoReturn

import torch
from torch import nn

from fastpipe.cost import CostModel
from fastpipe.errors import StepError
from fastpipe.machine import Lanes
from fastpipe.program import Program
from fastpipe.runtime.control import (
    DEAD,
    Alone,
    Control,
    Failure,
    LostError,
    Reply,
    StoreControl,
    cause_text,
    dead_among,
)
from fastpipe.runtime.describe import describe
from fastpipe.runtime.executor import executor_class
from fastpipe.runtime.group import membership
from fastpipe.runtime.inputs import Inputs, Request, check_cuts, stage_works, take_inputs
from fastpipe.runtime.loopback import Loopback
from fastpipe.runtime.microbatch import Rules, check_reduction
from fastpipe.runtime.modules import Stages, build_modules, check_device, find_device, state_prefix
from fastpipe.runtime.plans import Plans, options_with_stages
from fastpipe.runtime.process_group import ProcessGroups
from fastpipe.runtime.ranks import LocalRanks, Outcome
from fastpipe.runtime.replicas import make_replicas, modules_by_rank
from fastpipe.runtime.result import StepResult, pack_spans, pack_tensors, unpack_spans, unpack_tensors
from fastpipe.runtime.shared_memory import SharedMemory, between_processes
from fastpipe.runtime.stage import NoLoss, Stage
from fastpipe.runtime.transport import Transport, TransportError
from fastpipe.schedule import Schedule

logger = logging.getLogger("fastpipe")
_MAX_KNOWN = 64
"""How many combinations of input shapes are remembered; another one costs a step with headers."""


class Pipeline:
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
        partition: ``"layers"`` (as many layers a stage as possible alike), or the number of layers of every stage.
        loss_reduction: ``"mean"`` weighs a microbatch by its rows, ``"sum"`` does not; a function gives the weight of
            a target (its tokens, say).
        split: how arguments are cut into microbatches, by name, position or ``"target"``: a dimension (0 unless
            given), ``"replicate"``, or ``function(value, num_microbatches) -> sequence``.
        merge: how outputs are joined, by name or position: a dimension, ``"replicate"`` or a function; False keeps no
            outputs.
        rng: None: torch's generators, so random numbers depend on the order of actions.
        timeout: seconds to wait for another rank.
        device: what to compute on; that of the stages unless given.
        group: a process group, or a DeviceMesh of one dimension; all processes unless given.
        executor: ``"auto"``, ``"native"`` or ``"python"``.
        transport: ``"loopback"`` (the ranks are threads), ``"shared_memory"`` (processes of one host, on CPU),
            ``"process_group"`` (any), or ``"auto"``: the first of these that can be. The variable FASTPIPE_TRANSPORT
            says what "auto" means for several processes; set it alike for all. Or a
            `fastpipe.runtime.transport.Transport`.
        stage_to_rank: the rank of every stage, where it is not the schedule's own.
        recv_lookahead: how many compute actions ahead receives are posted; see `fastpipe.lower`.

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
        rng: None = None,
        timeout: float = 600,
        device: str | torch.device | None = None,
        group: Any = None,
        executor: str = "auto",
        transport: str | Transport = "auto",
        stage_to_rank: Sequence[int] | None = None,
        recv_lookahead: int | str = 1,
    ) -> None:
        self._check_arguments(loss_fn, loss_reduction, rng, timeout)
        self.device = find_device(stages, device)
        self._member = membership(group, self.device)
        self.loss_fn = loss_fn
        self._reduction = loss_reduction
        self._split: Rules = split
        self._keep_outputs = merge is not False
        self._merge: Rules = None if isinstance(merge, bool) else merge
        store = self._member.store() if self._member.size > 1 else None
        self._control = self._make_control(store, timeout)
        with self._agreeing():
            self.num_ranks = self._find_num_ranks(num_ranks, schedule)
            lanes = self._check_transport(transport)
            options = options_with_stages(schedule, schedule_options, stages_per_rank)
            self._plans = Plans(schedule, self.num_ranks, options, stage_to_rank, lanes, recv_lookahead)
            self.num_microbatches = self._find_num_microbatches(num_microbatches, schedule)
            self.schedule = self._plans.schedule(self.num_microbatches)
            self._plans.program(self.num_microbatches, forward_only=False)
            modules = self._build_stages(stages, partition)
            self._executor = executor_class(executor)
        self.transport = self._make_transport(transport, timeout)
        exchange = self.transport.exchange if isinstance(self.transport, ProcessGroups | SharedMemory) else None
        self._replicas = make_replicas(self.schedule.placement, modules, exchange)
        self._ranks = LocalRanks(self._stages_by_rank, self._executor, self.transport, timeout, self._control.publish)
        self._known: dict[tuple[Any, ...], int] = {}
        self._forward_only = not self._plans.has_backward(self.num_microbatches)
        self._elsewhere: Failure | None = None
        self._broken: Failure | None = None
        self._finalizer = weakref.finalize(self, _close, self._control, self._ranks)
        logger.info("%s", self.describe())

    @contextlib.contextmanager
    def _agreeing(self) -> Iterator[None]:
        """All processes build the same pipeline, or all raise: nobody waits for one that gave up."""
        error: Exception | None = None
        try:
            yield
        except Exception as found:
            error = found
        try:
            found_text = {"refused": cause_text(error)} if error is not None else {"plan": self._plan_text()}
            replies = self._control.setup(found_text)
            if error is not None:
                raise error
            _check_plans(replies)
        except LostError as lost:
            self._control.close()
            raise (error or lost.failure.error()) from lost
        except BaseException:
            self._control.close()
            raise

    def _plan_text(self) -> str:
        """What must be the same on every rank."""
        return f"{self.schedule.name} {dict(self.schedule.options)}, {self.num_microbatches} microbatches"

    @staticmethod
    def _check_arguments(loss_fn: Any, loss_reduction: Any, rng: Any, timeout: Any) -> None:
        if loss_fn is not None and not callable(loss_fn):
            raise ValueError(f"loss_fn = {loss_fn!r}: give a function (output, target) -> loss, or None")
        check_reduction(loss_reduction)
        if rng is not None:
            raise ValueError(f"rng = {rng!r}: this version takes None, torch's own generators")
        if not isinstance(timeout, int | float) or not timeout > 0:
            raise ValueError(f"timeout = {timeout!r}: give seconds, more than 0")

    def _find_num_ranks(self, num_ranks: int | None, schedule: str | Schedule) -> int:
        size = self._member.size
        wanted = schedule.num_ranks if isinstance(schedule, Schedule) else num_ranks
        if wanted is None:
            return size
        if num_ranks not in (None, wanted):
            raise ValueError(f"num_ranks = {num_ranks}: the schedule given has {wanted} ranks; leave it out")
        if not isinstance(wanted, int) or wanted < 1:
            raise ValueError(f"num_ranks = {wanted!r}: give a whole number of at least 1")
        if size > 1 and wanted != size:
            raise ValueError(
                f"num_ranks = {wanted}: the group has {size} processes, each one rank; start {wanted} processes, "
                "or one alone, whose ranks are then threads"
            )
        return wanted

    def _find_num_microbatches(self, num_microbatches: int | None, schedule: str | Schedule) -> int:
        if num_microbatches is None:
            if isinstance(schedule, Schedule):
                return schedule.num_microbatches
            raise ValueError("num_microbatches is missing: give the number of microbatches of a batch")
        return num_microbatches

    def _check_transport(self, transport: str | Transport) -> Lanes:
        """Refuse a transport that cannot be here; what the transport executes in one order."""
        alone = self._member.size == 1
        if isinstance(transport, Transport):
            if not alone and isinstance(transport, Loopback):
                raise ValueError("transport: loopback connects threads of one process; use 'process_group' or 'auto'")
            return transport.lanes
        if transport not in ("auto", "loopback", "shared_memory", "process_group"):
            raise ValueError(f"transport = {transport!r}: use 'auto', 'loopback', 'shared_memory' or 'process_group'")
        if not alone and transport == "loopback":
            raise ValueError("transport = 'loopback': there are several processes; use 'process_group' or 'auto'")
        if alone and transport in ("shared_memory", "process_group") and self.num_ranks > 1:
            raise ValueError(
                f"transport = {transport!r}: there is one process for {self.num_ranks} ranks; start one a rank with "
                "torchrun, or use 'loopback' or 'auto'"
            )
        return Loopback.lanes if alone else ProcessGroups.lanes

    def _make_transport(self, transport: str | Transport, timeout: float) -> Transport:
        if isinstance(transport, Transport):
            return transport
        if self._member.size == 1:
            return Loopback()
        choice = os.environ.get("FASTPIPE_TRANSPORT", "auto") if transport == "auto" else transport
        try:
            return between_processes(choice, self._control.exchange, self._member, self.device, timeout)
        except LostError as lost:
            self._control.close()
            raise lost.failure.error() from lost
        except BaseException:
            self._control.close()
            raise

    def _build_stages(self, stages: Stages, partition: Any) -> dict[int, dict[int, nn.Module]]:
        """The local stages; their modules by rank."""
        placement = self.schedule.placement
        alone = self._member.size == 1
        ranks = list(range(self.num_ranks)) if alone else [self._member.rank]
        local = sorted({stage for rank in ranks for stage in placement.stages_of(rank)})
        self.stage_modules = build_modules(stages, placement.num_stages, local, partition)
        check_device(self.stage_modules, self.device)
        modules = modules_by_rank(placement, ranks, self.stage_modules)
        self._stages_by_rank = {
            rank: {stage: Stage(stage, module, placement.num_stages, self.loss_fn) for stage, module in held.items()}
            for rank, held in modules.items()
        }
        self._stages = [stage for held in self._stages_by_rank.values() for stage in held.values()]
        return modules

    def _make_control(self, store: Any, timeout: float) -> Control:
        return Alone() if store is None else StoreControl(store, self._member.rank, self._member.size, timeout)

    @property
    def rank(self) -> int:
        """This process's rank in the pipeline; 0 when all ranks are here."""
        return self._member.rank

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
        request = Request(args, kwargs, target, output_grad, count, training=not self._forward_only)
        if self._forward_only and output_grad is not None:
            if not self._plans.has_backward(self.num_microbatches):
                raise ValueError(f"output_grad: {self.schedule.name} has no backward; leave it out")
            request = Request(args, kwargs, target, output_grad, count, training=True)
        return self._run(request, trace)

    def eval_step(
        self, *args: Any, target: Any = None, num_microbatches: int | None = None, trace: bool = False, **kwargs: Any
    ) -> StepResult:
        """Forward alone, without gradients; the loss too when a target is given. Arguments as for `step`."""
        count = self.num_microbatches if num_microbatches is None else num_microbatches
        return self._run(Request(args, kwargs, target, None, count, training=False), trace)

    def _run(self, request: Request, trace: bool) -> StepResult:
        if self._broken is not None:
            raise self._broken.error()
        self._elsewhere = None
        self._control.begin(self._failed_elsewhere)
        try:
            inputs, replies = self._agree_on_inputs(request)
            program = self._plans.program(request.num_microbatches, not request.training)
            signature = (request.training, *(reply["signature"] for reply in replies))
            with torch.set_grad_enabled(request.training):
                outcome = self._execute(program, inputs, replies, request, signature)
            replies = self._finish(outcome, request, trace)
        except LostError as lost:
            self._give_up(lost.failure, lost.__cause__)
        finally:
            self._control.end()
        if any(reply.get("no_loss") for reply in replies):
            # found out at the first step: there is nothing to differentiate, so from now on steps are forward only
            self._forward_only = True
            return self._run(_replayed(request, inputs), trace)
        self._raise_failure(outcome, replies)
        self._remember(signature)
        return self._result(program, outcome, replies)

    def _finish(self, outcome: Outcome, request: Request, trace: bool) -> list[Reply]:
        """Learn how it went for the others, and sum the gradients of stages that two ranks hold."""
        replies = self._control.exchange("end", self._report(outcome, trace))
        if request.training:
            succeeded = not any("failure" in reply or DEAD in reply for reply in replies)
            try:
                self._replicas.after_step(succeeded)
            except TransportError as error:
                raise LostError(Failure(error.peer, str(error), dead=True)) from error
        return replies

    def _give_up(self, failure: Failure, cause: BaseException | None = None) -> NoReturn:
        """A process is dead or silent: this pipeline is over."""
        self._broken = failure
        self._release()
        raise failure.error() from cause

    def _release(self) -> None:
        """Let go of what a failed step left behind."""
        for stage in self._stages:
            stage.end()
        # what was announced in a failed step may be incomplete, and what was known may have changed
        self._known.clear()

    def _agree_on_inputs(self, request: Request) -> tuple[Inputs, list[Reply]]:
        """Every process takes its inputs; if one cannot, all raise."""
        error: BaseException | None = None
        inputs = Inputs()
        message: Reply = {"call": _call_text(request)}
        try:
            self._plans.program(request.num_microbatches, not request.training)
            inputs = take_inputs(request, self._split, self._stages, self.loss_fn, self._reduction)
            signature = self._signature(request, inputs)
            message |= {"rows": inputs.rows, "whole": inputs.whole, "signature": signature}
        except BaseException as found:
            # an iterator may raise anything, and the others must not wait for this rank
            error = found
            message["refused"] = cause_text(found)
        message["kwargs"] = sorted(inputs.kwargs)
        replies = self._control.exchange("start", message)
        dead = dead_among(replies)
        if dead is not None:
            self._give_up(dead)
        if error is not None:
            raise error
        self._check_replies(request, replies)
        return inputs, replies

    def _check_replies(self, request: Request, replies: Sequence[Reply]) -> None:
        calls = [reply["call"] for reply in replies]
        if len(set(calls)) > 1:
            listed = "; ".join(f"rank {rank}: {call}" for rank, call in enumerate(calls))
            raise ValueError(f"the ranks do not make the same call: {listed}")
        for rank, reply in enumerate(replies):
            if "refused" in reply:
                raise StepError(f"rank {rank} refused its input: {reply['refused']}", rank=rank, cause=reply["refused"])
        check_cuts({name: rows for reply in replies for name, rows in reply["whole"].items()})
        taken = {name for reply in replies for name in reply["kwargs"]}
        for name in request.kwargs:
            if name not in taken:
                raise ValueError(f"{name}: no stage's forward takes this keyword argument; leave it out")

    def _signature(self, request: Request, inputs: Inputs) -> int:
        """Whatever may change a shape, a dtype or a gradient flag between stages."""
        flags = tuple(p.requires_grad for module in self.stage_modules.values() for p in module.parameters())
        autocast = (torch.is_autocast_enabled("cpu"), str(torch.get_autocast_dtype("cpu")))
        return hash((request.num_microbatches, inputs.signature(), flags, autocast))

    def _execute(
        self, program: Program, inputs: Inputs, replies: Sequence[Reply], request: Request, signature: tuple[Any, ...]
    ) -> Outcome:
        stages = self._stages
        rows = inputs.rows or next((reply["rows"] for reply in replies if reply["rows"]), None)
        works = stage_works(inputs, stages, request, self._reduction, rows, self._keep_outputs)
        for stage, work in zip(stages, works, strict=True):
            stage.begin(work)
        self._ranks.prepare(program)
        if request.training:
            self._replicas.before_step()
        announce = signature not in self._known
        return self._ranks.run(program, self._number(signature), announce)

    def _number(self, signature: tuple[Any, ...]) -> int:
        """What transports call these shapes; the number of the oldest is given again when many are known."""
        if signature in self._known:
            return self._known[signature]
        return len(self._known) if len(self._known) < _MAX_KNOWN else next(iter(self._known.values()))

    def _remember(self, signature: tuple[Any, ...]) -> None:
        """The shapes of this step need not be announced again."""
        if signature in self._known:
            return
        number = self._number(signature)
        if len(self._known) == _MAX_KNOWN:
            del self._known[next(iter(self._known))]
        self._known[signature] = number

    def _failed_elsewhere(self, failure: Failure) -> None:
        """From the watcher: another process failed or died."""
        if self._elsewhere is None:
            self._elsewhere = failure
        self._ranks.fail()

    def _report(self, outcome: Outcome, trace: bool) -> Reply:
        """What the others need to know of this process's step."""
        last = [stage.work for stage in self._stages if stage.is_last]
        reply: Reply = {}
        if outcome.failure is not None:
            reply["failure"] = asdict(outcome.failure)
            reply["first"] = asdict(outcome.first or outcome.failure)
            reply["no_loss"] = isinstance(outcome.error, NoLoss)
        elif last:
            reply["losses"] = pack_tensors({i: loss for work in last for i, loss in work.losses.items()})
            reply["scaled"] = pack_tensors({i: loss for work in last for i, loss in work.scaled.items()})
        if trace and self._member.size > 1:
            reply["spans"] = pack_spans(outcome.spans)
        return reply

    def _raise_failure(self, outcome: Outcome, replies: Sequence[Reply]) -> None:
        failures = [Failure(**reply["failure"]) for reply in replies if "failure" in reply]
        dead = dead_among(replies) or next((f for f in failures if f.dead), None)
        if dead is not None:
            self._give_up(dead, outcome.error)
        first = next((Failure(**reply["first"]) for reply in replies if "first" in reply), self._elsewhere)
        if first is None:
            return
        if first.dead:
            self._give_up(first, outcome.error)
        self._release()
        if outcome.error is None or outcome.failure is None:
            raise first.error()
        if outcome.first is not None and outcome.first.rank not in self._stages_by_rank:
            # it failed elsewhere before, and what it was given here since then are stand-ins
            raise first.error() from outcome.error
        outcome.error.add_note(f"fastpipe: raised on {outcome.failure.place()}")
        raise outcome.error

    def _result(self, program: Program, outcome: Outcome, replies: Sequence[Reply]) -> StepResult:
        losses: dict[int, torch.Tensor] = {}
        scaled: dict[int, torch.Tensor] = {}
        spans = dict(outcome.spans)
        for reply in replies:
            losses.update(unpack_tensors(reply.get("losses", {})))
            scaled.update(unpack_tensors(reply.get("scaled", {})))
            spans.update(unpack_spans(reply.get("spans", {})))
        found = {i: output for stage in self._stages for i, output in stage.work.outputs.items()}
        outputs = [found[i] for i in sorted(found)] or None
        for stage in self._stages:
            stage.end()
        return StepResult(_by_microbatch(losses), _by_microbatch(scaled), outputs, self._merge, program, spans)

    def profile(self, *args: Any, target: Any = None, **kwargs: Any) -> CostModel:
        """Measure the costs of the stages on one batch; gradients are left as they were. Arguments as for `step`."""
        kept = [(parameter, parameter.grad) for parameter in self.parameters()]
        for parameter, _ in kept:
            parameter.grad = None
        try:
            result = self.step(*args, target=target, trace=True, **kwargs)
        finally:
            for parameter, grad in kept:
                parameter.grad = grad
        return CostModel.from_timeline(result.timeline)

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of this process's stages."""
        for _, parameter in self.named_parameters():
            yield parameter

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The same with their names in the whole model."""
        for stage, module in sorted(self.stage_modules.items()):
            yield from ((state_prefix(module, stage) + name, p) for name, p in module.named_parameters())

    def state_dict(self) -> dict[str, Any]:
        """The state of this process's stages, under the keys of the whole model."""
        state: dict[str, Any] = {}
        for stage, module in sorted(self.stage_modules.items()):
            state.update(module.state_dict(prefix=state_prefix(module, stage)))
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the local part of a state under the keys of the whole model.

        Raises:
            KeyError: for a key that is missing.
        """
        for stage, module in self.stage_modules.items():
            prefix = state_prefix(module, stage)
            module.load_state_dict({key: state[prefix + key] for key in module.state_dict()})

    def train(self, mode: bool = True) -> Pipeline:
        """Put the local stages into training mode, or out of it."""
        for module in self.stage_modules.values():
            module.train(mode)
        return self

    def eval(self) -> Pipeline:
        """Put the local stages into evaluation mode."""
        return self.train(False)

    def describe(self) -> str:
        """What runs here and how, in a few lines."""
        program = self._plans.program(self.num_microbatches, forward_only=False)
        ranks = {rank: list(stages) for rank, stages in self._stages_by_rank.items()}
        return describe(self.schedule, program, ranks, self._executor.__name__, self.transport)

    def __repr__(self) -> str:
        return f"<Pipeline {self.schedule.name}: {self.num_ranks} ranks, {self.num_stages} stages>"


def _check_plans(replies: Sequence[Reply]) -> None:
    for rank, reply in enumerate(replies):
        if "refused" in reply:
            raise StepError(f"rank {rank} could not build the pipeline: {reply['refused']}", rank=rank)
    plans = [reply["plan"] for reply in replies if "plan" in reply]
    if len(set(plans)) > 1:
        listed = "; ".join(f"rank {rank}: {plan}" for rank, plan in enumerate(plans))
        raise ValueError(f"schedule: the ranks do not build the same pipeline: {listed}")


def _call_text(request: Request) -> str:
    """What must be the same on every rank."""
    names = ", ".join(["", *sorted(request.kwargs)])
    call = "step" if request.training else "eval_step or a forward-only step"
    return f"{call} with num_microbatches={request.num_microbatches}{names}"


def _replayed(request: Request, inputs: Inputs) -> Request:
    """The same request, forward only, with the microbatches that were taken from it already."""
    args = request.args if inputs.args is None else (list(inputs.args),)
    kwargs = {name: inputs.kwargs.get(name, value) for name, value in request.kwargs.items()}
    return Request(args, kwargs, None, None, request.num_microbatches, training=False)


def _by_microbatch(found: Mapping[int, torch.Tensor]) -> list[torch.Tensor] | None:
    return [found[i] for i in sorted(found)] or None


def _close(control: Control, ranks: LocalRanks) -> None:
    control.close()
    ranks.close()
