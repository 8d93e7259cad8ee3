"""Splits a model into the list of its layers.

Promises: the layers one after the other give the model's own output, or an error says why not.
Uses: `model`, `common`.
"""

from __future__ import annotations

from fastpipe.runtime.split.split import split

__all__ = ["split"]
