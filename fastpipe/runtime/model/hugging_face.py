"""Layers of decoder models of Hugging Face's transformers: the embedding, every block, and the norm with the head.

A stage runs the model's own forward without the modules of other stages. So the model's code makes masks, rotary
embeddings and positions, again in every stage, from the mask and positions given to `step`; only hidden states are sent
between stages.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from importlib import metadata
from typing import Any, NamedTuple

import torch
from torch import nn

from fastpipe.runtime.common import children_of, cuda_devices, parameters_of, torch_private
from fastpipe.runtime.model.chain import SplitLayers, WholeNames, shallow

SUPPORTED = ("gemma", "gemma2", "gpt2", "llama", "mistral", "qwen2", "qwen3")
"""Values of ``config.model_type`` that tests compare with the unsplit model; others need an example."""

IGNORED = -100
"""Label of ignored tokens."""

_OLDEST = (5, 4)
"""In earlier versions blocks of some models return tuples, or the model's forward reads a block's type."""


class _Layout(NamedTuple):
    """The attribute names of a model's parts.

    Attributes:
        base: the module with all but the head; a path, where one is in another.
        blocks: in the base, the list of blocks.
        before: in the base, parts of the first stage only.
        after: in the base, parts of the last stage only.
        everywhere: in the base, parts of every stage; without parameters.
        heads: beside the base, parts of the last stage only.
        embedding: in the base, the embedding; in a classifier's last stage, which takes token ids, it is replaced by
            hidden states.
        tuples: whether a block returns a tuple, whose first element is the hidden states.
    """

    base: str
    blocks: str
    before: tuple[str, ...]
    after: tuple[str, ...]
    everywhere: tuple[str, ...]
    heads: tuple[str, ...] = ("lm_head",)
    embedding: str = ""
    tuples: bool = False


_LLAMA = _Layout("model", "layers", ("embed_tokens",), ("norm",), ("rotary_emb",))
_GPT2 = _Layout("transformer", "h", ("wte", "wpe", "drop"), ("ln_f",), ())
_TASKS = {"ForCausalLM": False, "LMHeadModel": False, "ForSequenceClassification": True}
"""Suffixes of supported class names, and whether the model classifies a text."""


def is_hugging_face(model: nn.Module) -> bool:
    """Whether a model is from the transformers library, which is not imported for this."""
    return any(kind.__module__ == "transformers.modeling_utils" for kind in type(model).__mro__)


class DecoderLayers(SplitLayers):
    """The layers of a causal language model or a text classifier; returned by `fastpipe.split`.

    Args:
        run: runs its forward on an example, to find its parts; None for supported models.

    Attributes:
        num_blocks: number of blocks. Layer 0 is the embedding, the last layer the norm with the head.
    """

    def __init__(self, model: Any, run: Callable[[], Any] | None = None) -> None:
        layout = _examine(model, run)
        self._classifies = bool(layout.embedding)
        self._loss = model.loss_function
        self._config = model.config
        self.num_blocks = len(getattr(model.get_submodule(layout.base), layout.blocks))
        super().__init__(partial(DecoderStage, model, layout, self.num_blocks), self.num_blocks + 2)
        # fully_shard and parallelize_module make several Parameters of a tied weight
        if getattr(model.config, "tie_word_embeddings", False):
            self.tied = [[source, target] for target, source in model.all_tied_weights_keys.items()]

    @property
    def loss_fn(self) -> Callable[[Any, torch.Tensor], torch.Tensor]:
        """The model's own loss, for ``Pipeline(loss_fn=)``. Targets are the labels, which it shifts by one.

        It is a mean over the labels of a microbatch other than -100. With ``loss_reduction=layers.num_tokens`` the loss
        of a step is the mean over all labels of the batch, as in the unsplit model. Microbatches without labels are
        ignored. A classifier's loss is a mean over rows.
        """
        loss, config = self._loss, self._config

        def loss_fn(output: Any, labels: torch.Tensor) -> torch.Tensor:
            logits = getattr(output, "logits", output)
            if self._classifies:
                classified: torch.Tensor = loss(labels=labels, pooled_logits=logits, config=config)
                return classified
            count = max(self.num_tokens(labels), 1)
            found: torch.Tensor = loss(
                logits=logits, labels=labels, vocab_size=config.vocab_size, num_items_in_batch=count
            )
            return found

        loss_fn.target_name = "labels"  # type: ignore[attr-defined]
        return loss_fn

    def num_tokens(self, labels: torch.Tensor) -> int:
        """The number of labels that count: all but the first of every row, and but -100; of a classifier the rows."""
        return len(labels) if self._classifies else int((labels[..., 1:] != IGNORED).sum())


class DecoderStage(WholeNames):
    """Consecutive layers of a causal language model or a text classifier.

    Args:
        model: the unsplit model; its modules are used, not copied.
        layers: 0 for the embedding, then the blocks, then the norm with the head.
    """

    def __init__(self, model: Any, layout: _Layout, num_blocks: int, layers: list[int]) -> None:
        super().__init__()
        self.is_first = 0 in layers
        self.is_last = num_blocks + 1 in layers
        base = shallow(model.get_submodule(layout.base))
        for name in (*layout.before, *layout.after):
            if not (self.is_first if name in layout.before else self.is_last):
                children_of(base)[name] = Placeholder()
        for name in layout.everywhere:
            # some of them store the longest text so far
            children_of(base)[name] = copy.deepcopy(children_of(base)[name])
        blocks: Any = children_of(base)[layout.blocks]
        own = Blocks({i - 1: blocks[i - 1] for i in layers if 0 < i <= num_blocks}, num_blocks, layout.tuples)
        children_of(base)[layout.blocks] = own
        whole = holder = shallow(model)
        *outer, last = layout.base.split(".")
        for name in outer:
            children_of(holder)[name] = holder = shallow(children_of(holder)[name])
        children_of(holder)[last] = base
        self._takes_ids = self.is_first
        if not self.is_last:
            for name in layout.heads:
                del children_of(whole)[name]
        elif layout.embedding and not self.is_first:
            self._takes_ids = True
            children_of(base)[layout.embedding] = Placeholder(own)
        # not children: their forwards are used, under this module's names
        self._parts = whole, base, own
        self._layers = layers
        torch_private.set_children(self, children_of(whole))

    def accepts(self) -> frozenset[str] | None:
        """The accepted keyword arguments."""
        names = super().accepts()
        return names if self._takes_ids or names is None else names - {"input_ids"}

    def compute_buffers(self, empty: Collection[int]) -> None:
        """Compute buffers that no checkpoint has, such as rotary embeddings, as transformers does."""
        own = [module for module in self.modules() if any(id(b) in empty for b in module.buffers(recurse=False))]
        holder = shallow(self._parts[0])
        torch_private.set_children(holder, {str(number): module for number, module in enumerate(own)})
        # it also draws weights that these modules have
        with torch.random.fork_rng(devices=cuda_devices(own)):
            holder.initialize_weights()
        for module in own:
            # the user may still initialise them
            vars(module).pop("_is_hf_initialized", None)

    def forward(
        self,
        x: torch.Tensor | None = None,
        *,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Map token ids (first stage) or hidden states to hidden states or logits (last stage).

        Args:
            x: token ids or hidden states, ``[rows, tokens, ...]``.
            input_ids: the token ids by name, in the first stage.
            attention_mask: as in the unsplit model; the same in every stage.
            position_ids: as in the unsplit model; the same in every stage.
        """
        whole, base, blocks = self._parts
        x = input_ids if x is None else x
        if x is None:
            raise ValueError("input_ids: give the token ids, by this name or by position")
        if self._takes_ids and not self.is_first and input_ids is None:
            raise ValueError("input_ids: the last stage needs them to find the token to classify; give them by name")
        blocks.begin(None if self.is_first else x)
        ids = x if self.is_first else input_ids
        # later stages use only the shape, dtype and device of hidden states
        given: dict[str, Any] = {"input_ids": ids} if self._takes_ids else {"inputs_embeds": x.detach()}
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


def _examine(model: Any, run: Callable[[], Any] | None) -> _Layout:
    """Find the parts of a model.

    Raises:
        ValueError: for a model that is not a supported sequence of blocks.
    """
    _check_version()
    kind = getattr(model.config, "model_type", None)
    name = type(model).__name__
    task = next((task for task in _TASKS if re.fullmatch(rf"\w+{task}", name)), None)
    if task is None:
        raise ValueError(
            f"model is a {name}: split takes the causal language model, as AutoModelForCausalLM has it, or that for "
            "sequence classification"
        )
    _check_config(model.config)
    if kind in SUPPORTED and not _TASKS[task]:
        layout = _GPT2 if kind == "gpt2" else _LLAMA
        _check_parts(model, layout)
    elif run is None:
        raise ValueError(
            f"model is a {name} (model_type {kind!r}): without an example split supports causal language models of "
            f"{', '.join(SUPPORTED)}; give one microbatch, as in split(model, input_ids), to try it, or pass the "
            "layers as a list"
        )
    else:
        layout = _find_parts(model, run, classifies=_TASKS[task])
    blocks = len(getattr(model.get_submodule(layout.base), layout.blocks))
    if blocks != model.config.num_hidden_layers:
        raise ValueError(
            f"model has {blocks} blocks but config.num_hidden_layers = {model.config.num_hidden_layers}: set both to "
            "one number, as the model's forward skips the other blocks"
        )
    return layout


def _check_config(config: Any) -> None:
    wrong = {
        "return_dict": (False, "split needs named outputs; set it to True"),
        "add_cross_attention": (True, "which split does not support; set it to False"),
        "output_router_logits": (True, "and the loss that the model makes of them is lost; set it to False"),
    }
    for name, (value, why) in wrong.items():
        if getattr(config, name, None) is value:
            raise ValueError(f"model: its config has {name}={value}, {why}")


def _check_parts(model: Any, layout: _Layout) -> None:
    base = model.get_submodule(layout.base)
    known = {layout.blocks, *layout.before, *layout.after, *layout.everywhere}
    odd = sorted((set(children_of(base)) ^ known) | (set(children_of(model)) ^ {layout.base, *layout.heads}))
    if odd:
        name = type(model).__name__
        raise ValueError(
            f"model: {name} has other parts than split supports: {', '.join(odd)}; remove what "
            "was added, or pass the layers as a list"
        )


def _find_parts(model: Any, run: Callable[[], Any], *, classifies: bool) -> _Layout:
    """Find the parts from a run on an example: the modules called before and after the blocks.

    Raises:
        ValueError: for a model without such blocks, or with parameters outside of its submodules.
    """
    name, prefix = type(model).__name__, model.base_model_prefix
    base: Any = children_of(model).get(prefix)
    children: dict[str, Any] = {} if base is None else children_of(base)
    heads = tuple(key for key in children_of(model) if key != prefix)
    while len(children) == 1 and not parameters_of(base):  # OPT's base has nothing but a decoder
        ((key, base),) = children.items()
        prefix, children = f"{prefix}.{key}", children_of(base)
    lists = [key for key, part in children.items() if isinstance(part, nn.ModuleList)]
    if len(lists) != 1 or not len(children[lists[0]]):
        raise ValueError(f"model: {name}.{prefix} has no single list of blocks; pass the layers as a list")
    (blocks,) = lists
    if parameters_of(base) or parameters_of(model):
        raise ValueError(f"model: {name} has parameters beside its modules; pass the layers as a list")
    row = list(children[blocks])
    calls: list[tuple[str, Any]] = []
    hidden: list[Any] = []
    parts = {key: part for key, part in children.items() if key != blocks}

    def enter(_: nn.Module, args: Any) -> None:
        hidden.extend(args[:1])
        calls.append(("", None))

    handles = [
        part.register_forward_hook(lambda _, __, found, key=key: calls.append((key, found)))
        for key, part in parts.items()
    ]
    handles.append(row[0].register_forward_pre_hook(enter))
    handles.append(row[-1].register_forward_hook(lambda _, __, found: calls.append(("", found))))
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    marks = [place for place, (key, _) in enumerate(calls) if not key]
    if len(marks) != 2 or not hidden:
        raise ValueError(f"model: {name} does not run its blocks once, one after the other; pass a list of layers")
    after = {key for key, _ in calls[marks[1] + 1 :]}
    # parts for all blocks have no parameters, for example rotary embeddings; those that return hidden states are the
    # first stage's
    shapes = {key: getattr(found, "shape", None) for key, found in calls[: marks[0]]}
    everywhere = {
        key
        for key, part in parts.items()
        if key not in after and not any(True for _ in part.parameters()) and shapes.get(key) != hidden[0].shape
    }
    before = tuple(key for key in parts if key not in after | everywhere)
    embedding = [key for key, part in parts.items() if part is model.get_input_embeddings()]
    if not embedding:
        raise ValueError(f"model: the embedding is no part of {name}.{prefix}; pass the layers as a list")
    last_parts = tuple(key for key in parts if key in after)
    tuples = isinstance(calls[marks[1]][1], tuple)
    found = embedding[0] if classifies else ""
    return _Layout(prefix, blocks, before, last_parts, tuple(sorted(everywhere)), heads, found, tuples)


def _check_version() -> None:
    found = metadata.version("transformers")
    if tuple(map(int, re.findall(r"\d+", found)[:2])) < _OLDEST:
        raise ValueError(f"transformers {found} is too old for split: install transformers>={_OLDEST[0]}.{_OLDEST[1]}")


class Blocks(nn.ModuleList):
    """Replaces a model's list of blocks: same length and numbers, with the blocks of one stage only.

    The model's forward iterates over it as over its own list, and gives every block its mask and positions. Only the
    hidden states between blocks are handled here.

    Args:
        tuples: whether a block returns a tuple, whose first element is the hidden states.

    Attributes:
        hidden: input of the next block. Before the model's forward it is the previous stage's output, None in the first
            stage; afterwards this stage's output.
    """

    def __init__(self, blocks: Mapping[int, nn.Module], total: int, tuples: bool) -> None:
        super().__init__()
        for number, block in blocks.items():
            self.add_module(str(number), block)
        self._total, self._tuples = total, tuples
        self._entered = False
        self.hidden: torch.Tensor | None = None

    def begin(self, hidden: torch.Tensor | None) -> None:
        """Prepare for the model's forward."""
        self.hidden = hidden
        self._entered = False

    def __len__(self) -> int:
        return self._total

    def __iter__(self) -> Iterator[Any]:
        return iter(self[:])

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[number] for number in range(self._total)[index]]
        return partial(self._run, children_of(self).get(str(range(self._total)[index])))

    def _run(self, block: nn.Module | None, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run a block on the hidden states; return them unchanged for a block of another stage."""
        if self._entered and hidden is not self.hidden:
            raise ValueError(
                "split: this model changes the hidden states between its blocks; pass its layers as "
                "a list, written so that each takes what the one before it returns"
            )
        self._entered = True
        if self.hidden is None:
            self.hidden = hidden
        found = (self.hidden, None) if self._tuples else self.hidden
        if block is not None:
            found = block(self.hidden, *args, **kwargs)
            self.hidden = found[0] if self._tuples else found
        return found


class Placeholder(nn.Module):
    """Replaces a module of another stage, whose output is not used.

    Args:
        blocks: of a stage that also takes token ids, whose embedding it replaces: it returns the hidden states, of
            which only shape, dtype and device are used.
    """

    def __init__(self, blocks: Blocks | None = None) -> None:
        super().__init__()
        # in a tuple, so that it is not registered as a submodule
        self._blocks = (blocks,)

    def forward(self, x: Any = None, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return the input if it may be hidden states, else 0, which can be added to them."""
        (blocks,) = self._blocks
        if blocks is not None:
            assert blocks.hidden is not None
            return blocks.hidden.detach()
        may_be_hidden = isinstance(x, torch.Tensor) and x.is_floating_point() and x.dim() > 2
        return x if may_be_hidden else torch.zeros(())
