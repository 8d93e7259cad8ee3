"""What csrc/cuda needs of a driver."""

import pytest
import torch

from fastpipe.runtime import native

pytestmark = pytest.mark.gpu


def test_streams_can_wait_for_flags_in_memory() -> None:
    """The driver writes and waits for flags in device memory by streams, as a copy-engine transport needs it."""
    runtime = native.load()
    if runtime is None or not runtime.has_cuda:
        pytest.fail("the extension was built without csrc/cuda")
    assert runtime.copy_engine_obstacle(0) is None


def test_a_stream_that_waits_holds_up_no_other() -> None:
    """The copy engine's streams share no queue of the hardware with any of torch's: one that waits for another process
    would hold up what it shares a queue with."""
    runtime = native.load()
    assert runtime is not None
    engine = runtime.CudaCopyEngine(0)
    streams = [torch.cuda.default_stream(), *(torch.cuda.Stream(priority=p) for p in (0, -1, -3) for _ in range(32))]
    held_up = []
    for stream in streams:
        with torch.cuda.stream(stream):
            if engine.holds_up_current(10.0):
                held_up.append(stream)
    assert held_up == []


def test_the_host_releases_streams_by_flags_in_its_memory() -> None:
    """A stream waits for a flag in registered memory of the host until the host sets it, and the host sees what a
    stream writes there: without that a stream that waits for a dead process could not be released."""
    runtime = native.load()
    assert runtime is not None
    assert runtime.CudaCopyEngine(0).obstacle(10.0) is None
