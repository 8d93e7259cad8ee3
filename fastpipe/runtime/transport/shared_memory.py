"""Transports within one host: shared memory on CPUs, and copy engines between GPUs (experimental).

Shared memory: a message is one copy into memory that both processes map. The consumer computes on the message where
it lies; the sender gets the memory back when the last tensor in it is gone. The memory has no name: it is made by
`memfd_create`, sealed, and opened by the peers through /proc, so a killed process leaves nothing behind. All of it is
C++; ``csrc/core/shared_memory_transport.h`` says why it cannot hang.

Copy engines (``transport="cuda_ipc"``): messages are copied from GPU to GPU by the devices' copy engines, which takes
no SM. The receiver's memory is mapped by CUDA IPC. The streams of both processes wait for each other by flags in host
memory that both map, and no host takes part once shapes are known (``csrc/core/copy_engine_transport.h``). It has not
been run on a GPU yet, so ``"auto"`` never chooses it.
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
    """The ranks are processes of one host, with one user, on CPU; made by `select_transport`.

    Args:
        link: this rank's side, connected to the others.
        member: this process's place.
        timeout: seconds to wait for a peer between steps.
    """

    kind = "shared_memory"
    lanes = "directed"

    def __init__(self, link: Any, member: Membership, timeout: float) -> None:
        self.link = link
        self.member = member
        self.timeout = timedelta(seconds=timeout)
        self._own: OwnGroups | None = None
        self.waits = make_waits()

    def native(self, runtime: Any, program: Program, rank: int, timeout: float) -> Any:
        """One rank's side in C++. Every rank makes those of its programs in the same order."""
        return runtime.over_shared_memory(self.link, *self.native_arguments(program))

    @staticmethod
    def native_arguments(program: Program) -> tuple[list[tuple[int, ...]], list[Any]]:
        """Channels and instructions of all ranks, as C++ takes them."""
        channels = [tuple(map(int, channel)) for channel in program.channels]
        return channels, [np.ascontiguousarray(of_rank.columns) for of_rank in program]

    def exchange(self, peer: int, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Swap tensors with another rank, between steps: its tensors, which look like these.

        It is for the copies of a stage that two ranks hold, of which every rank has some, and for tied weights.

        Raises:
            FailureError: when the peer is dead or silent.
        """
        try:
            group = self._exchange_group()
        except RuntimeError as error:
            raise dead_or_silent(peer, error) from error
        return swap(group, group, (self.member.rank, peer), tensors, self.waits, self.timeout)

    def prepare_exchange(self) -> None:
        """Make the group that exchanges take, which needs every rank."""
        self._exchange_group()

    def _exchange_group(self) -> Any:
        if self._own is None:
            self._own = OwnGroups(self.member, ["exchange"], self.timeout)
        return self._own.groups[0]

    def close(self) -> None:
        """Let go of the group. The memory goes with the last tensor in it."""
        if self._own is not None:
            self._own.close()
        self._own = None

    def abort(self) -> None:
        """The same when a rank is lost."""
        if self._own is not None:
            self._own.end()
        self._own = None

    def unblock(self, failure: Failure) -> None:
        """See `Transport.unblock`."""
        self.waits.lose(failure.number)
        self.link.lose(failure.number)

    def describe(self) -> str:
        """One line for `Pipeline.describe`."""
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
    """The ranks are processes of one host, each on a GPU, shared or its own; made by `select_transport`.

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
        return runtime.over_copy_engines(self._copies, *self.native_arguments(program), self.member.device)

    def close(self) -> None:
        """Give back what the device has for messages, when what was sent has arrived."""
        self._copies = None
        super().close()

    def abort(self) -> None:
        """The same when a rank is lost; peers waiting for this one are unblocked."""
        self._copies = None
        super().abort()

    def describe(self) -> str:
        """One line for `Pipeline.describe`."""
        return f"{super().describe()}, copied by their devices"
