"""Layers of a model with a list of blocks: what precedes the blocks, every block, and every later module.

A run on an example finds the blocks and the later modules, and checks that each feeds the next.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fastpipe.runtime.common import children_of, torch_private, version_of
from fastpipe.runtime.model import WholeNames, accepted_names, shallow

_MAX_TRIED = 4
Further = tuple[tuple[Any, ...], Mapping[str, Any]]
"""Arguments of a module beside the previous one's output, by position and by name; equal in every step, and a `Buffer`
in place of one of the model's."""
_INSTEAD = "pass the model's layers as a list, each of which takes what the one before it returns"


@dataclass(frozen=True)
class Buffer:
    """A buffer of the model, by name: a step passes the one that is there, which may have been loaded or moved."""

    name: str


@dataclass
class Call:
    """One call of a module.

    Attributes:
        version: of the output; grows with changes in place.
        seen: version of the first argument at the call.
    """

    path: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    output: Any = None
    version: int = 0
    seen: int = 0


def rows_of_modules(model: nn.Module) -> list[list[str]]:
    """Candidates for a model's blocks: the members of each list, dict or sequence of modules, the most likely first.

    Raises:
        ValueError: if the model has none.
    """
    kinds = (nn.ModuleList, nn.ModuleDict | nn.Sequential)
    found = []
    for kind in kinds:
        there = [(path, m) for path, m in model.named_modules() if path and isinstance(m, kind) and len(m) > 1]
        there.sort(key=lambda pair: -sum(p.numel() for p in pair[1].parameters()))
        found += [[f"{path}.{name}" for name in children_of(module)] for path, module in there]
    # leave out submodules of blocks: the row would be one block, and its first layer the rest of the model
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
    """The names of a model's blocks and of the later modules with their further arguments, and the model's output.

    Each but the first takes the output of the one before it, and further only buffers of the model, numbers, text and
    None. The last output is the model's. Anything may precede the first block.

    Raises:
        ValueError: if the model differs, with the place and a remedy.
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
    buffers = {id(buffer): Buffer(name) for name, buffer in model.named_buffers()}
    for call, before in zip(calls, [None, *calls], strict=False):
        _check_link(before, call, buffers)
    if calls[-1].output is not output or version_of(calls[-1].output) != calls[-1].version:
        raise ValueError(f"model: its forward does something after {calls[-1].path}; make that a module, or {_INSTEAD}")
    names = [call.path for call in calls]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"model: {twice} is called twice; {_INSTEAD}")
    return {call.path: _by_name(call, buffers) for call in calls}, output


def _by_name(call: Call, buffers: Mapping[int, Buffer]) -> Further:
    args, kwargs = call.args[1:], call.kwargs
    return tuple(buffers.get(id(a), a) for a in args), {name: buffers.get(id(a), a) for name, a in kwargs.items()}


@contextlib.contextmanager
def _recording(model: nn.Module, blocks: Sequence[str], calls: list[Call]) -> Iterator[None]:
    """Record the calls of the blocks, and after the first block all outermost calls of modules."""
    open_calls: list[Call] = []
    holders = {".".join(blocks[0].split(".")[:n]) for n in range(len(blocks[0].split(".")))}
    handles = []

    def enter(path: str, args: Any, kwargs: Any) -> None:
        if not open_calls and (calls or path in blocks):
            first = args[0] if args else None
            calls.append(Call(path, args, kwargs, seen=version_of(first) if isinstance(first, torch.Tensor) else 0))
        open_calls.append(calls[-1] if calls else Call(path, args, kwargs))

    def leave(output: Any) -> None:
        call = open_calls.pop()
        if not open_calls:
            call.output = output
            call.version = version_of(output) if isinstance(output, torch.Tensor) else 0

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
            f"model: {after.path} gets {len(others)} more arguments than its input that are not buffers of the "
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
    """Whether an argument is the same in every step."""
    return id(value) in buffers or value is None or type(value) in (bool, int, float, str)


class RowStage(WholeNames):
    """Consecutive layers of a model with a row of modules.

    Args:
        model: the unsplit model; its modules are used, not copied.
        given: the names of the modules in the row, with their further arguments.
        layers: 0 for the model's forward up to the row, whose modules count from 1.
    """

    def __init__(self, model: nn.Module, given: Mapping[str, Further], layers: Sequence[int]) -> None:
        super().__init__()
        row = list(given)
        own = [row[layer - 1] for layer in layers if layer]
        begins = 0 in layers
        kept = _kept(model, "", row, own, begins)
        assert kept is not None
        torch_private.share_tensors(self, kept)
        torch_private.set_children(self, children_of(kept))
        # not children: they are submodules already, under the model's names
        self._own = [(model.get_submodule(path), given[path]) for path in own]
        self._before = [(_before_row(model, "", given), given[row[0]])] if begins else []
        for _, further in (*self._own, *self._before):
            self._share_buffers(model, further)
        self._names = accepted_names(model) if begins else frozenset()

    def accepts(self) -> frozenset[str] | None:
        """The accepted keyword arguments: the model's, before the row."""
        return self._names

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layers on the output of the previous layer."""
        value = args[0] if args else None
        for model, further in self._before:
            value = self._run_before(model, further, args, kwargs)
        for module, further in self._own:
            others, named = self._present(further)
            # another stage may have moved the model's buffer
            others = tuple(_on_device_of(value, other) for other in others)
            value = module(value, *others, **{name: _on_device_of(value, other) for name, other in named.items()})
        return value

    def _share_buffers(self, model: nn.Module, further: Further) -> None:
        """Hold the buffers that a module gets, under the model's names: they are loaded and saved with this stage."""
        args, kwargs = further
        for path in {_path_of(value) for value in (*args, *kwargs.values()) if isinstance(value, Buffer)}:
            holder: nn.Module = self
            for name in path.split(".") if path else ():
                if name not in children_of(holder):
                    holder.add_module(name, nn.Module())
                holder = holder.get_submodule(name)
            torch_private.share_buffers(holder, model.get_submodule(path))

    def _present(self, further: Further) -> Further:
        """Further arguments, with the buffers that are there now."""
        args, kwargs = further
        return tuple(map(self._value_of, args)), {name: self._value_of(value) for name, value in kwargs.items()}

    def _value_of(self, value: Any) -> Any:
        return self.get_buffer(value.name) if isinstance(value, Buffer) else value

    def _run_before(self, model: nn.Module, further: Further, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        _set_training(model, self.training)
        others, named = self._present(further)
        versions = [version_of(value) for value in (*others, *named.values()) if isinstance(value, torch.Tensor)]
        try:
            model(*args, **kwargs)
        except _Reached as reached:  # itself not kept: its traceback has this frame, and holds what the forward made
            value, found, found_named = reached.call
        else:
            raise ValueError("split: the model's forward ended before its first block; pass its layers as a list")
        pairs = [*zip(found, others, strict=False), *((a, named.get(name)) for name, a in found_named.items())]
        same = len(found) == len(others) and found_named.keys() == named.keys()
        if not same or not all(_is_same(a, b) for a, b in pairs):
            raise ValueError(
                "split: the model's blocks get other arguments than on the example that it was split with; give these "
                "in the example, too"
            )
        if versions != [version_of(value) for value in (*others, *named.values()) if isinstance(value, torch.Tensor)]:
            raise ValueError(
                "split: the model's forward writes to a buffer that it gives to its blocks, and other stages may have "
                "their own; make that a part of the blocks, or pass the model's layers as a list"
            )
        return value


class _Reached(BaseException):
    """Raised when the model's forward reaches the row, with the input and the further arguments there."""

    def __init__(self, *call: Any) -> None:
        super().__init__()
        self.call = call


class _End(nn.Module):
    """Replaces a module of the row, to end the model's forward."""

    def forward(self, value: Any, *args: Any, **kwargs: Any) -> Any:
        """End the model's forward."""
        raise _Reached(value, args, kwargs)


def _is_same(found: Any, known: Any) -> bool:
    if isinstance(found, torch.Tensor) or isinstance(known, torch.Tensor):
        return found is known
    return type(found) is type(known) and bool(found == known)


def _path_of(buffer: Buffer) -> str:
    return buffer.name.rpartition(".")[0]


def _on_device_of(value: Any, other: Any) -> Any:
    return other.to(value.device) if isinstance(other, torch.Tensor) else other


def _holds(path: str, row: Collection[str]) -> bool:
    return not path or any(name.startswith(f"{path}.") for name in row)


def _kept(module: nn.Module, path: str, row: Collection[str], own: Sequence[str], begins: bool) -> nn.Module | None:
    """A stage's part of a module: all, some submodules under the same names, or None."""
    if path in row or not _holds(path, row):
        return module if (path in own if path in row else begins) else None
    holder = nn.Module()
    if begins:
        torch_private.share_tensors(holder, module)
    for name, child in children_of(module).items():
        kept = child and _kept(child, _join(path, name), row, own, begins)
        if kept is not None:
            holder.add_module(name, kept)
    return holder


def _before_row(module: nn.Module, path: str, row: Mapping[str, Further]) -> nn.Module:
    """A copy of the model without its row, which ends where the row begins."""
    if path in row:
        return _End()
    if not _holds(path, row):
        return module
    twin: nn.Module = shallow(module)
    for name, child in children_of(module).items():
        children_of(twin)[name] = child and _before_row(child, _join(path, name), row)
    return twin


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _set_training(model: nn.Module, mode: bool) -> None:
    """Set the mode of the modules around the row; all others are children of the stage."""
    if model.training != mode:
        model.train(mode)
