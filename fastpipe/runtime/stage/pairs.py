"""Overlapped pairs of a forward and a backward: run in order, together, in turns, or by the modules' own method.

In order: the forward, then the backward. Together: the backward in a helper thread, which needs the GIL only for Python
functions in the graph. Which is faster depends on machine and stages, so it is measured per pair of stages; the bits
are the same. ``csrc/core/executor.h`` does that. The Python executor runs one half at a time: in order, or in turns.

In turns: in a mesh whose stages run collectives, which need one order on all ranks, pairs of stages that call
`all_to_all`, in both executors; other pairs run in order there. Both halves have a thread, but only the one that has
the turn runs. A half that comes to an all-to-all starts it, passes the turn, and waits for the rows when it has the
turn again. So the rows travel while the other half computes, without a method of the modules'. Two layers whose experts
are on other ranks::

    backward  | combine >  |            | experts > |           | attention, combine > | ...
    forward   |            | attention >|           | experts > |                      | combine, attention > ...

where ``>`` starts an all-to-all. The backward begins, as its first piece is short; the forward does if the stage of the
backward has called no `all_to_all`.

**The order of collectives** of a pair depends on nothing but the halves themselves. Call what a half does between two
all-to-alls a piece. The pieces run one at a time, in an order that follows from their numbers alone: in turns, and
what is left of one half when the other has ended. Collectives are started in pieces, by any library, so they have one
order, and none starts while another thread could start one. Ranks of a group run the same program. If each half has
the same collectives on all of them, as it must for a step without pairs, then so has the pair. No rank waits forever
then: take the one that has started the fewest. What it waits for it has started, and so have all others.

If both stages are modules of one type with a class method ``overlapped_forward_backward``, it runs the pair. It is
called exactly as by DualPipe (https://github.com/deepseek-ai/DualPipe), so modules written for that run unchanged::

    outputs0, loss0 = type(module0).overlapped_forward_backward(
        module0, inputs0, criterion0, labels0, module1, loss1, outputs1, output_grads1
    )

The forward is that of `module0`: lists of inputs and labels, and on the last stage a criterion; elsewhere the criterion
is None and labels are empty. The backward is that of `module1`: on the last stage from `loss1`, with two empty lists;
elsewhere `loss1` is None, and the outputs and their gradients are tuples. ``criterion0(*outputs0, *labels0)`` is the
loss function; it returns the microbatch's share of the loss, which the method returns as `loss0`, and which is passed
later as `loss1`. The gradients of `inputs0` must come through autograd. The contract excludes chains of several layers
and steps with keyword arguments: their pairs run as others do.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextvars import copy_context
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.function import once_differentiable

from fastpipe.checks import check_type
from fastpipe.runtime.common import Tensors, thread_state, torch_private

METHOD = "overlapped_forward_backward"


def method_of(modules: Sequence[nn.Module]) -> Callable[..., Any] | None:
    """The method of a stage of one module, or of a chain of one; None if it has none."""
    return getattr(type(modules[0]), METHOD, None) if len(modules) == 1 else None


def one_or_all(outputs: Sequence[Any]) -> Any:
    """A module's outputs, as its forward returns them."""
    return outputs[0] if len(outputs) == 1 else tuple(outputs)


def fuse(
    stage: int,
    module: nn.Module,
    inputs: list[Any],
    root: Callable[[Any, Any], torch.Tensor] | None,
    target: Any,
    pair: nn.Module,
    roots: Tensors,
    grads: Sequence[torch.Tensor] | None,
) -> tuple[list[torch.Tensor], torch.Tensor | None]:
    """Run F of one microbatch, on the stage of index ``stage``, and B of another by the method.

    The F is that of ``module``, with these inputs and, on the last stage, ``root(output, target)``, which returns the
    scaled loss: the method gets it as the criterion, with the target as labels. The B is that of ``pair``, from these
    roots: the loss, or the outputs that require a gradient, with their ``grads`` (None for the loss).

    Returns:
        The outputs of the module's forward, and the result of ``root``.

    Raises:
        ValueError: when the method's result violates the contract, or it ran no backward.
    """
    has_several = isinstance(target, tuple | list)
    labels = [] if root is None else list(target) if has_several else [target]
    losses: list[torch.Tensor] = []

    def criterion(*values: Any) -> torch.Tensor:
        assert root is not None
        if losses:
            raise ValueError(f"{METHOD} of stage {stage} called its criterion twice: call it once")
        count = len(values) - len(labels)
        given = values[count:]
        losses.append(root(one_or_all(values[:count]), type(target)(given) if has_several else given[0]))
        return losses[0]

    # a copy: DualPipe's example detaches the loss in place, which fails for a view
    loss = None if grads is not None else roots[0].clone()
    not_entered = {tensor.grad_fn for tensor in (roots if loss is None else [loss]) if tensor.grad_fn is not None}
    hooks = [node.register_prehook(lambda _, node=node: not_entered.discard(node)) for node in not_entered]
    method = method_of([module])
    assert method is not None
    theirs = ([], []) if grads is None else (tuple(roots), tuple(grads))
    try:
        found = method(module, inputs, None if root is None else criterion, labels, pair, loss, *theirs)
    finally:
        for hook in hooks:
            hook.remove()
    if not_entered:
        what = "loss1" if grads is None else "outputs1"
        raise ValueError(f"{METHOD} of stage {stage} did not run the backward of {what}: call it in the method")
    own = losses[0] if losses else None
    return _checked(stage, found, own, has_criterion=root is not None), own


def _checked(stage: int, found: Any, own: torch.Tensor | None, *, has_criterion: bool) -> list[torch.Tensor]:
    """The outputs that the method returned; raises ValueError if they violate the contract."""
    prefix = f"{METHOD} of stage {stage} returned"
    if not isinstance(found, tuple | list) or len(found) != 2:
        count = f" of {len(found)}" if isinstance(found, tuple | list) else ""
        raise ValueError(f"{prefix} a {type(found).__name__}{count}: return (outputs0, loss0)")
    outputs, loss = found
    outputs = [outputs] if isinstance(outputs, torch.Tensor) else outputs
    if not isinstance(outputs, tuple | list) or not all(isinstance(output, torch.Tensor) for output in outputs):
        raise ValueError(f"{prefix} a {type(outputs).__name__} for outputs0: return what the forward gives, as a list")
    if not has_criterion and loss is not None:
        raise ValueError(f"{prefix} a loss, and criterion0 was None: return None for loss0")
    if has_criterion and (own is None or loss is not own):
        raise ValueError(
            f"{prefix} another loss0 than criterion0 gave: return criterion0(*outputs0, *labels0) as it is"
        )
    return list(outputs)


IN_ORDER, TOGETHER, MEASURED, IN_TURNS = "in order", "together", "measured", "in turns"
WAYS = (IN_ORDER, TOGETHER, MEASURED, IN_TURNS)
"""Indices as in the native executor."""
FUSED = "fused"
"""By the modules' own method, where they have one."""


def pair_policy(
    overlap: str,
    num_ranks_here: int,
    num_cores: int,
    device: torch.device,
    several_streams: bool = False,
    dimensions: Sequence[str] = (),
    by_python: bool = False,
) -> tuple[str, str]:
    """Resolve the argument ``overlap`` of the Pipeline.

    Args:
        num_cores: number of cores that this process may use.
        dimensions: those of the mesh over which stages run collectives.
        by_python: whether the executor is the Python one, which `executor_class` refuses for "always".

    Returns:
        How pairs are run, one of `WAYS`, and the reason for the user.
    """
    if dimensions and overlap == "auto":
        reason = f"at fastpipe.all_to_all; collectives over {', '.join(dimensions)} must have one order on all ranks"
        return IN_TURNS, reason
    if overlap != "auto":
        return TOGETHER if overlap == "always" else IN_ORDER, f"overlap={overlap!r}"
    if by_python:
        return IN_ORDER, "the Python executor runs one half at a time"
    if several_streams:
        return TOGETHER, f"each stage has its own stream on {device}, and a helper thread fills the other's"
    if device.type != "cpu":
        return IN_ORDER, f"all stages share a stream on {device}"
    here = f"{num_ranks_here} ranks on this host, {num_cores} cores"
    if num_cores <= num_ranks_here:
        return IN_ORDER, f"{here}: no core is free"
    return MEASURED, f"{here}: what is faster is measured"


FORWARD, BACKWARD = 0, 1
_KEY = "fastpipe.turns"


def all_to_all(
    tensor: torch.Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Exchange rows between the ranks of a group, like ``torch.distributed.all_to_all_single``, with a backward.

    In a pair of a forward and a backward (``OVERLAP_F_B``) of a pipeline whose mesh has a dimension for such groups,
    the other half of the pair computes while the rows travel. Outside of pairs it waits for them. The values are the
    same.

    Args:
        tensor: [rows, ...], those for the first rank first.
        output_split_sizes: number of rows that come from each rank; None for equal ones.
        input_split_sizes: number of rows for each rank; None for equal ones.
        group: the ranks; None for all processes. All of them must call it as often as each other, with no rows, too.

    Returns:
        [rows, ...], those of the first rank first.
    """
    found: torch.Tensor = _counted(tensor, output_split_sizes, input_split_sizes, group)
    return found


@torch_private.never_compiled
def _counted(tensor: Any, received: Any, sent: Any, group: Any) -> Any:
    check_type(torch.Tensor, tensor=tensor)
    rows_by_rank = "give the number of rows of every rank of the group"
    check_type(Iterable | None, rows_by_rank, output_split_sizes=received, input_split_sizes=sent)
    check_type(dist.ProcessGroup | None, "a DeviceMesh has one for each dimension: mesh.get_group(name)", group=group)
    _thread.num_calls = num_calls() + 1
    return _AllToAll.apply(tensor, received, sent, group)  # type: ignore[no-untyped-call]


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, received: Any, sent: Any, group: Any) -> torch.Tensor:
        ctx.back = sent, received, group
        return _exchange(tensor, received, sent, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _exchange(grad, *ctx.back), None, None, None


def _exchange(
    rows: torch.Tensor, received: Sequence[int] | None, sent: Sequence[int] | None, group: Any
) -> torch.Tensor:
    shape = rows.shape if received is None else (sum(received), *rows.shape[1:])
    found = rows.new_empty(shape)
    into, out_of = (None if sizes is None else list(sizes) for sizes in (received, sent))
    work: Any = dist.all_to_all_single(found, rows.contiguous(), into, out_of, group, async_op=True)
    turns = torch_private.find_in_thread(_KEY)
    if turns is not None:
        turns.pass_on()
    work.wait()
    return found


_thread = threading.local()


def num_calls() -> int:
    """How often this thread has called `all_to_all`."""
    return getattr(_thread, "num_calls", 0)


class OtherHalfError(Exception):
    """Ends a half of a pair when the other one has failed."""


class Turns:
    """The turns of one pair.

    Args:
        first: the half that begins, `FORWARD` or `BACKWARD`.
    """

    def __init__(self, first: int) -> None:
        self._changed = threading.Condition()
        self._turn = first
        self._has_ended = False  # one of them
        self._has_failed = False

    def run(self, half: int, call: Callable[[], None]) -> None:
        """Run a half in this thread when it has the turn.

        If the other one fails, this one ends at its next all-to-all, as peers may not take part in it, and does not
        raise.
        """
        try:
            with self._changed:
                self._wait(half)
            with torch_private.noted_in_thread(_KEY, self):
                call()
        except BaseException as error:  # raised again, unless it is a consequence
            if not self._fail() or not isinstance(error, Exception):
                raise
        finally:
            with self._changed:
                self._has_ended = True
                self._give(1 - half)

    def pass_on(self) -> None:
        """Called by the half that has the turn: wait while the other half runs until it does the same, or ends.

        Raises:
            OtherHalfError: if it failed.
        """
        with self._changed:
            half = self._turn
            if not self._has_ended:
                self._give(1 - half)
            self._wait(half)

    def _give(self, half: int) -> None:
        self._turn = half
        self._changed.notify_all()

    def _wait(self, half: int) -> None:
        self._changed.wait_for(lambda: self._turn == half or self._has_failed)
        if self._has_failed:
            raise OtherHalfError("the other half of the pair failed")

    def _fail(self) -> bool:
        """Note a failure; returns whether there was one before."""
        with self._changed:
            before, self._has_failed = self._has_failed, True
            self._changed.notify_all()
            return before


def make_helper(num_threads: int) -> ThreadPoolExecutor:
    """A helper for `in_turns`. Its thread starts when it is first used, and ends when the helper is collected.

    Args:
        num_threads: intra-op threads, as bits depend on their number.
    """
    return ThreadPoolExecutor(1, "fastpipe-helper", torch.set_num_threads, (num_threads,))


def in_turns(
    helper: ThreadPoolExecutor, forward: Callable[[], None], backward: Callable[[], None], backward_first: bool
) -> None:
    """Run both halves in turns, from one `fastpipe.all_to_all` to the next, the backward in the helper."""
    turns = Turns(BACKWARD if backward_first else FORWARD)
    state = thread_state()

    def run_backward() -> None:
        with state():
            turns.run(BACKWARD, backward)

    running = helper.submit(copy_context().run, run_backward)
    error: BaseException | None = None
    try:
        turns.run(FORWARD, forward)
    except BaseException as found:  # raised below, when the helper is done
        error = found
    error = _wait_to_end(running) or error or running.exception()
    try:
        if error is not None:
            raise error
    finally:
        del error, running  # breaks the reference cycle of exception and frame


def _wait_to_end(running: Future[None]) -> BaseException | None:
    """Wait despite interrupts, as the backward uses tensors that the caller frees; returns the last interrupt."""
    interrupted: BaseException | None = None
    while not running.done():
        try:
            wait([running])
        except BaseException as found:  # returned
            interrupted = found
    return interrupted
