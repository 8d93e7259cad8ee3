"""Pairs of a forward and a backward that overlap: in order, together, or by the modules' own method.

In order: the forward, then the backward. Together: the backward in a helper thread, which needs the GIL for Python
functions in the graph only. Which one is faster depends on the machine and the stages, so it is measured, pair by
pair; both give the same bits. The native executor has the same in ``csrc/core/executor.h``.

Where both stages are modules of one type that has a class method ``overlapped_forward_backward``, the pair is left to
it, exactly as DualPipe (https://github.com/deepseek-ai/DualPipe) calls it, so a module written for that runs
unchanged::

    outputs0, loss0 = type(module0).overlapped_forward_backward(
        module0, inputs0, criterion0, labels0, module1, loss1, outputs1, output_grads1
    )

The forward is of `module0`: lists of inputs and of labels, and on the last stage a criterion, elsewhere None and no
labels. The backward is of `module1`: on the last stage that of `loss1`, and both lists are empty; elsewhere `loss1`
is None, and they are tuples, as DualPipe has them: its outputs and their gradients. ``criterion0(*outputs0,
*labels0)`` is the loss function; it returns the microbatch's share of the loss, which the method returns as `loss0`,
and which comes back as `loss1`. The gradients of `inputs0` have to come through autograd. A chain of several layers
is no one module, and keyword arguments have no place in the contract: such pairs run as others do.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fastpipe.runtime.common import Tensors, ThreadState

if TYPE_CHECKING:
    from fastpipe.runtime.stage.stage import Stage

METHOD = "overlapped_forward_backward"


def method_of(modules: Sequence[nn.Module]) -> Callable[..., Any] | None:
    """The method of a stage that is one module, or a chain of one; None where there is none."""
    return getattr(type(modules[0]), METHOD, None) if len(modules) == 1 else None


class Criterion:
    """The loss function of one microbatch as the method calls it.

    Args:
        stage: the last one.
        microbatch: which one.

    Attributes:
        labels: what the method hands on to it.
        loss: what it returned; None before it was called.
    """

    def __init__(self, stage: Stage, microbatch: int) -> None:
        assert stage.work.targets is not None
        self.stage = stage
        self.microbatch = microbatch
        self.target = stage.work.targets[microbatch]
        self.labels: list[Any] = list(self.target) if isinstance(self.target, tuple | list) else [self.target]
        self.loss: torch.Tensor | None = None

    def __call__(self, *values: Any) -> torch.Tensor:
        """The loss, scaled: what is to be differentiated."""
        if self.loss is not None:
            raise ValueError(f"{METHOD} of stage {self.stage.index} called its criterion twice: call it once")
        count = len(self.labels)
        outputs, labels = values[: len(values) - count], values[len(values) - count :]
        target = type(self.target)(labels) if isinstance(self.target, tuple | list) else labels[0]
        self.loss = self.stage.losses.root(self.microbatch, one_or_all(outputs), target)
        return self.loss


def one_or_all(outputs: Sequence[Any]) -> Any:
    """A module's outputs as its forward returns them."""
    return outputs[0] if len(outputs) == 1 else tuple(outputs)


class RootWatch:
    """Whether a backward was run: every root's node is entered."""

    def __init__(self, roots: Sequence[torch.Tensor]) -> None:
        self.missing = {tensor.grad_fn for tensor in roots if tensor.grad_fn is not None}
        self._handles = [node.register_prehook(self._entered(node)) for node in self.missing if node is not None]

    def _entered(self, node: Any) -> Callable[[Any], None]:
        return lambda grads: self.missing.discard(node)

    def end(self) -> bool:
        """Whether all were."""
        for handle in self._handles:
            handle.remove()
        return not self.missing


def fuse(
    stage: Stage, microbatch: int, inputs: Tensors, pair: Stage, roots: Tensors, grads: Sequence[torch.Tensor] | None
) -> tuple[Any, torch.Tensor | None]:
    """Run F of one microbatch and B of another by the method.

    Args:
        stage: whose F it is.
        microbatch: of the F.
        inputs: of the F.
        pair: whose B it is.
        roots: what B starts from, the loss or the outputs that require a gradient.
        grads: of the outputs; None where the root is the loss.

    Returns:
        What the module's forward would have returned, and its loss, or None.

    Raises:
        ValueError: when the method does not return what the contract says, or has run no backward.
    """
    criterion = Criterion(stage, microbatch) if stage.losses.wanted else None
    # a copy: the method may detach the loss in place, as DualPipe's example does, and it may be a view
    loss = None if grads is not None else roots[0].clone()
    watch = RootWatch(roots if loss is None else [loss])
    method = method_of(stage.modules)
    assert method is not None
    try:
        found = method(
            stage.modules[0],
            _arguments(stage, microbatch, inputs),
            criterion,
            [] if criterion is None else criterion.labels,
            pair.modules[0],
            loss,
            [] if grads is None else tuple(roots),
            [] if grads is None else tuple(grads),
        )
    except BaseException:  # raised again
        watch.end()
        raise
    if not watch.end():
        what = "loss1" if grads is None else "outputs1"
        raise ValueError(f"{METHOD} of stage {stage.index} did not run the backward of {what}: call it in the method")
    outputs = _checked(stage, found, criterion)
    return one_or_all(outputs), None if criterion is None else criterion.loss


def _arguments(stage: Stage, microbatch: int, inputs: Tensors) -> list[Any]:
    args, carried = stage.received(microbatch, inputs)
    if carried:
        raise ValueError(
            f"{METHOD} of stage {stage.index} has no place for what earlier layers carry ({', '.join(carried)}): "
            "return it as further outputs, or leave out the method"
        )
    return list(args)


def _checked(stage: Stage, found: Any, criterion: Criterion | None) -> Sequence[torch.Tensor]:
    """The outputs that the method returned, if it returned what the contract says."""
    who = f"{METHOD} of stage {stage.index} returned"
    if not isinstance(found, tuple | list) or len(found) != 2:
        count = f" of {len(found)}" if isinstance(found, tuple | list) else ""
        raise ValueError(f"{who} a {type(found).__name__}{count}: return (outputs0, loss0)")
    outputs, loss = found
    outputs = [outputs] if isinstance(outputs, torch.Tensor) else outputs
    if not isinstance(outputs, tuple | list) or not all(isinstance(output, torch.Tensor) for output in outputs):
        raise ValueError(f"{who} a {type(outputs).__name__} for outputs0: return what the forward gives, as a list")
    if criterion is None:
        if loss is not None:
            raise ValueError(f"{who} a loss, and criterion0 was None: return None for loss0")
        stage.check_outputs(outputs, who)
    elif criterion.loss is None or loss is not criterion.loss:
        raise ValueError(f"{who} another loss0 than criterion0 gave: return criterion0(*outputs0, *labels0) as it is")
    return outputs


IN_ORDER, TOGETHER, MEASURED = "in order", "together", "measured"
WAYS = (IN_ORDER, TOGETHER, MEASURED)
"""The numbers are those of the native executor."""
OVERLAPS = ("auto", "always", "never")
NUM_VOTES = 8
"""How many rounds decide which way pairs go; see `PairClock`."""
PERIODS = (7, 13, 29, 61)
"""Pairs from round to round, each for `NUM_VOTES` rounds; then the last one. Primes, so that rounds come to another
place in every step."""


@dataclass(frozen=True)
class PairPolicy:
    """How pairs are run, and why.

    Attributes:
        way: `IN_ORDER`, `TOGETHER` or `MEASURED`.
        reason: for the user.
    """

    way: str = IN_ORDER
    reason: str = ""


def pair_policy(
    overlap: str, num_ranks_here: int, num_cores: int, device: torch.device, several_streams: bool = False
) -> PairPolicy:
    """What ``overlap`` of the Pipeline means here.

    Args:
        overlap: "auto", "always" or "never".
        num_ranks_here: how many ranks share this host.
        num_cores: how many cores this process may use.
        device: what is computed on.
        several_streams: whether stages have streams of their own there.
    """
    if overlap != "auto":
        return PairPolicy(TOGETHER if overlap == "always" else IN_ORDER, f"overlap={overlap!r}")
    if several_streams:
        return PairPolicy(TOGETHER, f"each stage has its own stream on {device}, and a helper thread fills the other's")
    if device.type != "cpu":
        return PairPolicy(IN_ORDER, f"all stages share a stream on {device}")
    if num_cores <= num_ranks_here:
        return PairPolicy(IN_ORDER, f"{num_ranks_here} ranks on this host, {num_cores} cores: no core is free")
    return PairPolicy(MEASURED, f"{num_ranks_here} ranks on this host, {num_cores} cores: what is faster is measured")


def check_overlap(overlap: str) -> None:
    """Refuse an ``overlap`` that is none."""
    if overlap not in OVERLAPS:
        raise ValueError(f"overlap = {overlap!r}: use 'auto', 'always' or 'never'")


class PairClock:
    """Which way the pairs of two stages go.

    Two pairs in a row that go one way each are a round, and the faster way has its vote: what disturbs the machine for
    longer than a pair disturbs both. Which way comes first alternates. All other pairs go the way that had more of the
    last votes. Rounds come often to begin with and then seldom, but for ever, so that no verdict outlives its machine.
    """

    def __init__(self) -> None:
        self._num_rounds = 0
        self._place = 0  # of the next pair: the first two are the round's
        self._first = 0.0
        self._votes: deque[bool] = deque(maxlen=NUM_VOTES)
        self._best = False

    def next(self) -> bool:
        """Whether the next pair is to be run together."""
        together_first = self._num_rounds % 2 != 0
        if self._place == 0:
            return together_first
        return not together_first if self._place == 1 else self._best

    def note(self, seconds: float) -> None:
        """How long that one took."""
        if self._place == 0:
            self._first = seconds
        if self._place == 1:
            self._vote(seconds < self._first if self.next() else self._first < seconds)
        period = PERIODS[min(self._num_rounds // NUM_VOTES, len(PERIODS) - 1)]
        self._place = (self._place + 1) % period

    def _vote(self, together: bool) -> None:
        self._votes.append(together)
        self._num_rounds += 1
        if 2 * sum(self._votes) != len(self._votes):
            self._best = 2 * sum(self._votes) > len(self._votes)


@dataclass
class PairCounts:
    """How many pairs went which way so far.

    Attributes:
        together: with the backward in the helper thread.
        in_order: one after the other.
        fused: by the modules' own method.
    """

    together: int = 0
    in_order: int = 0
    fused: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return self.together + self.in_order + self.fused


@dataclass
class Pairs:
    """Runs the pairs of one rank.

    Args:
        way: how.
        num_threads: intra-op threads; bits depend on them, so the helper has as many.

    Attributes:
        counts: what became of them.
    """

    way: str
    num_threads: int
    counts: PairCounts = field(default_factory=PairCounts)
    _clocks: dict[Hashable, PairClock] = field(default_factory=dict)
    _helper: ThreadPoolExecutor | None = None

    def run(self, forward: Callable[[], None], backward: Callable[[], None], stages: Hashable, may: bool) -> None:
        """Run a pair.

        Args:
            forward: its F.
            backward: its B.
            stages: which two stages it is of: their pairs are measured apart.
            may: whether the two may run at the same time.
        """
        if not may or self.way == IN_ORDER:
            return self._in_order(forward, backward)
        if self.way == TOGETHER:
            return self._together(forward, backward)
        clock = self._clocks.setdefault(stages, PairClock())
        begin = time.perf_counter()
        (self._together if clock.next() else self._in_order)(forward, backward)
        clock.note(time.perf_counter() - begin)

    def _in_order(self, forward: Callable[[], None], backward: Callable[[], None]) -> None:
        self.counts.in_order += 1
        forward()
        backward()

    def _together(self, forward: Callable[[], None], backward: Callable[[], None]) -> None:
        self.counts.together += 1
        if self._helper is None:
            # its thread ends when nothing refers to it any more
            self._helper = ThreadPoolExecutor(1, "fastpipe-helper", torch.set_num_threads, (self.num_threads,))
        running = self._helper.submit(_with_state, ThreadState(), backward)
        error: BaseException | None = None
        try:
            forward()
        except BaseException as found:  # raised below, when the helper is done
            error = found
        error = _waited(running) or error
        other = running.exception()
        if error is not None:
            raise error
        if other is not None:
            raise other


def _with_state(state: ThreadState, backward: Callable[[], None]) -> None:
    with state.applied():
        backward()


def _waited(running: Future[None]) -> BaseException | None:
    """Wait to the end, whatever interrupts: the backward works with what the caller would free."""
    interrupted: BaseException | None = None
    while not running.done():
        try:
            wait([running])
        except BaseException as found:  # returned, for the caller to raise
            interrupted = found
    return interrupted
