"""Steps on one GPU, the ranks threads of one process."""

import copy
import time
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import fastpipe
from fastpipe.testing import reference_step
from tests.gpu.models import SCHEDULES, batch, layers, loss_fn
from tests.runtime.checks import same_bits

pytestmark = pytest.mark.gpu

RANKS, MICROBATCHES, LAYERS = 2, 8, 8
DTYPES = [torch.float32, torch.bfloat16]
WIDE = 512
"""A width of blocks that keep the device busy for longer than the host takes to launch them."""


def build(schedule: str, dtype: torch.dtype, num_ranks: int = RANKS, width: int = 64, **arguments: object) -> tuple:
    model = layers(LAYERS, dtype, width)
    unsplit = nn.Sequential(*copy.deepcopy(model))
    pipe = fastpipe.Pipeline(model, schedule, MICROBATCHES, loss_fn, num_ranks=num_ranks, **arguments)
    return pipe, unsplit


def gradients(pipe: fastpipe.Pipeline) -> dict[str, torch.Tensor]:
    return {name: parameter.grad.cpu() for name, parameter in pipe.named_parameters()}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_bits(schedule: str, dtype: torch.dtype) -> None:
    """Loss and gradients have the bits of the same kernels run unsplit, and have them again in the next step."""
    pipe, unsplit = build(schedule, dtype)
    x, target = batch(32, dtype)
    reference = reference_step(unsplit, (x, target), pipe.schedule, loss_fn)
    for _ in range(2):
        for parameter in pipe.parameters():
            parameter.grad = None
        result = pipe.step(x, target=target)
        assert same_bits(result.loss.cpu(), reference.loss.cpu())
        found = gradients(pipe)
        wrong = [name for name, p in unsplit.named_parameters() if not same_bits(found[name], p.grad.cpu())]
        assert not wrong


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("schedule", ["1f1b", "zbv", "dualpipev"])
def test_recorded_steps(schedule: str, dtype: torch.dtype) -> None:
    """Replays of a CUDA graph have the bits of the unsplit model's steps, on other inputs and parameters each."""
    pipe, unsplit = build(schedule, dtype, num_ranks=1, cuda_graph=True)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (pipe, unsplit)]
    for step in range(8):
        x, target = (tensor * (1 + step) for tensor in batch(32, dtype))
        result = pipe.step(x, target=target)
        reference = reference_step(unsplit, (x, target), pipe.schedule, loss_fn)
        assert same_bits(result.loss.cpu(), reference.loss.cpu())
        found = gradients(pipe)
        assert all(same_bits(found[name], p.grad.cpu()) for name, p in unsplit.named_parameters())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert "1 recorded and 5 replayed" in pipe.describe()


def test_a_model_that_cannot_be_recorded() -> None:
    """A model that makes the host wait cannot be in a CUDA graph: its steps run as ever, may draw random numbers, and
    the reason is told."""
    pipe, unsplit = build("1f1b", torch.float32, num_ranks=1, cuda_graph=True)

    def draw_and_wait(*_: object) -> None:
        torch.rand((), device="cuda").item()

    next(iter(pipe.stage_modules.values())).register_forward_pre_hook(draw_and_wait)
    x, target = batch(32, torch.float32)
    reference = reference_step(unsplit, (x, target), pipe.schedule, loss_fn)
    for _ in range(6):
        assert same_bits(pipe.step(x, target=target).loss.cpu(), reference.loss.cpu())
    assert "cuda graph  no: recording a step failed" in pipe.describe()


@pytest.mark.parametrize("schedule", ["1f1b", "dualpipev"])
def test_a_device_that_is_not_the_current_one(schedule: str) -> None:
    """A pipeline on the second device draws the same dropout from the same seed, and leaves the first one alone."""
    if torch.cuda.device_count() < 2:
        pytest.skip("one device, so not checked: a pipeline on a device that is not the current one")
    model = [nn.Sequential(layer, nn.Dropout(0.3)).to("cuda:1") for layer in layers(LAYERS, torch.float32)]
    before = torch.cuda.memory_allocated(0)
    pipe = fastpipe.Pipeline(model, schedule, MICROBATCHES, loss_fn, num_ranks=1, rng="per_microbatch")
    x, target = (tensor.to("cuda:1") for tensor in batch(32, torch.float32))
    losses = []
    for _ in range(4):
        pipe.step_count = 0
        losses.append(pipe.step(x, target=target).loss)
    assert all(same_bits(loss, losses[0]) for loss in losses)
    assert torch.cuda.current_device() == 0 and torch.cuda.memory_allocated(0) <= before


@pytest.fixture
def no_synchronisation() -> Iterator[None]:
    """Whatever makes the host wait for the device is an error."""
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("schedule", ["1f1b", "zbv", "dualpipev"])
def test_no_synchronisation(schedule: str, no_synchronisation: None) -> None:
    """No call in a step makes the host wait for the device, once the shapes are known and until the loss is read."""
    pipe, _ = build(schedule, torch.float32)
    x, target = batch(32, torch.float32)
    for _ in range(2):
        pipe.step(x, target=target)
    torch.cuda.set_sync_debug_mode("error")
    result = pipe.step(x, target=target)
    torch.cuda.set_sync_debug_mode("default")
    assert result.loss is not None


def busy(events: list, stream: int) -> list[tuple[float, float]]:
    return sorted((e.start_ns(), e.start_ns() + e.duration_ns()) for e in events if e.device_resource_id() == stream)


def test_streams_overlap(true_gpu: None) -> None:
    """The stages of DualPipeV on one rank have a stream each, and kernels of one run while kernels of the other do, for
    more than where one happens to end as the other begins."""
    pipe, _ = build("dualpipev", torch.float32, num_ranks=1, width=WIDE)
    x, target = batch(4096, torch.float32, WIDE)
    for _ in range(3):
        pipe.step(x, target=target)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        pipe.step(x, target=target)
        torch.cuda.synchronize()
    events = [
        event
        for event in profiled.profiler.kineto_results.events()
        if event.device_type() == torch.autograd.DeviceType.CUDA and not event.is_user_annotation()
    ]
    streams = {event.device_resource_id() for event in events}
    assert len(streams) >= 2
    one, other = (busy(events, stream) for stream in sorted(streams, key=lambda s: len(busy(events, s)))[-2:])
    together = sum(max(0.0, min(end, until) - max(start, begin)) for start, end in one for begin, until in other)
    assert together > 0.1 * min(sum(end - start for start, end in spans) for spans in (one, other))


def test_times_of_a_traced_step_are_the_devices(true_gpu: None) -> None:
    """They add up to what events around the step say, on the clock of the host. The step is long enough for what lies
    before its first action and after its last to be little of it."""
    pipe, _ = build("1f1b", torch.float32, width=2 * WIDE)
    x, target = batch(8192, torch.float32, 2 * WIDE)
    for _ in range(3):
        pipe.step(x, target=target)
    torch.cuda.synchronize()
    around = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    begin = time.perf_counter()
    around[0].record()
    timeline = pipe.step(x, target=target, trace=True).timeline
    around[1].record()
    torch.cuda.synchronize()
    end = time.perf_counter()
    whole = around[0].elapsed_time(around[1]) * 1e-3
    assert 0.85 * whole < timeline.makespan < 1.001 * whole
    assert begin < timeline.start and timeline.start + timeline.makespan < end


def test_a_failed_step_is_followed_by_a_good_one() -> None:
    """A module that raises fails the step on every rank; the next step has the right bits."""
    pipe, unsplit = build("dualpipev", torch.float32)
    x, target = batch(32, torch.float32)
    pipe.step(x, target=target)

    def fail(*_: object) -> None:
        raise RuntimeError("on purpose")

    handle = next(iter(pipe.stage_modules.values())).register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="on purpose"):
        pipe.step(x, target=target)
    handle.remove()
    for parameter in pipe.parameters():
        parameter.grad = None
    pipe.step(x, target=target)
    reference_step(unsplit, (x, target), pipe.schedule, loss_fn)
    found = gradients(pipe)
    assert all(same_bits(found[name], p.grad.cpu()) for name, p in unsplit.named_parameters())
