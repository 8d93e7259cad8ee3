"""The critical path: from the last end back, always to what ended last before it could start.

A compute waits for its rank's compute before it and for the messages waited for in between. A transfer waits for its
sender and its receiver to post it, and for the transfers ahead of it in its lane.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from fastpipe.action import NONE
from fastpipe.messages import Messages
from fastpipe.program import Op, Program

Seconds = npt.NDArray[np.float64]
Step = tuple[int, int]
"""(rank, position) of a compute, or of the SEND of a transfer."""


def critical_path(
    program: Program, starts: Sequence[Seconds], ends: Sequence[Seconds], lane_of: Sequence[int]
) -> list[Step]:
    """The steps, first to last; what moves or frees and took no time is left out.

    Args:
        program: what ran; valid.
        starts: per rank, the start of every instruction, NaN where it was not recorded.
        ends: the same for the ends.
        lane_of: the lane of every channel.
    """
    return _Walk(program, starts, ends, lane_of).back()


class _Walk:
    """Where every message stands, and the walk from the end."""

    def __init__(
        self, program: Program, starts: Sequence[Seconds], ends: Sequence[Seconds], lane_of: Sequence[int]
    ) -> None:
        self.program, self.starts, self.ends = program, starts, ends
        self.lane_of = np.asarray(lane_of, dtype=np.int64)
        self.messages = found = Messages.of(program)
        self.message_at = [np.full(columns.shape[1], NONE, dtype=np.int64) for columns in program.columns]
        for ranks, positions in (
            (found.source, found.send),
            (found.source, found.send_wait),
            (found.destination, found.post),
            (found.destination, found.wait),
        ):
            for rank in range(program.num_ranks):
                mine = np.flatnonzero(ranks == rank)
                self.message_at[rank][positions[mine]] = mine

    def back(self) -> list[Step]:
        """The walk itself, turned round."""
        step = self._last()
        path: list[Step] = []
        while step is not None:
            rank, position = step
            op = self.program.columns[rank][0, position]
            if op <= Op.OVERLAP_F_B or self.ends[rank][position] > self.starts[rank][position]:
                path.append(step)
            step = self._latest(self._before_transfer(step) if op == Op.SEND else self._before(rank, position))
        return path[::-1]

    def _last(self) -> Step | None:
        computes = (
            (rank, int(position))
            for rank, columns in enumerate(self.program.columns)
            for position in np.flatnonzero(columns[0] <= Op.OVERLAP_F_B)[-1:]
        )
        return self._latest(computes)

    def _latest(self, steps: Iterator[Step]) -> Step | None:
        """The one that ended last; of equals the first."""
        found, latest = None, -np.inf
        for rank, position in steps:
            end = float(self.ends[rank][position])
            if end > latest:  # never for NaN
                found, latest = (rank, position), end
        return found

    def _before(self, rank: int, position: int) -> Iterator[Step]:
        """The compute before a position, then the transfers waited for since."""
        ops = self.program.columns[rank][0]
        first = position - 1
        while first >= 0 and ops[first] >= Op.POST_RECV:
            first -= 1
        if first >= 0:
            yield rank, first
        for at in range(first + 1, position):
            if ops[at] in (Op.WAIT_RECV, Op.WAIT_SEND):
                yield self._send_of(int(self.message_at[rank][at]))

    def _before_transfer(self, step: Step) -> Iterator[Step]:
        """What the two ends did before they posted it, then the transfers ahead of it in its lane at either end."""
        number = int(self.message_at[step[0]][step[1]])
        source, destination = int(self.messages.source[number]), int(self.messages.destination[number])
        post = int(self.messages.post[number])
        yield from self._before(*step)
        yield from self._before(destination, post)
        yield from self._ahead(source, step[1])
        yield from self._ahead(destination, post)

    def _ahead(self, rank: int, position: int) -> Iterator[Step]:
        """The transfer that was posted before this one to the same lane."""
        ops, channels = self.program.columns[rank][0], self.program.columns[rank][5]
        lane = self.lane_of[channels[position]]
        for at in range(position - 1, -1, -1):
            if ops[at] in (Op.SEND, Op.POST_RECV) and self.lane_of[channels[at]] == lane:
                yield self._send_of(int(self.message_at[rank][at]))
                return

    def _send_of(self, number: int) -> Step:
        return int(self.messages.source[number]), int(self.messages.send[number])
