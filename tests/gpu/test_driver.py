"""What csrc/cuda needs of a driver."""

import pytest

from fastpipe.runtime import native

pytestmark = pytest.mark.gpu


def test_the_host_releases_streams_by_flags_in_its_memory() -> None:
    """A stream waits for a flag in registered memory of the host until the host sets it, and the host sees what a
    stream writes there: without that a stream that waits for a dead process could not be released."""
    runtime = native.load()
    if runtime is None or not runtime.has_cuda:
        pytest.fail("the extension was built without csrc/cuda")
    assert runtime.cuda_copy_engine(0).obstacle(10.0) is None
