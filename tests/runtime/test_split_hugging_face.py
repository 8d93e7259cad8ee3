"""Hugging Face decoder models over a pipeline: the unsplit model's losses and gradients, under its names."""

import copy
import functools
import inspect
import re
from importlib import metadata
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import fastpipe
from fastpipe.runtime import native
from fastpipe.runtime.model.hugging_face import SUPPORTED
from fastpipe.testing import reference_step
from tests.runtime.checks import same_bits, unequal
from tests.runtime.decoders import LAYERS, VOCABULARY, assert_like, decoder, padded_batch, train_decoder
from tests.runtime.test_bits import microbatches_for


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_zb", "dualpipev", "dualpipe"])
@pytest.mark.parametrize(("kind", "executor"), [("llama", "native"), ("gpt2", "python")], indirect=["executor"])
def test_schedules_of_each_kind(kind: str, schedule: str, executor: str) -> None:
    """With padding of other lengths in every microbatch, and tied embeddings on the first and the last stage."""
    count = microbatches_for(schedule, 2)
    assert count is not None
    train_decoder(kind, schedule, count, num_ranks=2, executor=executor)


@pytest.mark.parametrize("kind", SUPPORTED)
def test_every_kind_of_model(kind: str, tmp_path: Path) -> None:
    """From the meta device and files as transformers saves them, with a layer a stage: every boundary is crossed."""
    whole = decoder(kind)
    whole.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = decoder(kind)
    layers = fastpipe.split(model)
    options: dict[str, Any] = {"num_ranks": LAYERS // 2, "loss_reduction": layers.num_tokens}
    pipe = fastpipe.Pipeline(layers, "zbv", 4, layers.loss_fn, **options)
    fastpipe.load_safetensors(tmp_path, pipe)
    assert_like(pipe, whole, 9)
    ids, mask, labels = padded_batch(4)
    output = whole(ids, attention_mask=mask, labels=labels)
    torch.testing.assert_close(layers.loss_fn(output, labels), output.loss, rtol=1e-5, atol=0)


def test_blocks_that_differ_get_the_mask_of_their_kind() -> None:
    """Every other block sees a few tokens back only; which one it is goes by its number in the whole model."""
    kinds = ["sliding_attention", "full_attention", "full_attention"] * 2
    model = decoder("qwen2", layer_types=kinds, sliding_window=3, use_sliding_window=True)
    narrow = decoder("qwen2", layer_types=kinds[1:] + kinds[:1], sliding_window=3, use_sliding_window=True)
    layers = fastpipe.split(model)
    ids, mask, labels = padded_batch(4)
    pipe = fastpipe.Pipeline(layers, "1f1b", 2, layers.loss_fn, num_ranks=4, loss_reduction=layers.num_tokens)
    batch = (ids, labels)
    assert fastpipe.check_parity(pipe, model, batch, kwargs={"attention_mask": mask}).ok
    assert not torch.equal(model(ids).logits, narrow(ids).logits)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_names_are_the_unsplit_models(kind: str, tied: bool) -> None:
    model = decoder(kind, tied=tied)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    pipe = fastpipe.Pipeline(fastpipe.split(model), "zbv", 4, lambda output, _: output.mean(), num_ranks=2)
    assert [name for name, _ in pipe.named_parameters()] == [name for name, _ in model.named_parameters()]
    state = pipe.state_dict()
    assert state.keys() == expected.keys() and all(same_bits(state[name], expected[name]) for name in state)
    assert ("tied        " in pipe.describe()) == tied
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    pipe.load_state_dict(expected)
    assert all(same_bits(value, expected[name]) for name, value in model.state_dict().items())


def test_a_head_that_was_replaced_is_not_tied() -> None:
    """Though the config still says so."""
    model = decoder("llama", tied=True)
    model.lm_head = nn.Linear(*reversed(model.lm_head.weight.shape), bias=False)
    unsplit, layers = copy.deepcopy(model), fastpipe.split(model)
    pipe = fastpipe.Pipeline(layers, "1f1b", 2, layers.loss_fn, num_ranks=2, loss_reduction=layers.num_tokens)
    ids, mask, labels = padded_batch(4)
    pipe.step(ids, attention_mask=mask, labels=labels)
    unsplit(ids, attention_mask=mask, labels=labels).loss.backward()
    for found, expected in zip(model.parameters(), unsplit.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad, rtol=1e-4, atol=1e-6)


def test_the_loss_is_the_unsplit_models_over_all_labels() -> None:
    """Microbatches with few labels, and one with none, count as their labels do."""
    model = decoder("llama")
    ids, mask, labels = padded_batch(6)
    labels[2:4] = -100
    layers = fastpipe.split(model)
    pipe = fastpipe.Pipeline(layers, "1f1b", 3, layers.loss_fn, num_ranks=2, loss_reduction=layers.num_tokens)
    result = pipe.step(ids, attention_mask=mask, target=labels)
    assert result.losses is not None and result.losses[1] == 0
    found = {name: p.grad for name, p in pipe.named_parameters()}
    model.zero_grad()
    expected = model(ids, attention_mask=mask, labels=labels).loss
    expected.backward()
    torch.testing.assert_close(result.loss, expected.detach(), rtol=1e-6, atol=0)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-4, atol=1e-6)
    plain = fastpipe.Pipeline(layers, "1f1b", 3, layers.loss_fn, num_ranks=2)
    unweighted = plain.eval_step(ids, attention_mask=mask, target=labels).loss
    assert abs(unweighted - expected) > 0.01


def test_positions_of_ones_own() -> None:
    model = decoder("gpt2")
    layers = fastpipe.split(model)
    ids, mask, labels = padded_batch(4)
    positions = (torch.arange(ids.shape[1]) + torch.arange(4)[:, None]).contiguous()
    pipe = fastpipe.Pipeline(layers, "1f1b", 2, layers.loss_fn, num_ranks=4)
    kwargs = {"attention_mask": mask, "position_ids": positions}
    found = pipe.eval_step(ids, target=labels, **kwargs).outputs
    torch.testing.assert_close(found, model(ids, **kwargs).logits)
    assert not torch.allclose(found, model(ids, attention_mask=mask).logits)


@pytest.mark.parametrize("recompute", ["none", "layers"])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_gradient_checkpointing(kind: str, recompute: str, executor: str) -> None:
    """The model's own, and fastpipe's. With dropout, whose masks must be the recompute's, too; once a block, also where
    I and W are split."""
    model = decoder(kind, dropout=0.2)
    unsplit = copy.deepcopy(model)
    if recompute == "none":
        model.gradient_checkpointing_enable()
    calls: list[int] = []
    for block in model.model.layers if kind == "llama" else model.transformer.h:
        block.mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    layers = fastpipe.split(model)
    options = {"rng": "per_microbatch", "loss_reduction": layers.num_tokens}
    pipe = fastpipe.Pipeline(
        layers, "zbv", 4, layers.loss_fn, num_ranks=2, executor=executor, recompute=recompute, **options
    )
    ids, mask, labels = padded_batch(8)
    result = pipe.step(ids, attention_mask=mask, target=labels)
    assert len(calls) == 2 * 4 * (LAYERS - 2)
    kwargs = {"attention_mask": mask}
    whole = fastpipe.split(unsplit)
    reference = reference_step(
        whole, (ids, labels), pipe.schedule, whole.loss_fn, kwargs=kwargs, ties=pipe._local.ties, **options
    )
    assert same_bits(result.loss, reference.loss) and not unequal(pipe, unsplit)


@pytest.mark.parametrize(
    ("compiled", "executor"),
    [("blocks", "python"), pytest.param("stages", "native", marks=pytest.mark.nightly)],
    indirect=["executor"],
)
def test_compiled_blocks_and_stages(compiled: str, executor: str) -> None:
    """What dynamo and autograd make of a stage, with I and W split; not inductor's code, which rounds otherwise."""
    torch._dynamo.reset()
    ids, mask, labels = padded_batch(8)
    model = decoder("llama", num_hidden_layers=2)
    unsplit = copy.deepcopy(model)
    if compiled == "blocks":
        for block in model.model.layers:
            block.compile(backend="aot_eager")
    layers = fastpipe.split(model)
    options = {"num_ranks": 2, "loss_reduction": layers.num_tokens, "executor": executor}
    pipe = fastpipe.Pipeline(layers, "zbv", 4, layers.loss_fn, **options)
    for module in pipe.stage_modules.values() if compiled == "stages" else ():
        module.compile(backend="aot_eager", fullgraph=True)
    result = pipe.step(ids, attention_mask=mask, target=labels)
    kwargs = {"attention_mask": mask}
    options = {"loss_reduction": layers.num_tokens, "kwargs": kwargs, "ties": pipe._local.ties}
    reference = reference_step(unsplit, (ids, labels), pipe.schedule, layers.loss_fn, **options)
    torch.testing.assert_close(result.loss, reference.loss, rtol=1e-6, atol=0)
    expected = dict(unsplit.named_parameters())
    for name, parameter in pipe.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name].grad, rtol=1e-4, atol=1e-6)
    waiting = sum(len(stage.deferred or ()) for stage in pipe._steps.stages)
    expected_waiting = 1 if compiled == "blocks" and native.load() is not None else 0
    assert waiting == expected_waiting, "only the head, if it is not compiled with all, waits for W"


def test_a_stage_has_its_own_modules_only() -> None:
    layers = fastpipe.split(decoder("llama", tied=False))
    first, middle, last = (layers.chain(part) for part in (range(2), range(2, 4), range(4, LAYERS)))
    names = [{re.sub(r"\.\w+$", "", name) for name in part.state_dict()} for part in (first, middle, last)]
    assert {name.split(".")[2] for name in names[1]} == {"1", "2"}
    assert "model.embed_tokens" in names[0] and "lm_head" in names[2] and "model.norm" in names[2]
    assert not names[0] & names[1] | names[1] & names[2]
    middle.eval()
    assert [layers[i].model.layers.get_submodule(str(i - 1)).training for i in (1, 2, 3, 4)] == [
        True,
        False,
        False,
        True,
    ]


def test_the_models_own_eval_reaches_the_stages() -> None:
    """A forward around the blocks may ask for the mode, as OPT's does to leave out blocks."""
    model = decoder("llama", num_hidden_layers=2)
    layers = fastpipe.split(model)
    pipe = fastpipe.Pipeline(layers, "1f1b", 2, layers.loss_fn, num_ranks=2)
    ids = padded_batch(4)[0]
    for mode in (False, True):
        model.train(mode)
        pipe.eval_step(ids, target=ids)
        parts = [part for stage in pipe.stage_modules.values() for part in (stage, stage.model, stage._parts[0])]
        assert {part.training for part in parts} == {mode}


def assert_unsplit_step(pipe: fastpipe.Pipeline, model: Any) -> None:
    """A step with the unsplit model's loss and gradients, up to rounding."""
    ids, mask, labels = padded_batch(9)
    result = pipe.step(input_ids=ids, attention_mask=mask, labels=labels)
    found = {name: p.grad.clone() for name, p in pipe.named_parameters() if p.grad is not None}
    model.zero_grad()
    expected = model(input_ids=ids, attention_mask=mask, labels=labels).loss
    expected.backward()
    torch.testing.assert_close(result.loss, expected.detach())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("schedule", "num_ranks"), [("1f1b", 2), ("1f1b", LAYERS), ("interleaved_zb", 2), ("dualpipe", 2)]
)
def test_a_module_in_several_blocks(schedule: str, num_ranks: int, executor: str) -> None:
    """In this process each later stage has a twin of it, and so of what holds it."""
    model = decoder("llama")
    for block in model.model.layers[1:]:
        block.mlp = model.model.layers[0].mlp
    layers = fastpipe.split(model)
    options: dict[str, Any] = {"loss_reduction": layers.num_tokens, "executor": executor}
    pipe = fastpipe.Pipeline(layers, schedule, 4, layers.loss_fn, num_ranks=num_ranks, **options)
    assert_unsplit_step(pipe, model)


def test_a_tied_embedding_within_an_adapter() -> None:
    """As peft makes it: the weight has another name than transformers says."""

    class Adapter(nn.Module):
        def __init__(self, base_layer: nn.Module) -> None:
            super().__init__()
            self.base_layer = base_layer
            self.more = nn.Embedding(VOCABULARY, 32)

        def forward(self, ids: torch.Tensor) -> Any:
            return self.base_layer(ids) + self.more(ids)

    model = decoder("llama")
    model.model.embed_tokens = Adapter(model.model.embed_tokens)
    layers = fastpipe.split(model)
    pipe = fastpipe.Pipeline(layers, "1f1b", 3, layers.loss_fn, num_ranks=2, loss_reduction=layers.num_tokens)
    assert "tied        model.embed_tokens.base_layer.weight = lm_head.weight" in pipe.describe()
    assert_unsplit_step(pipe, model)


@pytest.mark.parametrize("weighted", [False, True])
def test_a_norm_before_and_after_the_blocks(weighted: bool) -> None:
    """NanoChat has one without parameters, which every stage can run; a weight would be in two stages."""
    own = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_hidden_layers": 4}
    config = transformers.AutoConfig.for_model("nanochat", vocab_size=VOCABULARY, use_cache=False, **own)
    model = transformers.AutoModelForCausalLM.from_config(config)
    ids = padded_batch(9)[0]
    if weighted:
        model.model.norm = nn.LayerNorm(32)
        with pytest.raises(ValueError, match="NanoChatForCausalLM calls model.norm before and after its blocks"):
            fastpipe.split(model, ids)
        return
    layers = fastpipe.split(model, ids)
    pipe = fastpipe.Pipeline(layers, "1f1b", 3, layers.loss_fn, num_ranks=6, loss_reduction=layers.num_tokens)
    assert_unsplit_step(pipe, model)
    assert fastpipe.check_parity(pipe, model, (ids, ids)).ok


def test_what_cannot_be_split_is_refused() -> None:
    config = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    ids = torch.zeros(2, 4, dtype=torch.long)
    bert = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model("bert", is_decoder=True, intermediate_size=32, **config)
    )
    with pytest.raises(ValueError, match=r"model_type 'bert'.*docs/hugging-face.md.*split\(model, input_ids\).*list"):
        fastpipe.split(bert)
    with pytest.raises(ValueError, match="LlamaModel: .*ForCausalLM, .*has no head, give the one that has"):
        fastpipe.split(decoder("llama").model)
    t5 = transformers.AutoConfig.for_model("t5", vocab_size=8, d_model=8, d_kv=2, d_ff=8, num_layers=1, num_heads=2)
    batch = {"input_ids": torch.ones(2, 3, dtype=torch.long)}
    with pytest.raises(TypeError, match=r"a dict, and BertLMHeadModel takes .* call split\(model, \*\*batch"):
        fastpipe.split(bert, batch)
    with pytest.raises(TypeError, match=r"as BertLMHeadModel does, not example=: .* split\(model, \*\*batch"):
        fastpipe.split(bert, example=batch)
    with pytest.raises(ValueError, match="T5ForConditionalGeneration was .* that failed: You must specify"):
        fastpipe.split(transformers.T5ForConditionalGeneration(t5), ids)
    odd = decoder("llama")
    odd.model.extra = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"has other parts than split supports: model.extra"):
        fastpipe.split(odd)
    short = decoder("llama")
    short.config.num_hidden_layers = 3
    with pytest.raises(ValueError, match="6 blocks .*config.num_hidden_layers = 3"):
        fastpipe.split(short)
    with pytest.raises(ValueError, match="output_router_logits=True.*set it to False"):
        fastpipe.split(decoder("mixtral", output_router_logits=True), torch.zeros(2, 4, dtype=torch.long))
    with pytest.raises(ValueError, match="return_dict=False.*set it to True"):
        fastpipe.split(decoder("llama", return_dict=False), ids)
    with pytest.raises(ValueError, match="add_cross_attention"):
        fastpipe.split(decoder("gpt2", add_cross_attention=True))


RECORDED: dict[str, tuple[str, dict[str, Any]]] = {
    "t5": ("Seq2SeqLM", {"d_kv": 8, "d_ff": 48, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4}),
    "bart": ("Seq2SeqLM", {}),
    "bert": ("QuestionAnswering", {}),
    "mpnet": ("MaskedLM", {}),
}


@pytest.mark.parametrize("kind", RECORDED)
def test_what_has_other_parts_is_recorded(kind: str, executor: str) -> None:
    """Encoder-decoders with dropout, models whose output has no logits, and blocks that share the weights of a bias."""
    task, own = RECORDED[kind]
    torch.manual_seed(0)
    common = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4}
    if task == "Seq2SeqLM":
        names = ("layers", "attention_heads", "ffn_dim")
        common = {f"{half}_{name}": 2 for half in ("encoder", "decoder") for name in names} | {"d_model": 32}
    config = transformers.AutoConfig.for_model(kind, **common | own, vocab_size=VOCABULARY, pad_token_id=1)
    config.decoder_start_token_id = 1
    model = getattr(transformers, f"AutoModelFor{task}").from_config(config).train()
    if kind == "t5":  # encoder and decoder have one module afterwards
        model.resize_token_embeddings(VOCABULARY + 4)
    ids, mask, labels = padded_batch(8)
    mask[6:] = 1  # transformers leaves out a mask that masks nothing
    batch = {"input_ids": ids.clamp(min=2), "attention_mask": mask}
    if task == "Seq2SeqLM":
        batch["labels"] = labels

    def loss_of(output: Any, _: torch.Tensor) -> torch.Tensor:
        return (output.start_logits if kind == "bert" else output.logits).square().mean()

    layers = fastpipe.split(model, **{name: value[:2] for name, value in batch.items()})
    assert len(layers) >= 6, "each block is a layer"
    pipe = fastpipe.Pipeline(layers, "zbv", 4, loss_of, num_ranks=1, executor=executor, rng="per_microbatch")
    parity = fastpipe.check_parity(pipe, layers, ((), labels), kwargs=batch)
    assert parity.ok and parity.num_compared == len(list(model.parameters())), parity
    with torch.no_grad():
        expected = model.eval()(**{name: value[:2] for name, value in batch.items()})
    outputs = pipe.eval_step(**batch).outputs
    assert type(outputs) is type(expected)
    assert torch.equal(outputs[-1 if kind == "bert" else "logits"][:2], expected[-1 if kind == "bert" else "logits"])


TEXT = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4}
IMAGE = VOCABULARY - 1  # the token that an image replaces


def seeing(kind: str) -> tuple[Any, dict[str, torch.Tensor]]:
    """A model of images and text, and six rows of both."""
    torch.manual_seed(0)
    own: dict[str, Any] = {"image_token_id": IMAGE}
    vision: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    text: dict[str, Any] = {**TEXT, "vocab_size": VOCABULARY, "num_key_value_heads": 2, "pad_token_id": 0}
    ids = torch.randint(1, IMAGE, (6, 10))
    ids[:, 2:6] = IMAGE
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.masked_fill(ids == IMAGE, -100)}
    if kind == "llava":
        vision |= {"num_hidden_layers": 2, "image_size": 16, "patch_size": 8, "model_type": "clip_vision_model"}
        text["model_type"] = "llama"
        batch["pixel_values"] = torch.randn(6, 3, 16, 16)
    else:
        vision |= {"depth": 2, "embed_dim": 32, "num_heads": 4, "mlp_ratio": 2, "patch_size": 4}
        text["rope_scaling"] = {"type": "mrope", "mrope_section": [1, 1, 2]}
        own |= {"video_token_id": 2, "vision_start_token_id": 3, "vision_end_token_id": 4}
        batch |= {"pixel_values": torch.randn(6 * 16, 3 * 2 * 16), "image_grid_thw": torch.tensor([[1, 4, 4]] * 6)}
        batch["mm_token_type_ids"] = (ids == IMAGE).int()
    config = transformers.AutoConfig.for_model(kind, vision_config=vision, text_config=text, **own)
    return transformers.AutoModelForImageTextToText.from_config(config).train(), batch


@pytest.mark.parametrize("kind", ["llava", "qwen2_vl"])
def test_images_and_text(kind: str, executor: str) -> None:
    """By the model's own loss. The forward of llava makes a list of the rows; the images of qwen2_vl are patches."""
    model, batch = seeing(kind)
    layers = fastpipe.split(model, **{name: value[: len(value) // 3] for name, value in batch.items()})
    assert len(layers) >= (10 if kind == "llava" else 6), "each block is a layer; of qwen2_vl those of the text"
    cut: dict[str, Any] = {"pixel_values": lambda value, count: value.chunk(count)}
    pipe = fastpipe.Pipeline(layers, "zbv", 3, num_ranks=2, executor=executor, split=cut)
    parity = fastpipe.check_parity(pipe, model, ((), None), kwargs=batch)
    assert parity.ok and parity.num_compared == len(list(model.parameters())), parity
    if kind == "llava":
        with pytest.raises(ValueError, match="was 2 on the example.*like the step's inputs"):
            pipe.step(**{name: value.repeat_interleave(2, 0) for name, value in batch.items()})


@pytest.mark.parametrize("kind", ["llava", "qwen2_vl"])
def test_the_loss_of_a_recorded_forward_is_the_unsplit_models(kind: str) -> None:
    """Microbatches with few labels, and one with none, count as their labels do."""
    model, batch = seeing(kind)
    layers = fastpipe.split(model, **{name: value[: len(value) // 3] for name, value in batch.items()})
    batch["labels"][:2], batch["labels"][2, 7:] = -100, -100
    cut: dict[str, Any] = {"pixel_values": lambda value, count: value.chunk(count)}
    options: dict[str, Any] = {"num_ranks": 2, "loss_reduction": layers.num_tokens, "split": cut}
    pipe = fastpipe.Pipeline(layers, "1f1b", 3, layers.loss_fn, **options)
    found = pipe.step(**batch).loss
    grads = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    expected = model(**batch).loss
    expected.backward()
    torch.testing.assert_close(found, expected.detach(), rtol=1e-6, atol=0)
    for parameter, grad in zip(model.parameters(), grads, strict=True):
        if grad is not None and parameter.grad is not None:  # the last block of llava's images is not used
            torch.testing.assert_close(grad, parameter.grad, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(pipe.eval_step(**batch).loss, expected.detach())


@pytest.mark.parametrize(
    ("rows", "why"), [(2, "no mean over labels or rows on the example"), (1, "give an example of two rows or more")]
)
def test_a_loss_of_a_recorded_forward_that_is_no_mean_is_refused(rows: int, why: str) -> None:
    class Summed(transformers.LlavaForConditionalGeneration):  # type: ignore[misc]
        def forward(self, **inputs: Any) -> Any:
            output = super().forward(**inputs)
            output.loss = output.loss * inputs["labels"].shape[0]
            return output

    model, batch = seeing("llava")
    layers = fastpipe.split(Summed(model.config), **{name: value[:rows] for name, value in batch.items()})
    for name in ("loss_fn", "num_tokens"):
        with pytest.raises(AttributeError, match=f"{why}.*write loss_fn"):
            getattr(layers, name)


def test_a_loss_of_a_recorded_forward_that_does_not_ignore_labels_is_refused() -> None:
    """As of pixels, where 255 is ignored."""

    class Pixels(transformers.LlavaForConditionalGeneration):  # type: ignore[misc]
        def forward(self, labels: Any = None, **inputs: Any) -> Any:
            output = super().forward(**inputs)
            output["loss"] = nn.functional.cross_entropy(
                output.logits.flatten(0, 1), labels.flatten(), ignore_index=255
            )
            return output

    model, batch = seeing("llava")
    batch["labels"] = batch["input_ids"]
    layers = fastpipe.split(Pixels(model.config), **{name: value[:2] for name, value in batch.items()})
    with pytest.raises(AttributeError, match=r"when it set some labels to -100 \(.*-100.*\); write loss_fn"):
        _ = layers.loss_fn


@pytest.mark.parametrize("why", ["another loss", "fails on the example"])
def test_a_loss_that_is_not_the_one_of_the_models_forward_is_refused(why: str) -> None:
    """As BART's forward, which does not shift the labels."""

    class OwnForCausalLM(transformers.OPTForCausalLM):  # type: ignore[misc]
        def forward(self, input_ids: torch.Tensor, labels: Any = None, **others: Any) -> Any:
            output = super().forward(input_ids, **others)
            if labels is not None:
                output.loss = nn.functional.cross_entropy(output.logits.flatten(0, 1), labels.flatten())
                if why == "fails on the example":
                    raise TypeError("labels here\nare of another kind")
            return output

    model = OwnForCausalLM(tried_model("opt").config).eval()
    ids = padded_batch(2)[0]
    layers = fastpipe.split(model, ids)
    for name in ("loss_fn", "num_tokens"):
        with pytest.raises(AttributeError, match=f"'{name}': the model's .*{why}.*write loss_fn"):
            getattr(layers, name)
    pipe = fastpipe.Pipeline(layers, "1f1b", 2, lambda output, _: output.mean(), num_ranks=2)
    torch.testing.assert_close(pipe.eval_step(ids, target=ids).outputs, model(ids).logits.detach())


def test_an_example_whose_output_has_nan_is_refused() -> None:
    model = tried_model("mixtral")
    with torch.no_grad():
        model.lm_head.weight[3] = torch.nan
    with pytest.raises(ValueError, match="output on the example has NaN .*another example"):
        fastpipe.split(model, padded_batch(2)[0])


def test_a_forward_that_changes_hidden_states_between_blocks_is_refused() -> None:
    """What a later version of a model may do, and what its stages could not."""
    model = decoder("llama")
    layers = fastpipe.split(model)
    stage = layers.chain(range(LAYERS))
    blocks = stage.model.layers
    blocks._flow.begin(None)
    hidden = blocks[0](torch.randn(1, 3, 32), position_embeddings=(torch.ones(1, 3, 8), torch.zeros(1, 3, 8)))
    odd = tried_model("bloom")
    odd.transformer.h[-1].register_forward_hook(lambda _, __, found: list(found))
    with pytest.raises(ValueError, match="changes the hidden states between its blocks"):
        blocks[1](hidden + 1)


def test_an_old_transformers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = decoder("llama")
    monkeypatch.setattr(metadata, "version", lambda name: {"transformers": "4.57.1"}[name])
    with pytest.raises(ValueError, match=r"transformers 4.57.1 .*transformers>=5.4"):
        fastpipe.split(model)


@pytest.mark.parametrize("part", ["LlamaForCausalLM", "LlamaModel"])
def test_a_forward_replaced_on_the_instance_is_refused(part: str) -> None:
    """As `Accelerator.prepare_model` does for bf16: a copy of the module would still run the whole model."""
    model = decoder("llama")
    patched = model if part == "LlamaForCausalLM" else model.model
    original = patched.forward

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return original(*args, **kwargs)

    patched.forward = MethodType(forward, patched)
    with pytest.raises(ValueError, match=f"{part}.forward .*keep_fp32_wrapper=False"):
        fastpipe.split(model)


def test_the_forward_that_accelerate_leaves_behind_is_the_classs() -> None:
    """`unwrap_model` sets the innermost function that the forward of the class wraps, bound to the model."""
    model = decoder("llama")
    model.forward = MethodType(inspect.unwrap(type(model).forward), model)
    layers = fastpipe.split(model)
    ids, _, labels = padded_batch(4)
    pipe = fastpipe.Pipeline(layers, "1f1b", 2, layers.loss_fn, num_ranks=4)
    assert fastpipe.check_parity(pipe, decoder("llama"), (ids, labels)).ok


def test_a_model_that_is_compiled_as_a_whole_is_refused() -> None:
    model = decoder("llama")
    model.compile()
    with pytest.raises(ValueError, match="LlamaForCausalLM .*compile its blocks"):
        fastpipe.split(model)
    for part in ("", "model"):
        model = decoder("llama")
        wrapped = torch.compile(model.get_submodule(part))
        if part:
            model.model = wrapped
        with pytest.raises(ValueError, match=r"OptimizedModule.forward was replaced .*torch.compile.*split the model"):
            fastpipe.split(model if part else wrapped)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_batch_as_the_unsplit_model_takes_it(kind: str) -> None:
    """By name, with one row of positions for all; the labels are the target."""
    model = decoder(kind)
    layers = fastpipe.split(model)
    ids, mask, labels = padded_batch(4)
    batch = {"input_ids": ids, "attention_mask": mask, "position_ids": torch.arange(ids.shape[1])[None] + 1}
    pipe = fastpipe.Pipeline(layers, "zbv", 4, layers.loss_fn, num_ranks=2, loss_reduction=layers.num_tokens)
    result = pipe.step(**batch, labels=labels)
    expected = model(**batch, labels=labels).loss
    torch.testing.assert_close(result.loss, expected.detach())
    with pytest.raises(ValueError, match="input_ids: it was given by position and by this name"):
        pipe.step(ids, **batch, labels=labels)
    torch.testing.assert_close(pipe.eval_step(**batch, labels=labels).loss, expected.detach())
    assert result.losses is not None and len(result.losses) == 4
    with pytest.raises(ValueError, match="token_type_ids: "):
        pipe.step(**batch, labels=labels, token_type_ids=torch.zeros_like(ids))


OTHERS: dict[str, dict[str, Any]] = {
    "phi": {"resid_pdrop": 0.1},
    "gpt_neox": {"hidden_dropout": 0.1},
    "bloom": {},
    "opt": {"word_embed_proj_dim": 32, "ffn_dim": 48},
    "rwkv": {"attention_hidden_size": 32, "rescale_every": 0},  # its blocks return tuples of three
}


def tried_model(kind: str, *, classifies: bool = False) -> Any:
    """A small one of a kind that split does not know by name, or for the classification of texts."""
    torch.manual_seed(0)
    own = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    own |= {"head_dim": 8, "n_embd": 32, "n_head": 4, "n_layer": LAYERS - 2, "pad_token_id": 0 if classifies else None}
    common = {"vocab_size": VOCABULARY, "num_hidden_layers": LAYERS - 2, "use_cache": False}
    common |= {"bos_token_id": 0, "eos_token_id": 1, "tie_word_embeddings": False}
    config = transformers.AutoConfig.for_model(kind, **common, **own, **OTHERS.get(kind, {}))
    auto = transformers.AutoModelForSequenceClassification if classifies else transformers.AutoModelForCausalLM
    return auto.from_config(config).train()


@pytest.mark.parametrize("kind", OTHERS)
def test_other_models_are_tried_on_an_example(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    model = tried_model(kind)
    state = torch.get_rng_state()
    ids, mask, labels = padded_batch(4)
    with caplog.at_level("INFO", "fastpipe"):
        layers = fastpipe.split(model, ids[:2], attention_mask=mask[:2])
    assert f"the {LAYERS} layers of {type(model).__name__} return its output on the example" in caplog.text
    assert torch.equal(state, torch.get_rng_state()) and model.training
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    options: dict[str, Any] = {"num_ranks": 2, "loss_reduction": layers.num_tokens, "rng": "per_microbatch"}
    pipe = fastpipe.Pipeline(layers, "zbv", 4, layers.loss_fn, **options)
    parity = fastpipe.check_parity(pipe, layers, (ids, labels), kwargs={"attention_mask": mask})
    assert parity.ok, parity
    pipe = fastpipe.Pipeline(layers, "1f1b", 2, layers.loss_fn, num_ranks=2, loss_reduction=layers.num_tokens).eval()
    parity = fastpipe.check_parity(pipe, model.eval(), (ids, labels), kwargs={"attention_mask": mask})
    assert parity.ok, parity
    assert pipe.state_dict().keys() == model.state_dict().keys()


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mixtral"])
def test_classifiers_of_texts(kind: str) -> None:
    """Which token is classified is seen by the token ids, so the last stage takes them, too."""
    model = tried_model(kind, classifies=True).eval()
    ids, mask, _ = padded_batch(6)
    ids, labels = ids.clamp(min=1).masked_fill(mask == 0, 0), torch.tensor([0, 1, 1, 0, 1, 0])
    with pytest.raises(ValueError, match="ForSequenceClassification .model_type.*microbatch"):
        fastpipe.split(model)
    layers = fastpipe.split(model, ids[:2], attention_mask=mask[:2])
    pipe = fastpipe.Pipeline(layers, "zbv", 3, layers.loss_fn, num_ranks=2)
    result = pipe.step(input_ids=ids, attention_mask=mask, labels=labels)
    found = {name: p.grad for name, p in pipe.named_parameters()}
    model.zero_grad()
    whole = model(input_ids=ids, attention_mask=mask, labels=labels)
    whole.loss.backward()
    torch.testing.assert_close(result.loss, whole.loss.detach())
    torch.testing.assert_close(result.outputs, whole.logits.detach())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-3, atol=1e-6)
    with pytest.raises(ValueError, match="input_ids: .*last stage"):
        pipe.step(ids, attention_mask=mask, target=labels)


ENCODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("MaskedLM", {}),
    "camembert": ("MaskedLM", {}),  # its head comes before its embedding, which has the same weight
    "modernbert": ("MaskedLM", {"local_attention": 4, "global_attn_every_n_layers": 2}),
    "distilbert": ("TokenClassification", {"dim": 32, "hidden_dim": 48, "n_heads": 4, "n_layers": 4}),
    "electra": ("SequenceClassification", {"embedding_size": 16}),
    "vit": ("ImageClassification", {"image_size": 16, "patch_size": 8}),
    "dinov2": ("ImageClassification", {"image_size": 16, "patch_size": 8}),
    "resnet": ("ImageClassification", {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 2]}),
}


def encoder(kind: str) -> Any:
    """A small encoder with its head; the same numbers at every call."""
    torch.manual_seed(0)
    task, own = ENCODERS[kind]
    common = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4}
    if "hidden_sizes" in own:
        common = {}
    if task != "ImageClassification":
        common |= {"vocab_size": VOCABULARY, "max_position_embeddings": 32, "pad_token_id": 1}
    config = transformers.AutoConfig.for_model(kind, **common | own, num_labels=3)
    return getattr(transformers, f"AutoModelFor{task}").from_config(config).train()


def encoder_batch(task: str, rows: int) -> dict[str, torch.Tensor]:
    if task == "ImageClassification":
        return {"pixel_values": torch.randn(rows, 3, 16, 16), "labels": torch.arange(rows) % 3}
    ids, mask, labels = padded_batch(rows)
    of_task = {"TokenClassification": labels.where(labels < 0, labels % 3), "SequenceClassification": labels[:, 0] % 3}
    return {"input_ids": ids.clamp(min=2), "attention_mask": mask, "labels": of_task.get(task, labels)}


@pytest.mark.parametrize("kind", ENCODERS)
def test_encoders(kind: str) -> None:
    """Every layer is a stage, so every boundary is crossed; then the loss of a batch is the unsplit model's."""
    model, task = encoder(kind), ENCODERS[kind][0]
    batch = encoder_batch(task, 6)
    layers = fastpipe.split(model, **{name: value[:2] for name, value in batch.items()})
    options: dict[str, Any] = {"loss_reduction": layers.num_tokens, "num_ranks": len(layers), "rng": "per_microbatch"}
    pipe = fastpipe.Pipeline(layers, "1f1b", 3, layers.loss_fn, **options)
    labels, kwargs = batch["labels"], {name: value for name, value in batch.items() if name != "labels"}
    parity = fastpipe.check_parity(pipe, layers, ((), labels), kwargs=kwargs)
    assert parity.ok and parity.num_compared == len(list(model.parameters())), parity
    result = pipe.eval().eval_step(**batch)
    expected = model.eval()(**batch)
    torch.testing.assert_close(result.loss, expected.loss.detach())
    torch.testing.assert_close(result.outputs, expected.logits.detach())
    assert pipe.state_dict().keys() == model.state_dict().keys()


@pytest.mark.parametrize(("kind", "schedule"), [("camembert", "zbv"), ("vit", "dualpipe")])
def test_schedules_of_encoders(kind: str, schedule: str, executor: str) -> None:
    model = encoder(kind).eval()
    batch = encoder_batch(ENCODERS[kind][0], 8)
    labels, given = batch.pop("labels"), batch.pop(model.main_input_name)
    layers = fastpipe.split(model, given[:2])
    options: dict[str, Any] = {"loss_reduction": layers.num_tokens, "num_ranks": 2, "executor": executor}
    pipe = fastpipe.Pipeline(layers, schedule, 4, layers.loss_fn, **options)
    parity = fastpipe.check_parity(pipe, model, (given, labels), kwargs=batch)
    assert parity.ok, parity


def test_a_config_of_two_models_has_no_cache_of_its_own() -> None:
    """The forward takes use_cache, and its decoder's config says True."""
    torch.manual_seed(0)
    own = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    both = (transformers.BertConfig(vocab_size=VOCABULARY, **own) for _ in range(2))
    config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(*both)
    model = transformers.EncoderDecoderModel(config=config)
    ids = padded_batch(2)[0]
    with pytest.raises(ValueError, match=r"others by an example: give one microbatch, as in split\(model, \*\*batch\)"):
        fastpipe.split(model)
    assert len(fastpipe.split(model, input_ids=ids, decoder_input_ids=ids)) > 4


def test_a_model_that_finds_padding_by_the_ids_needs_a_mask() -> None:
    """Later stages have no ids; on an example without padding their layers return the model's output."""
    model = encoder("bert")

    def masked(_: nn.Module, args: Any, kwargs: Any) -> Any:
        ids = kwargs.get("input_ids", args[0] if args else None)
        if kwargs.get("attention_mask") is None and ids is not None:
            kwargs["attention_mask"] = ids.ne(1).long()
        return args, kwargs

    model.bert.register_forward_pre_hook(masked, with_kwargs=True)
    ids = padded_batch(2)[0].clamp(min=2)
    with pytest.raises(ValueError, match="finds padding by the token ids.*attention_mask in the example"):
        fastpipe.split(model, ids)
    assert len(fastpipe.split(model, ids, attention_mask=torch.ones_like(ids))) == 6


@pytest.mark.parametrize("problem", ["single_label", "multi_label", "regression"])
def test_labels_of_rows(problem: str) -> None:
    """Of microbatches of 3, 2 and 2 rows; those with -100 do not count, and one microbatch has no others."""
    model = encoder("vit").eval()
    batch = encoder_batch("ImageClassification", 7)
    if problem == "single_label":
        batch["labels"] = torch.tensor([-100, 1, -100, -100, -100, 2, 0])
    else:
        batch["labels"] = torch.eye(3)[batch["labels"]] * (-100 if problem == "regression" else 1)
    model.config.problem_type = problem + "_classification" * (problem != "regression")
    layers = fastpipe.split(model, batch["pixel_values"][:2])
    pipe = fastpipe.Pipeline(layers, "1f1b", 3, layers.loss_fn, num_ranks=2, loss_reduction=layers.num_tokens)
    result = pipe.step(**batch)
    found = {name: p.grad.clone() for name, p in pipe.named_parameters()}
    model.zero_grad()
    expected = model(**batch).loss
    expected.backward()
    torch.testing.assert_close(result.loss, expected.detach())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-3, atol=1e-5)


def test_further_inputs_of_known_models_are_those_of_the_example() -> None:
    """Of GPT-2 kinds of tokens; use_cache is always False."""
    model = decoder("gpt2")
    ids, mask, labels = padded_batch(4)
    kwargs = {"attention_mask": mask, "token_type_ids": ids % 2}
    layers = fastpipe.split(model, ids[:2], **{name: value[:2] for name, value in kwargs.items()}, use_cache=False)
    pipe = fastpipe.Pipeline(layers, "1f1b", 2, layers.loss_fn, num_ranks=2, loss_reduction=layers.num_tokens)
    assert fastpipe.check_parity(pipe, model, (ids, labels), kwargs=kwargs).ok
    with pytest.raises(ValueError, match="input_ids: the first stage needs them"):
        pipe.step(labels=labels)
    with pytest.raises(ValueError, match="labels = None: loss_fn needs a target .* pass labels="):
        pipe.step(ids, label=labels)


def test_other_inputs_are_those_of_the_example() -> None:
    model = encoder("bert")
    ids = padded_batch(4)[0]
    kinds = torch.ones_like(ids)
    for example in ({}, {"token_type_ids": kinds[:2]}):
        layers = fastpipe.split(model, ids[:2], **example)
        pipe = fastpipe.Pipeline(layers, "1f1b", 2, layers.loss_fn, num_ranks=2).eval()
        if not example:
            with pytest.raises(ValueError, match="token_type_ids: "):
                pipe.eval_step(ids, target=ids, token_type_ids=kinds)
    found = pipe.eval_step(ids, target=ids, token_type_ids=kinds).outputs
    torch.testing.assert_close(found, model.eval()(ids, token_type_ids=kinds).logits)


def of_peft(name: str, *bases: type[nn.Module], **methods: Any) -> type[nn.Module]:
    return type(name, bases or (nn.Module,), {"__module__": "peft.peft_model", **methods})


def test_a_wrapper_of_peft_is_refused_with_what_is_in_it() -> None:
    tuner = of_peft("BaseTuner", forward=lambda self, x: self.model(x))
    kinds = [of_peft("LoraModel", tuner), of_peft("AdaLoraModel", tuner, forward=nn.Identity.forward), nn.Linear]
    reasons = [
        "PeftModel of peft: give the model in it, peft_model.base_model.model",
        "PeftModel of peft, and the forward of AdaLoraModel does more .* use an adapter without a forward of its own",
        "PeftModel of peft whose adapter is no part of the model's layers, .* use an adapter within layers",
    ]
    for kind, reason in zip(kinds, reasons, strict=True):
        wrapper = of_peft("PeftModel")()
        wrapper.base_model = kind(4, 4) if kind is nn.Linear else kind()
        with pytest.raises(ValueError, match=reason):
            fastpipe.split(wrapper)
    with pytest.raises(ValueError, match="LoraModel of peft: give the model in it"):
        fastpipe.split(kinds[0]())
