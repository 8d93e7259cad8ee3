"""Steps: what happens in one step on this process, from the agreement on its inputs to its result or its failure.

Stages whose replicas are to reduce other parameters than before (layers were unfrozen, say) need an agreement first.
Only the rank with such parameters knows of it, and replicas exchange nothing before a step. So the ranks of its
pipeline act as if the step had failed before it began: they join every collective of the program and report why. A
replica that makes the step learns of it there, and raises. If all came for the same reason, none has computed
anything yet: they tell their wrappers, and make the step.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any, NoReturn

import torch

from fastpipe.program import Program
from fastpipe.runtime.common import (
    CPU,
    Failure,
    FailureError,
    Interrupts,
    ReentrancyGuard,
    attended,
    cause_text,
    failure_of,
    set_grad_dtype,
    waiting,
)
from fastpipe.runtime.coordination import Alone, Control, Cores, Reply, exchange_or_refuse, prepare_together
from fastpipe.runtime.data_parallel import listed
from fastpipe.runtime.executor import LocalRanks, Outcome
from fastpipe.runtime.model import StageCopies, check_told, flags_of
from fastpipe.runtime.stage import NoLoss, RandomNumbers, Stage, StageWork
from fastpipe.runtime.step.inputs import (
    Inputs,
    Request,
    batch_digests,
    check_batches,
    check_cuts,
    check_given,
    stage_works,
    take_inputs,
)
from fastpipe.runtime.step.microbatch import Rules
from fastpipe.runtime.step.outputs import OutputExchange, StepOutputs
from fastpipe.runtime.step.programs import Programs
from fastpipe.runtime.step.result import MetricRules, Reports, StepResult, Weights, pack_spans, unpack_spans, weights_of


def misses(stages: Sequence[Stage]) -> bool:
    """Whether a stage has parameters to train that its replicas would not reduce.

    Raises:
        ValueError: where that cannot be mended.
    """
    found = []
    for stage in stages:
        if stage.parallel is not None:
            stage.parallel.check_covers(stage.module, stage.index)
            found.append(stage.parallel.missed())
    for stage in stages:
        names = [name for name, p in stage.module.named_parameters() if p.requires_grad] if stage.bare else []
        if names:
            raise ValueError(
                f"data_parallel: stage {stage.index} had no parameters when the Pipeline was built, so it has no "
                f"DistributedDataParallel, and now {listed(names)} are to be trained; build the Pipeline anew"
            )
    return any(found)


def settle(control: Control, ranks: LocalRanks, stages: Sequence[Stage], program: Program) -> None:
    """Have the replicas reduce what is to be trained now. All ranks of the pipeline come here.

    Raises:
        ValueError: when replicas do not train the same; on the other ranks StepError.
        FailureError: when another replica does not come.
    """
    outcome = ranks.ask_replicas(program)
    failure, error = outcome.failure, outcome.error
    if failure is None:
        try:
            for stage in stages:
                _adopt(stage)
        except Exception as found:  # raised below, when the others know
            failure, error = Failure(control.rank, cause_text(found)), found
    _, refused = exchange_or_refuse(partial(control.exchange, "replicas"), {}, failure)
    if outcome.failure is not None:
        raise FailureError(outcome.failure) from error
    if error is not None:
        raise error
    if refused is not None:
        raise FailureError(refused) if refused.is_fatal else refused.error("refused the step")


def _adopt(stage: Stage) -> None:
    renewed = stage.parallel is not None and stage.parallel.adopt()
    if renewed and stage.grad_dtype is not None:
        set_grad_dtype(stage.module, stage.grad_dtype)


_COMPARED_WHOLE, _COMPARED_EVERY = 2, 256
"""In which steps ranks compare all values of the batches that they were given: the first ones, and each of so many. To
read what is on a device is to wait for it. In the others they compare a sample of what is on the CPU."""
_GRACE_SECONDS = 1.0
"""After which it is known that a process has ended, where a connection with it has."""
_MAX_KNOWN = 64
"""How many combinations of input shapes are remembered; another one costs a step with headers."""


@dataclass(frozen=True)
class Settings:
    """How inputs come in and results go out; see `fastpipe.Pipeline`.

    Attributes:
        loss_fn: of the last stage.
        reduction: how the microbatches' losses become one.
        split: how arguments are cut.
        merge: how outputs are joined.
        keep_outputs: whether they are kept at all.
        metrics: how what the loss function returns beside the loss is reduced.
        device: what the stages compute on.
        cores: where steps run.
    """

    loss_fn: Callable[..., Any] | None
    reduction: str | Callable[[Any], float]
    split: Rules
    merge: Rules
    keep_outputs: bool
    metrics: MetricRules = "mean"
    device: torch.device = CPU
    cores: Cores = Cores()


class Steps:
    """Runs the steps of a pipeline on this process.

    Args:
        settings: the user's.
        plans: the programs.
        ranks: the local ranks, with their stages.
        control: the way to the other processes.
        replicas: what is to be done for stages that two ranks hold.
        random: what the stages do with random numbers.
        forward_only: whether there is no backward to begin with.

    Attributes:
        stages: the local stages.
        known: the shapes that need not be announced again, and what transports call them.
        loss_scale: gives what a backward's roots are multiplied by; None where they are not.
        reported: the first failure that another process reported in this step.
        broken: the failure after which the pipeline cannot go on, if there was one.
    """

    def __init__(
        self,
        settings: Settings,
        plans: Programs,
        ranks: LocalRanks,
        control: Control,
        replicas: StageCopies,
        random: RandomNumbers,
        *,
        forward_only: bool,
    ) -> None:
        self.settings = settings
        self.plans = plans
        self.ranks = ranks
        self.control = control
        self.replicas = replicas
        self.random = random
        self.forward_only = forward_only
        self.stages: list[Stage] = [stage for held in ranks.stages.values() for stage in held.values()]
        self.known: dict[tuple[Any, ...], int] = {}
        self._lossless: set[tuple[Any, ...]] = set()  # signatures of steps that had nothing to differentiate
        self._flags: tuple[bool, ...] = ()
        self.loss_scale: Callable[[], torch.Tensor] | None = None
        self.reported: Failure | None = None
        self.broken: Failure | None = None
        self._set_aside = False  # gradients, by `StageCopies.before_step` of the step that runs
        self._telling = OutputExchange(control, settings.device, ranks.device_events)
        control.on_loss(self._lost)
        self._interrupts = Interrupts(ranks.interrupt)
        self._calls = ReentrancyGuard()

    def run(self, request: Request, trace: bool) -> StepResult:
        """One step; see `Pipeline.step` and `Pipeline.eval_step`."""
        with self._calls.entered(), self._interrupts.deferred(), self.settings.cores.kept():
            return self._run(request, trace)

    def _run(self, request: Request, trace: bool) -> StepResult:
        lossless = False
        with self._exchanging(), contextlib.ExitStack() as after:
            self._set_aside = False
            after.callback(self.replicas.release)
            inputs, replies = self._agree_on_inputs(request)
            signature = (request.training, *(reply["signature"] for reply in replies))
            lossless = signature in self._lossless
            if not lossless:
                program = self.plans.program(request.num_microbatches, not request.training)
                if not self.ranks.has(program):
                    prepare_together(self.control, lambda: self.ranks.prepare(program))
                if any(reply["misses"] for reply in replies):
                    settle(self.control, self.ranks, self.stages, program)
                    self._forget_habits()
                with self._published():
                    weights = self._weights(replies, request)
                    with torch.set_grad_enabled(request.training):
                        outcome = self._execute(program, inputs, weights, request, signature, trace)
                    if self._interrupts.pending and outcome.failure is None:
                        outcome.failure = Failure(self.ranks.first, "KeyboardInterrupt")
                    replies = self._finish(outcome, request, trace)
                lossless = any(reply.get("no_loss") for reply in replies)
        if lossless:
            # there is nothing to differentiate: this step and those with the same signature are forward only
            if len(self._lossless) == _MAX_KNOWN:
                self._lossless.clear()
            self._lossless.add(signature)
            return self._run(_replayed(request, inputs), trace)
        self._raise_failure(outcome, replies)
        self._remember(signature)
        self.random.done(request.training)
        return self._result(program, outcome, replies, weights)

    @contextlib.contextmanager
    def _exchanging(self) -> Iterator[None]:
        """Within this context the processes are in one step; where one is lost in it the pipeline is over."""
        if self.broken is not None:
            raise self.broken.error()
        self.reported = None
        self.control.begin(self._failed_elsewhere)
        try:
            yield
        except FailureError as error:
            self.abort(error.failure, error)
        finally:
            self.control.end()

    @contextlib.contextmanager
    def _published(self) -> Iterator[None]:
        """Within this context, from the agreement on a step to its end, other processes may wait for this one.

        The executors and `_finish` report what fails in a step, so that the next one works. Whatever else is raised is
        published at once, and the pipeline is over: it is not known what the others have done by then.
        """
        try:
            yield
        except FailureError as error:
            if error.failure.is_suspected and self.reported is not None and self.reported.is_fatal:
                raise FailureError(self.reported) from error
            raise
        except BaseException as error:  # raised again; the other processes get the failure
            if not isinstance(self.control, Alone):
                failure = replace(failure_of(error, self.ranks.first), is_fatal=True)
                self.control.publish(failure)
                self._break(failure)
            raise

    def _finish(self, outcome: Outcome, request: Request, trace: bool) -> list[Reply]:
        """Learn how it went for the others, and sum the gradients of stages that two ranks hold."""
        try:
            report = self._report(outcome, trace)
            # to report losses is to wait for the device, which may have waited for a lost rank, and gone on without
            if outcome.failure is None and not self.ranks.check(outcome):
                report = self._report(outcome, trace)
        except Exception as error:  # the step's failure, in the reports of all
            outcome.fail(error, self.ranks.first)
            report = self._report(outcome, trace)
        replies = self.control.exchange("end", report)
        if request.training and self._set_aside:
            self.replicas.after_step(not any("failure" in reply for reply in replies))
        return replies

    def abort(self, failure: Failure, cause: BaseException | None = None) -> NoReturn:
        """End this pipeline by a fatal failure, and raise that."""
        self._break(failure)
        raise failure.error() from cause

    def _break(self, failure: Failure) -> None:
        self.broken = failure
        self._release()
        # another may have begun the step that this one never will, and wait for it
        self.ranks.abort(failure)

    def _release(self) -> None:
        """Drop what a failed step left behind."""
        for stage in self.stages:
            stage.end()
        # what was announced in a failed step may be incomplete, and what was known may have changed
        self.known.clear()

    def _agree_on_inputs(self, request: Request) -> tuple[Inputs, list[Reply]]:
        """Every process takes its inputs; if one cannot, all raise."""
        error: BaseException | None = None
        inputs = Inputs()
        message: Reply = {"call": _call_text(request) + self.random.call_text()}
        try:
            message["told"] = self.replicas.prepare()
            self.plans.program(request.num_microbatches, not request.training)
            self.random.check_free(self._has_pairs(request))
            for stage in self.stages:
                if stage.parallel is not None:
                    stage.parallel.prepare()
            message["misses"] = request.training and request.reduces and misses(self.stages)
            inputs = take_inputs(
                request, self.settings.split, self.stages, self.settings.loss_fn, self.settings.reduction
            )
            signature = self._signature(request, inputs)
            message |= {"rows": inputs.counted, "whole": inputs.whole, "signature": signature}
            message |= {"divisors": inputs.divisors, "unknown": inputs.unknown}
            if not isinstance(self.control, Alone):
                number = self.control.step
                compares_all = number <= _COMPARED_WHOLE or number % _COMPARED_EVERY == 0
                message["batch"] = batch_digests(request, inputs, compares_all)
        except BaseException as found:  # raised again by `_agree`, when the others know
            error = found
        message["kwargs"] = inputs.given()
        replies = self._agree(message, error, "refused its input")
        self._check_replies(request, replies)
        self.replicas.agreed()
        return inputs, replies

    def follow(self, plans: Programs, *, forward_only: bool) -> None:
        """From the next step on run other programs on the same stages."""
        self.plans, self.forward_only = plans, forward_only
        self.ranks.forget()
        self._forget_habits()

    def _forget_habits(self) -> None:
        """What the stages hand on, and which gradients wait for W, may be other than it was."""
        self.known.clear()
        for stage in self.stages:
            stage.has_split, stage.deferred = False, frozenset()

    def all_gather(
        self, call: str, make: Callable[[], Reply], then: Callable[[list[Reply]], None] | None = None
    ) -> list[Reply]:
        """Between steps: every process gives a message, and gets those of all.

        Args:
            call: what is called, in words that must be the same on every rank.
            make: gives the message; when it raises, that is an error on every rank.
            then: what all do with the messages, where they wait for each other: in `attend`.

        Raises:
            StepError: when another process could not give its message, or is dead or silent.
            ValueError: when the ranks do not make the same call.
        """
        with self._calls.entered(), self._exchanging():
            message: Reply = {"call": call}
            error: BaseException | None = None
            try:
                message |= make()
            except BaseException as found:  # raised again by `_agree`, when the others know
                error = found
            replies = self._agree(message, error, f"failed in {call}")
            if then is not None:
                then(replies)
            return replies

    def attend(self, work: Callable[[], None]) -> None:
        """What the processes do together in their own way, however long it takes; unless one is lost.

        Raises:
            FailureError: when one is lost. What it does is then left alone.
        """
        if isinstance(self.control, Alone):
            return work()
        device = self.settings.device

        def there() -> None:
            if device.type == "cuda":
                torch.cuda.set_device(device)
            work()

        try:
            attended(there, self.control.lost, timedelta.max)
        except FailureError:
            raise
        except BaseException:  # raised again, where it is not the end of another process
            for pause in waiting(_GRACE_SECONDS, self.control.lost):
                time.sleep(pause)
            raise

    def _agree(self, message: Reply, error: BaseException | None, refusal: str) -> list[Reply]:
        """Exchange what the ranks begin with; a rank that cannot begin is an error on every rank."""
        failure = None if error is None else Failure(self.control.rank, cause_text(error))
        replies, refused = exchange_or_refuse(functools.partial(self.control.exchange, "start"), message, failure)
        if error is not None:
            raise error
        calls = [reply["call"] for reply in replies]
        if len(set(calls)) > 1:
            listed = "; ".join(f"rank {rank}: {call}" for rank, call in enumerate(calls))
            raise ValueError(f"the ranks do not make the same call: {listed}")
        if refused is not None:
            raise refused.error(refusal)
        return replies

    def _check_replies(self, request: Request, replies: Sequence[Reply]) -> None:
        whole = {name: rows for reply in replies for name, rows in reply["whole"].items()}
        check_cuts(whole, request.num_microbatches)
        taken = {name for reply in replies for name in reply["kwargs"]}
        for name in request.kwargs:
            if name not in taken:
                raise ValueError(f"{name}: no stage's forward takes this keyword argument; leave it out")
        check_given([reply["kwargs"] for reply in replies])
        for name in set.intersection(*(set(reply["unknown"]) for reply in replies)):
            raise ValueError(
                f"split[{name!r}]: no stage's forward takes such an argument; name one that it takes, the position "
                "of an input, 'target' or 'output_grad'"
            )
        check_batches([reply.get("batch", {}) for reply in replies])
        check_told([reply["told"] for reply in replies])

    def _signature(self, request: Request, inputs: Inputs) -> int:
        """Whatever may change a shape, a dtype or a gradient flag between stages."""
        self._flags = tuple(flag for stage in self.stages for flag in flags_of(stage.module))
        kind = self.settings.device.type
        autocast = (torch.is_autocast_enabled(kind), str(torch.get_autocast_dtype(kind)))
        return hash((request.num_microbatches, inputs.signature(), self._flags, autocast))

    def scale_now(self) -> torch.Tensor | None:
        """What the roots of this step's backward are multiplied by."""
        return None if self.loss_scale is None else self.loss_scale()

    def _weights(self, replies: Sequence[Reply], request: Request) -> Weights:
        """What the microbatches weigh on every rank: by the target where it can be counted, or else by the input."""
        counted = [reply["rows"] for reply in replies if reply["rows"]]
        _, rows = min(counted, key=lambda found: found[0]) if counted else (None, None)
        given = next((reply["divisors"] for reply in replies if reply["divisors"]), None)
        return weights_of(self.settings.reduction, given, rows, request.num_microbatches)

    def _execute(
        self,
        program: Program,
        inputs: Inputs,
        weights: Weights,
        request: Request,
        signature: tuple[Any, ...],
        trace: bool,
    ) -> Outcome:
        announce = signature not in self.known
        number = self._number(signature)
        error: BaseException | None = None
        try:
            self._begin(inputs, weights, request, number, announce)
        except BaseException as found:  # the ranks publish it, and drain the program that the others run
            error = found
            for stage in self.stages:
                stage.begin(StageWork(reduces=request.reduces))
        outcome = self.ranks.run(program, number, announce, trace, error)
        if outcome.failure is None and len(outcome.spans) == len(self.ranks.stages):
            refusal = self.random.check()
            if refusal is not None:
                outcome.fail(refusal, self.ranks.first)
        return outcome

    def _begin(self, inputs: Inputs, weights: Weights, request: Request, number: int, announce: bool) -> None:
        """All that has to be done on this process before a program runs."""
        stages = self.stages
        works = stage_works(inputs, stages, request, weights, self.settings.keep_outputs, self.scale_now())
        for stage, work in zip(stages, works, strict=True):
            stage.begin(work)
            stage.context.step = self.random.step_count
        for stage in stages:
            stage.shaped(number, announce)
        self.replicas.follow()
        if request.training:
            self.replicas.before_step()
            self._set_aside = True
        self.random.begin(self.stages, request.training, self._flags, self._has_pairs(request))

    def _has_pairs(self, request: Request) -> bool:
        return request.training and self.plans.has_pairs(request.num_microbatches)

    def _number(self, signature: tuple[Any, ...]) -> int:
        """What transports call these shapes; the number of the oldest is given again when many are known."""
        if signature in self.known:
            return self.known[signature]
        return len(self.known) if len(self.known) < _MAX_KNOWN else next(iter(self.known.values()))

    def _remember(self, signature: tuple[Any, ...]) -> None:
        """The shapes of this step need not be announced again."""
        if signature in self.known:
            return
        number = self._number(signature)
        if len(self.known) == _MAX_KNOWN:
            del self.known[next(iter(self.known))]
        self.known[signature] = number

    def _failed_elsewhere(self, failure: Failure) -> None:
        """From the watcher: another process failed or died."""
        if self.reported is None:
            self.reported = failure
        self.ranks.fail()
        if failure.is_fatal:
            self._lost(failure)

    def _lost(self, failure: Failure) -> None:
        """From the watcher, in a step or between two: another process has ended."""
        self.ranks.device_events.invalidate(failure)
        self.ranks.transport.unblock(failure)

    def _report(self, outcome: Outcome, trace: bool) -> Reply:
        """What the others need to know of this process's step."""
        reply: Reply = {}
        if outcome.failure is not None:
            reply["failure"] = asdict(outcome.failure)
            reply["first"] = asdict(outcome.first or outcome.failure)
            reply["no_loss"] = isinstance(outcome.error, NoLoss)
        else:
            reply |= self._telling.tell(StepOutputs.on(self.stages))
        if trace:
            reply["spans"] = pack_spans(outcome.spans)
        return reply

    def _raise_failure(self, outcome: Outcome, replies: Sequence[Reply]) -> None:
        """Raise the step's failure, if there is one: where it happened first its own exception, else a StepError."""
        # the first ones come first: a rank that knew of one has not got its messages either, which says less
        failures = [Failure(**reply[key]) for key in ("first", "failure") for reply in replies if key in reply]
        if not failures and self.reported is not None:
            failures = [self.reported]
        if not failures:
            return
        # of fatal ones, one whose rank is known says more than that messages did not come
        fatal = sorted((failure for failure in failures if failure.is_fatal), key=lambda failure: failure.rank is None)
        if fatal:
            self.abort(fatal[0], outcome.error)
        self._release()
        if outcome.error is None or outcome.failure is None:
            raise failures[0].error()
        is_first = outcome.first is None or outcome.first.rank in self.ranks.stages
        if not is_first or isinstance(outcome.error, FailureError):
            # what this rank was given after a failure elsewhere are stand-ins
            raise failures[0].error() from outcome.error
        with contextlib.suppress(Exception):  # a type of the user's may refuse notes; the exception itself is raised
            outcome.error.add_note(f"fastpipe: raised on {outcome.failure.place()}")
        error, outcome.error = outcome.error, None
        try:
            raise error
        finally:
            del error  # the exception holds this frame, which must not hold the exception

    def _result(self, program: Program, outcome: Outcome, replies: Sequence[Reply], weights: Weights) -> StepResult:
        parts = self._telling.parts(replies)
        spans = dict(outcome.spans)
        for reply in replies:
            spans.update(unpack_spans(reply.get("spans", {})))
        found = {i: output for stage in self.stages for i, output in stage.work.outputs.items()}
        for stage in self.stages:
            stage.end()
        reports = Reports(parts, weights, self.settings.metrics, program.num_microbatches)
        return StepResult(parts, found, self.settings.merge, program, spans, reports)


def _call_text(request: Request) -> str:
    """What must be the same on every rank."""
    names = ", ".join(["", *sorted(request.kwargs)])
    call = "step" if request.training else "eval_step or a forward-only step"
    more = (", gather_outputs" if request.gathers_outputs else "") + ("" if request.reduces else ", under no_sync")
    more += "" if request.index is None else f", index={request.index}"
    return f"{call} with num_microbatches={request.num_microbatches}{names}{more}"


def _replayed(request: Request, inputs: Inputs) -> Request:
    """The same request, forward only, with the microbatches that were taken from it already."""
    args = request.args if inputs.args is None else (list(inputs.args),)
    kwargs = {name: inputs.kwargs.get(name, value) for name, value in request.kwargs.items()}
    return Request(args, kwargs, None, None, request.num_microbatches, training=False)
