"""Deferred weight gradients: the part of a linear's backward that W computes.

In F of a microbatch whose backward is split, every ``aten::linear`` of the thread creates a node that does not need its
weight: in I it queues its input and its output's gradient, and W computes the weight's gradient from them and enters
the graph at the weight. Modules are unchanged, so subclasses, parametrizations and direct calls of ``F.linear`` are
split like any ``nn.Linear``. With the extension both executors use its kernel, else the one here.

With ``fused_weight_grad`` W accumulates into ``.grad`` by the matrix product itself (only the extension's kernel:
``csrc/torch/weight_grad.h``).
"""

from __future__ import annotations

import math
import threading
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.checkpoint import CheckpointFunction, GraphExecGroup

from fastpipe.runtime import native
from fastpipe.runtime.common import grad_dtype_of, has_graph, is_dtensor, local_part, torch_private, version_of


@dataclass
class Use:
    """Tensors that one linear queues for W."""

    inputs: torch.Tensor
    grad: torch.Tensor
    versions: tuple[int, int] = (0, 0)

    def __post_init__(self) -> None:
        self.versions = version_of(self.inputs), version_of(self.grad)

    def require_unchanged(self) -> None:
        """Raise RuntimeError if a tensor was changed in place since I."""
        for what, tensor, version in zip(
            ("input", "output's gradient"), (self.inputs, self.grad), self.versions, strict=True
        ):
            if version_of(tensor) != version:
                raise RuntimeError(
                    f"the {what} of a linear, {tensor.type()} {list(tensor.shape)}, was changed in place between I "
                    "and W, which needs it for the weight's gradient: it is at version "
                    f"{version_of(tensor)} instead of {version}; do not write to it again, clone it before the linear, "
                    "or use a schedule that does not split backwards"
                )


@dataclass
class SplitReport:
    """Analysis of a stage's first F, for the pure-Python kernel.

    Attributes:
        done: whether it has run.
        whole: leaves that I reaches by another way than as a linear's weight; they are not deferred.
        waits: leaves of the deferred weights, without those that F did not use or made itself. Kept alive, as they are
            identified by address.
    """

    done: bool = False
    whole: set[int] = field(default_factory=set)
    waits: dict[int, torch.Tensor] = field(default_factory=dict)


def make_weight_gradients(report: SplitReport, fused: bool = False) -> WeightGradients:
    """Made by the extension, which analyzes every graph; or in Python, which analyzes a stage's first one.

    With ``fused`` the extension's W accumulates into ``.grad`` by the matrix products themselves, where possible.
    """
    runtime: Any = native.load()
    if runtime is not None:
        made: WeightGradients = runtime.WeightGradients(fused)
        return made
    _register()
    return WeightGradients(report)


class WeightGradients:
    """The weight gradients of one microbatch of one stage, from F to W; the extension's class has the same methods.

    Attributes:
        differentiated: in F, nodes of weights for whose gradients the model itself may have differentiated a linear.
    """

    def __init__(self, report: SplitReport) -> None:
        self.report = report
        self.backward = self.fused = False
        self._is_first = not report.done
        self.differentiated: list[Any] = []
        # by run of the engine and edge of a weight, the weight and what its linears queued
        self._pending: dict[tuple[int, Any, int], tuple[torch.Tensor, list[Use]]] = {}
        self._group: GraphExecGroup | None = None

    @contextmanager
    def armed(self, backward: bool, fused: bool = False) -> Iterator[None]:
        """While F or I runs in this thread: linears may defer their weights to W.

        Args:
            backward: I instead of F.
            fused: F in which another microbatch's backward runs. Its recompute was not armed in its forward, and must
                not be now, as a checkpoint matches saved tensors by order.
        """
        self.backward, self.fused = backward, fused
        before, _thread.armed = getattr(_thread, "armed", None), self
        # for torch's checkpoint I and W are one backward: W reuses what I recomputed
        group = self._group if backward else None
        try:
            with nullcontext() if group is None else group:
                yield
        finally:
            _thread.armed = before

    def split(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
        """At the end of F: decide by the graph from inputs to outputs which weights are deferred.

        Only of a stage's first F: this kernel has split later graphs when it made them.
        """
        if not self._is_first:
            return
        kept: set[Any] = {get_gradient_edge(tensor).node for tensor in inputs}
        ends = [*(get_gradient_edge(tensor).node for tensor in outputs), *self.differentiated]
        reach(ends, kept, past_linears=False)
        weights = _weights_of(kept) - kept
        while whole := [node for node in weights if not _separate(node, kept, weights)]:
            reach(whole, kept, past_linears=False)
            weights = _weights_of(kept) - kept
        # a linear that computes another's weight is not deferred: W reaches it through that weight
        makers = set(_leaves(_weights_of(reach(weights, set(), past_linears=True))))
        self.report.done = True
        self.report.whole = {torch_private.address_of(node.variable) for node in kept if _is_leaf(node)}
        self.report.waits = {leaf: t for leaf, t in _leaves(weights).items() if leaf not in makers}
        self.differentiated.clear()

    def waits(self, weight: torch.Tensor) -> bool:
        """Whether a linear that runs now defers this weight to W."""
        if self._is_first or (self.backward and not _in_reentrant_checkpoint()):
            return False
        leaves = _leaves({get_gradient_edge(weight).node}, past_linears=False)
        if self.backward:
            # A checkpoint's inputs are leaves of the recomputed graph, and their gradients are needed in I. W would
            # recompute a nested checkpoint again: this run of the engine can no longer join a group.
            if _in_checkpoint() and not weight.is_leaf:
                return False
            parameters = all(isinstance(leaf, torch.nn.Parameter) for leaf in leaves.values())
            return bool(leaves) and parameters and self.report.whole.isdisjoint(leaves)
        return bool(leaves) and leaves.keys() <= self.report.waits.keys()

    def note_deferred(self, weight: torch.Tensor) -> None:
        """In F: a linear has deferred this weight to W."""
        if self._group is None and _in_checkpoint() and not weight.is_leaf:
            self._group = GraphExecGroup()

    def add(self, weight: torch.Tensor, edge: GradientEdge, use: Use) -> None:
        """In I: queue the tensors of one linear."""
        # the edge is from F: getting it creates a node, and new nodes are how a recompute is detected
        _, uses = self._pending.setdefault((torch_private.graph_task(), edge.node, edge.output_nr), (weight, []))
        uses.append(use)

    def compute(self) -> None:
        """W: add to the parameters' ``.grad``, and release what was held.

        One run of the engine per run in I, so that weights made of one parameter are summed first.
        """
        while self._pending:
            task, *_ = next(iter(self._pending))
            group = [self._pending.pop(key) for key in list(self._pending) if key[0] == task]
            # the engine runs nodes from last to first created
            sources: list[Any] = [_Source.apply(*given) for given in reversed(group)]  # type: ignore[no-untyped-call]
            torch.autograd.backward(sources, [torch.empty_like(source) for source in sources])

    def held_bytes(self) -> int:
        """Bytes held for W."""
        queued = [use for _, uses in self._pending.values() for use in uses]
        held = [local_part(tensor).untyped_storage() for use in queued for tensor in (use.inputs, use.grad)]
        return sum({storage.data_ptr(): storage.nbytes() for storage in held}.values())

    def leaves(self) -> list[int]:
        """``_cdata`` of the tensors whose gradients wait for W."""
        return list(_leaves({get_gradient_edge(weight).node for weight, _ in self._pending.values()}))

    def clear(self) -> None:
        """Release all tensors."""
        self.differentiated.clear()
        self._pending.clear()


_WEIGHT = 1
"""Index of the weight among the inputs of a linear's node."""


_thread = threading.local()
"""``armed`` is what the linears of this thread defer to. No context variable: ranks that are threads have their
caller's."""


def _is_leaf(node: Any) -> bool:
    return torch_private.leaf_of(node) is not None


def _leaves(nodes: Iterable[Any], *, past_linears: bool = True) -> dict[int, torch.Tensor]:
    reached = reach(nodes, set(), past_linears=past_linears)
    return {torch_private.address_of(node.variable): node.variable for node in reached if _is_leaf(node)}


def reach(nodes: Iterable[Any], reached: set[Any], *, past_linears: bool) -> set[Any]:
    """Add the nodes that a backward from these reaches; follows linears to their weights only with ``past_linears``."""
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if node is None or node in reached:
            continue
        reached.add(node)
        weight = _WEIGHT if not past_linears and torch_private.function_of(node) is _Linear else None
        stack.extend(next_node for i, (next_node, _) in enumerate(node.next_functions) if i != weight)
    return reached


def _weights_of(nodes: Iterable[Any]) -> set[Any]:
    """The weights' nodes of the linears among these nodes."""
    linears = (node for node in nodes if torch_private.function_of(node) is _Linear)
    return {linear.next_functions[_WEIGHT][0] for linear in linears} - {None}


def _separate(node: Any, kept: set[Any], weights: set[Any]) -> bool:
    """Whether only linears reach a weight, and it is computed from leaves by no linear of ``weights``."""
    reached = reach([node], set(), past_linears=True)
    ends = (end for end in reached if not end.next_functions)
    made_by = reach(_weights_of(reached), set(), past_linears=True)
    return reached.isdisjoint(kept) and made_by.isdisjoint(weights) and all(map(_is_leaf, ends))


def _in_reentrant_checkpoint() -> bool:
    """Whether the graph made now is run at once by a nested run of the engine. Other graphs made in I are dropped, or
    may be differentiated for the weight itself."""
    return torch_private.function_of(torch_private.current_node()) is CheckpointFunction


def _in_checkpoint() -> bool:
    """Whether saved tensors have hooks, so that they may be recomputed."""
    return torch_private.saved_tensors_hook() is not None


def _weight_gradient(inputs: torch.Tensor, grad: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Autograd's formula for mm, which depends on the weight's layout."""
    if weight.stride(1) == 1 and weight.stride(0) == weight.size(1):
        return grad.t().mm(inputs)
    return inputs.t().mm(grad).t()


def _input_gradient(inputs: torch.Tensor, grad: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    if inputs.stride(0) == 1 and inputs.stride(1) == inputs.size(0):
        return weight.t().mm(grad.t()).t()
    return grad.mm(weight)


class _Linear(torch.autograd.Function):
    """``addmm(bias, inputs, weight.t())``, or ``mm``.

    A deferred weight is detached; ``later`` has its graph. If then no input requires a gradient, ``anchor`` does, so
    that there is a node.
    """

    @staticmethod
    def forward(
        ctx: Any,
        inputs: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        weights: WeightGradients,
        later: tuple[torch.Tensor, GradientEdge] | None,
        anchor: torch.Tensor | None,
    ) -> torch.Tensor:
        # another order than in autograd's node, so that a checkpoint detects by shapes when the two are mixed
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
            ctx.weights.differentiated.append(ctx.next_functions[_WEIGHT][0])
        elif ctx.later is not None:
            ctx.weights.add(*ctx.later, Use(inputs, grad))
        return for_inputs, for_weight, for_bias, None, None, None


class _Source(torch.autograd.Function):
    """Source of a weight's deferred gradient; computed when the engine reaches it."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, uses: list[Use]) -> torch.Tensor:
        ctx.weight, ctx.uses = weight.detach(), uses
        ctx.dtype = grad_dtype_of(weight) if weight.is_leaf else weight.dtype
        return weight.new_empty(())

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        total: torch.Tensor | None = None
        for use in ctx.uses:
            use.require_unchanged()
            # the engine converts each gradient before it adds it to others
            part = _weight_gradient(use.inputs, use.grad, ctx.weight).to(ctx.dtype)
            total = part if total is None else total.add_(part)
        ctx.uses.clear()
        return total, None


def _plain(tensor: torch.Tensor, like: torch.Tensor) -> bool:
    same = tensor.dtype is like.dtype and tensor.device == like.device and is_dtensor(tensor) == is_dtensor(like)
    return same and tensor.layout is torch.strided and (is_dtensor(tensor) or torch_private.is_plain(tensor))


def _fits(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Whether the kernel supports these; torch runs all else and raises its errors."""
    if not has_graph(weight) or weight.dim() != 2 or inputs.dim() < 1 or inputs.size(-1) != weight.size(1):
        return False
    # torch adds a bias that is not contiguous after the product
    if bias is not None and not (bias.shape == weight.shape[:1] and bias.is_contiguous() and _plain(bias, weight)):
        return False
    return weight.is_floating_point() and _plain(weight, weight) and _plain(inputs, weight)


def _multiply(
    inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, weights: WeightGradients
) -> torch.Tensor:
    later = anchor = None
    if weights.waits(weight):
        weights.note_deferred(weight)
        later, weight = (weight, get_gradient_edge(weight)), weight.detach()
        if not inputs.requires_grad and (bias is None or not bias.requires_grad):
            anchor = weight.new_empty(()).requires_grad_()
    made: torch.Tensor = _Linear.apply(inputs, weight, bias, weights, later, anchor)  # type: ignore[no-untyped-call]
    return made


def _linear(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """aten::linear at the autograd key, by the same operators as torch's, so that bits are equal."""
    weights: WeightGradients | None = getattr(_thread, "armed", None)
    if weights is not None and weights.fused and torch_private.graph_task() != -1:
        weights = None
    if weights is None or not torch.is_grad_enabled() or torch_private.is_traced() or not _fits(inputs, weight, bias):
        plain: torch.Tensor = torch.ops.aten.linear.default.decompose(inputs, weight, bias)
        return plain
    if inputs.dim() == 2:
        return _multiply(inputs, weight, bias, weights)
    sizes = [*inputs.shape[:-1], weight.size(0)]
    flat = inputs.reshape(math.prod(inputs.shape[:-1]), inputs.size(-1))
    if bias is not None and inputs.is_contiguous():
        return _multiply(flat, weight, bias, weights).view(sizes)
    output = torch_private.unsafe_view(_multiply(flat, weight, None, weights), sizes)
    return output if bias is None else output.add_(bias)


_libraries: list[torch.library.Library] = []


def _register() -> None:
    """Register the kernel for ``aten::linear``, once per process."""
    if not _libraries:
        library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
        with warnings.catch_warnings():  # torch warns once that its kernel is replaced
            warnings.filterwarnings("ignore", message="(?s).*(previously registered|only once for all operators)")
            library.impl("linear", _linear, "AutogradCPU")  # type: ignore[no-untyped-call]
        _libraries.append(library)
