"""What a rank with several stages holds, and need not receive again.

A tensor that stages pass on unchanged crosses to a rank once, where a placement visits ranks several times. It has a
key: the stage that made it, and its place in that stage's message. A stage that returns a tensor that it received, not
a copy and not changed in place, passes on the key. A rank keeps what it passed on, and what it made beside its first
output, until its next stage has had that microbatch. So a sender knows from the placement what the receiver holds, and
sends the key alone (`fastpipe.runtime.stage.boundary`).

A gradient of a held tensor is summed on the rank, latest stage first, and added to that of the stage where the tensor
came in (or was made), whose backward is the rank's last. Autograd would sum the uses of all ranks in one order, so this
rounds differently, and is done only if the user asks for it. Tensors without a gradient are always sent once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fastpipe.placement import Placement
from fastpipe.runtime.common import Tensors, handed_over, version_of

Key = tuple[int, int]
"""The stage that made a tensor, and the tensor's place in its message."""

Sent = tuple[int, int, bool]
"""A key, and whether the receiver holds the tensor."""


def _read_here(tensor: torch.Tensor) -> torch.Tensor:
    """The same tensor, whose memory is not reused before the current stream has read it.

    It was made on another stage's stream, and that has finished: the message from there says so.
    """
    if tensor.device.type != "cpu":
        tensor.record_stream(torch.accelerator.current_stream(tensor.device))
    return tensor


class _Entry(torch.autograd.Function):
    """Entry of a received tensor into a graph; adds its gradient, with autograd's own layout, to those of a key.

    The gradient of a leaf would get the layout of the leaf, which changes what the previous stage computes.
    """

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, grads: dict[Any, torch.Tensor], key: Any) -> torch.Tensor:
        ctx.grads, ctx.key = grads, key
        # not a view: a stage may change its input in place
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[None, None, None]:
        before = ctx.grads.get(ctx.key)
        ctx.grads[ctx.key] = grads[0] if before is None else _read_here(before) + grads[0]
        return None, None, None


def enter(tensor: torch.Tensor, grads: dict[Any, torch.Tensor], key: Any) -> torch.Tensor:
    """A received tensor as an input of the stage; its gradient is added to ``grads[key]``."""
    entered: torch.Tensor = _Entry.apply(tensor, grads, key)  # type: ignore[no-untyped-call]
    return entered


class _Deliver(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, output: torch.Tensor, grads: dict[Any, torch.Tensor], keys: list[Any], *others: torch.Tensor
    ) -> torch.Tensor:
        ctx.grads, ctx.keys = grads, keys
        # not a view, which could not be changed in place
        return output.detach()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        found = [ctx.grads.pop(key, None) for key in ctx.keys]
        return grads[0], None, None, *(None if grad is None else _read_here(grad) for grad in found)


def deliver(output: torch.Tensor, others: dict[Any, torch.Tensor], grads: dict[Any, torch.Tensor]) -> torch.Tensor:
    """The same output; its backward also gives other tensors the gradients that a dict then has for their keys."""
    made: torch.Tensor = _Deliver.apply(output, grads, list(others), *others.values())  # type: ignore[no-untyped-call]
    return made


class HeldTensors:
    """What one rank holds, by microbatch.

    Args:
        route: the rank of every stage.
        with_gradient: whether tensors that require a gradient are sent once, too.
    """

    def __init__(self, route: Sequence[int], with_gradient: bool) -> None:
        self.route = route
        self.with_gradient = with_gradient
        self.tensors: dict[int, dict[Key, torch.Tensor]] = {}
        self.grads: dict[int, dict[Key, torch.Tensor]] = {}

    def comes_back(self, stage: int) -> bool:
        """Whether the rank of a stage has a later one."""
        return self.route[stage] in self.route[stage + 1 :]

    def next_holds(self, key: Key, stage: int) -> bool:
        """Whether the rank of the next stage holds a tensor that a stage returns."""
        made, place = key
        following = self.route[stage + 1]
        # within a rank nothing is sent; of its first output, most often a new hidden state, a rank keeps nothing
        return following != self.route[stage] and following in self.route[made + (place == 0) : stage + 1]

    def clear(self) -> None:
        """Drop everything."""
        self.tensors.clear()
        self.grads.clear()


def held_tensors(placement: Placement, with_gradient: bool) -> HeldTensors | None:
    """For one rank; None if no rank has several stages of one route."""
    route = placement.routes[0]
    if placement.num_routes > 1 or len(set(route)) == len(route):
        return None
    return HeldTensors(route, with_gradient)


class ReceivedTensors:
    """One forward: the tensors that a stage received, and their keys."""

    def __init__(self, held: HeldTensors, stage: int, microbatch: int) -> None:
        self.stage = stage
        self._held = held
        self._microbatch = microbatch
        self._known: dict[int, tuple[Key, torch.Tensor, tuple[int, bool]]] = {}
        self._from_held: set[Key] = set()

    def receive(self, sent: Tensors, keys: Sequence[Sent] | None = None) -> Tensors:
        """The tensors of a message. Without ``keys`` all are sent, and new."""
        kept = self._held.tensors.pop(self._microbatch, {})
        if keys is None:
            for place, tensor in enumerate(sent):
                self._note((self.stage - 1, place), tensor)
            return sent
        arrived = iter(sent)
        return tuple(
            self._from_kept((made, place), kept) if held else self._note((made, place), next(arrived))
            for made, place, held in keys
        )

    def _from_kept(self, key: Key, kept: dict[Key, torch.Tensor]) -> torch.Tensor:
        tensor = _read_here(kept[key])
        self._from_held.add(key)
        if tensor.requires_grad and torch.is_grad_enabled():
            tensor = enter(tensor, self._grads(), key)
        return self._note(key, tensor)

    def _note(self, key: Key, tensor: torch.Tensor) -> torch.Tensor:
        # inference tensors do not count changes in place
        if not tensor.is_inference():
            self._known[id(tensor)] = key, tensor, (version_of(tensor), tensor.requires_grad)
        return tensor

    def _grads(self) -> dict[Key, torch.Tensor]:
        return self._held.grads.setdefault(self._microbatch, {})

    def made(self, outputs: Sequence[torch.Tensor]) -> bool:
        """Whether the stage made all of these tensors, so that their keys need not be sent."""
        return all(self._key(tensor, place) == (self.stage, place) for place, tensor in enumerate(outputs))

    def send(self, outputs: Sequence[torch.Tensor]) -> tuple[Tensors, tuple[Sent, ...]]:
        """The tensors to send of a stage's outputs, and the keys of all; keeps those that may come back."""
        keys = [self._key(tensor, place) for place, tensor in enumerate(outputs)]
        held = [self._next_holds(key, tensor) for key, tensor in zip(keys, outputs, strict=True)]
        sent = [tensor for tensor, is_held in zip(outputs, held, strict=True) if not is_held]
        if not any(tensor.requires_grad for tensor in sent):
            # the backward needs a root
            held = [is_held and not t.requires_grad for t, is_held in zip(outputs, held, strict=True)]
            sent = [tensor for tensor, is_held in zip(outputs, held, strict=True) if not is_held]
        if self._held.comes_back(self.stage):
            sent = self._keep(dict(zip(keys, outputs, strict=True)), sent)
        return tuple(sent), tuple((*key, is_held) for key, is_held in zip(keys, held, strict=True))

    def _key(self, tensor: torch.Tensor, place: int) -> Key:
        known = self._known.get(id(tensor))
        if known is None or known[2] != (version_of(tensor), tensor.requires_grad):
            return self.stage, place
        return known[0]

    def _next_holds(self, key: Key, tensor: torch.Tensor) -> bool:
        is_asked = self._held.with_gradient or not tensor.requires_grad
        return is_asked and self._held.next_holds(key, self.stage)

    def _keep(self, outputs: dict[Key, torch.Tensor], sent: list[torch.Tensor]) -> list[torch.Tensor]:
        kept = {
            key: tensor
            for key, tensor in outputs.items()
            if key != (self.stage, 0) and (self._held.with_gradient or not tensor.requires_grad)
        }
        self._held.tensors[self._microbatch] = dict(zip(kept, handed_over(tuple(kept.values())), strict=True))
        summed = {key: t for key, t in kept.items() if t.requires_grad and key not in self._from_held}
        if summed:
            place = next(place for place, tensor in enumerate(sent) if tensor.requires_grad)
            sent[place] = deliver(sent[place], summed, self._grads())
        return sent
