"""The commands that write files: plot, html, trace."""

from __future__ import annotations

import argparse
from pathlib import Path

from fastpipe import visualize
from fastpipe.cli import output, work
from fastpipe.cli.commands import timeline_summary
from fastpipe.timeline import Timeline


def plot(arguments: argparse.Namespace) -> None:
    """Draw a picture."""
    beside = arguments.against is not None
    timeline = work.timeline_of(arguments, share=beside)
    against = work.timeline_of(arguments, arguments.against, share=True) if beside else None
    with output.progress("drawing"):
        path = visualize.plot(
            timeline,
            _path(arguments, timeline),
            against=against,
            title=arguments.title,
            width=arguments.width,
            transfers=arguments.transfers,
            critical_path=arguments.critical_path,
        )
    _say(arguments, timeline, path)


def html(arguments: argparse.Namespace) -> None:
    """Write the interactive page."""
    timeline = work.timeline_of(arguments)
    with output.progress("writing the page"):
        path = visualize.to_html(timeline, _path(arguments, timeline))
    _say(arguments, timeline, path)


def trace(arguments: argparse.Namespace) -> None:
    """Write the Chrome trace."""
    timeline = work.timeline_of(arguments)
    with output.progress("writing the trace"):
        path = visualize.to_chrome_trace(timeline, _path(arguments, timeline))
    _say(arguments, timeline, path)


def _path(arguments: argparse.Namespace, timeline: Timeline) -> Path:
    program = timeline.program
    name = f"{program.name}-{program.num_ranks}x{program.num_microbatches}{arguments.suffix}"
    return Path(arguments.output or name)


def _say(arguments: argparse.Namespace, timeline: Timeline, path: Path) -> None:
    if arguments.json:
        output.document(
            {
                "path": str(path),
                "bytes": path.stat().st_size,
                "makespan": timeline.makespan,
                "bubble_fraction": timeline.bubble_fraction,
            }
        )
    else:
        print(timeline_summary(timeline))
        print(f"wrote {path}")
