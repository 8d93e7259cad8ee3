"""Microbatches of a stage, recorded while it computes them, and computed again from the record, on any rank.

A record has all that a microbatch is computed from, and sums of the bits of every result: outputs, gradients of inputs,
and its part of the gradients of weights. `to_tensors` makes it a message. Another rank computes it again in a stage of
the same layers that holds no memory in between, and compares the sums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from fastpipe.runtime.common import (
    Tensors,
    bit_sum,
    bit_sums,
    packing,
    parameters_of,
    pytree,
    set_grad_dtype,
    torch_private,
    walked,
)
from fastpipe.runtime.model import accumulated
from fastpipe.runtime.stage.context import Current
from fastpipe.runtime.stage.losses import StageWork
from fastpipe.runtime.stage.random_numbers import Generators
from fastpipe.runtime.stage.stage import Stage

_WORK = ("args", "kwargs", "targets", "output_grads", "divisors")
"""What a `StageWork` has for each microbatch."""

Sums = dict[str, int]
"""The sum of the bits of each result of a microbatch, by its name, in the order in which they were computed."""


def _sum(tensor: torch.Tensor) -> int:
    return int(bit_sum(tensor))


class _Watch(torch.autograd.Function):
    """Identity on a tensor; its backward puts a function of the gradient into a dict."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, into: dict[Any, Any], key: Any, function: Any) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.into, ctx.key, ctx.function = into, key, function
        # not a view: a stage may change its input in place
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, None, None, None]:
        if grads[0] is not None:
            ctx.into[ctx.key] = ctx.function(grads[0])
        return grads[0], None, None, None


def _watch(tensor: torch.Tensor, *to: Any) -> torch.Tensor:
    watched: torch.Tensor = _Watch.apply(tensor, *to) if tensor.requires_grad else tensor  # type: ignore[no-untyped-call]
    return watched


class Recorder:
    """Records microbatches of a stage while it computes them.

    Args:
        splits: the microbatches, and of each whether its backward is split.
        generators: whose states a forward starts from; None if only the results are recorded.

    Attributes:
        results: by microbatch, the sums of its results.
    """

    def __init__(self, stage: Stage, splits: Mapping[int, bool], generators: Generators | None = None) -> None:
        self.stage = stage
        self.results: dict[int, Sums] = {microbatch: {} for microbatch in splits}
        self._splits, self._generators = splits, generators
        self._given: dict[int, dict[str, Any]] = {}
        self._context = stage.context.backward_context

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Context in which the stage is recorded."""
        self.stage.recorder, self.stage.context.backward_context = self._forward, self._backward
        try:
            yield
        finally:
            self.stage.recorder, self.stage.context.backward_context = None, self._context

    def _forward(self, microbatch: int, inputs: Tensors, call: Callable[[int, Tensors], Tensors]) -> Tensors:
        if microbatch not in self.results:
            return call(microbatch, inputs)
        found = self.results[microbatch]
        grads: dict[int, torch.Tensor] = {}
        if self._generators is not None:
            self._given[microbatch] = self._copies(microbatch, inputs, self._generators) | {"grads": grads}

        entered = tuple(_watch(t, found, f"the gradient of input {place}", _sum) for place, t in enumerate(inputs))
        outputs = call(microbatch, entered)
        found |= {f"output {place}": _sum(tensor) for place, tensor in enumerate(outputs)}
        return tuple(_watch(tensor, grads, place, packing.exact_copy) for place, tensor in enumerate(outputs))

    def _copies(self, microbatch: int, inputs: Tensors, generators: Generators) -> dict[str, Any]:
        """Copies of everything that a forward depends on, as the stage may change it in place."""
        work, held = self.stage.work, self.stage.held
        kept = {} if held is None else held.tensors.get(microbatch, {})
        taken = {
            "inputs": list(inputs),
            "held": [[list(key), tensor] for key, tensor in kept.items()],
            "random": generators.states(),
            "buffers": [buffer for *_, buffer in _places(self.stage.module, torch_private.buffers_of)],
            "work": {name: values[microbatch] for name in _WORK if (values := getattr(work, name)) is not None},
            "loss_scale": work.loss_scale,
        }
        copied: dict[str, Any] = pytree.tree_map(partial(_copied, {}), taken)
        return copied

    @contextmanager
    def _backward(self, action: Current) -> Iterator[None]:
        """Around B, I and W, within the user's context: sums the microbatch's part of the gradients by itself."""
        with nullcontext() if self._context is None else self._context(action):
            if action.microbatch not in self.results:
                yield
                return
            named = [(name, p) for name, p in self.stage.module.named_parameters() if not _has_hooks(p)]
            before = [p.grad for _, p in named]
            for _, parameter in named:
                parameter.grad = None
            try:
                yield
            finally:
                sums = bit_sums(parameter.grad for _, parameter in named)
                for (_, parameter), kept in zip(named, before, strict=True):
                    parameter.grad = accumulated(kept, parameter.grad)
            self.results[action.microbatch] |= {
                f"the gradient of {name}, by {action.action}": total
                for (name, _), total in zip(named, sums, strict=True)
                if total is not None
            }

    def record(self, device: torch.device) -> dict[str, Any]:
        """What `compute_again` needs, and the results here: values that `to_tensors` supports."""
        module, kind = self.stage.module, device.type
        parameters = [p for *_, p in _places(module, parameters_of)]
        own = {id(p): p.detach().requires_grad_(p.requires_grad) for p in parameters}
        return {
            "step": self.stage.context.step,
            "training": [inner.training for inner in walked(module)],
            "autocast": [torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)],
            "parameters": [own[id(p)] for p in parameters],
            "microbatches": {
                i: given | {"sums": self.results[i], "splits": self._splits[i]} for i, given in self._given.items()
            },
        }


def _copied(copies: dict[int, torch.Tensor], leaf: Any) -> Any:
    """A copy of a tensor, one for all its occurrences; any other value itself."""
    if isinstance(leaf, torch.Tensor) and id(leaf) not in copies:
        copies[id(leaf)] = packing.exact_copy(leaf)
    return copies.get(id(leaf), leaf)


def _has_hooks(parameter: torch.Tensor) -> bool:
    """Whether the user's hooks see its gradients; a copy has no hooks."""
    return bool(torch_private.hooks_of(parameter) or torch_private.post_hooks_of(parameter))


_Places = list[tuple[dict[str, Any], str, torch.Tensor]]


def _places(module: nn.Module, owned: Callable[[nn.Module], dict[str, Any]]) -> _Places:
    """The places of a module's parameters or buffers, in an order that a copy has, too."""
    found = [(own, name) for inner in walked(module) for own in [owned(inner)] for name in own]
    return [(own, name, tensor) for own, name in found if (tensor := own[name]) is not None]


def _put(places: _Places, values: Sequence[torch.Tensor]) -> None:
    if len(places) != len(values):
        raise ValueError(
            f"audit: a stage has {len(values)} parameters or buffers, and had {len(places)} when the Pipeline was "
            "built; change layers before that, or leave audit out"
        )
    for (own, name, _), value in zip(places, values, strict=True):
        own[name] = value


def compute_again(
    stage: Stage, record: Mapping[str, Any], last: tuple[int, int, int], generators: Generators, device: torch.device
) -> dict[int, Sums]:
    """Compute recorded microbatches again; returns the sums of their results.

    Args:
        stage: one of the same layers, which is unchanged afterwards.
        record: of `Recorder.record`.
        last: the microbatches of the stage's last actions; see `last_microbatches`.
        device: where the record's tensors are.
    """
    parameters, buffers = (_places(stage.module, owned) for owned in (parameters_of, torch_private.buffers_of))
    states = generators.states()
    recorder = Recorder(stage, record["microbatches"])
    enabled, dtype = record["autocast"]
    made = {id(p): nn.Parameter(p.detach(), p.requires_grad) for p in record["parameters"]}
    try:
        _put(parameters, [made[id(p)] for p in record["parameters"]])
        for inner, is_training in zip(walked(stage.module), record["training"], strict=True):
            inner.training = is_training
        if stage.grad_dtype is not None:
            set_grad_dtype(stage.module, stage.grad_dtype)
        stage.context.step, stage.context.last = record["step"], last
        with recorder.attached(), torch.autocast(device.type, dtype, enabled):
            for i, given in record["microbatches"].items():
                _put(buffers, given["buffers"])
                generators.restore(given["random"])
                _run(stage, i, given)
    finally:
        stage.end()
        generators.restore(states)
        for places in (parameters, buffers):
            _put(places, [tensor for *_, tensor in places])
    return recorder.results


def _run(stage: Stage, microbatch: int, given: Mapping[str, Any]) -> None:
    """Forward and backward of a microbatch, as they were recorded."""
    work: dict[str, Any] = {name: [value] * (microbatch + 1) for name, value in given["work"].items()}
    stage.begin(StageWork(**work, loss_scale=given["loss_scale"], keep_outputs=False))
    stage.shaped(0, announce=True)
    if stage.held is not None:
        stage.held.tensors[microbatch] = {tuple(key): tensor for key, tensor in given["held"]}
    grads = tuple(given["grads"][place] for place in sorted(given["grads"]))
    stage.forward(microbatch, tuple(given["inputs"]), splits=given["splits"])
    if given["splits"]:
        stage.backward_input(microbatch, grads)
        stage.backward_weight(microbatch)
    else:
        stage.backward(microbatch, grads)
