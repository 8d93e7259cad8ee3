"""The losses of a stage: result of the loss function, losses added by layers, roots of the backward.

A layer adds a loss (load balancing in a mixture of experts, a penalty) by `add_loss` in its forward. On the last stage
it is added to the loss. On other stages its gradient enters the graph at the stage's output, with the gradient of that
output, so it takes part in the stage's backward whether that is split or not. A checkpoint's recompute adds nothing; a
forward that ``overlapped_forward_backward`` runs within a backward adds as usual.

`StageWork` holds the inputs and results of a stage for one step.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch

from fastpipe.runtime.common import Tensors, has_graph, is_dtensor, pytree, tensor_leaves, tensors_in, torch_private
from fastpipe.runtime.stage.boundary import deliver


def outputs_and_grads(output: Any, given: Any) -> tuple[Tensors, Tensors]:
    """The tensors of the last stage's output, and the caller's gradient of each.

    Gradients in a dict belong to the outputs of the same names, in whatever order; others are in the outputs' order.

    Raises:
        ValueError: unless there is one gradient of the same shape for each tensor, a DTensor if that is one.
    """
    outputs = tensors_in(output, "the last stage's output")
    grads = tensors_in(_in_order_of(output, given) if _has_names(given) else given, "output_grad")
    shapes = [[tuple(tensor.shape) for tensor in tensors] for tensors in (grads, outputs)]
    if shapes[0] != shapes[1]:
        raise ValueError(
            f"output_grad has the shapes {shapes[0]} for a microbatch whose outputs have {shapes[1]}: give one "
            "gradient of the same shape for each output"
        )
    for made, grad in zip(outputs, grads, strict=True):
        if is_dtensor(made) and not is_dtensor(grad):
            raise ValueError(
                "output_grad is a plain tensor, and the output a DTensor with the placements "
                f"{made.placements}: give one, as distribute_tensor makes it"  # type: ignore[attr-defined]
            )
        if is_dtensor(grad) and not is_dtensor(made):
            raise ValueError("output_grad is a DTensor, and the output a plain tensor: give its full_tensor()")
    return outputs, grads


def _has_names(tree: Any) -> bool:
    return isinstance(tree, Mapping) or (isinstance(tree, tuple | list) and any(map(_has_names, tree)))


def _in_order_of(output: Any, given: Any) -> list[Any]:
    try:
        return _for_each_tensor(output, given)
    except ValueError as error:
        raise ValueError(
            f"output_grad has another structure than the outputs of a microbatch ({error}): give each gradient under "
            "the name of its output, or a tuple of gradients in the order of the outputs"
        ) from error


def _for_each_tensor(output: Any, given: Any) -> list[Any]:
    """What is given for each tensor of the output. Dicts may be of another class, and leave out what has no tensor."""
    leaves, structure = pytree.tree_flatten(output, is_leaf=lambda value: isinstance(value, Mapping))
    found: list[Any] = []
    for leaf, own in zip(leaves, structure.flatten_up_to(given), strict=True):
        if isinstance(leaf, Mapping):
            found += _for_each_name(leaf, own)
        elif isinstance(leaf, torch.Tensor):
            found.append(own)
    return found


def _for_each_name(outputs: Mapping[Any, Any], given: Any) -> list[Any]:
    if not isinstance(given, Mapping):
        raise ValueError(f"a {type(given).__name__} for a {type(outputs).__name__}")
    named = {name: value for name, value in outputs.items() if tensor_leaves(value)}
    if missing := [name for name in named if name not in given]:
        raise ValueError(f"no {', '.join(map(repr, missing))}")
    if unknown := [name for name in given if name not in outputs]:
        raise ValueError(f"no output has the name {', '.join(map(repr, unknown))}")
    return [own for name, value in named.items() for own in _for_each_tensor(value, given[name])]


def names_of(loss_fn: Callable[..., Any] | None) -> frozenset[str]:
    """Names of the carried values that a loss function takes besides output and target.

    They are its keyword-only parameters, and further ones without a default. Others are ignored: torch's loss functions
    have a ``weight``, a name that a model may carry for another purpose.
    """
    if loss_fn is None:
        return frozenset()
    try:
        parameters = list(inspect.signature(getattr(loss_fn, "forward", loss_fn)).parameters.values())
    except (TypeError, ValueError):  # a C function without a signature
        return frozenset()
    by_position = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    needed = [p.name for p in by_position[2:] if p.kind is p.POSITIONAL_OR_KEYWORD and p.default is p.empty]
    return frozenset([*needed, *(p.name for p in parameters if p.kind is p.KEYWORD_ONLY)])


def returned_loss(output: Any) -> Any:
    """The loss in a last stage's output, which is a scalar or a dict with ``"loss"``; None if there is none."""
    value = output.get("loss") if isinstance(output, Mapping) else output
    is_loss = isinstance(value, torch.Tensor) and value.dim() == 0 and value.is_floating_point()
    return value if is_loss else None


def _check_has_no_loss(output: Any) -> None:
    """Refuse an output in which a loss may be where `returned_loss` does not look: the step would train nothing."""
    named = output.get("loss") if isinstance(output, Mapping) else None
    if named is not None or any(tensor.dim() == 0 and tensor.requires_grad for tensor in tensor_leaves(output)):
        raise ValueError(
            f"the last stage returned a {type(output).__name__} with a scalar that requires a gradient, or 'loss' that "
            "is no scalar: return a loss as a scalar, alone or as 'loss' in a dict, or give the Pipeline a loss_fn "
            "(lambda output, _: output[1] for (logits, loss)) and the step the target, too; for outputs alone call "
            "eval_step"
        )


def loss_and_metrics(returned: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """Split the result of a loss function: a loss, ``(loss, dict of metrics)``, or one dict of both.

    Raises:
        ValueError: for a dict without ``"loss"``, another tuple, or a metric that is neither tensor nor number.
    """
    if isinstance(returned, torch.Tensor):
        return returned, {}
    if isinstance(returned, Mapping):
        if "loss" not in returned:
            raise ValueError(f"loss_fn returned a dict with {sorted(map(str, returned))}: its loss goes under 'loss'")
        metrics = {name: value for name, value in returned.items() if name != "loss"}
        return returned["loss"], _checked_metrics(metrics)
    if isinstance(returned, tuple | list):
        if len(returned) != 2 or not isinstance(returned[1], Mapping):
            kinds = ", ".join(type(value).__name__ for value in returned)
            raise ValueError(
                f"loss_fn returned a {type(returned).__name__} of {kinds}: return the loss, or (loss, dict)"
            )
        return returned[0], _checked_metrics(returned[1])
    return returned, {}


def _checked_metrics(metrics: Mapping[Any, Any]) -> dict[str, torch.Tensor]:
    found = {}
    for name, value in metrics.items():
        if not isinstance(name, str):
            raise ValueError(f"loss_fn returned a metric under {name!r}: give it a name")
        if isinstance(value, torch.Tensor):
            found[name] = _on_every_rank(value).detach()
        elif isinstance(value, bool | int | float):
            found[name] = torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)
        else:
            raise ValueError(
                f"loss_fn returned the metric {name!r} as a {type(value).__name__}: give a tensor or number"
            )
    return found


def checked_loss(loss: Any) -> torch.Tensor:
    """The loss as a scalar tensor; ValueError unless it is a real tensor with one element."""
    if type(loss) is torch.Tensor and loss.dim() == 0 and loss.is_floating_point():
        return loss
    if not isinstance(loss, torch.Tensor):
        raise ValueError(
            f"loss_fn returned a {type(loss).__name__}: return one tensor with one element, the loss of the microbatch"
        )
    value = _on_every_rank(loss)
    if value.numel() != 1:
        raise ValueError(f"loss_fn returned a tensor of shape {tuple(value.shape)}: reduce it to one element")
    if value.is_complex():
        raise ValueError(
            f"loss_fn returned a complex number ({value.dtype}): make it real, for example by .abs() or .real"
        )
    return value.reshape(()) if value.dim() else value


def _on_every_rank(value: Any) -> torch.Tensor:
    """The whole value of a DTensor: a loss may be replicated, as that of `loss_parallel`, or in parts."""
    whole: torch.Tensor = value.full_tensor() if is_dtensor(value) else value
    return whole


def scale_loss(loss: torch.Tensor, divisor: float | None) -> torch.Tensor:
    """A microbatch's share of the batch's loss; the only copy of this rule.

    With weight 0 (``divisor == inf``) it is 0 even if the loss is NaN, as a mean over no tokens is.
    """
    if divisor == math.inf:
        loss = loss.masked_fill(torch.ones_like(loss, dtype=torch.bool), 0)
    return loss if divisor is None else loss / divisor


def loss_arguments(value: Any, divisor: float | None) -> Any:
    """The arguments of a loss function; with weight 0 their gradients are 0.

    The gradients of a mean over no elements are NaN, and NaN times 0 is NaN.
    """
    if divisor != math.inf:
        return value
    return pytree.tree_map_only(torch.Tensor, _without_gradient, value)


def _without_gradient(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, still in the graph, so that parameters get gradients of zeros."""
    if not tensor.requires_grad:
        return tensor
    return torch.where(torch.zeros_like(tensor, dtype=torch.bool), tensor, tensor.detach())


def sum_in_order(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Sum from first to last, as the order decides the bits; the only copy of this rule."""
    total = values[0]
    for value in values[1:]:
        total = total + value
    return total


def detached(value: Any) -> Any:
    """A tree with its tensors detached."""
    if isinstance(value, torch.Tensor):
        return value.detach()
    return pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, value)


_open: ContextVar[AddedLosses | None] = ContextVar("_open", default=None)
"""Collects the losses added in this thread."""


def add_loss(value: torch.Tensor, name: str = "added") -> None:
    """Add a loss to the result of the loss function; call it in the forward of a layer, on any stage.

    It takes part in the backward and is weighted like the loss: with ``loss_reduction="mean"`` by the microbatch's
    rows, with ``"sum"`` not. ``result.added_losses`` holds the added losses by name, on every rank; ``result.loss`` is
    the result of the loss function alone. `eval_step` only reports them. A recompute adds nothing.

    Without a pipeline, call the model within `AddedLosses`, which collects them.

    Args:
        value: a tensor with one element. If it requires no gradient, it is only reported.
        name: its name in the result. Values of one name are summed within a stage and over stages.

    Raises:
        TypeError: when ``name`` is not a str.
        ValueError: for another value, or where its graph would be lost, as in a reentrant checkpoint.
        RuntimeError: outside of a pipeline's step and of `AddedLosses`, when gradients are on.
    """
    if not isinstance(name, str):
        raise TypeError(f"add_loss: name = {name!r}: pass a str")
    losses = _open.get()
    if torch_private.graph_task() != -1 and (losses is None or torch_private.is_recomputing()):
        return  # this was added in the forward
    if losses is not None:
        losses.append(value, name)
    elif torch.is_grad_enabled():
        raise RuntimeError(
            f"add_loss({name!r}): there is no step to add it to; call the model within "
            "`with fastpipe.AddedLosses() as added:` and add added.total to the loss"
        )


def _checked(value: Any, name: str) -> torch.Tensor:
    if not isinstance(value, torch.Tensor) or value.numel() != 1 or not value.is_floating_point():
        found = (
            f"a tensor of shape {tuple(value.shape)} and {value.dtype}"
            if isinstance(value, torch.Tensor)
            else f"a {type(value).__name__}"
        )
        raise ValueError(f"add_loss({name!r}): give a floating-point tensor with one element, not {found}")
    loss = _on_every_rank(value)
    return loss.reshape(()) if loss.dim() else loss


class AddedLosses:
    """Collects the losses of `add_loss` within it, as a pipeline does for each forward.

    To run a model without a pipeline::

        with fastpipe.AddedLosses() as added:
            output = model(x)
        loss = loss_fn(output, target) + added.total

    Attributes:
        values: ``(name, value)`` in order of the calls, with their graphs.
    """

    def __init__(self) -> None:
        self.values: list[tuple[str, torch.Tensor]] = []
        self._grad = torch.is_grad_enabled()
        self._before: AddedLosses | None = None

    def __enter__(self) -> AddedLosses:
        """Start to collect, in this thread."""
        self._before = _open.get()
        _open.set(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        """Restore the previous collector."""
        _open.set(self._before)
        self._before = None

    def append(self, value: torch.Tensor, name: str) -> None:
        """Add a loss."""
        if self._grad and not torch.is_grad_enabled():
            raise ValueError(
                f"add_loss({name!r}): gradients are off here, so that its gradient would be lost; in a checkpoint use "
                "use_reentrant=False, or return the value from the checkpoint (or from no_grad) and add it outside"
            )
        self.values.append((name, _checked(value, name)))

    @property
    def total(self) -> torch.Tensor | float:
        """The sum, with its graph; 0.0 if nothing was added."""
        return sum_in_order([value for _, value in self.values]) if self.values else 0.0

    def share(self, divisor: float | None) -> torch.Tensor | None:
        """The added losses' share of the backward's root; None if none requires a gradient."""
        trained = [value for _, value in self.values if value.requires_grad]
        return scale_loss(sum_in_order(trained), divisor) if trained else None

    def detached(self) -> list[tuple[str, torch.Tensor]]:
        """``(name, value)`` with the values detached."""
        return [(name, value.detach()) for name, value in self.values]


@dataclass
class StageWork:
    """Inputs and results of a stage in one step, by microbatch.

    Attributes:
        args: positional arguments of the module; None for all but the first stage.
        divisors: divisor of each microbatch's loss before its backward; None for no scaling.
        loss_scale: factor of the backward's roots, see `fastpipe.GradScaler`; None for 1.
        output_grads: the caller's gradients of the outputs, as a tree, instead of a loss.
        root_grads: the same, by the output's tensors; known after the forward.
        keep_outputs: whether the last stage's outputs are kept.
        reduces: whether gradients are reduced over data-parallel replicas in this step.
        losses: result: the losses of the loss function, detached.
        outputs: result: the last stage's outputs, detached.
        metrics: result: metrics of the loss function.
        added: result: losses added by layers.
    """

    args: Sequence[tuple[Any, ...]] | None = None
    kwargs: Sequence[Mapping[str, Any]] | None = None
    targets: Sequence[Any] | None = None
    divisors: Sequence[float] | None = None
    loss_scale: torch.Tensor | None = None
    output_grads: Sequence[Any] | None = None
    keep_outputs: bool = True
    reduces: bool = True
    root_grads: dict[int, Tensors] = field(default_factory=dict)
    losses: dict[int, torch.Tensor] = field(default_factory=dict)
    outputs: dict[int, Any] = field(default_factory=dict)
    metrics: dict[int, list[tuple[str, torch.Tensor]]] = field(default_factory=dict)
    added: dict[int, list[tuple[str, torch.Tensor]]] = field(default_factory=dict)


LossFunction = Callable[..., Any]


class NoLoss(Exception):  # noqa: N818 - caught; the step continues without a backward
    """The last stage returned no loss, and there is neither a loss function nor an output gradient."""


class StageLosses:
    """The added losses of a stage and, on the last stage, the loss; results are stored in `work`.

    ``loss_fn(output, target)`` also gets carried values, by name.

    Attributes:
        names: the carried values that the loss function takes.
        carried: those of the running microbatch.
        added: collects the losses added in the running forward.
    """

    def __init__(self, stage: int, loss_fn: LossFunction | None) -> None:
        self.stage = stage
        self.loss_fn = loss_fn
        self.names = names_of(loss_fn)
        self.carried: dict[str, Any] = {}
        self.work = StageWork()
        self.added = AddedLosses()

    def output_grads(self, microbatch: int) -> Tensors | None:
        """The caller's output gradients of one microbatch, scaled."""
        if self.work.output_grads is None:
            return None
        grads, scale = self.work.root_grads[microbatch], self.work.loss_scale
        return grads if scale is None else tuple(grad * scale for grad in grads)

    def attached(self, microbatch: int, outputs: Tensors) -> Tensors:
        """The outputs, with the added losses attached to one of them; ValueError if none requires a gradient."""
        share = self._share_added(microbatch)
        if share is None:
            return outputs
        root = self._scaled_up(share)
        for i, output in enumerate(outputs):
            if output.requires_grad:
                entered = deliver(output, {0: root}, {0: torch.ones_like(root)})
                return *outputs[:i], entered, *outputs[i + 1 :]
        raise ValueError(
            f"add_loss: stage {self.stage} adds a loss that requires a gradient, and no output of the stage requires "
            "one, so no backward reaches it: add it in a stage whose outputs require gradients, or detach it"
        )

    def roots(self, microbatch: int, output: Any) -> Tensors:
        """The roots of the last stage's backward: the loss, or the outputs if their gradients are given.

        Raises:
            NoLoss: when there is nothing to differentiate.
        """
        work = self.work
        self.keep(microbatch, output)
        if work.output_grads is not None:
            outputs, work.root_grads[microbatch] = outputs_and_grads(output, work.output_grads[microbatch])
            return self.attached(microbatch, outputs)
        has_loss = returned_loss(output) is not None if self.loss_fn is None else work.targets is not None
        if not has_loss:
            if self.loss_fn is None and torch.is_grad_enabled():
                _check_has_no_loss(output)
                raise NoLoss("the last stage returned no loss; give loss_fn, or call eval_step")
            self._share_added(microbatch)
            return ()
        return (self.root(microbatch, output, None if work.targets is None else work.targets[microbatch]),)

    def keep(self, microbatch: int, output: Any) -> None:
        """Store the last stage's output if `StageWork.keep_outputs` is set."""
        if self.work.keep_outputs:
            self.work.outputs[microbatch] = detached(output)

    def root(self, microbatch: int, output: Any, target: Any) -> torch.Tensor:
        """The backward's root for one microbatch: its share of the batch's loss plus the added losses, scaled."""
        work, divisor = self.work, self._divisor(microbatch)
        metrics: dict[str, torch.Tensor]
        if self.loss_fn is None:
            found, metrics = returned_loss(output), {}
        else:
            carried = loss_arguments(self.carried, divisor)
            found, metrics = loss_and_metrics(self.loss_fn(loss_arguments(output, divisor), target, **carried))
        loss = checked_loss(found)
        scaled = scale_loss(loss, divisor)
        # a microbatch of weight 0 trains nothing, and its loss may be a constant, as of no tokens
        if torch.is_grad_enabled() and divisor != math.inf and not has_graph(loss):
            name = "the last stage" if self.loss_fn is None else "loss_fn"
            raise ValueError(
                f"{name} returned a loss that requires no gradient: leave out detach() and no_grad(), let a parameter "
                "require one, or call eval_step"
            )
        work.losses[microbatch] = loss.detach()
        if metrics:
            work.metrics[microbatch] = list(metrics.items())
        share = self._share_added(microbatch)
        return self._scaled_up(scaled if share is None else scaled + share)

    def _share_added(self, microbatch: int) -> torch.Tensor | None:
        """Store the added losses; returns their share of the batch's loss."""
        if not self.added.values:
            return None
        self.work.added[microbatch] = self.added.detached()
        return self.added.share(self._divisor(microbatch)) if torch.is_grad_enabled() else None

    def _scaled_up(self, root: torch.Tensor) -> torch.Tensor:
        """A backward's root times the loss scale."""
        scale = self.work.loss_scale
        return root if scale is None or not torch.is_grad_enabled() else root * scale

    def _divisor(self, microbatch: int) -> float | None:
        return None if self.work.divisors is None else self.work.divisors[microbatch]
