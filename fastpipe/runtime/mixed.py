"""The mixed transport: the ranks are processes of several hosts, and each channel goes the best way for its two ends.

Between processes that share memory a message is one copy, as in `fastpipe.runtime.shared_memory`; between others it
goes through process groups. Both halves run in one step of one program. csrc/core/mixed_transport.h says why the two
cannot block each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fastpipe.program import Channel, Program
from fastpipe.runtime.failure import Failure
from fastpipe.runtime.process_group import ProcessGroups
from fastpipe.runtime.shared_memory import SharedMemory
from fastpipe.runtime.transport import Endpoint, Transport

Circles = Sequence[Sequence[int]]
"""Ranks that share memory with each other; every rank is in one, perhaps alone."""


class Mixed(Transport):
    """Shared memory within circles of ranks, process groups between them; made by `fastpipe.runtime.between`.

    Args:
        shared: this rank's side of the shared memory; None where it is alone.
        groups: the way to all others.
        circles: who shares memory with whom, the same on all ranks.
        own: this rank.
        why: why not all do.
    """

    kind = "mixed"
    # of both halves, so a channel's lane is its own whichever half it belongs to
    lanes = "directed"

    def __init__(
        self, shared: SharedMemory | None, groups: ProcessGroups, circles: Circles, own: int, why: str
    ) -> None:
        assert groups.lanes == SharedMemory.lanes == self.lanes
        self.shared = shared
        self.groups = groups
        self.circles = circles
        self.own = own
        self.why = why
        self._circle_of = {rank: number for number, circle in enumerate(circles) for rank in circle}

    def is_near(self, channel: Channel) -> bool:
        """Whether a channel goes through shared memory."""
        source, destination = channel.source, channel.destination
        return source != destination and self._circle_of[source] == self._circle_of[destination]

    def endpoint(self, program: Program, rank: int, timeout: float) -> Endpoint:
        """One rank's side for the Python executor, which shares memory with nobody."""
        assert self.shared is None
        return self.groups.endpoint(program, rank, timeout)

    def native(self, runtime: Any, program: Program, rank: int, timeout: float) -> Any:
        """One rank's side in C++. Every rank makes those of its programs in the same order."""
        far = self.groups.native(runtime, program, rank, timeout)
        if self.shared is None:
            return far
        near = [self.is_near(channel) for channel in program.channels]
        return runtime.over_both(self.shared.link, *self.shared.told(program), near, far)

    def exchange(self, peer: int, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Swap tensors with another rank, between steps: its tensors, which look like these.

        Raises:
            TransportError: when the peer is dead or silent.
        """
        return self.groups.exchange(peer, tensors)

    def close(self) -> None:
        """Let go of the groups. The memory goes with the last tensor in it."""
        self.groups.close()

    def leave(self) -> None:
        """The same when a rank is lost."""
        self.groups.leave()

    def let_go(self, failure: Failure) -> None:
        """See `Transport.let_go`."""
        self.groups.let_go(failure)
        if self.shared is not None:
            self.shared.let_go(failure)

    def describe(self) -> str:
        """One line for `Pipeline.describe`."""
        shared = ", ".join(f"({_listed(circle)})" for circle in self.circles if len(circle) > 1)
        near = [rank for rank in self.circles[self._circle_of[self.own]] if rank != self.own]
        far = [rank for rank in sorted(self._circle_of) if rank not in (*near, self.own)]
        mine = f"shared memory with {_listed(near)}, " if near else ""
        return (
            f"{self.kind}, lanes {self.lanes}: shared memory within ranks {shared}, four {self.groups.backend} groups "
            f"elsewhere ({self.why}); rank {self.own}: {mine}groups with {_listed(far)}"
        )


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
