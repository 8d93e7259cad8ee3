"""What the stages of a decoder keep of the tokens before: keys and values, from one evaluation step to the next."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from fastpipe.runtime.current import current


class DecoderCache:
    """Of one microbatch: the keys and values that the stages of this process keep of its tokens.

    Every stage has a cache of transformers' own kind, for its own blocks. The model's forward asks such a cache how
    many tokens there were, of whichever block; so for the blocks of other stages as many zeros stand in it.

    Args:
        config: the model's.
    """

    def __init__(self, config: Any) -> None:
        self._config = config
        self._parts: dict[tuple[int, ...], Any] = {}
        self._microbatch: int | None = None
        self._rows = 0
        self._failed = False

    @property
    def num_tokens(self) -> int:
        """How many tokens of every row are in it."""
        return max((int(part.get_seq_length()) for part in self._parts.values()), default=0)

    @contextlib.contextmanager
    def used_by(self, layers: Sequence[int], x: torch.Tensor, training: bool) -> Iterator[Any]:
        """A stage's part of it, to which its forward is about to add.

        Args:
            layers: the stage's: 0 the embedding, then the blocks, then the head.
            x: what the stage was given, ``[rows, tokens, ...]``.
            training: whether the stage is in training mode.

        Raises:
            ValueError: where it cannot be used, with what to do.
        """
        self._check(x, training)
        self._failed = True
        part = self._part(tuple(layers))
        yield part
        nothing = torch.zeros(1, 1, x.shape[1], 1, device=x.device)
        for block in range(self._config.num_hidden_layers):
            if block + 1 not in layers:
                part.update(nothing, nothing, block)
        self._failed = False

    def _check(self, x: torch.Tensor, training: bool) -> None:
        if training:
            raise ValueError("past_key_values: the model is in training mode; call pipe.eval(), or leave it out")
        if torch.is_grad_enabled():
            raise ValueError("past_key_values: a step has a backward; use eval_step, or leave it out")
        if self._failed:
            raise ValueError("past_key_values: a step with this cache failed, and left a part; begin with new ones")
        here = current()
        microbatch = 0 if here is None else here.microbatch
        if self._microbatch not in (None, microbatch):
            raise ValueError(
                f"past_key_values: the cache of microbatch {self._microbatch} is given to microbatch {microbatch}; "
                "give eval_step a list with one for each: [layers.new_cache() for _ in range(num_microbatches)]"
            )
        if self._rows not in (0, len(x)):
            raise ValueError(
                f"past_key_values: the cache has {self._rows} rows and microbatch {microbatch} {len(x)}; give the same "
                "rows as before, or begin with new caches"
            )
        self._microbatch, self._rows = microbatch, len(x)

    def _part(self, layers: tuple[int, ...]) -> Any:
        if layers not in self._parts:
            from transformers import DynamicCache

            self._parts[layers] = DynamicCache(config=self._config)
        return self._parts[layers]
