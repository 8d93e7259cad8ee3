"""Transports within one host: shared memory on CPUs, and copy engines between GPUs (experimental).

Shared memory: a message is one copy into memory that both processes map. The consumer computes on it in place; the
sender gets the memory back after the last tensor in it is freed. The memory has no name: it is created by
`memfd_create`, sealed, and opened by peers through /proc, so a killed process leaves nothing behind. All of it is C++;
``csrc/core/shared_memory_transport.h`` proves that it cannot hang.

Copy engines (``transport="cuda_ipc"``): the devices' copy engines copy messages from GPU to GPU, without SMs. The
receiver's memory is mapped by CUDA IPC. The streams of both processes synchronize by flags in mapped host memory, and
no host takes part once shapes are known (``csrc/core/copy_engine_transport.h``). Not yet run on a GPU, so ``"auto"``
never selects it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch

from fastpipe.hardware_queues import why_too_few
from fastpipe.program import Program
from fastpipe.runtime import native
from fastpipe.runtime.common import Failure
from fastpipe.runtime.transport.groups import Membership, OwnGroups
from fastpipe.runtime.transport.process_group import dead_or_silent, make_waits, swap
from fastpipe.runtime.transport.transport import Transport


class SharedMemory(Transport):
    """Transport between processes of one host and user, on CPUs; made by `select_transport`.

    Args:
        link: this rank's side, connected to its peers.
    """

    kind = "shared_memory"
    lanes = "directed"
    has_endpoint = False

    def __init__(self, link: Any, member: Membership, timeout: float) -> None:
        self.link = link
        self.member = member
        self.timeout = timedelta(seconds=timeout)
        self._own: OwnGroups | None = None
        self.waits = make_waits()

    def native(self, runtime: Any, program: Program, rank: int, timeout: float) -> Any:
        """See `Transport.native`."""
        return runtime.over_shared_memory(self.link, *self.native_arguments(program))

    @staticmethod
    def native_arguments(program: Program) -> tuple[list[tuple[int, ...]], list[Any]]:
        """Channels and instructions of all ranks, for C++."""
        channels = [tuple(map(int, channel)) for channel in program.channels]
        return channels, [np.ascontiguousarray(of_rank.columns) for of_rank in program]

    def exchange(
        self, peer: int, tensors: Sequence[torch.Tensor], into: Sequence[torch.Tensor] | None = None
    ) -> list[torch.Tensor]:
        """See `Transport.exchange`."""
        try:
            group = self._exchange_group()
        except RuntimeError as error:
            raise dead_or_silent(peer, error) from error
        return swap(group, group, (self.member.rank, peer), tensors, self.waits, self.timeout, into)

    def prepare_exchange(self) -> None:
        """Create the group of exchanges; collective."""
        self._exchange_group()

    def _exchange_group(self) -> Any:
        if self._own is None:
            self._own = OwnGroups(self.member, ["exchange"], self.timeout)
        return self._own.groups[0]

    def close(self) -> None:
        """Close the group. Shared memory is freed with the last tensor in it."""
        if self._own is not None:
            self._own.close()
        self._own = None

    def abort(self) -> None:
        """See `Transport.abort`."""
        if self._own is not None:
            self._own.end()
        self._own = None

    def unblock(self, failure: Failure) -> None:
        """See `Transport.unblock`."""
        self.waits.lose(failure.number)
        self.link.lose(failure.number)

    def describe(self) -> str:
        """See `Transport.describe`."""
        return f"{super().describe()}, {self.member.size} processes of one host"


_TRIAL_SECONDS = 10.0
_TRIAL_BYTES = 64


def _cuda_engine(runtime: Any, device: torch.device) -> Any:
    if not runtime.has_cuda:
        raise RuntimeError(f"{native.native_status()} It was built without CUDA")
    if reason := why_too_few():
        raise RuntimeError(reason)
    return runtime.CudaCopyEngine(device.index or 0)


ENGINES: dict[str, Callable[[Any, torch.device], Any]] = {"cuda": _cuda_engine}
"""Factories of copy engines by device type: ``(extension, device) -> engine``; RuntimeError with the reason if there is
none."""


class Trial:
    """This process's copy engine, and a small allocation that peers open as a test.

    Raises:
        RuntimeError: with the reason, if no copy engine is usable.
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
        """The handle by which peers open the memory."""
        return str(self.engine.ticket(self._memory).hex())

    def connect(self, ticket: str) -> None:
        """Open and close a peer's memory.

        Raises:
            RuntimeError: if it cannot be opened, for example without peer access between the devices.
        """
        self.engine.open(bytes.fromhex(ticket))


class CudaIpc(SharedMemory):
    """Transport between processes of one host, on GPUs that may be shared; made by `select_transport`."""

    kind = "cuda_ipc"

    def __init__(self, link: Any, engine: Any, member: Membership, timeout: float) -> None:
        super().__init__(link, member, timeout)
        runtime: Any = native.load()
        self._copies: Any = runtime.CopyEngineLink(link, engine, timeout)

    def native(self, runtime: Any, program: Program, rank: int, timeout: float) -> Any:
        """See `Transport.native`."""
        return runtime.over_copy_engines(self._copies, *self.native_arguments(program), self.member.device)

    def close(self) -> None:
        """Free the device's memory for messages after all sends have arrived."""
        self._copies = None
        super().close()

    def abort(self) -> None:
        """See `Transport.abort`; unblocks peers that wait for this rank."""
        self._copies = None
        super().abort()

    def describe(self) -> str:
        """See `Transport.describe`."""
        return f"{super().describe()}, copied by their devices"
