"""Chain: layers one after the other as one module, under the keys of the whole model."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn


class Chain(nn.Module):
    """Layers one after the other, under their indices in the whole model, so that the keys of the state are its own.

    A layer that returns a tuple feeds the next one several arguments; a keyword argument goes to every layer whose
    ``forward`` names it.
    """

    def __init__(self, layers: Mapping[int, nn.Module]) -> None:
        super().__init__()
        for index, layer in layers.items():
            self.add_module(str(index), layer)
        self._names = [accepted_names(layer) for layer in layers.values()]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layers."""
        value: Any = args
        layers: Any = self._modules.values()
        # not children(), which leaves out a layer that stands there twice
        for layer, names in zip(layers, self._names, strict=True):
            inputs = value if isinstance(value, tuple) else (value,)
            value = layer(*inputs, **chosen(kwargs, names)) if kwargs else layer(*inputs)
        return value


def accepted_names(module: nn.Module) -> frozenset[str] | None:
    """The keyword arguments that a module's forward takes; None for any."""
    if isinstance(module, Chain):
        names = [accepted_names(layer) for layer in module.children()]
        return None if None in names else frozenset().union(*(n for n in names if n is not None))
    parameters = inspect.signature(module.forward).parameters.values()
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
        return None
    keywords = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return frozenset(p.name for p in parameters if p.kind in keywords)


def chosen(kwargs: Mapping[str, Any], names: frozenset[str] | None) -> dict[str, Any]:
    """Those of ``kwargs`` that are among ``names``; all when ``names`` is None."""
    return {name: value for name, value in kwargs.items() if names is None or name in names}
