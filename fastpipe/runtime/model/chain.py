"""Sequences of layers as one module, with the unsplit model's keys; values that skip layers; recomputation.

`carry` passes a value from one layer to every later layer whose forward names it.

Recomputation is `torch.utils.checkpoint` without reentrance, around a stage or each of its layers. A split backward
recomputes once, in I (see ``csrc/torch/weight_grad.h``), with the random numbers of F and with the buffers that F had.
Buffers, for example BatchNorm's, then keep their values, as a second forward would update them twice.
"""

from __future__ import annotations

import copy
import inspect
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MethodType, SimpleNamespace
from typing import Any, NoReturn, Self

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from fastpipe.runtime.common import (
    StateBefore,
    children_of,
    pytree,
    tensor_leaves,
    torch_private,
    version_of,
)
from fastpipe.runtime.data_parallel import is_sharded


@dataclass(eq=False)
class Carried:
    """An output with named values for later layers; returned by `carry`.

    Attributes:
        values: by name, for every later layer whose forward names them.
    """

    output: Any
    values: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def __torch_function__(cls, function: Callable[..., Any], *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError(
            f"{function.__name__} got what fastpipe.carry returned, which only the layers of a list, or whole stages, "
            "return: pass the modules of this one, an nn.Sequential for example, as layers of the list"
        )


# tree functions, as in FSDP's hooks, must find the tensors in it
pytree.register_pytree_node(
    Carried,
    lambda carried: ([carried.output, carried.values], None),
    lambda children, context: Carried(*children),
    serialized_type_name="fastpipe.Carried",
)


def carry(output: Any, /, **values: Any) -> Carried:
    """Return this from a layer's forward to pass values to any later layers.

    Every later layer whose ``forward`` names a value gets it as a keyword argument, in this and later stages; the
    layers between need no change. A ``loss_fn`` gets it by a keyword-only parameter of that name, or by a further
    parameter without a default. Gradients flow back the same way. A value is sent as far as the last stage that names
    it.

    Args:
        output: input of the next layer, as if it were returned by itself. It may be what `carry` returned.
        values: by name: trees of tensors, None, numbers; anything that may cross a stage boundary. A repeated name
            replaces the value for later layers.

    Raises:
        ValueError: without values.
    """
    if not values:
        raise ValueError("carry: there is nothing to carry; give values by name, or return the output by itself")
    output, others = split_carried(output)
    return Carried(output, {**others, **values})


def as_arguments(value: Any) -> tuple[Any, ...]:
    """A layer's output as positional arguments of the next one: a tuple or a list gives several.

    A NamedTuple, a dict or any other object is one argument.
    """
    return tuple(value) if type(value) in (tuple, list) else (value,)


def as_inputs(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The positional arguments of a step. A tuple by itself is all of them; a list has microbatches."""
    return args[0] if len(args) == 1 and type(args[0]) is tuple else args


def split_carried(value: Any) -> tuple[Any, Mapping[str, Any]]:
    """A layer's output and its carried values."""
    return (value.output, value.values) if isinstance(value, Carried) else (value, {})


def passed_on(
    carried: Mapping[str, Any],
    values: Mapping[str, Any],
    stage: int,
    own: frozenset[str] | None,
    later: frozenset[str] | None,
) -> dict[str, Any]:
    """The values that are sent on after a stage.

    Args:
        carried: values received by the stage.
        values: values carried by its own layers.
        own: the names that its layers, or its loss, take; None for any.
        later: the names that later stages take; None for any.

    Raises:
        ValueError: for a value of its own that no layer takes.
    """
    for name in values:
        if later is not None and name not in later and own is not None and name not in own:
            raise ValueError(
                f"carry: stage {stage} carries {name!r}, and no later layer's forward names it; name it there, or "
                "leave it out"
            )
    return {name: value for name, value in {**carried, **values}.items() if later is None or name in later}


def merged_kwargs(given: Mapping[str, Any], named: Mapping[str, Any], stage: int) -> Mapping[str, Any]:
    """A stage's keyword arguments: those of the step, and the carried values.

    Raises:
        ValueError: if a name is among both.
    """
    both = sorted(given.keys() & named.keys())
    if both:
        raise ValueError(
            f"{both[0]}: it was given to step, and a layer before stage {stage} carries a value of this name; "
            "rename one of them"
        )
    return {**given, **named}


def names_later(messages: Sequence[Mapping[str, list[str] | None]], stage: int) -> frozenset[str] | None:
    """The names that the stages after one take; None for any.

    Args:
        messages: of all processes, the names that each of their stages takes.
    """
    found = [names for message in messages for index, names in message.items() if int(index) > stage]
    return None if None in found else frozenset(name for names in found if names is not None for name in names)


NONE = "none"
FULL = "full"
LAYERS = "layers"
WAYS = (NONE, FULL, LAYERS)

Policy = str | Callable[[int, nn.Module], str]
"""One setting for all stages, or ``function(stage index, module)`` that returns each stage's."""


def check_policy(policy: Any) -> None:
    """Refuse an invalid ``recompute``."""
    if not callable(policy) and policy not in WAYS:
        raise ValueError(
            f"recompute = {policy!r}: use 'none', 'full' (each stage as a whole), 'layers' (each layer by itself), or "
            "a function (stage index, module) that returns one of them"
        )


def recompute_of(policy: Policy, stage: int, module: nn.Module) -> str:
    """The setting of one stage.

    Raises:
        ValueError: if the policy's function returns an invalid value.
    """
    if callable(policy):
        try:
            inspect.signature(policy).bind(0, None)
        except TypeError as error:
            raise TypeError(f"recompute is a function that does not take (stage index, module): {error}") from None
        except ValueError:
            pass  # it has no signature
    way = policy(stage, module) if callable(policy) else policy
    if way not in WAYS:
        raise ValueError(f"recompute returned {way!r} for stage {stage}: return 'none', 'full' or 'layers'")
    return way


def recomputed(function: Callable[..., Any], module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    """Call a function with these arguments, which are all that is saved for the backward.

    Args:
        function: called again in the backward.
        module: its buffers may change in the function. In the repetition they are as they were before the first call.

    Raises:
        ValueError: if the function changes an input in place. torch notices that of tensors that are arguments
            themselves, but not of those in a dict, a list or a keyword argument, whose gradients would be wrong.
    """
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    tensors = tensor_leaves((args, kwargs))
    versions = [version_of(tensor) for tensor in tensors]
    is_repetition = False
    failed: list[BaseException] = []

    def run(kwargs: Mapping[str, Any], *args: Any) -> Any:
        nonlocal is_repetition
        if not is_repetition:
            is_repetition = True
            try:
                return function(*args, **kwargs)
            except BaseException as error:  # raised below: checkpoint of torch 2.11 would keep its hooks in this thread
                failed.append(error)
                return None
        with before.repeated():
            try:
                return function(*args, **kwargs)
            except RuntimeError as error:
                if is_scripted:
                    error.add_note(_FIRST_CALL)
                raise

    before = StateBefore(module)
    is_scripted = any(isinstance(part, torch.jit.ScriptModule) for part in before.parts)
    # the exception by which a repetition ends early does not pass through the interpreter of torch.jit
    # a dict, as checkpoint would take some names, such as debug, for its own
    output = checkpoint(run, kwargs, *args, use_reentrant=False, early_stop=not is_scripted)
    if failed:
        raise failed.pop()
    before.forget_unchanged()
    if versions != [version_of(tensor) for tensor in tensors]:
        name = "a stage" if isinstance(module, Chain) else type(module).__name__
        raise ValueError(
            f"recompute: the forward of {name} changes an input in place, so the backward cannot compute it again: "
            "change a clone() of it, leave out inplace=True, or set recompute='none' for this stage"
        )
    return output


_FIRST_CALL = (
    "fastpipe: a module of torch.jit saves other tensors in its first call than later, and then cannot be recomputed: "
    "call it once before the first step, set recompute='none' for this stage, or use the module without torch.jit"
)


class WholeNames(nn.Module):
    """A part of a model; its parameters and buffers have the unsplit model's names, unless ``whole_names`` is False."""

    whole_names = True

    _original: Callable[[], nn.Module | None] = staticmethod(lambda: None)
    _copied: Sequence[tuple[nn.Module, Callable[[], nn.Module | None]]] = ()

    def __getstate__(self) -> dict[str, Any]:
        """Of a copy or a pickle, which stands for no other module."""
        return {name: value for name, value in vars(self).items() if name not in ("_original", "_copied")}

    def stand_for(self, original: nn.Module, copied: Iterable[tuple[nn.Module, nn.Module]]) -> None:
        """Have one training mode with a module of the unsplit model, while that exists.

        Args:
            copied: this one's copies of further modules of that model, with these; they have one mode, too.
        """
        # weak references, as the caller may delete the model
        self._original, self._copied = weakref.ref(original), [(own, weakref.ref(module)) for own, module in copied]
        self.follow_modes()

    def share_original(self, copies: Mapping[int, Any]) -> None:
        """Let this one's copy, and those of its parts, by ``id``, stand for the same modules."""
        copied = copies[id(self)]
        copied._original = self._original
        copied._copied = [(copies[id(own)], original) for own, original in self._copied]

    def train(self, mode: bool = True) -> Self:
        """Set the mode, also of the unsplit model's modules that it stands for."""
        super().train(mode)
        for original in (self._original, *(original for _, original in self._copied)):
            module = original()
            if module is not None:
                module.training = mode
        return self

    def follow_modes(self) -> None:
        """Take the modes of the unsplit model, which the user may have set by its own `eval` and `train`.

        Once it is deleted, all have the mode of this module.
        """
        for own, original in ((self, self._original), *self._copied):
            module = original()
            own.training = self.training if module is None else module.training

    def accepts(self) -> frozenset[str] | None:
        """The accepted keyword arguments; None for any."""
        raise NotImplementedError

    def recomputes(self, way: str) -> bool:
        """Set what is recomputed in the backward; whether this module does it itself. See `with_recompute`."""
        return False

    def compute_buffers(self, empty: Collection[int]) -> None:
        """Compute buffers that no checkpoint has, where the model says how.

        Args:
            empty: the ``id`` of the tensors that just got memory.
        """


class Chain(WholeNames):
    """Layers in sequence, with the unsplit model's names, so that the keys of its state match.

    A layer that returns a tuple or a list gives the next one several arguments. A keyword argument goes to every layer
    whose ``forward`` names it; a carried value to every later one.
    """

    def __init__(self, layers: Mapping[int, nn.Module] | Mapping[str, nn.Module]) -> None:
        super().__init__()
        for name, layer in layers.items():
            self.add_module(str(name), layer)
        self._names = [accepted_names(layer) for layer in layers.values()]
        self._recompute = NONE

    def recomputes(self, way: str) -> bool:
        """Also within a wrapper, which must not run twice."""
        self._recompute = way
        return True

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layers."""
        return self._run(*args, **kwargs) if self._recompute != FULL else recomputed(self._run, self, *args, **kwargs)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        value: Any = args
        carried: dict[str, Any] = {}
        layers: Any = children_of(self).values()
        # not children(), which skips a repeated layer
        for layer, names in zip(layers, self._names, strict=True):
            inputs, named = as_arguments(value), selected(kwargs, names)
            try:
                if self._recompute == LAYERS:
                    value = recomputed(layer, layer, *inputs, **named)
                else:
                    value = layer(*inputs, **named)
            except TypeError as error:
                _note_inputs(error, layer, len(inputs), named)
                raise
            if isinstance(value, Carried):
                carried |= value.values
                kwargs = {**kwargs, **value.values}
                value = value.output
        return Carried(value, carried) if carried else value

    def accepts(self) -> frozenset[str] | None:
        """The keyword arguments that any of its layers takes; None for any."""
        return (
            None if None in self._names else frozenset().union(*(names for names in self._names if names is not None))
        )


def _note_inputs(error: TypeError, layer: nn.Module, count: int, named: Collection[str]) -> None:
    """Say where the inputs come from if there are more than a layer takes, or fewer than it needs, or one twice."""
    parameters = _parameters_of_forward(layer)
    if parameters is None or any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters):
        return
    positional = positional_names(layer)
    given = {*positional[:count], *named}
    needed = [p.name for p in parameters if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
    missing = [name for name in needed if name not in given]
    twice = [p.name for p in parameters[:count] if p.name in named and p.kind is p.POSITIONAL_OR_KEYWORD]
    if count > max(1, len(positional)):
        error.add_note(
            f"fastpipe: {type(layer).__name__}.forward got {count} arguments, the inputs of the step or the elements "
            "of a tuple or list: let it take as many, or pass a NamedTuple or a dict, which is one argument"
        )
    elif twice:
        error.add_note(
            f"fastpipe: {type(layer).__name__}.forward gets {twice[0]} by position, from step or the layer before, and "
            f"again from {twice[0]}= of step or carry, which goes to every layer whose forward names it: pass the "
            "model's input by position, or rename one of them"
        )
    elif missing:
        error.add_note(
            f"fastpipe: {type(layer).__name__}.forward needs {', '.join(missing)}: no layer before it carries or "
            "returns a value for it, and step has no keyword argument of this name"
        )


class Layers(Sequence[nn.Module]):
    """The layers of a model; consecutive ones can be combined into a module.

    Args:
        names: of each layer in the unsplit model; default: its index.
        make: of a model that was split, makes consecutive layers one module; default: a `Chain` of them.

    Attributes:
        tied: names of weights that the model says are one, also if they are several Parameters.
        no_loss: why there is no ``loss_fn``.
        whole: the module that has the layers, if there is one; it is not called.
    """

    tied: Sequence[Sequence[str]] = ()
    whole: nn.Module | None = None
    no_loss = (
        "split finds a loss only of models of transformers that return logits of one list of blocks, or with labels in "
        "the example"
    )

    def __init__(
        self,
        layers: Iterable[nn.Module],
        names: Iterable[str] | None = None,
        make: Callable[[list[int]], WholeNames] | None = None,
    ) -> None:
        self._layers = list(layers)
        self._make = make
        self._names = [str(i) for i in range(len(self._layers))] if names is None else list(names)

    def __len__(self) -> int:
        return len(self._layers)

    def __getitem__(self, index: Any) -> Any:
        return self._layers[index]

    def __getattr__(self, name: str) -> Any:
        """Say why there is none, of the loss of Hugging Face's models."""
        loss = f": {self.no_loss}; write loss_fn(output, target), and loss_reduction, yourself"
        why = loss if name in ("loss_fn", "num_tokens") else ""
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{why}")

    def chain(self, indices: Iterable[int]) -> WholeNames:
        """Consecutive layers as one module, with the model's parameters and names."""
        own = list(indices)
        if self._make is None:
            return Chain({self._names[i]: self._layers[i] for i in own})
        for i in own:
            if torch_private.has_hooks(self[i]):
                raise ValueError(
                    f"stages: layer {i} of the split model has hooks, those of fully_shard for example, and a stage "
                    "would not call them; add them to the model's own modules before split, or to each stage in a "
                    "function stage_index -> module, made by layers.chain(indices)"
                )
        return self._make(own)


def as_layers(stages: Any) -> Layers | None:
    """The layers, if a model is given as a list of them; else None."""
    if isinstance(stages, Layers):
        return stages
    if isinstance(stages, nn.Sequential | nn.ModuleList):
        check_forward(stages)
        if has_own_forward(stages):
            kind = type(stages)
            raise ValueError(
                f"model: {kind.__name__} is a {kind.__mro__[1].__name__} with a forward of its own, which its members "
                "one after the other would leave out; pass its layers as a list"
            )
        # under their names, which may not be numbers
        modules: Any = children_of(stages)
        layers = Layers(modules.values(), modules)
        layers.whole = stages
        return layers
    return Layers(stages) if isinstance(stages, Sequence) and not isinstance(stages, str) else None


def check_modules(name: str, layers: Any) -> None:
    """Refuse, by name, what is no list of modules."""
    if not isinstance(layers, Iterable):
        raise TypeError(f"{name} is a {type(layers).__name__}: give the list of the model's layers")
    for index, layer in enumerate(layers):
        if not isinstance(layer, nn.Module):
            raise TypeError(
                f"{name}[{index}] is a {type(layer).__name__}: give nn.Modules; call a function in the forward of one, "
                "and instead of a class or a recipe give the layer, made under torch.device('meta') (see Layers on "
                "meta in docs/guide.md)"
            )


def has_own_forward(model: Any) -> bool:
    """Whether it is a list of modules with a forward other than calling its members in sequence."""
    is_list = isinstance(model, nn.Sequential | nn.ModuleList)
    return is_list and type(model).forward not in (nn.Sequential.forward, nn.Module.forward)


def check_whole_unhooked(model: Any) -> None:
    """Refuse hooks of a model of which only the layers are called; those of a wrapper by what `check_forward` says."""
    if isinstance(model, nn.Module) and torch_private.has_hooks(model):
        check_forward(model)
        raise ValueError(
            f"model: the {type(model).__name__} has hooks (register_forward_hook, for example), and its stages would "
            "not call them; register them on its layers, for example the first or the last"
        )


def check_forward(module: nn.Module) -> None:
    """Check that calling a module runs its class's forward, so that a part of it can do the same."""
    name = type(module).__name__
    if torch_private.is_compiled(module):
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
    # accelerate's unwrap_model leaves the undecorated forward of the class there
    while own is not None and own != MethodType(accepted, module):
        if not hasattr(accepted, "__wrapped__"):
            raise ValueError(
                f"model: {name}.forward was replaced on the instance (by Accelerator.prepare or torch.compile, for "
                "example), and its stages would run the whole model; split the model before that, or give "
                "accelerator.unwrap_model(model, keep_fp32_wrapper=False)"
            )
        accepted = accepted.__wrapped__


def shallow(module: Any) -> Any:
    """A copy with the same children, which may be replaced.

    Raises:
        ValueError: if calling the copy would not run the forward of its class.
    """
    check_forward(module)
    twin = copy.copy(module)
    torch_private.set_children(twin, dict(children_of(module)))
    vars(twin).pop("forward", None)
    return twin


_OF_A_STAGE = ("training", "forward")


def attributes_of(module: nn.Module) -> dict[str, Any]:
    """A module's attributes without its memory: tensors are on meta, submodules are namespaces of theirs, or lists.

    Without its mode: the stages have their own.
    """
    public = {name: value for name, value in vars(module).items() if name[0] != "_" and name not in _OF_A_STAGE}
    tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    return (
        public
        | {n: torch.empty(t.shape, dtype=t.dtype, device="meta") for n, t in tensors}
        | {name: _likeness(child) for name, child in children_of(module).items() if child is not None}
    )


class _Members(list[Any]):
    """The likeness of a list of modules, which may have names, too."""


def _likeness(module: nn.Module) -> Any:
    if isinstance(module, nn.ModuleList | nn.Sequential):
        members = _Members(None if child is None else _likeness(child) for child in module)
        vars(members).update(attributes_of(module))
        return members
    return SimpleNamespace(**attributes_of(module))


def whole(model: nn.Module | Sequence[nn.Module]) -> nn.Module:
    """The model as one module, also if it is given as layers."""
    if isinstance(model, nn.Module) and (has_own_forward(model) or not isinstance(model, nn.ModuleList)):
        return model
    check_modules("model", model)
    layers = as_layers(model)
    assert layers is not None, "a model is a module or the list of its layers"
    return layers.chain(range(len(layers)))


def with_recompute(
    module: nn.Module, inner: nn.Module, way: str, stage: int, wrapper: str | None
) -> Callable[..., Any]:
    """A callable that runs a stage's module with recomputation.

    Args:
        inner: the module in its wrapper, or the same.
        wrapper: the wrapper's name, if the stage has replicas.

    Raises:
        ValueError: if the module cannot be recomputed from outside.
    """
    if isinstance(inner, WholeNames) and inner.recomputes(way):
        return module
    if way == NONE:
        return module
    if way == LAYERS:
        raise ValueError(
            f"recompute = 'layers': stage {stage} is one module, a {type(inner).__name__}, without a list of layers; "
            "use 'full', give the model's layers as a list, or use torch.utils.checkpoint within it"
        )
    if wrapper is not None:
        raise ValueError(
            f"recompute = {way!r}: stage {stage} is {wrapper}, and a wrapper must not run twice; give "
            "the model's layers as a list, use 'layers' if it is of fastpipe.split, or torch.utils.checkpoint within it"
        )
    return partial(recomputed, module, module)


def accepted_names(module: nn.Module) -> frozenset[str] | None:
    """The keyword arguments that a module's forward takes; None for any."""
    if isinstance(module, WholeNames):
        return module.accepts()
    parameters = _parameters_of_forward(module)
    if parameters is None or any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
        return None
    keywords = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return frozenset(p.name for p in parameters if p.kind in keywords)


def positional_names(module: nn.Module) -> list[str]:
    """The names of the arguments that a module's forward may get by position, in order."""
    return [p.name for p in _parameters_of_forward(module) or () if p.kind in _POSITIONAL]


def needed_names(module: nn.Module) -> list[str]:
    """The arguments that a stage's forward gets by position and requires, in order; of a chain its first layer's."""
    layer = next(iter(module.children()), module) if isinstance(module, Chain) else module
    parameters = _parameters_of_forward(layer) or ()
    return [p.name for p in parameters if p.kind in _POSITIONAL and p.default is inspect.Parameter.empty]


_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def _parameters_of_forward(module: nn.Module) -> list[inspect.Parameter] | None:
    """The parameters of a module's forward; None if it has no signature, as it is compiled, by torch.jit say."""
    try:
        return list(inspect.signature(module.forward).parameters.values())
    except ValueError:
        return None


def selected(kwargs: Mapping[str, Any], names: frozenset[str] | None) -> dict[str, Any]:
    """The items of ``kwargs`` in ``names``; all if ``names`` is None."""
    return {name: value for name, value in kwargs.items() if names is None or name in names}
