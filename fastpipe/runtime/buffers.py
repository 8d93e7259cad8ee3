"""The buffers of a module, kept while something is tried: those that a forward replaces as well as those it writes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import nn


def keep_buffers(modules: Iterable[nn.Module]) -> Callable[[], None]:
    """Remember which buffers there are under which names, and what is in them.

    Returns:
        A function that puts all of it back, as often as it is called.
    """
    places = [(module, dict(module._buffers.items())) for root in modules for module in root.modules()]
    found = {id(b): b for _, named in places for b in named.values() if b is not None}.values()
    kept = [(buffer, buffer.detach().clone(), _version(buffer)) for buffer in found]

    def put_back() -> None:
        for module, named in places:
            _rename(module, named)
        with torch.no_grad():
            for buffer, value, version in kept:
                # Where its version says that it was changed, the copy is a change, too: what is saved for a backward
                # may be the buffer itself, and torch then says so. But batch norm changes its statistics without a
                # word, and whether it did would have to be asked of the device.
                (buffer.data if _version(buffer) == version else buffer).copy_(value)

    return put_back


def _rename(module: nn.Module, named: Mapping[str, torch.Tensor | None]) -> None:
    """Give a module these buffers, and no others."""
    now = module._buffers  # of a scripted module no dict, and without its methods
    for name in set(now.keys()).difference(named):
        del now[name]
    for name, buffer in named.items():
        if name not in now or now[name] is not buffer:
            now[name] = buffer


def _version(buffer: torch.Tensor) -> int:
    """The count of its changes; tensors of inference mode have none."""
    return -1 if buffer.is_inference() else buffer._version
