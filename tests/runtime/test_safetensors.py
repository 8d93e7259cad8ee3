"""Weights of Hugging Face models read from safetensors files; see also tests/distributed/test_meta.py."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

import fastpipe
from fastpipe import Pipeline
from tests.runtime.checks import same_bits
from tests.runtime.decoders import assert_like, decoder, padded_batch


def on_meta(kind: str, **options: Any) -> Any:
    with torch.device("meta"):
        return decoder(kind, **options)


def build(model: Any, schedule: str = "zbv", **options: Any) -> Pipeline:
    layers = fastpipe.split(model)
    options |= {"loss_reduction": layers.num_tokens, "num_ranks": 2}
    return Pipeline(layers, schedule, 4, layers.loss_fn, **options)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_model_of_several_files(kind: str, tied: bool, tmp_path: Path) -> None:
    whole = decoder(kind, tied=tied)
    whole.save_pretrained(tmp_path, max_shard_size="30KB")
    assert not (tmp_path / "model.safetensors").exists()
    model = on_meta(kind, tied=tied)
    pipe = build(model)
    fastpipe.load_safetensors(tmp_path, pipe)
    assert_like(pipe, whole, 9)


def test_two_values_are_not_loaded_into_one_tied_weight(tmp_path: Path) -> None:
    decoder("llama", tied=False).save_pretrained(tmp_path)
    with pytest.raises(
        ValueError, match="model.embed_tokens.weight and lm_head.weight are one weight .* two different"
    ):
        fastpipe.load_safetensors(tmp_path, build(on_meta("llama", tied=True)))


def test_a_single_file_and_stages_that_have_memory(tmp_path: Path) -> None:
    whole = decoder("llama")
    whole.save_pretrained(tmp_path)
    for path in (tmp_path, tmp_path / "model.safetensors", str(tmp_path)):
        pipe = build(decoder("llama", initializer_range=0.5), "1f1b")
        fastpipe.load_safetensors(path, pipe)
        assert_like(pipe, decoder("llama"), 9)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma2"])
def test_initialised_as_transformers_does(kind: str) -> None:
    whole, model = decoder(kind), on_meta(kind)
    for module in whole.modules():
        vars(module).pop("_is_hf_initialized", None)
    pipe = build(model)
    pipe.to_empty()
    before = torch.random.get_rng_state()
    build(on_meta(kind)).to_empty()
    assert torch.equal(before, torch.random.get_rng_state())
    for one in (whole, model):
        torch.manual_seed(3)
        one.initialize_weights()
    assert_like(pipe, whole, 9)


def test_values_take_the_dtype_of_the_parameters(tmp_path: Path) -> None:
    whole = decoder("llama").to(torch.bfloat16)
    whole.save_pretrained(tmp_path)
    pipe = build(on_meta("llama"))
    fastpipe.load_safetensors(tmp_path, pipe)
    state = whole.state_dict()
    assert all(same_bits(value, state[name].float()) for name, value in pipe.state_dict().items())


def test_what_is_not_in_the_files_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    decoder("llama").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    good = load_file(file)
    pipe = build(on_meta("llama"))

    def load(tensors: dict[str, torch.Tensor]) -> None:
        save_file(tensors, file, {"format": "pt"})
        fastpipe.load_safetensors(tmp_path, pipe)

    with pytest.raises(
        KeyError,
        match=r"has no 'model\.norm\.weight', which the pipeline needs; it has .*same class",
    ):
        load({name: value for name, value in good.items() if name != "model.norm.weight"})
    with pytest.raises(ValueError, match=r"model\.norm\.weight has shape \(32,\) in the pipeline but \(31,\) in "):
        load(good | {"model.norm.weight": torch.zeros(31)})
    assert all(parameter.is_meta for parameter in pipe.parameters()), "nothing changes before it is checked"
    with caplog.at_level(logging.WARNING, "fastpipe"):
        load(good | {"model.layers.0.rotary_emb.inv_freq": torch.zeros(4)})
    assert "tensors that no stage has, and that are not loaded (1): model.layers.0.rotary_emb.inv_freq" in caplog.text
    assert_like(pipe, decoder("llama"), 9)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_files_of_the_model_without_a_head(kind: str, tmp_path: Path) -> None:
    """Their names lack a prefix; the head is the embedding."""
    whole = decoder(kind)
    whole.base_model.save_pretrained(tmp_path)
    assert not any(name.startswith(whole.base_model_prefix) for name in load_file(tmp_path / "model.safetensors"))
    pipe = build(on_meta(kind))
    fastpipe.load_safetensors(tmp_path, pipe)
    assert_like(pipe, whole, 9)


def test_experts_that_are_stored_one_by_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    whole = decoder("mixtral")
    whole.save_pretrained(tmp_path, max_shard_size="30KB")
    pipe = build(decoder("mixtral", initializer_range=0.5))
    caplog.clear()
    with caplog.at_level(logging.WARNING, "fastpipe"):
        fastpipe.load_safetensors(tmp_path, pipe)
    assert not caplog.records
    whole.save_pretrained(tmp_path / "whole")
    file = tmp_path / "whole" / "model.safetensors"
    good = load_file(file)
    up = [name for name in good if name.endswith(".w3.weight")]
    assert len(up) == 4 * whole.config.num_hidden_layers
    for wrong, text in (
        ({name: value for name, value in good.items() if name != up[0]}, "transformers cannot load .*: Sizes of"),
        (good | {up[0]: torch.zeros(3, 5)}, "transformers cannot load .*: stack expects"),
        (good | {up[0]: good[up[0]].to(torch.float8_e4m3fn)}, "is torch.float32 in the pipeline but F8_E4M3, which is"),
    ):
        save_file(wrong, file, {"format": "pt"})
        with pytest.raises(ValueError, match=text):
            fastpipe.load_safetensors(tmp_path / "whole", build(on_meta("mixtral")))


def test_files_that_are_none(tmp_path: Path) -> None:
    pipe = build(on_meta("llama"))

    def refused(path: Any, kind: type[Exception], text: str) -> None:
        with pytest.raises(kind, match=text):
            fastpipe.load_safetensors(path, pipe)

    refused(tmp_path / "nowhere", FileNotFoundError, "'.*nowhere' does not exist: give the folder that save_pretrained")
    refused(tmp_path, FileNotFoundError, r"has neither model\.safetensors\.index\.json nor model\.safetensors")
    refused(None, TypeError, "path = None: give the folder")
    (tmp_path / "model.safetensors").write_bytes(b"no tensors")
    refused(tmp_path, ValueError, r"model\.safetensors is no safetensors file")
    index = tmp_path / "model.safetensors.index.json"
    for text in ("[]", "{", '{"weight_map": 3}'):
        index.write_text(text)
        refused(tmp_path, ValueError, r"index\.json is no index of safetensors files")
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": "other.safetensors"}}))
    refused(tmp_path, FileNotFoundError, r"other\.safetensors is missing, and .*index\.json names it")
    names = dict.fromkeys(decoder("llama").state_dict(), "model.safetensors")
    index.write_text(json.dumps({"weight_map": names}))
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    refused(tmp_path, KeyError, r"has no 'model\.embed_tokens\.weight', which model\.safetensors\.index\.json says")


def test_a_model_from_its_config_alone_is_split() -> None:
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(decoder("llama").config)
    layers = fastpipe.split(model)
    ids = padded_batch(2)[0]
    assert fastpipe.layer_costs(layers, ids, by="flops") == fastpipe.layer_costs(
        fastpipe.split(decoder("llama")), ids, by="flops"
    )


class Scaled(nn.Linear):
    """Multiplies by a buffer."""

    def __init__(self, scale: float) -> None:
        super().__init__(4, 4)
        self.register_buffer("scale", torch.tensor(scale))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scale


def test_buffers_come_into_both_copies_of_a_stage(tmp_path: Path) -> None:
    saved, pipe = (
        Pipeline([Scaled(scale) for _ in range(4)], "dualpipe", 4, nn.functional.mse_loss, num_ranks=2)
        for scale in (0.5, 2.0)
    )
    save_file(saved.state_dict(), tmp_path / "model.safetensors")
    fastpipe.load_safetensors(tmp_path, pipe)
    x, y = torch.randn(8, 4), torch.randn(8, 4)
    assert torch.equal(pipe.step(x, target=y).loss, saved.step(x, target=y).loss)
