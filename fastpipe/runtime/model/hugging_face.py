"""Layers of models of Hugging Face's transformers: what precedes the blocks, every block, and what follows them.

A stage runs the model's own forward without the modules of other stages. So the model's code makes masks, rotary
embeddings and positions, again in every stage, from the mask and positions given to `step`; only hidden states are sent
between stages.
"""

from __future__ import annotations

import copy
import inspect
import math
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from typing import Any, NamedTuple

import torch
from torch import nn

from fastpipe.runtime.common import children_of, cuda_devices, first_line, is_dtensor, parameters_of, torch_private
from fastpipe.runtime.model.chain import (
    FULL,
    LAYERS,
    Layers,
    WholeNames,
    attributes_of,
    check_forward,
    recomputed,
    shallow,
)

_KINDS = """
    apertus arcee cohere cohere2 deepseek_v2 deepseek_v3 dots1 ernie4_5 ernie4_5_moe exaone4 gemma gemma2 gemma3_text
    glm glm4 glm4_moe gpt2 gpt_oss granite granitemoe helium hunyuan_v1_dense llama llama4_text minimax_m2 ministral
    ministral3 mistral mixtral nemotron olmo olmo2 olmo3 olmoe phi3 qwen2 qwen2_moe qwen3 qwen3_moe qwen3_next seed_oss
    smollm3 stablelm starcoder2
"""
SUPPORTED = tuple(_KINDS.split())
"""Values of ``config.model_type`` that tests compare with the unsplit model; others need an example."""

INSTEAD = (
    "trace the model with torch's pipeline() (Traced models in docs/coming-from-torch.md), or pass the layers as a "
    "list, each of which takes what the one before it returns (fastpipe.carry passes values on to all later layers)"
)
"""What to do with a model that split refuses."""


IGNORED = -100
"""Label of ignored tokens."""

_OLDEST = (5, 4)
"""In earlier versions blocks of some of these models return tuples."""


class _Layout(NamedTuple):
    """The paths of a model's parts: its blocks, and the modules beside the list of blocks and beside what holds it.

    Attributes:
        blocks: the list of blocks.
        before: parts of the first stage only.
        after: parts of the last stage only.
        everywhere: parts of every stage; without parameters.
        names: the keyword arguments of every stage.
        length: of the tuple that a block returns, whose first element is the hidden states; 0 for a tensor.
    """

    blocks: str
    before: frozenset[str]
    after: frozenset[str]
    everywhere: frozenset[str] = frozenset()
    names: frozenset[str] = frozenset({"attention_mask", "position_ids"})
    length: int = 0


_LLAMA = _Layout(
    "model.layers",
    frozenset({"model.embed_tokens"}),
    frozenset({"model.norm", "lm_head"}),
    frozenset({"model.rotary_emb"}),
)
_GPT2 = _Layout(
    "transformer.h",
    frozenset({"transformer.wte", "transformer.wpe", "transformer.drop"}),
    frozenset({"transformer.ln_f", "lm_head"}),
)
_NEXT, _TOKEN, _ROW = "next token", "token", "row"
_TASKS = {
    "ForCausalLM": _NEXT,
    "LMHeadModel": _NEXT,
    "ForMaskedLM": _TOKEN,
    "ForTokenClassification": _TOKEN,
    "ForSequenceClassification": _ROW,
    "ForImageClassification": _ROW,
    "ForAudioClassification": _ROW,
}
"""Suffixes of supported class names, and what has a label."""


def _task_of(model: nn.Module) -> str | None:
    name = type(model).__name__
    return next((_TASKS[suffix] for suffix in _TASKS if re.fullmatch(rf"\w+{suffix}", name)), None)


def is_hugging_face(model: nn.Module) -> bool:
    """Whether a model is from the transformers library, which is not imported for this."""
    return any(kind.__module__ == "transformers.modeling_utils" for kind in type(model).__mro__)


def no_cache(model: Any) -> dict[str, bool]:
    """The argument of a model's forward by which it keeps no cache of keys and values, if it has one."""
    parameters = inspect.signature(model.forward).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    # a model of images and text has a config of each
    configs = [model.config, *(vars(model.config).values() if takes_any else ())]
    has_cache = "use_cache" in parameters or any(hasattr(config, "use_cache") for config in configs)
    return {"use_cache": False} if has_cache else {}


@contextmanager
def making_masks(example: Mapping[str, Any]) -> Iterator[None]:
    """If masks of the example have padding, let transformers make masks without reading those, as under torch.compile.

    Else it leaves out a mask that masks nothing, and a record of a forward would hold only if that is left out as here.
    """
    utilities: Any = sys.modules.get("transformers.masking_utils")
    masks = [value for name, value in example.items() if name.endswith("mask") and isinstance(value, torch.Tensor)]
    if all(mask.all() for mask in masks) or not hasattr(utilities, "is_tracing"):
        yield
        return
    reads = utilities.is_tracing
    utilities.is_tracing = lambda *_: True
    try:
        yield
    finally:
        utilities.is_tracing = reads


def layers_of_hugging_face(model: Any, example: Collection[str] = (), run: Callable[[], Any] | None = None) -> Layers:
    """The layers of a model of transformers: the embedding, every block, and what follows them.

    Args:
        example: the arguments by name of a run that finds the model's parts; empty for supported models.
        run: the run; None for supported models.
    """
    task, layout = _examine(model, example, run)
    # the ids say which token of a row is the last one
    takes_ids = task is _ROW and model.main_input_name == "input_ids"
    make = partial(HuggingFaceStage, model, layout, takes_ids)
    num_blocks = len(model.get_submodule(layout.blocks))
    layers = Layers((make([layer]) for layer in range(num_blocks + 2)), make=make)
    _set_loss(layers, task, model.loss_function, model.config)
    # fully_shard and parallelize_module make several Parameters of a tied weight
    if getattr(model.config, "tie_word_embeddings", False):
        # peft may have replaced the module of one of them
        there = dict(model.named_parameters(remove_duplicate=False))
        pairs = [[source, target] for target, source in model.all_tied_weights_keys.items()]
        found = [(pair, [there[name] for name in pair]) for pair in pairs if there.keys() >= set(pair)]
        # one that the user has replaced is a weight of its own, whatever the config says
        layers.tied = [pair for pair, (a, b) in found if a is b or is_dtensor(a) or is_dtensor(b)]
    return layers


def _set_loss(layers: Any, task: str, loss: Callable[..., torch.Tensor], config: Any) -> None:
    """Give the layers the model's own loss, as ``loss_fn`` and ``num_tokens``; a pipeline has these, so they must not
    hold the model.

    Targets are the labels, which a causal model shifts by one. The loss is a mean over the labels of a microbatch other
    than -100; with ``loss_reduction=layers.num_tokens`` that of a step is the mean over all labels of the batch, as in
    the unsplit model, and microbatches without labels are ignored. Of a regression, and if a row has several labels,
    rows are counted.
    """

    def num_tokens(labels: torch.Tensor) -> int:
        if task is _ROW and labels.is_floating_point():
            return len(labels)
        return int(((labels[..., 1:] if task is _NEXT else labels) != IGNORED).sum())

    def loss_fn(output: Any, labels: torch.Tensor) -> torch.Tensor:
        logits = getattr(output, "logits", output)
        count = num_tokens(labels)
        if task is not _ROW:
            size, divisor = config.vocab_size, max(count, 1)
            return loss(logits=logits, labels=labels, vocab_size=size, config=config, num_items_in_batch=divisor)
        if count:
            return loss(labels=labels, pooled_logits=logits, config=config)
        found: torch.Tensor = logits.sum() * 0  # the mean of no labels would be NaN
        return found

    loss_fn.target_name = "labels"  # type: ignore[attr-defined]
    layers.loss_fn, layers.num_tokens = loss_fn, num_tokens


def compare_loss(layers: Any, model: nn.Module, run: Callable[..., Any], example: Mapping[str, Any]) -> None:
    """Compare the layers' loss with that of the model's forward on an example; if they differ, the layers have none.

    Args:
        run: runs the forward, of labels by name.
        example: may have labels; default: those that tokens have by the logits, and none for rows.
    """
    labels, mask = example.get("labels"), example.get("attention_mask")
    if labels is None and _task_of(model) is not _ROW:
        labels = run().logits.argmax(-1)
        if mask is not None and mask.shape == labels.shape:
            labels = labels.masked_fill(mask == 0, IGNORED)
    if labels is None:
        return
    try:
        output = run(labels=labels)
        found, own = layers.loss_fn(output, labels).double(), output.loss.double()
    except Exception as error:  # it is raised where the loss is asked for
        layers.no_loss = f"the model's loss fails on the example ({first_line(error)})"
    else:
        rounding = 1e-4 + 4 * torch.finfo(output.logits.dtype).eps
        if torch.allclose(found, own, rtol=rounding, atol=0):
            return
        layers.no_loss = (
            f"the model's forward computes another loss ({own:.4g} on the example) than its loss_function "
            f"({found:.4g}), as it does not shift the labels, for example"
        )
    del layers.loss_fn, layers.num_tokens


def own_loss(output: Any, labels: torch.Tensor) -> torch.Tensor:
    """The loss that a model's forward has made of the labels."""
    loss: torch.Tensor = output["loss"]
    return loss


own_loss.target_name = "labels"  # type: ignore[attr-defined]
own_loss.target_is_input = True  # type: ignore[attr-defined]


_FEW_LABELS = 4


def find_num_tokens(run: Callable[..., Any], example: Mapping[str, Any]) -> Callable[[torch.Tensor], int]:
    """What the loss of a model's forward is a mean over: labels but -100, with or without the first of a row, or rows.

    Args:
        run: runs the forward.
        example: a microbatch of two rows or more, with labels; of these, few are left, so that the means differ.

    Raises:
        ValueError: if its loss is none of these means, or if they are equal.
    """
    labels: torch.Tensor = example["labels"]
    if len(labels) < 2:
        raise ValueError("give an example of two rows or more")
    counts: list[Callable[[torch.Tensor], int]] = [len]
    if not labels.is_floating_point():
        counts = [lambda labels: int((labels != IGNORED).sum())]
        if labels.dim() > 1:
            counts += [lambda labels: int((labels[..., 1:] != IGNORED).sum()), len]
            labels = labels.where(labels != IGNORED, labels.max())
            labels[0, 1:] = labels[1:, _FEW_LABELS:] = IGNORED
    batch, num_rows = {**example, "labels": labels}, len(labels)

    def of_row(value: Any, row: int) -> Any:
        parts = value.chunk(num_rows) if isinstance(value, torch.Tensor) else (value,)
        return parts[row % len(parts)]

    rows = [{name: of_row(value, row) for name, value in batch.items()} for row in range(num_rows)]
    own, *losses = (own_loss(run(**inputs), labels) for inputs in (batch, *rows))
    rounding, found = 1e-4 + torch.finfo(own.dtype).eps, []
    for count in counts:
        weights = [count(row["labels"]) for row in rows]
        total = sum(w * float(x) for w, x in zip(weights, losses, strict=True) if w)
        if sum(weights) and math.isclose(total, float(own) * sum(weights), rel_tol=rounding):
            found.append(count)
    if len(found) != 1:
        what = "equal to several means, over labels or rows," if found else "no mean over labels or rows"
        raise ValueError(f"it is {what} on the example")
    return found[0]


class HuggingFaceStage(WholeNames):
    """Consecutive layers of a model of transformers.

    Args:
        model: the unsplit model; its modules are used, not copied.
        takes_ids: whether the last stage takes the token ids, too.
        layers: 0 for what precedes the blocks, then the blocks, then what follows them.
    """

    def __init__(self, model: Any, layout: _Layout, takes_ids: bool, layers: list[int]) -> None:
        super().__init__()
        all_blocks = list(model.get_submodule(layout.blocks))
        self.is_first = 0 in layers
        self.is_last = len(all_blocks) + 1 in layers
        *outer, last = layout.blocks.split(".")
        whole = holder = shallow(model)
        copied: list[tuple[nn.Module, nn.Module]] = [(whole, model)]
        for name in outer:
            inner = holder.get_submodule(name)
            children_of(holder)[name] = holder = shallow(inner)
            copied.append((holder, inner))
        flow = Flow()
        own = [i - 1 for i in layers if 0 < i <= len(all_blocks)]
        children_of(holder)[last] = Blocks(all_blocks, own, layout.length, flow)
        for path in (*(() if self.is_first else layout.before), *(() if self.is_last else layout.after)):
            whole.set_submodule(path, Placeholder(whole.get_submodule(path), flow))
        for path in layout.everywhere:
            # some of them store the longest text so far
            part = whole.get_submodule(path)
            own_part = copy.deepcopy(part)
            whole.set_submodule(path, own_part)
            copied += zip(own_part.modules(), part.modules(), strict=True)
        run = whole if self.is_last or not outer else whole.get_submodule(outer[0])
        self._main = model.main_input_name
        self._takes_main = self.is_first or (self.is_last and takes_ids)
        embedded = "inputs_embeds" in inspect.signature(run.forward).parameters
        self._input = "inputs_embeds" if embedded and not self._takes_main else self._main
        self._names = layout.names
        # not children: their forwards are used, under this module's names
        self._parts = whole, run, flow
        self._no_cache = no_cache(model)
        torch_private.set_children(self, children_of(whole))
        self.stand_for(model, copied)

    def accepts(self) -> frozenset[str] | None:
        """The accepted keyword arguments."""
        return self._names | {self._main} if self._takes_main else self._names

    def recomputes(self, way: str) -> bool:
        """Recompute each block by itself."""
        self._parts[2].recomputes = way == LAYERS
        return way != FULL

    def as_model(self) -> Any:
        """The model with the modules of this stage only, for functions of transformers."""
        model = shallow(self._parts[0])
        torch_private.set_children(model, children_of(self))
        return model

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

    def forward(self, x: Any = None, **named: Any) -> torch.Tensor:
        """Map the model's input (first stage) or hidden states to hidden states or logits (last stage).

        Args:
            x: the input, such as token ids, or hidden states, ``[rows, tokens, ...]``.
            named: the input by name, in the first stage; others as in the unsplit model, the same in every stage.
        """
        whole, run, flow = self._parts
        self.follow_modes()
        # a twin, of a stage that has a module of an earlier one, has others
        torch_private.set_children(whole, children_of(self))
        given = named.pop(self._main, None)
        if self.is_first:
            if given is not None and x is not None:
                raise ValueError(f"{self._main}: it was given by position and by this name; leave one of them out")
            given = x if given is None else given
        elif not self._takes_main:
            # later stages use only the shape, dtype and device of hidden states
            given = x.detach()
        if given is None:
            why = "first stage needs them" if self.is_first else "last stage needs them to find the token to classify"
            raise ValueError(f"{self._main}: the {why}; give them by this name, on every rank")
        flow.begin(None if self.is_first else x)
        try:
            found = run(**{self._input: given}, **named | self._no_cache)
            if self.is_last:
                logits: torch.Tensor = found.logits
                return logits
            assert flow.hidden is not None
            return flow.hidden
        finally:
            flow.begin(None)


def _examine(model: Any, example: Collection[str], run: Callable[[], Any] | None) -> tuple[str, _Layout]:
    """What has a label, and the parts of a model.

    Raises:
        ValueError: for a model that is not a supported sequence of blocks.
    """
    _check_version()
    kind = getattr(model.config, "model_type", None)
    name, task = type(model).__name__, _task_of(model)
    if task is None:
        example_too = " (others by an example: give one microbatch, as in split(model, **batch))" if run is None else ""
        raise ValueError(
            f"model is a {name}: split takes models whose class name ends in {', '.join(_TASKS)}{example_too}; if it "
            f"has no head, give the one that has (of AutoModelForCausalLM, for example), or {INSTEAD}"
        )
    _check_config(model.config)
    if kind in SUPPORTED and task is _NEXT:
        layout = _GPT2 if kind == "gpt2" else _LLAMA
        layout = layout._replace(names=layout.names | _further(model, example))
        _check_parts(model, layout)
    elif run is None:
        raise ValueError(
            f"model is a {name} (model_type {kind!r}), which is none of the causal language models that split takes "
            f"without an example (What works in docs/hugging-face.md): give one microbatch, as in split(model, "
            f"{model.main_input_name}), to try it, or pass the layers as a list"
        )
    else:
        layout = _find_parts(model, example, run)
    blocks, said = len(model.get_submodule(layout.blocks)), getattr(model.config, "num_hidden_layers", None)
    if run is None and blocks != said:
        raise ValueError(
            f"model has {blocks} blocks but config.num_hidden_layers = {said}: set both to one number, as the model's "
            "forward skips the other blocks"
        )
    return task, layout


def _check_config(config: Any) -> None:
    wrong = {
        "return_dict": (False, "split needs named outputs; set it to True"),
        "add_cross_attention": (True, "which split does not support; set it to False"),
        "output_router_logits": (True, "and the loss that the model makes of them is lost; set it to False"),
    }
    for name, (value, why) in wrong.items():
        if getattr(config, name, None) is value:
            raise ValueError(f"model: its config has {name}={value}, {why}")


def _parts(model: nn.Module, blocks: str) -> dict[str, nn.Module]:
    """The modules beside a model's list of blocks, and beside each module that holds it, by path."""
    found: dict[str, nn.Module] = {}
    holder, prefix = model, ""
    for name in blocks.split("."):
        check_forward(holder)
        if parameters_of(holder):
            raise ValueError(f"model: {type(holder).__name__} has parameters beside its modules; {INSTEAD}")
        found |= {prefix + key: part for key, part in children_of(holder).items() if part is not None and key != name}
        holder, prefix = holder.get_submodule(name), f"{prefix}{name}."
    return found


def _check_parts(model: Any, layout: _Layout) -> None:
    odd = sorted(set(_parts(model, layout.blocks)) ^ (layout.before | layout.after | layout.everywhere))
    if odd:
        raise ValueError(
            f"model: {type(model).__name__} has other parts than split supports: {', '.join(odd)}; remove what "
            "was added, or pass the layers as a list"
        )


def _find_parts(model: Any, example: Collection[str], run: Callable[[], Any]) -> _Layout:
    """Find the parts from a run on an example: the modules called before and after the blocks.

    Raises:
        ValueError: for a model without such blocks, or with parameters outside of its submodules.
    """
    name = type(model).__name__
    lists = {path: part for path, part in model.named_modules() if isinstance(part, nn.ModuleList) and len(part)}
    if not lists:
        raise ValueError(f"model: {name} has no list of blocks; {INSTEAD}")
    # the first of equals is the outermost
    blocks = max(lists, key=lambda path: sum(p.numel() for p in lists[path].parameters()))
    parts = _parts(model, blocks)
    row = list(lists[blocks])
    calls: list[tuple[Any, Any]] = []
    hidden: list[Any] = []
    handles = [
        part.register_forward_hook(lambda _, __, found, key=key: calls.append((key, found)))
        for key, part in [*parts.items(), *enumerate(row)]
    ]
    handles.append(row[0].register_forward_pre_hook(lambda _, args: hidden.extend(args[:1])))
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    order = [key for key, _ in calls]
    if [key for key in order if key in range(len(row))] != list(range(len(row))) or not hidden:
        raise ValueError(f"model: {name} does not run {blocks} once, one after the other; {INSTEAD}")
    begin, end = order.index(0), order.index(len(row) - 1)
    after = frozenset(order[end + 1 :])
    both = after.intersection(order[:begin])
    weighted = {key for key, part in parts.items() if any(True for _ in part.parameters())}
    if both & weighted:
        raise ValueError(f"model: {name} calls {min(both & weighted)} before and after its blocks; {INSTEAD}")
    # parts for all blocks have no parameters, for example rotary embeddings; those that return hidden states are the
    # first stage's
    shapes = {key: getattr(found, "shape", None) for key, found in calls[:begin]}
    everywhere = both | {key for key in parts if key not in after | weighted and shapes.get(key) != hidden[0].shape}
    after -= everywhere
    base = blocks.partition(".")[0]
    odd = [key for key, found in calls if str(key).startswith(base) and not isinstance(found, torch.Tensor)]
    odd = [key for key in odd if key not in everywhere]
    if odd:
        raise ValueError(f"model: {name}.{odd[0]} does not return a tensor; {INSTEAD}")
    taken = inspect.signature(model.forward).parameters.keys()
    names = (_LLAMA.names & taken) | _further(model, example)
    length = len(calls[end][1]) if isinstance(calls[end][1], tuple) else 0
    return _Layout(blocks, frozenset(parts) - after - everywhere, after, everywhere, frozenset(names), length)


def _further(model: Any, example: Collection[str]) -> set[str]:
    """Inputs of the example besides the first stage's and the labels."""
    return set(example) - {model.main_input_name, "labels"}


def _check_version() -> None:
    found = metadata.version("transformers")
    if tuple(map(int, re.findall(r"\d+", found)[:2])) < _OLDEST:
        raise ValueError(f"transformers {found} is too old for split: install transformers>={_OLDEST[0]}.{_OLDEST[1]}")


@dataclass(eq=False)
class Flow:
    """The hidden states between the blocks of a stage.

    Attributes:
        hidden: input of the next block. Before the model's forward it is the previous stage's output, None in the first
            stage; afterwards this stage's output.
        entered: whether the model's forward has reached the blocks.
        recomputes: whether each block is recomputed in the backward.
    """

    hidden: torch.Tensor | None = None
    entered: bool = False
    recomputes: bool = False

    def begin(self, hidden: torch.Tensor | None) -> None:
        """Prepare for the model's forward."""
        self.hidden, self.entered = hidden, False


class Blocks(nn.ModuleList):
    """Replaces a model's list of blocks: same length and numbers, with the blocks of one stage only.

    The model's forward iterates over it as over its own list, and gives every block its mask and positions. Only the
    hidden states between blocks are handled here.

    Args:
        blocks: those of the whole model.
        own: the numbers of the stage's.
        length: of the tuple that a block returns, whose first element is the hidden states; 0 for a tensor.
        flow: the hidden states, outside of this module and its twins.
    """

    def __init__(self, blocks: Sequence[nn.Module], own: Iterable[int], length: int, flow: Flow) -> None:
        super().__init__()
        for number in own:
            self.add_module(str(number), blocks[number])
        self._length = length
        self._attributes = [attributes_of(block) for block in blocks]
        self._flow = flow

    def __len__(self) -> int:
        return len(self._attributes)

    def __iter__(self) -> Iterator[Any]:
        return iter(self[:])

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[number] for number in range(len(self))[index]]
        number = range(len(self))[index]

        def block(*args: Any, **kwargs: Any) -> Any:
            return self._run(number, *args, **kwargs)

        vars(block).update(self._attributes[number])  # the model's forward may read the block's type, for example
        return block

    def _run(self, number: int, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run a block on the hidden states; return them unchanged for a block of another stage."""
        flow = self._flow
        if flow.entered and hidden is not flow.hidden:
            raise ValueError(
                "split: this model changes the hidden states between its blocks; pass its layers as "
                "a list, written so that each takes what the one before it returns"
            )
        flow.entered = True
        if flow.hidden is None:
            flow.hidden = hidden
        block = children_of(self).get(str(number))
        found = (flow.hidden, *[None] * (self._length - 1)) if self._length else flow.hidden
        if block is not None:
            call = partial(recomputed, block, block) if flow.recomputes else block
            found = call(flow.hidden, *args, **kwargs)
            flow.hidden = found[0] if self._length else found
        return found


class Placeholder(nn.Module):
    """Replaces a module of another stage: it returns the hidden states, of which only shape, dtype and device are used.

    Args:
        module: the other stage's, whose attributes the model's forward may read.
        flow: the hidden states.
    """

    def __init__(self, module: nn.Module, flow: Flow) -> None:
        super().__init__()
        vars(self).update(attributes_of(module))
        self._flow = flow

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return the hidden states without their graph."""
        assert self._flow.hidden is not None
        return self._flow.hidden.detach()
