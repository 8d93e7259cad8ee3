"""The command that looks for the best schedule: plan."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from fastpipe import planner
from fastpipe.cli import output, work
from fastpipe.cost import CostModel
from fastpipe.planner import LayerCosts, read_costs


def plan(arguments: argparse.Namespace) -> None:
    """Search, and print what was found and what it was chosen from."""
    costs = _costs(arguments)
    if arguments.microbatches is None and (not isinstance(costs, LayerCosts) or costs.batch_size is None):
        raise ValueError("--microbatches: give it, or with --costs costs of layers that have a batch_size")
    with output.reports("planning") as say:
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
    written = _write(arguments, found)
    if arguments.json:
        output.document(_document(found, written))
        return
    print(found)
    for path in written:
        print(f"\nwrote {path}")


def _costs(arguments: argparse.Namespace) -> CostModel | LayerCosts:
    """Those of the file, and over them those of the command line."""
    given = work.given_costs(arguments)
    costs = CostModel() if arguments.costs is None else read_costs(arguments.costs)
    if given and isinstance(costs, LayerCosts):
        flag = next(iter(given)).replace("_", "-")
        raise ValueError(f"--{flag}: {arguments.costs} has costs of layers; write it there")
    return replace(costs, **given)


def _write(arguments: argparse.Namespace, found: planner.Plan) -> list[str]:
    writers: dict[str, Callable[[str], Any]] = {
        "plot": found.plot,
        "csv": found.schedule.to_csv,
        "html": found.timeline.to_html,
    }
    written = []
    for name, write in writers.items():
        path = getattr(arguments, name)
        if path is not None:
            write(path)
            written.append(str(path))
    return written


def _document(found: planner.Plan, written: list[str]) -> dict[str, Any]:
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
