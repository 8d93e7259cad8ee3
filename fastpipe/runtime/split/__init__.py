"""Splits a model into a list of layers.

Promises: the layers in sequence return the model's output; otherwise an error states the reason.
Uses: `model`, `common`.
"""

from __future__ import annotations

from fastpipe.runtime.split.split import split
