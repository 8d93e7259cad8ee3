"""What needs a GPU says, where there is none, what was therefore not checked."""

from __future__ import annotations

import os

import pytest
import torch

# What waits for a flag must not hold up what shares its hardware queue; CUDA looks at it when it starts.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")


@pytest.fixture(autouse=True)
def on_a_gpu(request: pytest.FixtureRequest) -> None:
    """Skips without a device; every test of this folder has a docstring of what it checks."""
    if torch.cuda.is_available():
        return
    what = " ".join(str(request.function.__doc__).split())
    pytest.skip(f"no CUDA device, so not checked: {what}")
