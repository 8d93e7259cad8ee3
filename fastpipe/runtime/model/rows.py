"""A model as a row of layers: each a module and the functions that follow it, and passing on what later ones use.

`row_graph.py` finds them; a `RowStage` runs consecutive ones.
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
    """A tensor or an integer in a variable of a forward.

    Attributes:
        frame: the frame's number, from 0 for the innermost.
        name: of the variable.
        path: of the tensor or integer in it.
    """

    frame: int
    name: str
    path: str


Place = tuple[int | None, ...]
"""Lines and columns: Python calls from another instruction of the same place once it has specialized code."""


class Result(NamedTuple):
    """A tensor that a function of torch returned.

    Attributes:
        calls: the code, and the place in it, of each call that led to it, but for torch's, the innermost first.
        number: how many functions these had called before.
        leaf: its number among the tensors that the function returned.
    """

    calls: tuple[tuple[CodeType, Place], ...]
    number: int
    leaf: int


Source = int | str | Variable | Result
"""Where an input of a row is from: a leaf of the first block's arguments, a parameter, or a value of the forward."""


def module_of(frame: FrameType) -> str:
    """The name of the module of a frame's code; empty for code that was made at run time, without one."""
    return str(frame.f_globals.get("__name__", ""))


@lru_cache(1024)
def _places(code: CodeType) -> list[Place]:
    """The place of each instruction, of two bytes."""
    return list(code.co_positions())


class Results(TorchFunctionMode):
    """Numbers what functions of torch return while the forward called by ``caller`` runs.

    Args:
        note: called with the number of each tensor, and the tensor.
    """

    def __init__(self, caller: CodeType, note: Callable[[Result, torch.Tensor], None]) -> None:
        super().__init__()
        self._caller, self._note = caller, note
        self._counts: Counter[tuple[tuple[CodeType, Place], ...]] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch."""
        value = func(*args, **(kwargs or {}))
        self.number(value)
        return value

    def number(self, value: Any) -> None:
        """Number the tensors that a function just returned."""
        calls, frame = [], inspect.currentframe()
        while frame is not None and frame.f_code is not self._caller:
            if module_of(frame).partition(".")[0] not in ("torch", "fastpipe"):
                calls.append((frame.f_code, _places(frame.f_code)[frame.f_lasti // 2]))
            frame = frame.f_back
        key = tuple(calls)
        self._counts[key] += 1
        for leaf, tensor in enumerate(tensor_leaves(value)):
            self._note(Result(key, self._counts[key], leaf), tensor)


TRAINING = "training"
"""Takes the place of a buffer's name. No buffer has it, as modules have an attribute of this name."""


class RowLayer(NamedTuple):
    """A module and the functions that follow it.

    Attributes:
        path: the module's name in the model.
        function: takes what calls the module, the values that the previous layer passes on, and buffers; returns a
            tuple of the values that this one passes on, or the model's output.
        buffers: the names of the model's buffers that it takes. A step passes those that are there, which may have been
            loaded or moved; for `TRAINING` the mode of the module.
    """

    path: str
    function: fx.GraphModule
    buffers: Sequence[str]


class Row(NamedTuple):
    """A model from its first block on.

    Attributes:
        first: what layer 0 does after the model's forward: it gives the inputs to the next layer, and calls modules
            with weights again that it has called; ``function`` calls them by name.
        layers: in order. A module without parameters and buffers may be in several, and precede the first.
        early: modules of layers that precede the first, too.
        inputs: of ``first``.
        given: the first block's arguments `without_tensors`; `int` for an integer that inputs have.
        buffers: the names of those among their leaves, by number.
        defaults: keyword arguments of the model that a step need not have.
        read: attributes, by name and `without_tensors`, that the forward changes before the first block and reads after
            it: a step must have the same ones.
    """

    first: RowLayer
    layers: Sequence[RowLayer]
    early: Collection[str]
    inputs: Sequence[Source]
    given: Any
    buffers: Mapping[int, str]
    defaults: Mapping[str, Any]
    read: Mapping[str, Any]


def constants_of(model: nn.Module, paths: Iterable[str]) -> dict[str, Any]:
    """The public attributes of modules that are numbers, text or None, but for those that every module has."""
    found: dict[str, Any] = {}
    for path in paths:
        own = vars(model.get_submodule(path)).items()
        there = {join(path, name): value for name, value in own if name[0] != "_" and name not in OF_TORCH}
        found |= {n: value for n, value in there.items() if value is None or type(value) in (bool, int, float, str)}
    return found


def _called(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    model(*args, **kwargs)


class RowStage(WholeNames):
    """Consecutive layers of a model with a row of modules.

    Args:
        model: the unsplit model; its modules are used, not copied.
        row: its layers.
        fixed: the arguments of the model that must be as on the example, without tensors.
        constants: the attributes, by name, that modules on the way to the row had at the split.
        layers: 0 for the model's forward up to the row, whose layers count from 1.
    """

    def __init__(
        self,
        model: nn.Module,
        row: Row,
        fixed: Mapping[str, Any],
        constants: Mapping[str, Any],
        layers: Sequence[int],
    ) -> None:
        super().__init__()
        own = [row.layers[layer - 1] for layer in layers if layer]
        begins = 0 in layers
        self._ends = len(row.layers) in layers
        names = {layer.path for layer in row.layers}
        holders = holders_of(names)
        kept = _kept(
            model, "", names, holders, {layer.path for layer in own} | set(row.early if begins else ()), begins
        )
        assert kept is not None
        torch_private.share_tensors(self, kept)
        torch_private.set_children(self, children_of(kept))
        # not children: they are submodules already, under the model's names
        self._own = [(model.get_submodule(layer.path), layer) for layer in own]
        copied: list[tuple[nn.Module, nn.Module]] = []
        self._wanted = frozenset(key for key in row.inputs if isinstance(key, Result))
        self._before = [(_before_row(model, "", names - set(row.early), holders, copied), row)] if begins else []
        if begins:
            self.stand_for(model, copied)
            self._signature = inspect.signature(model.forward)
        self._fixed, self._constants = fixed, constants
        taken = {buffer for layer in ([row.first] * begins + own) for buffer in layer.buffers}
        self._share_buffers(model, taken - {TRAINING})
        self._share_buffers(model, row.buffers.values() if begins else ())
        self._names = accepted_names(model) if begins else frozenset()
        self._recomputes = False

    def accepts(self) -> frozenset[str] | None:
        """The accepted keyword arguments: the model's, before the row."""
        return self._names

    def recomputes(self, way: str) -> bool:
        """Recompute each module of the row by itself."""
        self._recomputes = way == LAYERS
        return way != FULL

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layers on what the previous layer passes on."""
        values: Any = args
        for model, row in self._before:
            values = self._run_before(model, row, args, {**row.defaults, **kwargs})
            values = self._run(row.first, self._call, values, self)
        for module, layer in self._own:
            call = partial(recomputed, module, module) if self._recomputes else module
            values = self._run(layer, call, values, module)
        is_tensor = not self._ends and len(values) == 1 and isinstance(values[0], torch.Tensor)
        return values[0] if is_tensor else values

    def _run(self, layer: RowLayer, call: Callable[..., Any], values: Sequence[Any], module: nn.Module) -> Any:
        # another stage may have moved the model's buffer
        buffers = [
            module.training if name == TRAINING else self.get_buffer(name).to(tensor_leaves(values)[0].device)
            for name in layer.buffers
        ]
        return layer.function.forward(call, *values, *buffers)

    def _call(self, path: str, *args: Any, **kwargs: Any) -> Any:
        return self.get_submodule(path)(*args, **kwargs)

    def _share_buffers(self, model: nn.Module, buffers: Iterable[str]) -> None:
        """Hold buffers that modules get, under the model's names: they are loaded and saved with this stage."""
        for path in {name.rpartition(".")[0] for name in buffers}:
            holder: nn.Module = self
            for name in path.split(".") if path else ():
                if name not in children_of(holder):
                    holder.add_module(name, nn.Module())
                holder = holder.get_submodule(name)
            torch_private.share_buffers(holder, model.get_submodule(path))

    @torch_private.never_compiled
    def _run_before(self, model: nn.Module, row: Row, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """The inputs of the first layer of the row."""
        self.follow_modes()
        arguments = arguments_of(self._signature, args, kwargs)
        self._check_unchanged(arguments)
        buffers = {i: self.get_buffer(name) for i, name in row.buffers.items()}
        versions = list(map(version_of, buffers.values()))
        found: dict[Source, torch.Tensor | int] = {}

        def keep(result: Result, tensor: torch.Tensor) -> None:
            if result in self._wanted:
                found[result] = tensor

        try:
            with Results(_called.__code__, keep) if self._wanted else nullcontext():
                _called(model, args, kwargs)
        except _Reached as reached:  # itself not kept: its traceback has this frame, and holds what the forward made
            call = reached.call
            if any(isinstance(key, Variable) for key in row.inputs):
                found |= variables_in(_frames_of(reached))
        else:
            raise ValueError("split: the model's forward ended before its first block; pass its layers as a list")
        _check_read(model, row)
        leaves = pytree.tree_leaves(call)
        same = _is_like(call, row.given) and all(leaves[i] is buffer for i, buffer in buffers.items())
        inputs = [self._input(key, leaves, found) for key in row.inputs] if same else []
        if not same or any(
            value is None and not isinstance(key, int) for key, value in zip(row.inputs, inputs, strict=False)
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
        """One of a row's inputs."""
        if isinstance(key, int):
            return leaves[key]
        # a copy of a parameter: fully_shard frees its memory after the forward
        return self.get_parameter(key).clone() if isinstance(key, str) else found.get(key)

    def _check_unchanged(self, arguments: Mapping[str, Any]) -> None:
        """Refuse values that other stages do not follow: of arguments, and of attributes changed since the split."""
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


def _check_read(model: nn.Module, row: Row) -> None:
    for name, known in row.read.items():
        path, _, attribute = name.rpartition(".")
        now = without_tensors(getattr(model.get_submodule(path), attribute, None))
        if now != known:
            raise OtherInputsError(
                f"split: the model's forward changes {name} before its first block and reads it after that, where "
                f"stages keep its value on the example: it was {known!r}, and is {now!r} now; make what reads it a "
                "part of a block, or give it to a block as a tensor"
            )


class OtherInputsError(ValueError):
    """The input of a step is not as the example."""


class _Reached(BaseException):
    """Raised when the model's forward reaches the row, with the arguments of the first block."""

    def __init__(self, *call: Any) -> None:
        super().__init__()
        self.call = call


def _end(block: nn.Module) -> nn.Module:
    """Replaces a module of the row, to end the model's forward, which may use its attributes and methods before."""
    module = nn.Module()
    if not isinstance(block, torch.jit.ScriptModule):
        module.__class__ = type(block)
    vars(module).update(attributes_of(block))
    module.register_forward_pre_hook(_reach, with_kwargs=True)
    return module


def _reach(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    raise _Reached(args, kwargs)


def _is_same(found: Any, known: Any) -> bool:
    if isinstance(found, torch.Tensor) or isinstance(known, torch.Tensor):
        return found is known
    return type(found) is type(known) and bool(found == known)


def _kept(
    module: nn.Module, path: str, row: Collection[str], holders: Collection[str], own: Collection[str], begins: bool
) -> nn.Module | None:
    """A stage's part of a module: all, some submodules under the same names, or None."""
    if path in row or path not in holders:
        return module if (path in own if path in row else begins) else None
    holder = nn.Module()
    if begins:
        torch_private.share_tensors(holder, module)
    for name, child in children_of(module).items():
        kept = None if child is None else _kept(child, join(path, name), row, holders, own, begins)
        if kept is not None:
            holder.add_module(name, kept)
    return holder


def _before_row(
    module: nn.Module,
    path: str,
    row: Collection[str],
    holders: Collection[str],
    copied: list[tuple[nn.Module, nn.Module]],
) -> nn.Module:
    """A copy of the model without its row, which ends where the row begins.

    Args:
        copied: gets the copies of modules, and these.
    """
    if path in row:
        return _end(module)
    if path not in holders:
        return module
    twin: nn.Module = shallow(module)
    copied.append((twin, module))
    for name, child in children_of(module).items():
        own = None if child is None else _before_row(child, join(path, name), row, holders, copied)
        children_of(twin)[name] = own
    return twin


def holders_of(row: Iterable[str]) -> set[str]:
    """The modules that contain those of a row."""
    parts = [name.split(".") for name in row]
    return {".".join(names[:n]) for names in parts for n in range(len(names))}


def join(path: str, name: str) -> str:
    """The name of a part of a module."""
    return f"{path}.{name}" if path else name


def _frames_of(reached: _Reached) -> list[FrameType]:
    """The frames from the call of the first block out to that of the model."""
    return [frame for frame, _ in traceback.walk_tb(reached.__traceback__)][:0:-1]


def variables_in(frames: Iterable[FrameType]) -> dict[Source, torch.Tensor | int]:
    """The tensors, but for parameters, and the integers in the variables of forwards.

    Args:
        frames: of calls that lead to a module of the row, the innermost first.
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
    """The leaves of a value, with paths that have the lengths of lists, which may be of the rows of a batch."""
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
    """What of an argument must be as on the example: numbers and text, and where it has tensors and other objects."""
    plain = (bool, int, float, str, torch.dtype, torch.device)

    def kept(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return torch.Tensor
        return leaf if leaf is None or leaf is int or type(leaf) in plain else type(leaf)

    return pytree.tree_map(kept, value)


def _is_like(value: Any, known: Any) -> bool:
    """Whether an argument `without_tensors` is as on the example. A block finds by itself that a tensor is None."""

    def kept(own: Any, known: Any) -> Any:
        is_free = (known is int and type(own) is int) or (known is torch.Tensor and own is None)
        return known if is_free else own

    try:
        return bool(pytree.tree_map(kept, without_tensors(value), known) == known)
    except ValueError:  # other keys or lengths
        return False


def check_same(value: Any, known: Any, where: str) -> None:
    """Refuse another value than on the example, by which a model's forward may decide what it does.

    Raises:
        OtherInputsError: if it differs.
    """
    if value != known:
        raise OtherInputsError(
            f"split: in {where} the model's forward may decide by a value that was {known} on the example, and is "
            f"{value} now: split the model with an example like the step's inputs"
        )
