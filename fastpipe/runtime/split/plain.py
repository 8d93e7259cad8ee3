"""A model with a list of blocks as layers: what comes before the blocks, every block, and every module after them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from fastpipe.runtime.chain import Layers, WholeNames, accepted_names
from fastpipe.runtime.split.blocks import shallow
from fastpipe.runtime.split.trial import Further


class RowLayers(Layers):
    """The layers of a model that is a row of modules behind something; what `fastpipe.split` returns for one.

    Args:
        model: the whole.
        row: the names of the modules in the row, with their further arguments. Layer 0 is the model's forward up to the
            first of them.
    """

    def __init__(self, model: nn.Module, row: Mapping[str, Further]) -> None:
        self._model = model
        self._row = dict(row)
        super().__init__(self.chain([layer]) for layer in range(len(row) + 1))

    def chain(self, indices: Iterable[int]) -> RowStage:
        """Neighbours as one module, which has the parameters of the model, under their names."""
        own = list(indices)
        self.check_unhooked(own)
        return RowStage(self._model, self._row, own)

    def layer_of(self, name: str) -> int | None:
        """The layer of a parameter; None for a name that there is not."""
        own = [i for i, layer in enumerate(self) if name in dict(layer.named_parameters(remove_duplicate=False))]
        return own[0] if own else None


class RowStage(WholeNames):
    """Neighbouring layers of such a model.

    Args:
        model: the whole; its modules are used, not copied.
        given: the row, as for `RowLayers`.
        layers: 0 for what comes before the row, and the members of the row counted from 1.
    """

    def __init__(self, model: nn.Module, given: Mapping[str, Further], layers: Sequence[int]) -> None:
        super().__init__()
        row = list(given)
        own = [row[layer - 1] for layer in layers if layer]
        begins = 0 in layers
        kept = _kept(model, "", row, own, begins)
        assert kept is not None
        self._modules, self._parameters, self._buffers = kept._modules, kept._parameters, kept._buffers
        self._non_persistent_buffers_set = kept._non_persistent_buffers_set
        # not children: they are this module's already, under the model's names
        self._own = [(model.get_submodule(path), *given[path]) for path in own]
        self._before = [_until(model, "", given)] if begins else []
        self._names = accepted_names(model) if begins else frozenset()

    def accepts(self) -> frozenset[str] | None:
        """The keyword arguments that it takes: the model's, before the row."""
        return self._names

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the layers make of what the layer before them returned."""
        value = args[0] if args else None
        for model in self._before:
            value = self._run_before(model, args, kwargs)
        for module, further, named in self._own:
            others = (_beside(value, other) for other in further)
            value = module(value, *others, **{name: _beside(value, other) for name, other in named.items()})
        return value

    def _run_before(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        _set_training(model, self.training)
        try:
            model(*args, **kwargs)
        except _Reached as reached:
            return reached.value
        raise ValueError("split: the model's forward ended before its first block; hand over its layers as a list")


class _Reached(BaseException):
    """The model's forward has come to the row."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value


class _End(nn.Module):
    """In the place of a module of the row.

    Args:
        further: what it was given on the example beside its input.
    """

    def __init__(self, further: Further) -> None:
        super().__init__()
        self._further = further

    def forward(self, value: Any, *args: Any, **kwargs: Any) -> Any:
        """End the model's forward."""
        known, named = self._further
        same = len(args) == len(known) and kwargs.keys() == named.keys() and all(map(_is_same, args, known))
        if not same or not all(_is_same(kwargs[name], named[name]) for name in named):
            raise ValueError(
                "split: the model's blocks get other arguments than on the example that it was split with; give these "
                "in the example, too"
            )
        raise _Reached(value)


def _is_same(found: Any, known: Any) -> bool:
    if isinstance(found, torch.Tensor) and isinstance(known, torch.Tensor):
        return found.shape == known.shape and found.dtype == known.dtype  # it may have been moved to another device
    return type(found) is type(known) and bool(found == known)


def _beside(value: Any, other: Any) -> Any:
    """A further argument where the input is: buffers of the model are other stages' to move."""
    return other.to(value.device) if isinstance(other, torch.Tensor) else other


def _holds(path: str, row: Collection[str]) -> bool:
    return not path or any(name.startswith(f"{path}.") for name in row)


def _kept(module: nn.Module, path: str, row: Collection[str], own: Sequence[str], begins: bool) -> nn.Module | None:
    """What a stage has of a module: all, a part under the same names, or nothing."""
    if path in row or not _holds(path, row):
        return module if (path in own if path in row else begins) else None
    holder = nn.Module()
    if begins:
        holder._parameters, holder._buffers = module._parameters, module._buffers
        holder._non_persistent_buffers_set = module._non_persistent_buffers_set
    for name, child in module._modules.items():
        kept = child and _kept(child, _join(path, name), row, own, begins)
        if kept is not None:
            holder.add_module(name, kept)
    return holder


def _until(module: nn.Module, path: str, row: Mapping[str, Further]) -> nn.Module:
    """The model with its row left out, which ends where the row begins."""
    if path in row:
        return _End(row[path])
    if not _holds(path, row):
        return module
    twin: nn.Module = shallow(module)
    for name, child in module._modules.items():
        twin._modules[name] = child and _until(child, _join(path, name), row)
    return twin


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _set_training(model: nn.Module, mode: bool) -> None:
    """The mode of what holds the row; all else is a child of the stage."""
    if model.training != mode:
        model.train(mode)
