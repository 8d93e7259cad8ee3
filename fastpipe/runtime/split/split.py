"""split: a model as a list of its layers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from fastpipe.runtime.common import cuda_devices, on_meta
from fastpipe.runtime.model import (
    Layers,
    SplitLayers,
    accepted_names,
    as_layers,
    check_whole_unhooked,
    restored,
    selected,
)
from fastpipe.runtime.split.hugging_face import DecoderLayers, is_hugging_face
from fastpipe.runtime.split.plain import RowStage, row_of_modules, rows_of_modules

logger = logging.getLogger("fastpipe")
Result = TypeVar("Result")


def split(model: nn.Module | Sequence[nn.Module], *example: Any, **kwargs: Any) -> Layers:
    """Split a model into layers, for ``Pipeline(stages=)``.

    Layers are the model's own modules, not copies, and `Pipeline.state_dict` has the unsplit model's keys. A model that
    cannot be split without loss is refused.

    Args:
        model: one of these.

            * An ``nn.Sequential`` or a list: its members.
            * A causal language model of Hugging Face's transformers: the embedding, every block, and the norm with the
              head. The result has ``loss_fn`` and ``num_tokens`` for ``Pipeline(loss_fn=, loss_reduction=)``;
              `Pipeline.step` takes the token ids and, by name, ``attention_mask`` and ``position_ids``, on every rank.
              Llama, GPT-2, Qwen2, Qwen3, Mistral, Gemma and Gemma 2 need no example. Other models, and text
              classifiers, are split by running an example, on which the layers are compared with the model.
            * Another module with an ``nn.ModuleList``, ``nn.ModuleDict`` or ``nn.Sequential`` of blocks, with an
              example: the part of its forward before the first block, every block, and every later module. Each block
              and later module must take the output of the one before it, and further only buffers of the model and
              constants. Running the example checks this, and compares the layers with the model.
        example: one microbatch, as the model takes it; required for the last kind.
        kwargs: keyword arguments of the example; for the last kind only the part before the blocks may use them.

    Returns:
        A sequence of modules, which also has the names of the unsplit model.

    Raises:
        ValueError, TypeError: if the model cannot be split, with the reason and a remedy.
    """
    if not isinstance(model, nn.Module | Sequence):
        raise TypeError(f"model is a {type(model).__name__}: give an nn.Module, or the list of its layers")
    check_whole_unhooked(model)
    if any(kind.__module__.startswith("peft.") for kind in type(model).__mro__):
        raise ValueError(
            f"model is a {type(model).__name__} of peft: give the model in it, peft_model.base_model.model, which "
            "has the adapters in its layers (its keys are those of peft_model without 'base_model.model.')"
        )
    if (example or kwargs) and isinstance(model, nn.Module) and on_meta([model]):
        raise ValueError(
            f"model is a {type(model).__name__} on the meta device, and the example is run on it: pass its layers "
            "as a list; supported models of Hugging Face need no example"
        )
    if isinstance(model, nn.Module) and is_hugging_face(model):
        return _decoder(model, example, kwargs)
    if isinstance(model, nn.Module) and not isinstance(model, nn.Sequential | nn.ModuleList):
        return _row(model, example, kwargs)
    layers = as_layers(model)
    if not layers:
        raise ValueError("model has no layers: give at least one")
    return layers


def _row(model: nn.Module, example: tuple[Any, ...], kwargs: dict[str, Any]) -> SplitLayers:
    """The layers of a module with a list of blocks, compared with it on the example."""
    if not example and not kwargs:
        raise ValueError(
            f"model is a {type(model).__name__}: give one microbatch as an example, as in split(model, x), to trace "
            "its forward"
        )
    refusal: ValueError | None = None
    for blocks in rows_of_modules(model):
        try:
            return _row_of(model, blocks, example, kwargs)
        except ValueError as error:
            # the first candidate's reason says most
            refusal = refusal or error
    assert refusal is not None
    raise refusal


def _row_of(model: nn.Module, blocks: list[str], example: tuple[Any, ...], kwargs: dict[str, Any]) -> SplitLayers:
    row, expected = _run_restored(model, lambda: row_of_modules(model, blocks, example, kwargs))
    layers = SplitLayers(partial(RowStage, model, row), len(row) + 1)
    _check_complete(model, layers)
    whole, sequence = partial(model, *example, **kwargs), partial(_run_layers, layers, example, kwargs)
    _compare(model, whole, sequence, expected)
    return layers


def _decoder(model: Any, example: tuple[Any, ...], kwargs: dict[str, Any]) -> DecoderLayers:
    """The layers of a transformers model, compared with it on the example if there is one."""
    if not example and not kwargs:
        return DecoderLayers(model)

    def whole() -> torch.Tensor:
        logits: torch.Tensor = model(*example, **kwargs, use_cache=False).logits
        return logits

    layers = DecoderLayers(model, lambda: _run_restored(model, whole))
    _check_complete(model, layers)
    # a classifier's last layer takes the token ids by name
    given = dict(zip(["input_ids"], example, strict=False)) | kwargs
    _compare(model, whole, partial(_run_layers, layers, (), given), _run_restored(model, whole))
    logger.info("split: the %d layers of %s return its output on the example", len(layers), type(model).__name__)
    return layers


def _compare(model: nn.Module, whole: Callable[[], Any], sequence: Callable[[], Any], expected: torch.Tensor) -> None:
    if not torch.equal(_run_restored(model, sequence), expected):
        raise ValueError(
            f"model: its layers in sequence do not return the model's output ({type(model).__name__}); pass "
            "the model's layers as a list"
        )
    if not _equal_in_mode(not model.training, model, whole, sequence):
        raise ValueError(
            f"model: in {'evaluation' if model.training else 'training'}, its layers in sequence do not return the "
            f"model's output ({type(model).__name__}); make what its forward does between them, such as dropout, a "
            "module, let blocks find the mode themselves, or pass the model's layers as a list"
        )


def _run_restored(model: nn.Module, run: Callable[[], Result]) -> Result:
    """Return a run's result; restore the model and the random generators."""
    with torch.random.fork_rng(devices=cuda_devices([model])), torch.no_grad(), restored(model):
        return run()


def _equal_in_mode(mode: bool, model: nn.Module, whole: Callable[[], Any], sequence: Callable[[], Any]) -> bool:
    """Compare in training or evaluation: a function between blocks, or an argument of one, may act only there."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.train(mode)
        return torch.equal(_run_restored(model, whole), _run_restored(model, sequence))
    except Exception:  # it cannot run so on the example, and this cannot be checked
        return True
    finally:
        for module, mode in modes:
            module.training = mode


def _run_layers(layers: Layers, example: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    try:
        value = layers[0](*example, **kwargs)
        for layer in layers[1:]:
            value = layer(value, **selected(kwargs, accepted_names(layer)))
    except Exception as error:  # raised again with an explanation
        raise ValueError(
            f"model: its layers in sequence fail where the model does not ({error}); its forward may use blocks, or "
            "what comes after them, before the first block: pass the model's layers as a list"
        ) from error
    return value


def _check_complete(model: nn.Module, layers: Layers) -> None:
    """Check that every parameter is in a layer: a forward that uses a later module early fails here or in the run."""
    found = {id(parameter) for layer in layers for parameter in layer.parameters()}
    missing = [name for name, parameter in model.named_parameters() if id(parameter) not in found]
    if missing:
        raise ValueError(f"model: no layer has {missing[0]}; pass the model's layers as a list")
