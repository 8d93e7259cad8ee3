"""A trial run of a model: which of its modules are blocks, what comes after them, and whether they are one row."""

from __future__ import annotations

import contextlib
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

_MAX_TRIED = 4
Further = tuple[tuple[Any, ...], Mapping[str, Any]]
"""What a module is given beside the output of the one before it, by position and by name; the same in every step."""
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


def rows_of_modules(model: nn.Module) -> list[list[str]]:
    """What may be a model's blocks: the members of each list, dict or sequence of modules, the likeliest first.

    Raises:
        ValueError: for a model that has none.
    """
    kinds = (nn.ModuleList, nn.ModuleDict | nn.Sequential)
    found = []
    for kind in kinds:
        there = [(path, m) for path, m in model.named_modules() if path and isinstance(m, kind) and len(m) > 1]
        there.sort(key=lambda pair: -sum(p.numel() for p in pair[1].parameters()))
        found += [[f"{path}.{name}" for name in module._modules] for path, module in there]
    # not the parts of a block: the row would be one block, and all else its first layer
    found = [row for i, row in enumerate(found) if not any(row[0].startswith(f"{_holder(o)}.") for o in found[:i])]
    if not found:
        raise ValueError(
            f"model is a {type(model).__name__} without an nn.ModuleList, nn.ModuleDict or nn.Sequential of blocks; "
            f"{_INSTEAD}"
        )
    return found[:_MAX_TRIED]


def _holder(row: Sequence[str]) -> str:
    return row[0].rpartition(".")[0]


def row_of_modules(
    model: nn.Module, blocks: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[dict[str, Further], Any]:
    """The names of a model's blocks and of the modules after them with their further arguments, and what it returned.

    Each of them but the first takes what the one before it returned, and beside it only buffers of the model, numbers,
    text and None; the last one's output is the model's. What comes before the first block may be anything.

    Raises:
        ValueError: for a model that is not so, with where and what to do.
    """
    calls: list[Call] = []
    with _recording(model, blocks, calls), torch.no_grad():
        output = model(*args, **kwargs)
    if [call.path for call in calls[: len(blocks)]] != list(blocks):
        found = ", ".join(call.path for call in calls[: len(blocks)]) or "none"
        listed = f"{blocks[0]} to {blocks[-1]}"
        raise ValueError(f"model: its blocks are {listed}, and its forward called {found}; {_INSTEAD}")
    for call in calls:
        if not isinstance(call.output, torch.Tensor):
            raise ValueError(f"model: {call.path} returns a {type(call.output).__name__}, not a tensor; {_INSTEAD}")
    buffers = {id(buffer) for buffer in model.buffers()}
    for call, before in zip(calls, [None, *calls], strict=False):
        _check_link(before, call, buffers)
    if calls[-1].output is not output or calls[-1].output._version != calls[-1].version:
        raise ValueError(f"model: its forward does something after {calls[-1].path}; make that a module, or {_INSTEAD}")
    names = [call.path for call in calls]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"model: {twice} is called twice; {_INSTEAD}")
    return {call.path: (call.args[1:], call.kwargs) for call in calls}, output


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


def _check_link(before: Call | None, after: Call, buffers: Container[int]) -> None:
    others = [value for value in (*after.args[1:], *after.kwargs.values()) if not _is_fixed(value, buffers)]
    if others:
        raise ValueError(
            f"model: {after.path} is given {len(others)} more arguments than its input that are no buffers of the "
            f"model; {_INSTEAD}"
        )
    if before is None:
        return
    if after.args[:1] == () or after.args[0] is not before.output or after.seen != before.version:
        raise ValueError(
            f"model: its forward does something between {before.path} and {after.path}; make that a part of one of "
            f"them, or {_INSTEAD}"
        )


def _is_fixed(value: Any, buffers: Container[int]) -> bool:
    """Whether a block gets the same in every step."""
    return id(value) in buffers or value is None or type(value) in (bool, int, float, str)
