"""Helpers for modules and parameters: traversal, saved buffers, and the dtype of gradients.

Microbatches in bf16 may be summed in fp32: since torch 2.11, ``grad_dtype`` of a leaf is the dtype of its ``.grad``;
autograd converts each contribution before it adds it.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from types import NoneType
from typing import Any

import torch
from torch import nn

from fastpipe.runtime.common.tensors import is_dtensor, local_part, unrepeated
from fastpipe.runtime.common.torch_private import buffers_of, children_of, version_of, without_wait


def walked(module: nn.Module) -> list[nn.Module]:
    """The module and all its submodules, each once.

    ``modules()`` and ``parameters()`` also build names and take several times as long.
    """
    pending, seen = [module], {module}
    for found in pending:
        for child in children_of(found).values():
            if child is not None and child not in seen:
                seen.add(child)
                pending.append(child)
    return pending


def keep_buffers(modules: Iterable[nn.Module]) -> Callable[[], None]:
    """Save the names and values of all buffers.

    Returns:
        A function that restores them; may be called repeatedly.
    """
    places = [(module, dict(buffers_of(module).items())) for root in modules for module in walked(root)]
    found = {id(b): unrepeated(b) for _, named in places for b in named.values() if b is not None}.values()
    kept = [(buffer, buffer.detach().clone(), version_of(buffer)) for buffer in found]

    def put_back() -> None:
        for module, named in places:
            _rename(module, named)
        with torch.no_grad():
            for buffer, value, version in kept:
                # If the version counter changed, the copy counts as another change: the buffer may be saved for a
                # backward, and torch must report that. But batch norm changes its statistics without a new version, and
                # comparing values would synchronize the device.
                (buffer.data if version_of(buffer) == version else buffer).copy_(value)

    return put_back


_PLAIN = bool, int, float, complex, str, bytes, NoneType
"""Values that nothing can change."""


def _plain_and_replaced(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    return {n: it for n, it in before.items() if isinstance(it, _PLAIN) and (n not in now or now[n] is not it)}


class StateBefore:
    """The buffers and plain attributes of a module before a forward, for a repetition of it after they have changed.

    Attributes:
        parts: the module and its submodules.
    """

    def __init__(self, module: nn.Module) -> None:
        self.parts = walked(module)
        places = [(part, name, b) for part in self.parts for name, b in buffers_of(part).items() if b is not None]
        copies = {buffer: (version_of(buffer), buffer.detach().clone()) for _, _, buffer in places}
        self._buffers = [(part, name, buffer, *copies[buffer]) for part, name, buffer in places]
        self._attributes = self._attributes_now()
        self._replaced: list[tuple[nn.Module, set[str], dict[str, Any]]] = []

    def _attributes_now(self) -> list[tuple[nn.Module, dict[str, Any]]]:
        """Of modules that are not torch's own, whose forwards replace none."""
        return [(part, dict(vars(part))) for part in self.parts if not type(part).__module__.startswith("torch.nn.")]

    def forget_unchanged(self) -> None:
        """Release what nobody has replaced or changed since, except through a tensor's ``data``."""
        self._buffers = [
            (part, name, buffer, version, copy)
            for part, name, buffer, version, copy in self._buffers
            if name not in buffers_of(part) or buffers_of(part)[name] is not buffer or version_of(buffer) != version
        ]
        self._replaced = [
            (part, vars(part).keys() - before.keys(), _plain_and_replaced(before, vars(part)))
            for part, before in self._attributes
            if not _are_same(vars(part), before)
        ]
        self._attributes.clear()

    @contextmanager
    def repeated(self) -> Iterator[None]:
        """Context of the repetition; afterwards buffers and attributes, tensors too, are as they were before it."""
        restore_buffers, attributes = keep_buffers(self.parts[:1]), self._attributes_now()
        copies = {copy: copy.clone() for *_, copy in self._buffers}
        try:
            for part, name, *_, copy in self._buffers:
                buffers_of(part)[name] = copies[copy]
            for part, added, before in self._replaced:
                for name in added:
                    vars(part).pop(name, None)
                vars(part).update(before)
            yield
        finally:
            restore_buffers()
            for part, before in attributes:
                vars(part).update(before)


OF_TORCH = vars(nn.Module()).keys()
"""Attributes that every module has: its mode, hooks, parameters, buffers and submodules."""

_HOOKS = [name for name in OF_TORCH if "hooks" in name]
"""Those that are dicts of hooks."""

_CONTAINERS = list, dict, set, deque, OrderedDict, defaultdict, Counter


class KeptAttributes:
    """The attributes of modules and their submodules as they are now, which a forward may change.

    So are hooks, lists, dicts and sets in them, and the values of tensors but for parameters and buffers. Changes
    within other objects, of NumPy arrays, or through ``tensor.data`` are not seen.

    Args:
        modules: also those that their attributes hold. Or dicts of attributes.
        with_children: whether to keep the attributes of submodules, too.
    """

    def __init__(self, modules: Iterable[nn.Module | dict[str, Any]], *, with_children: bool = True) -> None:
        self._places: dict[int, tuple[str, Any, Any]] = {}
        self._tensors: dict[int, tuple[str, torch.Tensor, int, torch.Tensor]] = {}
        self._hooks: list[tuple[dict[int, Any], dict[int, Any]]] = []
        pending: list[tuple[str, Any]] = [("", module) for module in modules]
        for name, value in pending:
            if type(value) is torch.Tensor:
                self._tensors.setdefault(id(value), (name, value, version_of(value), value.detach().clone()))
            if id(value) in self._places or not _is_place(value):
                continue
            content = _content_of(value)
            self._places[id(value)] = name, value, content
            if not isinstance(value, nn.Module):
                pending += [(name, part) for part in (content.values() if isinstance(content, dict) else content)]
                continue
            path = f"{name}." if name else ""
            if with_children:  # first: an attribute may hold them, too
                pending += [(path + key, child) for key, child in children_of(value).items() if child is not None]
            pending += [(path + key, part) for key, part in content.items() if key not in OF_TORCH]
            self._hooks += [(content[key], dict(content[key])) for key in _HOOKS if key in content]

    def changed(self) -> list[str]:
        """The names of attributes that differ now, or have parts that do, but for modes and hooks."""
        found = [name for name, tensor, version, _ in self._tensors.values() if version_of(tensor) != version]
        for name, value, content in self._places.values():
            now = _content_of(value)
            if not isinstance(value, nn.Module):
                found += [] if _are_same(now, content) else [name]
                continue
            differ = [key for key in {**content, **now} if now.get(key, now) is not content.get(key, now)]
            found += [f"{name}.{key}" if name else key for key in differ]
        return [name for name in dict.fromkeys(found) if name.rpartition(".")[2] not in OF_TORCH]

    def put_back(self) -> None:
        """Restore them; may be called repeatedly."""
        for _, value, content in self._places.values():
            if not _are_same(_content_of(value), content):
                target: Any = vars(value) if isinstance(value, nn.Module) else value
                target.clear()
                (target.extend if isinstance(target, list | deque) else target.update)(content)
        for hooks, before in self._hooks:
            if hooks != before:
                hooks.clear()
                hooks.update(before)
        with torch.no_grad():
            for _, tensor, version, kept in self._tensors.values():
                if version_of(tensor) != version:
                    tensor.copy_(kept)


def _is_place(value: Any) -> bool:
    """Whether a value has parts that may be replaced. Those of a lazy module may once, when it is initialized."""
    if isinstance(value, nn.Module):
        return not isinstance(value, nn.modules.lazy.LazyModuleMixin)
    return isinstance(value, tuple) or type(value) in _CONTAINERS


def _content_of(value: Any) -> Any:
    """The parts of a value: a new dict of attributes or keys, or a new list or set."""
    if isinstance(value, list | tuple | deque):
        return list(value)
    return set(value) if isinstance(value, set) else dict(value if isinstance(value, dict) else vars(value))


def _are_same(now: Any, content: Any) -> bool:
    """Whether these parts are the same objects, in the same order."""
    if isinstance(content, dict):
        return [*map(id, now.values())] == [*map(id, content.values())] and [*now] == [*content]
    return now == content if isinstance(content, set) else [*map(id, now)] == [*map(id, content)]


def keep_state(modules: Iterable[nn.Module]) -> Callable[[], None]:
    """`keep_buffers` of modules, and of the weights that a forward changes: of embeddings with a ``max_norm``."""
    modules = list(modules)
    restore_buffers = keep_buffers(modules)
    found = [m for root in modules for m in root.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)]
    kept = [(m.weight, m.weight.detach().clone()) for m in found if m.max_norm is not None]

    def put_back() -> None:
        restore_buffers()
        with torch.no_grad():
            for weight, value in kept:
                weight.copy_(value)

    return put_back


def _rename(module: nn.Module, named: Mapping[str, torch.Tensor | None]) -> None:
    """Give a module these buffers, and no others."""
    now = buffers_of(module)  # not a dict in a scripted module, which lacks some methods
    for name in set(now.keys()).difference(named):
        del now[name]
    for name, buffer in named.items():
        if name not in now or now[name] is not buffer:
            now[name] = buffer


def by_mesh(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Parameters by the mesh of their gradients: torch clips and unscales no mixtures of tensors and DTensors."""
    kinds: dict[Any, list[nn.Parameter]] = {}
    for parameter in parameters:
        grad: Any = parameter.grad
        kinds.setdefault(grad.device_mesh if is_dtensor(grad) else None, []).append(parameter)
    return list(kinds.values())


class SavedBytes:
    """The bytes of storages that forwards save for their backward, without a module's own.

    Attributes:
        by_address: of each storage. What a forward returned is kept until all is counted: storages at one reused
            address would count once.
    """

    def __init__(self, module: nn.Module) -> None:
        self.by_address: dict[int, int] = {}
        self._own = {_with_storage(tensor).untyped_storage().data_ptr() for _, tensor in tensors_of(module)}

    def counted(self) -> AbstractContextManager[None]:
        """Context of the forwards."""
        return torch.autograd.graph.saved_tensors_hooks(self.add, lambda tensor: tensor)

    def add(self, tensor: torch.Tensor) -> torch.Tensor:
        """Count the tensor's storage, too."""
        storage = _with_storage(tensor).untyped_storage()
        if storage.data_ptr() not in self._own:
            self.by_address[storage.data_ptr()] = storage.nbytes()
        return tensor

    def add_view(self, tensor: torch.Tensor) -> None:
        """Of a tensor's storage, count only the part that it shows."""
        local = _with_storage(tensor)
        self.by_address[local.untyped_storage().data_ptr()] = local.nbytes


def _with_storage(tensor: torch.Tensor) -> torch.Tensor:
    """What has its storage on this process: of a DTensor the local part, of a nested tensor its values."""
    local = without_wait(local_part(tensor))
    return local.values() if local.is_nested else local


def on_meta(modules: Iterable[nn.Module]) -> bool:
    """Whether a parameter or buffer has no memory."""
    return any(tensor.is_meta for module in modules for _, tensor in tensors_of(module))


def tensors_of(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers."""
    yield from module.named_parameters()
    yield from module.named_buffers()


def check_shapes(where: str, module: nn.Module) -> None:
    """Refuse a lazy layer that has not run yet."""
    for name, tensor in tensors_of(module):
        if isinstance(tensor, nn.UninitializedParameter | nn.UninitializedBuffer):
            raise ValueError(
                f"{where}: {name} has no shape yet, as a lazy layer's before its first forward; run the model once on "
                "a microbatch (under torch.no_grad()), or give a layer that is not lazy"
            )


def check_grad_dtype(dtype: Any) -> None:
    """Refuse an invalid dtype of gradients."""
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ValueError(f"grad_dtype = {dtype!r}: give a floating-point dtype, torch.float32 say, or None")


def set_grad_dtype(module: nn.Module, dtype: torch.dtype) -> None:
    """Set the dtype of gradients of all floating-point parameters; converts existing gradients."""
    for parameter in module.parameters():
        if parameter.is_floating_point() and grad_dtype_of(parameter) != dtype:
            grad, parameter.grad = parameter.grad, None
            parameter.grad_dtype = dtype
            parameter.grad = None if grad is None else grad.to(dtype)


def grad_dtype_of(parameter: torch.Tensor) -> torch.dtype:
    """The dtype of its gradient."""
    found: torch.dtype | None = getattr(parameter, "grad_dtype", None)
    return parameter.dtype if found is None else found


def has_grad_dtype(parameter: torch.Tensor) -> bool:
    """Whether the gradient's dtype differs from the parameter's."""
    return grad_dtype_of(parameter) != parameter.dtype


def alias_of(parameter: torch.Tensor) -> nn.Parameter:
    """Another parameter on the same memory, with its own gradient in the same dtype."""
    alias = nn.Parameter(parameter.detach(), parameter.requires_grad)
    if has_grad_dtype(parameter):
        alias.grad_dtype = grad_dtype_of(parameter)
    return alias


def bind_alias(alias: nn.Parameter, parameter: nn.Parameter) -> None:
    """Give an alias the parameter's memory and gradient flag, which may have changed."""
    if alias.is_meta and not parameter.is_meta:
        allocate(alias, parameter.device)  # torch sets no memory of another kind of tensor
    alias.data = parameter.data
    alias.requires_grad_(parameter.requires_grad)


def dense_grad(grad: torch.Tensor) -> torch.Tensor:
    """A gradient for an exchange between processes: dense, so that both know its shape."""
    return grad if grad.layout is torch.strided else grad.to_dense()


def allocate(tensor: torch.Tensor, device: torch.device) -> None:
    """Give a tensor on meta uninitialised memory; it stays the same object, with its gradient flag and dtype."""
    new = torch.empty_like(tensor, device=device)
    if isinstance(tensor, nn.Parameter):
        new = nn.Parameter(new.detach(), requires_grad=tensor.requires_grad)
        if has_grad_dtype(tensor):
            new.grad_dtype = grad_dtype_of(tensor)
    torch.utils.swap_tensors(tensor, new)  # type: ignore[no-untyped-call]


def zero_grad_of(parameter: torch.Tensor) -> torch.Tensor:
    """A gradient of zeros."""
    return torch.zeros_like(parameter, dtype=grad_dtype_of(parameter))
