"""One step on this process, from the agreement on its inputs to its result or its failure.

If the set of trainable parameters changes (layers are unfrozen, for example), replicas must agree first. Only the
ranks with these parameters know of the change, and replicas exchange nothing before a step. So the ranks of their
pipeline act as if the step had failed before it began: they join every collective of the program and report the reason.
Replicas that run the step detect this, and raise. If all replicas report the same reason, they update their wrappers
and run the step, as none has computed anything yet.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from functools import lru_cache, partial, reduce
from typing import Any, NoReturn, TypeVar

import torch

from fastpipe.checks import check_counts
from fastpipe.program import Program
from fastpipe.runtime.common import (
    Calls,
    Failure,
    FailureError,
    add_note,
    call_in_thread,
    cause_text,
    claimed,
    failure_of,
    listed,
    set_grad_dtype,
    waiting,
)
from fastpipe.runtime.coordination import (
    Control,
    Cores,
    Replies,
    Reply,
    exchange_or_refuse,
    prepare_together,
)
from fastpipe.runtime.executor import DeviceEvents, LocalRanks, Outcome
from fastpipe.runtime.model import RestOfModel, StageCopies, Unfilled, flags_of, selected
from fastpipe.runtime.stage import (
    IN_TURNS,
    NoLoss,
    RandomNumbers,
    RngUsage,
    Stage,
    StageWork,
    warn_of_unreached_inputs,
    warn_of_whole_weights,
)
from fastpipe.runtime.step.agreement import batch_digests, call_text, check_calls, check_replies
from fastpipe.runtime.step.audit import Audit
from fastpipe.runtime.step.inputs import (
    BatchArguments,
    Inputs,
    Request,
    signature_of,
    take_inputs,
)
from fastpipe.runtime.step.microbatch import check_merge_rules
from fastpipe.runtime.step.programs import Programs
from fastpipe.runtime.step.result import (
    Outputs,
    StepResult,
    Weights,
    every_output,
    pack_spans,
    report_outputs,
    unpack_spans,
    weights_of,
)
from fastpipe.runtime.step.watchdog import Watchdog, places_text
from fastpipe.runtime.transport import MeshGroups, SharedCall, Transport


def has_unreduced_parameters(stages: Sequence[Stage]) -> bool:
    """Whether a stage has trainable parameters that its replicas would not reduce.

    Raises:
        ValueError: if the wrapper cannot be updated.
    """
    found = []
    for stage in stages:
        if stage.parallel is not None:
            stage.parallel.check_covers(stage.module)
            found.append(stage.parallel.unreduced())
    for stage in stages:
        names = [name for name, p in stage.module.named_parameters() if p.requires_grad] if stage.bare else []
        if names:
            raise ValueError(
                f"data_parallel: stage {stage.index} had no parameters when the Pipeline was built, so it has no "
                f"DistributedDataParallel, and {listed(names)} now require gradients; build a new Pipeline"
            )
    return any(found)


def update_replicas(control: Control, ranks: LocalRanks, program: Program) -> None:
    """Make the replicas reduce the parameters that are trainable now. Collective over the pipeline.

    Raises:
        ValueError: if replicas train different parameters; the other ranks raise StepError.
        FailureError: if another replica does not take part.
    """
    error: Exception | None = None
    outcome = ranks.run_collectives(program)
    failure = outcome.failure
    try:
        if failure is not None:
            raise FailureError(failure) from outcome.error
        for stage in ranks.all_stages:
            renewed = stage.parallel is not None and stage.parallel.reduce_new()
            if renewed and stage.grad_dtype is not None:
                set_grad_dtype(stage.module, stage.grad_dtype)
    except Exception as found:  # raised below, after the exchange
        failure, error = failure or Failure(control.rank, cause_text(found)), found
    del outcome
    try:
        _, refused = exchange_or_refuse(control, "replicas", {}, failure)
        if error is not None:
            raise error
    finally:
        del error  # breaks the cycle of exception and frame
    if refused is not None:
        raise FailureError(refused) if refused.is_fatal else refused.error("refused the step")


_COMPARED_WHOLE, _COMPARED_EVERY = 2, 256
"""Ranks compare all values of their batches in the first steps and periodically, which waits for the device. In other
steps they compare a sample of the CPU tensors."""
_ROUND_SECONDS = 5.0
"""After this time ranks in collective work tell each other that they are alive."""
Value = TypeVar("Value")
_collective = threading.Lock()
"""Held by the pipeline of this process that is in collective work of torch.distributed, whose groups take one call at
a time, in the same order on all ranks. Who waited for it could be waited for by a rank whose threads come in another
order."""
_IS_COLLECTIVE = (
    "while another pipeline of this process is in such a call, in another thread: a process group takes one call at a "
    "time, so save, load and gather outputs in one thread"
)
_MAX_SIGNATURES = 64
"""The number of cached input signatures; other signatures cost a step with headers."""


class Steps:
    """Runs the steps of a pipeline on this process.

    Args:
        copies: handles stages that two ranks hold, and tied weights.
        unfilled: the stages of a pipeline that was built on meta, until its first step.
        rest: what this process has of the model and does not compute.
        warn_after: seconds after which a step is reported that has not ended.
        audit: of parts of steps, on another rank; None without.

    Attributes:
        announced: input signatures whose shapes are not announced again, and their numbers for transports.
        loss_scale: returns the factor of the backward's roots; None without scaling.
        broken: the fatal failure that ended the pipeline, if any.
    """

    def __init__(
        self,
        batch: BatchArguments,
        cores: Cores,
        programs: Programs,
        ranks: LocalRanks,
        control: Control,
        copies: StageCopies,
        random: RandomNumbers,
        unfilled: Unfilled | None,
        rest: RestOfModel,
        *,
        warn_after: float = float("inf"),
        audit: Audit | None = None,
    ) -> None:
        self.batch = batch
        self.device = ranks.device
        self.cores = cores
        self.programs = programs
        self.ranks = ranks
        self.control = control
        self.copies = copies
        self.random = random
        self.unfilled = unfilled
        self.rest = rest
        self.audit = audit
        self.stages = ranks.all_stages
        self.announced: dict[tuple[Any, ...], int] = {}
        self._lossless: set[tuple[Any, ...]] = set()
        """Signatures of training steps without a loss, which run forward only."""
        self._flags: tuple[Any, ...] = ()
        self.loss_scale: Callable[[], torch.Tensor] | None = None
        self.broken: Failure | None = None
        self._part_of = ""
        self._has_separate_grads = False  # by `StageCopies.before_step` of this step
        self._outputs: Outputs = dict  # of this step
        # the watcher's thread holds this, and must not hold the stages
        self._unblock = partial(_unblock, ranks.mesh_groups, ranks.device_events, ranks.transport)
        control.on_loss(self._unblock)
        self._open_warnings = [warn_of_whole_weights, warn_of_unreached_inputs]  # each until it has judged a step
        self.watchdog = Watchdog(control, ranks, warn_after)
        self._calls = Calls(ranks.interrupt)

    def run(self, request: Request) -> StepResult:
        """One step; see `Pipeline.step` and `Pipeline.eval_step`."""
        with self._calls.entered(), self._calls.uninterrupted(), self.cores.kept():
            return self._run(request)

    def _run(self, request: Request) -> StepResult:
        with self._exchanging(), contextlib.ExitStack() as after:
            self._has_separate_grads = False
            after.callback(self.copies.release)
            inputs, replies = self._agree_on_inputs(request)
            signature = (request.training, *(reply["signature"] for reply in replies))
            if signature not in self._lossless:
                program = self._prepare(request, replies)
                with self._published():
                    weights = self._weights(replies, request)
                    with torch.set_grad_enabled(request.training):
                        outcome = self._execute(program, inputs, weights, request, signature)
                    if self._calls.interrupted and outcome.failure is None:
                        outcome.failure = self.ranks.interrupted
                    replies = self._finish(outcome, request)
                    if self.audit is not None and request.training and not _have_failed(replies):
                        self.audit.end(replies)
                    # within this context, as all ranks must announce the same steps, whatever a signal's handler raises
                    if not _have_failed(replies):
                        self._remember(signature)
                if any(reply.get("no_loss") for reply in replies):
                    if len(self._lossless) == _MAX_SIGNATURES:
                        self._lossless.clear()
                    self._lossless.add(signature)
        if signature in self._lossless:
            return self._run(_forward_only(request, inputs))
        self._raise_failure(program, outcome, replies)
        if self.audit is not None and self.audit.finding is not None:
            self._release()
            raise self.audit.take_finding()
        self.random.done(request.training)
        return self._result(program, outcome, replies, weights)

    @contextlib.contextmanager
    def _exchanging(self) -> Iterator[None]:
        """Context in which the processes are in one step; losing one ends the pipeline."""
        if self.broken is not None:
            raise self.broken.error()
        self.ranks.reported = None
        self.control.begin(self._failed_elsewhere)
        self.watchdog.begin()
        try:
            yield
        except FailureError as error:
            self.abort(error.failure, error.__cause__ or error)
        finally:
            self.watchdog.end()
            self.control.end()

    def _agree_on_inputs(self, request: Request) -> tuple[Inputs, Replies]:
        """Take the inputs on every process; if one fails, all raise."""
        call = self._part_of + call_text(request) + self.random.call_text(self.audit is not None)
        refuse = partial(self._refuse, request)
        inputs, replies = self._agree(call, partial(self._take_inputs, request), "refused its input", refuse)
        with self._published(ValueError):
            try:
                check_replies(request, replies, self.control.pipeline)
            except ValueError as error:
                refuse(Failure(None, cause_text(error)))
                raise
        with self._published():
            if self.ranks.pairs == IN_TURNS:
                usages = [RngUsage(*reply["random"]) for reply in replies.everywhere]
                self.random.elsewhere = reduce(operator.or_, usages)
            self.copies.agreed()
            if self.unfilled is not None:
                self._use_values()
        return inputs, replies

    def _take_inputs(self, request: Request) -> tuple[Inputs, Reply]:
        """The inputs of this process, and its message to the others."""
        message: Reply = {"changes": self.copies.prepare()}
        self.rest.check_unchanged()
        self.check_filled()
        self.ranks.check_modes()
        self._check_trains(request)
        self.random.check_free(self._has_pairs(request))
        for stage in self.stages:
            if stage.parallel is not None:
                stage.parallel.prepare()
        message["unreduced"] = request.training and request.reduces and has_unreduced_parameters(self.stages)
        inputs = take_inputs(request, self.batch, self.stages)
        message |= {"rows": inputs.counted, "whole": inputs.whole, "signature": self._signature(request, inputs)}
        message |= {"divisors": inputs.divisors, "unknown": inputs.unknown, "kwargs": inputs.given()}
        if self.ranks.pairs == IN_TURNS:
            message["random"] = self.random.usage(request.training, self._flags)
        message["autocast"] = self._autocast()
        if self.control.pipeline:
            # the number of flags, too: peers whose modules differ, such as in a bias that one has, are not compared
            message["flags"] = [len(self._flags), _digest(self._flags)]
        if not self.control.is_alone:
            number = self.control.step
            compares_all = number <= _COMPARED_WHOLE or number % _COMPARED_EVERY == 0
            message["batch"] = batch_digests(request, inputs, compares_all)
        return inputs, message

    def _check_trains(self, request: Request) -> None:
        """Refuse a training step that computes no gradients."""
        if request.training and not torch.is_grad_enabled():
            raise ValueError(
                "step computes gradients, and was called under torch.no_grad() or torch.inference_mode(): call "
                "eval_step, or step outside of it"
            )
        if type(request.num_microbatches) is not int:  # NumPy's is as good
            check_counts(num_microbatches=request.num_microbatches)
        program = self.programs.program(request.num_microbatches, not request.training)
        if request.training and program.forward_only:
            raise ValueError(
                f"schedule = {program.name!r}: it has no backward, so step would train nothing; call eval_step, or "
                "use another schedule"
            )

    def check_filled(self) -> None:
        """Refuse to use stages that were built on meta and have no values."""
        if self.unfilled is not None:
            self.unfilled.check()

    def _use_values(self) -> None:
        """Begin to use stages that now have values on all ranks."""
        for stage in self.stages:
            if stage.grad_dtype is not None:
                set_grad_dtype(stage.module, stage.grad_dtype)
        self.copies.equalise(initialised=True)
        self.unfilled = None

    def _refuse(self, request: Request, failure: Failure) -> None:
        """Join the collectives of a step that this pipeline refuses, in which its replicas learn of it.

        Raises:
            FailureError: if another replica does not take part.
        """
        if not self.programs.parallel:
            return
        try:
            program = self.programs.program(request.num_microbatches, not request.training)
        except Exception:  # it is what the pipeline refuses: there is no such step
            return
        for stage in self.stages:
            if stage.parallel is not None:
                with contextlib.suppress(ValueError):  # it may be what the pipeline refuses
                    stage.parallel.prepare()
        who = "its pipeline" if failure.rank is None else failure.place()
        why = f"{who} refused its input: {failure.cause}"
        with torch.set_grad_enabled(request.training):
            outcome = self.ranks.run_collectives(program, why, reduces=request.training and request.reduces)
        lost = outcome.failure
        del outcome  # its error holds frames
        _, lost = exchange_or_refuse(self.control, "replicas", {}, lost if lost and lost.is_fatal else None)
        if lost is not None:
            raise FailureError(replace(lost, cause=f"{why}; {lost.cause}"))

    def _agree(
        self,
        call: str,
        make: Callable[[], tuple[Value, Reply]],
        refusal: str,
        refuse: Callable[[Failure], None] = lambda failure: None,
    ) -> tuple[Value, Replies]:
        """Exchange the messages at the start of a call; a rank that cannot start is an error on every rank.

        Args:
            call: must be the same on every rank.
            make: returns what this rank keeps for the call, and its message.
            refusal: what a rank did that raises an exception in it, for the others.
            refuse: called on all ranks if one raises an exception in it.
        """
        error: BaseException | None = None
        own: Reply = {}
        try:
            made, own = make()
        except BaseException as found:  # raised below, after the exchange
            error = found
        try:
            failure = None if error is None else Failure(self.control.rank, cause_text(error))
            with self._published():
                replies, refused = exchange_or_refuse(self.control, "start", {"call": call} | own, failure)
            # first: an error may be the consequence, as of a collective within the mesh whose peer made another call
            check_calls(replies)
            if refused is not None:
                refuse(refused)
            if error is not None:
                raise error
        finally:
            del error  # breaks the cycle of exception and frame
        if refused is not None:
            raise refused.error(refusal)
        return made, replies

    def _signature(self, request: Request, inputs: Inputs) -> int:
        """Everything that may change a shape, a dtype or a gradient flag between stages."""
        self._flags = tuple(flag for stage in self.stages for flag in flags_of(stage.module))
        return hash(
            (request.num_microbatches, signature_of(request, inputs, self.batch.split), self._flags, self._autocast())
        )

    def _autocast(self) -> str:
        kind = self.device.type
        return f"in {torch.get_autocast_dtype(kind)}" if torch.is_autocast_enabled(kind) else "off"

    def _prepare(self, request: Request, replies: Sequence[Reply]) -> Program:
        """The program of a step, with its executors and the replicas of its stages up to date."""
        program = self.programs.program(request.num_microbatches, not request.training)
        if not self.ranks.has(program):
            with self._published():
                prepare_together(self.control, lambda: self.ranks.prepare(program))
        if any(reply["unreduced"] for reply in replies):
            update_replicas(self.control, self.ranks, program)
            self._reset_signatures()
        return program

    @contextlib.contextmanager
    def _published(self, *refusals: type[Exception]) -> Iterator[None]:
        """Context in which other processes may wait for this one: the agreement on a step, and from there to its end.

        Executors and `_finish` report failures within a step, after which the next one works. Any other exception is
        published at once and ends the pipeline, as the progress of the other processes is unknown.

        Args:
            refusals: exceptions that all processes raise.
        """
        try:
            yield
        except FailureError as error:
            reported = self.ranks.reported
            if error.failure.is_suspected and reported is not None and reported.is_fatal:
                raise FailureError(reported) from error
            raise
        except BaseException as error:  # raised again, after it is published
            if not self.control.is_alone and not isinstance(error, refusals):
                failure = replace(failure_of(error, self.ranks.first), is_fatal=True)
                self.control.publish(failure)
                self._break(failure)
            self.broken = self.broken or self.ranks.abandoned
            raise

    def _weights(self, replies: Sequence[Reply], request: Request) -> Weights:
        """The weights of the microbatches on every rank: by the target if it can be counted, otherwise by the input."""
        counted = [reply["rows"] for reply in replies if reply["rows"]]
        _, rows = min(counted, key=lambda found: found[0]) if counted else (None, None)
        given = next((reply["divisors"] for reply in replies if reply["divisors"]), None)
        return weights_of(self.batch.loss_reduction, given, rows, request.num_microbatches)

    def _execute(
        self,
        program: Program,
        inputs: Inputs,
        weights: Weights,
        request: Request,
        signature: tuple[Any, ...],
    ) -> Outcome:
        self.watchdog.phase = "runs the step"
        announce = signature not in self.announced
        number = self._number(signature)
        error: BaseException | None = None
        recording: AbstractContextManager[None] = contextlib.nullcontext()
        try:
            if self.audit is not None and request.training:
                recording = self.audit.begin(program, self.random.step_count, self.stages)
            self._begin(inputs, weights, request, number, announce)
        except BaseException as found:  # the ranks publish it, and complete the program's communication
            error = found
            for stage in self.stages:
                stage.begin(StageWork(reduces=request.reduces))
        with recording:
            outcome = self.ranks.run(program, number, announce, request.traces, error)
        if outcome.failure is None and len(outcome.spans) == len(self.ranks.stages):
            refusal = self.random.check()
            if refusal is not None:
                outcome.fail(refusal, self.ranks.first)
        return outcome

    def _begin(self, inputs: Inputs, weights: Weights, request: Request, number: int, announce: bool) -> None:
        loss_scale, count = self.scale_now(), request.num_microbatches
        guards = self.random.begin(request.training, self._flags, self._has_pairs(request))
        for stage in self.stages:
            named = selected(inputs.kwargs, stage.accepts)
            work = StageWork(
                args=inputs.args if stage.is_first else None,
                kwargs=[{name: values[i] for name, values in named.items()} for i in range(count)] if named else None,
                targets=inputs.targets if stage.is_last else None,
                output_grads=inputs.output_grads if stage.is_last else None,
                divisors=weights.loss,
                loss_scale=loss_scale,
                keep_outputs=self.batch.keeps_outputs,
                reduces=request.reduces,
            )
            stage.begin(work, self.random if guards else None)
            stage.context.step = self.random.step_count
            stage.shaped(number, announce)
        self.copies.follow()
        if request.training:
            self.copies.before_step()
            self.rest.begin(self.control.step)
            self._has_separate_grads = True

    def scale_now(self) -> torch.Tensor | None:
        """The factor of the roots of this step's backward."""
        return None if self.loss_scale is None else self.loss_scale()

    def _has_pairs(self, request: Request) -> bool:
        return request.training and self.programs.has_pairs(request.num_microbatches)

    def _number(self, signature: tuple[Any, ...]) -> int:
        """The number of a signature for transports; if the cache is full, the oldest number is reused."""
        if signature in self.announced:
            return self.announced[signature]
        return len(self.announced) if len(self.announced) < _MAX_SIGNATURES else next(iter(self.announced.values()))

    def _finish(self, outcome: Outcome, request: Request) -> Replies:
        """Exchange the outcomes, and sum the gradients of stages that two ranks hold and of tied weights."""
        self.watchdog.phase = "has run the step, and waits for the outcome of the other ranks"
        try:
            if outcome.failure is None:
                self.copies.check_unwritten()
                if request.training:
                    self.rest.check()
            report = self._report(outcome, request)
            # a report of losses waits for the device; if a rank was lost meanwhile, its values are invalid
            if outcome.failure is None:
                self.ranks.device_events.check()
            if self.audit is not None and request.training and outcome.failure is None:
                report |= self.audit.report()
        except Exception as error:  # reported as the step's failure
            outcome.fail(error, self.ranks.first)
            report = self._report(outcome, request)
        try:
            replies = self.control.exchange("end", report)
        except FailureError as error:
            # on the rank that failed, its own exception says more
            raise error from outcome.error or error.__cause__
        if self._has_separate_grads:
            self.copies.after_step(not _have_failed(replies))
        return replies

    def _report(self, outcome: Outcome, request: Request) -> Reply:
        reply: Reply = {}
        if self.ranks.failed_at:
            reply["positions"] = [(rank, position) for rank, _, position in self.ranks.failed_at]
        if outcome.failure is not None:
            reply["failure"] = asdict(outcome.failure)
            reply["first"] = asdict(outcome.first or outcome.failure)
            reply["no_loss"] = isinstance(outcome.error, NoLoss)
        else:
            for stage in self.stages:
                for output in list(stage.work.outputs.values())[:1]:
                    check_merge_rules(output, self.batch.merge_rules)
            events = self.ranks.device_events
            found, self._outputs = report_outputs(self.stages, self.control, self.device, events)
            reply |= found
        if request.traces:
            reply["spans"] = pack_spans(outcome.spans)
        return reply

    def _remember(self, signature: tuple[Any, ...]) -> None:
        """Mark a signature as announced."""
        if signature in self.announced:
            return
        number = self._number(signature)
        if len(self.announced) == _MAX_SIGNATURES:
            del self.announced[next(iter(self.announced))]
        self.announced[signature] = number
        self._open_warnings = [warn for warn in self._open_warnings if not warn(self.stages)]

    def _result(self, program: Program, outcome: Outcome, replies: Sequence[Reply], weights: Weights) -> StepResult:
        outputs = every_output(self._outputs, self.control, self.device, replies)
        spans = dict(outcome.spans)
        for reply in replies:
            spans.update(unpack_spans(reply.get("spans", {})))
        found = {i: output for stage in self.stages for i, output in stage.work.outputs.items()}
        for stage in self.stages:
            stage.end()
        return StepResult(outputs, found, self.batch.merge_rules, program, spans, weights, self.batch.metrics)

    def _raise_failure(self, program: Program, outcome: Outcome, replies: Replies) -> None:
        """Raise the step's failure, if any: the original exception on the rank of origin, StepError elsewhere."""
        # causes first: ranks that missed messages after another failure report only the consequence
        everywhere = replies.everywhere
        failures = [Failure(**reply[key]) for key in ("first", "failure") for reply in everywhere if key in reply]
        if not failures and self.ranks.reported is not None:
            failures = [self.ranks.reported]
        if not failures:
            return
        # of fatal failures, prefer one with a rank to one of missing messages, whose rank is only suspected
        fatal = sorted((f for f in failures if f.is_fatal), key=lambda f: (f.rank is None, f.is_suspected))
        if fatal:
            self.abort(fatal[0], outcome.error)
        self._release()
        positions = {rank: position for reply in replies for rank, position in reply.get("positions", [])}
        note = places_text(program, positions) if positions else ""
        # no exception in a local variable: it would be in a cycle with this frame, and keep the pipeline
        if outcome.error is None or outcome.failure is None:
            raise failures[0].error(note=note)
        is_first = outcome.first is None or outcome.first.rank in self.ranks.stages
        if not is_first or isinstance(outcome.error, FailureError):
            # after a failure elsewhere this rank computed on stand-ins
            raise failures[0].error(note=note) from outcome.error
        add_note(outcome.error, f"fastpipe: raised on {outcome.failure.place()}")
        if note:
            add_note(outcome.error, note)
        error, outcome.error = outcome.error, None
        try:
            raise error
        finally:
            del error  # breaks the reference cycle of exception and frame

    def _failed_elsewhere(self, failure: Failure) -> None:
        """Called by the watcher: another process failed or died."""
        self.ranks.fail(failure)
        if failure.is_fatal:
            self._unblock(failure)

    def abort(self, failure: Failure, cause: BaseException | None = None) -> NoReturn:
        """End this pipeline with a fatal failure, and raise it."""
        note = "" if self.control.is_alone else self.watchdog.last_report()
        self._break(failure)
        if cause is not None and not isinstance(cause, Exception):
            try:
                raise cause  # such as the SystemExit of a signal's handler, which ends the process
            finally:  # the FailureError that is handled here holds it, and this frame, too
                cause.__context__ = None
                del cause
        raise failure.error(note=note) from cause

    def _break(self, failure: Failure) -> None:
        self.broken = failure
        self._release()
        # another rank may wait for this one in a step
        self.ranks.abort(failure)

    def _release(self) -> None:
        """Drop the state of a failed step."""
        for stage in self.stages:
            stage.end()
            if stage.parallel is not None:
                stage.parallel.forget()
        # announcements of a failed step may be incomplete or outdated
        self.announced.clear()

    def follow(self, programs: Programs) -> None:
        """Run other programs on the same stages from the next step on."""
        self.programs = programs
        self.ranks.forget()
        self._reset_signatures()

    def _reset_signatures(self) -> None:
        """Reset the cached signatures and the set of gradients that wait for W."""
        self.announced.clear()
        for stage in self.stages:
            stage.deferred = None

    def all_gather(
        self,
        call: str,
        make: Callable[[], Reply],
        then: Callable[[Replies], None] | None = None,
        shared: SharedCall | None = None,
    ) -> Replies:
        """Gather a message from every process, between steps.

        Args:
            call: the name of the call, the same on every rank.
            make: returns the message; an exception is an error on every rank.
            then: called with the messages, for collective work; see `_together`.
            shared: the call, if other pipelines take part in that work.

        Raises:
            StepError: if another process failed, is dead or is silent.
            ValueError: if the ranks make different calls.
            RuntimeError: if another pipeline of this process is in collective work, in another thread.
        """
        published = contextlib.nullcontext() if shared is None else shared.published()
        with published, self._calls.entered(), self._exchanging(), contextlib.ExitStack() as in_turn:

            def claim_and_make() -> tuple[None, Reply]:
                if then is not None and not self._works_alone(shared):
                    in_turn.enter_context(claimed(_collective, f"{call} {_IS_COLLECTIVE}"))
                return None, make()

            _, replies = self._agree(call, claim_and_make, f"failed in {call}")
            if then is not None:
                self._together(call, partial(then, replies), shared)
            return replies

    @contextlib.contextmanager
    def part_of(self, call: str) -> Iterator[None]:
        """Context of a call that runs steps: a step of another rank that is not part of the same call is refused."""
        self._part_of = f"{call}: "
        try:
            yield
        finally:
            self._part_of = ""

    def _works_alone(self, shared: SharedCall | None) -> bool:
        """Whether no other process takes part in collective work."""
        return self.control.is_alone and (shared is None or not shared.is_shared)

    def _together(self, call: str, work: Callable[[], None], shared: SharedCall | None) -> None:
        """Run collective work in a thread, which gets this thread's stream and no other state of it.

        The work may take any time. In rounds of an exchange the ranks tell each other whether theirs has ended. So a
        silent rank is named after the timeout, and all learn of an error that is raised on one rank alone. If all have
        ended, the pipeline can be used further.
        """
        if self._works_alone(shared):
            return work()
        stream = torch.cuda.current_stream(self.device) if self.device.type == "cuda" else None

        def work_in_thread() -> None:
            if stream is not None:
                torch.cuda.set_stream(stream)  # and the device
            work()

        def lost() -> Failure | None:
            elsewhere = None if shared is None else shared.lost()
            return self.control.lost() or (elsewhere and replace(elsewhere, cause=f"{call}: {elsewhere.cause}"))

        self.watchdog.phase = f"is in {call}"
        running: Future[None] | None = None
        seconds = min(self.ranks.timeout / 4, _ROUND_SECONDS)
        errors: list[BaseException] = []
        has_failed = False
        try:
            with self._published():
                running = call_in_thread(work_in_thread, "fastpipe-collective")
                for number in itertools.count():
                    ended = self._has_ended(running, seconds, lost, errors)
                    failure = Failure(self.control.rank, cause_text(errors[0])) if errors else None
                    message = {"call": call, "ended": ended}
                    replies, refused = exchange_or_refuse(self.control, f"end {number}", message, failure)
                    if all(reply["ended"] for reply in replies.everywhere):
                        break
                    if refused is not None and has_failed:  # in the last round, too: others may wait for that rank
                        fatal = replace(refused, cause=f"{call}: {refused.cause}", is_fatal=True)
                        raise errors[0] if errors else FailureError(fatal)
                    has_failed = refused is not None
            if errors:
                raise errors[0]
        finally:
            errors.clear()
            running = None  # its exception holds this frame
        if refused is not None:
            raise refused.error(f"failed in {call}")

    def _has_ended(
        self,
        running: Future[None],
        seconds: float,
        lost: Callable[[], Failure | None],
        errors: list[BaseException],
    ) -> bool:
        """Wait for the work of this rank; an exception of it, or of a signal's handler, is added to ``errors``.

        Work that a signal interrupts goes on in its thread.

        Raises:
            FailureError: if a process is lost.
        """
        try:
            for pause in waiting(seconds, lost):
                if wait([running], pause).done:
                    running.result()
                    return True
            return False
        except FailureError:
            raise
        except BaseException as error:  # raised again by `_together`, after the exchange
            errors.append(error)
            return running.done()
        finally:
            del running


def _unblock(mesh_groups: MeshGroups, events: DeviceEvents, transport: Transport, failure: Failure) -> None:
    """Called by the watcher, in or between steps: another process ended."""
    mesh_groups.abort()
    events.invalidate(failure)
    transport.unblock(failure)


@lru_cache(maxsize=16)
def _digest(flags: tuple[Any, ...]) -> int:
    """The same in every process; kept, as flags rarely change."""
    return zlib.crc32(repr(flags).encode())


def _have_failed(replies: Replies) -> bool:
    return any("failure" in reply for reply in replies.everywhere)


def _forward_only(request: Request, inputs: Inputs) -> Request:
    """The same request, forward only, with the microbatches that were already taken."""
    args = request.args if inputs.args is None else (list(inputs.args),)
    kwargs = {name: inputs.kwargs.get(name, value) for name, value in request.kwargs.items()}
    return replace(request, args=args, kwargs=kwargs, target=None, output_grad=None, training=False)
