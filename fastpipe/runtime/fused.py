"""Fused pairs by the modules' own hand: DualPipe's contract.

Where a forward and a backward are to overlap, and both stages are modules of one type that has a class method
``overlapped_forward_backward``, the pair is left to it, exactly as DualPipe (https://github.com/deepseek-ai/DualPipe)
calls it, so a module written for that runs unchanged::

    outputs0, loss0 = type(module0).overlapped_forward_backward(
        module0, inputs0, criterion0, labels0, module1, loss1, outputs1, output_grads1
    )

The forward is of `module0`: lists of inputs and of labels, and on the last stage a criterion, elsewhere None and no
labels. The backward is of `module1`: on the last stage that of `loss1`, and both lists are empty; elsewhere `loss1` is
None, and they are tuples, as DualPipe has them: its outputs and their gradients. ``criterion0(*outputs0, *labels0)`` is
the loss function; it returns the microbatch's share of the loss, which the method returns as `loss0`, and which comes
back as `loss1`. The gradients of `inputs0` have to come through autograd. A chain of several layers is no one module,
and keyword arguments have no place in the contract: such pairs are run as others are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fastpipe.runtime.tensors import Tensors

if TYPE_CHECKING:
    from fastpipe.runtime.stage import Stage

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
    # the method may detach the loss in place, as DualPipe's example does, which no view can be
    loss = None if grads is not None else roots[0].clone() if roots[0]._is_view() else roots[0]
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
