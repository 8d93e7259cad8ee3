"""The losses of a stage: what the loss function returned, what layers added, what the backward starts from.

A layer adds a loss (the balance of a mixture of experts, a penalty) by `add_loss` in its forward. On the last stage
the value is added to the loss; on any other one its gradient enters the graph at the stage's output, when the
gradient of that arrives, so that it takes part in the backward of its stage whether that comes in one part or two.
What a checkpoint recomputes in a backward adds nothing again; a forward that a method for pairs runs within a
backward adds as any other.

`StageWork` is what one step gives to a stage and takes from it.
"""

from __future__ import annotations

import inspect
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch

from fastpipe.runtime.common import Tensors, pytree, tensors_in, torch_private


def fitting(outputs: Tensors, grads: Tensors) -> Tensors:
    """The outputs, if the gradients that the caller gave are theirs."""
    shapes = [[tuple(tensor.shape) for tensor in tensors] for tensors in (grads, outputs)]
    if shapes[0] != shapes[1]:
        raise ValueError(
            f"output_grad has the shapes {shapes[0]} for a microbatch whose outputs have {shapes[1]}: give one "
            "gradient of the same shape for each output"
        )
    return outputs


def names_of(loss_fn: Callable[..., Any] | None) -> frozenset[str]:
    """The carried values that a loss function takes beside output and target.

    They are its keyword-only parameters, and further ones without a default. Others have to be left alone: torch's own
    loss functions have a ``weight``, which a model may well carry for another purpose.
    """
    if loss_fn is None:
        return frozenset()
    try:
        parameters = list(inspect.signature(getattr(loss_fn, "forward", loss_fn)).parameters.values())
    except (TypeError, ValueError):  # a function in C that does not say
        return frozenset()
    by_position = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    needed = [p.name for p in by_position[2:] if p.kind is p.POSITIONAL_OR_KEYWORD and p.default is p.empty]
    return frozenset([*needed, *(p.name for p in parameters if p.kind is p.KEYWORD_ONLY)])


def returned_loss(output: Any) -> Any:
    """The loss that a last stage returned, alone or in a dict; None if there is none."""
    value = output.get("loss") if isinstance(output, Mapping) else output
    is_loss = isinstance(value, torch.Tensor) and value.dim() == 0 and value.is_floating_point()
    return value if is_loss else None


def loss_and_metrics(returned: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """What a loss function returned: the loss; or the loss and its metrics, as ``(loss, dict)`` or all in one dict.

    Raises:
        ValueError: for a dict without ``"loss"``, another tuple, or a metric that is no tensor and no number.
    """
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
            found[name] = value.detach()
        elif isinstance(value, bool | int | float):
            found[name] = torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)
        else:
            raise ValueError(
                f"loss_fn returned the metric {name!r} as a {type(value).__name__}: give a tensor or number"
            )
    return found


def checked_loss(loss: Any) -> torch.Tensor:
    """The loss, if it is one.

    Raises:
        ValueError: when it is no tensor of one element.
    """
    if not isinstance(loss, torch.Tensor):
        raise ValueError(
            f"loss_fn returned a {type(loss).__name__}: return one tensor with one element, the loss of the microbatch"
        )
    if loss.numel() != 1:
        raise ValueError(f"loss_fn returned a tensor of shape {tuple(loss.shape)}: reduce it to one element")
    if loss.is_complex():
        raise ValueError(
            f"loss_fn returned a complex number ({loss.dtype}): make it a real one, by .abs() or .real say"
        )
    return loss.reshape(()) if loss.dim() else loss


def scale_loss(loss: torch.Tensor, divisor: float | None) -> torch.Tensor:
    """A microbatch's share in the loss of the batch: the only copy of that rule.

    One that weighs nothing has none, even where its loss is no number, as a mean over no tokens is.
    """
    if divisor == math.inf:
        loss = loss.masked_fill(torch.ones_like(loss, dtype=torch.bool), 0)
    return loss if divisor is None else loss / divisor


def weighed(value: Any, divisor: float | None) -> Any:
    """What a loss function gets: the tree of tensors, whose gradients are 0 where the microbatch weighs nothing.

    Those of a mean over nothing are no numbers, and times 0 they are none either.
    """
    if divisor != math.inf:
        return value
    return pytree.tree_map(lambda x: _without_gradient(x) if isinstance(x, torch.Tensor) else x, value)


def _without_gradient(tensor: torch.Tensor) -> torch.Tensor:
    """The same values; in the graph still, so that all that gets a gradient gets zeros."""
    if not tensor.requires_grad:
        return tensor
    return torch.where(torch.zeros_like(tensor, dtype=torch.bool), tensor, tensor.detach())


def sum_in_order(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """One after the other, which decides the bits: the only copy of that rule."""
    total = values[0]
    for value in values[1:]:
        total = total + value
    return total


def detached(value: Any) -> Any:
    """A tree of tensors without their graphs."""
    if isinstance(value, torch.Tensor):
        return value.detach()
    return pytree.tree_map(lambda x: x.detach() if isinstance(x, torch.Tensor) else x, value)


class _Open(threading.local):
    """What collects the losses that are added in this thread."""

    losses: AddedLosses | None = None


_open = _Open()


def add_loss(value: torch.Tensor, name: str = "added") -> None:
    """Add a loss to that of the loss function; called in the forward of a layer, of any stage.

    It takes part in the backward and weighs like the loss: with ``loss_reduction="mean"`` a microbatch counts by its
    rows, with ``"sum"`` not. ``result.added_losses`` has what was added, by name, on every rank; ``result.loss`` is
    that of the loss function alone. In `eval_step` it is reported only. What is recomputed adds nothing again.

    Without a pipeline, call the model within `AddedLosses`, which collects them.

    Args:
        value: a tensor with one element. One that requires no gradient is reported only.
        name: what it is called in the result; values of one name are summed, within a stage and over the stages.

    Raises:
        ValueError: for what is no such tensor, or where its graph would be lost: inside a reentrant checkpoint.
        RuntimeError: outside of a pipeline's step and of `AddedLosses`, when gradients are on.
    """
    if not isinstance(name, str):
        raise TypeError(f"add_loss: name = {name!r}: give a text")
    losses = _open.losses
    if torch_private.graph_task() != -1 and (losses is None or torch_private.is_recomputing()):
        return  # this was added in the forward
    if losses is not None:
        losses.append(_checked(value, name), name)
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
    return value.reshape(()) if value.dim() else value


class AddedLosses:
    """Collects what is given to `add_loss` within it, as a pipeline does for each forward.

    For a model that runs without a pipeline::

        with fastpipe.AddedLosses() as added:
            output = model(x)
        loss = loss_fn(output, target) + added.total

    Attributes:
        values: ``(name, value)`` in the order of the calls, with their graphs.
    """

    def __init__(self) -> None:
        self.values: list[tuple[str, torch.Tensor]] = []
        self._grad = torch.is_grad_enabled()
        self._before: AddedLosses | None = None

    def __enter__(self) -> AddedLosses:
        """Collect, in this thread."""
        self._before, _open.losses = _open.losses, self
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        """Leave what is added from now on to whoever collected before."""
        _open.losses, self._before = self._before, None

    def append(self, value: torch.Tensor, name: str) -> None:
        """One more."""
        if self._grad and not torch.is_grad_enabled():
            raise ValueError(
                f"add_loss({name!r}): gradients are off here, so that its gradient would be lost; in a checkpoint use "
                "use_reentrant=False, or hand the value out of the checkpoint (or of no_grad) and add it outside"
            )
        self.values.append((name, value))

    @property
    def total(self) -> torch.Tensor | float:
        """The sum of all, with its graph; 0.0 where nothing was added."""
        return sum_in_order([value for _, value in self.values]) if self.values else 0.0

    def share(self, divisor: float | None) -> torch.Tensor | None:
        """What a backward starts from beside the loss; None where nothing of it requires a gradient."""
        trained = [value for _, value in self.values if value.requires_grad]
        return scale_loss(sum_in_order(trained), divisor) if trained else None

    def detached(self) -> list[tuple[str, torch.Tensor]]:
        """The values without their graphs."""
        return [(name, value.detach()) for name, value in self.values]


class AddedLoss(torch.autograd.Function):
    """The tensor as it is; in the backward the loss gets its gradient of 1 when that of the tensor comes."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        """Not a view, which could not be changed in place."""
        ctx.one = torch.ones_like(loss)
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Both gradients."""
        return grads[0], ctx.one


def attached(outputs: Tensors, share: torch.Tensor | None, stage: int) -> Tensors:
    """A stage's outputs, one of which brings the added loss into the backward.

    Raises:
        ValueError: when no output requires a gradient, so that no backward would reach it.
    """
    if share is None:
        return outputs
    for i, output in enumerate(outputs):
        if output.requires_grad:
            entered: torch.Tensor = AddedLoss.apply(output, share)  # type: ignore[no-untyped-call]
            return *outputs[:i], entered, *outputs[i + 1 :]
    raise ValueError(
        f"add_loss: stage {stage} adds a loss that requires a gradient and hands on no tensor that requires one, so no "
        "backward comes to it: add it in a stage whose outputs require gradients, or detach it"
    )


@dataclass
class StageWork:
    """What one step gives to a stage and takes from it, by microbatch.

    Attributes:
        args: positional arguments of the module; None for a stage that is fed by another.
        kwargs: keyword arguments of the module.
        targets: the loss function's second argument.
        divisors: what each microbatch's loss is divided by before its backward; None for no scaling.
        loss_scale: what a backward's roots are multiplied by, see `fastpipe.GradScaler`; None for 1.
        output_grads: gradients of the outputs, given by the caller instead of a loss.
        keep_outputs: whether the last stage's outputs are kept.
        reduces: whether gradients are reduced over the replicas of the pipeline in this step.
        losses: out: the loss of each microbatch as the loss function returned it, detached.
        scaled: out: the same after the division.
        outputs: out: the last stage's outputs, detached.
        metrics: out: what the loss function returned beside the loss.
        added: out: the losses that the stage added.
    """

    args: Sequence[tuple[Any, ...]] | None = None
    kwargs: Sequence[Mapping[str, Any]] | None = None
    targets: Sequence[Any] | None = None
    divisors: Sequence[float] | None = None
    loss_scale: torch.Tensor | None = None
    output_grads: Sequence[Tensors] | None = None
    keep_outputs: bool = True
    reduces: bool = True
    losses: dict[int, torch.Tensor] = field(default_factory=dict)
    scaled: dict[int, torch.Tensor] = field(default_factory=dict)
    outputs: dict[int, Any] = field(default_factory=dict)
    metrics: dict[int, list[tuple[str, torch.Tensor]]] = field(default_factory=dict)
    added: dict[int, list[tuple[str, torch.Tensor]]] = field(default_factory=dict)


LossFunction = Callable[..., Any]


class NoLoss(Exception):  # noqa: N818 - it is caught, and the step goes on without a backward
    """The last stage returned no loss, and neither a loss function nor an output gradient was given."""


class StageLosses:
    """What a stage adds to the loss and, if it is the last one, the loss itself; everything found is noted in the work.

    Args:
        stage: its index.
        is_last: whether it is the last one.
        loss_fn: ``loss_fn(output, target)`` on the last stage, and what is carried to it by name.

    Attributes:
        names: the carried values that the loss function takes.
        carried: those of the microbatch whose forward runs.
        work: of the step that runs.
        added: collects what the layers add in the forward that runs.
    """

    def __init__(self, stage: int, is_last: bool, loss_fn: LossFunction | None) -> None:
        self.stage = stage
        self.is_last = is_last
        self.loss_fn = loss_fn
        self.names = names_of(loss_fn) if is_last else frozenset()
        self.carried: dict[str, Any] = {}
        self.work = StageWork()
        self.added = AddedLosses()

    @property
    def wanted(self) -> bool:
        """Whether the loss function is called here in this step."""
        work = self.work
        return self.is_last and self.loss_fn is not None and work.targets is not None and work.output_grads is None

    @property
    def has_output_grads(self) -> bool:
        """Whether the caller gave the gradients of the outputs instead of a loss."""
        return self.work.output_grads is not None

    def output_grads(self, microbatch: int) -> Tensors | None:
        """The caller's gradients of one microbatch's outputs."""
        grads = self.work.output_grads
        scale = self.work.loss_scale
        if grads is None or scale is None:
            return None if grads is None else grads[microbatch]
        return tuple(grad * scale for grad in grads[microbatch])

    def attached(self, microbatch: int, outputs: Tensors) -> Tensors:
        """The outputs, one of which brings what was added into the backward."""
        return attached(outputs, self._scaled_up(self._share_added(microbatch)), self.stage)

    def roots(self, microbatch: int, output: Any) -> Tensors:
        """What the last stage's backward starts from: the loss, or the outputs whose gradients the caller gave.

        Raises:
            NoLoss: where there is nothing to differentiate.
        """
        work = self.work
        self.keep(microbatch, output)
        if work.output_grads is not None:
            outputs = fitting(tensors_in(output, "the last stage's output"), work.output_grads[microbatch])
            return self.attached(microbatch, outputs)
        if self.loss_fn is None and not isinstance(returned_loss(output), torch.Tensor):
            if torch.is_grad_enabled():
                raise NoLoss
            self._share_added(microbatch)
            return ()
        if self.loss_fn is not None and work.targets is None:
            self._share_added(microbatch)
            return ()
        return (self.root(microbatch, output, None if work.targets is None else work.targets[microbatch]),)

    def keep(self, microbatch: int, output: Any) -> None:
        """Note the last stage's output, where it is wanted."""
        if self.work.keep_outputs:
            self.work.outputs[microbatch] = detached(output)

    def root(self, microbatch: int, output: Any, target: Any) -> torch.Tensor:
        """The loss of one microbatch: its share in that of the batch, and what was added, both scaled."""
        work, divisor = self.work, self._divisor(microbatch)
        found, metrics = (
            (returned_loss(output), {}) if self.loss_fn is None else self._call_loss_fn(output, target, divisor)
        )
        loss = checked_loss(found)
        scaled = scale_loss(loss, divisor)
        if torch.is_grad_enabled() and not scaled.requires_grad:
            whose = "the last stage" if self.loss_fn is None else "loss_fn"
            raise ValueError(
                f"{whose} returned a loss that requires no gradient: leave out detach() and no_grad(), let a parameter "
                "require one, or call eval_step"
            )
        work.losses[microbatch] = loss.detach()
        work.scaled[microbatch] = scaled.detach()
        if metrics:
            work.metrics[microbatch] = list(metrics.items())
        share = self._share_added(microbatch)
        root = self._scaled_up(scaled if share is None else scaled + share)
        assert root is not None
        return root

    def _call_loss_fn(self, output: Any, target: Any, divisor: float | None) -> tuple[Any, dict[str, torch.Tensor]]:
        assert self.loss_fn is not None
        return loss_and_metrics(self.loss_fn(weighed(output, divisor), target, **weighed(self.carried, divisor)))

    def _share_added(self, microbatch: int) -> torch.Tensor | None:
        """The share of the losses that this stage added in that of the batch, which are noted."""
        if not self.added.values:
            return None
        self.work.added[microbatch] = self.added.detached()
        return self.added.share(self._divisor(microbatch)) if torch.is_grad_enabled() else None

    def _scaled_up(self, root: torch.Tensor | None) -> torch.Tensor | None:
        """What a backward starts from, times the scale of the losses."""
        scale = self.work.loss_scale
        return root if scale is None or root is None or not torch.is_grad_enabled() else root * scale

    def _divisor(self, microbatch: int) -> float | None:
        return None if self.work.divisors is None else self.work.divisors[microbatch]
