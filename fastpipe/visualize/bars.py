"""Bars and transfers: what every drawing needs of a timeline, as columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from fastpipe.messages import Messages
from fastpipe.program import COMPUTE_OPS, ChannelKind, Op, Program
from fastpipe.timeline import Timeline

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

_LAST_COMPUTE = max(COMPUTE_OPS)  # they come first


@dataclass(frozen=True, eq=False)
class Bars:
    """Every compute action that was recorded, rank after rank, each rank's in the order of its program.

    Attributes:
        program: what ran.
        first: where each rank's bars begin; one number more than there are ranks.
        rank, op, stage, microbatch, pair_stage, pair_microbatch: as in `fastpipe.Instruction`.
        position: the instruction's place in its rank's program.
        start, end: seconds after the start of the timeline.
        chunk, pair_chunk: which of its rank's stages it is, counted from 0.
        track: 0, or more where actions of one rank ran at the same time.
        num_chunks, num_tracks: how many there are at most.
    """

    program: Program
    first: Ints
    rank: Ints
    op: Ints
    stage: Ints
    microbatch: Ints
    pair_stage: Ints
    pair_microbatch: Ints
    position: Ints
    start: Floats
    end: Floats
    chunk: Ints
    pair_chunk: Ints
    track: Ints
    num_chunks: int
    num_tracks: int

    def __len__(self) -> int:
        return int(self.start.size)

    @property
    def fused(self) -> npt.NDArray[np.bool_]:
        """Which are pairs of a forward and a backward run as one."""
        fused: npt.NDArray[np.bool_] = self.op == Op.OVERLAP_F_B
        return fused

    def of(self, rank: int) -> slice:
        """The bars of one rank."""
        return slice(int(self.first[rank]), int(self.first[rank + 1]))


def bars(timeline: Timeline) -> Bars:
    """The compute of a timeline, ready to be drawn; its start is time 0."""
    program = timeline.program
    rows = [
        np.flatnonzero((columns[0] <= _LAST_COMPUTE) & ~np.isnan(starts))
        for columns, starts in zip(program.columns, timeline.starts, strict=True)
    ]
    fields = [columns[:5, row] for columns, row in zip(program.columns, rows, strict=True)]
    op, stage, microbatch, pair_stage, pair_microbatch = np.concatenate(fields, axis=1).astype(np.int64)
    counts = [len(row) for row in rows]
    rank = np.repeat(np.arange(len(rows)), counts)
    start = np.concatenate([s[row] for s, row in zip(timeline.starts, rows, strict=True)]) - timeline.start
    end = np.concatenate([e[row] for e, row in zip(timeline.ends, rows, strict=True)]) - timeline.start
    chunks, num_chunks = _chunks(program)
    first = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    track = np.concatenate([_tracks(start[low:high], end[low:high]) for low, high in pairwise(first.tolist())])
    return Bars(
        program=program,
        first=first,
        rank=rank,
        op=op,
        stage=stage,
        microbatch=microbatch,
        pair_stage=pair_stage,
        pair_microbatch=pair_microbatch,
        position=np.concatenate(rows).astype(np.int64),
        start=start,
        end=end,
        chunk=chunks[rank, stage],
        pair_chunk=np.where(pair_stage >= 0, chunks[rank, np.maximum(pair_stage, 0)], -1),
        track=track,
        num_chunks=num_chunks,
        num_tracks=int(track.max(initial=0)) + 1,
    )


def _chunks(program: Program) -> tuple[Ints, int]:
    """``chunk[rank, stage]``, and how many stages a rank holds at most."""
    by_rank = program.placement.stages_by_rank()
    chunk = np.zeros((program.num_ranks, program.num_stages), dtype=np.int64)
    for rank, stages in enumerate(by_rank):
        chunk[rank, list(stages)] = np.arange(len(stages))
    return chunk, max(map(len, by_rank))


def _tracks(start: Floats, end: Floats) -> Ints:
    """The first track that is free, for actions that ran at the same time (each stage may have a stream)."""
    track = np.zeros(len(start), dtype=np.int64)
    slack = 1e-3 * float((end - start).mean()) if len(start) else 0.0
    order = np.argsort(start, kind="stable")
    if not np.any(start[order][1:] < np.maximum.accumulate(end[order])[:-1] - slack):
        return track
    free: list[float] = []
    for index in order.tolist():
        place = next((t for t, time in enumerate(free) if time <= start[index] + slack), len(free))
        free[place:] = [float(end[index]), *free[place + 1 :]]
        track[index] = place
    return track


@dataclass(frozen=True, eq=False)
class Transfers:
    """Every transfer between two ranks, channel after channel, each channel's in order.

    Attributes:
        channel: index into ``program.channels``.
        source, destination: the ranks.
        is_gradient: whether it carries a gradient.
        from_stage, to_stage, microbatch: what is sent.
        start, end: in seconds after the start of the timeline; NaN where it was not recorded.
    """

    channel: Ints
    source: Ints
    destination: Ints
    is_gradient: npt.NDArray[np.bool_]
    from_stage: Ints
    to_stage: Ints
    microbatch: Ints
    start: Floats
    end: Floats

    def __len__(self) -> int:
        return int(self.start.size)


def transfers(timeline: Timeline) -> Transfers:
    """The transfers of a timeline; its start is time 0."""
    program = timeline.program
    found = Messages.of(program)
    sent = _Places(found.source, found.send, program.num_ranks)
    kinds = np.array([channel.kind for channel in program.channels], dtype=np.int64)
    return Transfers(
        channel=found.channel,
        source=found.source,
        destination=found.destination,
        is_gradient=kinds[found.channel] == ChannelKind.GRADIENT,
        from_stage=sent.of([columns[1] for columns in program.columns]).astype(np.int64),
        to_stage=_Places(found.destination, found.post, program.num_ranks)
        .of([columns[1] for columns in program.columns])
        .astype(np.int64),
        microbatch=sent.of([columns[2] for columns in program.columns]).astype(np.int64),
        start=sent.of(timeline.starts) - timeline.start,
        end=sent.of(timeline.ends) - timeline.start,
    )


class _Places:
    """Takes from one array a rank what stands at (rank, position), for many of them."""

    def __init__(self, rank: Ints, position: Ints, num_ranks: int) -> None:
        self.position = position
        order = np.argsort(rank, kind="stable")
        self.by_rank = np.split(order, np.searchsorted(rank[order], np.arange(1, num_ranks)))

    def of(self, values: Sequence[npt.NDArray[Any]]) -> Floats:
        """The values, as float64."""
        found = np.empty(len(self.position))
        for mine, array in zip(self.by_rank, values, strict=True):
            found[mine] = array[self.position[mine]]
        return found


def live_activations(drawn: Bars, rank: int) -> tuple[Floats, Ints]:
    """When the number of stage activations that a rank holds changes, and what it is from then on.

    A forward adds one at its start; the end of W, or of a full backward, releases it.
    """
    part = drawn.of(rank)
    op = drawn.op[part]
    gains = (op == Op.F) | (op == Op.OVERLAP_F_B)
    releases = (op == Op.W) | (op == Op.B) | (op == Op.OVERLAP_F_B)
    times = np.concatenate([drawn.start[part][gains], drawn.end[part][releases]])
    steps = np.concatenate([np.ones(gains.sum(), dtype=np.int64), -np.ones(releases.sum(), dtype=np.int64)])
    order = np.argsort(times, kind="stable")
    changed, level = times[order], np.cumsum(steps[order])
    # What is released and taken at the same moment is no dip.
    last = np.append(np.diff(changed) > 0, True) if len(changed) else np.array([], dtype=bool)
    return changed[last], level[last]
