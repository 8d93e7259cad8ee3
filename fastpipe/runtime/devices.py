"""Where a pipeline computes: a CPU, or a device whose work is queued in streams."""

from __future__ import annotations

import functools
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sized

import torch
from torch import nn

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


def recorded(device: torch.device, *, timing: bool = False) -> torch.Event:
    """An event behind what the device's current stream has.

    (Without a stream `torch.Event.record` takes that of the current device, whichever the event was made for.)
    """
    event = torch.Event(device, enable_timing=timing)
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


class Clock(ABC):
    """Notes moments of a step, to be read when it has ended, in seconds of `time.perf_counter`."""

    @abstractmethod
    def note(self) -> None:
        """Now."""

    @abstractmethod
    def read(self) -> list[float]:
        """All moments, in order."""


class HostClock(Clock):
    """The moment is that of the call."""

    def __init__(self) -> None:
        self._moments: list[float] = []

    def note(self) -> None:
        """Now."""
        self._moments.append(time.perf_counter())

    def read(self) -> list[float]:
        """All moments."""
        return self._moments


_MEETINGS = 8


@functools.cache
def _side_stream(device: torch.device) -> torch.Stream:
    """Where nobody works; always the same, as torch hands out 32 in turns."""
    return torch.Stream(device=device)


class StreamClock(Clock):
    """The moment is when the device has done what its current stream has now; csrc/torch/device_times.h is the same."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._moments: list[torch.Event] = []
        self._side = _side_stream(device)

    def note(self) -> None:
        """Now."""
        self._moments.append(recorded(self.device, timing=True))

    def read(self) -> list[float]:
        """All moments; the host waits for the device."""
        self._moments[-1].synchronize()
        _, seconds, now = min((self._meet() for _ in range(_MEETINGS)), key=lambda meeting: meeting[0])
        return [seconds - event.elapsed_time(now) * 1e-3 for event in self._moments]

    def _meet(self) -> tuple[float, float, torch.Event]:
        """A moment: how long the host cannot tell it apart, when it was on the host's clock, and on the device's.

        On a stream with nothing to do an event passes as soon as it is recorded.
        """
        now = torch.Event(self.device, enable_timing=True)
        before = time.perf_counter()
        now.record(self._side)
        now.synchronize()
        after = time.perf_counter()
        return after - before, (before + after) / 2, now


def clock_of(device: torch.device, trace: bool) -> Clock:
    """The one for a step: the device's own where that is wanted, and it has one."""
    return StreamClock(device) if trace and device.type != "cpu" else HostClock()
