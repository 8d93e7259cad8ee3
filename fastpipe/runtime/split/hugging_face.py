"""Decoder models of Hugging Face's transformers as layers: the embedding, every block, and the norm with the head.

A stage runs the model's own forward, with what belongs to other stages left out. So masks, rotary embeddings and
positions are made by the model's own code, in every stage anew from the mask and positions that the user gives to
`step`; only hidden states go from stage to stage.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable
from importlib import metadata
from typing import Any, NamedTuple

import torch
from torch import nn

from fastpipe.runtime.chain import Layers, WholeNames
from fastpipe.runtime.split.blocks import Absent, Blocks, shallow

SUPPORTED = ("gemma", "gemma2", "gpt2", "llama", "mistral", "qwen2", "qwen3")
"""Values of ``config.model_type`` that tests compare with the unsplit model."""

IGNORED = -100
"""The label that counts for nothing."""

_OLDEST = (5, 4)
"""Before, blocks of some models return tuples, or the model's forward asks a block what kind it is."""


class _Anatomy(NamedTuple):
    """Where the parts of a model are.

    Attributes:
        base: the attribute with all but the head.
        blocks: in the base, the list of blocks.
        before: in the base, what only the first stage needs.
        after: in the base, what only the last stage needs.
        everywhere: in the base, what every stage needs; without parameters.
    """

    base: str
    blocks: str
    before: tuple[str, ...]
    after: tuple[str, ...]
    everywhere: tuple[str, ...]


_LLAMA = _Anatomy("model", "layers", ("embed_tokens",), ("norm",), ("rotary_emb",))
_GPT2 = _Anatomy("transformer", "h", ("wte", "wpe", "drop"), ("ln_f",), ())


def is_hugging_face(model: nn.Module) -> bool:
    """Whether a model is one of the transformers library; which is not imported for the answer."""
    return any(kind.__module__ == "transformers.modeling_utils" for kind in type(model).__mro__)


class DecoderLayers(Layers):
    """The layers of a causal language model; what `fastpipe.split` returns for one.

    Attributes:
        num_blocks: how many blocks it has. Layer 0 is the embedding, the last one the norm with the head.
    """

    def __init__(self, model: Any) -> None:
        self._anatomy = _examine(model)
        self._model = model
        self._loss = model.loss_function
        self._vocab_size = model.config.vocab_size
        base = getattr(model, self._anatomy.base)
        self.num_blocks = len(getattr(base, self._anatomy.blocks))
        super().__init__(self.chain([layer]) for layer in range(self.num_blocks + 2))

    def chain(self, indices: Iterable[int]) -> DecoderStage:
        """Neighbours as one module, which has the parameters of the model, under their names."""
        own = list(indices)
        self.check_unhooked(own)
        return DecoderStage(self._model, self._anatomy, self.num_blocks, own)

    def layer_of(self, name: str) -> int | None:
        """The layer of a parameter; None for a name that there is not."""
        own = [i for i, layer in enumerate(self) if name in dict(layer.named_parameters(remove_duplicate=False))]
        return own[0] if own else None

    @property
    def loss_fn(self) -> Callable[[Any, torch.Tensor], torch.Tensor]:
        """The model's own loss, for ``Pipeline(loss_fn=)``: the labels are the targets, shifted by one in it.

        A mean over the labels of a microbatch that are not -100; use it with ``loss_reduction=layers.num_tokens``, and
        the loss of a step is the mean over all labels of the batch, as the unsplit model has it. A microbatch without
        any label counts for nothing.
        """
        loss, vocab_size = self._loss, self._vocab_size

        def loss_fn(output: Any, labels: torch.Tensor) -> torch.Tensor:
            logits = getattr(output, "logits", output)
            count = max(self.num_tokens(labels), 1)
            found: torch.Tensor = loss(logits=logits, labels=labels, vocab_size=vocab_size, num_items_in_batch=count)
            return found

        loss_fn.target_name = "labels"  # type: ignore[attr-defined]
        return loss_fn

    @staticmethod
    def num_tokens(labels: torch.Tensor) -> int:
        """How many labels count: all but the first of every row, and but -100."""
        return int((labels[..., 1:] != IGNORED).sum())


class DecoderStage(WholeNames):
    """Neighbouring layers of a causal language model.

    Args:
        model: the whole; its modules are used, not copied.
        anatomy: where its parts are.
        num_blocks: how many blocks it has.
        layers: 0 the embedding, then the blocks, then the norm with the head.
    """

    def __init__(self, model: Any, anatomy: _Anatomy, num_blocks: int, layers: list[int]) -> None:
        super().__init__()
        self.is_first = 0 in layers
        self.is_last = num_blocks + 1 in layers
        base = shallow(getattr(model, anatomy.base))
        for name in (*anatomy.before, *anatomy.after):
            if not (self.is_first if name in anatomy.before else self.is_last):
                base._modules[name] = Absent()
        for name in anatomy.everywhere:
            # some kinds note the longest text they have seen
            base._modules[name] = copy.deepcopy(base._modules[name])
        blocks = base._modules[anatomy.blocks]
        own = Blocks({i - 1: blocks[i - 1] for i in layers if 0 < i <= num_blocks}, num_blocks)
        base._modules[anatomy.blocks] = own
        whole = shallow(model)
        whole._modules[anatomy.base] = base
        if not self.is_last:
            del whole._modules["lm_head"]
        # not children: their forwards are used, under this module's names
        self._parts = whole, base, own
        self._layers = layers
        self._modules = whole._modules

    def accepts(self) -> frozenset[str] | None:
        """The keyword arguments that it takes."""
        names = super().accepts()
        return names if self.is_first or names is None else names - {"input_ids"}

    def forward(
        self,
        x: torch.Tensor | None = None,
        *,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """From token ids, in the first stage, or hidden states to hidden states or, in the last stage, logits.

        Args:
            x: token ids or hidden states, ``[rows, tokens, ...]``.
            input_ids: the token ids by name, in the first stage.
            attention_mask: as the unsplit model takes it; the same in every stage.
            position_ids: the same.
        """
        whole, base, blocks = self._parts
        x = input_ids if x is None else x
        if x is None:
            raise ValueError("input_ids: give the token ids, by this name or by position")
        blocks.begin(None if self.is_first else x)
        # later stages get their shape, dtype and device from it, and nothing else
        given: dict[str, Any] = {"input_ids": x} if self.is_first else {"inputs_embeds": x.detach()}
        given |= {"attention_mask": attention_mask, "position_ids": position_ids}
        try:
            found = (whole if self.is_last else base)(**given, use_cache=False)
            if self.is_last:
                logits: torch.Tensor = found.logits
                return logits
            assert blocks.hidden is not None
            return blocks.hidden
        finally:
            blocks.begin(None)


def _examine(model: Any) -> _Anatomy:
    """Where the parts of a model are.

    Raises:
        ValueError: for a model that is not known to be a row of blocks.
    """
    _check_version()
    kind = getattr(model.config, "model_type", None)
    name = type(model).__name__
    if kind not in SUPPORTED:
        raise ValueError(
            f"model is a {name} (model_type {kind!r}): split knows {', '.join(SUPPORTED)}; hand over the layers of "
            "another model as a list"
        )
    if not re.fullmatch(r"\w+(ForCausalLM|LMHeadModel)", name) or not isinstance(model.lm_head, nn.Module):
        raise ValueError(f"model is a {name}: split takes the causal language model, as AutoModelForCausalLM has it")
    anatomy = _GPT2 if kind == "gpt2" else _LLAMA
    base = getattr(model, anatomy.base)
    known = {anatomy.blocks, *anatomy.before, *anatomy.after, *anatomy.everywhere}
    if set(base._modules) != known or set(model._modules) != {anatomy.base, "lm_head"}:
        odd = sorted((set(base._modules) ^ known) | (set(model._modules) ^ {anatomy.base, "lm_head"}))
        raise ValueError(f"model: {name} has other parts than split knows of ({', '.join(odd)}); was something added?")
    if model.config.return_dict is False:
        raise ValueError("model: its config has return_dict=False, and split needs named outputs; set it to True")
    if getattr(model.config, "add_cross_attention", False):
        raise ValueError("model: its config has add_cross_attention, which split does not know; set it to False")
    if len(getattr(base, anatomy.blocks)) != model.config.num_hidden_layers:
        raise ValueError(
            f"model has {len(getattr(base, anatomy.blocks))} blocks and config.num_hidden_layers = "
            f"{model.config.num_hidden_layers}: make them alike, as the model's forward leaves out the rest"
        )
    return anatomy


def _check_version() -> None:
    found = metadata.version("transformers")
    if tuple(map(int, re.findall(r"\d+", found)[:2])) < _OLDEST:
        raise ValueError(f"transformers {found} is too old for split: install transformers>={_OLDEST[0]}.{_OLDEST[1]}")
