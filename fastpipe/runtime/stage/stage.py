"""Stage: one slice of the model on one rank; forward and backward of one microbatch.

``run`` calls the module and, on the last stage, the loss: the only Python code that both executors need. The rest is
autograd, which the native executor runs in C++, and the Python executor by the methods and records here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from fastpipe.program import Op
from fastpipe.runtime import native
from fastpipe.runtime.common import Tensors, has_graph, torch_private
from fastpipe.runtime.data_parallel import find_data_parallel, unwrapped
from fastpipe.runtime.model import (
    NONE,
    Chain,
    accepted_names,
    merged_kwargs,
    needed_names,
    passed_on,
    selected,
    split_carried,
    with_recompute,
)
from fastpipe.runtime.stage.boundary import (
    HeldTensors,
    ReceivedTensors,
    TreespecCache,
    enter,
    from_tensors,
    to_tensors,
    treespec_tensor,
    treespec_text,
)
from fastpipe.runtime.stage.context import ActionContext, ContextFactory
from fastpipe.runtime.stage.losses import AddedLosses, LossFunction, StageLosses, StageWork
from fastpipe.runtime.stage.pairs import METHOD, OtherHalfError, fuse, method_of, num_calls, one_or_all
from fastpipe.runtime.stage.random_numbers import RandomNumbers

logger = logging.getLogger("fastpipe")


@dataclass
class Record:
    """State that a forward keeps for its backward.

    Attributes:
        weights: takes the weight gradients of a split backward from F to W (``csrc/torch/weight_grad.h``); None if I,
            or B, computes all.
    """

    inputs: Tensors
    outputs: Tensors
    caught: dict[int, torch.Tensor]
    weights: Any


_NOTHING = nullcontext()


class Stage:
    """One slice of the model.

    Args:
        loss_fn: ``loss_fn(output, target)`` on the last stage.
        recompute: what is recomputed in the backward; see `fastpipe.runtime.model.chain`.
        contexts: the user's contexts for F, and for B, I and W.
        fused_weight_grad: whether W adds to gradients in one kernel.
        grad_dtype: dtype of its gradients, if it differs from that of its parameters; None otherwise.
        treespecs: treespecs that it sends and receives, on a device with streams; None elsewhere.
        why_one_tensor: why it may return only one tensor; empty if it may return more.
        wrapped: whether stages with parameters are wrapped for data parallelism.
        held: what its rank holds for several stages; None where no rank has several of a route.

    Attributes:
        bare: whether it is not wrapped only because it has no parameters.
        accepts: keyword arguments that the module's forward takes; None for any.
        needs: the positional arguments that its first layer requires.
        later: those that later stages take; None for any.
        running: microbatch whose forward has begun and not ended; None if there is none.
        deferred: ``_cdata`` of the parameters whose gradients are computed in W, by the first step with an I; None
            before it, and without the extension.
        knows_deferred: whether a step before this one has found ``deferred``.
        reaches_inputs: whether a backward has found a gradient of an input; None if no input required one.
        exchanges: whether a forward of an earlier step has called `fastpipe.all_to_all`.
        random: guards random numbers in this step; None if not needed.
        losses: its added losses and, on the last stage, the loss.
        parallel: data parallelism of the stage; None if its module is not wrapped.
        modules: the layers of a chain, or the one module.
        fuses: whether it has a method for fused pairs; see `fastpipe.runtime.stage.pairs`.
        recorder: for an audit, calls the function that it is given with a microbatch and its inputs; else None.
    """

    def __init__(
        self,
        index: int,
        module: nn.Module,
        num_stages: int,
        loss_fn: LossFunction | None = None,
        recompute: str = NONE,
        contexts: tuple[ContextFactory | None, ContextFactory | None] = (None, None),
        *,
        fused_weight_grad: bool = False,
        grad_dtype: torch.dtype | None = None,
        mesh: Any = None,
        treespecs: TreespecCache | None = None,
        why_one_tensor: str = "",
        wrapped: bool = False,
        held: HeldTensors | None = None,
    ) -> None:
        self.index = index
        self.module = module
        self.is_first = index == 0
        self.is_last = index == num_stages - 1
        self.losses = StageLosses(index, loss_fn if self.is_last else None)
        self.parallel = find_data_parallel(module, index)
        self.accepts = accepted_names(unwrapped(module))
        self.needs = needed_names(unwrapped(module))
        self.fused_weight_grad = fused_weight_grad
        self.grad_dtype = grad_dtype
        self.mesh = mesh
        self.treespecs = treespecs
        self.why_one_tensor = why_one_tensor
        self.bare = wrapped and self.parallel is None
        self.held = held
        self._received_tensors: ReceivedTensors | None = None
        self.recorder: Callable[[int, Tensors, Callable[[int, Tensors], Tensors]], Tensors] | None = None
        self.context = ActionContext(index, *contexts)
        self.later: frozenset[str] | None = None
        self.running: int | None = None
        self.exchanges = self._has_exchanged = False
        self.random: RandomNumbers | None = None
        self.modules = list(module.children()) if isinstance(module, Chain) else [module]
        self.recompute = recompute
        self.fuses = method_of(self.modules) is not None and self.parallel is None and recompute == NONE
        wrapper = None if self.parallel is None else self.parallel.description
        self._module_call = with_recompute(module, unwrapped(module), recompute, index, wrapper)
        self.deferred: frozenset[int] | None = None
        self.knows_deferred = False
        self.reaches_inputs: bool | None = None
        self.peak_held_bytes = 0
        self._grad_flags: tuple[bool, ...] | None = None
        self._records: dict[int, Record] = {}
        self._waiting: dict[int, tuple[Any, int]] = {}

    @property
    def work(self) -> StageWork:
        """Work of the running step."""
        return self.losses.work

    def begin(self, work: StageWork, random: RandomNumbers | None = None) -> None:
        """Begin a step with this work; ``random`` guards its random numbers."""
        self.end()
        self.losses.work, self.random = work, random
        self.running = None
        self.exchanges = self._has_exchanged
        self.knows_deferred = bool(self.deferred)

    def run(self, microbatch: int, inputs: Tensors) -> Tensors:
        """Call the module; on the last stage also the loss.

        The inputs are the tensors of the previous stage; ignored on the first stage.

        Returns:
            The tensors for the next stage. On the last stage the scaled loss, or the outputs if their gradients are
            given or there is nothing to differentiate.
        """
        # stays set after an exception: of two overlapped actions it shows which one failed
        self.running = microbatch
        before = num_calls()
        try:
            with self._rng(microbatch), self.context.around_forward():
                if self.recorder is None:
                    outputs = self._call(microbatch, inputs)
                else:
                    outputs = self.recorder(microbatch, inputs, self._call)
        except OtherHalfError:
            self.running = None
            raise
        self._has_exchanged |= num_calls() != before
        if self.random is not None:
            self.random.note_graph(outputs)
        self.running = self._received_tensors = None
        return _without_lost_graphs(outputs)

    def _rng(self, microbatch: int) -> AbstractContextManager[None]:
        """Around a forward: the guard of random numbers."""
        if self.random is None or not self.random.guards_forward:
            return _NOTHING
        return self.random.forward(self.index, microbatch)

    def _call(self, microbatch: int, inputs: Tensors) -> Tensors:
        args, carried = self.received(microbatch, inputs)
        kwargs = {} if self.work.kwargs is None else self.work.kwargs[microbatch]
        self.losses.carried = {}
        if carried:
            kwargs = merged_kwargs(kwargs, selected(carried, self.accepts), self.index)
            self.losses.carried = selected(carried, self.losses.names)
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
        outputs = self._pack_outputs(microbatch, output, carried)
        if self.fuses:
            self._grad_flags = tuple(tensor.requires_grad for tensor in outputs)
        return outputs

    def _pack_outputs(self, microbatch: int, output: Any, carried: Mapping[str, Any]) -> Tensors:
        """The tensors for the next stage: output and carried values, with the added losses attached."""
        value, values = split_carried(output)
        if values or carried:
            carried = passed_on(carried, values, self.index, self.accepts, self.later)
        make = treespec_tensor if self.treespecs is None else partial(self.treespecs.make, microbatch)
        tensors = to_tensors(value, carried, self.index, make, self.mesh, self._received_tensors)
        if any(tensor.is_meta for tensor in tensors):
            raise ValueError(
                f"stage {self.index} returned a tensor on meta, which has no values: make it on the device of the "
                "layer's input (device=x.device)"
            )
        if self.why_one_tensor and len(tensors) > 1:
            raise ValueError(
                f"stage {self.index} returns {len(tensors)} tensors, and with more than one the ranks can deadlock: "
                f"{self.why_one_tensor}; or return one tensor and nothing else"
            )
        return self.losses.attached(microbatch, tensors)

    def received(self, microbatch: int, inputs: Tensors) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """The positional arguments of the module, and the values carried from earlier stages."""
        self._received_tensors = None if self.held is None else ReceivedTensors(self.held, self.index, microbatch)
        if self.work.args is not None:
            return self.work.args[microbatch], {}
        read = treespec_text if self.treespecs is None else partial(self.treespecs.read, microbatch)
        return from_tensors(inputs, read, self.mesh, self._received_tensors)

    @property
    def takes(self) -> frozenset[str] | None:
        """Carried values that its layers or its loss take; None for any."""
        return None if self.accepts is None else self.accepts | self.losses.names

    def fuses_with(self, pair: Stage) -> bool:
        """Whether the modules' own method runs F of this stage with B of ``pair`` in this step."""
        return self.fuses and type(self.modules[0]) is type(pair.modules[0]) and pair.fuses and self.work.kwargs is None

    def run_fused(
        self, microbatch: int, inputs: Tensors, pair: Stage, roots: Tensors, grads: Sequence[torch.Tensor] | None
    ) -> Tensors:
        """`run`, with the backward of another microbatch; see `fastpipe.runtime.stage.pairs.fuse`."""
        self.running = microbatch
        with self._rng(microbatch), self.context.around_forward(), AddedLosses() as self.losses.added:
            args, carried = self.received(microbatch, inputs)
            if carried:
                raise ValueError(
                    f"{METHOD} of stage {self.index} has no place for what earlier layers carry "
                    f"({', '.join(carried)}): return it as further outputs, or leave out the method"
                )
            root, target, work = None, None, self.work
            if self.losses.loss_fn is not None and work.targets is not None and work.output_grads is None:
                root, target = partial(self.losses.root, microbatch), work.targets[microbatch]
            found, loss = fuse(self.index, self.modules[0], list(args), root, target, pair.modules[0], roots, grads)
        output = one_or_all(found)
        if loss is not None:
            self.losses.keep(microbatch, output)
            outputs: Tensors = (loss,)
        else:
            self._check_fused(found)
            outputs = self._finish(microbatch, output) if self.is_last else self._pack_outputs(microbatch, output, {})
        if self.random is not None:
            self.random.note_fused()
        self.running = self._received_tensors = None
        return _without_lost_graphs(outputs)

    def _check_fused(self, outputs: Sequence[torch.Tensor]) -> None:
        """Raise ValueError if the outputs of the modules' own method do not match those of the forward."""
        prefix = f"{METHOD} of stage {self.index} returned"
        found = tuple(tensor.requires_grad for tensor in outputs)
        if not self.is_last and self._grad_flags is not None and len(found) != len(self._grad_flags):
            raise ValueError(
                f"{prefix} {len(found)} outputs, and the forward of the stage {len(self._grad_flags)}: return as many"
            )
        expected = self._grad_flags or (any(p.requires_grad for p in self.module.parameters()),)
        if any(expected) and not any(found):
            raise ValueError(f"{prefix} outputs without a graph: leave out detach() and no_grad()")

    def _dtype_reason(self, args: Sequence[Any]) -> str | None:
        """The error text if the arguments' dtype does not match the parameters; None if it does."""
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
        output, values = split_carried(output)
        if values:
            passed_on({}, values, self.index, self.takes, self.later)
            self.losses.carried |= selected(values, self.losses.names)
        return self.losses.roots(microbatch, output)

    def forward(self, microbatch: int, inputs: Tensors, *, splits: bool = False) -> Tensors:
        """Run F; unless gradients are off, keep the state for B, or for I and W with ``splits``."""
        with self.context.as_current(Op.F, microbatch):
            return self._forward(microbatch, inputs, splits)

    def can_alternate(self, pair: Stage) -> bool:
        """Whether F of this stage and B of ``pair`` are to run in turns, if the pipeline has such pairs."""
        # a wrapper has one action at a time
        is_free = self is not pair or self.parallel is None
        if not is_free or not (self.exchanges or pair.exchanges):
            return False
        guard = None if self.random is None else self.random.guard
        # a recompute writes buffers again, BatchNorm's for example, and so does an F of the same stage
        return guard is None or not (guard.exclusive or (guard.recomputes and self is pair))

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
        """F of one microbatch and B of another, by the modules' own method.

        Returns:
            The results of `forward` and `backward`; None if the backward has no roots.
        """
        record = pair._records[pair_microbatch]
        roots = tuple(output for output in record.outputs if output.requires_grad)
        if not roots:
            return None
        root_grads = pair._root_grads(pair_microbatch, record.outputs, grads)

        def run(microbatch: int, entered: Tensors) -> Tensors:
            return self.run_fused(microbatch, entered, pair, roots, root_grads)

        with self.context.as_current(Op.F, microbatch):
            outputs = self._forward(microbatch, inputs, splits, run)
        del pair._records[pair_microbatch]
        return outputs, pair._input_grads(record)

    def _forward(
        self, microbatch: int, inputs: Tensors, splits: bool, run: Callable[[int, Tensors], Tensors] | None = None
    ) -> Tensors:
        is_fused, run = run is not None, run or self.run
        if not torch.is_grad_enabled():
            return run(microbatch, inputs)
        caught: dict[int, torch.Tensor] = {}
        entered = tuple(enter(t, caught, i) if t.requires_grad else t for i, t in enumerate(inputs))
        # without the extension I is the whole backward, and W computes nothing
        runtime: Any = native.load() if splits else None
        weights = None if runtime is None else runtime.WeightGradients(self.fused_weight_grad)
        if weights is None:
            outputs = run(microbatch, entered)
        else:
            try:
                with weights.armed(backward=False, fused=is_fused):
                    outputs = run(microbatch, entered)
                weights.split([t for t in outputs if t.requires_grad], [t for t in entered if t.requires_grad])
            except BaseException:  # raised again; before the split, graph and records form a cycle
                weights.clear()
                raise
        self._records[microbatch] = Record(inputs, outputs, caught, weights)
        return outputs

    def awaits_backward(self, microbatch: int) -> bool:
        """Whether F of a microbatch has run, and its B or I has not."""
        return microbatch in self._records

    def backward(self, microbatch: int, grads: Tensors) -> Tensors:
        """Run B, which adds to the parameters' ``.grad``.

        Takes the gradients of the outputs that require one (ignored on the last stage), and returns those of the
        inputs that require one.
        """
        with self.context.as_current(Op.B, microbatch), self.context.around_backward():
            return self._differentiate(microbatch, grads)

    def _differentiate(self, microbatch: int, grads: Tensors) -> Tensors:
        record = self._records.pop(microbatch)
        roots = [output for output in record.outputs if output.requires_grad]
        with _NOTHING if self.random is None else self.random.guard.backward():
            if roots:
                torch.autograd.backward(roots, self._root_grads(microbatch, record.outputs, grads))
        return self._input_grads(record)

    def _input_grads(self, record: Record) -> Tensors:
        """After the backward: the gradients of the inputs that require one."""
        caught, inputs = record.caught, {i: t for i, t in enumerate(record.inputs) if t.requires_grad}
        if inputs:
            self.reaches_inputs = bool(self.reaches_inputs or caught)
        return tuple(caught[i] if i in caught else torch.zeros_like(t) for i, t in inputs.items())

    def _root_grads(self, microbatch: int, outputs: Tensors, grads: Tensors) -> Sequence[torch.Tensor] | None:
        if not self.is_last:
            return grads
        given = self.losses.output_grads(microbatch)
        if given is None:
            return None
        return [grad for grad, output in zip(given, outputs, strict=True) if output.requires_grad]

    def backward_input(self, microbatch: int, grads: Tensors) -> Tensors:
        """Run I: the backward without the weight gradients of linears that `backward_weight` computes."""
        weights = self._records[microbatch].weights
        # linears that are recomputed now are split, too
        armed = _NOTHING if weights is None else weights.armed(backward=True)
        with self.context.as_current(Op.I, microbatch), self.context.around_backward(), armed:
            found = self._differentiate(microbatch, grads)
        if weights is not None:
            # another microbatch may use others, of a mixture of experts for example
            self.add_deferred(() if self.knows_deferred else weights.leaves())
        self._waiting[microbatch] = weights, 0 if weights is None else weights.held_bytes()
        self.peak_held_bytes = max(self.peak_held_bytes, sum(held for _, held in self._waiting.values()))
        return found

    def add_deferred(self, leaves: Iterable[int]) -> None:
        """Note, after an I, ``_cdata`` of parameters whose gradients are computed in W."""
        self.deferred = (self.deferred or frozenset()).union(leaves)

    def backward_weight(self, microbatch: int) -> None:
        """Run W: the deferred weight gradients."""
        weights, _ = self._waiting.pop(microbatch)
        if weights is None:  # I has computed all; the user's context sees W all the same
            with self.context.as_current(Op.W, microbatch), self.context.around_backward():
                return
        region = _NOTHING if self.random is None else self.random.guard.backward(whole=False)
        # a weight may be computed in a checkpoint, whose recompute must equal its forward
        armed = weights.armed(backward=True)
        with self.context.as_current(Op.W, microbatch), self.context.around_backward(), region, armed:
            weights.compute()
        if self.parallel is not None and self.parallel.folds:
            self.parallel.fold()

    def run_collective(self, op: int, failed: bool) -> None:
        """Run UNSHARD, RESHARD or REDUCE_GRAD, or prepare the last B or W before it; no-op without replicas.

        A rank on which the step ``failed`` takes part all the same, as its replicas wait.
        """
        if self.parallel is None:
            return
        if op == Op.UNSHARD:
            self.parallel.unshard()
        elif op == Op.RESHARD:
            self.parallel.reshard()
        elif op == Op.REDUCE_GRAD:
            self.parallel.reduce_grad(failed)
        elif op == Op.B:
            self.parallel.last_backward(lambda _: True)
        elif self.deferred is not None:  # before the first I it is unknown which gradients W computes
            self.parallel.last_backward(self.waits)

    def waits(self, parameter: nn.Parameter) -> bool:
        """Whether W computes the gradient of a parameter."""
        leaf = parameter if self.parallel is None else self.parallel.leaf(parameter)
        return torch_private.address_of(leaf) in (self.deferred or ())

    def shaped(self, signature: int, announce: bool) -> None:
        """Set the signature of the step's shapes; ``announce`` if they are new."""
        if self.treespecs is not None:
            self.treespecs.begin(signature, announce)

    def end(self) -> None:
        """Release the state of a step, including the batch."""
        self.losses.work, self.losses.carried = StageWork(), {}
        for weights in [r.weights for r in self._records.values()] + [found for found, _ in self._waiting.values()]:
            if weights is not None:
                weights.clear()
        self._records.clear()
        self._waiting.clear()
        self._received_tensors = None
        if self.held is not None:
            self.held.clear()


def _without_lost_graphs(outputs: Tensors) -> Tensors:
    """The outputs; those at which no backward can begin are detached, as in the unsplit model they get no gradient."""
    if not torch.is_grad_enabled():
        return outputs
    return tuple(t.detach() if t.requires_grad and not has_graph(t) else t for t in outputs)


def warn_of_unreached_inputs(stages: Sequence[Stage]) -> bool:
    """Warn if earlier stages get gradients of zeros, where the unsplit model has none; False if that is not known."""
    for stage in stages:
        if stage.reaches_inputs is False and not stage.is_first:
            logger.warning(
                "the loss does not depend on what stage %d gets from earlier stages (it is detached, say, or computed "
                "in torch.no_grad()): their weights get gradients of zeros, where the unsplit model's get none, so "
                "weight decay changes them. Freeze them by requires_grad_(False)",
                stage.index,
            )
    return any(stage.reaches_inputs is not None for stage in stages)


def warn_of_whole_weights(stages: Sequence[Stage]) -> bool:
    """Warn if most weight gradients of linears are computed in I, as under torch.compile: W then gains little.

    Linears without a gradient, such as unused experts, do not count.

    Returns:
        Whether a stage has run I, as otherwise nothing is known.
    """
    split = [stage for stage in stages if stage.deferred is not None]
    linears = (module for stage in split for module in stage.module.modules() if isinstance(module, nn.Linear))
    trained = (found for found in map(_trained_weights, linears) if any(p.grad is not None for p in found))
    weights = {tuple(map(id, found)): found for found in trained}
    waiting = sum(any(stage.waits(p) for stage in stages for p in found) for found in weights.values())
    if 2 * waiting < len(weights):
        logger.warning(
            "the schedule splits the backward, but W computes the weight gradients of only %d of %d linears here; the "
            "others are computed in I, so the schedule gains little. Blocks under torch.compile compute all of theirs "
            "in I (compile what is between the linears), and so do linears that call a torch.autograd.Function instead "
            "of F.linear, and a forward that runs within a backward; else use a schedule without W (describe() lists "
            "parameters)",
            waiting,
            len(weights),
        )
    return bool(split)


def _trained_weights(linear: nn.Linear) -> list[nn.Parameter]:
    """The weight, or the parameters that it is made of, if trained.

    Not by the attribute ``weight``: reading it runs a parametrization, and that of `spectral_norm` changes its buffers.
    """
    named = ((name.removeprefix("parametrizations."), p) for name, p in linear.named_parameters())
    return [p for name, p in named if name.startswith("weight") and p.requires_grad]
