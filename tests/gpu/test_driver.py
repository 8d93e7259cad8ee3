"""What csrc/cuda needs of a driver."""

import pytest

from fastpipe.runtime import native

pytestmark = pytest.mark.gpu


def test_streams_can_wait_for_flags_in_memory() -> None:
    """The driver writes and waits for flags in device memory by streams, as a copy-engine transport needs it."""
    runtime = native.load()
    if runtime is None or not runtime.has_cuda:
        pytest.fail("the extension was built without csrc/cuda")
    assert runtime.copy_engine_obstacle(0) is None
