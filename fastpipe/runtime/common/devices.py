"""Devices: a CPU or a device with streams; torch's state per thread."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from concurrent.futures import wait
from functools import partial

import torch
from torch import nn

from fastpipe.runtime.common.torch_private import modes_of_thread
from fastpipe.runtime.common.waits import call_in_thread

CPU = torch.device("cpu")


def located(device: torch.device) -> torch.device:
    """The device with its index, which a CPU has not; default: the current device of its type.

    Raises:
        ValueError: if there is no such device.
    """
    if device.type == "cpu":
        return CPU
    module = torch.get_device_module(device)
    if not module.is_available():
        raise ValueError(
            f"device = {str(device)!r}: torch {torch.__version__} sees no such device here; pass device='cpu', or see "
            "why by `python -m torch.utils.collect_env`"
        )
    index = module.current_device() if device.index is None else device.index
    if index >= module.device_count():
        raise ValueError(f"device = {str(device)!r}: there are {module.device_count()}; give an index below that")
    return torch.device(device.type, index)


def cuda_devices(modules: Iterable[nn.Module]) -> list[torch.device]:
    """The GPUs that hold parameters, and whose random generators the modules use."""
    return list({p.device for module in modules for p in module.parameters() if p.device.type == "cuda"})


def time_when_idle(devices: Iterable[torch.device]) -> float:
    """The host's time in seconds, once these GPUs have finished all queued work."""
    for device in devices:
        torch.cuda.synchronize(device)
    return time.perf_counter()


def wants_streams(device: torch.device, overlap: str, held: Iterable[Sized]) -> bool:
    """Whether every stage of this process needs its own stream, so that forwards and backwards can overlap and ranks
    that are threads do not wait for each other's work.

    Args:
        held: per local rank, its stages.
    """
    return device.type != "cpu" and overlap != "never" and sum(len(stages) for stages in held) > 1


def current_stream(device: torch.device) -> torch.Stream | None:
    """The caller's stream; None on a CPU."""
    return None if device.type == "cpu" else torch.accelerator.current_stream(device)


def recorded(device: torch.device) -> torch.Event:
    """An event recorded on the device's current stream. A thread that waits for it sleeps.

    (Without a stream, `torch.Event.record` uses that of the current device, not that of the event's device. With CUDA a
    `torch.Event` ignores ``blocking``: its wait would keep a core busy.)
    """
    if device.type == "cuda":
        event: torch.Event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(device))
    else:
        event = torch.Event(device)
        event.record(torch.accelerator.current_stream(device))
    return event


def wait_until_idle(device: torch.device, seconds: float) -> bool:
    """Wait for all work queued on the device, at most ``seconds``; returns whether it is done."""
    idle = call_in_thread(partial(torch.accelerator.synchronize, device), "fastpipe-idle")
    if not wait([idle], seconds).done:
        return False
    idle.result()
    return True


def thread_state(device: torch.device = CPU) -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Grad mode, autocast, current stream, saved-tensor hooks and modes of this thread.

    Modes include the default device and FLOP counters. Hooks are those of `torch.autograd.graph`, for example to move
    activations to the host.

    All threads share autocast's cache of casts, which is dropped when a thread leaves its outermost region. So a thread
    is in a region if the caller is, and the end of this context keeps the cache: in another thread the uses of a weight
    in one forward may be left without their common cast, and be summed in another dtype.

    Returns:
        A context of them for another thread.
    """
    kind, grad, stream, modes = device.type, torch.is_grad_enabled(), current_stream(device), modes_of_thread()
    autocast = partial(
        torch.autocast,
        kind,
        dtype=torch.get_autocast_dtype(kind),
        enabled=torch.is_autocast_enabled(kind),
        cache_enabled=torch.is_autocast_cache_enabled(),
    )

    depth = min(_autocast_depth(), 1)

    @contextlib.contextmanager
    def applied() -> Iterator[None]:
        with (
            _deeper(1),
            torch.set_grad_enabled(grad),
            autocast(),
            stream or contextlib.nullcontext(),
            modes(),
            _deeper(depth - 2),
        ):
            yield

    return applied


@contextlib.contextmanager
def without_autocast(kind: str = CPU.type) -> Iterator[None]:
    """Context of a backward, in which autocast would cast operands that the forward has not cast."""
    enabled = torch.is_autocast_enabled(kind)
    torch.set_autocast_enabled(kind, False)
    try:
        yield
    finally:
        torch.set_autocast_enabled(kind, enabled)


def _autocast_depth() -> int:
    """The number of regions of autocast that this thread is in."""
    torch.autocast_increment_nesting()
    return int(torch.autocast_decrement_nesting())


@contextlib.contextmanager
def _deeper(levels: int) -> Iterator[None]:
    """So many more regions of autocast, or fewer; the end keeps the cache."""
    enter, leave = torch.autocast_increment_nesting, torch.autocast_decrement_nesting
    if levels < 0:
        enter, leave = leave, enter
    for _ in range(abs(levels)):
        enter()
    try:
        yield
    finally:
        for _ in range(abs(levels)):
            leave()
