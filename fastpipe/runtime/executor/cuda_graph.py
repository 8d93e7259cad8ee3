"""Steps recorded as CUDA graphs and replayed: the host runs a step's Python once per signature of its inputs.

The first steps of a kind run as usual, so that everything created at first use exists. The next one is recorded by the
same executor, with inputs at fixed addresses. Then the host copies a step's inputs there, launches the graph, and
copies the results. So a stage's Python code, including hooks and contexts, runs only in the recording; its work on the
device is done in every step.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from fastpipe.program import Program
from fastpipe.runtime.common import Failure, add_note, cause_text, pytree, torch_private
from fastpipe.runtime.executor.ranks import LocalRanks, Outcome
from fastpipe.runtime.model import StageCopies
from fastpipe.runtime.stage import Stage, StageWork
from fastpipe.runtime.transport import Transport

Replay = Callable[[], None]
"""Runs recorded work on the current stream."""


def record(stream: Any, work: Callable[[], None]) -> Replay:
    """Call ``work`` and record, without running it, its work on the stream and on streams joined to it.

    The result keeps the memory that the work allocates, and uses the same addresses in every call.

    Raises:
        RuntimeError: when something cannot be recorded; then nothing was done.
    """
    graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
    try:
        _capture(graph, pool, stream, work)
    except BaseException:  # raised again
        # else torch's allocator may never reuse memory used by several streams
        with contextlib.suppress(RuntimeError):  # already ended
            torch_private.end_allocations(stream.device, pool)
        # torch 2.11 leaves its random generator in the recording, where it draws nothing else, until another one ends
        with contextlib.suppress(RuntimeError):  # of a broken device
            make = partial(torch.zeros, (), device=stream.device)
            _capture(torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle(), stream, make)
        raise
    return graph.replay


def _capture(graph: Any, pool: Any, stream: Any, work: Callable[[], Any]) -> None:
    # other threads (NCCL's, those that gather losses) query events meanwhile
    with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
        work()


RECORDERS: dict[str, tuple[Callable[[torch.device], Any], Callable[[Any, Callable[[], None]], Replay]]] = {
    "cuda": (torch.cuda.Stream, record)
}
"""By device type: what makes the stream to record on, and what records."""


def why_not(
    device: torch.device, ranks: Mapping[int, Mapping[int, Stage]], transport: Transport, copies: StageCopies
) -> str:
    """Why no step of a pipeline can be recorded; empty if steps can be. ``ranks`` has the stages of local ranks."""
    if device.type not in RECORDERS:
        return f"the stages compute on {device.type}, which cannot record work; put them on cuda"
    if len(ranks) > 1:
        return "several ranks are threads of this process, and a recording has one thread; start one process per rank"
    if not transport.is_recordable:
        return (
            f"the messages of transport {transport.kind!r} have numbers, which a replay would repeat; use "
            "transport='process_group'"
        )
    if type(copies) is not StageCopies:
        return "gradients of weights that several ranks hold are summed by the host after every step"
    if any(stage.parallel is not None for held in ranks.values() for stage in held.values()):
        return "the stages' replicas average gradients, and the host exchanges whether the step failed on one of them"
    return ""


_INPUTS = ("args", "kwargs", "targets", "output_grads", "loss_scale")
_RESULTS = ("losses", "outputs", "metrics", "added")

Gradients = list[tuple[torch.nn.Parameter, torch.Tensor | None]]
"""Gradient per parameter; None for no gradient."""


class RecordingError(Exception):
    """A step that cannot be recorded; the text says why."""


@dataclass
class RecordedStep:
    """A recorded step of one rank and the tensors that it uses.

    Attributes:
        tensors: its inputs, each once, in order of `tensors_of`.
        works: works of the stages, with its results.
    """

    run: Replay
    tensors: list[torch.Tensor]
    works: list[StageWork]
    grads: Gradients

    def replay(self, works: Sequence[StageWork], tensors: Sequence[torch.Tensor]) -> None:
        """Run the step.

        Works receive copies of the results, as the next replay overwrites these. ``tensors`` are the inputs, with the
        shapes and dtypes of the recorded ones.
        """
        for own, tensor in zip(self.tensors, tensors, strict=True):
            own.copy_(tensor)
        # the recording overwrites a gradient that is its own tensor
        before = [p.grad if own is None or p.grad is not own else own.clone() for p, own in self.grads]
        self.run()
        if torch.is_grad_enabled():
            self._add_gradients(before)
        for work, found in zip(works, self.works, strict=True):
            for name in _RESULTS:
                getattr(work, name).update(pytree.tree_map_only(torch.Tensor, torch.clone, getattr(found, name)))

    def _add_gradients(self, before: Sequence[torch.Tensor | None]) -> None:
        with torch.no_grad():
            for (parameter, own), there in zip(self.grads, before, strict=True):
                if own is None:
                    continue
                if there is None:
                    parameter.grad = own
                elif parameter.grad is own:
                    own.add_(there)
                else:
                    there.add_(own)


def tensors_of(works: Sequence[StageWork]) -> list[torch.Tensor]:
    """Input tensors of the stages, in a fixed order, with duplicates.

    Raises:
        RecordingError: for an object that may hold tensors.
    """
    found: list[torch.Tensor] = []
    for work in works:
        for name in _INPUTS:
            _mapped(getattr(work, name), found.append)
    return found


def with_tensors(work: StageWork, change: Callable[[torch.Tensor], Any]) -> StageWork:
    """A copy of a work with other input tensors and no results; raises as `tensors_of`."""
    other: dict[str, Any] = {name: _mapped(getattr(work, name), change) for name in _INPUTS}
    other |= {name: {} for name in _RESULTS}
    return replace(work, root_grads={}, **other)


def _mapped(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """A tree with its tensors replaced. (torch's pytree takes several times as long.)"""
    if isinstance(value, torch.Tensor):
        return change(value)
    if type(value) is dict:
        return {key: _mapped(item, change) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_mapped(item, change) for item in value))
    if type(value) in (list, tuple):
        return type(value)(_mapped(item, change) for item in value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise RecordingError(f"there is a {type(value).__name__} among the inputs, which may hold tensors")


_FIRST_STEPS = 3
"""Number of steps of a kind before one is recorded; the first announces its shapes."""
_MAX_RECORDINGS = 8
"""Each recording keeps the memory of a whole step."""
_MAX_KINDS = 64

_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)

_Key = tuple[Any, ...]
logger = logging.getLogger("fastpipe")


class RecordedRanks(LocalRanks):
    """The only rank of this process, on a device that can record.

    All steps run on a separate stream: the default one cannot be recorded, and autograd runs a leaf's gradient on the
    stream of its first use.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        make_stream, self._recorder = RECORDERS[self.device.type]
        self._stream = make_stream(self.device)
        self._counts: dict[_Key, int] = {}
        self._replays = 0
        self._reason = ""  # why the last unrecorded step could not be recorded
        self._is_disabled = False
        self._is_recording = False

    def recording_text(self) -> str:
        """See `LocalRanks.recording_text`."""
        if self._is_disabled:
            return f"no: {self._reason}"
        reason = f"; not for the last step that ran unrecorded: {self._reason}" if self._reason else ""
        counts = f"so far {len(self._recorded)} recorded and {self._replays} replayed"
        return f"from step {_FIRST_STEPS + 1} of a kind on, {counts}{reason}"

    def forget(self) -> None:
        """See `LocalRanks.forget`; must precede the end of the groups whose messages are recorded."""
        self._recorded.clear()
        self._counts.clear()
        super().forget()

    def run(
        self, program: Program, signature: int, announce: bool, trace: bool = False, error: BaseException | None = None
    ) -> Outcome:
        """See `LocalRanks.run`."""
        if error is not None:
            return super().run(program, signature, announce, trace, error)
        caller = torch.accelerator.current_stream(self.device)
        self._stream.wait_stream(caller)
        try:
            with self._stream:
                return self._run_on_stream(program, signature, announce, trace)
        finally:
            caller.wait_stream(self._stream)

    def _run_on_stream(self, program: Program, signature: int, announce: bool, trace: bool) -> Outcome:
        if announce:
            self._drop(signature)
        if announce or trace or self._is_disabled:
            return super().run(program, signature, announce, trace)
        works = [stage.work for stage in self.all_stages]
        try:
            given = self._inputs_of(works)
            where = self._places()
        except RecordingError as error:
            self._reason = str(error)
            return super().run(program, signature, announce, trace)
        tensors = list({id(tensor): tensor for tensor in given}.values())
        mode = (torch.is_grad_enabled(), torch.is_inference_mode_enabled())
        key = (signature, program, *mode, *_host_state(works, given, tensors), where)
        if key not in self._recorded and not self._due(key):
            return super().run(program, signature, announce, trace)
        if key not in self._recorded:
            step = self._record(program, signature, works, tensors)
            if step is None:
                return self._run_unrecorded(program, signature)
            self._keep(key, step)
        self._recorded[key].replay(works, tensors)
        self._replays += 1
        return Outcome()

    def _run_unrecorded(self, program: Program, signature: int) -> Outcome:
        """Run a step whose recording failed; if it succeeds, disable recording."""
        outcome = super().run(program, signature, announce=False)
        self._is_disabled = bool(self._reason) and outcome.failure is None
        if self._is_disabled:
            logger.warning("cuda_graph: %s; all further steps run unrecorded", self._reason)
        elif self._reason and outcome.error is not None:
            add_note(outcome.error, f"fastpipe: before, {self._reason}")
        return outcome

    def _drop(self, signature: int) -> None:
        """Drop recordings of a signature that now stands for other shapes."""
        for book in (self._recorded, self._counts):
            for key in [key for key in book if key[0] == signature]:
                del book[key]

    def _due(self, key: _Key) -> bool:
        """Count a step of a kind; returns whether enough have run to record it."""
        count = self._counts.pop(key, 1)  # the announcing step
        self._counts[key] = count + 1
        if len(self._counts) > _MAX_KINDS:
            del self._counts[next(iter(self._counts))]
        return count >= _FIRST_STEPS

    def _keep(self, key: _Key, step: RecordedStep) -> None:
        if len(self._recorded) == _MAX_RECORDINGS:
            del self._recorded[next(iter(self._recorded))]
        self._recorded[key] = step

    def _inputs_of(self, works: Sequence[StageWork]) -> list[torch.Tensor]:
        """Input tensors of a step, as `tensors_of`.

        Raises:
            RecordingError: when the step cannot be recorded.
        """
        for stage in self.all_stages:
            random = stage.random
            if random is not None and (random.guards_forward or random.guard.exclusive):
                raise RecordingError("the host sets random states for its actions")
        tensors = tensors_of(works)
        for tensor in tensors:
            if tensor.device != self.device:
                raise RecordingError(f"an input is on {tensor.device}; give it on {self.device}")
            if tensor.requires_grad:
                raise RecordingError("an input requires a gradient")
        return tensors

    def _places(self) -> tuple[int, ...]:
        """Addresses of the parameters and buffers.

        Raises:
            RecordingError: for a type whose address may change.
        """
        found = []
        for stage in self.all_stages:
            for tensor in (*stage.module.parameters(), *stage.module.buffers()):
                if type(tensor) not in _PLAIN:
                    raise RecordingError(f"stage {stage.index} has a {type(tensor).__name__}, whose address may change")
                found.append(tensor.data_ptr())
        return tuple(found)

    def _record(
        self, program: Program, signature: int, works: Sequence[StageWork], tensors: Sequence[torch.Tensor]
    ) -> RecordedStep | None:
        """Record a step on copies of its inputs; None if that failed, with nothing done."""
        copies = {id(tensor): tensor.clone() for tensor in tensors}
        own = [with_tensors(work, lambda tensor: copies[id(tensor)]) for work in works]
        outcome = Outcome()

        def work() -> None:
            nonlocal outcome
            outcome = super(RecordedRanks, self).run(program, signature, announce=False)

        error: BaseException | None = None
        replay: Replay | None = None
        (executor,) = self._executors[program]
        # messages are received into memory that no other step uses: a recording keeps what it allocates, and what the
        # executors keep they release for messages of another shape
        executor.drop_memory()
        with self._substituted(own, works) as grads:
            try:
                replay = self._recorder(self._stream, work)
            except RuntimeError as found:
                error = found
            finally:
                executor.drop_memory()
        error = outcome.error or error
        self._reason = "" if error is None else f"recording a step failed: {cause_text(error)}"
        # without spans it was drained, as it failed on another rank, which still waits
        if replay is None or error is not None or not outcome.spans:
            return None
        return RecordedStep(replay, [copies[id(tensor)] for tensor in tensors], own, grads)

    @contextlib.contextmanager
    def _substituted(self, own: Sequence[StageWork], works: Sequence[StageWork]) -> Iterator[Gradients]:
        """Within it the stages use ``own`` and empty gradients, and failures are not published.

        Yields:
            A list that receives the new gradients at the end.
        """
        found = (p for stage in self.all_stages for p in stage.module.parameters() if p.requires_grad)
        parameters = list(dict.fromkeys(found))
        before = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        made: Gradients = []
        self._begin(own)
        self._is_recording = True
        try:
            yield made
        finally:
            self._is_recording = False
            self._begin(works)
            made += [(parameter, parameter.grad) for parameter in parameters]
            for parameter, grad in zip(parameters, before, strict=True):
                parameter.grad = grad

    def _begin(self, works: Sequence[StageWork]) -> None:
        for stage, work in zip(self.all_stages, works, strict=True):
            stage.begin(work, stage.random)

    def _publish(self, failure: Failure, error: BaseException) -> None:
        """See `LocalRanks._publish`; not published while recording, as the step runs again."""
        if self._is_recording:
            self._note(failure, error, failure)
        else:
            super()._publish(failure, error)


def _host_state(works: Sequence[StageWork], given: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> _Key:
    """The host state that is part of a recording, besides signature and addresses."""
    numbers = {id(tensor): number for number, tensor in enumerate(tensors)}
    alike = tuple(numbers[id(tensor)] for tensor in given)
    shapes = tuple((tensor.shape, tensor.dtype) for tensor in tensors)
    settings = tuple((tuple(work.divisors or ()), work.keep_outputs, work.reduces) for work in works)
    return alike, shapes, settings
