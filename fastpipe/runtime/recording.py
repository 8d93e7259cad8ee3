"""Recordings: what a device was given to do, to be given to it again at once. On CUDA a graph."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch

from fastpipe.runtime.loopback import Loopback
from fastpipe.runtime.process_group import ProcessGroups
from fastpipe.runtime.replicas import NoReplicas, Replicas
from fastpipe.runtime.stage import Stage
from fastpipe.runtime.transport import Transport


class Recording(ABC):
    """Work of one device. It keeps the memory that it allocates, so a replay puts everything where it was before."""

    @abstractmethod
    def record(self, stream: Any, work: Callable[[], None]) -> None:
        """Call ``work``, whose work on the stream, and on those that it joins to it, is noted and not done.

        Raises:
            RuntimeError: when something cannot be recorded; nothing has been done then.
        """

    @abstractmethod
    def replay(self) -> None:
        """Do it on the current stream."""


class CudaGraph(Recording):
    """By ``torch.cuda.CUDAGraph``."""

    def __init__(self) -> None:
        self._graph = torch.cuda.CUDAGraph()

    def record(self, stream: Any, work: Callable[[], None]) -> None:
        """See `Recording.record`."""
        pool = torch.cuda.graph_pool_handle()
        try:
            # other threads, NCCL's and those that tell losses, ask events meanwhile
            with torch.cuda.graph(self._graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                work()
        except BaseException:  # raised again
            _end_allocations(stream.device, pool)
            raise

    def replay(self) -> None:
        """See `Recording.replay`."""
        self._graph.replay()


def _end_allocations(device: torch.device, pool: Any) -> None:
    """After a recording that failed: torch's allocator may think that it still goes on, and then memory that several
    streams have used is never used again."""
    with contextlib.suppress(RuntimeError):  # where it did end that
        torch._C._cuda_endAllocateToPool(device.index, pool)
        torch._C._cuda_releasePool(device.index, pool)


Makers = tuple[Callable[[torch.device], Any], Callable[[], Recording]]

RECORDINGS: dict[str, Makers] = {"cuda": (torch.cuda.Stream, CudaGraph)}
"""By type of device: what makes the stream on which work is recorded, and a recording."""


def why_not(
    device: torch.device,
    ranks: Mapping[int, Mapping[int, Stage]],
    transport: Transport,
    replicas: Replicas,
) -> str:
    """Why no step of a pipeline can be recorded, in a sentence; empty where it may be.

    Args:
        device: what the stages compute on.
        ranks: the local ones.
        transport: how they reach the others.
        replicas: what is done for stages that two ranks hold, or that share weights.
    """
    if device.type not in RECORDINGS:
        return f"the stages compute on {device.type}, which records nothing; put them on cuda"
    if len(ranks) > 1:
        return "several ranks are threads of this process, and one recording has one thread; start a process a rank"
    if not isinstance(transport, Loopback | ProcessGroups):
        return (
            f"the messages of transport {transport.kind!r} have numbers, which a replay would repeat; use "
            "transport='process_group'"
        )
    if not isinstance(replicas, NoReplicas):
        return "gradients of weights that several ranks hold are summed by the host after every step"
    if any(stage.parallel is not None for held in ranks.values() for stage in held.values()):
        return "the stages' replicas average gradients, and learn by the host how the step went for the others"
    return ""
