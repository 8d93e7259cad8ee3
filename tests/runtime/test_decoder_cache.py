"""Text written through a pipeline: the stages keep keys and values, and every logit is the unsplit model's."""

from typing import Any

import pytest
import torch
from transformers import DynamicCache

import fastpipe
from fastpipe.runtime.split.hugging_face import SUPPORTED
from tests.runtime.checks import same_bits
from tests.runtime.decoders import LAYERS, VOCABULARY, decoder, padded_batch, written

PROMPT = 5


def build(model: Any, schedule: str, count: int, num_ranks: int, **options: Any) -> tuple[Any, fastpipe.Pipeline]:
    layers = fastpipe.split(model)
    return layers, fastpipe.Pipeline(layers, schedule, count, num_ranks=num_ranks, **options)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize(
    ("schedule", "num_ranks", "count"),
    [("1f1b", LAYERS, 2), ("interleaved_1f1b", 2, 4), ("zbv", 2, 4), ("dualpipev", 2, 4), ("dualpipe", 2, 4)],
)
def test_greedy_text_is_that_of_generate(kind: str, schedule: str, num_ranks: int, count: int, executor: str) -> None:
    """Also where a stage has no block, and microbatches have other rows than their neighbours."""
    model = decoder(kind).eval()
    layers, pipe = build(model, schedule, count, num_ranks, executor=executor)
    prompt = padded_batch(2 * count + 1)[0][:, :PROMPT]
    expected = model.generate(prompt, max_new_tokens=4, do_sample=False, eos_token_id=None, use_cache=True)
    assert torch.equal(written(pipe, layers, prompt, 4), expected)


@pytest.mark.parametrize("kind", SUPPORTED)
def test_every_logit_is_the_unsplit_models(kind: str) -> None:
    """With padding to the left, and a window that is shorter than the text where the model has one."""
    window = {"sliding_window": 4} if kind in ("mistral", "gemma2") else {}
    model = decoder(kind, "eager", **window).eval()
    layers, pipe = build(model, "1f1b", 2, 4)
    ids, mask, _ = padded_batch(4)
    mask = mask.flip(1)
    places = (mask.cumsum(1) - 1).clamp(min=0)
    caches, own = [layers.new_cache() for _ in range(2)], [DynamicCache(config=model.config) for _ in range(2)]
    for begin, end in ((0, 7), (7, 8), (8, 9), (9, 12)):
        given = {"attention_mask": mask[:, :end], "position_ids": places[:, begin:end]}
        found = pipe.eval().eval_step(ids[:, begin:end], past_key_values=caches, **given).outputs
        for rows, cache in zip((slice(0, 2), slice(2, 4)), own, strict=True):
            part = {name: value[rows] for name, value in given.items()}
            with torch.no_grad():
                expected = model(ids[rows, begin:end], past_key_values=cache, use_cache=True, **part).logits
            assert same_bits(found[rows], expected)
    assert [cache.num_tokens for cache in caches] == [12, 12]


def test_what_a_cache_cannot_do_is_refused() -> None:
    layers, pipe = build(decoder("llama"), "1f1b", 2, 2, loss_fn=lambda output, target: output.mean())
    ids = torch.randint(VOCABULARY, (4, PROMPT))

    def refuses(match: str, call: Any, error: type[Exception] = ValueError) -> None:
        with pytest.raises(error, match=match):
            call()

    def caches() -> list[Any]:
        return [layers.new_cache() for _ in range(2)]

    refuses("in training mode; call pipe.eval()", lambda: pipe.eval_step(ids, past_key_values=caches()))
    pipe.eval()
    refuses("has a backward; use eval_step", lambda: pipe.step(ids, target=ids, past_key_values=caches()))
    one = layers.new_cache()
    refuses("microbatch 0 is given to microbatch 1", lambda: pipe.eval_step(ids, past_key_values=[one, one]))
    refuses("the cache of microbatch 0", lambda: list(pipe.stream(ids.split(2), past_key_values=layers.new_cache())))
    refuses("past_key_values is a DecoderCache", lambda: pipe.eval_step(ids, past_key_values=one))
    refuses(
        "past_key_values is a DynamicCache",
        lambda: pipe.eval_step(ids, past_key_values=[DynamicCache()] * 2),
        TypeError,
    )
    begun = caches()
    pipe.eval_step(ids, past_key_values=begun)
    refuses("has 2 rows and microbatch 0 1", lambda: pipe.eval_step(ids[:2], past_key_values=begun))
    pipe.eval_step(ids, past_key_values=begun)
    refuses("index out of range", lambda: pipe.eval_step(ids + VOCABULARY, past_key_values=begun), IndexError)
    refuses("a step with this cache failed", lambda: pipe.eval_step(ids, past_key_values=begun))
