"""Where a pipeline computes: a CPU, or a device with streams; and the state that torch keeps for each thread."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator, Sized

import torch
from torch import nn

from fastpipe.runtime.common.torch_private import Modes

CPU = torch.device("cpu")
_PAUSE = 1e-3


def located(device: torch.device) -> torch.device:
    """The device with its index: the current one of its type unless given.

    Raises:
        ValueError: when there is none.
    """
    if device.type in ("cpu", "meta"):
        return device
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
    """The GPUs that hold parameters: those on which modules work, and whose random numbers they draw."""
    return list({p.device for module in modules for p in module.parameters() if p.device.type == "cuda"})


def time_when_idle(devices: Iterable[torch.device]) -> float:
    """The host's time, once these GPUs have done all they were given; in seconds."""
    for device in devices:
        torch.cuda.synchronize(device)
    return time.perf_counter()


def wants_streams(device: torch.device, overlap: str, held: Iterable[Sized]) -> bool:
    """Whether every stage of this process has a stream of its own, so that a forward and a backward can overlap, and
    ranks that are threads do not wait for each other's work.

    Args:
        device: what is computed on.
        overlap: of the Pipeline.
        held: the stages of each local rank.
    """
    return device.type != "cpu" and overlap != "never" and sum(len(stages) for stages in held) > 1


def current_stream(device: torch.device) -> torch.Stream | None:
    """The caller's stream; None on a CPU."""
    return None if device.type == "cpu" else torch.accelerator.current_stream(device)


def recorded(device: torch.device) -> torch.Event:
    """An event behind what the device's current stream has.

    (Without a stream `torch.Event.record` takes that of the current device, whichever the event was made for.)
    """
    event = torch.Event(device)
    event.record(torch.accelerator.current_stream(device))
    return event


def wait_until_done(device: torch.device, seconds: float) -> bool:
    """Wait until the device has done what its current stream has, no longer than so many seconds; whether it has."""
    event = recorded(device)
    until = time.monotonic() + seconds
    while not event.query():
        if time.monotonic() >= until:
            return False
        time.sleep(_PAUSE)
    return True


class ThreadState:
    """Grad mode, autocast, current stream, hooks of saved tensors and modes of the thread that made it.

    A device that is the default is a mode, and so is what counts FLOPs. Hooks are those of `torch.autograd.graph`:
    activations go to the host by them.

    Args:
        device: what is computed on.
    """

    def __init__(self, device: torch.device = CPU) -> None:
        self.type = device.type
        self.grad = torch.is_grad_enabled()
        self.autocast = torch.is_autocast_enabled(self.type)
        self.dtype = torch.get_autocast_dtype(self.type)
        self.cache = torch.is_autocast_cache_enabled()
        self.stream = current_stream(device)
        self.modes = Modes()

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """The state, in another thread."""
        with (
            torch.set_grad_enabled(self.grad),
            torch.autocast(self.type, dtype=self.dtype, enabled=self.autocast, cache_enabled=self.cache),
            contextlib.nullcontext() if self.stream is None else self.stream,
            self.modes.applied(),
        ):
            yield
