"""What needs a GPU says, where there is none, what was therefore not checked."""

import pytest
import torch

HOST_CUDA = "CUDA on the host"
"""What the device is called that tests/host_cuda makes."""


@pytest.fixture(autouse=True)
def on_a_gpu(request: pytest.FixtureRequest) -> None:
    """Skips without a device; every test of this folder has a docstring of what it checks."""
    if torch.cuda.is_available():
        return
    what = " ".join(str(request.function.__doc__).split())
    pytest.skip(f"no CUDA device, so not checked: {what}")


@pytest.fixture
def true_gpu(request: pytest.FixtureRequest) -> None:
    """Skips over CUDA on the host, which has no profiler and no speed."""
    if torch.cuda.is_available() and torch.cuda.get_device_name() == HOST_CUDA:
        what = " ".join(str(request.function.__doc__).split())
        pytest.skip(f"no true GPU, so not checked: {what}")
