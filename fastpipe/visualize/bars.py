"""Bars, transfers, waits and the critical path: what every drawing needs of a timeline, as columns."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from fastpipe.action import NONE, ActionKind
from fastpipe.dependencies import Event, needs, produces
from fastpipe.program import ChannelKind, Op, Program
from fastpipe.timeline import Messages, Timeline, values_at

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Bars:
    """Every compute action that was recorded, rank after rank, each rank's in the order of its program.

    Attributes:
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
    def fused(self) -> Bools:
        """Which are pairs of a forward and a backward run as one."""
        fused: Bools = self.op == Op.OVERLAP_F_B
        return fused

    def of(self, rank: int) -> slice:
        """The bars of one rank."""
        return slice(int(self.first[rank]), int(self.first[rank + 1]))


def bars(timeline: Timeline) -> Bars:
    """The compute of a timeline, ready to be drawn; its start is time 0."""
    program = timeline.program
    rows = timeline._compute
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
    is_gradient: Bools
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
    kinds = np.array([channel.kind for channel in program.channels], dtype=np.int64)
    stages, microbatches = ([columns[row] for columns in program.columns] for row in (1, 2))
    return Transfers(
        channel=found.channel,
        source=found.source,
        destination=found.destination,
        is_gradient=kinds[found.channel] == ChannelKind.GRADIENT,
        from_stage=values_at(stages, found.source, found.send),
        to_stage=values_at(stages, found.destination, found.post),
        microbatch=values_at(microbatches, found.source, found.send),
        start=values_at(timeline.starts, found.source, found.send) - timeline.start,
        end=values_at(timeline.ends, found.source, found.send) - timeline.start,
    )


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


_PARTS = (ActionKind.F, ActionKind.B, ActionKind.I, ActionKind.W)


def waited_for(drawn: Bars) -> Ints:
    """The bars whose results each bar needs: three columns, ``NONE`` where there is none.

    Column 0 is what a forward needs; columns 1 and 2 are what a backward needs.
    """
    stages, microbatches = drawn.program.num_stages, drawn.program.num_microbatches
    made = np.full((len(Event), stages, microbatches), NONE, dtype=np.int64)
    parts = {}
    for kind in _PARTS:
        index, _, second = of_kind(drawn, Op[kind.name])
        stage = np.where(second, drawn.pair_stage[index], drawn.stage[index])
        microbatch = np.where(second, drawn.pair_microbatch[index], drawn.microbatch[index])
        parts[kind] = index, stage, microbatch
        for event in produces(kind):
            made[event, stage, microbatch] = index
    found = np.full((len(drawn), 3), NONE, dtype=np.int64)
    for kind, (index, stage, microbatch) in parts.items():
        order = np.argsort(stage, kind="stable")
        by_stage = np.split(order, np.searchsorted(stage[order], np.arange(1, stages)))
        for number, mine in enumerate(by_stage):
            for column, (event, other) in enumerate(needs(kind, number, stages), start=int(kind is not ActionKind.F)):
                found[index[mine], column] = made[event, other, microbatch[mine]]
    return found


def of_kind(drawn: Bars, kind: Op) -> tuple[Ints, Bools, Bools]:
    """The bars of one kind, whole ones and fused pairs; which of them are pairs, and of which it is the backward."""
    whole = np.flatnonzero(drawn.op == kind)
    pairs = np.flatnonzero(drawn.fused) if kind in (Op.F, Op.B) else whole[:0]
    index = np.concatenate([whole, pairs])
    is_half = np.arange(len(index)) >= len(whole)
    return index, is_half, is_half & (kind == Op.B)


def limited_by(drawn: Bars, needed: Ints) -> Ints:
    """The bar that decided when each bar could start: the rank's previous one, or the latest of those it needs."""
    previous = np.arange(len(drawn)) - 1
    previous[drawn.first[:-1][drawn.first[:-1] < len(drawn)]] = NONE
    slack = 1e-6 * float(drawn.end.max(initial=0.0))
    ends = np.where(needed == NONE, -np.inf, drawn.end[needed])
    latest = np.take_along_axis(needed, np.argmax(ends, axis=1)[:, None], axis=1)[:, 0]
    busy_until = np.where(previous == NONE, -np.inf, drawn.end[previous])
    waited = (drawn.start > busy_until + slack) & (latest != NONE)
    return np.where(waited, latest, previous)


def critical_bars(timeline: Timeline, drawn: Bars) -> Ints:
    """The bars of the timeline's critical path, from the first to the last."""
    names = (drawn.op, drawn.stage, drawn.microbatch)
    index = {name: bar for bar, name in enumerate(zip(*(column.tolist() for column in names), strict=True))}
    path = [(int(i.op), i.stage, i.microbatch) for i in (span.instruction for span in timeline.critical_path())]
    return np.array([index[name] for name in path if name in index], dtype=np.int64)


def critical_transfers(timeline: Timeline) -> list[tuple[int, int, float, float]]:
    """The transfers of the critical path: source, destination, start and end after the start of the timeline."""
    found = []
    for span in timeline.critical_path():
        if span.instruction.op == Op.SEND:
            channel = timeline.program.channels[span.instruction.channel]
            times = span.start - timeline.start, span.end - timeline.start
            found.append((channel.source, channel.destination, *times))
    return found


def runs(drawn: Bars, index: Ints) -> list[tuple[int, int]]:
    """First and last bar of neighbours among ``index`` that touch on one rank, to be outlined as one."""
    slack = 1e-9 * float(drawn.end.max(initial=0.0))
    found: list[tuple[int, int]] = []
    for bar in np.unique(index).tolist():
        last = found[-1][1] if found else bar
        if last == bar - 1 and drawn.rank[bar] == drawn.rank[last] and drawn.start[bar] <= drawn.end[last] + slack:
            found[-1] = (found[-1][0], bar)
        else:
            found.append((bar, bar))
    return found
