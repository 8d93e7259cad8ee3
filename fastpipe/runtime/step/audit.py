"""Audit: another rank computes a part of a step again, and compares. It finds hardware that computes wrong numbers.

`draw` picks a stage and microbatches of it by the number of the step, the same on every rank. Their rank, the *owner*,
keeps what they are computed from, and sums of the bits of every result: outputs, gradients of inputs, and the
microbatch's part of the gradients of weights (`Recorder`). After the step it sends these and the stage's weights to the
*auditor*. That rank computes them again at the begin of the next step, where it would wait for its first input, in a
copy of the stage that has no memory in between (`skeleton`). If sums differ, all ranks compute them again, and the
majority decides which rank was wrong.

Weights at rest are not computed again: each rank compares their sums (`fastpipe.runtime.step.weight_sums`).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from fastpipe.errors import CorruptionError
from fastpipe.placement import Placement
from fastpipe.program import Op, Program
from fastpipe.runtime.common import (
    Tensors,
    listed,
    parameters_of,
    pytree,
    set_grad_dtype,
    torch_private,
    walked,
)
from fastpipe.runtime.coordination import Control, Reply
from fastpipe.runtime.model import accumulated, as_layers
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
from fastpipe.runtime.step.weight_sums import WeightSums, bit_sums

Exchange = Callable[[int, Sequence[torch.Tensor], Sequence[torch.Tensor]], list[torch.Tensor]]
"""``(peer, tensors, memory for the peer's) -> the peer's``; `fastpipe.runtime.transport.Transport.exchange`."""

Sums = dict[str, int]
"""The sum of the bits of each result of a microbatch, by its name, in the order in which they were computed."""


class Draw(NamedTuple):
    """What is audited of a step.

    Attributes:
        owner: the rank that computes it.
        auditor: the rank that computes it again.
        stage: the stage.
        microbatches: its microbatches, and of each whether its backward is split.
    """

    owner: int
    auditor: int
    stage: int
    microbatches: dict[int, bool]


def check_audit(share: float, placement: Placement, num_processes: int, stages: Any) -> None:
    """Refuse audits that are impossible here.

    Raises:
        ValueError: with what to set instead.
    """
    most = 1 / len(_held(placement))
    if num_processes == 1:
        raise ValueError(f"audit = {share}: a single process has no other rank to compute again; leave it out")
    if share > most:
        raise ValueError(
            f"audit = {share}: a step audits one of the {len(_held(placement))} stages that ranks hold; give at "
            f"most {most:.3g}"
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


def draw(share: float, step: int, program: Program) -> Draw | None:
    """The stage and the microbatches that are audited in a step; None if there are none.

    Each microbatch of each stage is drawn with the probability ``share``. The auditor is the rank whose first stage is
    the last to get an input, as it waits for that at the begin of a step.
    """
    held = _held(program.placement)
    owner, stage = held[microbatch_seed(0, step, 0, 0) % len(held)]
    limit = share * len(held) * 2**64
    chosen = [i for i in range(program.num_microbatches) if microbatch_seed(0, step, 1, i) < limit]
    ops, stages, microbatches = program.columns[owner][:3]
    forwards = set(microbatches[(stages == stage) & ((ops == Op.F) | (ops == Op.OVERLAP_F_B))].tolist())
    split = set(microbatches[(stages == stage) & (ops == Op.I)].tolist())
    drawn = {i: i in split for i in chosen if i in forwards}
    if not drawn:
        return None
    routes = program.placement.routes
    others = [rank for rank in range(program.num_ranks) if rank != owner]
    auditor = max(others, key=lambda rank: min(route.index(rank) for route in routes if rank in route))
    return Draw(owner, auditor, stage, drawn)


class _Watch(torch.autograd.Function):
    """Identity on a tensor; its backward gives the gradient to a function."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, note: Callable[[torch.Tensor], None]) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.note = note
        # not a view: a stage may change its input in place
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, None]:
        if grads[0] is not None:
            ctx.note(grads[0])
        return grads[0], None


def _watch(tensor: torch.Tensor, note: Callable[[torch.Tensor], None]) -> torch.Tensor:
    if not tensor.requires_grad:
        return tensor
    watched: torch.Tensor = _Watch.apply(tensor, note)  # type: ignore[no-untyped-call]
    return watched


class Recorder:
    """Records microbatches of a stage while it computes them.

    Args:
        stage: the stage.
        microbatches: which ones.
        generators: whose states a forward starts from; None if only the results are recorded.

    Attributes:
        given: by microbatch, what it is computed from.
        results: by microbatch, the sums of its results.
    """

    def __init__(self, stage: Stage, microbatches: Iterable[int], generators: Generators | None = None) -> None:
        self.stage = stage
        self.given: dict[int, dict[str, Any]] = {}
        self.results: dict[int, Sums] = {microbatch: {} for microbatch in microbatches}
        self._generators = generators
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
        given: dict[int, torch.Tensor] = {}
        if self._generators is not None:
            self.given[microbatch] = self._taken(microbatch, inputs, self._generators) | {"grads": given}

        def note(name: str) -> Callable[[torch.Tensor], None]:
            return lambda grad: found.update({name: _sum_of(grad)})

        def keep(place: int) -> Callable[[torch.Tensor], None]:
            return lambda grad: given.update({place: _copy(grad)})

        entered = tuple(_watch(t, note(f"the gradient of input {place}")) for place, t in enumerate(inputs))
        outputs = call(microbatch, entered)
        found |= {f"output {place}": _sum_of(tensor) for place, tensor in enumerate(outputs)}
        return tuple(_watch(tensor, keep(place)) for place, tensor in enumerate(outputs))

    def _taken(self, microbatch: int, inputs: Tensors, generators: Generators) -> dict[str, Any]:
        """Copies of everything that a forward depends on, as the stage may change it in place."""
        work, held = self.stage.work, self.stage.held
        kept = {} if held is None else held.tensors.get(microbatch, {})
        given = (work.args, work.kwargs, work.targets, work.output_grads, work.divisors)
        taken = {
            "inputs": list(inputs),
            "held": [[list(key), tensor] for key, tensor in kept.items()],
            "random": generators.states(),
            "buffers": [buffer for _, _, buffer in _buffers(self.stage.module)],
            "work": [None if values is None else values[microbatch] for values in given],
            "loss_scale": work.loss_scale,
        }
        copies: dict[int, torch.Tensor] = {}
        copied: dict[str, Any] = pytree.tree_map(partial(_copied, copies), taken)
        return copied

    @contextmanager
    def _backward(self, action: Current) -> Iterator[None]:
        """Around B, I and W, within the user's context: sums the microbatch's part of the gradients by itself."""
        with nullcontext() if self._context is None else self._context(action):
            if action.microbatch not in self.results:
                yield
                return
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


def _sum_of(tensor: torch.Tensor) -> int:
    (total,) = bit_sums([tensor])
    assert total is not None
    return total


def _copied(copies: dict[int, torch.Tensor], leaf: Any) -> Any:
    """A copy of a tensor, one for all its occurrences; any other value itself."""
    if isinstance(leaf, torch.Tensor) and id(leaf) not in copies:
        copies[id(leaf)] = _copy(leaf)
    return copies.get(id(leaf), leaf)


def _has_hooks(parameter: torch.Tensor) -> bool:
    """Whether the user's hooks see its gradients; a copy has no hooks."""
    return bool(torch_private.hooks_of(parameter) or torch_private.post_hooks_of(parameter))


def _parameters(module: nn.Module) -> list[tuple[dict[str, Any], str, nn.Parameter]]:
    """The places of a module's parameters, in an order that a copy has, too."""
    places = [(parameters_of(inner), name) for inner in walked(module) for name in parameters_of(inner)]
    return [(own, name, p) for own, name in places if (p := own[name]) is not None]


def _buffers(module: nn.Module) -> list[tuple[dict[str, Any], str, torch.Tensor]]:
    places = [(torch_private.buffers_of(m), name) for m in walked(module) for name in torch_private.buffers_of(m)]
    return [(own, name, b) for own, name in places if (b := own[name]) is not None]


def _put(places: Sequence[tuple[dict[str, Any], str, Any]], values: Sequence[torch.Tensor]) -> None:
    if len(places) != len(values):
        raise ValueError(
            f"audit: a stage has {len(values)} parameters or buffers, and had {len(places)} when the Pipeline was "
            "built; change layers before that, or leave audit out"
        )
    for (own, name, _), value in zip(places, values, strict=True):
        own[name] = value


_ALIGNMENT = 64
"""Bytes. Kernels choose their order of summation by strides, and by the place of the memory modulo this."""


def _memory(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes from a tensor's first element to its last one, with gaps if it has any."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.detach().as_strided((last + 1 if tensor.numel() else 0,), (1,)).view(torch.uint8)


def _laid_out(memory: torch.Tensor, like: Sequence[Any], device: torch.device) -> torch.Tensor:
    """A tensor with these bytes, of such dtype, sizes, strides, place in memory, and gradient flag."""
    dtype, size, stride, place, requires_grad = like
    room = torch.empty(len(memory) + _ALIGNMENT, dtype=torch.uint8, device=device)
    start = (place - room.data_ptr()) % _ALIGNMENT
    own = room[start : start + len(memory)].copy_(memory)
    # detached: autograd refuses changes in place of a view that was made without gradients
    return own.view(getattr(torch, dtype)).as_strided(size, stride).detach().requires_grad_(requires_grad)


def _layout(tensor: torch.Tensor) -> list[Any]:
    place = tensor.data_ptr() % _ALIGNMENT
    return [str(tensor.dtype).removeprefix("torch."), tensor.shape, tensor.stride(), place, tensor.requires_grad]


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on which kernels compute the same bits."""
    with torch.no_grad():
        tensor = tensor.resolve_conj().resolve_neg()
        return _laid_out(_memory(tensor), _layout(tensor), tensor.device)


def packed(tree: Any, stage: int, device: torch.device) -> torch.Tensor:
    """A tree as bytes, exact to the last bit and without pickles."""
    tensors = to_tensors(tree, {}, stage)
    text = json.dumps([[*_layout(tensor), tensor.device.type == "cpu"] for tensor in tensors]).encode()
    head = torch.frombuffer(bytearray(len(text).to_bytes(8, "little") + text), dtype=torch.uint8)
    return torch.cat([head.to(device), *(_memory(tensor).to(device) for tensor in tensors)])


def unpacked(data: torch.Tensor) -> Any:
    """The tree of `packed`."""
    start = 8 + int.from_bytes(data[:8].cpu().numpy().tobytes(), "little")
    tensors = []
    for *like, on_host in json.loads(data[8:start].cpu().numpy().tobytes()):
        dtype, size, stride, *_ = like
        last = sum((count - 1) * step for count, step in zip(size, stride, strict=True))
        length = (last + 1 if 0 not in size else 0) * getattr(torch, dtype).itemsize
        device = torch.device("cpu") if on_host else data.device
        with torch.no_grad():
            tensors.append(_laid_out(data[start : start + length], like, device))
        start += length
    (tree,), _ = from_tensors(tuple(tensors))
    return tree


class Finding(NamedTuple):
    """What an audit found; the attributes are those of `fastpipe.CorruptionError`."""

    text: str
    rank: int | None
    stage: int | None = None
    microbatch: int | None = None


class Audit:
    """The audits of a pipeline on this process.

    Args:
        share: the probability with which a microbatch of a stage is drawn.
        rank: of this process.
        copies: of all stages, on meta; see `skeleton`.
        exchange: moves tensors between two ranks.
        control: exchanges messages between all.
        device: of the pipeline.

    Attributes:
        finding: what the last step's audit found, if anything.
        num_computed: the number of microbatches that this process has computed again.
    """

    def __init__(
        self,
        share: float,
        rank: int,
        copies: Mapping[int, Stage],
        exchange: Exchange,
        control: Control,
        device: torch.device,
    ) -> None:
        self.share, self.rank, self.device = share, rank, device
        self.finding: Finding | None = None
        self.num_computed = 0
        self._copies, self._exchange, self._control = copies, exchange, control
        self._generators = Generators(device)
        self._weights = WeightSums()
        self._draw: Draw | None = None
        self._recorder: Recorder | None = None
        self._last = (-1, -1, -1)
        self._data: torch.Tensor | None = None
        """As owner: what is sent after this step."""
        self._received: torch.Tensor | None = None
        """As auditor: what is computed again."""
        self._has_doubts = False

    def __str__(self) -> str:
        """One line for `Pipeline.describe`."""
        return f"a share of {self.share} of the work; {self.num_computed} microbatches were computed again here"

    def begin(self, program: Program, step: int, stages: Sequence[Stage]) -> AbstractContextManager[None]:
        """Before a step: compute again what this rank has received after the last one.

        Returns:
            The context in which the step runs.
        """
        self._recorder, self._data = None, None
        if self._received is not None:
            self._check(self._received)
        self._weights.begin(stages)
        self._draw = drawn = draw(self.share, step, program)
        if drawn is None or drawn.owner != self.rank:
            return nullcontext()
        self._last = last_microbatches(program.columns[self.rank], drawn.stage)
        stage = next(stage for stage in stages if stage.index == drawn.stage)
        self._recorder = Recorder(stage, drawn.microbatches, self._generators)
        return self._recorder.attached()

    def _check(self, data: torch.Tensor) -> None:
        """Compute again what was received; keep it for a vote if the results differ."""
        self._received, record = None, unpacked(data)
        found = self._compute(record)
        if any(_chosen(own["sums"], found[i]) != own["sums"] for i, own in record["microbatches"].items()):
            self._received, self._has_doubts = data, True

    def report(self) -> Reply:
        """After a step that succeeded on this rank: what the others must know."""
        if self._recorder is not None:
            stage = self._recorder.stage.index
            try:
                self._data = packed(self._record(self._recorder), stage, self.device)
            except ValueError as error:
                raise ValueError(
                    f"audit: what stage {stage} is given cannot be sent to another rank; give it in another form, or "
                    f"leave audit out ({error})"
                ) from error
        self._recorder = None
        reply: Reply = {"doubts": True} if self._has_doubts else {}
        return reply | ({"changed": changed} if (changed := self._weights.changed()) else {})

    def _record(self, recorder: Recorder) -> dict[str, Any]:
        """What the auditor needs: values that to_tensors supports."""
        module, kind = recorder.stage.module, self.device.type
        assert self._draw is not None
        parameters = [p for _, _, p in _parameters(module)]
        own = {id(p): p.detach().requires_grad_(p.requires_grad) for p in parameters}
        return {
            "owner": self.rank,
            "stage": recorder.stage.index,
            "step": recorder.stage.context.step,
            "last": self._last,
            "training": [inner.training for inner in walked(module)],
            "autocast": [torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)],
            "parameters": [own[id(p)] for p in parameters],
            "microbatches": {
                i: given | {"sums": recorder.results[i], "splits": self._draw.microbatches[i]}
                for i, given in recorder.given.items()
            },
        }

    def end(self, replies: Sequence[Reply]) -> None:
        """After a step that succeeded on all ranks: pass on what is audited, or decide what was wrong. Collective."""
        changed = [(rank, reply["changed"]) for rank, reply in enumerate(replies) if "changed" in reply]
        doubts = [rank for rank, reply in enumerate(replies) if "doubts" in reply]
        if changed or doubts:
            self.finding = _of_weights(*changed[0]) if changed else self._vote(doubts[0])
            self._received, self._has_doubts = None, False
            return
        self._received, drawn = None, self._draw
        if drawn is None:
            return
        if self._data is not None:
            self._send(drawn.auditor, self._data)
        elif self.rank == drawn.auditor:
            self._received = self._receive(drawn.owner)
        self._data = None

    def _send(self, peer: int, data: torch.Tensor) -> None:
        self._exchange(peer, [torch.tensor([len(data)], device=self.device)], [])
        self._exchange(peer, [data], [])

    def _receive(self, peer: int) -> torch.Tensor:
        (size,) = self._exchange(peer, [], [torch.zeros(1, dtype=torch.int64, device=self.device)])
        (data,) = self._exchange(peer, [], [torch.empty(int(size), dtype=torch.uint8, device=self.device)])
        return data

    def _vote(self, auditor: int) -> Finding:
        """All ranks compute again what the auditor doubts."""
        if self._received is not None and self.rank == auditor:
            data = self._received
            for peer in range(self._control.size):
                if peer != auditor:
                    self._send(peer, data)
        else:
            data = self._receive(auditor)
        record = unpacked(data)
        found = self._compute(record)
        replies = self._control.exchange("audit", {"sums": [found[i] for i in record["microbatches"]]})
        place = Place(record["step"], record["stage"], record["owner"], auditor)
        findings = [
            judged(place, i, own["sums"], [reply["sums"][number] for reply in replies])
            for number, (i, own) in enumerate(record["microbatches"].items())
        ]
        # if nobody shares the auditor's doubts now, it was wrong itself
        return next((finding for finding in findings if finding is not None), _of_auditor(place))

    def _compute(self, record: Mapping[str, Any]) -> dict[int, Sums]:
        """Compute microbatches of a record again; returns the sums of their results."""
        stage = self._copies[record["stage"]]
        parameters, buffers = _parameters(stage.module), _buffers(stage.module)
        states = self._generators.states()
        recorder = Recorder(stage, record["microbatches"])
        enabled, dtype = record["autocast"]
        made = {id(p): nn.Parameter(p.detach(), p.requires_grad) for p in record["parameters"]}
        try:
            _put(parameters, [made[id(p)] for p in record["parameters"]])
            for inner, is_training in zip(walked(stage.module), record["training"], strict=True):
                inner.training = is_training
            if stage.grad_dtype is not None:
                set_grad_dtype(stage.module, stage.grad_dtype)
            stage.context.step, stage.context.last = record["step"], tuple(record["last"])
            with recorder.attached(), torch.autocast(self.device.type, dtype, enabled):
                for i, given in record["microbatches"].items():
                    _put(buffers, given["buffers"])
                    self._generators.restore(given["random"])
                    _run(stage, i, given)
                    self.num_computed += 1
        finally:
            stage.end()
            self._generators.restore(states)
            for places in (parameters, buffers):
                _put(places, [tensor for _, _, tensor in places])
        return recorder.results

    def raise_finding(self) -> None:
        """Raise what the last step's audit found.

        Raises:
            CorruptionError: on all ranks.
        """
        if self.finding is not None:
            found, self.finding = self.finding, None
            raise CorruptionError(
                f"audit: {found.text}. What was trained since then, or before, may be wrong: restart from an earlier "
                "checkpoint, and test the host",
                rank=found.rank,
                stage=found.stage,
                microbatch=found.microbatch,
                cause=found.text,
            )


def _run(stage: Stage, microbatch: int, given: Mapping[str, Any]) -> None:
    """Forward and backward of a microbatch, as the owner ran it."""

    def at(value: Any) -> Any:
        return None if value is None else [value] * (microbatch + 1)

    args, kwargs, target, output_grads, divisor = map(at, given["work"])
    stage.begin(
        StageWork(
            args=args,
            kwargs=kwargs,
            targets=target,
            output_grads=output_grads,
            divisors=divisor,
            loss_scale=given["loss_scale"],
            keep_outputs=False,
        )
    )
    stage.shaped(0, announce=True)
    if stage.held is not None:
        stage.held.tensors[microbatch] = {tuple(key): tensor for key, tensor in given["held"]}
    grads = tuple(given["grads"][place] for place in sorted(given["grads"]))
    stage.forward(microbatch, tuple(given["inputs"]), splits=given["splits"])
    if given["splits"]:
        stage.backward_input(microbatch, grads)
        stage.backward_weight(microbatch)
    else:
        stage.backward(microbatch, grads)


def _chosen(original: Sums, found: Sums) -> dict[str, int | None]:
    return {name: found.get(name) for name in original}


class Place(NamedTuple):
    """What was computed, by whom, and by whom again."""

    step: int
    stage: int
    owner: int
    auditor: int


def judged(place: Place, microbatch: int, original: Sums, found: Sequence[Sums]) -> Finding | None:
    """Which rank was wrong.

    Args:
        place: of the microbatch.
        microbatch: its number.
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
    owner = place.owner
    what = f"{name} of stage {place.stage}, microbatch {microbatch}, step {place.step}, computed on rank {owner},"
    if 2 * count <= len(found):
        text = f"{what} is not what rank {place.auditor} computes, also when both repeat it: one of them is wrong"
        return Finding(text, None, place.stage, microbatch)
    if json.dumps(original) == best:
        text = f"{what} is right, and rank {wrong[0]} computes it wrong"
        return Finding(text, wrong[0], place.stage, microbatch)
    again = "it is wrong again" if owner in wrong else f"this time rank {owner} agrees with them"
    text = f"{what} is wrong: {count} of {len(found)} ranks compute other bits; {again}"
    return Finding(text, owner, place.stage, microbatch)


def _of_auditor(place: Place) -> Finding:
    text = (
        f"rank {place.auditor} computed stage {place.stage} of step {place.step} again with other bits than rank "
        f"{place.owner}, and now agrees with all ranks: it was wrong once"
    )
    return Finding(text, place.auditor, place.stage)


def _of_weights(rank: int, names: Sequence[str]) -> Finding:
    text = (
        f"{listed(names)} on rank {rank} changed between the last step of the optimizer and the end of this step, and "
        "nothing wrote to it (a script that does so through .data must write under torch.no_grad() instead)"
    )
    return Finding(text, rank)
