"""split: a model as a list of its layers.

The layers in sequence return the model's output; otherwise an error states the reason. `hugging_face.py` has the layers
of models of transformers. The forward of any other model with a list of blocks is recorded (`recorder.py`). Both kinds
of layers are compared with the model on an example. Recorded ones are also compared under what a later step may have:
another mode, autocast, other sizes and arguments.
"""

from __future__ import annotations

import inspect
import logging
import operator
import random
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any, NoReturn, TypeVar

import numpy as np
import torch
from torch import nn

from fastpipe.runtime.common import (
    KeptAttributes,
    children_of,
    cuda_devices,
    first_line,
    on_meta,
    pytree,
    tensor_leaves,
)
from fastpipe.runtime.model.chain import (
    Layers,
    accepted_names,
    as_inputs,
    as_layers,
    check_forward,
    check_modules,
    check_whole_unhooked,
    selected,
)
from fastpipe.runtime.model.cuts import restored
from fastpipe.runtime.model.hugging_face import (
    INSTEAD,
    compare_loss,
    find_num_tokens,
    is_hugging_face,
    layers_of_hugging_face,
    making_masks,
    no_cache,
    own_loss,
)
from fastpipe.runtime.model.recorded import (
    OtherInputsError,
    RecordedModel,
    RecordedStage,
    ancestors_of,
    arguments_of,
    constants_of,
    without_tensors,
)
from fastpipe.runtime.model.recorder import candidate_blocks, parent_of, record_model

_MANY_BYTES = 1_000_000
_MANY_CALLS = 3
_MAX_RUNS = 3
_MAX_NAMES = 4
logger = logging.getLogger("fastpipe")
Result = TypeVar("Result")
Runs = list[list[Any]]
"""The outputs of consecutive runs, and what else is compared of them."""


def split(model: nn.Module | Sequence[nn.Module], *example: Any, **kwargs: Any) -> Layers:
    """Split a model into layers, for ``Pipeline(stages=)``.

    Layers are the model's own modules, not copies, and `Pipeline.state_dict` has the unsplit model's keys. A model that
    cannot be split without loss is refused.

    Args:
        model: one of these.

            * An ``nn.Sequential`` or a list: its members.
            * A model of Hugging Face's transformers with a list of blocks, such as a causal or masked language model or
              a classifier: what precedes the blocks, every block, and what follows them. The result has ``loss_fn`` and
              ``num_tokens`` for ``Pipeline(loss_fn=, loss_reduction=)``; `Pipeline.step` takes the model's input and,
              by name, ``attention_mask``, ``position_ids`` and what the example has, on every rank. Most causal
              language models, such as Llama, GPT-2, Qwen3 and DeepSeek-V3, need no example. Others are split by
              running an example, on which the layers are compared with the model; if they do not have one list of
              blocks, as the next kind, with the loss of the forward if the example has ``labels``.
            * Another module, with an example: the part of its forward before the first block, every block, and every
              later module. Blocks are the members of an ``nn.ModuleList``, ``nn.ModuleDict`` or ``nn.Sequential``; of
              a model without these, its modules. From the first block on, modules, and functions of torch between
              them, must use only each other's results, tensors that the forward has when the first block begins,
              parameters and buffers of the model, sizes, and constants. Running the example, some twenty times, checks
              this, and compares the layers with the model: in training and evaluation, under autocast, and with other
              sizes and numbers.
        example: one microbatch, as the model takes it; required for the last kind.
        kwargs: keyword arguments of the example. Of the last kind a step must have the same ones, with the same
            values where these are no tensors and the comparison finds that layers would not follow them.

    Returns:
        A sequence of modules, which also has the names of the unsplit model.

    Raises:
        ValueError, TypeError: if the model cannot be split, with the reason and a remedy.
    """
    if isinstance(model, str) or not isinstance(model, nn.Module | Sequence):
        raise TypeError(f"model is a {type(model).__name__}: give an nn.Module, or the list of its layers")
    check_whole_unhooked(model)
    if isinstance(model, nn.Module) and _is_of_peft(model):
        _refuse_peft(model)
    if (example or kwargs) and isinstance(model, nn.Module) and on_meta([model]):
        raise ValueError(
            f"model is a {type(model).__name__} on the meta device, and the example is run on it: pass its layers "
            "as a list; supported models of Hugging Face need no example"
        )
    if not isinstance(model, nn.Module) or isinstance(model, nn.Sequential | nn.ModuleList):
        check_modules("model", model)
        layers = as_layers(model)
        if not layers:
            raise ValueError("model has no layers: give at least one")
        return layers
    check_forward(model)
    _check_example(model, example, kwargs)
    layers = (_of_hugging_face if is_hugging_face(model) else _by_recording)(model, example, kwargs)
    layers.whole = model
    return layers


def _check_example(model: nn.Module, example: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse an example that is given in one piece."""
    parameters = inspect.signature(model.forward).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values()) and not is_hugging_face(model)
    if "example" in kwargs and "example" not in parameters and not takes_any:
        raise TypeError(
            f"split takes an example's arguments as {type(model).__name__} does, not example=: call split(model, x) "
            "or split(model, **batch)"
        )
    if is_hugging_face(model) and any(isinstance(value, Mapping) for value in example):
        raise TypeError(
            f"the example is a dict, and {type(model).__name__} takes tensors by name: call split(model, **batch)"
        )


def _is_of_peft(model: Any) -> bool:
    return any(kind.__module__.startswith("peft.") for kind in type(model).__mro__)


def _refuse_peft(model: nn.Module) -> NoReturn:
    """Name the model within, unless its layers are not all that the adapter does."""
    name, adapter = type(model).__name__, children_of(model).get("base_model", model)
    if not _is_of_peft(adapter):
        raise ValueError(
            f"model is a {name} of peft whose adapter is no part of the model's layers, but makes inputs of the model "
            "(prompts or prefixes), which split cannot keep: use an adapter within layers, such as LoRA"
        )
    kind = next(kind for kind in type(adapter).__mro__ if "forward" in vars(kind))
    if kind.__name__ not in ("BaseTuner", "Module"):
        raise ValueError(
            f"model is a {name} of peft, and the forward of {kind.__name__} does more than call the model (it may add "
            "a loss), which split cannot keep: use an adapter without a forward of its own, such as LoRA, or give the "
            "model in it, peft_model.base_model.model, to train without that"
        )
    raise ValueError(
        f"model is a {name} of peft: give the model in it, peft_model.base_model.model, which has the adapters in its "
        "layers (its keys are those of peft_model without 'base_model.model.')"
    )


def _of_hugging_face(model: Any, example: tuple[Any, ...], kwargs: dict[str, Any]) -> Layers:
    """The layers of a model of transformers; if it has other parts than known models, of its forward."""
    try:
        return _hugging_face(model, example, kwargs)
    except ValueError as error:
        if not example and not kwargs:
            raise
        try:
            with making_masks(kwargs):
                layers = _by_recording(model, example, {**no_cache(model), **kwargs}, no_cache(model))
        except Exception as other:  # also the model's, of an example that it does not take
            why = str(error).partition(f"; {INSTEAD}")[0].partition(f", or {INSTEAD}")[0]
            raise ValueError(
                f"model: the forward of {type(model).__name__} was recorded, and that failed: {first_line(other)}. It "
                f"was recorded since {why}"
            ) from other
    _find_loss(model, layers, {**inspect.signature(model.forward).bind_partial(*example).arguments, **kwargs})
    return layers


def _find_loss(model: Any, layers: Any, example: Mapping[str, Any]) -> None:
    """Give the layers the loss that the forward makes of the example's labels."""
    if example.get("labels") is None:
        return
    try:
        with _in_mode(False, [model]):
            run = partial(model, **no_cache(model))
            layers.num_tokens = _run_restored(model, lambda: find_num_tokens(run, example))
            layers.loss_fn = own_loss
    except Exception as error:  # it is raised where the loss is asked for
        what = "split did not find what the loss of the forward is a mean over, when it set some labels to -100"
        layers.no_loss = f"{what} ({first_line(error)})"


def _by_recording(
    model: nn.Module, example: tuple[Any, ...], kwargs: dict[str, Any], defaults: Mapping[str, Any] | None = None
) -> Layers:
    """The layers of a model whose forward is recorded, compared with the model on the example."""
    if not example and not kwargs:
        raise ValueError(
            f"model is a {type(model).__name__}: give one microbatch as an example, as in split(model, x), to trace "
            "its forward"
        )
    found, refusals = {}, {}
    candidates = candidate_blocks(model)
    # the members of a Sequential become layers in any case
    lists = [blocks for blocks in candidates if not isinstance(parent_of(model, blocks), nn.Sequential)]
    tries = [(blocks, [other for other in lists if other is not blocks]) for blocks in candidates]
    tries += [(blocks, []) for blocks, others in tries if others]
    for i, (blocks, others) in enumerate(tries):
        try:
            found[i] = _run_restored(
                model, partial(record_model, model, blocks, others, example, kwargs, defaults or {})
            )
        except ValueError as error:
            refusals[i] = error
    for i, recorded in sorted(found.items(), key=lambda item: -len(item[1].layers)):
        try:
            layers = _layers_of(model, recorded, example, kwargs)
        except ValueError as error:
            refusals[i] = error
            continue
        _warn_of_largest(layers, [refusals[number] for number in sorted(refusals)])
        _warn_of_parameters(model, recorded)
        _warn_of_calls(recorded)
        return layers
    raise refusals[min(refusals)]  # that of the most likely candidate says most


def _warn_of_largest(layers: Layers, refusals: Sequence[ValueError]) -> None:
    """Say why blocks are not layers, if most of the model is in one layer, and what would cut that is refused."""
    sizes = [sum(parameter.numel() for parameter in layer.parameters()) for layer in layers]
    if refusals and 2 * max(sizes) > sum(sizes):
        text = "split: %.0f %% of the parameters are in layer %d of %d, as other blocks than these are refused: %s"
        logger.warning(text, 100 * max(sizes) / sum(sizes), sizes.index(max(sizes)), len(sizes), refusals[0])


def _warn_of_parameters(model: nn.Module, recorded: RecordedModel) -> None:
    """Name large parameters that the first stage sends to later ones with every microbatch."""
    sizes = {key: model.get_parameter(key).nbytes for key in recorded.inputs if isinstance(key, str)}
    if sum(sizes.values()) > _MANY_BYTES:
        text = (
            "split: functions after the first block use %s, so the first stage sends %.0f MB more with every "
            "microbatch; use a module instead, as an nn.Linear whose weight is that of an embedding"
        )
        logger.warning(text, " and ".join(sizes), sum(sizes.values()) / 1e6)


def _warn_of_calls(recorded: RecordedModel) -> None:
    """Name a module that layer 0 calls for many later layers, as a position embedding before every block."""
    calls = Counter(node.args[1] for node in recorded.first.function.graph.nodes if node.target is operator.call)
    for path, count in calls.items():
        if count >= _MANY_CALLS:
            text = (
                "split: %s is called %d times after the first block began; layer 0 does that, and sends all results "
                "with every microbatch: call it once, and use the result again"
            )
            logger.warning(text, path, count)


def _layers_of(model: nn.Module, recorded: RecordedModel, example: tuple[Any, ...], kwargs: dict[str, Any]) -> Layers:
    paths = {layer.path for layer in recorded.layers}
    holders = ancestors_of(paths)
    for path in holders:
        check_whole_unhooked(model.get_submodule(path))

    def made(fixed: Mapping[str, Any], constants: Mapping[str, Any]) -> Layers:
        make = partial(RecordedStage, model, recorded, fixed, constants)
        return Layers((make([layer]) for layer in range(len(recorded.layers) + 1)), make=make)

    layers = made({}, {})
    _check_complete(model, layers)
    changed: set[str] = set()

    def whole(args: tuple[Any, ...], named: dict[str, Any]) -> Runs:
        return _observed(model, paths, lambda: _repeated(model, lambda: model(*args, **named), changed))

    def sequence(args: tuple[Any, ...], named: dict[str, Any], count: int) -> Runs:
        return _observed(model, paths, lambda: _run_layers(layers, count, args, named))

    _compare(model, layers, whole, sequence, (example, kwargs), changed)
    is_equal = partial(_is_equal, model, whole, sequence)
    device = next((tensor.device.type for tensor in model.parameters()), "cpu")
    with torch.autocast(device, torch.bfloat16, enabled=not torch.is_autocast_enabled(device)):
        if is_equal(example, kwargs) is False:
            raise ValueError(
                f"model: with torch.autocast around both, its layers in sequence do not return the model's output "
                f"({type(model).__name__}); do within modules what depends on autocast or turns it on or off, {INSTEAD}"
            )
    for what, args, named in _other_tensors(example, kwargs):
        if is_equal(args, named) is False:
            raise ValueError(
                f"model: with {what} in the example, its layers in sequence do not return the model's output "
                f"({type(model).__name__}): after its first block it uses a size or value that it read before; read it "
                f"from the blocks' output, {INSTEAD}"
            )
    fixed = {}
    signature = inspect.signature(model.forward)
    given = arguments_of(signature, example, kwargs)
    for name, value in given.items():
        others = [
            inspect.BoundArguments(signature, OrderedDict(given | {name: other}))
            for other in _other_values(value, signature.parameters[name].default)
        ]
        if {is_equal(other.args, other.kwargs) for other in others} - {None} != {True}:
            fixed[name] = without_tensors(value)
    constants = constants_of(model, holders)
    return made(fixed, {name: value for name, value in constants.items() if name not in changed})


def _observed(model: nn.Module, paths: Iterable[str], run: Callable[[], list[Any]]) -> Runs:
    """What is compared of runs: their outputs, those of modules, which they may hide, and the drawn random numbers."""
    seen: list[Any] = []
    # as it is now: the forward may set attributes of what a module returned
    hook = lambda _, __, output: seen.append([*_leaves_of(output)])  # noqa: E731
    handles = [model.get_submodule(path).register_forward_hook(hook) for path in paths]
    try:
        output = run()
    finally:
        for handle in handles:
            handle.remove()
    drawn: Any = np.random.get_state()
    others = hash((random.getstate(), drawn[1].tobytes(), drawn[2]))
    return [output, seen, [torch.get_rng_state(), *map(torch.cuda.get_rng_state, cuda_devices([model])), others]]


def _repeated(model: nn.Module, run: Callable[[], Any], changed: set[str]) -> list[Any]:
    """The results of a run, and of the next ones while they change attributes.

    Args:
        changed: gets the names of the attributes.
    """
    found: list[Any] = []
    while len(found) < _MAX_RUNS:
        kept = KeptAttributes([model])
        found.append(run())
        names = kept.changed()
        changed.update(names)
        if not names:
            break
    return found


Whole = Callable[[tuple[Any, ...], dict[str, Any]], Runs]
"""Runs the model on arguments."""
InSequence = Callable[[tuple[Any, ...], dict[str, Any], int], Runs]
"""Runs the layers on arguments, some times."""


def _is_equal(
    model: nn.Module, whole: Whole, sequence: InSequence, args: tuple[Any, ...], named: dict[str, Any]
) -> bool | None:
    """Whether the layers compute what the model does; None if the model cannot run so, or a step refuses to."""
    try:
        expected = _run_restored(model, lambda: whole(args, named))
    except Exception:  # it takes no such input
        return None
    try:
        return _same(_run_restored(model, lambda: sequence(args, named, len(expected[0]))), expected)
    except ValueError as error:
        return None if isinstance(error.__cause__, OtherInputsError) else False


def _same(found: Any, expected: Any) -> bool:
    pairs = [[*_leaves_of(found)], [*_leaves_of(expected)]]
    return len(pairs[0]) == len(pairs[1]) and all(map(_same_leaf, *pairs))


def _leaves_of(value: Any) -> Iterator[Any]:
    """The leaves of a run's results, with those of dataclasses, which no pytree has."""
    for leaf in pytree.tree_leaves(value):
        if is_dataclass(leaf) and not isinstance(leaf, type):
            yield type(leaf)
            yield from (part for field in fields(leaf) for part in _leaves_of(getattr(leaf, field.name)))
        else:
            yield leaf


def _same_leaf(found: Any, expected: Any) -> bool:
    if isinstance(found, torch.Tensor) and isinstance(expected, torch.Tensor):
        if found.dtype != expected.dtype or found.shape != expected.shape:
            return False
        if torch.equal(found, expected):
            return True
        # a loss that ignores every row is NaN, also with other sizes than the example's
        return bool(found.isnan().any() and ((found == expected) | (found.isnan() & expected.isnan())).all())
    return type(found) is type(expected) and bool(found == expected)


def _other_tensors(
    example: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    """The example with a zero, or a one, at the end, and with other sizes, as the model may not take each."""

    def changed(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or not leaf.dim() or not leaf.numel():
            return leaf
        other = leaf.clone()
        other[..., -1:] = 0
        return other if not torch.equal(other, leaf) else torch.ones_like(leaf)

    yield "other values", *pytree.tree_map(changed, (example, kwargs))
    tensors = tensor_leaves((example, kwargs))
    for dim in range(max((tensor.dim() for tensor in tensors), default=0)):
        size = next(tensor.shape[dim] for tensor in tensors if tensor.dim() > dim)

        def resized(leaf: Any, other: int, dim: int = dim, size: int = size) -> Any:
            if not isinstance(leaf, torch.Tensor) or leaf.dim() <= dim or leaf.shape[dim] != size:
                return leaf
            return torch.cat([leaf, leaf], dim).narrow(dim, 0, other)

        for other in {size - 1, size // 2, 2 * size} - {0, -1, size}:
            args, named = pytree.tree_map(partial(resized, other=other), (example, kwargs))
            yield f"another number of {f'elements in dimension {dim}' if dim else 'rows'}", args, named


def _other_values(value: Any, default: Any) -> list[Any]:
    """Values of an argument on which the layers are compared, too."""
    if type(value) is bool:
        return [not value]
    if type(value) in (int, float):
        return [value + 1, value - 0.25 if isinstance(value, float) else value - 1]
    return [] if default is inspect.Parameter.empty or default is value else [default]


def _hugging_face(model: Any, example: tuple[Any, ...], kwargs: dict[str, Any]) -> Layers:
    """The layers of a transformers model, compared with it on the example if there is one."""
    if not example and not kwargs:
        return layers_of_hugging_face(model)
    given = {**inspect.signature(model.forward).bind_partial(*example).arguments, **kwargs}

    def logits_of(named: dict[str, Any]) -> torch.Tensor:
        logits = getattr(model(**named | no_cache(model)), "logits", None)
        if not isinstance(logits, torch.Tensor):
            raise ValueError(f"model: {type(model).__name__} returns no logits; {INSTEAD}")
        return logits

    layers = layers_of_hugging_face(model, given, lambda: _run_restored(model, lambda: logits_of(given)))
    _check_complete(model, layers)

    def whole(args: tuple[Any, ...], named: dict[str, Any]) -> Runs:
        return [_repeated(model, lambda: logits_of(named), changed)]

    def sequence(args: tuple[Any, ...], named: dict[str, Any], count: int) -> Runs:
        return [_run_layers(layers, count, args, named)]

    changed: set[str] = set()
    _compare(model, layers, whole, sequence, ((), given), changed)
    padded = _padded(model, given)
    if padded is not None and _is_equal(model, whole, sequence, (), padded) is False:
        raise ValueError(
            f"model: {type(model).__name__} finds padding by the token ids, which only its first stage has; give "
            "attention_mask in the example, as split(model, input_ids, attention_mask=mask), and in every step"
        )
    if "labels" in inspect.signature(model.forward).parameters:
        named = given | no_cache(model)
        _run_restored(model, lambda: compare_loss(layers, model, lambda **label: model(**named | label), given))
    logger.info("split: the %d layers of %s return its output on the example", len(layers), type(model).__name__)
    return layers


def _padded(model: Any, example: Mapping[str, Any]) -> dict[str, Any] | None:
    """The example with a token of padding, as the user's may have none; None for a model without such a token."""
    ids, token = example.get("input_ids"), getattr(model.config, "pad_token_id", None)
    if ids is None or token is None:
        return None
    ids = ids.clone()
    ids[0, ids.shape[1] // 2] = token
    return {**example, "input_ids": ids}


def _compare(
    model: nn.Module,
    layers: Layers,
    whole: Whole,
    sequence: InSequence,
    example: tuple[tuple[Any, ...], dict[str, Any]],
    changed: set[str],
) -> None:
    name, expected = type(model).__name__, _run_restored(model, lambda: whole(*example))
    if any(tensor.isnan().any() for tensor in tensor_leaves(expected)):
        raise ValueError(
            f"model: its output on the example has NaN ({name}), so its layers cannot be compared with it; give "
            "another example, such as one without padding"
        )
    try:
        same = _same(_run_restored(model, lambda: sequence(*example, len(expected[0]))), expected)
    except ValueError as error:
        raise ValueError(f"{error}{_text_of_changes(changed)}") from error
    # a function between blocks, or an argument of one, may act in one mode only
    with _in_mode(not model.training, [model, *layers]):
        same_in_other_mode = _is_equal(model, whole, sequence, *example)
    if same and same_in_other_mode is None and not model.training:
        raise ValueError(
            f"model: in training, {name} fails on the example, so its layers cannot be compared with it; give an "
            "example on which it can be trained, such as one of several rows"
        )
    if same and same_in_other_mode is not False:
        return
    differ = f"its layers in sequence do not return the model's output, or draw other random numbers ({name}"
    differ += f"{_text_of_changes(changed)})"
    if not same and not same_in_other_mode:
        raise ValueError(f"model: {differ}; {INSTEAD}")
    raise ValueError(
        f"model: in {'training' if model.training != same else 'evaluation'}, {differ}; make what its forward does "
        "between them, such as dropout, a module, or set its probability to 0 (also that of leaving out layers, a "
        "config's layerdrop), let blocks find the mode themselves, or "
        f"{INSTEAD}"
    )


def _text_of_changes(changed: Collection[str]) -> str:
    names = ", ".join(sorted(changed)[:_MAX_NAMES])
    return f"; its forward changes {names}, of which each stage has only its own changes" if changed else ""


def _run_restored(model: nn.Module, run: Callable[[], Result]) -> Result:
    """Return a run's result; restore the model and the random generators.

    Compiled blocks run as they are written: torch would compile the hooks of a recording, too.
    """
    state, state_of_numpy = random.getstate(), np.random.get_state()
    try:
        with (
            torch.random.fork_rng(devices=cuda_devices([model])),
            torch.no_grad(),
            restored(model),
            torch.compiler.set_stance("force_eager"),
        ):
            return run()
    finally:
        random.setstate(state)
        np.random.set_state(state_of_numpy)


@contextmanager
def _in_mode(mode: bool, parts: Iterable[nn.Module]) -> Iterator[None]:
    """Set the training mode of all modules; restore those of each afterwards."""
    parts = list(parts)
    modes = [(module, module.training) for part in parts for module in part.modules()]
    try:
        for part in parts:
            part.train(mode)
        yield
    finally:
        for module, before in modes:
            module.training = before


def _run_layers(layers: Layers, count: int, example: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The results of some runs, in which each layer has only its own changes of attributes, as in another process."""
    before = [KeptAttributes([layer]) for layer in layers]
    own, results = list(before), []
    try:
        for _ in range(count):
            value: Any = None
            for i, layer in enumerate(layers):
                own[i].put_back()
                inputs, named = (
                    (as_inputs((value,)), selected(kwargs, accepted_names(layer))) if i else (example, kwargs)
                )
                value = layer(*inputs, **named)
                if count > 1:
                    own[i] = KeptAttributes([layer])
                before[i].put_back()
            results.append(value)
    except Exception as error:  # raised again with an explanation
        raise ValueError(
            f"model: its layers in sequence fail where the model does not ({error}); its forward may use blocks, or "
            f"what comes after them, before the first block: {INSTEAD}"
        ) from error
    finally:
        for kept in before:
            kept.put_back()
    return results


def _check_complete(model: nn.Module, layers: Layers) -> None:
    """Check that every parameter is in a layer: a forward that uses a later module early fails here or in the run."""
    found = {id(parameter) for layer in layers for parameter in layer.parameters()}
    missing = [name for name, parameter in model.named_parameters() if id(parameter) not in found]
    if missing:
        raise ValueError(f"model: no layer has {missing[0]}; {INSTEAD}")
