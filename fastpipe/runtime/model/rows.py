"""A model's row of modules: its blocks, and the later modules.

A run on an example finds them, and what each gets beside the output of the one before it; a second run traces the
functions between them. A `RowStage` runs consecutive ones.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import fx, nn
from torch.overrides import TorchFunctionMode

from fastpipe.runtime.common import children_of, first_line, pytree, tensor_leaves, torch_private, version_of
from fastpipe.runtime.model.chain import FULL, LAYERS, WholeNames, accepted_names, attributes_of, recomputed, shallow
from fastpipe.runtime.model.hugging_face import INSTEAD

_MAX_TRIED = 4


class Further(NamedTuple):
    """What a module gets beside the previous one's output; equal in every step.

    Attributes:
        args, kwargs: further arguments, with a `Buffer` in place of one of the model's, and a `Shared` in place of what
            the first block gets, too.
        after: what the model's forward makes of the module's output before it passes it on, such as a pooling; None if
            nothing.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    after: fx.GraphModule | None = None

    def values(self) -> list[Any]:
        """All further arguments."""
        return [*self.args, *self.kwargs.values()]

    def shared(self) -> list[int | str]:
        """Which of the first block's arguments are among them."""
        return [value.key for value in self.values() if isinstance(value, Shared)]


@dataclass(frozen=True)
class Buffer:
    """A buffer of the model, by name: a step passes the one that is there, which may have been loaded or moved."""

    name: str


@dataclass(frozen=True)
class Shared:
    """An argument of the first block, by position or name, that others get, too: stages pass it on."""

    key: int | str


@dataclass
class Call:
    """One call of a module.

    Attributes:
        version: of the output, if it is a tensor; grows with changes in place.
        versions: of all tensors among the arguments at the call, by id.
        has_grad: whether gradients were on at the call.
        function: what the forward does with the output, if that was traced.
    """

    path: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    output: Any = None
    version: int = 0
    has_grad: bool = True
    function: Function | None = None

    def __post_init__(self) -> None:
        self.versions = {id(tensor): version_of(tensor) for tensor in tensor_leaves((self.args, self.kwargs))}


class Function(fx.Tracer):
    """What a forward does with the output of a module, up to the next one, traced as a function of that alone.

    Args:
        value: the output.

    Attributes:
        stand_in: for the forward in place of the output.
        module: the function; None if the output is passed on as it is.
    """

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.graph, self.root = fx.Graph(), nn.Module()
        self.module: fx.GraphModule | None = None
        self._value, self._mode = value, _mode_of(value)
        self.stand_in = self.create_proxy("placeholder", "value", (), {})

    def create_arg(self, a: Any) -> Any:
        """Refuse tensors, which torch.fx would keep as constants, and values of other functions."""
        if isinstance(a, torch.Tensor):
            raise TypeError(
                "it uses another tensor; a parameter belongs in a module, that of a tied head in an nn.Linear"
            )
        if isinstance(a, fx.Proxy) and a.tracer is not self:
            raise TypeError("it uses the output of an earlier module")
        return super().create_arg(a)

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        """Refuse calls in a context, which torch.fx does not record."""
        if _mode_of(self._value) != self._mode:
            raise TypeError("it has a no_grad or an autocast of its own")
        return super().create_node(*args, **kwargs)

    def end(self, result: Any) -> torch.Tensor:
        """The value of the result, with which the function ends."""
        if not isinstance(result, fx.Proxy):
            raise TypeError(f"it makes a {type(result).__name__}")
        if result.tracer is not self:
            raise TypeError("it uses the output of an earlier module")
        value = self._value
        if len(self.graph.nodes) > 1:
            self.graph.output(result.node)
            self.module = fx.GraphModule(self.root, self.graph)
            value = self.module(value)
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"it makes a {type(value).__name__}")
        return value


def _mode_of(value: Any) -> list[bool]:
    devices = {tensor.device.type for tensor in tensor_leaves(value)}
    return [torch.is_grad_enabled(), *map(torch.is_autocast_enabled, sorted(devices))]


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
    holders = [f"{row[0].rpartition('.')[0]}." for row in found]
    found = [row for i, row in enumerate(found) if not row[0].startswith(tuple(holders[:i]))]
    if not found:
        raise ValueError(
            f"model is a {type(model).__name__} without an nn.ModuleList, nn.ModuleDict or nn.Sequential of blocks; "
            f"{INSTEAD}"
        )
    return found[:_MAX_TRIED]


def row_of_modules(
    model: nn.Module, blocks: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Further]:
    """The names of a model's blocks and of the later modules, with their further arguments.

    Each but the first takes the output of the one before it, or a function of it, and further only buffers of the
    model, what the first block gets, numbers, text and None. The model's output is the last one, or a function of it.
    Anything may precede the first block.

    Raises:
        ValueError: if the model differs, with the place and a remedy.
    """
    recording = _Recording(model, blocks)
    output, calls = recording.run(args, kwargs), recording.calls
    names = [call.path for call in calls]
    if names[: len(blocks)] != list(blocks):
        found = ", ".join(names[: len(blocks)]) or "none"
        listed = f"{blocks[0]} to {blocks[-1]}"
        raise ValueError(f"model: its blocks are {listed}, and its forward called {found}; {INSTEAD}")
    row = _row_by_name(model, calls)
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"model: {twice} is called twice; {INSTEAD}")
    changed = recording.changed()
    if changed:
        raise ValueError(
            f"model: its forward changes {changed[0]} after its first block, which no stage would; let a module of its "
            f"own do that, {INSTEAD}"
        )
    if not all(call.has_grad for call in calls):
        _check_gradients(model, blocks, args, kwargs)
    is_fed = all(map(_is_fed, calls, [*calls[1:], Call("", (output,), {})])) and not recording.reads_values
    try:  # in any case, as a function may return its input on the example only, such as .float()
        return _row_by_name(model, _traced(model, blocks, args, kwargs, names))
    except ValueError:
        if not is_fed:
            raise
    return row


def _traced(
    model: nn.Module, blocks: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any], names: Sequence[str]
) -> list[Call]:
    """The calls of another run, with what the forward does after each."""
    recording = _Recording(model, blocks, traces=True)
    calls = recording.calls
    try:
        _concrete(calls, (recording.run(args, kwargs),))
    except Exception as error:  # of the model's code, which gets proxies
        at = len(calls) - 1
        place = f"between {names[at]} and {names[at + 1]}" if at + 1 < len(names) else f"after {names[-1]}"
        loss = "" if at + 1 < len(names) else "; a loss is computed by Pipeline(loss_fn=)"
        raise ValueError(
            f"model: its forward does something {place} that torch.fx cannot trace as a function from tensor to tensor "
            f"({first_line(error)}){loss}; make that a module, or a part of one, {INSTEAD}"
        ) from error
    return calls


def _concrete(calls: Sequence[Call], args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments of the next module, with the tensor for which the first one stands in."""
    function = calls[-1].function if calls else None
    return args if function is None else (function.end(args[0] if args else None), *args[1:])


def _check_gradients(model: nn.Module, blocks: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Refuse a forward that trains nothing in a block, by no_grad around it, where the block as a layer is trained.

    In a reentrant checkpoint gradients are off, too, and its output requires one all the same.
    """
    recording = _Recording(model, blocks, keeps_graph=True)
    recording.run(args, kwargs)
    for call in recording.calls:
        given = [value for value in call.args[:1] if isinstance(value, torch.Tensor)]
        is_trained = any(tensor.requires_grad for tensor in (*given, *model.get_submodule(call.path).parameters()))
        has_grad = call.has_grad or any(tensor.requires_grad for tensor in tensor_leaves(call.output))
        if is_trained and not has_grad:
            raise ValueError(
                f"model: its forward runs {call.path} without gradients (in torch.no_grad(), say), and as a layer it "
                "would have them: freeze its parameters, and those before it, by requires_grad_(False)"
            )


def _row_by_name(model: nn.Module, calls: Sequence[Call]) -> dict[str, Further]:
    """The further arguments of each call, by its path: equal in every step, or the first block's."""
    first, *_ = calls
    given: dict[int | str, Any] = dict(enumerate(first.args[1:], 1)) | dict(first.kwargs)
    known: dict[int, Any] = {id(v): Shared(key) for key, v in given.items() if isinstance(v, torch.Tensor | tuple)}
    known |= {id(buffer): Buffer(name) for name, buffer in model.named_buffers()}
    shared = [value for value in given.values() if isinstance(known.get(id(value)), Shared)]
    if any(first.versions[id(tensor)] != version_of(tensor) for tensor in tensor_leaves(shared)):
        raise ValueError(f"model: its blocks change an argument beside their input in place; {INSTEAD}")
    row = {}
    for call in calls:
        values = [*call.args[1:], *call.kwargs.values()]
        others = [v for v in values if not (id(v) in known or v is None or type(v) in (bool, int, float, str))]
        if others:
            raise ValueError(
                f"model: {call.path} gets {len(others)} more arguments than its input that are not buffers of the "
                f"model, nor arguments of the first block; {INSTEAD}"
            )
        args = tuple(known.get(id(a), a) for a in call.args[1:])
        after = None if call.function is None else call.function.module
        row[call.path] = Further(args, {name: known.get(id(a), a) for name, a in call.kwargs.items()}, after)
    return row


class _Recording(TorchFunctionMode):
    """Records the calls of the blocks, and after the first block all outermost calls of modules.

    Without ``keeps_graph`` gradients are off within modules, as activations of the whole model may not fit.

    Args:
        traces: the calls get a `Function`, as the model's forward gets proxies in place of the outputs.

    Attributes:
        calls: of `run`.
        reads_values: whether the forward reads values of tensors after the first block, between modules.
    """

    def __init__(
        self, model: nn.Module, blocks: Sequence[str], *, keeps_graph: bool = False, traces: bool = False
    ) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.reads_values = False
        self._model, self._blocks, self._keeps_graph, self._traces = model, blocks, keeps_graph, traces
        self._entered = holders_of(blocks[:1]) | _later_rows(model, blocks)
        self._open: list[Call] = []
        self._is_between = False
        self._state: dict[str, tuple[Any, int]] = {}

    def run(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return the model's output; in its place what stands in for it, if it is traced."""
        handles = []
        for path in {name for name, _ in self._model.named_modules()} - self._entered:
            module, hook = self._model.get_submodule(path), partial(self._enter, path)
            # the user's hooks get what the module gets, and no proxy
            handles.append(module.register_forward_pre_hook(hook, with_kwargs=True, prepend=True))
            handles.append(module.register_forward_hook(self._leave))
        try:
            with torch.enable_grad(), self:
                return self._model(*args, **kwargs)
        finally:
            self._is_between = False
            for handle in handles:
                handle.remove()

    def changed(self) -> list[str]:
        """Attributes and buffers of modules that no stage calls, which the forward changed after the first block."""
        now = state_of(self._model, self._entered) if self.calls else {}
        known = self._state
        return [n for n, (v, count) in now.items() if n not in known or v is not known[n][0] or count != known[n][1]]

    def _enter(self, path: str, _: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        self._is_between = False
        if not self._open and (self.calls or path in self._blocks):
            if not self.calls:
                self._state = state_of(self._model, self._entered)
            if self._traces:
                args = _concrete(self.calls, args)
            self.calls.append(Call(path, args, kwargs))
        call = self.calls[-1] if self.calls else Call(path, args, kwargs)
        if not self._open:
            call.has_grad = torch.is_grad_enabled()
            torch.set_grad_enabled(call.has_grad and self._keeps_graph)
        self._open.append(call)
        return args, kwargs

    def _leave(self, _: nn.Module, __: Any, output: Any) -> Any:
        call = self._open.pop()
        if self._open:
            return output
        torch.set_grad_enabled(call.has_grad)
        call.output = output
        call.version = version_of(output) if isinstance(output, torch.Tensor) else 0
        if not self.calls:
            return output
        self._is_between = True
        if not self._traces:
            return output
        call.function = Function(output)
        return call.function.stand_in

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch; values that the forward reads between modules would become constants."""
        if self._is_between and func in _READS:
            self.reads_values = True
            if self._traces:
                raise TypeError("it reads the value of a tensor")
        return func(*args, **(kwargs or {}))


_READS = {torch.equal, torch.allclose, torch.Tensor.equal, torch.Tensor.allclose} | {
    getattr(torch.Tensor, name)
    for name in ("item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__", "__complex__")
}


def state_of(model: nn.Module, paths: Iterable[str]) -> dict[str, tuple[Any, int]]:
    """The attributes and buffers of modules, with a number that grows as they change in place."""
    found = {}
    for path in paths:
        module = model.get_submodule(path)
        for name, value in {**vars(module), **dict(module.named_buffers(recurse=False))}.items():
            if name[0] != "_":
                sized = len(value) if isinstance(value, list | dict | set) else 0
                found[_join(path, name)] = value, version_of(value) if isinstance(value, torch.Tensor) else sized
    return found


def _is_fed(before: Call, after: Call) -> bool:
    """Whether a module gets the tensor that the previous one returns."""
    given = after.args[0] if after.args else None
    is_passed_on = isinstance(given, torch.Tensor) and given is before.output
    return is_passed_on and after.versions[id(given)] == before.version


class RowStage(WholeNames):
    """Consecutive layers of a model with a row of modules.

    Args:
        model: the unsplit model; its modules are used, not copied.
        given: the names of the modules in the row, with their further arguments.
        fixed: the arguments of the model that must be as on the example, without tensors.
        constants: the attributes, by name, that modules on the way to the row had at the split.
        layers: 0 for the model's forward up to the row, whose modules count from 1.
    """

    def __init__(
        self,
        model: nn.Module,
        given: Mapping[str, Further],
        fixed: Mapping[str, Any],
        constants: Mapping[str, Any],
        layers: Sequence[int],
    ) -> None:
        super().__init__()
        row = list(given)
        own = [row[layer - 1] for layer in layers if layer]
        begins = 0 in layers
        # other arguments of the first block travel with the value as far as they are used
        self._arriving = [] if begins else _shared_keys(given, row[min(layers) - 1 :])
        self._leaving = _shared_keys(given, row[max(layers) :])
        holders = holders_of(row)
        kept = _kept(model, "", row, holders, own, begins)
        assert kept is not None
        torch_private.share_tensors(self, kept)
        torch_private.set_children(self, children_of(kept))
        # not children: they are submodules already, under the model's names
        self._own = [(model.get_submodule(path), given[path]) for path in own]
        copied: list[tuple[nn.Module, nn.Module]] = []
        self._before = [(_before_row(model, "", given, holders, copied), given[row[0]])] if begins else []
        if begins:
            self.stand_for(model, copied)
            self._signature = inspect.signature(model.forward)
        self._fixed, self._constants = fixed, constants
        for _, further in (*self._own, *self._before):
            self._share_buffers(model, further)
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
        """Run the layers on the output of the previous layer."""
        value = args[0] if args else None
        shared = dict(zip(self._arriving, args[1:], strict=False))
        for model, further in self._before:
            value, shared = self._run_before(model, further, args, kwargs)
        for module, further in self._own:
            others, named = self._present(further, shared)
            # another stage may have moved the model's buffer
            inputs = value, *(_on_device_of(value, other) for other in others)
            named = {name: _on_device_of(value, other) for name, other in named.items()}
            value = recomputed(module, module, inputs, named) if self._recomputes else module(*inputs, **named)
            if further.after is not None:
                value = further.after(value)
        return (value, *(shared[key] for key in self._leaving)) if self._leaving else value

    def _share_buffers(self, model: nn.Module, further: Further) -> None:
        """Hold the buffers that a module gets, under the model's names: they are loaded and saved with this stage."""
        for path in {v.name.rpartition(".")[0] for v in further.values() if isinstance(v, Buffer)}:
            holder: nn.Module = self
            for name in path.split(".") if path else ():
                if name not in children_of(holder):
                    holder.add_module(name, nn.Module())
                holder = holder.get_submodule(name)
            torch_private.share_buffers(holder, model.get_submodule(path))

    def _present(self, further: Further, shared: Mapping[int | str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Further arguments, with the buffers that are there now, and what the first block gets in this microbatch."""

        def found(value: Any) -> Any:
            if isinstance(value, Shared):
                return shared[value.key]
            return self.get_buffer(value.name) if isinstance(value, Buffer) else value

        return tuple(map(found, further.args)), {name: found(value) for name, value in further.kwargs.items()}

    def _run_before(
        self, model: nn.Module, further: Further, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, dict[int | str, Any]]:
        """The input of the first block, and its other arguments that are passed on."""
        self.follow_modes()
        self._check_unchanged(arguments_of(self._signature, args, kwargs))
        buffers = [self.get_buffer(value.name) for value in further.values() if isinstance(value, Buffer)]
        versions = list(map(version_of, buffers))
        try:
            model(*args, **kwargs)
        except _Reached as reached:  # itself not kept: its traceback has this frame, and holds what the forward made
            found, found_named = reached.call
        else:
            raise ValueError("split: the model's forward ended before its first block; pass its layers as a list")
        given = dict(enumerate(found)) | found_named
        keys = set(further.shared())
        shared = {key: given[key] for key in keys if isinstance(given.get(key), torch.Tensor | tuple)}
        same = len(found) == 1 + len(further.args) and found_named.keys() == further.kwargs.keys()
        if same and len(shared) == len(keys):
            others, named = self._present(further, shared)
            pairs = [*zip(found[1:], others, strict=True), *((a, named[name]) for name, a in found_named.items())]
            same = all(_is_same(a, b) for a, b in pairs)
        if not same or len(shared) < len(keys):
            raise OtherInputsError(
                "split: the model's blocks get other arguments than on the example that it was split with; give these "
                "in the example, too"
            )
        if versions != list(map(version_of, buffers)):
            raise ValueError(
                "split: the model's forward writes to a buffer that it gives to its blocks, and other stages may have "
                "their own; make that a part of the blocks, or pass the model's layers as a list"
            )
        return found[0], shared

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
        model = self._original.find()
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


class OtherInputsError(ValueError):
    """The input of a step is not as the example."""


def _shared_keys(given: Mapping[str, Further], row: Iterable[str]) -> list[int | str]:
    """What is passed on to these modules, in the order of its first use in the whole row."""
    used = {key for name in row for key in given[name].shared()}
    return [key for key in dict.fromkeys(key for further in given.values() for key in further.shared()) if key in used]


class _Reached(BaseException):
    """Raised when the model's forward reaches the row, with the arguments of the first block."""

    def __init__(self, *call: Any) -> None:
        super().__init__()
        self.call = call


def _end(block: nn.Module) -> nn.Module:
    """Replaces a module of the row, to end the model's forward, which may read attributes of it before."""
    module = nn.Module()
    vars(module).update(attributes_of(block))
    module.register_forward_pre_hook(_reach, with_kwargs=True)
    return module


def _reach(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    raise _Reached(args, kwargs)


def _is_same(found: Any, known: Any) -> bool:
    if isinstance(found, torch.Tensor) or isinstance(known, torch.Tensor):
        return found is known
    return type(found) is type(known) and bool(found == known)


def _on_device_of(value: Any, other: Any) -> Any:
    return other.to(value.device) if isinstance(other, torch.Tensor) else other


def _kept(
    module: nn.Module, path: str, row: Collection[str], holders: Collection[str], own: Sequence[str], begins: bool
) -> nn.Module | None:
    """A stage's part of a module: all, some submodules under the same names, or None."""
    if path in row or path not in holders:
        return module if (path in own if path in row else begins) else None
    holder = nn.Module()
    if begins:
        torch_private.share_tensors(holder, module)
    for name, child in children_of(module).items():
        kept = None if child is None else _kept(child, _join(path, name), row, holders, own, begins)
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
        own = None if child is None else _before_row(child, _join(path, name), row, holders, copied)
        children_of(twin)[name] = own
    return twin


def _later_rows(model: nn.Module, blocks: Collection[str]) -> set[str]:
    """The outermost Sequentials that may follow the blocks; their members are called instead of them."""
    found: set[str] = set()
    for path, module in model.named_modules():
        is_within = path.startswith(tuple(f"{other}." for other in (*blocks, *found)))
        is_plain = (
            type(module) is nn.Sequential and "forward" not in vars(module) and not torch_private.has_hooks(module)
        )
        if is_plain and len(children_of(module)) and path not in blocks and not is_within:
            found.add(path)
    return found


def holders_of(row: Iterable[str]) -> set[str]:
    """The modules that contain those of a row."""
    parts = [name.split(".") for name in row]
    return {".".join(names[:n]) for names in parts for n in range(len(names))}


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def arguments_of(signature: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a forward by name, with defaults."""
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments


def without_tensors(value: Any) -> Any:
    """What of an argument must be as on the example: numbers and text, and where it has tensors and other objects."""
    plain = (bool, int, float, str)

    def kept(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return torch.Tensor
        return leaf if leaf is None or type(leaf) in plain else type(leaf)

    return pytree.tree_map(kept, value)
