"""Stages on the meta device: cut and agreed on without memory, and given memory and values before the first step.

`to_empty` keeps the identity of every tensor, by `torch.utils.swap_tensors`: tied weights stay one Parameter, and
optimizers that exist already have it. It fills new tensors with NaN, or the largest integer. So a tensor that was never
initialised is found before the first step, in particular a buffer that no checkpoint has.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from fastpipe.runtime.common import allocate, is_dtensor, listed, local_part, tensors_of, torch_private, version_of
from fastpipe.runtime.data_parallel import unwrapped
from fastpipe.runtime.model.chain import WholeNames
from fastpipe.runtime.model.modules import check_device, state_prefix
from fastpipe.runtime.model.tied import SHARDED, Tie, kind_of_tie, parameter_of

_HOW = (
    "call pipe.to_empty() and initialise the layers, or load values with fastpipe.load_checkpoint, "
    "fastpipe.load_safetensors or pipe.load_state_dict(state, assign=True)"
)


def skeleton(module: nn.Module) -> nn.Module:
    """A copy of a module whose parameters and buffers are on meta; it takes no memory for them."""
    made: dict[int, Any] = {}
    for _, tensor in tensors_of(module):
        own = torch.empty_like(tensor, device="meta", requires_grad=False)
        made[id(tensor)] = nn.Parameter(own, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else own
    return copy.deepcopy(module, made)


class Unfilled:
    """Local stages that were built on the meta device, until the first step."""

    def __init__(self, modules: Mapping[int, nn.Module], device: torch.device, ties: Sequence[Tie]) -> None:
        self._modules = modules
        self._device = device
        self._ties = ties
        self._marked: list[tuple[torch.Tensor, int]] = []

    def to_empty(self) -> None:
        """Give memory to what has none; compute what a stage can compute itself."""
        for stage, module in sorted(self._modules.items()):
            own, on_meta = unwrapped(module), [(name, t) for name, t in self._named(stage) if t.is_meta]
            for name, tensor in on_meta:
                _check_no_hooks(name, tensor)
                allocate(tensor, self._device)
                local_part(tensor).detach().fill_(_mark(tensor.dtype))
                self._marked.append((tensor, version_of(local_part(tensor))))
            if on_meta and isinstance(own, WholeNames):
                own.compute_buffers({id(tensor) for _, tensor in on_meta})

    def check(self) -> None:
        """Refuse to use stages without values.

        Raises:
            ValueError: naming tensors without memory or values, those on another device, and weights that are no
                longer tied, each with the remedy.
        """
        named = {stage: dict(self._named(stage)) for stage in self._modules}
        for stage, tensors in named.items():
            absent = [name for name, tensor in tensors.items() if tensor.is_meta]
            if absent:
                raise ValueError(f"stages: {listed(absent)} of stage {stage} are on the meta device: {_HOW}")
        check_device(self._modules, self._device)
        for stage, tensors in named.items():
            self._check_values(stage, tensors)
        self._check_ties()

    def _check_values(self, stage: int, tensors: Mapping[str, torch.Tensor]) -> None:
        marked = {id(tensor): version for tensor, version in self._marked}
        empty = [name for name, t in tensors.items() if id(t) in marked and _is_empty(t, marked[id(t)])]
        if not empty:
            return
        kept = unwrapped(self._modules[stage]).state_dict()
        prefix = state_prefix(self._modules[stage], stage)
        left = [name for name in empty if name.removeprefix(prefix) not in kept]
        if left == empty:
            raise ValueError(
                f"stages: {listed(empty)} of stage {stage} have no values since to_empty, and no checkpoint has them "
                "(register_buffer(persistent=False)): compute them after pipe.to_empty(), as the layer's __init__ "
                "does, for example in its reset_parameters()"
            )
        raise ValueError(
            f"stages: {listed(empty)} of stage {stage} have no values since to_empty: initialise them, as "
            "layer.reset_parameters() does for layers of torch, or load them"
        )

    def _check_ties(self) -> None:
        for tie in self._ties:
            here = {
                id(parameter_of(unwrapped(self._modules[stage]), local, name)): name
                for name, (stage, local) in zip(tie.names, tie.members, strict=True)
                if stage in self._modules
            }
            if len(here) > 1 and kind_of_tie(tie, self._modules) != SHARDED:
                raise ValueError(
                    f"tied: {' and '.join(tie.names)} were one weight when the Pipeline was built, and got memory of "
                    "their own, as module.to_empty() does it: call pipe.to_empty() instead, or assign one nn.Parameter "
                    "to all of them"
                )

    def _named(self, stage: int) -> Iterator[tuple[str, torch.Tensor]]:
        prefix = state_prefix(self._modules[stage], stage)
        for name, tensor in tensors_of(unwrapped(self._modules[stage])):
            yield prefix + name, tensor


def assignable(state: Mapping[str, Any], ties: Sequence[Tie], device: torch.device) -> dict[str, Any]:
    """A state whose tensors stages can use as they are: one Parameter for all names of a tied weight.

    Raises:
        ValueError: for a tensor on another device.
    """
    for name, value in state.items():
        if isinstance(value, torch.Tensor) and value.device.type != device.type:
            raise ValueError(
                f"the state has {name} on {value.device}, and with assign=True the stages use it as it is: move it to "
                f"{device}, or call pipe.to_empty() and load without assign"
            )
    found = dict(state)
    for tie in ties:
        names = [name for name in tie.names if isinstance(state.get(name), torch.Tensor)]
        if names and not is_dtensor(state[names[0]]):
            found |= dict.fromkeys(names, nn.Parameter(state[names[0]].detach(), requires_grad=False))
    return found


def _mark(dtype: torch.dtype) -> float | int | bool:
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return True if dtype == torch.bool else torch.iinfo(dtype).max


def _is_empty(tensor: torch.Tensor, version: int) -> bool:
    """Whether nothing was written since `allocate`."""
    local = local_part(tensor).detach()
    if not local.numel() or version_of(local) != version:
        return False
    mark = _mark(local.dtype)
    whole = local.float() if local.element_size() == 1 and local.is_floating_point() else local
    return bool((whole.isnan() if mark != mark else whole == mark).all())


def _check_no_hooks(name: str, tensor: torch.Tensor) -> None:
    if torch_private.hooks_of(tensor) or (tensor.is_leaf and torch_private.post_hooks_of(tensor)):
        raise ValueError(f"stages: {name} has a hook, which it would lose with its memory; register it after to_empty")
