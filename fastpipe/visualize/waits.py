"""What every bar waited for, and the critical path as bars."""

from __future__ import annotations

import numpy as np

from fastpipe.action import NONE, ActionKind
from fastpipe.dependencies import Event, needs, produces
from fastpipe.program import Op
from fastpipe.timeline import Timeline
from fastpipe.visualize.bars import Bars, Ints

_PARTS = (ActionKind.F, ActionKind.B, ActionKind.I, ActionKind.W)


def waited_for(drawn: Bars) -> Ints:
    """The bars whose results each bar needs: three columns, ``NONE`` where there is none.

    Column 0 is what a forward needs; columns 1 and 2 are what a backward needs.
    """
    stages, microbatches = drawn.program.num_stages, drawn.program.num_microbatches
    made = np.full((len(Event), stages, microbatches), NONE, dtype=np.int64)
    parts = {kind: _part(drawn, kind) for kind in _PARTS}
    for kind, (index, stage, microbatch) in parts.items():
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


def _part(drawn: Bars, kind: ActionKind) -> tuple[Ints, Ints, Ints]:
    """Bar, stage and microbatch of everything of one kind, in whole bars and in fused pairs."""
    whole = np.flatnonzero(drawn.op == Op[kind.name])
    pairs = np.flatnonzero(drawn.fused) if kind in (ActionKind.F, ActionKind.B) else whole[:0]
    index = np.concatenate([whole, pairs])
    fused = np.arange(len(index)) >= len(whole)
    second = fused & (kind is ActionKind.B)
    stage = np.where(second, drawn.pair_stage[index], drawn.stage[index])
    return index, stage, np.where(second, drawn.pair_microbatch[index], drawn.microbatch[index])


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
