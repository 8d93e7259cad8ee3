"""examples/train_llama.py: one process and two print the same, and the plain model goes on."""

from __future__ import annotations

import re

import pytest

from tests.runtime.examples import losses, run


def test_a_llama_trains_and_goes_on_without_a_pipeline() -> None:
    shown, alone = (run("train_llama.py", "--steps", "3", "--ranks", "2", processes=count) for count in (2, 0))
    for text in (shown, alone):
        assert "gradients are those of the unsplit model, bit for bit" in text
        assert "tied        model.embed_tokens.weight = lm_head.weight (stages [0, 3])" in text
        pipeline, plain = re.findall(r"pipeline's loss (\S+); the plain model's, from its checkpoint, (\S+)", text)[0]
        assert float(pipeline) == pytest.approx(float(plain), abs=2e-4)
        assert "it writes: 'def read" in text
    assert losses(shown) == losses(alone)
    assert float(losses(shown)[-1]) < float(losses(shown)[0])
