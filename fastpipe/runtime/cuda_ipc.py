"""The copy-engine transport, experimental: the ranks are processes of one host, and messages are copied from GPU to GPU
by the devices' copy engines, which takes no SM.

The receiver's memory is mapped by CUDA IPC. The streams of both processes wait for each other by flags in memory of the
host that both see, and no host takes part once shapes are known. All of it is C++;
csrc/core/copy_engine_transport.h says why it cannot hang. It has not been run on a GPU yet, so it has to be asked for
by ``transport="cuda_ipc"``: ``"auto"`` never chooses it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fastpipe.hardware_queues import why_too_few
from fastpipe.program import Program
from fastpipe.runtime import native
from fastpipe.runtime.group import Membership
from fastpipe.runtime.shared_memory import SharedMemory

_TRIAL_SECONDS = 10.0
_TRIAL_BYTES = 64


def _cuda_engine(runtime: Any, device: torch.device) -> Any:
    if not runtime.has_cuda:
        raise RuntimeError(f"{native.native_status()} It was built without CUDA")
    if reason := why_too_few():
        raise RuntimeError(reason)
    return runtime.CudaCopyEngine(device.index or 0)


ENGINES: dict[str, Callable[[Any, torch.device], Any]] = {"cuda": _cuda_engine}
"""What makes the copy engine of a type of device: ``(extension, device) -> engine``. It raises RuntimeError with the
reason where it cannot."""


class Trial:
    """This process's copy engine, and a little memory for the others to try to open.

    Args:
        runtime: the extension.
        device: what this process computes on.

    Attributes:
        engine: for `CudaIpc`.

    Raises:
        RuntimeError: with the reason, where there is no copy engine that can be used.
    """

    def __init__(self, runtime: Any, device: torch.device) -> None:
        if device.type not in ENGINES:
            raise RuntimeError(f"the stages are on {device.type}, which has no copy engines")
        self.engine = ENGINES[device.type](runtime, device)
        obstacle = self.engine.obstacle(_TRIAL_SECONDS)
        if obstacle is not None:
            raise RuntimeError(obstacle)
        self._memory = self.engine.allocate(_TRIAL_BYTES)

    def ticket(self) -> str:
        """By which the others open the memory."""
        return str(self.engine.ticket(self._memory).hex())

    def connect(self, ticket: str) -> None:
        """Open another process's memory, and close it again.

        Raises:
            RuntimeError: where it cannot be opened: no peer access between the devices, for one.
        """
        self.engine.open(bytes.fromhex(ticket))


class CudaIpc(SharedMemory):
    """The ranks are processes of one host, each on a GPU, shared or its own; made by `fastpipe.runtime.between`.

    Args:
        link: this rank's side of the host's shared memory, connected to the others.
        engine: its copy engine.
        member: this process's place.
        timeout: seconds to wait for a peer between steps.
    """

    kind = "cuda_ipc"

    def __init__(self, link: Any, engine: Any, member: Membership, timeout: float) -> None:
        super().__init__(link, member, timeout)
        runtime: Any = native.load()
        self._copies: Any = runtime.CopyEngineLink(link, engine, timeout)

    def native(self, runtime: Any, program: Program, rank: int, timeout: float) -> Any:
        """One rank's side in C++. Every rank makes those of its programs in the same order."""
        return runtime.over_copy_engines(self._copies, *self.told(program), self.member.device)

    def close(self) -> None:
        """Give back what the device has for messages, when what was sent has arrived."""
        self._copies = None
        super().close()

    def leave(self) -> None:
        """The same when a rank is lost: who waits for this one is told."""
        self._copies = None
        super().leave()

    def describe(self) -> str:
        """One line for `Pipeline.describe`."""
        return f"{super().describe()}, copied by their devices"
