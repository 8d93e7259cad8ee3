"""The commands that plan: schedules, show, simulate, compare, plan; and those that draw: plot, html, trace."""

from __future__ import annotations

import argparse
import math
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from fastpipe import api, planner, visualize
from fastpipe.cli import output, work
from fastpipe.cost import CostModel
from fastpipe.planner import LayerCosts, read_costs
from fastpipe.program import Program
from fastpipe.schedule import Schedule
from fastpipe.schedules import Family, find, list_schedules
from fastpipe.timeline import Timeline


def schedules(arguments: argparse.Namespace) -> None:
    """List the schedules."""
    chosen = [find(name) for name in arguments.names] or list_schedules()
    if arguments.json:
        output.document([_family_document(family) for family in chosen])
        return
    for family in chosen:
        print(family)


def _family_document(family: Family) -> dict[str, Any]:
    options = {name: {"default": option.default, "description": option.text} for name, option in family.options.items()}
    return {"name": family.name, "summary": family.summary, "limits": family.limits, "options": options}


def show(arguments: argparse.Namespace) -> None:
    """Print a schedule, or a rank's program."""
    schedule = work.schedule_of(arguments)
    if arguments.program is not None:
        _show_program(arguments, schedule)
    elif arguments.json:
        output.document(work.schedule_document(schedule))
    else:
        terminal = sys.stdout.isatty()
        plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
        colour = {"auto": terminal and not plain, "always": True, "never": False}[arguments.colour]
        print(visualize.grid(schedule, width=shutil.get_terminal_size().columns if terminal else None, colour=colour))


def _show_program(arguments: argparse.Namespace, schedule: Schedule) -> None:
    if arguments.program >= schedule.num_ranks:
        raise ValueError(f"--program {arguments.program}: ranks are 0 to {schedule.num_ranks - 1}")
    program = work.program_of(arguments, schedule)
    if arguments.json:
        output.document(_program_document(program, arguments.program))
    else:
        print(program[arguments.program])


def _program_document(program: Program, number: int) -> dict[str, Any]:
    rank = program[number]
    return {
        "rank": number,
        "num_slots": rank.num_slots,
        "num_sends": rank.num_sends,
        "channels": [[c.source, c.destination, c.kind.name.lower()] for c in program.channels],
        "instructions": [{**instruction._asdict(), "op": instruction.op.name} for instruction in rank],
    }


def simulate(arguments: argparse.Namespace) -> None:
    """Print when what happens."""
    timeline = work.timeline_of(arguments)
    if arguments.json:
        output.document(_timeline_document(timeline, steps=arguments.steps))
        return
    print(timeline_summary(timeline))
    print()
    _print_ranks(timeline)
    if arguments.steps:
        print()
        print(timeline)


def _print_ranks(timeline: Timeline) -> None:
    """A row per rank; bytes only where the costs say how many a stage holds."""
    columns = {
        "rank": [str(rank) for rank in range(timeline.program.num_ranks)],
        "busy": [f"{busy:.6g}" for busy in timeline.busy],
        "idle": [_percent(1 - busy / timeline.makespan) if timeline.makespan else "-" for busy in timeline.busy],
        "waits for transfers": [f"{seconds:.6g}" for seconds in timeline.exposed_communication],
        "peak activations": [str(peak) for peak in timeline.peak_activations],
        "(if released at I)": [str(peak) for peak in timeline.peak_activations_released_at_input],
    }
    if any(timeline.peak_bytes):
        columns["peak bytes"] = [f"{count:.4g}" for count in timeline.peak_bytes]
    output.table(tuple(columns), zip(*columns.values(), strict=True))


def _percent(value: float) -> str:
    return f"{max(0.0, value):.1%}"


def timeline_summary(timeline: Timeline) -> str:
    """Name and numbers, in a line."""
    program = timeline.program
    return (
        f"{program.name}, {program.num_ranks} ranks, {program.num_stages} stages, {program.num_microbatches} "
        f"microbatches: makespan {timeline.makespan:.6g}, bubble {_percent(timeline.bubble_fraction)}"
    )


def _timeline_document(timeline: Timeline, *, steps: bool = False) -> dict[str, Any]:
    program = timeline.program
    found = {
        "name": program.name,
        "num_ranks": program.num_ranks,
        "num_stages": program.num_stages,
        "num_microbatches": program.num_microbatches,
        "makespan": timeline.makespan,
        "span": timeline.span,
        "bubble_fraction": timeline.bubble_fraction,
        "busy": timeline.busy,
        "exposed_communication": timeline.exposed_communication,
        "peak_bytes": timeline.peak_bytes,
        "peak_activations": timeline.peak_activations,
        "peak_activations_released_at_input": timeline.peak_activations_released_at_input,
    }
    if steps:
        found["spans"] = [
            {"rank": rank, "action": str(span.instruction.action), "start": span.start, "end": span.end}
            for rank in range(program.num_ranks)
            for span in timeline.compute_spans(rank)
        ]
    return found


def compare(arguments: argparse.Namespace) -> None:
    """Print several schedules side by side, best first, and draw them."""
    names = [find(name).name for name in arguments.names if name != "all"]
    everything = "all" in arguments.names
    if everything:
        names = [family.name for family in list_schedules()]
    with output.progress(f"comparing {len(names)} schedules"):
        rows = api.compare(
            names,
            num_ranks=arguments.ranks,
            num_microbatches=arguments.microbatches,
            cost=work.cost_of(arguments),
            lanes=arguments.lanes,
            skip_impossible=everything,
        )
    drawn = None
    if arguments.plot:
        title = f"Bubble against peak memory: {arguments.ranks} ranks, {arguments.microbatches} microbatches"
        with output.writing(arguments.plot):
            drawn = visualize.pareto(rows, arguments.plot, title=title)
    if arguments.json:
        output.document([row._asdict() for row in rows])
        return
    _print_comparison(rows)
    if drawn is not None:
        print(f"\nwrote {drawn}")


def _print_comparison(rows: list[api.Comparison]) -> None:
    output.table(
        ("schedule", "makespan", "bubble", "waits for transfers", "peak memory", "best"),
        [
            (
                row.name,
                f"{row.makespan:.6g}",
                _percent(row.bubble_fraction),
                f"{row.exposed_communication:.6g}",
                f"{row.peak_memory:.4g}",
                "*" * row.best,
            )
            for row in rows
            if row.refused is None
        ],
    )
    if any(row.best for row in rows):
        print("\n* no other has both a smaller makespan and a smaller peak memory (in activations of a rank's share)")
    for row in rows:
        if row.refused is not None:
            print(f"{row.name} not possible: {row.refused}")


def plan(arguments: argparse.Namespace) -> None:
    """Search, and print what was found and what it was chosen from."""
    costs = _plan_costs(arguments)
    if arguments.microbatches is None and (not isinstance(costs, LayerCosts) or costs.batch_size is None):
        raise ValueError("--microbatches: give it, or with --costs costs of layers that have a batch_size")
    with output.progress("planning") as say:
        found = planner.plan(
            costs,
            num_ranks=arguments.ranks,
            num_microbatches=arguments.microbatches,
            memory=arguments.memory,
            objective=arguments.objective,
            max_stages_per_rank=arguments.max_stages_per_rank,
            recompute=arguments.recompute_stages,
            effort=arguments.effort,
            time_limit=arguments.time_limit,
            seed=arguments.seed,
            exact=arguments.exact,
            progress=lambda text, best: say(text if math.isinf(best) else f"{text} (best so far {best:.6g})"),
        )
    written = _write_plan(arguments, found)
    if arguments.json:
        output.document(_plan_document(found, written))
        return
    print(found)
    for path in written:
        print(f"\nwrote {path}")


def _plan_costs(arguments: argparse.Namespace) -> CostModel | LayerCosts:
    """Those of the file, and over them those of the command line."""
    given = work.given_costs(arguments)
    costs = CostModel() if arguments.costs is None else read_costs(arguments.costs)
    if given and isinstance(costs, LayerCosts):
        flag = next(iter(given)).replace("_", "-")
        raise ValueError(f"--{flag}: {arguments.costs} has costs of layers; write it there")
    return replace(costs, **given)


def _write_plan(arguments: argparse.Namespace, found: planner.Plan) -> list[str]:
    writers: dict[str, Callable[[str], Any]] = {
        "plot": found.plot,
        "csv": found.schedule.to_csv,
        "html": found.timeline.to_html,
    }
    written = []
    for name, write in writers.items():
        path = getattr(arguments, name)
        if path is not None:
            with output.writing(path):
                write(path)
            written.append(str(path))
    return written


def _plan_document(found: planner.Plan, written: list[str]) -> dict[str, Any]:
    return {
        "schedule": work.schedule_document(found.schedule),
        "partition": found.partition and [[part.start, part.stop] for part in found.partition],
        "objective": found.objective,
        "makespan": found.makespan,
        "span": found.span,
        "bubble_fraction": found.bubble_fraction,
        "bound": found.bound,
        "gap": found.gap,
        "cut": found.cut,
        "optimal": found.optimal,
        "recomputes": found.recomputes,
        "candidates": [one._asdict() for one in found.candidates],
        "written": written,
    }


def plot(arguments: argparse.Namespace) -> None:
    """Draw a picture."""
    beside = arguments.against is not None
    timeline = work.timeline_of(arguments, share=beside)
    against = work.timeline_of(arguments, arguments.against, share=True) if beside else None
    draw = partial(
        visualize.plot,
        against=against,
        title=arguments.title,
        width=arguments.width,
        transfers=arguments.transfers,
        critical_path=arguments.critical_path,
    )
    _write(arguments, timeline, "drawing", draw)


def html(arguments: argparse.Namespace) -> None:
    """Write the interactive page."""
    _write(arguments, work.timeline_of(arguments), "writing the page", visualize.to_html)


def trace(arguments: argparse.Namespace) -> None:
    """Write the Chrome trace."""
    _write(arguments, work.timeline_of(arguments), "writing the trace", visualize.to_chrome_trace)


def _write(
    arguments: argparse.Namespace, timeline: Timeline, what: str, write: Callable[[Timeline, Path], object]
) -> None:
    """Write a timeline into the file that the arguments name, and say so."""
    program = timeline.program
    name = program.name.replace("/", "_")  # of a file that may come from anywhere: it names no folder
    path = Path(arguments.output or f"{name}-{program.num_ranks}x{program.num_microbatches}{arguments.suffix}")
    with output.progress(what), output.writing(path):
        write(timeline, path)
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
