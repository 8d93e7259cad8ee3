"""From a model's forward to its `Row`.

On an example, the forward is traced as one graph of `torch.fx` from the first block on. Its nodes are the calls of
modules, and functions between them; it is cut before each call.
"""

from __future__ import annotations

import contextlib
import inspect
import operator
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx, nn
from torch.fx.node import map_arg
from torch.overrides import TorchFunctionMode

from fastpipe.runtime.common import (
    children_of,
    first_line,
    pytree,
    tensor_leaves,
    tensors_of,
    torch_private,
    version_of,
)
from fastpipe.runtime.model.hugging_face import INSTEAD
from fastpipe.runtime.model.rows import Row, RowLayer, Variable, holders_of, state_of, variables_in, without_tensors

_MAX_TRIED = 4


class Tail(fx.Tracer):
    """Traces a model's forward from its first block on; functions are computed as they are traced.

    Attributes:
        calls: the nodes that call modules, in order.
        given, buffers: as in `Row`.
        is_computing: whether a traced function runs, and not the model's forward.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.graph, self.root = fx.Graph(), nn.Module()
        self.calls: list[fx.Node] = []
        self.given: Any = None
        self.buffers: dict[int, str] = {}
        self.is_computing = False
        self._names = {id(buffer): name for name, buffer in model.named_buffers()}
        self._model = model
        self._nodes: dict[int, fx.Node] = {}  # of tensors, which they hold, by id
        self._devices: list[str] = []
        self._mode: list[bool] = []

    def begin(self, args: Any, kwargs: Any, variables: Mapping[Variable, torch.Tensor]) -> None:
        """Take the tensors among the first block's arguments, and in the forward's variables, as inputs."""
        leaves = pytree.tree_leaves((args, kwargs))
        self.given = without_tensors((args, kwargs))
        self.buffers = {i: self._names[id(leaf)] for i, leaf in enumerate(leaves) if id(leaf) in self._names}
        self._devices = sorted({tensor.device.type for tensor in tensor_leaves(leaves)})
        self.follow_mode()
        for key, value in (*self._model.named_parameters(), *enumerate(leaves), *variables.items()):
            if isinstance(value, torch.Tensor) and not self.knows(value):
                node = self.graph.placeholder("input")
                node.meta["key"] = key
                self.hold(node, value)

    def follow_mode(self) -> None:
        """Let functions from here on have the present modes of autograd and autocast."""
        self._mode = self._modes()

    def _modes(self) -> list[bool]:
        return [torch.is_grad_enabled(), *map(torch.is_autocast_enabled, self._devices)]

    def knows(self, value: Any) -> bool:
        """Whether a value is a tensor of the graph."""
        return id(value) in self._nodes or id(value) in self._names

    def hold(self, node: fx.Node, value: Any) -> None:
        """Set the value of a node."""
        node.meta["value"] = value
        if isinstance(value, torch.Tensor):
            self._nodes[id(value)] = node
            with self.computing():
                node.meta["version"] = version_of(value)

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """Context of calls that are not the forward's."""
        was, self.is_computing = self.is_computing, True
        try:
            yield
        finally:
            self.is_computing = was

    def versions(self) -> list[int]:
        """Of all tensors; they grow with changes in place."""
        return [version_of(node.meta["value"]) for node in self._nodes.values()]

    def call(self, path: str, args: Any, kwargs: Any) -> None:
        """Add the call of a module; its arguments may be proxies."""
        self.calls.append(self.create_node("call_module", path, self.create_arg(args), self.create_arg(kwargs)))

    def create_arg(self, a: Any) -> Any:
        """Find the node of a tensor. Other tensors, which torch.fx would keep as constants, are refused."""
        if not isinstance(a, torch.Tensor):
            return super().create_arg(a)
        if id(a) in self._nodes:
            return self._nodes[id(a)]
        if id(a) in self._names:
            node = self.create_node("get_attr", self._names[id(a)], (), {})
            self.hold(node, a)
            return node
        raise ValueError("it uses a tensor that was in no variable at the first block, and is no parameter or buffer")

    def proxy_of(self, tensor: torch.Tensor) -> fx.Proxy:
        """The proxy of a tensor that the graph `knows`."""
        return self.proxy(self.create_arg(tensor))

    def create_proxy(self, kind: str, *args: Any, **kwargs: Any) -> fx.Proxy:
        """Compute a function. One in a context is refused, as torch.fx does not record that."""
        if self._modes() != self._mode:
            raise ValueError("it has a no_grad or an autocast of its own")
        proxy = super().create_proxy(kind, *args, **kwargs)
        with self.computing():
            self.hold(proxy.node, _computed(proxy.node))
        return proxy

    def of_tensors(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Trace a function that the forward calls with inputs, which are no proxies."""
        is_attribute = func.__name__ == "__get__"
        if is_attribute or func is torch.Tensor.__len__:
            value = func(*args, **kwargs)
            if not isinstance(value, torch.Tensor):
                return value
        proxies = pytree.tree_map_only(torch.Tensor, self.proxy_of, (args, kwargs))
        if is_attribute:
            return getattr(proxies[0][0], func.__self__.__name__)
        return fx.Proxy.__torch_function__(func, (), *proxies)

    def row(self, output: Any, early: Collection[str]) -> Row:
        """End with the model's output.

        Args:
            early: modules of layers that precede the first, too.

        Raises:
            ValueError: if it cannot be an output, or a layer would change a value that another one has.
        """
        if isinstance(output, dict) and type(output) is not dict:
            raise ValueError(f"it makes a {type(output).__name__}")
        self.graph.output(self.create_arg(output))
        inputs = [self._key(node) for node in _alive(_numbers(self.graph), 1)]
        return Row(_cut(self.graph), early, inputs, self.given, self.buffers)

    def _key(self, node: fx.Node) -> int | str | Variable:
        """An input; a parameter is one under a name that the first stage has."""
        key: int | str | Variable = node.meta["key"]
        if not isinstance(key, str):
            return key
        layers = tuple(f"{call.target}." for call in self.calls)
        names = [name for name, p in self._model.named_parameters(remove_duplicate=False) if p is node.meta["value"]]
        first = next((name for name in names if not name.startswith(layers)), None)
        if first is None:
            raise ValueError(f"it uses {key} outside its module, and other stages do not have it")
        return first


def _computed(node: fx.Node) -> Any:
    args, kwargs = values_of((node.args, node.kwargs))
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    assert callable(node.target)
    return node.target(*args, **kwargs)


def values_of(arguments: Any) -> Any:
    """The values of nodes in arguments."""
    return map_arg(arguments, lambda node: node.meta["value"])


def rows_of_modules(model: nn.Module) -> list[list[str]]:
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
    # leave out submodules of blocks: the row would be one block, and its first layer the rest of the model
    holders = [f"{row[0].rpartition('.')[0]}." for row in found]
    found = [row for i, row in enumerate(found) if not row[0].startswith(tuple(holders[:i]))]
    found = found[:_MAX_TRIED] or [[name for name, _ in model.named_children()]]
    if len(found[0]) < 2:
        raise ValueError(f"model is a {type(model).__name__} without several modules; {INSTEAD}")
    return found


def _members(path: str, module: nn.Module) -> list[str]:
    """The members of a list or dict; in place of one without a forward, such as another list, its own members."""
    found = []
    for name, member in module.named_children():
        is_called = type(member).forward is not nn.Module.forward
        found += [f"{path}.{name}"] if is_called else _members(f"{path}.{name}", member)
    return found


def row_of_modules(model: nn.Module, blocks: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Row:
    """The layers of a model from its first block on.

    Anything may precede the first block. From there on, modules and functions that `torch.fx` can trace take what they
    return, tensors in variables of the forward when the first block begins, buffers, numbers, text and None.

    Raises:
        ValueError: if the model differs, with the place and a remedy.
    """
    recording = _Recording(model, blocks)
    output = recording.run(args, kwargs)
    names = [call.path for call in recording.calls]
    if not names:
        raise ValueError(f"model: its blocks are {blocks[0]} to {blocks[-1]}, and its forward calls none; {INSTEAD}")
    several = (name for name in names if names.count(name) > 1 or name in recording.early())
    twice = next((name for name in several if any(tensors_of(model.get_submodule(name)))), None)
    if twice is not None:
        raise ValueError(f"model: {twice} is called twice, and its weights would be in several layers; {INSTEAD}")
    changed = recording.changed()
    if changed:
        raise ValueError(
            f"model: its forward changes {changed[0]} after its first block, which no stage would; let a module of its "
            f"own do that, {INSTEAD}"
        )
    if not all(call.has_grad for call in recording.calls):
        _check_gradients(model, blocks, args, kwargs)
    try:  # in any case, as a function may return its input on the example only, such as .float()
        return _traced(model, blocks, args, kwargs, names)
    except ValueError:
        if not recording.is_complete(output):
            raise
    return recording.tail.row(output, recording.early())


def _traced(
    model: nn.Module, blocks: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any], names: Sequence[str]
) -> Row:
    """The row of another run, with what the forward does after each module."""
    recording = _Recording(model, blocks, traces=True)
    try:
        output = recording.run(args, kwargs)
        return recording.tail.row(output, recording.early())
    except Exception as error:  # of the model's code, which gets proxies
        at = len(recording.calls) - 1
        place = f"between {names[at]} and {names[at + 1]}" if at + 1 < len(names) else f"after {names[-1]}"
        raise ValueError(
            f"model: its forward does something {place if at >= 0 else f'before {names[0]}'} that torch.fx cannot "
            f"trace ({first_line(error)}); make that a module, or a part of one, {INSTEAD}"
        ) from error


def _check_gradients(model: nn.Module, blocks: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Refuse a forward that trains nothing in a block, by no_grad around it, where the block as a layer is trained.

    In a reentrant checkpoint gradients are off, too, and its output requires one all the same.
    """
    recording = _Recording(model, blocks, keeps_graph=True)
    recording.run(args, kwargs)
    for call in recording.calls:
        given = tensor_leaves(call.args)
        is_trained = any(tensor.requires_grad for tensor in (*given, *model.get_submodule(call.path).parameters()))
        has_grad = call.has_grad or any(tensor.requires_grad for tensor in tensor_leaves(call.output))
        if is_trained and not has_grad:
            raise ValueError(
                f"model: its forward runs {call.path} without gradients (in torch.no_grad(), say), and as a layer it "
                "would have them: freeze its parameters, and those before it, by requires_grad_(False)"
            )


def _numbers(graph: fx.Graph) -> dict[fx.Node, int]:
    """The layer, from 1, to which each node belongs; 0 for inputs."""
    number, found = 0, {}
    for node in graph.nodes:
        number += node.op == "call_module"
        found[node] = number
    return found


def _alive(numbers: Mapping[fx.Node, int], layer: int) -> list[fx.Node]:
    """The nodes whose values the previous layer passes on to one."""
    made = [node for node, number in numbers.items() if number < layer and node.op != "get_attr"]
    return [node for node in made if any(numbers[user] >= layer for user in node.users)]


def _check_unshared(alive: Sequence[fx.Node]) -> None:
    """Refuse values in one memory that change later, as a stage has a copy of each."""
    found: dict[int, list[fx.Node]] = {}
    for node in alive:
        if isinstance(node.meta["value"], torch.Tensor):
            found.setdefault(node.meta["value"].untyped_storage().data_ptr(), []).append(node)
    for pointer, nodes in found.items():
        known = max(node.meta["version"] for node in nodes)
        if pointer and len(nodes) > 1 and any(version_of(node.meta["value"]) > known for node in nodes):
            raise ValueError("it changes in place a value of which later layers have a view, too")


def _cut(graph: fx.Graph) -> list[RowLayer]:
    """A layer for each call of a module."""
    numbers = _numbers(graph)
    layers = []
    for layer in range(1, max(numbers.values()) + 1):
        arriving, leaving = _alive(numbers, layer), _alive(numbers, layer + 1)
        _check_unshared(leaving)
        own = [node for node, number in numbers.items() if number == layer and node.op != "get_attr"]
        buffers = list(dict.fromkeys(arg for node in own for arg in node.all_input_nodes if arg.op == "get_attr"))
        made = fx.Graph()
        run = made.placeholder("run")
        copies = {node: made.placeholder(node.name) for node in (*arriving, *buffers)}
        for node in own:
            args, kwargs = map_arg((node.args, node.kwargs), copies.__getitem__)
            if node.op == "call_module":
                path = str(node.target)
                copies[node] = made.call_function(operator.call, (run, *args), kwargs)
            elif node.op != "output":
                copies[node] = made.create_node(node.op, node.target, args, kwargs)
            else:
                made.output(args[0])
        if leaving:
            made.output(tuple(copies[node] for node in leaving))
        function = fx.GraphModule(nn.Module(), made)
        layers.append(RowLayer(path, function, [str(node.target) for node in buffers]))
    return layers


@dataclass
class Call:
    """One call of a module.

    Attributes:
        has_grad: whether gradients were on at the call.
    """

    path: str
    args: tuple[Any, ...]
    output: Any = None
    has_grad: bool = True


def _variables() -> dict[Variable, torch.Tensor]:
    """The `variables_in` the forward that a `_Recording` runs."""
    frames, frame = [], inspect.currentframe()
    while frame is not None and frame.f_code is not _Recording.run.__code__:
        frames += [frame] if frame.f_globals is not globals() else []
        frame = frame.f_back
    return variables_in(frames)


class _Recording(TorchFunctionMode):
    """Records the calls of the blocks, and after the first block all outermost calls of modules.

    Without ``keeps_graph`` modules return tensors without a graph, as activations of the whole model may not fit.

    Args:
        traces: the model's forward gets proxies in place of the outputs, so that functions between modules are traced.

    Attributes:
        calls: of `run`.
        has_functions: whether the forward makes the modules' arguments by functions between them.
    """

    def __init__(
        self, model: nn.Module, blocks: Sequence[str], *, keeps_graph: bool = False, traces: bool = False
    ) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.tail = Tail(model)
        self.has_functions = False
        self._before: set[str] = set()
        self._model, self._blocks, self._keeps_graph, self._traces = model, blocks, keeps_graph, traces
        self._entered = holders_of(blocks[:1]) | _later_rows(model, blocks)
        self._open: list[Call] = []
        self._is_between = False
        self._find = nn.Module.__getattr__
        self._state: dict[str, tuple[Any, int]] = {}
        self._versions: list[int] = []

    def run(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return the model's output; in its place proxies, if it is traced."""
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
            self._turn(False)
            for handle in handles:
                handle.remove()

    def _turn(self, is_between: bool) -> None:
        """Enter or leave a module. Between them, parameters and buffers are proxies, which take sizes that are, too."""

        def attribute(module: nn.Module, name: str) -> Any:
            value = self._find(module, name)
            is_read = isinstance(value, torch.Tensor) and not self.tail.is_computing and self.tail.knows(value)
            return self.tail.proxy_of(value) if is_read else value  # type: ignore[arg-type]

        self._is_between = is_between
        nn.Module.__getattr__ = attribute if is_between and self._traces else self._find  # type: ignore[method-assign]

    def early(self) -> set[str]:
        """Modules that the forward calls before its first block, and again later."""
        return self._before & {call.path for call in self.calls}

    def is_complete(self, output: Any) -> bool:
        """Whether the calls are all that the forward does after the first block, without functions between them."""
        return not self.has_functions and self.tail.knows(output) and self._versions == self.tail.versions()

    def changed(self) -> list[str]:
        """Attributes and buffers of modules that no stage calls, which the forward changed after the first block."""
        now = state_of(self._model, self._entered) if self.calls else {}
        known = self._state
        return [n for n, (v, count) in now.items() if n not in known or v is not known[n][0] or count != known[n][1]]

    def _enter(self, path: str, _: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        self._turn(False)
        call = Call(path, args, has_grad=torch.is_grad_enabled())
        if not self._open and (self.calls or path in self._blocks):
            if not self.calls:
                self._state = state_of(self._model, self._entered)
                self.tail.begin(args, kwargs, _variables())
            call.args, kwargs = self._add(path, args, kwargs)
            self.calls.append(call)
        elif not self.calls:
            self._before.add(path)
        self._open.append(call)
        return call.args, kwargs

    def _add(self, path: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Add a call to the graph; returns its arguments as tensors."""
        if self._traces:
            self.tail.call(path, args, kwargs)
            node = self.tail.calls[-1]
            return values_of(node.args), values_of(node.kwargs)
        self.has_functions |= bool(self.calls) and self._versions != self.tail.versions()
        try:
            self.tail.call(path, args, kwargs)
        except (ValueError, NotImplementedError):
            self.has_functions = True
        return args, kwargs

    def _leave(self, _: nn.Module, __: Any, output: Any) -> Any:
        call = self._open.pop()
        if self._open:
            return output
        if not self._keeps_graph:
            output = pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, output)
        call.output = output
        if not self.calls:
            return output
        if not self.has_functions:
            self.tail.follow_mode()
            self.tail.hold(self.tail.calls[-1], output)
            self._versions = self.tail.versions()
        self._turn(True)
        return self.tail.proxy(self.tail.calls[-1]) if self._traces else output

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch; values that the forward reads between modules would become constants."""
        kwargs = kwargs or {}
        if not self._is_between or self.tail.is_computing:
            return func(*args, **kwargs)
        if func in _READS:
            if self._traces:
                raise ValueError("it reads the value of a tensor")
            self.has_functions = True
        if self._traces and any(map(self.tail.knows, tensor_leaves((args, kwargs)))):
            return self.tail.of_tensors(func, args, kwargs)
        return func(*args, **kwargs)


_READS = {torch.equal, torch.allclose, torch.Tensor.equal, torch.Tensor.allclose} | {
    getattr(torch.Tensor, name)
    for name in ("item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__", "__complex__")
}


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
