"""The Chrome trace: JSON that chrome://tracing and Perfetto (ui.perfetto.dev) open.

A rank is a process. Its threads: the compute, then one for each channel that it sends to, then one for each channel
that it receives from. A flow arrow leads from every send to its receive. Times are microseconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fastpipe.action import NONE, Action, ActionKind
from fastpipe.checks import as_path, check_type
from fastpipe.timeline import Timeline
from fastpipe.visualize.bars import Bars, Transfers, bars, transfers

_MICROSECONDS = 1e6
_SHORTEST = 1e-3
"""Microseconds that a transfer lasts at least in the file: an arrow can only be fastened to what has a length."""

Event = dict[str, Any]


def to_chrome_trace(timeline: Timeline, path: str | Path) -> Path:
    """Write a timeline as a Chrome trace; open it in ui.perfetto.dev or chrome://tracing.

    Args:
        timeline: simulated or measured.
        path: the file to write.

    Returns:
        The path.
    """
    check_type(Timeline, timeline=timeline)
    path = as_path(path)
    with path.open("w") as file:
        file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
        for number, event in enumerate(trace_events(timeline)):
            file.write((",\n" if number else "") + json.dumps(event, separators=(",", ":")))
        file.write(f'\n], "otherData": {json.dumps(_summary(timeline))}}}\n')
    return path


def trace_events(timeline: Timeline) -> Iterator[Event]:
    """The events of the trace, one by one."""
    sent = transfers(timeline)
    yield from _names(timeline, sent)
    yield from _compute_events(bars(timeline))
    yield from _message_events(timeline, sent)


def _summary(timeline: Timeline) -> Event:
    return {
        "schedule": timeline.program.name,
        "ranks": timeline.program.num_ranks,
        "microbatches": timeline.program.num_microbatches,
        "measured": timeline.measured,
        "makespan_seconds": timeline.makespan,
        "bubble_fraction": timeline.bubble_fraction,
    }


def _names(timeline: Timeline, sent: Transfers) -> Iterator[Event]:
    for rank in range(timeline.program.num_ranks):
        yield {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}
        yield {"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}}
        yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": 0, "args": {"name": "compute"}}
    for number in sorted(set(sent.channel.tolist())):
        channel = timeline.program.channels[number]
        for rank, thread, verb in (
            (channel.source, _send_thread(number), "send"),
            (channel.destination, _receive_thread(number), "receive"),
        ):
            yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": thread, "args": {"name": f"{verb} {channel}"}}


def _send_thread(channel: int) -> int:
    return 1 + 2 * channel


def _receive_thread(channel: int) -> int:
    return 2 + 2 * channel


def _compute_events(drawn: Bars) -> Iterator[Event]:
    fields = (drawn.op, drawn.stage, drawn.microbatch, drawn.pair_stage, drawn.pair_microbatch)
    columns = (drawn.rank, drawn.start, drawn.end, *fields)
    kinds = tuple(ActionKind)
    for rank, start, end, op, *numbers in zip(*(column.tolist() for column in columns), strict=True):
        action = Action(kinds[op], *numbers)
        pair = {"backward_stage": numbers[2], "backward_microbatch": numbers[3]} if numbers[2] != NONE else {}
        yield {
            "ph": "X",
            "name": str(action),
            "cat": action.kind.name,
            "pid": rank,
            "tid": 0,
            "ts": start * _MICROSECONDS,
            "dur": (end - start) * _MICROSECONDS,
            "args": {"stage": action.stage, "microbatch": action.microbatch, **pair},
        }


def _message_events(timeline: Timeline, sent: Transfers) -> Iterator[Event]:
    """A slice at each end of every transfer that was recorded, and the arrow between them."""
    columns = (
        sent.channel,
        sent.source,
        sent.destination,
        sent.is_gradient,
        sent.from_stage,
        sent.to_stage,
        sent.microbatch,
        sent.start,
        sent.end,
    )
    for number, row in enumerate(zip(*(column.tolist() for column in columns), strict=True)):
        channel, source, destination, is_gradient, from_stage, to_stage, microbatch, start, end = row
        if start != start:
            continue
        letter = "B" if is_gradient else "F"
        time, length = start * _MICROSECONDS, max((end - start) * _MICROSECONDS, _SHORTEST)
        what = {"ts": time, "dur": length, "cat": "transfer", "ph": "X"}
        details = {"microbatch": microbatch, "channel": str(timeline.program.channels[channel])}
        here = {"pid": source, "tid": _send_thread(channel)}
        there = {"pid": destination, "tid": _receive_thread(channel)}
        flow = {"name": "message", "cat": "transfer", "id": number}
        yield {**what, **here, "name": f"{from_stage}SEND_{letter}{microbatch}", "args": details}
        yield {**what, **there, "name": f"{to_stage}RECV_{letter}{microbatch}", "args": details}
        yield {**flow, **here, "ph": "s", "ts": time}
        yield {**flow, **there, "ph": "f", "bp": "e", "ts": time + length / 2}
