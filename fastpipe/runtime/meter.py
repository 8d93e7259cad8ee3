"""Meter: what a stage, or each of its layers, takes and holds for one microbatch, measured beside a forward pass.

The first forward of a pass is caught on its way into the module. Its input goes through the layers a few times more,
forward, backward for the input and backward for the weights, while the ranks behind wait for what this one hands on.
"""

from __future__ import annotations

import contextlib
import statistics
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from fastpipe.runtime.boundary import from_tensors, to_tensors
from fastpipe.runtime.buffers import keep_buffers
from fastpipe.runtime.chain import Chain, chosen
from fastpipe.runtime.devices import cuda_devices, time_when_idle
from fastpipe.runtime.sharded import Sharded
from fastpipe.runtime.stage import Stage
from fastpipe.runtime.stage_work import StageWork
from fastpipe.runtime.tensors import Tensors
from fastpipe.runtime.wrappers import unwrapped

_REPEATS = 5


@dataclass(frozen=True)
class Unit:
    """A stage or a layer and one microbatch.

    Attributes:
        forward: seconds.
        backward_input: seconds.
        backward_weight: seconds.
        held: bytes kept from the forward to the end of the backward: what autograd saves, inputs and outputs, but
            neither parameters nor buffers.
        handed: bytes of what it hands on.
        parameters: bytes of its parameters.
        rows: of the first input; 0 where there is no tensor.
    """

    forward: float
    backward_input: float
    backward_weight: float
    held: float
    handed: float
    parameters: float
    rows: int


class Meters:
    """Meters on the stages of this process.

    Args:
        stages: the local ones.
        by_layer: whether every layer of a stage is measured by itself.
        trains: whether there are backwards.

    Attributes:
        found: by stage, what was measured: its layers in order, or the one whole.
    """

    def __init__(self, stages: Sequence[Stage], *, by_layer: bool, trains: bool) -> None:
        self.by_layer = by_layer
        self.trains = trains
        self.found: dict[int, dict[int, Unit]] = {}
        # Of two routes both first forwards may come at once, and would disturb each other; and the hook is met again
        # by what it meters.
        self._lock = threading.RLock()
        self._stages = [stage for stage in stages if not isinstance(stage.parallel, Sharded)]

    @contextlib.contextmanager
    def attached(self) -> Iterator[None]:
        """Within this context the first forward of every stage is measured."""
        hooks = [
            unwrapped(stage.module).register_forward_pre_hook(
                lambda module, args, kwargs, stage=stage: self._catch(stage, module, args, kwargs), with_kwargs=True
            )
            for stage in self._stages
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _catch(self, stage: Stage, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        with self._lock:
            if stage.index in self.found:
                return
            parts = module._modules if self.by_layer else {"": module}
            ends = next(iter(parts)), next(reversed(parts))
            self.found[stage.index] = {}
            for number, (name, part) in enumerate(parts.items()):
                assert part is not None
                inner = Chain({name: part}) if self.by_layer else part
                place = _place(stage.is_first and name == ends[0], stage.is_last and name == ends[1])
                probe = _Probe(stage, Stage(place[0], inner, place[1], stage.losses.loss_fn), args, kwargs)
                with torch.set_grad_enabled(self.trains), probe.leaving_no_trace():
                    self.found[stage.index][number] = probe.unit()
                args, carried = from_tensors(probe.outputs)
                kwargs = {**kwargs, **carried}


def _place(at_start: bool, at_end: bool) -> tuple[int, int]:
    """Index and number of stages of one that stands alone where a part of a stage stands."""
    if at_start and at_end:
        return 0, 1
    return (0 if at_start else 2 if at_end else 1), 3


class _Probe:
    """A part of a stage as a stage of its own, and one microbatch.

    Args:
        stage: the whole one, whose work says what the loss is of.
        part: the part of it.
        args: what the part is given.
        kwargs: of the whole stage.

    Attributes:
        outputs: what the part hands on.
    """

    def __init__(self, stage: Stage, part: Stage, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self.part = part
        self.args = args
        self.outputs: Tensors = ()
        targets, microbatch = stage.work.targets, stage.running or 0
        self._targets = None if targets is None or not part.is_last else [targets[microbatch]]
        self._carried = chosen({**stage.losses.carried, **kwargs}, part.losses.names)
        self._kwargs = [{k: v for k, v in chosen(kwargs, part.accepts).items() if k not in self._carried}]
        self._devices = cuda_devices([part.module])

    @contextlib.contextmanager
    def leaving_no_trace(self) -> Iterator[None]:
        """After this context gradients and buffers are as they were."""
        module = self.part.module
        grads = [(parameter, parameter.grad) for parameter in module.parameters()]
        put_back = keep_buffers([module])
        for parameter, _ in grads:
            parameter.grad = None
        try:
            yield
        finally:
            self.part.end()
            put_back()
            for parameter, grad in grads:
                parameter.grad = grad

    def unit(self) -> Unit:
        """The median of a few runs."""
        held = self._held_bytes()
        runs = [self._run() for _ in range(_REPEATS)]
        forward, inputs, weights = (statistics.median(column) for column in zip(*runs, strict=True))
        tensors = [leaf for leaf in pytree.tree_leaves(self.args) if isinstance(leaf, torch.Tensor)]
        rows = len(tensors[0]) if tensors and tensors[0].dim() else 0
        handed = sum(output.nbytes for output in self.outputs)
        parameters = sum(parameter.nbytes for parameter in self.part.module.parameters())
        return Unit(forward, inputs, weights, float(held), float(handed), float(parameters), rows)

    def _begin(self) -> Tensors:
        """A new microbatch: its inputs, of which all that can have a gradient want one."""
        first = self.part.is_first
        self.part.begin(StageWork(args=[self.args] if first else None, kwargs=self._kwargs, targets=self._targets))
        if first:
            return ()
        wants = torch.is_grad_enabled()
        value = self.args[0] if len(self.args) == 1 else self.args
        given = to_tensors(value, self._carried, self.part.index)
        return tuple(t.detach().requires_grad_(wants and t.is_floating_point()) for t in given)

    def _run(self) -> tuple[float, float, float]:
        """Seconds of F, I and W."""
        inputs, times = self._begin(), [time_when_idle(self._devices)]
        outputs = self.part.forward(0, inputs, splits=True)
        times.append(time_when_idle(self._devices))
        if torch.is_grad_enabled():
            self.part.backward_input(0, tuple(torch.ones_like(t) for t in outputs if t.requires_grad))
            times.append(time_when_idle(self._devices))
            self.part.backward_weight(0)
        times += [time_when_idle(self._devices)] * (4 - len(times))
        return times[1] - times[0], times[2] - times[1], times[3] - times[2]

    def _held_bytes(self) -> int:
        """What is alive between F and the backward because of this microbatch."""
        module = self.part.module
        own = {t.untyped_storage().data_ptr() for t in (*module.parameters(), *module.buffers())}
        found: dict[int, int] = {}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                found[storage.data_ptr()] = storage.nbytes()
            return tensor

        inputs = self._begin()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            # alive until all is counted, or two could be counted at one address
            outputs = self.part.forward(0, inputs)
        for tensor in outputs:
            keep(tensor)
        for tensor in pytree.tree_leaves(self.args):
            if isinstance(tensor, torch.Tensor):  # a microbatch may be a part of the batch's memory
                found[tensor.untyped_storage().data_ptr()] = tensor.nbytes
        self.outputs = () if self.part.is_last else tuple(output.detach() for output in outputs)
        return sum(found.values())
