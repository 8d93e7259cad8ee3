"""The interactive page: one file that needs no network. Columns go in as base64, the code is in html/*.js."""

from __future__ import annotations

import base64
import html
import json
import re
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fastpipe.checks import as_path, check_type
from fastpipe.program import Op
from fastpipe.timeline import Timeline
from fastpipe.visualize import canvas, colours
from fastpipe.visualize.bars import (
    Bars,
    Ints,
    bars,
    critical_bars,
    critical_transfers,
    limited_by,
    live_activations,
    runs,
    transfers,
    waited_for,
)

_SCRIPTS = ("data.js", "draw.js", "memory.js", "page.js")
_INTEGERS = (("Uint8Array", np.uint8), ("Uint16Array", np.uint16), ("Int32Array", np.int32))


def to_html(timeline: Timeline, path: str | Path) -> Path:
    """Write a timeline as an interactive page: zoom, pan, what every action waited for, the critical path, memory.

    Args:
        timeline: simulated or measured.
        path: the file to write.

    Returns:
        The path.
    """
    check_type(Timeline, timeline=timeline)
    path = as_path(path)
    files = resources.files("fastpipe.visualize") / "html"
    text = (files / "page.html").read_text(encoding="utf-8")
    parts = {
        "{{title}}": html.escape(timeline.program.name),
        "/*{{style}}*/": (files / "page.css").read_text(encoding="utf-8"),
        "/*{{script}}*/": "\n".join((files / name).read_text(encoding="utf-8") for name in _SCRIPTS),
        # A "<" in a name could end the script element before its time.
        "/*{{data}}*/": json.dumps(page_data(timeline)).replace("<", "\\u003c"),
    }
    places = re.compile("|".join(map(re.escape, parts)))  # all at once: a name may be the mark of another place
    # a name read from a file may have lone surrogates
    path.write_text(places.sub(lambda found: parts[found[0]], text), encoding="utf-8", errors="replace")
    return path


def page_data(timeline: Timeline) -> dict[str, Any]:
    """What the page's code reads: the numbers of the heading, colours, and columns."""
    program, drawn = timeline.program, bars(timeline)
    critical = critical_bars(timeline, drawn)
    kinds, fused = canvas.kinds_of([timeline])
    chunks = range(drawn.num_chunks)
    return {
        "name": program.name,
        "measured": timeline.measured,
        "ranks": program.num_ranks,
        "stages": program.num_stages,
        "microbatches": program.num_microbatches,
        "makespan": timeline.makespan,
        "bubble": timeline.bubble_fraction,
        "peaks": list(timeline.peak_activations),
        "tracks": drawn.num_tracks,
        "ops": [Op(number).name for number in range(Op.OVERLAP_F_B + 1)],
        "kinds": kinds,
        "fused": fused,
        "meanings": {**colours.MEANINGS},
        "shades": {kind: [colours.shade(kind, chunk, drawn.num_chunks) for chunk in chunks] for kind in colours.KINDS},
        "transfer": colours.COLOURS["comm"],
        "critical": colours.CRITICAL,
        "bars": _bar_columns(drawn, critical),
        "messages": _message_columns(timeline),
        "memory": _memory_columns(drawn),
        "criticalRuns": runs(drawn, critical),
        "criticalTransfers": critical_transfers(timeline),
    }


def _bar_columns(drawn: Bars, critical: Ints) -> dict[str, Any]:
    needed = waited_for(drawn)
    is_critical = np.zeros(len(drawn), dtype=np.int64)
    is_critical[critical] = 1
    integers = {
        "first": drawn.first,
        "op": drawn.op,
        "stage": drawn.stage,
        "microbatch": drawn.microbatch,
        "pairStage": drawn.pair_stage + 1,
        "pairMicrobatch": drawn.pair_microbatch + 1,
        "chunk": drawn.chunk,
        "pairChunk": drawn.pair_chunk + 1,
        "track": drawn.track,
        "needs0": needed[:, 0] + 1,
        "needs1": needed[:, 1] + 1,
        "needs2": needed[:, 2] + 1,
        "decided": limited_by(drawn, needed) + 1,
        "critical": is_critical,
    }
    columns = {name: _integers(values) for name, values in integers.items()}
    return {**columns, "start": _reals(drawn.start), "end": _reals(drawn.end)}


def _message_columns(timeline: Timeline) -> dict[str, Any]:
    sent = transfers(timeline)
    order = np.argsort(sent.start, kind="stable")
    order = order[~np.isnan(sent.start[order])]
    return {
        "source": _integers(sent.source[order]),
        "destination": _integers(sent.destination[order]),
        "start": _reals(sent.start[order]),
        "end": _reals(sent.end[order]),
    }


def _memory_columns(drawn: Bars) -> dict[str, Any]:
    steps = [live_activations(drawn, rank) for rank in range(drawn.program.num_ranks)]
    first = np.concatenate([[0], np.cumsum([len(times) for times, _ in steps])])
    return {
        "first": _integers(first),
        "time": _reals(np.concatenate([times for times, _ in steps])),
        "level": _integers(np.concatenate([levels for _, levels in steps])),
    }


def _integers(values: npt.NDArray[np.integer[Any]]) -> list[str]:
    """The array's type in JavaScript, the smallest that holds it, and its bytes as base64."""
    highest = int(values.max(initial=0))
    name, kind = next((n, k) for n, k in _INTEGERS if highest <= np.iinfo(k).max)
    return [name, _encoded(values.astype(kind))]


def _reals(values: npt.NDArray[np.float64]) -> list[str]:
    """The same for seconds: single precision where that is exact."""
    single = values.astype(np.float32)
    if np.array_equal(single.astype(np.float64), values):
        return ["Float32Array", _encoded(single)]
    return ["Float64Array", _encoded(values)]


def _encoded(values: npt.NDArray[Any]) -> str:
    little = values.astype(values.dtype.newbyteorder("<"))
    return base64.b64encode(little.tobytes()).decode("ascii")
