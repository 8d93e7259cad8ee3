"""Where a pipeline computes: a CPU, or a device whose work is queued in streams."""

from __future__ import annotations

from collections.abc import Iterable, Sized

import torch

CPU = torch.device("cpu")


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


def wants_streams(device: torch.device, overlap: str, held: Iterable[Sized]) -> bool:
    """Whether every stage of a rank has a stream of its own, so that a forward and a backward can overlap.

    Args:
        device: what is computed on.
        overlap: of the Pipeline.
        held: the stages of each local rank.
    """
    return device.type != "cpu" and overlap != "never" and any(len(stages) > 1 for stages in held)


def current_stream(device: torch.device) -> torch.Stream | None:
    """The caller's stream; None on a CPU."""
    return None if device.type == "cpu" else torch.accelerator.current_stream(device)
