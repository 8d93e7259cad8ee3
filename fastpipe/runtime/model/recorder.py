"""Records a model's forward as a `RecordedModel`.

The forward runs on an example. From the first block on, calls of modules, and of functions of torch between them, are
recorded in a graph of `torch.fx`, which is cut before each call of a module. The forward receives real values, except
that sizes are `TracedInt`s, so that arithmetic with sizes is recorded, too.
"""

from __future__ import annotations

import contextlib
import inspect
import operator
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn
from torch.fx.node import map_aggregate, map_arg
from torch.overrides import is_tensor_method_or_property

from fastpipe.runtime.common import (
    KeptAttributes,
    children_of,
    cuda_devices,
    pytree,
    tensor_leaves,
    tensors_of,
    torch_private,
    version_of,
)
from fastpipe.runtime.model.hugging_face import INSTEAD
from fastpipe.runtime.model.recorded import (
    TRAINING,
    RecordedLayer,
    RecordedModel,
    ResultNumbering,
    Source,
    ancestors_of,
    check_same,
    join,
    module_of,
    variables_in,
    without_tensors,
)

_MAX_TRIED = 4


class UntraceableError(ValueError):
    """The forward does something that cannot be recorded."""


class TracedInt(int):
    """A size, or an integer that a forward computes from sizes; it records what is done with it.

    Arithmetic becomes a part of the graph. A comparison becomes a check that a step has the same result, as the forward
    may branch on it. A conversion to float becomes a check that a step has the same integer.
    """

    tracer: ForwardTracer

    def plain(self) -> int:
        """The integer."""
        return int.__index__(self)

    def __hash__(self) -> int:
        if self.tracer.knows(self):
            raise TypeError("a cache, or a dict, has sizes as keys")  # callers with a cache expect this
        return hash(self.plain())


def _arithmetic(name: str, *, is_reversed: bool = False) -> Callable[..., Any]:
    function = getattr(operator, name)

    def method(self: TracedInt, *others: Any) -> Any:
        value = getattr(int, f"__{'r' * is_reversed}{name}__")(self, *others)
        if type(value) is int:
            return self.tracer.number(value, function, self, others, is_reversed)
        if isinstance(value, float) or isinstance(others[0], float):
            self.tracer.pin(self, *others)
        return value

    return method


def _conversion(name: str) -> Callable[..., Any]:
    def method(self: TracedInt) -> Any:
        self.tracer.pin(self)
        return getattr(int, name)(self)

    return method


def _comparison(name: str, function: Callable[..., bool]) -> Callable[..., Any]:
    def method(self: TracedInt, *others: Any) -> Any:
        value = getattr(int, name)(self, *others)
        if value is not NotImplemented and self.tracer.knows(self):
            self.tracer.check(self.tracer.add(function, (self, *others), {}), value)
        return value

    return method


for _name in ("add", "sub", "mul", "floordiv", "mod", "truediv", "pow"):
    setattr(TracedInt, f"__{_name}__", _arithmetic(_name))
    setattr(TracedInt, f"__r{_name}__", _arithmetic(_name, is_reversed=True))
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(TracedInt, f"__{_name}__", _comparison(f"__{_name}__", getattr(operator, _name)))
TracedInt.__neg__ = _arithmetic("neg")  # type: ignore[method-assign]
TracedInt.__bool__ = _comparison("__bool__", bool)  # type: ignore[method-assign]
TracedInt.__int__, TracedInt.__float__ = _conversion("__int__"), _conversion("__float__")  # type: ignore[method-assign]


class ForwardTracer(fx.Tracer):
    """The graph of a model's forward from its first block on.

    A node's ``meta`` has its ``value``; ``is_given``, see `is_given`; and of a tensor its ``version`` when it was made.

    Attributes:
        calls: the nodes that call modules, in order; their ``meta`` also has the positional arguments (``args``), and
            whether gradients were on (``has_grad``).
        given, buffers: as in `RecordedModel`.
        is_recording: whether the forward is between its first block and its end.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.graph, self.root = fx.Graph(), nn.Module()
        self.calls: list[fx.Node] = []
        self.given: Any = None
        self.buffers: dict[int, str] = {}
        self.is_recording = False
        self._model = model
        self._names = {id(buffer): name for name, buffer in model.named_buffers()}
        self._versions = {id(buffer): version_of(buffer) for buffer in model.buffers()}
        self._nodes: dict[int, fx.Node] = {}  # of tensors and integers, by id; a node holds its value
        self._latest: fx.Node  # that returned a tensor
        self._devices: list[torch.device] = []
        self._mode: list[bool] = []

    def begin(self, args: Any, kwargs: Any, values: Mapping[Source, Any]) -> None:
        """Make inputs of parameters, and of tensors and integers among the first block's arguments and ``values``."""
        leaves = pytree.tree_leaves((args, kwargs))
        self.given = without_tensors(pytree.tree_map_only(TracedInt, lambda _: int, (args, kwargs)))
        self.buffers = {i: self._names[id(leaf)] for i, leaf in enumerate(leaves) if id(leaf) in self._names}
        self.is_recording = True
        self._devices = list(dict.fromkeys(tensor.device for tensor in tensor_leaves(leaves)))
        self.follow_mode()
        for key, value in (*self._model.named_parameters(), *enumerate(leaves), *values.items()):
            if isinstance(value, torch.Tensor | TracedInt) and not self.knows(value):
                node = self.graph.placeholder("input")
                node.meta["key"] = key
                self.hold(node, value, not isinstance(key, str))

    def follow_mode(self) -> None:
        """Accept the present modes of autograd and autocast for the functions that follow."""
        self._mode = self._modes()

    def _modes(self) -> list[bool]:
        return [torch.is_grad_enabled(), *(torch.is_autocast_enabled(device.type) for device in self._devices)]

    def knows(self, value: Any) -> bool:
        """Whether a value is in the graph."""
        return self.is_recording and (id(value) in self._nodes or id(value) in self._names)

    def number(self, value: int, function: Any, number: TracedInt, others: Any, is_reversed: bool) -> TracedInt:
        """The result of arithmetic with ``number``; a part of the graph if an operand is."""
        found = self.number_of(value)
        args = (*others, number) if is_reversed else (number, *others)
        if any(map(self.knows, args)):
            self.hold(self.add(function, args, {}), found, all(map(self.is_given, args)))
        return found

    def number_of(self, value: int) -> TracedInt:
        """The integer as a `TracedInt`."""
        found = TracedInt(value)
        found.tracer = self
        return found

    def hold(self, node: fx.Node, value: Any, is_given: bool) -> None:
        """Set a node's value, and add nodes for the parts of a tuple, a list, a dict or a dataclass."""
        node.meta.update(value=value, is_given=is_given)
        if isinstance(value, torch.Tensor | TracedInt):
            self._nodes[id(value)] = node
        if isinstance(value, torch.Tensor):
            node.meta["version"] = version_of(value)
            self._latest = node
        for function, key, part in _parts(value):
            self.hold(self.graph.call_function(function, (node, key)), part, is_given)

    def add(self, function: Any, args: Any, kwargs: Any) -> fx.Node:
        """Add a function's call. A ``training`` that is the last module's mode follows that mode in a step."""
        args, kwargs = self.create_arg(args), self.create_arg(kwargs)
        if (
            "training" in kwargs
            and kwargs["training"] is self._model.get_submodule(str(self.calls[-1].target)).training
        ):
            kwargs = {**kwargs, "training": self.graph.get_attr(TRAINING)}
        if is_tensor_method_or_property(function):
            return self.graph.call_method(function.__name__, args, kwargs)
        return self.graph.call_function(function, args, kwargs)

    def call(self, path: str, args: Any, kwargs: Any, *, is_early: bool) -> fx.Node:
        """Add the call of a module. It begins a layer, unless it ``is_early``: then layer 0 calls it."""
        node = self.graph.call_module(path, self.create_arg(args), self.create_arg(kwargs))
        node.meta.update(is_early=is_early, args=args, has_grad=torch.is_grad_enabled())
        self.calls += [] if is_early else [node]
        return node

    def is_given(self, value: Any) -> bool:
        """Whether a value depends on inputs, sizes and constants only: not on modules, weights or random numbers."""
        node = self._nodes.get(id(value)) if isinstance(value, torch.Tensor | TracedInt) else None
        return node is None or node.meta["is_given"]

    def check(self, node: fx.Node, value: Any) -> None:
        """Let a step refuse any other value of this node, as the forward may branch on it."""
        frame = inspect.currentframe()
        while frame is not None and module_of(frame).partition(".")[0] in ("torch", "fastpipe"):
            frame = frame.f_back
        where = "?" if frame is None else f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        self.graph.call_function(check_same, (node, value, where))

    def pin(self, *numbers: Any) -> None:
        """Let a step refuse any other value of these integers, as the forward turns them into constants."""
        for number in filter(self.knows, numbers):
            self.check(self._nodes[id(number)], number.plain())

    def create_arg(self, a: Any) -> Any:
        """The node of a tensor or integer. Tensors without one are refused; torch.fx would make constants of them."""
        if id(a) in self._nodes and isinstance(a, torch.Tensor | TracedInt):
            return self._nodes[id(a)]
        if isinstance(a, torch.device) and a in self._devices:  # a stage may be on another one
            return self.graph.call_function(getattr, (self._latest, "device"))
        if isinstance(a, TracedInt | torch.Size):
            return a.plain() if isinstance(a, TracedInt) else self.create_arg(tuple(a))
        if not isinstance(a, torch.Tensor):
            try:
                return super().create_arg(a)
            except NotImplementedError as error:
                cache = " (set use_cache=False in its config)" if type(a).__name__.endswith("Cache") else ""
                raise UntraceableError(f"it gives a {type(a).__name__} to a function or a module{cache}") from error
        if id(a) in self._names:
            node = self.graph.get_attr(self._names[id(a)])
            self.hold(node, a, True)
            node.meta["version"] = self._versions[id(a)]
            return node
        raise UntraceableError(
            "it uses a tensor that was in no variable at the first block, of no function of torch, and is no parameter "
            "or buffer: assign it to a variable"
        )

    def of_function(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call a function of torch; record it if it uses values of the graph, or makes a tensor from constants."""
        leaves: list[Any] = []
        map_aggregate((args, kwargs), leaves.append)
        is_known = any(map(self.knows, leaves))
        is_given = self.is_recording and all(map(self.is_given, leaves))
        if is_known and func in _READS and not is_given:
            raise UntraceableError("it reads the value of a tensor")
        states = self._random_states() if is_given else []
        value = func(*_plain(args), **_plain(kwargs))
        if type(value) is int and func not in _INTEGERS:
            value = self.number_of(value)
        elif isinstance(value, torch.Size):
            value = torch.Size(map(self.number_of, value))
        is_new = self.is_recording and not any(isinstance(leaf, torch.Tensor) for leaf in leaves)
        if is_known or (is_new and isinstance(value, torch.Tensor)):
            is_given = is_given and all(map(torch.equal, states, self._random_states()))
            is_given |= isinstance(value, TracedInt | torch.Size)
            value = self._record(func, args, kwargs, value, is_given)
        return value

    def _random_states(self) -> list[torch.Tensor]:
        return [torch.get_rng_state(), *map(torch.cuda.get_rng_state, cuda_devices([self._model]))]

    def _record(self, func: Any, args: Any, kwargs: Any, value: Any, is_given: bool) -> Any:
        is_plain = isinstance(value, bool | torch.dtype) or (func in _READS and isinstance(value, int | float))
        is_plain = is_plain and not isinstance(value, TracedInt)
        if not is_plain and value is not None and not any(_held(value)):
            if func in _READS:
                raise UntraceableError("it reads the values of a tensor")
            return value
        if self._modes() != self._mode:
            raise UntraceableError("it has a no_grad or an autocast of its own")
        name = getattr(func, "__name__", "")
        if name == "__set__":
            raise UntraceableError("it sets an attribute of a tensor")
        if name == "__get__":
            node = self.add(getattr, (args[0], func.__self__.__name__), {})
        else:
            node = self.add(func, args, kwargs)
        if is_plain:
            self.check(node, value)
        if isinstance(value, torch.Tensor) and self.knows(value):  # an argument, which has a node
            value = torch.ops.aten.alias(value)
        if type(value) in (tuple, list):  # the forward may iterate over them
            self.check(self.graph.call_function(len, (node,)), len(value))
        self.hold(node, value, is_given)
        return value

    def recorded(
        self, output: Any, early: Collection[str], defaults: Mapping[str, Any], read: Mapping[str, Any]
    ) -> RecordedModel:
        """Return the recorded model, given the forward's output.

        Args:
            early, defaults, read: as in `RecordedModel`.

        Raises:
            UntraceableError: if the output has no node, or a layer would change a value that another one has.
        """
        made = self.create_arg(output)
        if isinstance(output, dict) and type(output) is not dict:
            made = self.graph.call_function(type(output), (made,))
        self.graph.output(made)
        for node in [*reversed(self.graph.nodes)]:
            if not node.users and node.target in (operator.getitem, getattr):
                self.graph.erase_node(node)
        self._check_unwritten()
        inputs = [node for node in self.graph.nodes if node.op == "placeholder" and node.users]
        first, *layers = _cut(self.graph, inputs)
        return RecordedModel(first, layers, early, [*map(self._key, inputs)], self.given, self.buffers, defaults, read)

    def _check_unwritten(self) -> None:
        """Refuse changes in place of parameters and buffers, also by modules: stages have copies of them."""
        held = {}
        nodes = [node for node in self.graph.nodes if isinstance(node.meta.get("value"), torch.Tensor)]
        for node in nodes:
            if node.op == "get_attr" or isinstance(node.meta.get("key"), str):
                held[_address_of(node.meta["value"])] = node.meta.get("key", node.target)
        for node in nodes:
            value = node.meta["value"]
            name = held.get(_address_of(value))
            if name is not None and value.numel() and version_of(value) > node.meta["version"]:
                raise UntraceableError(f"it changes {name} in place")

    def _key(self, node: fx.Node) -> Source:
        """The source of an input; a parameter has the name under which layer 0 has it."""
        key: Source = node.meta["key"]
        if not isinstance(key, str):
            return key
        layers = tuple(f"{call.target}." for call in self.calls)
        named = self._model.named_parameters(remove_duplicate=False)
        names = [name for name, parameter in named if parameter is node.meta["value"]]
        first = next((name for name in names if not name.startswith(layers)), None)
        if first is None:
            raise UntraceableError(f"it uses {key} outside its module, and other stages do not have it")
        return first


def _parts(value: Any) -> Iterator[tuple[Callable[..., Any], Any, Any]]:
    """The parts of a value, each with the function, and its second argument, that return it."""
    if isinstance(value, dict):
        yield from ((operator.getitem, key, part) for key, part in value.items())
    elif isinstance(value, tuple | list):
        yield from ((operator.getitem, i, part) for i, part in enumerate(value))
    elif is_dataclass(value) and not isinstance(value, type):
        yield from ((getattr, field.name, getattr(value, field.name)) for field in fields(value))


def _held(value: Any) -> Iterator[bool]:
    """For each part of a value, whether it can have a node."""
    yield isinstance(value, torch.Tensor | TracedInt)
    for _, _, part in _parts(value):
        yield from _held(part)


def _plain(value: Any) -> Any:
    """Arguments with plain integers in place of `TracedInt`s."""
    leaves: list[Any] = []
    map_aggregate(value, leaves.append)
    if not any(isinstance(leaf, TracedInt) for leaf in leaves):
        return value  # the same object: a module may change it
    return map_aggregate(value, lambda leaf: leaf.plain() if isinstance(leaf, TracedInt) else leaf)


def candidate_blocks(model: nn.Module) -> list[list[str]]:
    """Candidates for a model's blocks: the members of each list, dict or sequence of modules, the most likely first.

    Of a model without these, its own modules.

    Raises:
        ValueError: if the model has one module.
    """
    kinds = (nn.ModuleList, nn.ModuleDict | nn.Sequential)
    found: list[list[str]] = []
    for kind in kinds:
        there = [(path, m) for path, m in model.named_modules() if path and isinstance(m, kind) and len(m) > 1]
        there.sort(key=lambda pair: -sum(p.numel() for p in pair[1].parameters()))
        found += filter(None, (_members(path, module) for path, module in there))
    # leave out lists within blocks: most of the model would precede the first of their members
    holders = [f"{blocks[0].rpartition('.')[0]}." for blocks in found]
    found = [blocks for i, blocks in enumerate(found) if not blocks[0].startswith(tuple(holders[:i]))]
    # leave out lists that contain a better one: this one's other members would become layers of their own
    found = [blocks for i, blocks in enumerate(found) if not any({*blocks} > {*other} for other in found[:i])]
    found = found[:_MAX_TRIED] or [[name for name, _ in model.named_children()]]
    if len(found[0]) < 2:
        raise ValueError(f"model is a {type(model).__name__} without several modules; {INSTEAD}")
    return found


def parent_of(model: nn.Module, blocks: Sequence[str]) -> nn.Module:
    """The module that contains these blocks."""
    return model.get_submodule(blocks[0].rpartition(".")[0])


def _members(path: str, module: nn.Module) -> list[str]:
    """The members of a list or dict; in place of one without a forward, such as another list, its own members."""
    found = []
    for name, member in module.named_children():
        is_called = getattr(member.forward, "__func__", None) is not nn.Module.forward
        found += [f"{path}.{name}"] if is_called else _members(f"{path}.{name}", member)
    return found


def record_model(
    model: nn.Module,
    blocks: Sequence[str],
    others: Sequence[Sequence[str]],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    defaults: Mapping[str, Any],
) -> RecordedModel:
    """Record a model's forward.

    Anything may precede the first block. From there on, modules and functions of torch may use each other's results,
    tensors that the forward has when the first block begins, parameters, buffers, sizes, numbers, text and None.

    Args:
        blocks: the names of the modules, one of which is the first block.
        others: lists of further modules, whose members are called one by one, not within a module that contains them.
        args, kwargs: the example.
        defaults: keyword arguments of the example that a step may omit.

    Raises:
        ValueError: if the forward does anything else, with the place and a remedy.
    """
    recording = _Recording(model, blocks, others)
    try:
        output = recording.run(args, kwargs)
    except Exception as error:  # raised again
        if not isinstance(error, UntraceableError):
            with torch.enable_grad():
                model(*args, **kwargs)  # raises the error if it is the model's own
        raise _refusal([blocks[0], *recording.names()][-1], error) from error
    names = recording.names()
    if not names:
        raise ValueError(f"model: its blocks are {blocks[0]} to {blocks[-1]}, and its forward calls none; {INSTEAD}")
    early = recording.early.intersection(names)
    _check_once(model, [*early, *names])
    if recording.changed:
        raise ValueError(
            f"model: its forward changes {recording.changed[0]} after its first block, which no stage would; let a "
            f"module of its own do that, {INSTEAD}"
        )
    if not all(node.meta["has_grad"] for node in recording.tracer.calls):
        _check_gradients(_Recording(model, blocks, others, keeps_graph=True), model, args, kwargs)
    try:
        return recording.tracer.recorded(output, early, defaults, recording.read)
    except UntraceableError as error:
        raise _refusal("its first block", error) from error


def _check_once(model: nn.Module, names: Sequence[str]) -> None:
    """Refuse weights and buffers that several calls use, also those of a module within another one."""
    found: set[str] = set()
    for name in names:
        own = {f"{name}.{key}" for key, _ in tensors_of(model.get_submodule(name))}
        if own & found:
            raise ValueError(f"model: {name} is called twice, and its weights would be in several layers; {INSTEAD}")
        found |= own


def _refusal(after: str, error: Exception) -> ValueError:
    """The error for a forward that cannot be recorded."""
    return ValueError(
        f"model: its forward does something after {after} that split cannot follow ({error}); make that a module, or a "
        f"part of one, {INSTEAD}"
    )


def _check_gradients(recording: _Recording, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Refuse a forward that calls a block under no_grad; as a layer the block would be trained.

    In a reentrant checkpoint gradients are off as well, but its output requires a gradient.
    """
    recording.run(args, kwargs)
    for node in recording.tracer.calls:
        given, path = tensor_leaves(node.meta["args"]), str(node.target)
        is_trained = any(tensor.requires_grad for tensor in (*given, *model.get_submodule(path).parameters()))
        has_grad = node.meta["has_grad"] or any(t.requires_grad for t in tensor_leaves(node.meta["value"]))
        if is_trained and not has_grad:
            raise ValueError(
                f"model: its forward runs {path} without gradients (in torch.no_grad(), say), and as a layer it "
                "would have them: freeze its parameters, and those before it, by requires_grad_(False)"
            )


def _numbers(graph: fx.Graph) -> dict[fx.Node, int]:
    """The layer that computes each node: 0 for inputs and early calls, else that of the last call of a module.

    Sizes are computed in the first layer that can do so, and what is made for an argument (a device) where it is used.
    """
    number = 0
    early: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        changes_input = not node.users and node.meta.get("is_given") and early.intersection(node.all_input_nodes)
        if node in early or node.meta.get("is_early") or changes_input:
            early |= {node, *node.all_input_nodes}
    found: dict[fx.Node, int] = {}
    for node in graph.nodes:
        number += node.op == "call_module" and node not in early
        found[node] = 0 if node in early else number
        is_size = node.op != "placeholder" and isinstance(node.meta.get("value"), TracedInt | torch.Size)
        if is_size and node not in early:
            found[node] = max(1, *map(found.__getitem__, node.all_input_nodes))
    for node in reversed(graph.nodes):
        if node.op == "call_function" and "value" not in node.meta and node.users:
            found[node] = min(map(found.__getitem__, node.users))
    return found


def _alive(numbers: Mapping[fx.Node, int], layer: int) -> list[fx.Node]:
    """The nodes whose values a layer receives from the previous one."""
    made = [node for node, number in numbers.items() if number < layer and node.op != "get_attr"]
    return [node for node in made if any(numbers[user] >= layer for user in node.users)]


def _address_of(tensor: torch.Tensor) -> int:
    """The address of a tensor's memory; 0 if it has none, or several parts (sparse, nested)."""
    is_whole = tensor.layout is torch.strided and not tensor.is_nested
    return tensor.untyped_storage().data_ptr() if is_whole else 0


def _check_unshared(alive: Sequence[fx.Node]) -> None:
    """Refuse values that share memory and change later: the next stage has a copy of each."""
    found: dict[int, list[fx.Node]] = {}
    for node in alive:
        if isinstance(node.meta["value"], torch.Tensor):
            found.setdefault(_address_of(node.meta["value"]), []).append(node)
    for pointer, nodes in found.items():
        known = max(node.meta["version"] for node in nodes)
        if pointer and len(nodes) > 1 and any(version_of(node.meta["value"]) > known for node in nodes):
            raise UntraceableError("it changes in place a value of which later layers have a view, too")


def _cut(graph: fx.Graph, inputs: Sequence[fx.Node]) -> list[RecordedLayer]:
    """Cut the graph: what layer 0 does with the inputs, and one layer for each call of a module."""
    numbers = _numbers(graph)
    layers = []
    for layer in range(max(numbers.values()) + 1):
        arriving, leaving = _alive(numbers, layer) if layer else inputs, _alive(numbers, layer + 1)
        if layer:
            _check_unshared(leaving)
        own = [n for n, number in numbers.items() if number == layer and n.op not in ("get_attr", "placeholder")]
        buffers = list(dict.fromkeys(arg for node in own for arg in node.all_input_nodes if arg.op == "get_attr"))
        made, path = fx.Graph(), ""
        run = made.placeholder("run")
        copies = {node: made.placeholder(node.name) for node in (*arriving, *buffers)}
        for node in own:
            args, kwargs = map_arg((node.args, node.kwargs), copies.__getitem__)
            if node.op == "call_module":
                path = str(node.target)
                copies[node] = made.call_function(operator.call, (run, *([] if layer else [path]), *args), kwargs)
            elif node.op != "output":
                copies[node] = made.create_node(node.op, node.target, args, kwargs)
            else:
                made.output(args[0])
        if leaving:
            made.output(tuple(copies[node] for node in leaving))
        function = fx.GraphModule(nn.Module(), made)
        layers.append(RecordedLayer(path, function, [str(node.target) for node in buffers]))
    return layers


def _variables() -> dict[Source, torch.Tensor | int]:
    """The values of local variables in the forward that a `_Recording` runs; see `variables_in`."""
    frames, frame = [], inspect.currentframe()
    while frame is not None and frame.f_code is not _Recording.run.__code__:
        frames += [frame] if frame.f_globals is not globals() else []
        frame = frame.f_back
    return variables_in(frames)


class _Recording(ResultNumbering):
    """Runs a model's forward and records it in a `ForwardTracer`.

    Args:
        blocks, others: as in `record_model`.
        keeps_graph: whether modules return tensors with a graph. The activations of a whole model may not fit.

    Attributes:
        tracer: has a node for each outermost call of a module.
        early: the names of modules that the forward calls before its first block.
        changed: attributes and buffers that the forward changed after the first block, of modules that no stage calls.
        read: as in `RecordedModel`.
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: Sequence[str],
        others: Sequence[Sequence[str]],
        *,
        keeps_graph: bool = False,
    ) -> None:
        super().__init__(_Recording.run.__code__, self._note_made)
        self.changed: list[str] = []
        self.read: dict[str, Any] = {}
        self.tracer = ForwardTracer(model)
        self.early: set[str] = set()
        self._model, self._blocks, self._keeps_graph = model, blocks, keeps_graph
        entered = ancestors_of(names[0] for names in (blocks, *others)) | _later_sequentials(model, blocks)
        self._entered = {path: model.get_submodule(path) for path in entered}  # modules that no stage calls
        # of the calls of modules that have not returned: the outermost one's node if it is recorded, else None
        self._open: list[fx.Node | None] = []
        # results before the first block, by id; most are gone when it begins
        self._made: dict[int, tuple[Source, weakref.ref[torch.Tensor]]] = {}
        self._buffers: dict[str, tuple[torch.Tensor, int]] = {}
        self._attributes: dict[str, KeptAttributes] = {}
        self._watched: list[tuple[nn.Module, type]] = []

    def run(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return the model's output."""
        handles = []
        self._attributes = self._kept()
        for path in {name for name, _ in self._model.named_modules()} - self._entered.keys():
            module, hook = self._model.get_submodule(path), partial(self._enter, path)
            # first, so that the user's hooks get plain integers, as the module does
            handles.append(module.register_forward_pre_hook(hook, with_kwargs=True, prepend=True))
            handles.append(module.register_forward_hook(self._leave))
        try:
            with torch.enable_grad(), self:
                return self._model(*args, **kwargs)
        finally:
            self.tracer.is_recording = False
            self.changed = self._find_changed()
            for handle in handles:
                handle.remove()
            for module, kind in self._watched:
                module.__class__ = kind
            for module in self._entered.values():  # a forward may store a size, such as the largest so far
                kept = vars(module)
                kept.update({name: value.plain() for name, value in kept.items() if isinstance(value, TracedInt)})

    def names(self) -> list[str]:
        """The names of the called modules."""
        return [str(node.target) for node in self.tracer.calls]

    def _find_changed(self) -> list[str]:
        now, known = self._own_buffers(), self._buffers
        found = [n for n, (b, count) in now.items() if n not in known or b is not known[n][0] or count != known[n][1]]
        return found + [join(path, name) for path, kept in self._attributes.items() for name in kept.changed()]

    def _kept(self) -> dict[str, KeptAttributes]:
        return {path: KeptAttributes([module], with_children=False) for path, module in self._entered.items()}

    def _own_buffers(self) -> dict[str, tuple[torch.Tensor, int]]:
        return {
            join(path, name): (buffer, version_of(buffer))
            for path, module in self._entered.items()
            for name, buffer in module.named_buffers(recurse=False)
        }

    def _watch(self) -> None:
        """From now on, note reads of the attributes that the forward has changed so far."""
        for path, kept in self._attributes.items():
            names = {name.partition(".")[0] for name in kept.changed()}
            if names:
                module = self._entered[path]
                self._watched.append((module, type(module)))
                module.__class__ = _watching(type(module), names, partial(self._note_read, path))
        self._attributes, self._buffers = self._kept(), self._own_buffers()

    def _note_read(self, path: str, name: str, value: Any) -> None:
        if not self._open and not isinstance(value, torch.Tensor) and not self.tracer.knows(value):
            self.read[join(path, name)] = without_tensors(pytree.tree_map_only(TracedInt, TracedInt.plain, value))

    def _enter(self, path: str, _: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        self._open.append(None)
        if len(self._open) == 1 and (self.tracer.calls or path in self._blocks):
            if not self.tracer.calls:
                self._watch()
                # tensors that functions of torch returned before, and that still exist
                found = ((source, reference()) for source, reference in self._made.values())
                made = {source: tensor for source, tensor in found if tensor is not None}
                self.tracer.begin(args, kwargs, {**_variables(), **made})
            is_early = self._is_early(path, args, kwargs)
            self._open[0] = self.tracer.call(path, args, kwargs, is_early=is_early)
        elif not self.tracer.calls:
            self.early.add(path)
        return _plain(args), _plain(kwargs)

    def _is_early(self, path: str, args: Any, kwargs: Any) -> bool:
        """Whether layer 0 calls the module: it has the weights, as it has called it before, and the arguments."""
        if path not in self.early or not any(tensors_of(self._model.get_submodule(path))):
            return False
        return all(map(self.tracer.is_given, pytree.tree_leaves((args, kwargs))))

    def _note_made(self, source: Source, tensor: torch.Tensor) -> None:
        self._made[id(tensor)] = source, weakref.ref(tensor)

    def _detached(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.grad_fn is not None:
            with contextlib.suppress(RuntimeError):  # torch refuses a view
                return tensor.detach_()  # the same object: a hook of the model may have kept it
        found = tensor.detach()
        source, reference = self._made.get(id(tensor), (0, None))
        if reference is not None and reference() is tensor:
            self._note_made(source, found)
        return found

    def _leave(self, _: nn.Module, __: Any, output: Any) -> Any:
        if len(self._open) == 1:
            if not self._keeps_graph:
                output = pytree.tree_map_only(torch.Tensor, self._detached, output)
            if self._open[0] is not None:
                output = pytree.tree_map_only(lambda leaf: type(leaf) is int, self.tracer.number_of, output)
                self.tracer.follow_mode()
                self.tracer.hold(self._open[0], output, False)
        self._open.pop()
        return output

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch, and record it if the forward does that between modules."""
        kwargs = kwargs or {}
        value = func(*args, **kwargs) if self._open else self.tracer.of_function(func, args, kwargs)
        if not self.tracer.calls:
            self.number(value)
        return value


def _watching(kind: Any, names: Collection[str], note: Callable[[str, Any], None]) -> type:
    """A subclass of ``kind`` that notes reads of these attributes."""

    def read(self: Any, name: str) -> Any:
        value = kind.__getattribute__(self, name)
        if name in names:
            note(name, value)
        return value

    return type(kind.__name__, (kind,), {"__getattribute__": read, "__module__": kind.__module__})


_INTEGERS = torch.Tensor.__len__, torch.Tensor.__int__, torch.Tensor.__index__
"""Functions of which Python turns the result into a plain int."""

_READS = {torch.equal, torch.allclose, torch.is_nonzero} | {
    getattr(torch.Tensor, name)
    for name in (
        *("__bool__", "__int__", "__float__", "__index__", "__complex__", "__contains__"),
        *("item", "tolist", "numpy", "equal", "allclose", "is_nonzero"),
    )
}


def _later_sequentials(model: nn.Module, blocks: Collection[str]) -> set[str]:
    """The names of the outermost Sequentials outside of the blocks, whose members become layers."""
    found: set[str] = set()
    for path, module in model.named_modules():
        is_within = path.startswith(tuple(f"{other}." for other in (*blocks, *found)))
        is_plain = (
            type(module) is nn.Sequential and "forward" not in vars(module) and not torch_private.has_hooks(module)
        )
        if is_plain and len(children_of(module)) and path not in blocks and not is_within:
            found.add(path)
    return found
