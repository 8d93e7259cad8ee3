"""Messages: which send, receive and waits belong to one transfer between two ranks, as columns."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fastpipe.program import Op, Program

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Messages:
    """Every transfer between two ranks of a valid program: channel after channel, each channel's in order.

    Attributes:
        channel: index into ``program.channels``.
        source: the rank that sends.
        destination: the rank that receives.
        send: position of the SEND on the source.
        post: position of the POST_RECV on the destination.
        wait: position of the WAIT_RECV on the destination.
        send_wait: position of the WAIT_SEND on the source.
    """

    channel: Ints
    source: Ints
    destination: Ints
    send: Ints
    post: Ints
    wait: Ints
    send_wait: Ints

    def __len__(self) -> int:
        return len(self.channel)

    @classmethod
    def of(cls, program: Program) -> Messages:
        """Match them: a channel is a FIFO, so its n-th SEND is what its n-th POST_RECV receives."""
        send = _Table.of(program, Op.SEND).by_channel()
        post = _Table.of(program, Op.POST_RECV).by_channel()
        return cls(
            channel=send.channel,
            source=send.rank,
            destination=post.rank,
            send=send.position,
            post=post.position,
            wait=post.positions_in(_Table.of(program, Op.WAIT_RECV)),
            send_wait=send.positions_in(_Table.of(program, Op.WAIT_SEND)),
        )


@dataclass(frozen=True, eq=False)
class _Table:
    """All instructions of one op."""

    rank: Ints
    position: Ints
    channel: Ints
    stage: Ints
    microbatch: Ints

    @classmethod
    def of(cls, program: Program, op: Op) -> _Table:
        parts = [np.zeros((5, 0), dtype=np.int64)]
        for rank, columns in enumerate(program.columns):
            rows = np.flatnonzero(columns[0] == op)
            parts.append(
                np.stack([np.full(len(rows), rank), rows, columns[5, rows], columns[1, rows], columns[2, rows]])
            )
        return cls(*np.concatenate(parts, axis=1))

    def by_channel(self) -> _Table:
        """In the order of each channel; a channel's instructions of one op are all on one rank."""
        order = np.argsort(self.channel, kind="stable")
        return _Table(
            self.rank[order], self.position[order], self.channel[order], self.stage[order], self.microbatch[order]
        )

    def positions_in(self, other: _Table) -> Ints:
        """Where ``other`` names the same channel, stage and microbatch, for each row here."""
        mine, theirs = self._order(), other._order()
        found = np.empty(len(mine), dtype=np.int64)
        found[mine] = other.position[theirs]
        return found

    def _order(self) -> npt.NDArray[np.intp]:
        return np.lexsort((self.stage, self.microbatch, self.channel))
