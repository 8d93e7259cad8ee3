"""Audit: another rank computes a part of a step again, and compares. It finds hardware that computes wrong numbers.

`draw` picks a stage and microbatches of it by the number of the step, the same on every rank. Their rank, the *owner*,
records them: all that a microbatch is computed from, and sums of the bits of every result, which are outputs, gradients
of inputs, and its part of the gradients of weights. After the step it sends the record, with the stage's weights, to
the *auditors*. They compute it again in the next step, in a copy of the stage that has no memory in between, where they
would wait: before their first input comes, and where they wait longest in the step. Each gets as many microbatches as
fit. If sums differ, all ranks compute them again, and the majority decides which rank was wrong.

Weights at rest are not computed again: each rank compares their sums (`WeightSums`).
"""

from __future__ import annotations

import itertools
import json
import math
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, finalize, ref

import numpy as np
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from fastpipe.errors import CorruptionError
from fastpipe.placement import Placement
from fastpipe.program import Op, Program
from fastpipe.runtime.common import (
    FailureError,
    Tensors,
    add_note,
    bit_sum,
    bit_sums,
    listed,
    packing,
    parameters_of,
    pytree,
    set_grad_dtype,
    torch_private,
    version_of,
    walked,
)
from fastpipe.runtime.coordination import Control, Reply
from fastpipe.runtime.model import accumulated, as_layers, state_prefix
from fastpipe.runtime.stage import (
    Current,
    Generators,
    Stage,
    StageWork,
    from_tensors,
    last_microbatches,
    microbatch_seed,
    to_tensors,
)
from fastpipe.runtime.step.result import block_of, tensors_in_block
from fastpipe.simulate import simulate_program

Exchange = Callable[[int, Sequence[torch.Tensor], Sequence[torch.Tensor]], list[torch.Tensor]]
"""``(peer, tensors, memory for the peer's) -> the peer's``; `fastpipe.runtime.transport.Transport.exchange`."""

_known: WeakKeyDictionary[Program, tuple[list[Draw], list[Waits]]] = WeakKeyDictionary()
"""By `_parts_and_waits`, of programs that pipelines still have."""


class Draw(NamedTuple):
    """What is audited of a step.

    Attributes:
        owner: the rank that computes it.
        microbatches: its microbatches, and of each whether its backward is split.
        last: the microbatches of the stage's last actions; see `last_microbatches`.
        again: by rank, the microbatches that it computes again: those that it completes before a step, those whose
            forward it computes there, and the others; it completes them where it waits longest in the step.
    """

    owner: int
    stage: int
    microbatches: dict[int, bool]
    last: tuple[int, int, int]
    again: dict[int, tuple[list[int], list[int], list[int]]]


def check_audit(share: float, placement: Placement, num_processes: int, stages: Any) -> None:
    """Refuse audits that are impossible here.

    Raises:
        ValueError: with what to set instead.
    """
    count = len(_held(placement))
    if num_processes == 1:
        raise ValueError(f"audit = {share}: a single process has no other rank to compute again; leave it out")
    if share > 1 / count:
        raise ValueError(
            f"audit = {share}: a step audits one of the {count} stages that ranks hold; give at most {1 / count:.3g}"
        )
    if as_layers(stages) is None:
        raise ValueError(
            f"audit = {share}: a process must be able to make the stages of other ranks; give the list of the model's "
            "layers in every process (on the meta device they take no memory)"
        )


def check_audited(share: float | None, stages: Iterable[Stage]) -> None:
    """Refuse stages that cannot be computed again on another rank.

    Raises:
        ValueError: with what to set instead.
    """
    for stage in stages if share is not None else ():
        if stage.parallel is not None or stage.fuses:
            reason = "has overlapped_forward_backward" if stage.fuses else "is wrapped for data parallelism"
            raise ValueError(f"audit = {share}: stage {stage.index} {reason}; leave out audit, or that")


def why_not_reproducible(device: torch.device) -> str:
    """Why another rank with the same device may compute other bits; empty if it does not."""
    if device.type == "cpu" or torch.are_deterministic_algorithms_enabled():
        return ""
    return (
        f"kernels on {device.type} may not compute the same bits twice, which would look like a fault; call "
        "torch.use_deterministic_algorithms(True) before"
    )


def computes_on(device: torch.device) -> str:
    """What decides the bits of results, and must be the same on all ranks."""
    if device.type == "cpu":
        kind = f"{torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"
    else:
        kind = str(torch.get_device_module(device).get_device_name(device))
    return f"{kind}, torch {torch.__version__}"


def _held(placement: Placement) -> list[tuple[int, int]]:
    return sorted({(rank, stage) for route in placement.routes for stage, rank in enumerate(route)})


def _parts_of(program: Program) -> list[Draw]:
    """All that a program computes, in the form in which parts of it are drawn."""
    parts = []
    for owner, stage in _held(program.placement):
        ops, stages, microbatches = program.columns[owner][:3]
        forwards = microbatches[(stages == stage) & ((ops == Op.F) | (ops == Op.OVERLAP_F_B))].tolist()
        split = set(microbatches[(stages == stage) & (ops == Op.I)].tolist())
        last = last_microbatches(program.columns[owner], stage)
        parts.append(Draw(owner, stage, {i: i in split for i in sorted(forwards)}, last, {}))
    return parts


class Waits(NamedTuple):
    """When a rank waits, in forwards of a stage: a backward takes two, and messages take no time.

    Attributes:
        before: until its first action.
        longest: its longest wait after that, until a message comes or, after its last action, until the step ends.
        position: that of the instruction that waits so long; the program's length if it is the end of the program.
    """

    before: int
    longest: int
    position: int


def _parts_and_waits(program: Program) -> tuple[list[Draw], list[Waits]]:
    """What is drawn from, and the waits of every rank; computed once for each program."""
    if program not in _known:
        _known[program] = _parts_of(program), waits_of(program)
    return _known[program]


def longest_wait(program: Program, rank: int) -> int:
    """The position at which a rank waits longest; see `Waits`."""
    return _parts_and_waits(program)[1][rank].position


def waits_of(program: Program) -> list[Waits]:
    """The waits of every rank, as simulated."""
    timeline, found = simulate_program(program), []
    end = timeline.start + timeline.makespan
    for columns, starts, ends in zip(program.columns, timeline.starts, timeline.ends, strict=True):
        ops = columns[0]
        computed = np.flatnonzero(ops < Op.POST_RECV)
        if not len(computed):
            found.append(Waits(0, 0, len(ops)))
            continue
        first, last = computed[[0, -1]]
        sent = max(np.flatnonzero(ops == Op.SEND), default=last)
        waits = [(ends[i] - starts[i], i) for i in np.flatnonzero(ops == Op.WAIT_RECV) if i > first]
        after = [i for i in np.flatnonzero(ops == Op.WAIT_SEND) if i > max(last, sent)]
        longest, position = max([*waits, (end - ends[last], min(after, default=len(ops)))])
        found.append(Waits(int(starts[first] - timeline.start), int(longest), int(position)))
    return found


def _shared_out(
    microbatches: Sequence[int], owner: int, waits: Sequence[Waits]
) -> dict[int, tuple[list[int], list[int], list[int]]]:
    """`Draw.again`: each rank gets as many as it can compute while it waits, and of more than that all get as many."""
    room = [_room(own) for own in waits]
    # of equals first those that wait before a step, as they hold the fewest activations
    others = sorted((r for r in range(len(waits)) if r != owner), key=lambda r: (-room[r], -waits[r].before, r))
    further = sorted(others, key=lambda r: 3 * room[r] - waits[r].before - waits[r].longest)
    places = itertools.chain((r for r in others for _ in range(room[r])), itertools.cycle(further))
    again: dict[int, tuple[list[int], list[int], list[int]]] = {}
    found = sorted(zip(places, microbatches))  # noqa: B905 - the places do not end
    for rank, own in itertools.groupby(found, key=operator.itemgetter(0)):
        mine = [i for _, i in own]
        completed, begun = _before(len(mine), waits[rank])
        again[rank] = mine[:completed], mine[completed:begun], mine[begun:]
    return again


def _before(count: int, waits: Waits) -> tuple[int, int]:
    """How many to complete before a step, and to begin: forwards take one each, backwards two."""
    completed = min(count, waits.before // 3)
    return completed, min(count, waits.before - 2 * completed)


def _room(waits: Waits) -> int:
    """How many fit where a rank waits."""
    for count in itertools.count(1):
        completed, begun = _before(count, waits)
        if 3 * count - 2 * completed - begun > waits.longest:
            return count - 1
    raise AssertionError("unreachable")


def draw(share: float, step: int, program: Program) -> Draw | None:
    """The stage and the microbatches that are audited in a step; None if there are none.

    Each microbatch of each stage is drawn with the probability ``share``; a step audits always as many, or none.
    """
    parts, waits = _parts_and_waits(program)
    part = parts[microbatch_seed(0, step, 0, 0) % len(parts)]
    mean = share * len(parts) * len(part.microbatches)
    count = math.ceil(mean - 1e-9)  # a product may be rounded up
    if microbatch_seed(0, step, 1, 0) * count >= mean * 2**64:
        return None
    drawn = sorted(sorted(part.microbatches, key=lambda i: microbatch_seed(0, step, 2, i))[:count])
    return part._replace(
        microbatches={i: part.microbatches[i] for i in drawn}, again=_shared_out(drawn, part.owner, waits)
    )


class WeightSums:
    """Finds weights whose bits change although nothing writes to them.

    A weight is summed after each step of an optimizer, or else at the begin of a step, and again at the end of the
    step. If its version counter is the same, nothing has written to it in between.
    """

    def __init__(self) -> None:
        self._names: dict[int, str] = {}
        self._is_in_step = False
        self._noted: dict[int, tuple[nn.Parameter, tuple[int, int], int | None]] = {}
        own = ref(self)

        def after_optimizer(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            if (sums := own()) is not None:
                sums.note(p for group in optimizer.param_groups for p in group["params"])

        finalize(self, register_optimizer_step_post_hook(after_optimizer).remove)

    def begin(self, stages: Iterable[Stage]) -> None:
        """Before a step."""
        named = [(state_prefix(s.module, s.index) + name, p) for s in stages for name, p in s.module.named_parameters()]
        self._names = {id(parameter): name for name, parameter in named}
        if self._is_in_step:  # the last step failed, and any optimizer may have written since
            self._noted.clear()
        self._is_in_step = True
        self.note(p for _, p in named if id(p) not in self._noted or self._noted[id(p)][1] != _state(p))

    def note(self, parameters: Iterable[Any]) -> None:
        """Sum the local ones of these weights."""
        own = [p for p in parameters if id(p) in self._names and not p.is_meta]
        for parameter, total in zip(own, bit_sums(own), strict=True):
            self._noted[id(parameter)] = parameter, _state(parameter), total

    def changed(self) -> list[str]:
        """After a step: the names of weights that have other bits than when they were noted."""
        noted, self._noted, self._is_in_step = self._noted.values(), {}, False
        same = [(p, total) for p, state, total in noted if id(p) in self._names and _state(p) == state]
        now = bit_sums(p for p, _ in same)
        return [self._names[id(p)] for (p, total), found in zip(same, now, strict=True) if total != found]


def _state(parameter: torch.Tensor) -> tuple[int, int]:
    return version_of(parameter), parameter.data_ptr()


class Audit:
    """The audits of a pipeline on this process.

    Args:
        share: the probability with which a microbatch of a stage is drawn.
        copies: of all stages, on meta.

    Attributes:
        finding: the error that the last step's audit found, if anything.
        num_computed: the number of microbatches that this process has computed again.
    """

    def __init__(
        self,
        share: float,
        copies: Mapping[int, Stage],
        exchange: Exchange,
        control: Control,
        device: torch.device,
    ) -> None:
        self.share, self.rank, self.device = share, control.rank, device
        self.finding: CorruptionError | None = None
        self.num_computed = 0
        self._copies, self._exchange, self._control = copies, exchange, control
        self._generators = Generators(device)
        self._weights = WeightSums()
        self._draw: Draw | None = None
        self._recorder: Recorder | None = None
        self._data: torch.Tensor | None = None
        """As owner: what is sent after this step."""
        self._received: torch.Tensor | None = None
        """As auditor: what is computed again."""
        self._again: Repetition | None = None
        """As auditor: what is not yet complete of it."""
        self._has_doubts = False
        self._error: Exception | None = None
        """Of `while_waiting`, which `report` raises."""

    def __str__(self) -> str:
        """One line for `Pipeline.describe`."""
        return f"a share of {self.share} of the work; {self.num_computed} microbatches were computed again here"

    def begin(self, program: Program, step: int, stages: Sequence[Stage]) -> AbstractContextManager[None]:
        """Before a step: begin to compute again what this rank has received after the last one.

        Returns:
            The context in which the step runs.
        """
        self._recorder, self._data, self._error = None, None, None
        self._complete()  # where the last step failed in between
        # doubts of a step that failed are not checked again: they wait for all ranks
        if self._received is not None and not self._has_doubts:
            self._start(self._received)
        self._weights.begin(stages)
        self._draw = drawn = draw(self.share, step, program)
        if drawn is None or drawn.owner != self.rank:
            return nullcontext()
        stage = next(stage for stage in stages if stage.index == drawn.stage)
        self._recorder = Recorder(stage, drawn.microbatches, self._generators)
        return self._recorder.attached()

    def _start(self, data: torch.Tensor) -> None:
        """Begin to compute what was received again."""
        record = _record_in(data)
        completed, begun, others = record["draw"].again[self.rank]
        again = self._repetition(record, [*completed, *begun, *others])
        again.compute([*completed, *begun], completed)
        self._again = again
        if not begun and not others:
            self._complete()

    def _repetition(self, record: Mapping[str, Any], microbatches: Sequence[int]) -> Repetition:
        """What computes recorded microbatches again."""
        return Repetition(self._copies[record["draw"].stage], record, microbatches, self._generators)

    def while_waiting(self) -> None:
        """Where this rank waits longest in a step: complete what is computed again."""
        try:
            self._complete()
        except Exception as error:  # not of the program, which goes on
            self._error = error

    def _complete(self) -> None:
        """Compute the rest again, and compare; keep what was received for a vote if the results differ."""
        if self._again is None:
            return
        again, self._again = self._again, None
        recorded = again.record["microbatches"]
        found = again.results()
        self.num_computed += len(found)
        if any(_chosen(recorded[i]["sums"], sums) != recorded[i]["sums"] for i, sums in found.items()):
            self._has_doubts = True
        else:
            self._received = None

    def report(self) -> Reply:
        """After a step that succeeded on this rank: what the others must know."""
        if self._error is not None:
            try:
                raise self._error
            finally:
                self._error = None  # its traceback has this frame
        self._complete()  # where there was nothing to wait for
        if self._recorder is not None and self._draw is not None:
            record = self._recorder.record(self.device) | {"draw": self._draw}
            try:
                self._data = block_of(to_tensors(record, {}, self._draw.stage), self.device)
            except ValueError as error:
                raise ValueError(
                    f"audit: what stage {self._draw.stage} is given cannot be sent to another rank; give it in another "
                    f"form, or leave audit out ({error})"
                ) from error
        self._recorder = None
        reply: Reply = {} if self._data is None else {"record": len(self._data)}
        if self._has_doubts and self._received is not None:
            reply["doubts"] = len(self._received)
        return reply | ({"changed": changed} if (changed := self._weights.changed()) else {})

    def end(self, replies: Sequence[Reply]) -> None:
        """After a step that succeeded on all ranks: pass on what is audited, or decide what was wrong. Collective."""
        changed = [(rank, reply["changed"]) for rank, reply in enumerate(replies) if "changed" in reply]
        doubts = [(rank, reply["doubts"]) for rank, reply in enumerate(replies) if "doubts" in reply]
        if changed or doubts:
            self.finding = _of_weights(*changed[0]) if changed else self._vote(*doubts[0])
            self._received, self._has_doubts = None, False
            return
        self._received, drawn = None, self._draw
        if drawn is None:
            return
        with self._settled():
            if self._data is not None:
                for auditor in drawn.again:
                    self._exchange(auditor, [self._data], [])
            elif self.rank in drawn.again:
                self._received = self._receive(drawn.owner, replies[drawn.owner]["record"])
        self._data = None

    @contextmanager
    def _settled(self) -> Iterator[None]:
        """Context in which ranks exchange data one after the other. All end it together: who waits for a rank that
        waits for a silent one cannot tell which of them is silent."""
        suspicion: FailureError | None = None
        try:
            yield
        except FailureError as error:
            if not error.failure.is_suspected:
                raise
            suspicion = error
            self._control.publish(error.failure)
        try:
            self._control.exchange("end of audit", {})
            if suspicion is not None:
                raise suspicion
        finally:
            del suspicion  # breaks the cycle of exception and frame

    def _receive(self, peer: int, size: int) -> torch.Tensor:
        (data,) = self._exchange(peer, [], [torch.empty(size, dtype=torch.uint8, device=self.device)])
        return data

    def _vote(self, auditor: int, size: int) -> CorruptionError:
        """All ranks compute again what the auditor doubts, a record of so many bytes."""
        with self._settled():
            if self.rank == auditor and (data := self._received) is not None:
                for peer in range(self._control.size):
                    if peer != auditor:
                        self._exchange(peer, [data], [])
            else:
                data = self._receive(auditor, size)
        record = _record_in(data)
        microbatches: list[int] = sum(record["draw"].again[auditor], [])
        found = self._repetition(record, microbatches).results()
        self.num_computed += len(found)
        replies = self._control.exchange("audit", {"sums": [found[i] for i in microbatches]})
        drawn, step = record["draw"], record["step"]
        findings = [
            judged(drawn, auditor, step, i, record["microbatches"][i]["sums"], [r["sums"][number] for r in replies])
            for number, i in enumerate(microbatches)
        ]
        # if nobody shares the auditor's doubts now, it was wrong itself
        return next((finding for finding in findings if finding is not None), _of_auditor(drawn, auditor, step))

    def take_finding(self) -> CorruptionError:
        """The finding, to be raised on all ranks; forgets it."""
        found, self.finding = self.finding, None
        assert found is not None
        return found


def _record_in(block: torch.Tensor) -> Any:
    (record,), _ = from_tensors(tensors_in_block(block))
    return record


def _finding(text: str, rank: int | None, stage: int | None = None, microbatch: int | None = None) -> CorruptionError:
    hint = "What was trained since then, or before, may be wrong: restart from an earlier checkpoint, and test the host"
    return CorruptionError(f"audit: {text}. {hint}", rank=rank, stage=stage, microbatch=microbatch, cause=text)


def _chosen(original: Sums, found: Sums) -> dict[str, int | None]:
    return {name: found.get(name) for name in original}


def judged(
    drawn: Draw, auditor: int, step: int, microbatch: int, original: Sums, found: Sequence[Sums]
) -> CorruptionError | None:
    """Which rank was wrong.

    Args:
        auditor: the rank that found other bits.
        original: the owner's sums.
        found: those of all ranks, which have computed it again.

    Returns:
        None if all agree with the owner.
    """
    name = next((n for sums in found for n in original if sums.get(n) != original[n]), None)
    if name is None:
        return None
    texts = [json.dumps(_chosen(original, sums)) for sums in found]
    ((best, count),) = Counter(texts).most_common(1)
    wrong = [rank for rank, text in enumerate(texts) if text != best]
    owner, stage = drawn.owner, drawn.stage
    what = f"{name} of stage {stage}, microbatch {microbatch}, step {step}, computed on rank {owner},"
    if 2 * count <= len(found):
        text = f"{what} is not what rank {auditor} computes, also when both repeat it: one of them is wrong"
        return _finding(text, None, stage, microbatch)
    if json.dumps(original) == best:
        text = f"{what} is right, and rank {wrong[0]} computes it wrong"
        return _finding(text, wrong[0], stage, microbatch)
    again = "it is wrong again" if owner in wrong else f"this time rank {owner} agrees with them"
    text = f"{what} is wrong: {count} of {len(found)} ranks compute other bits; {again}"
    return _finding(text, owner, stage, microbatch)


def _of_auditor(drawn: Draw, auditor: int, step: int) -> CorruptionError:
    text = (
        f"rank {auditor} computed stage {drawn.stage} of step {step} again with other bits than rank {drawn.owner}, "
        "and now agrees with all ranks: it was wrong once"
    )
    return _finding(text, auditor, drawn.stage)


def _of_weights(rank: int, names: Sequence[str]) -> CorruptionError:
    text = (
        f"{listed(names)} on rank {rank} changed between the last step of the optimizer and the end of this step, and "
        "nothing wrote to it (a script that does so through .data must write under torch.no_grad() instead)"
    )
    return _finding(text, rank)


_WORK = ("args", "kwargs", "targets", "output_grads", "divisors")
"""What a `StageWork` has for each microbatch."""

Sums = dict[str, int]
"""The sum of the bits of each result of a microbatch, by its name, in the order in which they were computed."""


def _sum(tensor: torch.Tensor) -> int:
    return int(bit_sum(tensor))


class _Watch(torch.autograd.Function):
    """Identity on a tensor; its backward puts a function of the gradient into a dict."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, into: dict[Any, Any], key: Any, function: Any) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.into, ctx.key, ctx.function = into, key, function
        # not a view: a stage may change its input in place
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, None, None, None]:
        if grads[0] is not None:
            ctx.into[ctx.key] = ctx.function(grads[0])
        return grads[0], None, None, None


def _watch(tensor: torch.Tensor, *to: Any) -> torch.Tensor:
    watched: torch.Tensor = _Watch.apply(tensor, *to) if tensor.requires_grad else tensor  # type: ignore[no-untyped-call]
    return watched


class Recorder:
    """Records microbatches of a stage while it computes them.

    Args:
        splits: the microbatches, and of each whether its backward is split.
        generators: whose states a forward starts from; None if only the results are recorded.

    Attributes:
        results: by microbatch, the sums of its results.
    """

    def __init__(self, stage: Stage, splits: Mapping[int, bool], generators: Generators | None = None) -> None:
        self.stage = stage
        self.results: dict[int, Sums] = {microbatch: {} for microbatch in splits}
        self._splits, self._generators = splits, generators
        self._given: dict[int, dict[str, Any]] = {}
        self._buffers: dict[int, torch.Tensor] = {}
        """The last copy of each buffer, by its id."""
        self._context = stage.context.backward_context

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Context in which the stage is recorded."""
        self.stage.recorder, self.stage.context.backward_context = self._forward, self._backward
        try:
            yield
        finally:
            self.stage.recorder, self.stage.context.backward_context = None, self._context

    def _forward(self, microbatch: int, inputs: Tensors, call: Callable[[int, Tensors], Tensors]) -> Tensors:
        if microbatch not in self.results:
            return call(microbatch, inputs)
        found = self.results[microbatch]
        grads: dict[int, torch.Tensor] = {}
        if self._generators is not None:
            self._given[microbatch] = self._copies(microbatch, inputs, self._generators) | {"grads": grads}

        entered = tuple(_watch(t, found, f"the gradient of input {place}", _sum) for place, t in enumerate(inputs))
        outputs = call(microbatch, entered)
        found |= {f"output {place}": _sum(tensor) for place, tensor in enumerate(outputs)}
        return tuple(_watch(tensor, grads, place, packing.exact_copy) for place, tensor in enumerate(outputs))

    def _copies(self, microbatch: int, inputs: Tensors, generators: Generators) -> dict[str, Any]:
        """Copies of everything that a forward depends on, as the stage may change it in place."""
        work, held = self.stage.work, self.stage.held
        kept = {} if held is None else held.tensors.get(microbatch, {})
        taken = {
            "inputs": list(inputs),
            "held": [[list(key), tensor] for key, tensor in kept.items()],
            "random": generators.states(),
            "work": {name: values[microbatch] for name in _WORK if (values := getattr(work, name)) is not None},
            "loss_scale": work.loss_scale,
        }
        return {**_copies_of(taken), "buffers": {"F": self._copied_buffers()}}

    def _copied_buffers(self) -> list[torch.Tensor]:
        """Copies of the buffers as they are now; a buffer that has not changed has the same copy as before."""
        copies = []
        for *_, buffer in _places(self.stage.module, torch_private.buffers_of):
            copy = self._buffers.get(id(buffer))
            # by its bits: batch_norm changes its statistics without a change of their version counters
            if copy is None or not packing.is_exact_copy(copy, buffer):
                copy = self._buffers[id(buffer)] = packing.exact_copy(buffer)
            copies.append(copy)
        return copies

    @contextmanager
    def _backward(self, action: Current) -> Iterator[None]:
        """Around B, I and W, within the user's context: sums the microbatch's part of the gradients by itself."""
        with nullcontext() if self._context is None else self._context(action):
            if action.microbatch not in self.results:
                yield
                return
            if self._generators is not None:  # what the backward recomputes reads those that later forwards have left
                self._given[action.microbatch]["buffers"][action.action] = self._copied_buffers()
            named = [(name, p) for name, p in self.stage.module.named_parameters() if not _has_hooks(p)]
            before = [p.grad for _, p in named]
            for _, parameter in named:
                parameter.grad = None
            try:
                yield
            finally:
                sums = bit_sums(parameter.grad for _, parameter in named)
                for (_, parameter), kept in zip(named, before, strict=True):
                    parameter.grad = accumulated(kept, parameter.grad)
            self.results[action.microbatch] |= {
                f"the gradient of {name}, by {action.action}": total
                for (name, _), total in zip(named, sums, strict=True)
                if total is not None
            }

    def record(self, device: torch.device) -> dict[str, Any]:
        """What `Repetition` needs, and the results here: values that `to_tensors` supports."""
        module, kind = self.stage.module, device.type
        parameters = [p for *_, p in _places(module, parameters_of)]
        own = {id(p): p.detach().requires_grad_(p.requires_grad) for p in parameters}
        return {
            "step": self.stage.context.step,
            "training": [inner.training for inner in walked(module)],
            "autocast": [kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)],
            "parameters": [own[id(p)] for p in parameters],
            "microbatches": {
                i: given | {"sums": self.results[i], "splits": self._splits[i]} for i, given in self._given.items()
            },
        }


def _copies_of(tree: Any) -> Any:
    """The tree with a copy of each tensor, one for all its occurrences."""
    copies: dict[int, torch.Tensor] = {}

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in copies:
            copies[id(tensor)] = packing.exact_copy(tensor)
        return copies[id(tensor)]

    return pytree.tree_map_only(torch.Tensor, copied, tree)


def _has_hooks(parameter: torch.Tensor) -> bool:
    """Whether the user's hooks see its gradients; a copy has no hooks."""
    return bool(torch_private.hooks_of(parameter) or torch_private.post_hooks_of(parameter))


_Places = list[tuple[dict[str, Any], str, torch.Tensor]]


def _places(module: nn.Module, owned: Callable[[nn.Module], dict[str, Any]]) -> _Places:
    """The places of a module's parameters or buffers, in an order that a copy has, too."""
    found = [(own, name) for inner in walked(module) for own in [owned(inner)] for name in own]
    return [(own, name, tensor) for own, name in found if (tensor := own[name]) is not None]


def _put(places: _Places, values: Sequence[torch.Tensor]) -> None:
    if len(places) != len(values):
        raise ValueError(
            f"audit: a stage has {len(values)} parameters or buffers, and had {len(places)} when the Pipeline was "
            "built; change layers before that, or leave audit out"
        )
    for (own, name, _), value in zip(places, values, strict=True):
        own[name] = value


class Repetition:
    """Recorded microbatches of a stage, computed again when they are asked for.

    Args:
        stage: one of the same layers; it has no memory of its own, and other weights only while it computes.
        record: of `Recorder.record`, with its `Draw`.
    """

    def __init__(
        self, stage: Stage, record: Mapping[str, Any], microbatches: Sequence[int], generators: Generators
    ) -> None:
        self.stage, self.record, self._generators = stage, record, generators
        self._left = {i: record["microbatches"][i] for i in microbatches}
        """What was recorded of those whose backward is not computed yet."""
        self._recorder = Recorder(stage, {i: given["splits"] for i, given in self._left.items()})
        made = {id(p): nn.Parameter(p.detach(), p.requires_grad) for p in record["parameters"]}
        self._parameters = [made[id(p)] for p in record["parameters"]]
        stage.begin(_work_of(self._left))
        stage.context.step, stage.context.last = record["step"], record["draw"].last
        stage.shaped(0, announce=True)

    def compute(self, forwards: Iterable[int], backwards: Iterable[int]) -> None:
        """Compute the forwards of some, and the backwards of some, after their forwards if these are missing."""
        with self._as_recorded() as buffers:
            for i in forwards:
                with self._noted(i):
                    self._forward(i, buffers)
            for i in backwards:
                with self._noted(i):
                    if not self.stage.awaits_backward(i):
                        self._forward(i, buffers)
                    self._backward(i, buffers)

    def _forward(self, i: int, buffers: _Places) -> None:
        given = self._left[i]
        _put(buffers, _copies_of(given["buffers"]["F"]))
        self._generators.restore(given["random"])
        if self.stage.held is not None:
            self.stage.held.tensors[i] = {tuple(key): tensor for key, tensor in given["held"]}
        self.stage.forward(i, tuple(given["inputs"]), splits=given["splits"])

    def _backward(self, i: int, buffers: _Places) -> None:
        given = self._left[i]
        grads = tuple(given["grads"][place] for place in sorted(given["grads"]))
        if given["splits"]:
            _put(buffers, _copies_of(given["buffers"]["I"]))
            self.stage.backward_input(i, grads)
            _put(buffers, _copies_of(given["buffers"]["W"]))
            self.stage.backward_weight(i)
        else:
            _put(buffers, _copies_of(given["buffers"]["B"]))
            self.stage.backward(i, grads)
        del self._left[i]

    @contextmanager
    def _noted(self, microbatch: int) -> Iterator[None]:
        """Context in which an exception gets a note of what was computed, as the step runs other microbatches."""
        try:
            yield
        except Exception as error:  # raised again
            place = f"stage {self.stage.index}, microbatch {microbatch} of step {self.record['step']}"
            add_note(error, f"fastpipe: raised while an audit computed {place} again")
            raise

    def results(self) -> dict[int, Sums]:
        """Compute the rest; the sums of the results, by microbatch."""
        try:
            self.compute((), list(self._left))
        finally:
            self.stage.end()
        return self._recorder.results

    @contextmanager
    def _as_recorded(self) -> Iterator[_Places]:
        """Context in which the stage computes as it was recorded; gives the places of its buffers."""
        stage, record = self.stage, self.record
        parameters, buffers = (_places(stage.module, owned) for owned in (parameters_of, torch_private.buffers_of))
        states = self._generators.states()
        try:
            _put(parameters, self._parameters)
            if stage.grad_dtype is not None:
                set_grad_dtype(stage.module, stage.grad_dtype)
            for inner, is_training in zip(walked(stage.module), record["training"], strict=True):
                inner.training = is_training
            autocast = torch.autocast(*record["autocast"])
            # it may be completed in an evaluation, after a step that failed
            with torch.inference_mode(False), torch.enable_grad(), self._recorder.attached(), autocast:
                yield buffers
        finally:
            self._generators.restore(states)
            for places in (parameters, buffers):
                _put(places, [tensor for *_, tensor in places])


def _work_of(given: Mapping[int, Mapping[str, Any]]) -> StageWork:
    """The work of a step that has only some of its microbatches."""
    first = next(iter(given.values()))
    work: dict[str, Any] = {}
    for name in first["work"]:
        work[name] = [given[i]["work"][name] if i in given else None for i in range(max(given) + 1)]
    return StageWork(**work, loss_scale=first["loss_scale"], keep_outputs=False)
