"""A model as layers that were recorded from its forward.

Layer 0 is the model's own forward up to its first block. Each later layer calls one block and the functions of torch
that follow it, and passes on what later layers use. `recorder.py` finds the layers; a `RecordedStage` runs consecutive
ones.
"""

from __future__ import annotations

import inspect
import traceback
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import lru_cache, partial
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from torch import fx, nn
from torch.overrides import TorchFunctionMode

from fastpipe.runtime.common import OF_TORCH, children_of, pytree, tensor_leaves, torch_private, version_of
from fastpipe.runtime.model.chain import FULL, LAYERS, WholeNames, accepted_names, attributes_of, recomputed, shallow


class Variable(NamedTuple):
    """A tensor or an integer in a local variable of a forward, when the first block is called.

    Attributes:
        frame: the number of the stack frame, from 0 for the innermost.
        name: the variable's name.
        path: the place of the tensor or integer within the variable's value.
    """

    frame: int
    name: str
    path: str


Position = tuple[int | None, ...]
"""Lines and columns of a call. Instruction offsets would not do: they change when Python specializes the code."""


class FunctionResult(NamedTuple):
    """A tensor that a function of torch returned.

    Attributes:
        calls: the code and the position of each call on the stack, without those in torch, the innermost first.
        number: how many calls of functions with this stack came before, and this one.
        leaf: the number of the tensor among those that the function returned.
    """

    calls: tuple[tuple[CodeType, Position], ...]
    number: int
    leaf: int


Source = int | str | Variable | FunctionResult
"""The source of an input: a leaf of the first block's arguments (its number), a parameter (its name), or a value that
the forward has computed before."""


def module_of(frame: FrameType) -> str:
    """The name of the module of a frame's code; empty for code that was made at run time, without one."""
    return str(frame.f_globals.get("__name__", ""))


@lru_cache(1024)
def _positions(code: CodeType) -> list[Position]:
    """The position of each instruction; an instruction has two bytes."""
    return list(code.co_positions())


class ResultNumbering(TorchFunctionMode):
    """Identifies the tensors that functions of torch return, in the same way in every run of a forward.

    Args:
        caller: the code that calls the forward; calls further out do not count.
        note: called with the identity of each tensor, and the tensor.
    """

    def __init__(self, caller: CodeType, note: Callable[[FunctionResult, torch.Tensor], None]) -> None:
        super().__init__()
        self._caller, self._note = caller, note
        self._counts: Counter[tuple[tuple[CodeType, Position], ...]] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch."""
        value = func(*args, **(kwargs or {}))
        self.number(value)
        return value

    def number(self, value: Any) -> None:
        """Identify the tensors that a function just returned."""
        calls, frame = [], inspect.currentframe()
        while frame is not None and frame.f_code is not self._caller:
            if module_of(frame).partition(".")[0] not in ("torch", "fastpipe"):
                calls.append((frame.f_code, _positions(frame.f_code)[frame.f_lasti // 2]))
            frame = frame.f_back
        key = tuple(calls)
        self._counts[key] += 1
        for leaf, tensor in enumerate(tensor_leaves(value)):
            self._note(FunctionResult(key, self._counts[key], leaf), tensor)


TRAINING = "training"
"""Stands for a module's training mode among the names of buffers: no buffer can have the name of an attribute."""


class RecordedLayer(NamedTuple):
    """A block and the functions that follow it.

    Attributes:
        path: the block's name in the model.
        function: takes a function that calls the block, the values that the previous layer passes on, and buffers.
            Returns a tuple of the values that this layer passes on; the last layer returns the model's output.
        buffers: the names of the model's buffers that ``function`` takes, or `TRAINING`. Each step passes the current
            ones, which may have been loaded or moved.
    """

    path: str
    function: fx.GraphModule
    buffers: Sequence[str]


class RecordedModel(NamedTuple):
    """The layers of a model.

    Attributes:
        first: what layer 0 does once the forward has reached the first block: it computes the inputs of layer 1. A
            module with weights that the forward calls before and after the first block is called in layer 0 only;
            ``function`` calls it by name.
        layers: the later layers, in order. A block without parameters and buffers may be in several layers.
        early: the blocks that are also called before the first block.
        inputs: the sources of the inputs of ``first``.
        given: the arguments of the first block on the example, `without_tensors`; `int` for an integer in ``inputs``.
        buffers: the names of buffers among the leaves of these arguments, by the leaf's number.
        defaults: keyword arguments of the model that a step may omit, with their values.
        read: attributes that the forward changes before the first block and reads after it, with their values on the
            example, `without_tensors`. In a step they must have the same values.
    """

    first: RecordedLayer
    layers: Sequence[RecordedLayer]
    early: Collection[str]
    inputs: Sequence[Source]
    given: Any
    buffers: Mapping[int, str]
    defaults: Mapping[str, Any]
    read: Mapping[str, Any]


def constants_of(model: nn.Module, paths: Iterable[str]) -> dict[str, Any]:
    """The public attributes of modules that are numbers, text or None, without those that every module has."""
    found: dict[str, Any] = {}
    for path in paths:
        own = vars(model.get_submodule(path)).items()
        there = {join(path, name): value for name, value in own if name[0] != "_" and name not in OF_TORCH}
        found |= {n: value for n, value in there.items() if value is None or type(value) in (bool, int, float, str)}
    return found


def _called(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    model(*args, **kwargs)


class RecordedStage(WholeNames):
    """Consecutive layers of a recorded model.

    Args:
        model: the unsplit model; its modules are used, not copied.
        recorded: its layers.
        fixed: arguments of the model that must be as on the example, `without_tensors`.
        constants: attributes of the modules that contain blocks, by name, with their values at the split.
        layers: the numbers of this stage's layers; 0 is the forward up to the first block.
    """

    def __init__(
        self,
        model: nn.Module,
        recorded: RecordedModel,
        fixed: Mapping[str, Any],
        constants: Mapping[str, Any],
        layers: Sequence[int],
    ) -> None:
        super().__init__()
        own = [recorded.layers[layer - 1] for layer in layers if layer]
        begins = 0 in layers
        self._ends = len(recorded.layers) in layers
        names = {layer.path for layer in recorded.layers}
        holders = ancestors_of(names)
        kept = _kept(
            model, "", names, holders, {layer.path for layer in own} | set(recorded.early if begins else ()), begins
        )
        assert kept is not None
        torch_private.share_tensors(self, kept)
        torch_private.set_children(self, children_of(kept))
        # not children: they are submodules already, under the model's names
        self._own = [(model.get_submodule(layer.path), layer) for layer in own]
        copied: list[tuple[nn.Module, nn.Module]] = []
        self._wanted = frozenset(key for key in recorded.inputs if isinstance(key, FunctionResult))
        self._before = (
            [(_before_blocks(model, "", names - set(recorded.early), holders, copied), recorded)] if begins else []
        )
        if begins:
            self.stand_for(model, copied)
            self._signature = inspect.signature(model.forward)
        self._fixed, self._constants = fixed, constants
        taken = {buffer for layer in ([recorded.first] * begins + own) for buffer in layer.buffers}
        self._share_buffers(model, taken - {TRAINING})
        self._share_buffers(model, recorded.buffers.values() if begins else ())
        self._names = accepted_names(model) if begins else frozenset()
        self._recomputes = False

    def accepts(self) -> frozenset[str] | None:
        """The accepted keyword arguments: the model's, before the first block."""
        return self._names

    def recomputes(self, way: str) -> bool:
        """Recompute each block by itself."""
        self._recomputes = way == LAYERS
        return way != FULL

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layers on what the previous layer passes on."""
        values: Any = args
        for model, recorded in self._before:
            values = self._run_before_blocks(model, recorded, args, {**recorded.defaults, **kwargs})
            values = self._run(recorded.first, self._call, values, self)
        for module, layer in self._own:
            call = partial(recomputed, module, module) if self._recomputes else module
            values = self._run(layer, call, values, module)
        is_tensor = not self._ends and len(values) == 1 and isinstance(values[0], torch.Tensor)
        return values[0] if is_tensor else values

    def _run(self, layer: RecordedLayer, call: Callable[..., Any], values: Sequence[Any], module: nn.Module) -> Any:
        # another stage may have moved the model's buffer
        buffers = [
            module.training if name == TRAINING else self.get_buffer(name).to(tensor_leaves(values)[0].device)
            for name in layer.buffers
        ]
        return layer.function.forward(call, *values, *buffers)

    def _call(self, path: str, *args: Any, **kwargs: Any) -> Any:
        return self.get_submodule(path)(*args, **kwargs)

    def _share_buffers(self, model: nn.Module, buffers: Iterable[str]) -> None:
        """Hold the buffers that blocks get as arguments under the model's names, to be loaded and saved."""
        for path in {name.rpartition(".")[0] for name in buffers}:
            holder: nn.Module = self
            for name in path.split(".") if path else ():
                if name not in children_of(holder):
                    holder.add_module(name, nn.Module())
                holder = holder.get_submodule(name)
            torch_private.share_buffers(holder, model.get_submodule(path))

    @torch_private.never_compiled
    def _run_before_blocks(
        self, model: nn.Module, recorded: RecordedModel, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, ...]:
        """Run the forward up to the first block, and find the inputs of ``recorded.first``."""
        self.follow_modes()
        arguments = arguments_of(self._signature, args, kwargs)
        self._check_unchanged(arguments)
        buffers = {i: self.get_buffer(name) for i, name in recorded.buffers.items()}
        versions = list(map(version_of, buffers.values()))
        found: dict[Source, torch.Tensor | int] = {}

        def keep(result: FunctionResult, tensor: torch.Tensor) -> None:
            if result in self._wanted:
                found[result] = tensor

        try:
            with ResultNumbering(_called.__code__, keep) if self._wanted else nullcontext():
                _called(model, args, kwargs)
        except _FirstBlockReached as reached:  # not kept in a variable: its traceback holds all that the forward made
            call = reached.call
            if any(isinstance(key, Variable) for key in recorded.inputs):
                found |= variables_in(_frames_of(reached))
        else:
            raise ValueError("split: the model's forward ended before its first block; pass its layers as a list")
        _check_read(model, recorded)
        leaves = pytree.tree_leaves(call)
        same = _is_like(call, recorded.given) and all(leaves[i] is buffer for i, buffer in buffers.items())
        inputs = [self._input(key, leaves, found) for key in recorded.inputs] if same else []
        if not same or any(
            value is None and not isinstance(key, int) for key, value in zip(recorded.inputs, inputs, strict=False)
        ):
            raise OtherInputsError(
                "split: the model's blocks get other arguments than on the example that it was split with: split the "
                "model with an example like the step's inputs"
            )
        if versions != list(map(version_of, buffers.values())):
            raise ValueError(
                "split: the model's forward writes to a buffer that it gives to its blocks, and other stages may have "
                "their own; make that a part of the blocks, or pass the model's layers as a list"
            )
        return tuple(inputs)

    def _input(self, key: Source, leaves: Sequence[Any], found: Mapping[Source, Any]) -> Any:
        """The value of one input; None if it is not there."""
        if isinstance(key, int):
            return leaves[key]
        # a copy of a parameter: fully_shard frees its memory after the forward
        return self.get_parameter(key).clone() if isinstance(key, str) else found.get(key)

    def _check_unchanged(self, arguments: Mapping[str, Any]) -> None:
        """Refuse arguments and attributes that other stages do not follow and that have changed since the split."""
        for name, known in self._fixed.items():
            if without_tensors(arguments[name]) != known:
                was = repr(known).replace("<class 'torch.Tensor'>", "a tensor")
                raise OtherInputsError(
                    f"{name}: the model was split with an example in which it was {was}, and its layers may not follow "
                    "another value: split the model with an example like the step's inputs, or give it as in the "
                    "example"
                )
        model = self._original()
        if model is None:
            return
        for name, value in self._constants.items():
            path, _, attribute = name.rpartition(".")
            now = getattr(model.get_submodule(path), attribute, value)
            if not _is_same(now, value):
                raise ValueError(
                    f"model: {name} was {value!r} when the model was split and is {now!r} now, and stages keep the "
                    "first value: make it a buffer, an argument of the forward, or an attribute of a block, or split "
                    "the model and build the Pipeline again; keep it elsewhere if the forward does not read it"
                )


def _check_read(model: nn.Module, recorded: RecordedModel) -> None:
    for name, known in recorded.read.items():
        path, _, attribute = name.rpartition(".")
        now = without_tensors(getattr(model.get_submodule(path), attribute, None))
        if now != known:
            raise OtherInputsError(
                f"split: the model's forward changes {name} before its first block and reads it after that, where "
                f"stages keep its value on the example: it was {known!r}, and is {now!r} now; make what reads it a "
                "part of a block, or give it to a block as a tensor"
            )


class OtherInputsError(ValueError):
    """An input of a step differs from the example in a way that the layers do not follow."""


class _FirstBlockReached(BaseException):
    """Ends the model's forward at the first block; has the arguments of its call."""

    def __init__(self, *call: Any) -> None:
        super().__init__()
        self.call = call


def _end(block: nn.Module) -> nn.Module:
    """A replacement of a block: calling it ends the forward, which may use its attributes and methods before."""
    module = nn.Module()
    if not isinstance(block, torch.jit.ScriptModule):
        module.__class__ = type(block)
    vars(module).update(attributes_of(block))
    module.register_forward_pre_hook(_reach, with_kwargs=True)
    return module


def _reach(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    raise _FirstBlockReached(args, kwargs)


def _is_same(found: Any, known: Any) -> bool:
    if isinstance(found, torch.Tensor) or isinstance(known, torch.Tensor):
        return found is known
    return type(found) is type(known) and bool(found == known)


def _kept(
    module: nn.Module, path: str, blocks: Collection[str], holders: Collection[str], own: Collection[str], begins: bool
) -> nn.Module | None:
    """What a stage holds of a module: the module itself, a holder of some of its submodules, or None.

    Args:
        path: the module's name.
        blocks: the names of all blocks.
        holders: the names of the modules that contain them.
        own: the names of the blocks that the stage calls.
        begins: whether the stage has layer 0, and so all modules that are not blocks.
    """
    if path in blocks or path not in holders:
        return module if (path in own if path in blocks else begins) else None
    holder = nn.Module()
    if begins:
        torch_private.share_tensors(holder, module)
    for name, child in children_of(module).items():
        kept = None if child is None else _kept(child, join(path, name), blocks, holders, own, begins)
        if kept is not None:
            holder.add_module(name, kept)
    return holder


def _before_blocks(
    module: nn.Module,
    path: str,
    blocks: Collection[str],
    holders: Collection[str],
    copied: list[tuple[nn.Module, nn.Module]],
) -> nn.Module:
    """A copy of the model whose forward ends where it calls the first block.

    Args:
        copied: the function appends each copy, with its original.
    """
    if path in blocks:
        return _end(module)
    if path not in holders:
        return module
    twin: nn.Module = shallow(module)
    copied.append((twin, module))
    for name, child in children_of(module).items():
        own = None if child is None else _before_blocks(child, join(path, name), blocks, holders, copied)
        children_of(twin)[name] = own
    return twin


def ancestors_of(paths: Iterable[str]) -> set[str]:
    """The names of all modules that contain these."""
    parts = [name.split(".") for name in paths]
    return {".".join(names[:n]) for names in parts for n in range(len(names))}


def join(path: str, name: str) -> str:
    """The name of a part of a module."""
    return f"{path}.{name}" if path else name


def _frames_of(reached: _FirstBlockReached) -> list[FrameType]:
    """The frames from the call of the first block out to that of the model."""
    return [frame for frame, _ in traceback.walk_tb(reached.__traceback__)][:0:-1]


def variables_in(frames: Iterable[FrameType]) -> dict[Source, torch.Tensor | int]:
    """The tensors and integers in local variables, without parameters.

    Args:
        frames: the stack of the first block's call, the innermost first.
    """
    found: dict[Source, torch.Tensor | int] = {}
    ours = {nn.Module.__module__, __name__}
    for number, frame in enumerate(frame for frame in frames if module_of(frame) not in ours):
        for name, value in frame.f_locals.items():
            for path, leaf in _leaves_of(value):
                if isinstance(leaf, torch.Tensor | int) and not isinstance(leaf, nn.Parameter | bool):
                    found[Variable(number, name, path)] = leaf
    return found


def _leaves_of(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of a value with their paths. A path has the length of each list, as that may be the batch size."""
    if isinstance(value, dict):
        for key, part in value.items():
            yield from _leaves_of(part, f"{path}[{key!r}]")
    elif type(value) in (list, tuple):
        for i, part in enumerate(value):
            yield from _leaves_of(part, f"{path}[{i} of {len(value)}]")
    else:
        for keys, leaf in pytree.tree_leaves_with_path(value):
            yield path + pytree.keystr(keys), leaf


def arguments_of(signature: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a forward by name, with defaults."""
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments


def without_tensors(value: Any) -> Any:
    """An argument for comparison with the example's: tensors and other objects are replaced by their types."""
    plain = (bool, int, float, str, torch.dtype, torch.device)

    def kept(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return torch.Tensor
        return leaf if leaf is None or leaf is int or type(leaf) in plain else type(leaf)

    return pytree.tree_map(kept, value)


def _is_like(value: Any, known: Any) -> bool:
    """Whether an argument is as on the example, which is given `without_tensors`.

    Integers may differ where the example has `int`. None may take the place of a tensor: a block checks that itself.
    """

    def kept(own: Any, known: Any) -> Any:
        is_free = (known is int and type(own) is int) or (known is torch.Tensor and own is None)
        return known if is_free else own

    try:
        return bool(pytree.tree_map(kept, without_tensors(value), known) == known)
    except ValueError:  # other keys or lengths
        return False


def check_same(value: Any, known: Any, where: str) -> None:
    """Refuse a value other than on the example, since the model's forward may branch on it.

    Raises:
        OtherInputsError: if it differs.
    """
    if value != known:
        raise OtherInputsError(
            f"split: in {where} the model's forward may decide by a value that was {known} on the example, and is "
            f"{value} now: split the model with an example like the step's inputs"
        )
