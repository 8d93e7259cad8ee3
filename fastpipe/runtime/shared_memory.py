"""The shared-memory transport: the ranks are processes of one host, and a message is one copy into memory both map.

The consumer computes on the message where it lies; the sender gets the memory back when the last tensor in it is gone.
The memory has no name: it is `memfd_create`'s, sealed, and opened by the peers through /proc. So nothing is left
behind, whoever is killed. All of it is C++; csrc/core/shared_memory_transport.h says why it cannot hang.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch

from fastpipe.program import Program
from fastpipe.runtime.failure import Failure
from fastpipe.runtime.group import Membership
from fastpipe.runtime.own_groups import OwnGroups
from fastpipe.runtime.process_group import dead_or_silent, make_waits, swap
from fastpipe.runtime.transport import Transport


class SharedMemory(Transport):
    """The ranks are processes of one host, with one user, on CPU; made by `fastpipe.runtime.between`.

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
        return runtime.over_shared_memory(self.link, *self.told(program))

    @staticmethod
    def told(program: Program) -> tuple[list[tuple[int, ...]], list[Any]]:
        """Channels and instructions of all ranks, as C++ takes them."""
        channels = [tuple(map(int, channel)) for channel in program.channels]
        return channels, [np.ascontiguousarray(of_rank.columns) for of_rank in program]

    def exchange(self, peer: int, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Swap tensors with another rank, between steps: its tensors, which look like these.

        It is for the copies of a stage that two ranks hold, of which every rank has some, and for tied weights.

        Raises:
            TransportError: when the peer is dead or silent.
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

    def leave(self) -> None:
        """The same when a rank is lost."""
        if self._own is not None:
            self._own.end()
        self._own = None

    def let_go(self, failure: Failure) -> None:
        """See `Transport.let_go`."""
        self.waits.lose(failure.number)
        self.link.lose(failure.number)

    def describe(self) -> str:
        """One line for `Pipeline.describe`."""
        return f"{super().describe()}, {self.member.size} processes of one host"
