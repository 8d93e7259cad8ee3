"""Steps recorded as CUDA graphs and replayed: the host does a step's work once for every signature of its inputs.

The first steps of a kind run as usual, so that everything made or chosen at first use exists. The next is recorded by
the same executor, on inputs that stay where they are. From then on the host copies a step's inputs there, starts the
graph, and copies the results. Python code of a stage, its hooks and contexts too, therefore runs in the recording
alone; its work on the device is done in every step.
"""

from __future__ import annotations

import contextlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fastpipe.program import Program
from fastpipe.runtime.common import cause_text, pytree, torch_private
from fastpipe.runtime.executor.ranks import LocalRanks, Outcome
from fastpipe.runtime.model import NoCopies, StageCopies
from fastpipe.runtime.stage import Stage, StageWork
from fastpipe.runtime.transport import Loopback, ProcessGroups, Transport


class Recording(ABC):
    """Work of one device. It keeps the memory that it allocates, so a replay puts everything where it was before."""

    @abstractmethod
    def record(self, stream: Any, work: Callable[[], None]) -> None:
        """Call ``work``, whose work on the stream, and on those that it joins to it, is noted and not done.

        Raises:
            RuntimeError: when something cannot be recorded; nothing has been done then.
        """

    @abstractmethod
    def replay(self) -> None:
        """Do it on the current stream."""


class CudaGraph(Recording):
    """By ``torch.cuda.CUDAGraph``."""

    def __init__(self) -> None:
        self._graph = torch.cuda.CUDAGraph()

    def record(self, stream: Any, work: Callable[[], None]) -> None:
        """See `Recording.record`."""
        pool = torch.cuda.graph_pool_handle()
        try:
            # other threads, NCCL's and those that tell losses, ask events meanwhile
            with torch.cuda.graph(self._graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                work()
        except BaseException:  # raised again
            _end_allocations(stream.device, pool)
            raise

    def replay(self) -> None:
        """See `Recording.replay`."""
        self._graph.replay()


def _end_allocations(device: torch.device, pool: Any) -> None:
    """After a recording that failed: torch's allocator may think that it still goes on, and then memory that several
    streams have used is never used again."""
    with contextlib.suppress(RuntimeError):  # where it did end that
        torch_private.end_allocations(device, pool)


Makers = tuple[Callable[[torch.device], Any], Callable[[], Recording]]

RECORDINGS: dict[str, Makers] = {"cuda": (torch.cuda.Stream, CudaGraph)}
"""By type of device: what makes the stream on which work is recorded, and a recording."""


def why_not(
    device: torch.device,
    ranks: Mapping[int, Mapping[int, Stage]],
    transport: Transport,
    replicas: StageCopies,
) -> str:
    """Why no step of a pipeline can be recorded, in a sentence; empty where it may be.

    Args:
        device: what the stages compute on.
        ranks: the local ones.
        transport: how they reach the others.
        replicas: what is done for stages that two ranks hold, or that share weights.
    """
    if device.type not in RECORDINGS:
        return f"the stages compute on {device.type}, which records nothing; put them on cuda"
    if len(ranks) > 1:
        return "several ranks are threads of this process, and one recording has one thread; start a process a rank"
    if not isinstance(transport, Loopback | ProcessGroups):
        return (
            f"the messages of transport {transport.kind!r} have numbers, which a replay would repeat; use "
            "transport='process_group'"
        )
    if not isinstance(replicas, NoCopies):
        return "gradients of weights that several ranks hold are summed by the host after every step"
    if any(stage.parallel is not None for held in ranks.values() for stage in held.values()):
        return "the stages' replicas average gradients, and learn by the host how the step went for the others"
    return ""


_GIVEN = ("args", "kwargs", "targets", "output_grads", "loss_scale")
_FOUND = ("losses", "scaled", "outputs", "metrics", "added")

Gradients = list[tuple[torch.nn.Parameter, torch.Tensor | None]]
"""By parameter; None for one that got none."""


class Unfit(Exception):  # noqa: N818 - it is caught, and the step runs as ever
    """A step that cannot be recorded; says why."""


@dataclass
class RecordedStep:
    """What one rank did in a step, and where.

    Attributes:
        recording: what the device was given.
        tensors: its inputs, each once, in the order of `tensors_of`.
        works: of the stages: where its results lie.
        grads: where they lie.
    """

    recording: Recording
    tensors: list[torch.Tensor]
    works: list[StageWork]
    grads: Gradients

    def replay(self, works: Sequence[StageWork], tensors: Sequence[torch.Tensor]) -> None:
        """Do it again.

        Args:
            works: of the stages: filled with copies of the results, as the next replay writes over these.
            tensors: the inputs; they look like those that it was recorded with.
        """
        for own, tensor in zip(self.tensors, tensors, strict=True):
            own.copy_(tensor)
        # what lies where the recording puts its own gradient would be written over
        before = [p.grad if own is None or p.grad is not own else own.clone() for p, own in self.grads]
        self.recording.replay()
        if torch.is_grad_enabled():
            self._add_gradients(before)
        for work, found in zip(works, self.works, strict=True):
            for name in _FOUND:
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
    """Those that stages are given, in one order; one that is given twice is there twice.

    Raises:
        Unfit: for an object that may hold others.
    """
    found: list[torch.Tensor] = []
    for work in works:
        for name in _GIVEN:
            _mapped(getattr(work, name), found.append)
    return found


def with_tensors(work: StageWork, change: Callable[[torch.Tensor], Any]) -> StageWork:
    """The same work with other tensors, and no results yet.

    Raises:
        Unfit: as `tensors_of`.
    """
    other: dict[str, Any] = {name: _mapped(getattr(work, name), change) for name in _GIVEN}
    other |= {name: {} for name in _FOUND}
    return replace(work, **other)


def _mapped(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """A tree with other tensors in it. (torch's pytree takes several times as long.)"""
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
    raise Unfit(f"there is a {type(value).__name__} among the inputs, which may hold tensors")


_FIRST_STEPS = 3
"""So many of a kind run before one is recorded; the first announces its shapes."""
_MAX_RECORDINGS = 8
"""Each keeps the memory of a whole step."""
_MAX_KINDS = 64

_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)

_Key = tuple[Any, ...]
logger = logging.getLogger("fastpipe")


class RecordedRanks(LocalRanks):
    """The one rank of this process, on a device that can record.

    All its steps run on a stream of their own, as a recording cannot be made on the default one, and torch's graphs
    remember on which stream their leaves were first used.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        make_stream, self._make_recording = RECORDINGS[self.device.type]
        self._stream = make_stream(self.device)
        self._held: list[Stage] = [stage for held in self.stages.values() for stage in held.values()]
        self._counts: dict[_Key, int] = {}
        self._recorded: dict[_Key, RecordedStep] = {}
        self._replays = 0
        self._reason = ""  # why the last step that was not recorded could not be
        self._gave_up = False
        self._quiet = False

    def recording_text(self) -> str:
        """See `LocalRanks.recording_text`."""
        if self._gave_up:
            return f"no: {self._reason}"
        reason = f"; not for the last step that ran as ever: {self._reason}" if self._reason else ""
        known = f"so far {len(self._recorded)} recorded and {self._replays} replayed"
        return f"from step {_FIRST_STEPS + 1} of a kind on, {known}{reason}"

    def forget(self) -> None:
        """See `LocalRanks.forget`; before the groups go whose messages are in the recordings."""
        self._recorded.clear()
        self._counts.clear()
        super().forget()

    def run(
        self,
        program: Program,
        signature: int,
        announce: bool,
        trace: bool = False,
        error: BaseException | None = None,
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
        if announce or trace or self._gave_up:
            return super().run(program, signature, announce, trace)
        works = [stage.work for stage in self._held]
        try:
            given = self._inputs_of(works)
            where = self._places()
        except Unfit as unfit:
            self._reason = str(unfit)
            return super().run(program, signature, announce, trace)
        tensors = list({id(tensor): tensor for tensor in given}.values())
        mode = (torch.is_grad_enabled(), torch.is_inference_mode_enabled())
        key = (signature, id(program), *mode, *_look(works, given, tensors), where)
        if key not in self._recorded and not self._due(key):
            return super().run(program, signature, announce, trace)
        if key not in self._recorded:
            step = self._record(program, signature, works, tensors)
            if step is None:
                return self._run_after_all(program, signature)
            self._keep(key, step)
        self._recorded[key].replay(works, tensors)
        self._replays += 1
        return Outcome()

    def _run_after_all(self, program: Program, signature: int) -> Outcome:
        """The step that could not be recorded; if it is none that cannot be run either, recording is over."""
        outcome = super().run(program, signature, announce=False)
        self._gave_up = bool(self._reason) and outcome.failure is None
        if self._gave_up:
            logger.warning("cuda_graph: %s; steps run as ever from now on", self._reason)
        elif self._reason and outcome.error is not None:
            outcome.error.add_note(f"fastpipe: before, {self._reason}")
        return outcome

    def _drop(self, signature: int) -> None:
        """The number of these shapes was another's before."""
        for book in (self._recorded, self._counts):
            for key in [key for key in book if key[0] == signature]:
                del book[key]

    def _due(self, key: _Key) -> bool:
        """Whether enough steps of a kind have run; this is one of them."""
        count = self._counts.pop(key, 1)  # the one that announced
        self._counts[key] = count + 1
        if len(self._counts) > _MAX_KINDS:
            del self._counts[next(iter(self._counts))]
        return count >= _FIRST_STEPS

    def _keep(self, key: _Key, step: RecordedStep) -> None:
        if len(self._recorded) == _MAX_RECORDINGS:
            del self._recorded[next(iter(self._recorded))]
        self._recorded[key] = step

    def _inputs_of(self, works: Sequence[StageWork]) -> list[torch.Tensor]:
        """The tensors that a step is given, as `tensors_of`.

        Raises:
            Unfit: when it cannot be recorded.
        """
        for stage in self._held:
            random = stage.random
            if random is not None and (random.guards_forward or random.guard.exclusive):
                raise Unfit("the host sets random states for its actions")
        tensors = tensors_of(works)
        for tensor in tensors:
            if tensor.device != self.device:
                raise Unfit(f"an input is on {tensor.device}; give it on {self.device}")
            if tensor.requires_grad:
                raise Unfit("an input requires a gradient")
        return tensors

    def _places(self) -> tuple[int, ...]:
        """Where the parameters and buffers lie.

        Raises:
            Unfit: for one that may lie anywhere.
        """
        found = []
        for stage in self._held:
            for tensor in (*stage.module.parameters(), *stage.module.buffers()):
                if type(tensor) not in _PLAIN:
                    raise Unfit(f"stage {stage.index} has a {type(tensor).__name__}, which may lie anywhere")
                found.append(tensor.data_ptr())
        return tuple(found)

    def _record(
        self, program: Program, signature: int, works: Sequence[StageWork], tensors: Sequence[torch.Tensor]
    ) -> RecordedStep | None:
        """Record a step, on copies of its inputs; None when that failed, and nothing has been done."""
        copies = {id(tensor): tensor.clone() for tensor in tensors}
        own = [with_tensors(work, lambda tensor: copies[id(tensor)]) for work in works]
        recording, outcome = self._make_recording(), Outcome()

        def work() -> None:
            nonlocal outcome
            outcome = super(RecordedRanks, self).run(program, signature, announce=False)

        error: BaseException | None = None
        with self._set_apart(own, works) as grads:
            try:
                recording.record(self._stream, work)
            except RuntimeError as found:
                error = found
        error = outcome.error or error
        self._reason = "" if error is None else f"recording a step failed: {cause_text(error)}"
        if error is not None or not outcome.spans:  # drained: it failed elsewhere, where everything is still waited for
            return None
        return RecordedStep(recording, [copies[id(tensor)] for tensor in tensors], own, grads)

    @contextlib.contextmanager
    def _set_apart(self, own: Sequence[StageWork], works: Sequence[StageWork]) -> Iterator[Gradients]:
        """The stages work on copies, beside the gradients that are there, and nobody is told of a failure.

        What is yielded has the gradients that were made, when it is over.
        """
        found = (p for stage in self._held for p in stage.module.parameters() if p.requires_grad)
        parameters = list(dict.fromkeys(found))
        before = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        made: Gradients = []
        self._begin(own)
        self._quiet = True
        try:
            yield made
        finally:
            self._quiet = False
            self._begin(works)
            made += [(parameter, parameter.grad) for parameter in parameters]
            for parameter, grad in zip(parameters, before, strict=True):
                parameter.grad = grad

    def _begin(self, works: Sequence[StageWork]) -> None:
        for stage, work in zip(self._held, works, strict=True):
            stage.begin(work)

    def _failed(self, program: Program, rank: int, position: int, error: BaseException) -> None:
        """See `LocalRanks._failed`; of a recording nobody is told, as the step runs once more."""
        if not self._quiet:
            super()._failed(program, rank, position, error)


def _look(works: Sequence[StageWork], given: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> _Key:
    """What a recording depends on beside the step's signature and places: what the host has put into it."""
    numbers = {id(tensor): number for number, tensor in enumerate(tensors)}
    alike = tuple(numbers[id(tensor)] for tensor in given)
    shapes = tuple((tensor.shape, tensor.dtype) for tensor in tensors)
    told = tuple((tuple(work.divisors or ()), work.keep_outputs, work.reduces) for work in works)
    return alike, shapes, told
