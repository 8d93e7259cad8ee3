"""Chain: layers one after the other as one module, under the keys of the whole model."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MethodType
from typing import Any, overload

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fastpipe.runtime.carried import Carried, apart, as_arguments
from fastpipe.runtime.recompute import FULL, LAYERS, NONE, recomputed
from fastpipe.runtime.sharded import is_sharded


class WholeNames(nn.Module):
    """A part of a model whose parameters and buffers have the names that they have in the whole model."""

    def accepts(self) -> frozenset[str] | None:
        """The keyword arguments that it takes; None for any."""
        return _named_in(self)


class Chain(WholeNames):
    """Layers one after the other, under their names in the whole model, so that the keys of the state are its own.

    A layer that returns a tuple or a list feeds the next one several arguments; a keyword argument goes to every layer
    whose ``forward`` names it, and so does what a layer carries to every later one.

    Attributes:
        recompute: what it does not keep for the backward; see `fastpipe.runtime.recompute`.
    """

    def __init__(self, layers: Mapping[int, nn.Module] | Mapping[str, nn.Module]) -> None:
        super().__init__()
        for name, layer in layers.items():
            self.add_module(str(name), layer)
        self._names = [accepted_names(layer) for layer in layers.values()]
        self.recompute = NONE

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layers."""
        return self._run(*args, **kwargs) if self.recompute != FULL else recomputed(self._run, self, args, kwargs)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        value: Any = args
        carried: dict[str, Any] = {}
        layers: Any = self._modules.values()
        # not children(), which leaves out a layer that stands there twice
        for layer, names in zip(layers, self._names, strict=True):
            inputs, named = as_arguments(value), chosen(kwargs, names) if kwargs else {}
            found = layer(*inputs, **named) if self.recompute != LAYERS else recomputed(layer, layer, inputs, named)
            value, values = apart(found)
            if values:
                carried |= values
                kwargs = {**kwargs, **values}
        return Carried(value, carried) if carried else value

    def accepts(self) -> frozenset[str] | None:
        """The keyword arguments that a layer of it takes; None for any."""
        names = [accepted_names(layer) for layer in self.children()]
        return None if None in names else frozenset().union(*(n for n in names if n is not None))


class Layers(Sequence[nn.Module]):
    """The layers of a model, and how neighbours become one module.

    Args:
        layers: in order.
        names: what each is called in the whole model; its index unless given.
    """

    _layers: Sequence[nn.Module] = ()

    def __init__(self, layers: Iterable[nn.Module], names: Iterable[str] | None = None) -> None:
        self._layers = list(layers)
        self._names = [str(i) for i in range(len(self._layers))] if names is None else list(names)

    def __len__(self) -> int:
        return len(self._layers)

    @overload
    def __getitem__(self, index: int) -> nn.Module: ...

    @overload
    def __getitem__(self, index: slice) -> list[nn.Module]: ...

    def __getitem__(self, index: Any) -> Any:
        return self._layers[index]

    def chain(self, indices: Iterable[int]) -> WholeNames:
        """Neighbours as one module."""
        return Chain({self._names[i]: self._layers[i] for i in indices})

    def check_unhooked(self, indices: Iterable[int]) -> None:
        """Refuse hooks of layers, where `chain` makes a module that does not call the layers themselves.

        Raises:
            ValueError: naming the layer.
        """
        for i in indices:
            if self._layers and (self._layers[i]._forward_hooks or self._layers[i]._forward_pre_hooks):
                raise ValueError(
                    f"stages: layer {i} of the split model has hooks, those of fully_shard for example, and a stage "
                    "would not call them; add them to the model's own modules before split, or to each stage in a "
                    "function stage_index -> module, made by layers.chain(indices)"
                )

    def layer_of(self, name: str) -> int | None:
        """The layer of a parameter; None for a name that there is not."""
        first = name.partition(".")[0]
        return self._names.index(first) if first in self._names else None


def as_layers(stages: Any) -> Layers | None:
    """The layers of a model that is given as their list; None for other forms."""
    if isinstance(stages, Layers):
        return stages
    if isinstance(stages, nn.Sequential | nn.ModuleList):
        check_forward(stages)
        if has_own_forward(stages):
            kind = type(stages)
            raise ValueError(
                f"model: {kind.__name__} is a {kind.__mro__[1].__name__} with a forward of its own, which its members "
                "one after the other would leave out; hand over its layers as a list"
            )
        # with their names, which need not be numbers
        modules: Any = stages._modules
        return Layers(modules.values(), modules)
    return Layers(stages) if isinstance(stages, Sequence) and not isinstance(stages, str) else None


def has_own_forward(model: Any) -> bool:
    """Whether it is a list of modules that does something else than call its members one after the other."""
    is_list = isinstance(model, nn.Sequential | nn.ModuleList)
    return is_list and type(model).forward not in (nn.Sequential.forward, nn.Module.forward)


def check_forward(module: nn.Module) -> None:
    """That calling a module runs the forward of its class on the module, so that a part of it can do the same.

    Raises:
        ValueError: for a ``forward`` that was replaced on the instance, for a compiled module and for a wrapped one.
    """
    name = type(module).__name__
    if module._compiled_call_impl is not None:
        raise ValueError(
            f"model: {name} is compiled as a whole, and its stages would run the whole; compile its blocks, or the "
            "stages of the pipeline (pipe.stage_modules), instead"
        )
    if is_sharded(module):
        raise ValueError(
            f"model: fully_shard was applied to {name} as a whole, which its stages cannot keep; apply it to the "
            "embedding, to every block, to the norm and to the head before the model is split, or to each stage in a "
            "function stage_index -> module"
        )
    if isinstance(module, DistributedDataParallel):
        raise ValueError(
            "model is in DistributedDataParallel, which its stages cannot keep; give model.module, and the group of "
            "the replicas as Pipeline(data_parallel=)"
        )
    own = vars(module).get("forward")
    accepted: Any = type(module).forward
    # accelerate's unwrap_model leaves the forward of the class there, without its decorators
    while own is not None and own != MethodType(accepted, module):
        if not hasattr(accepted, "__wrapped__"):
            raise ValueError(
                f"model: {name}.forward was replaced on the instance (by Accelerator.prepare or torch.compile, for "
                "example), and its stages would run the whole model; split the model before that, or give "
                "accelerator.unwrap_model(model, keep_fp32_wrapper=False)"
            )
        accepted = accepted.__wrapped__


def whole(model: nn.Module | Sequence[nn.Module]) -> nn.Module:
    """The model as one module, where it is given as its layers too."""
    if isinstance(model, nn.Module):
        return model
    layers = as_layers(model)
    assert layers is not None, "a model is a module or the list of its layers"
    return layers.chain(range(len(layers)))


def recomputing(module: nn.Module, inner: nn.Module, way: str, stage: int, wrapper: str | None) -> Callable[..., Any]:
    """What to call instead of a stage's module, so that it recomputes.

    Args:
        module: of the stage.
        inner: what is in its wrapper, or the same.
        way: see `fastpipe.runtime.recompute`.
        stage: its index.
        wrapper: what the stage is wrapped in, if it has replicas.

    Raises:
        ValueError: where that cannot be done from outside.
    """
    if isinstance(inner, Chain):
        inner.recompute = way
        return module
    if way == NONE:
        return module
    if way == LAYERS:
        raise ValueError(
            f"recompute = 'layers': stage {stage} is one module, a {type(inner).__name__}, whose layers are not known "
            "here; use 'full', give the model's layers as a list, or have it use torch.utils.checkpoint itself "
            "(models of Hugging Face: model.gradient_checkpointing_enable() before the split)"
        )
    if wrapper is not None:
        raise ValueError(
            f"recompute = {way!r}: stage {stage} is {wrapper}, and a wrapper must not run twice; give "
            "the model's layers as a list, or use torch.utils.checkpoint within it (models of Hugging Face: "
            "model.gradient_checkpointing_enable() before the split)"
        )
    return lambda *args, **kwargs: recomputed(module, module, args, kwargs)


def accepted_names(module: nn.Module) -> frozenset[str] | None:
    """The keyword arguments that a module's forward takes; None for any."""
    return module.accepts() if isinstance(module, WholeNames) else _named_in(module)


def _named_in(module: nn.Module) -> frozenset[str] | None:
    try:
        parameters = inspect.signature(module.forward).parameters.values()
    except ValueError:  # compiled: a traced module of torch.jit says nothing
        return None
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
        return None
    keywords = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return frozenset(p.name for p in parameters if p.kind in keywords)


def missing_argument(module: nn.Module, args: Sequence[Any], names: Iterable[str]) -> str | None:
    """The first argument that a module's forward needs and is not given, or is given as None.

    Args:
        module: a stage's; of a chain the first layer counts.
        args: what it is given.
        names: of what it is given by name.
    """
    layer = next(iter(module.children()), module) if isinstance(module, Chain) else module
    try:
        parameters = list(inspect.signature(layer.forward).parameters.values())
    except ValueError:  # compiled: a traced module of torch.jit says nothing
        return None
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    needed = [p.name for p in parameters if p.kind in positional and p.default is inspect.Parameter.empty]
    if args and all(value is None for value in args):
        return needed[0] if needed else None
    return next((name for name in needed[len(args) :] if name not in names), None)


def chosen(kwargs: Mapping[str, Any], names: frozenset[str] | None) -> dict[str, Any]:
    """Those of ``kwargs`` that are among ``names``; all when ``names`` is None."""
    return {name: value for name, value in kwargs.items() if names is None or name in names}
