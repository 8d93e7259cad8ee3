"""Deferred weight gradients: what a linear's backward leaves for W.

In F of a microbatch whose backward is split, every ``aten::linear`` of the thread leaves a node in the graph that can
do without its weight: in I it queues its input and its output's gradient, and W computes the weight's gradient from
them and enters the graph at the weight. No module is changed, so a subclass, a parametrisation or a direct
``F.linear`` is split like any ``nn.Linear``. The kernel is the native extension's where there is one, whichever
executor runs; else the one here.

With ``fused_weight_grad`` W adds the gradient to ``.grad`` by the matrix product that makes it
(``csrc/torch/weight_grad.h`` is the same for the native kernel).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from threading import local
from typing import Any, Protocol

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.checkpoint import CheckpointFunction, GraphExecGroup

from fastpipe.runtime import native
from fastpipe.runtime.common import is_dtensor, local_part, torch_private, version_of


@dataclass
class Use:
    """What one linear leaves for W."""

    inputs: torch.Tensor
    grad: torch.Tensor
    versions: tuple[int, int] = (0, 0)

    def __post_init__(self) -> None:
        self.versions = version_of(self.inputs), version_of(self.grad)

    def require_unchanged(self) -> None:
        """Refuse what has been changed in place since I: a whole backward would have read it before."""
        for what, tensor, version in zip(
            ("input", "output's gradient"), (self.inputs, self.grad), self.versions, strict=True
        ):
            if version_of(tensor) != version:
                raise RuntimeError(
                    f"the {what} of a linear, {tensor.type()} {list(tensor.shape)}, was changed in place between I, "
                    f"which left it for the weight's gradient, and W: it is at version {version_of(tensor)} instead of "
                    f"{version}; do not write to it again, clone it before the linear, or use a schedule that does "
                    "not split backwards"
                )


def accumulate_in_place(node: Any, uses: Sequence[Use]) -> bool:
    """Add what a weight's uses make to its parameter's gradient.

    Args:
        node: of autograd's graph, where the weight's gradient enters.
        uses: inputs, and gradients of the outputs, of the linears that used it.

    Returns:
        False, and nothing is done, where that is for the engine: no gradient to add to yet, one of another layout, a
        weight that is more than a parameter or its copy in another dtype, hooks that want to see a contribution, or
        operands of 16 bits where no product adds to 32.
    """
    leaf = _leaf_of(node)
    total = None if leaf is None else leaf.grad
    if leaf is None or total is None or not all(_can_accumulate(total, use.inputs, use.grad) for use in uses):
        return False
    with torch.no_grad():
        for use in uses:
            use.require_unchanged()
            if _widens(total, use.grad):
                torch.addmm(total, use.grad.t(), use.inputs, out_dtype=total.dtype, out=total)
            else:
                total.addmm_(use.grad.t(), use.inputs)
    for hook in torch_private.post_hooks_of(leaf):
        hook(leaf)
    return True


with torch.inference_mode(False), torch.enable_grad():
    _CAST: Any = type(torch.zeros((), requires_grad=True).to(torch.float64).grad_fn)
"""What the nodes are that another dtype leaves in the graph."""


def _leaf_of(node: Any) -> Any:
    """The parameter; None where what leads there is more than a cast, as autocast makes one."""
    if isinstance(node, _CAST):
        node = node.next_functions[0][0]
    leaf = torch_private.leaf_of(node)
    return None if leaf is None or torch_private.hooks_of(leaf) else leaf


def _widens(total: torch.Tensor, grad: torch.Tensor) -> bool:
    """Of a product of two 16-bit matrices that is added to a matrix of 32 bits: cuBLAS has it."""
    return grad.dtype in (torch.bfloat16, torch.float16) and total.dtype == torch.float32 and total.is_cuda


def _can_accumulate(total: torch.Tensor, inputs: torch.Tensor, grad: torch.Tensor) -> bool:
    plain = total.layout is torch.strided and not total.requires_grad and not is_dtensor(total)
    dense = plain and torch.ops.aten.is_non_overlapping_and_dense(total)
    same = total.dtype == grad.dtype or _widens(total, grad)
    return dense and same and total.device == grad.device and total.shape == (grad.size(1), inputs.size(1))


class WeightGradients(Protocol):
    """The weight gradients of one microbatch of one stage, between its F, its I and its W."""

    def armed(self, backward: bool, fused: bool = False) -> AbstractContextManager[Any]:
        """While F, or I, runs in this thread: linears may leave their weights for W.

        Args:
            backward: I.
            fused: F, in which another microbatch's backward runs. What that recomputes was not armed in its forward,
                and must not be now: a checkpoint takes what is saved by its order.
        """

    def split(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
        """At the end of F: decide by the graph between inputs and outputs which weights wait."""

    def compute(self) -> None:
        """W: add to the parameters' ``.grad``, and let go of what was held."""

    def held_bytes(self) -> int:
        """The memory that waits for W."""

    def leaves(self) -> list[int]:
        """``_cdata`` of the tensors whose gradients wait for W."""

    def clear(self) -> None:
        """Let go of all."""


@dataclass
class SplitReport:
    """What a stage's first F tells the pure-Python kernel.

    Attributes:
        done: whether there has been one.
        whole: the leaves that I reaches by another way than as a linear's weight: their gradients do not wait.
        waits: the leaves of weights that wait; what F did not use is not among them, nor is what it made itself. The
            tensors are kept, as others could take the place in memory by which they are known.
    """

    done: bool = False
    whole: set[int] = field(default_factory=set)
    waits: dict[int, torch.Tensor] = field(default_factory=dict)


def make_weight_gradients(survey: SplitReport, fused: bool = False) -> WeightGradients:
    """By the extension, which looks at every graph; or in Python, which looks at a stage's first one.

    Args:
        survey: of the stage.
        fused: W adds to ``.grad`` by the matrix products themselves, where that can be.
    """
    runtime: Any = native.load()
    if runtime is not None:
        made: WeightGradients = runtime.WeightGradients(fused)
        return made
    _register()
    return PythonWeightGradients(survey, fused)


@dataclass
class _Pending:
    """What one weight's linears have queued."""

    weight: torch.Tensor
    edge: GradientEdge
    task: int
    uses: list[Use] = field(default_factory=list)


class PythonWeightGradients:
    """The same without the extension; see `WeightGradients`."""

    def __init__(self, survey: SplitReport, fused: bool = False) -> None:
        self.survey, self.fuses = survey, fused
        self.backward = self.fused = False
        self._surveys = not survey.done
        self._asked: list[Any] = []
        self._pending: list[_Pending] = []
        self._group: GraphExecGroup | None = None

    @contextmanager
    def armed(self, backward: bool, fused: bool = False) -> Iterator[None]:
        """While F, or I, runs in this thread."""
        self.backward, self.fused = backward, fused
        before = _thread.armed
        _thread.armed = self
        # I and W are to torch's checkpoint one backward: what I recomputed is there in W
        group = self._group if backward else None
        try:
            with nullcontext() if group is None else group:
                yield
        finally:
            _thread.armed = before

    def split(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
        """After the first F: find the weights that wait. Later ones are split already."""
        if not self._surveys:
            return
        kept: set[Any] = {get_gradient_edge(tensor).node for tensor in inputs}
        _reach([*(get_gradient_edge(tensor).node for tensor in outputs), *self._asked], kept)
        weights = _weights_of(kept) - kept
        while whole := [node for node in weights if not _separate(node, kept, weights)]:
            _reach(whole, kept)
            weights = _weights_of(kept) - kept
        # a linear that makes another's weight is whole: W comes to it through that weight
        makers = set(_leaves(_weights_of(_all_reached(weights))))
        self.survey.done = True
        self.survey.whole = {_cdata(node) for node in kept if _is_leaf(node)}
        self.survey.waits = {leaf: t for leaf, t in _leaves(weights).items() if leaf not in makers}
        self._asked.clear()

    def waits(self, weight: torch.Tensor) -> bool:
        """Whether a linear that is computed now leaves this weight for W."""
        if self._surveys or (self.backward and not _in_reentrant_checkpoint()):
            return False
        leaves = _leaves({get_gradient_edge(weight).node}, past_linears=False)
        if self.backward:
            # The checkpoint's inputs are leaves of the graph made anew, and their gradients are wanted at once. What a
            # checkpoint within it makes, W would make again: it is too late to have this run of the engine in a group.
            if _in_checkpoint() and not weight.is_leaf:
                return False
            parameters = all(isinstance(leaf, torch.nn.Parameter) for leaf in leaves.values())
            return bool(leaves) and parameters and self.survey.whole.isdisjoint(leaves)
        return bool(leaves) and leaves.keys() <= self.survey.waits.keys()

    def leave(self, weight: torch.Tensor) -> None:
        """In F: a linear has left this weight for W."""
        if self._group is None and _in_checkpoint() and not weight.is_leaf:
            self._group = GraphExecGroup()

    def differentiated(self, node: Any) -> None:
        """In F: the model differentiates a linear itself, and may ask for the gradient of the weight of this node."""
        self._asked.append(node)

    def add(self, weight: torch.Tensor, edge: GradientEdge, use: Use) -> None:
        """In I: queue what one linear leaves."""
        # the edge was looked up in F: that makes a node of autograd, by which a recompute is told
        task = torch_private.graph_task()
        for pending in self._pending:
            if pending.task == task and pending.edge[:2] == edge[:2]:
                pending.uses.append(use)
                return
        self._pending.append(_Pending(weight, edge, task, [use]))

    def compute(self) -> None:
        """W: one run of the engine, as in I, so that weights made of the same parameter are summed first."""
        while self._pending:
            task = self._pending[0].task
            group = [pending for pending in self._pending if pending.task == task]
            self._pending = [pending for pending in self._pending if pending.task != task]
            # the engine goes from the node made last to the one made first
            rest = [one for one in group if not (self.fuses and accumulate_in_place(one.edge.node, one.uses))]
            sources = [_source(pending) for pending in reversed(rest)]
            torch.autograd.backward(sources, [torch.empty_like(source) for source in sources])

    def held_bytes(self) -> int:
        """The memory that waits for W."""
        uses = [use for pending in self._pending for use in pending.uses]
        held = [local_part(tensor).untyped_storage() for use in uses for tensor in (use.inputs, use.grad)]
        return sum({storage.data_ptr(): storage.nbytes() for storage in held}.values())

    def leaves(self) -> list[int]:
        """``_cdata`` of the tensors whose gradients wait for W."""
        return list(_leaves({get_gradient_edge(pending.weight).node for pending in self._pending}))

    def clear(self) -> None:
        """Let go of all."""
        self._asked.clear()
        self._pending.clear()


_WEIGHT = 1
"""The place of the weight among the inputs of a linear's node."""


class _Thread(local):
    armed: PythonWeightGradients | None = None


_thread = _Thread()


def _is_leaf(node: Any) -> bool:
    return torch_private.leaf_of(node) is not None


def _cdata(node: Any) -> int:
    return torch_private.address_of(node.variable)


def _leaves(nodes: Iterable[Any], *, past_linears: bool = True) -> dict[int, torch.Tensor]:
    reached = _all_reached(nodes, past_linears=past_linears)
    return {_cdata(node): node.variable for node in reached if _is_leaf(node)}


def _all_reached(nodes: Iterable[Any], *, past_linears: bool = True) -> set[Any]:
    reached: set[Any] = set()
    _reach(nodes, reached, past_linears=past_linears)
    return reached


def _reach(nodes: Iterable[Any], reached: set[Any], *, past_linears: bool = False) -> None:
    """Add what a backward from these nodes comes to; from linears to their weights only if that is wanted."""
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if node is None or node in reached:
            continue
        reached.add(node)
        weight = _WEIGHT if not past_linears and torch_private.function_of(node) is _Linear else None
        stack.extend(next_node for i, (next_node, _) in enumerate(node.next_functions) if i != weight)


def _weights_of(nodes: Iterable[Any]) -> set[Any]:
    """Where the weights of linears enter, of those that are among these nodes."""
    linears = (node for node in nodes if torch_private.function_of(node) is _Linear)
    return {linear.next_functions[_WEIGHT][0] for linear in linears} - {None}


def _separate(node: Any, kept: set[Any], weights: set[Any]) -> bool:
    """Whether a weight is reached by linears alone, and not made by a linear of a weight that others use in I."""
    reached = _all_reached([node])
    ends = (end for end in reached if not end.next_functions)
    made_by = _all_reached(_weights_of(reached))
    return reached.isdisjoint(kept) and made_by.isdisjoint(weights) and all(map(_is_leaf, ends))


def _in_reentrant_checkpoint() -> bool:
    """Whether the graph made now is run at once, by an engine's run of its own; any other one made in I is thrown away,
    or may be asked for the weight's gradient itself."""
    return torch_private.function_of(torch_private.current_node()) is CheckpointFunction


def _in_checkpoint() -> bool:
    """Whether what autograd saves now may be computed again, as far as can be told: something is done to it."""
    return torch_private.saved_tensors_hook() is not None


def _weight_gradient(inputs: torch.Tensor, grad: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """By autograd's own formula for mm, which depends on the weight's layout."""
    if weight.stride(1) == 1 and weight.stride(0) == weight.size(1):
        return grad.t().mm(inputs)
    return inputs.t().mm(grad).t()


def _input_gradient(inputs: torch.Tensor, grad: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    if inputs.stride(0) == 1 and inputs.stride(1) == inputs.size(0):
        return weight.t().mm(grad.t()).t()
    return grad.mm(weight)


class _Linear(torch.autograd.Function):
    """``addmm(bias, inputs, weight.t())``, or ``mm``.

    If the weight waits for W it comes without its graph, which is in ``later``. Where nothing else in the linear
    requires a gradient then, an ``anchor`` does: without one there would be no node.
    """

    @staticmethod
    def forward(
        ctx: Any,
        inputs: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        weights: PythonWeightGradients,
        later: tuple[torch.Tensor, GradientEdge] | None,
        anchor: torch.Tensor | None,
    ) -> torch.Tensor:
        # not in the order of autograd's own node: a checkpoint that ran with that one sees by the shapes that it is not
        ctx.save_for_backward(weight, inputs)
        ctx.weights, ctx.later = weights, later
        return torch.mm(inputs, weight.t()) if bias is None else torch.addmm(bias, inputs, weight.t())

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (grad,) = grads
        weight, inputs = ctx.saved_tensors
        for_inputs = _input_gradient(inputs, grad, weight) if ctx.needs_input_grad[0] else None
        for_weight = _weight_gradient(inputs, grad, weight) if ctx.needs_input_grad[1] else None
        for_bias = grad.sum(0) if ctx.needs_input_grad[2] else None
        if not ctx.weights.backward:
            ctx.weights.differentiated(ctx.next_functions[_WEIGHT][0])
        elif ctx.later is not None:
            ctx.weights.add(*ctx.later, Use(inputs, grad))
        return for_inputs, for_weight, for_bias, None, None, None


class _Source(torch.autograd.Function):
    """Where a weight's deferred gradient enters the graph: computed only when the engine comes to it."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, uses: list[Use]) -> torch.Tensor:
        ctx.weight, ctx.uses = weight.detach(), uses
        return weight.new_empty(())

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        total: torch.Tensor | None = None
        for use in ctx.uses:
            use.require_unchanged()
            part = _weight_gradient(use.inputs, use.grad, ctx.weight)
            total = part if total is None else total.add_(part)
        ctx.uses.clear()
        return total, None


def _source(pending: _Pending) -> torch.Tensor:
    made: torch.Tensor = _Source.apply(pending.weight, pending.uses)  # type: ignore[no-untyped-call]
    return made


def _plain(tensor: torch.Tensor, like: torch.Tensor) -> bool:
    same = tensor.dtype is like.dtype and tensor.device == like.device and is_dtensor(tensor) == is_dtensor(like)
    return same and tensor.layout is torch.strided and (is_dtensor(tensor) or torch_private.is_plain(tensor))


def _fits(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """What is wrong or rare is left to torch, with its messages."""
    if not weight.requires_grad or weight.dim() != 2 or inputs.dim() < 1 or inputs.size(-1) != weight.size(1):
        return False
    if bias is not None and (bias.shape != weight.shape[:1] or not _plain(bias, weight)):
        return False
    return weight.is_floating_point() and _plain(weight, weight) and _plain(inputs, weight)


def _multiply(
    inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, weights: PythonWeightGradients
) -> torch.Tensor:
    later = anchor = None
    if weights.waits(weight):
        weights.leave(weight)
        later, weight = (weight, get_gradient_edge(weight)), weight.detach()
        if not inputs.requires_grad and (bias is None or not bias.requires_grad):
            anchor = weight.new_empty(()).requires_grad_()
    made: torch.Tensor = _Linear.apply(inputs, weight, bias, weights, later, anchor)  # type: ignore[no-untyped-call]
    return made


def _linear(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """aten::linear at the autograd key, by the very operators that torch's own uses: bits depend on them."""
    weights = _thread.armed
    if weights is not None and weights.fused and torch_private.graph_task() != -1:
        weights = None
    if weights is None or not torch.is_grad_enabled() or torch_private.is_traced() or not _fits(inputs, weight, bias):
        plain: torch.Tensor = torch.ops.aten.linear.default.decompose(inputs, weight, bias)
        return plain
    if inputs.dim() == 2:
        return _multiply(inputs, weight, bias, weights)
    sizes = [*inputs.shape[:-1], weight.size(0)]
    flat = inputs.reshape(math.prod(inputs.shape[:-1]), inputs.size(-1))
    if bias is not None and inputs.dim() == 3 and inputs.is_contiguous():
        return _multiply(flat, weight, bias, weights).view(sizes)
    output = torch_private.unsafe_view(_multiply(flat, weight, None, weights), sizes)
    return output if bias is None else output.add_(bias)


_libraries: list[torch.library.Library] = []


def _register() -> None:
    """Put the kernel under ``aten::linear``, once; it stays."""
    if not _libraries:
        library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
        with warnings.catch_warnings():  # torch says once that a kernel of its own is replaced, as is meant
            warnings.filterwarnings("ignore", message="(?s).*(previously registered|only once for all operators)")
            library.impl("linear", _linear, "AutogradCPU")  # type: ignore[no-untyped-call]
        _libraries.append(library)
