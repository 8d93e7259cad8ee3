"""Stage: one slice of the model on one rank; forward and backward of one microbatch.

``run`` is the module call and, on the last stage, the loss: the only Python that either executor needs. The rest is
autograd, which the native executor does in C++ and the Python executor through the methods and records here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fastpipe.program import Op
from fastpipe.runtime.common import Tensors, torch_private
from fastpipe.runtime.data_parallel import find_data_parallel, unwrapped
from fastpipe.runtime.model import NONE, Chain, accepted_names, apart, carried_on, chosen, recomputing, together
from fastpipe.runtime.stage.boundary import TreespecCache, from_tensors, plan_tensor, plan_text, to_tensors
from fastpipe.runtime.stage.context import ActionContext, ContextFactory
from fastpipe.runtime.stage.losses import AddedLosses, LossFunction, StageLosses, StageWork
from fastpipe.runtime.stage.pairs import fuse, method_of
from fastpipe.runtime.stage.weight_grad import SplitReport, WeightGradients, make_weight_gradients

if TYPE_CHECKING:
    from fastpipe.runtime.stage.random_numbers import RandomNumbers


class _Entry(torch.autograd.Function):
    """Where a received tensor enters a stage's graph: catches the gradient as autograd made it.

    The gradient of a leaf would be laid out like the leaf, and with it what the previous stage computes.
    """

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, caught: dict[int, torch.Tensor], index: int) -> torch.Tensor:
        ctx.caught, ctx.index = caught, index
        # not a view: a stage may change its input in place
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[None, None, None]:
        ctx.caught[ctx.index] = grads[0]
        return None, None, None


def enter(tensor: torch.Tensor, caught: dict[int, torch.Tensor], index: int) -> torch.Tensor:
    """A received tensor as the stage sees it; its gradient goes to ``caught[index]``."""
    entered: torch.Tensor = _Entry.apply(tensor, caught, index)  # type: ignore[no-untyped-call]
    return entered


@dataclass
class Record:
    """What a forward leaves for its backward."""

    inputs: Tensors
    outputs: Tensors
    caught: dict[int, torch.Tensor]
    weights: WeightGradients | None

    def input_grads(self) -> Tensors:
        """After the backward: the gradients of the inputs that require one."""
        needing = [(i, t) for i, t in enumerate(self.inputs) if t.requires_grad]
        return tuple(self.caught[i] if i in self.caught else torch.zeros_like(t) for i, t in needing)


_NOTHING = contextlib.nullcontext()


class Stage:
    """One slice of the model.

    Args:
        index: its place in the model.
        module: the slice.
        num_stages: how many slices there are.
        loss_fn: ``loss_fn(output, target)`` on the last stage.
        recompute: what it does not keep for the backward; see `fastpipe.runtime.model.chain`.
        contexts: what the user puts around every F, and around every B, I and W.

    Attributes:
        accepts: the keyword arguments that the module's forward takes; None for any.
        later: those that later stages take; None for any.
        context: what is current in its actions.
        running: the microbatch whose forward has begun and not ended, if any.
        deferred: ``_cdata`` of the parameters whose gradients are computed in W; empty before the first I.
        has_split: whether an I has run, so that `deferred` is known.
        peak_held_bytes: the most memory that waited for W at any time.
        random: what is done about random numbers in this step; None where there is nothing to do.
        losses: what it adds to the loss and, on the last stage, the loss.
        parallel: what the stage does with its replicas; None where its module is not wrapped.
        modules: the layers of a chain, or the one module.
        fuses: whether it brings a method for fused pairs; see `fastpipe.runtime.stage.pairs`.
        plans: of the trees that it hands on and is given, on a device with streams; None elsewhere.
        why_one_tensor: why it may hand on no more than one tensor; empty where it may.
        bare: whether it was to have replicas, and had no parameters to wrap.
        grad_dtype: what its gradients are, where that is not its parameters' dtype; None otherwise.
    """

    def __init__(
        self,
        index: int,
        module: nn.Module,
        num_stages: int,
        loss_fn: LossFunction | None = None,
        recompute: str = NONE,
        contexts: tuple[ContextFactory | None, ContextFactory | None] = (None, None),
    ) -> None:
        self.index = index
        self.module = module
        self.is_first = index == 0
        self.is_last = index == num_stages - 1
        self.losses = StageLosses(index, self.is_last, loss_fn)
        self.parallel = find_data_parallel(module, index)
        self.accepts = accepted_names(unwrapped(module))
        self.plans: TreespecCache | None = None
        self.why_one_tensor = ""
        self.bare = False
        self.grad_dtype: torch.dtype | None = None
        self.fused_weight_grad = False
        self.context = ActionContext(index, *contexts)
        self.later: frozenset[str] | None = None
        self.running: int | None = None
        self.random: RandomNumbers | None = None
        self.modules = list(module.children()) if isinstance(module, Chain) else [module]
        self.recompute = recompute
        self.fuses = method_of(self.modules) is not None and self.parallel is None and recompute == NONE
        wrapper = None if self.parallel is None else self.parallel.description
        self._module_call = recomputing(module, unwrapped(module), recompute, index, wrapper)
        self.deferred: frozenset[int] = frozenset()
        self.has_split = False
        self.peak_held_bytes = 0
        self._looks: tuple[bool, ...] | None = None
        self._records: dict[int, Record] = {}
        self._survey = SplitReport()
        self._waiting: dict[int, tuple[WeightGradients, int]] = {}

    @property
    def work(self) -> StageWork:
        """Of the step that runs."""
        return self.losses.work

    def begin(self, work: StageWork) -> None:
        """Take the work of a new step."""
        self.end()
        self.losses.work = work
        self.running = None

    def run(self, microbatch: int, inputs: Tensors) -> Tensors:
        """Call the module; on the last stage also the loss.

        Args:
            microbatch: which one.
            inputs: what the previous stage handed on; not looked at by the first stage.

        Returns:
            The tensors for the next stage; on the last stage the loss, scaled, or the outputs when their gradients
            are given or nothing is to be differentiated.
        """
        # stays set when something is raised, so that of two overlapped actions it is known which one failed
        self.running = microbatch
        with self._rng(microbatch), self.context.around_forward():
            outputs = self._call(microbatch, inputs)
        if self.random is not None:
            self.random.note_graph(outputs)
        self.running = None
        return outputs

    def _rng(self, microbatch: int) -> AbstractContextManager[None]:
        """Around a forward: what is to be done about random numbers."""
        if self.random is None or not self.random.guards_forward:
            return _NOTHING
        return self.random.forward(self.index, microbatch)

    def _call(self, microbatch: int, inputs: Tensors) -> Tensors:
        args, carried = self.received(microbatch, inputs)
        kwargs = self._kwargs_of(microbatch, carried)
        self.losses.carried = chosen(carried, self.losses.names)
        try:
            with AddedLosses() as self.losses.added:
                output = self._module_call(*args, **kwargs) if kwargs else self._module_call(*args)
        except RuntimeError as error:
            reason = self._dtype_reason(args)
            if reason is None:
                raise
            raise ValueError(reason) from error
        if self.is_last:
            return self._finish(microbatch, output)
        outputs = self._hand_on(microbatch, output, carried)
        if self.fuses:
            self._looks = tuple(tensor.requires_grad for tensor in outputs)
        return outputs

    def _hand_on(self, microbatch: int, output: Any, carried: Mapping[str, Any]) -> Tensors:
        """The tensors for the next stage: the output, what is carried to later ones, and what was added to the loss.

        Raises:
            ValueError: for several tensors where each is a message of its own, and the next would hold up its rank.
        """
        value, values = apart(output)
        if values or carried:
            carried = carried_on(carried, values, self.index, self.accepts, self.later)
        make = plan_tensor if self.plans is None else partial(self.plans.make, microbatch)
        tensors = to_tensors(value, carried, self.index, make)
        if self.why_one_tensor and len(tensors) > 1:
            raise ValueError(
                f"stage {self.index} hands on {len(tensors)} tensors, and with more than one ranks can wait for each "
                f"other for ever: {self.why_one_tensor}; or hand on one tensor and nothing else"
            )
        return self.losses.attached(microbatch, tensors)

    def received(self, microbatch: int, inputs: Tensors) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """The positional arguments of the module, and what earlier stages carry."""
        if self.work.args is not None:
            return self.work.args[microbatch], {}
        return from_tensors(inputs, plan_text if self.plans is None else partial(self.plans.read, microbatch))

    def _kwargs_of(self, microbatch: int, carried: Mapping[str, Any]) -> Mapping[str, Any]:
        """The keyword arguments of the module: of the step, and of what is carried those that it names."""
        given = {} if self.work.kwargs is None else self.work.kwargs[microbatch]
        return given if not carried else together(given, chosen(carried, self.accepts), self.index)

    @property
    def takes(self) -> frozenset[str] | None:
        """What it takes of what earlier layers carry, for its layers or for the loss; None for any."""
        return None if self.accepts is None else self.accepts | self.losses.names

    def fuses_with(self, pair: Stage) -> bool:
        """Whether F of this stage and B of another one are left to the modules' own method in this step."""
        return self.fuses and type(self.modules[0]) is type(pair.modules[0]) and pair.fuses and self.work.kwargs is None

    def run_fused(
        self, microbatch: int, inputs: Tensors, pair: Stage, roots: Tensors, grads: Sequence[torch.Tensor] | None
    ) -> Tensors:
        """As `run`, with the backward of another microbatch; see `fastpipe.runtime.stage.pairs.fuse`."""
        self.running = microbatch
        with self._rng(microbatch), self.context.around_forward(), AddedLosses() as self.losses.added:
            output, loss = fuse(self, microbatch, inputs, pair, roots, grads)
        if not self.is_last:
            outputs = self._hand_on(microbatch, output, {})
        elif loss is None:
            outputs = self._finish(microbatch, output)
        else:
            self.losses.keep(microbatch, output)
            outputs = (loss,)
        if self.random is not None:
            self.random.note_fused()
        self.running = None
        return outputs

    def check_outputs(self, outputs: Sequence[torch.Tensor], who: str) -> None:
        """Refuse outputs of the modules' own method that are not like those of the forward."""
        found = tuple(tensor.requires_grad for tensor in outputs)
        if not self.is_last and self._looks is not None and len(found) != len(self._looks):
            raise ValueError(
                f"{who} {len(found)} outputs, and the forward of the stage {len(self._looks)}: return as many"
            )
        expected = self._looks or (any(p.requires_grad for p in self.module.parameters()),)
        if any(expected) and not any(found):
            raise ValueError(f"{who} outputs without a graph: leave out detach() and no_grad()")

    def _dtype_reason(self, args: Sequence[Any]) -> str | None:
        """What is wrong when a dtype does not fit the stage; None when it does."""
        parameters = list(self.module.parameters())
        if not parameters or torch.is_autocast_enabled(parameters[0].device.type):
            return None
        own = {p.dtype for p in parameters if p.is_floating_point()}
        found = {a.dtype for a in args if isinstance(a, torch.Tensor) and a.is_floating_point()}
        if not own or not found or found & own:
            return None
        names = " and ".join(str(dtype) for dtype in sorted(found, key=str))
        owns = " and ".join(str(dtype) for dtype in sorted(own, key=str))
        return (
            f"stages: stage {self.index} has parameters of {owns} and was given {names}; convert the stage "
            f"(module.to({names})) or what comes before it"
        )

    def _finish(self, microbatch: int, output: Any) -> Tensors:
        output, values = apart(output)
        carried_on({}, values, self.index, self.takes, self.later)
        self.losses.carried |= chosen(values, self.losses.names)
        return self.losses.roots(microbatch, output)

    def forward(self, microbatch: int, inputs: Tensors, *, splits: bool = False) -> Tensors:
        """Run one microbatch, and keep what its backward needs unless gradients are off.

        Args:
            microbatch: which one.
            inputs: what the previous stage handed on.
            splits: whether its backward will come in two parts.
        """
        with self.context.noted(Op.F, microbatch):
            return self._forward(microbatch, inputs, splits)

    def may_run_beside(self, pair: Stage) -> bool:
        """Whether F of this stage and B of another one may run at the same time."""
        if self.parallel is not None or pair.parallel is not None:
            return False  # replicas meet in the order of the actions
        if self.random is None:
            return True
        guard = self.random.guard
        # what is recomputed writes buffers again, BatchNorm's say, and an F of the same stage does so, too
        return not guard.exclusive and not (guard.recomputes and self is pair)

    def forward_backward(
        self,
        microbatch: int,
        inputs: Tensors,
        pair: Stage,
        pair_microbatch: int,
        grads: Tensors,
        *,
        splits: bool = False,
    ) -> tuple[Tensors, Tensors] | None:
        """F of one microbatch and B of another stage's by the modules' own method.

        Returns:
            What `forward` and what `backward` return; None where there is nothing for the method to go backward from.
        """
        record = pair._records[pair_microbatch]
        roots = tuple(output for output in record.outputs if output.requires_grad)
        if not roots:
            return None
        root_grads = pair._root_grads(pair_microbatch, record.outputs, grads)

        def run(microbatch: int, entered: Tensors) -> Tensors:
            return self.run_fused(microbatch, entered, pair, roots, root_grads)

        with self.context.noted(Op.F, microbatch):
            outputs = self._forward(microbatch, inputs, splits, run)
        del pair._records[pair_microbatch]
        return outputs, record.input_grads()

    def _forward(
        self, microbatch: int, inputs: Tensors, splits: bool, run: Callable[[int, Tensors], Tensors] | None = None
    ) -> Tensors:
        if not torch.is_grad_enabled():
            return (run or self.run)(microbatch, inputs)
        caught: dict[int, torch.Tensor] = {}
        entered = tuple(enter(t, caught, i) if t.requires_grad else t for i, t in enumerate(inputs))
        weights = make_weight_gradients(self._survey, self.fused_weight_grad) if splits else None
        if weights is None:
            outputs = (run or self.run)(microbatch, entered)
        else:
            try:
                with weights.armed(backward=False, fused=run is not None):
                    outputs = (run or self.run)(microbatch, entered)
                weights.split([t for t in outputs if t.requires_grad], [t for t in entered if t.requires_grad])
            except BaseException:  # raised again: until it is split, the graph and what is noted of it hold each other
                weights.clear()
                raise
        self._records[microbatch] = Record(inputs, outputs, caught, weights)
        return outputs

    def backward(self, microbatch: int, grads: Tensors) -> Tensors:
        """Full backward of one microbatch: adds to the parameters' ``.grad``.

        Args:
            microbatch: which one.
            grads: the gradients of the outputs that require one; not looked at by the last stage.

        Returns:
            The gradients of the inputs that require one.
        """
        with self.context.noted(Op.B, microbatch), self.context.around_backward():
            return self._differentiate(microbatch, grads)

    def _differentiate(self, microbatch: int, grads: Tensors) -> Tensors:
        with contextlib.nullcontext() if self.random is None else self.random.guard.backward():
            return self._backward(microbatch, grads)

    def _backward(self, microbatch: int, grads: Tensors) -> Tensors:
        record = self._records.pop(microbatch)
        roots = [output for output in record.outputs if output.requires_grad]
        if roots:
            torch.autograd.backward(roots, self._root_grads(microbatch, record.outputs, grads))
        return record.input_grads()

    def _root_grads(self, microbatch: int, outputs: Tensors, grads: Tensors) -> Sequence[torch.Tensor] | None:
        if not self.is_last:
            return grads
        given = self.losses.output_grads(microbatch)
        if given is None:
            return None
        return [grad for grad, output in zip(given, outputs, strict=True) if output.requires_grad]

    def backward_input(self, microbatch: int, grads: Tensors) -> Tensors:
        """All of the backward but what linears can leave for `backward_weight`."""
        weights = self._records[microbatch].weights
        assert weights is not None, "its forward was not told that the backward is split"
        # what is recomputed now are linears, too
        with self.context.noted(Op.I, microbatch), self.context.around_backward(), weights.armed(backward=True):
            found = self._differentiate(microbatch, grads)
        self.deferred = self.deferred or frozenset(weights.leaves())
        self.has_split = True
        self._waiting[microbatch] = weights, weights.held_bytes()
        self.peak_held_bytes = max(self.peak_held_bytes, sum(held for _, held in self._waiting.values()))
        return found

    def backward_weight(self, microbatch: int) -> None:
        """Backward for the weights that were left."""
        weights, _ = self._waiting.pop(microbatch)
        region = contextlib.nullcontext() if self.random is None else self.random.guard.backward(whole=False)
        # a weight may come from a checkpoint, whose recompute must be what its forward was
        armed = weights.armed(backward=True)
        with self.context.noted(Op.W, microbatch), self.context.around_backward(), region, armed:
            weights.compute()
        if self.parallel is not None and self.parallel.folds:
            self.parallel.fold()

    def meet(self, op: int, failed: bool) -> None:
        """UNSHARD, RESHARD or REDUCE_GRAD, or the last B or W before that; nothing where the stage has no replicas.

        Args:
            op: which.
            failed: the step failed on this rank: the replicas are met all the same, as they wait.
        """
        if self.parallel is None:
            return
        if op == Op.UNSHARD:
            self.parallel.unshard(failed)
        elif op == Op.RESHARD:
            self.parallel.reshard()
        elif op == Op.REDUCE_GRAD:
            self.parallel.reduce_grad(failed)
        elif op == Op.B:
            self.parallel.last_backward(lambda _: True)
        elif self.has_split:  # else it is not known yet which gradients come in W
            self.parallel.last_backward(self.waits)

    def waits(self, parameter: nn.Parameter) -> bool:
        """Whether the gradient of a parameter is computed in W."""
        leaf = parameter if self.parallel is None else self.parallel.leaf(parameter)
        return torch_private.address_of(leaf) in self.deferred

    def shaped(self, signature: int, announce: bool) -> None:
        """What the step's shapes are called, and whether they are new.

        Then something else may have changed, too, which weights are frozen say: what was found out of the graph is
        forgotten.
        """
        if announce:
            self._survey = SplitReport()
        if self.plans is not None:
            self.plans.begin(signature, announce)

    def end(self) -> None:
        """Let go of all that a step left behind, the batch too."""
        self.losses.work, self.losses.carried = StageWork(), {}
        for weights in [r.weights for r in self._records.values()] + [found for found, _ in self._waiting.values()]:
            if weights is not None:
                weights.clear()
        self._records.clear()
        self._waiting.clear()
