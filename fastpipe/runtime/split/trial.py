"""A trial run of a model: which of its modules are blocks, what comes after them, and whether they are one row."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

_INSTEAD = "hand over the model's layers as a list, each of which takes what the one before it returns"


@dataclass
class Call:
    """One call of a module.

    Attributes:
        path: the module's name.
        args: what it was given.
        kwargs: the same, by name.
        output: what it returned.
        version: of the output, which grows when it is changed in place.
        seen: of the version of the first argument when it was given.
    """

    path: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    output: Any = None
    version: int = 0
    seen: int = 0


def row_of_modules(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[str], Any]:
    """The names of a model's blocks and of the modules after them, and what it returned.

    Each of them but the first takes what the one before it returned, and nothing else; the last one's output is the
    model's. What comes before the first block may be anything.

    Raises:
        ValueError: for a model that is not so, with where and what to do.
    """
    blocks = _blocks_of(model)
    calls: list[Call] = []
    with _recording(model, blocks, calls), torch.no_grad():
        output = model(*args, **kwargs)
    if [call.path for call in calls[: len(blocks)]] != blocks:
        found = ", ".join(call.path for call in calls[: len(blocks)]) or "none"
        listed = f"{blocks[0]} to {blocks[-1]}"
        raise ValueError(f"model: its blocks are {listed}, and its forward called {found}; {_INSTEAD}")
    for call in calls:
        if not isinstance(call.output, torch.Tensor):
            raise ValueError(f"model: {call.path} returns a {type(call.output).__name__}, not a tensor; {_INSTEAD}")
    for before, after in zip(calls, calls[1:], strict=False):
        _check_link(before, after)
    if calls[-1].output is not output or calls[-1].output._version != calls[-1].version:
        raise ValueError(f"model: its forward does something after {calls[-1].path}; make that a module, or {_INSTEAD}")
    names = [call.path for call in calls]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"model: {twice} is called twice; {_INSTEAD}")
    return names, output


def _blocks_of(model: nn.Module) -> list[str]:
    """The names of the members of the list of modules with most parameters."""
    lists = {
        path: [f"{path}.{number}" for number in range(len(module))]
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module)
    }
    if not lists:
        raise ValueError(f"model is a {type(model).__name__} without an nn.ModuleList of blocks; {_INSTEAD}")
    sizes = {path: sum(p.numel() for p in model.get_submodule(path).parameters()) for path in lists}
    return lists[max(sizes, key=lambda path: sizes[path])]


@contextlib.contextmanager
def _recording(model: nn.Module, blocks: Sequence[str], calls: list[Call]) -> Iterator[None]:
    """Note the calls of the blocks, and after the first of them of all modules that another's forward does not call."""
    open_calls: list[Call] = []
    holders = {".".join(blocks[0].split(".")[:n]) for n in range(len(blocks[0].split(".")))}
    handles = []

    def enter(path: str, args: Any, kwargs: Any) -> None:
        if not open_calls and (calls or path in blocks):
            first = args[0] if args else None
            calls.append(Call(path, args, kwargs, seen=first._version if isinstance(first, torch.Tensor) else 0))
        open_calls.append(calls[-1] if calls else Call(path, args, kwargs))

    def leave(output: Any) -> None:
        call = open_calls.pop()
        if not open_calls:
            call.output = output
            call.version = output._version if isinstance(output, torch.Tensor) else 0

    for path, module in model.named_modules():
        if path not in holders:
            handles.append(
                module.register_forward_pre_hook(lambda _, a, k, path=path: enter(path, a, k), with_kwargs=True)
            )
            handles.append(module.register_forward_hook(lambda _, __, output: leave(output)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _check_link(before: Call, after: Call) -> None:
    others = [*after.args[1:], *after.kwargs.values()]
    if others:
        raise ValueError(
            f"model: {after.path} is given {len(others)} more arguments than what {before.path} returned; {_INSTEAD}"
        )
    if after.args[:1] == () or after.args[0] is not before.output or after.seen != before.version:
        raise ValueError(
            f"model: its forward does something between {before.path} and {after.path}; make that a part of one of "
            f"them, or {_INSTEAD}"
        )
