"""A model with a list of blocks as layers: what comes before the blocks, every block, and every module after them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from fastpipe.runtime.chain import Layers, WholeNames, accepted_names
from fastpipe.runtime.split.blocks import shallow


class RowLayers(Layers):
    """The layers of a model that is a row of modules behind something; what `fastpipe.split` returns for one.

    Args:
        model: the whole.
        row: the names of the modules in the row. Layer 0 is the model's forward up to the first of them.
    """

    def __init__(self, model: nn.Module, row: Sequence[str]) -> None:
        self._model = model
        self._row = list(row)
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
        row: as for `RowLayers`.
        layers: 0 for what comes before the row, and the members of the row counted from 1.
    """

    def __init__(self, model: nn.Module, row: Sequence[str], layers: Sequence[int]) -> None:
        super().__init__()
        own = [row[layer - 1] for layer in layers if layer]
        begins = 0 in layers
        kept = _kept(model, "", row, own, begins)
        assert kept is not None
        self._modules, self._parameters, self._buffers = kept._modules, kept._parameters, kept._buffers
        self._non_persistent_buffers_set = kept._non_persistent_buffers_set
        # not children: they are this module's already, under the model's names
        self._own = [model.get_submodule(path) for path in own]
        self._before = [_until(model, "", row)] if begins else []
        self._names = accepted_names(model) if begins else frozenset()

    def accepts(self) -> frozenset[str] | None:
        """The keyword arguments that it takes: the model's, before the row."""
        return self._names

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the layers make of what the layer before them returned."""
        value = args[0] if args else None
        for model in self._before:
            value = self._run_before(model, args, kwargs)
        for module in self._own:
            value = module(value)
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
    """In the place of a module of the row."""

    def forward(self, value: Any) -> Any:
        """End the model's forward."""
        raise _Reached(value)


def _holds(path: str, row: Sequence[str]) -> bool:
    return not path or any(name.startswith(f"{path}.") for name in row)


def _kept(module: nn.Module, path: str, row: Sequence[str], own: Sequence[str], begins: bool) -> nn.Module | None:
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


def _until(module: nn.Module, path: str, row: Sequence[str]) -> nn.Module:
    """The model with its row left out, which ends where the row begins."""
    if path in row:
        return _End()
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
