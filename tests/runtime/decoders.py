"""Small Hugging Face decoder models, randomly initialised, and one step of each against the unsplit model's."""

import copy
from typing import Any

import torch
import transformers

import fastpipe
from fastpipe.testing import reference_step
from tests.runtime.checks import assert_same

VOCABULARY = 61
TOKENS = 12
LAYERS = 8
"""Of every model here: the embedding, six blocks, the norm with the head."""

COMMON = {
    "vocab_size": VOCABULARY,
    "num_hidden_layers": LAYERS - 2,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
    # without it the unsplit model's attention reads from a cache, whose layout gives other last bits
    "use_cache": False,
}


SMALL = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "sliding_window": 4,
    "embd_pdrop": 0.0,
    "resid_pdrop": 0.0,
    "residual_dropout": 0.0,
}
"""Of the models whose configs have these."""


def decoder(kind: str, attention: str | None = None, *, tied: bool = True, dropout: float = 0.0, **others: Any) -> Any:
    """A causal language model; the same numbers at every call.

    Args:
        attention: default: sdpa, and eager for the models that transformers has no other for.
    """
    torch.manual_seed(0)
    attention = attention or ("eager" if kind in ("gemma2", "gpt_oss") else "sdpa")
    if kind == "gpt2":
        own = {"n_embd": 32, "n_head": 4, "embd_pdrop": dropout, "attn_pdrop": dropout, "resid_pdrop": dropout}
    else:
        own = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
        own |= {"head_dim": 8, "attention_dropout": dropout}
        default = transformers.CONFIG_MAPPING[kind]()
        own |= {name: size for name, size in SMALL.items() if hasattr(default, name)}
        if hasattr(default, "kv_lora_rank"):  # latent attention has no groups of heads
            own["num_key_value_heads"] = 4
    config = transformers.AutoConfig.for_model(kind, tie_word_embeddings=tied, **(COMMON | own | others))
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    return model.train()


def padded_batch(rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Token ids, a padding mask of other lengths in every row, and labels; a third of the rows is full."""
    generator = torch.Generator().manual_seed(rows)
    ids = torch.randint(VOCABULARY, (rows, TOKENS), generator=generator)
    lengths = torch.tensor([TOKENS if row % 3 == 0 else 2 + (row * 5) % (TOKENS - 2) for row in range(rows)])
    mask = (torch.arange(TOKENS) < lengths[:, None]).long()
    return ids, mask, ids.masked_fill(mask == 0, -100)


def assert_like(pipe: fastpipe.Pipeline, unsplit: Any, rows: int) -> None:
    """A step whose outputs and gradients are the unsplit model's, bit for bit."""
    ids, mask, labels = padded_batch(rows)
    result = pipe.step(ids, attention_mask=mask, target=labels)
    layers = fastpipe.split(unsplit)
    options: Any = {"loss_reduction": layers.num_tokens, "kwargs": {"attention_mask": mask}, "ties": pipe._local.ties}
    reference = reference_step(unsplit, (ids, labels), pipe.schedule, layers.loss_fn, **options)
    reference.outputs = [output.logits for output in reference.outputs]
    assert_same(pipe, result, unsplit, reference)


def train_decoder(
    kind: str, schedule: str, count: int, *, steps: int = 2, attention: str | None = None, **options: Any
) -> None:
    """Steps that accumulate, each compared with the unsplit model's, bit for bit."""
    model = decoder(kind, attention)
    unsplit = copy.deepcopy(model)
    layers = fastpipe.split(model)
    pipe = fastpipe.Pipeline(layers, schedule, count, layers.loss_fn, loss_reduction=layers.num_tokens, **options)
    for step in range(steps):
        assert_like(pipe, unsplit, 2 * count + 1 + step)
