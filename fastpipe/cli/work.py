"""From parsed arguments to schedules, costs and timelines."""

from __future__ import annotations

import argparse
import json
import reprlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from fastpipe import api
from fastpipe.checks import as_path
from fastpipe.cli.output import progress
from fastpipe.cost import CostModel, shared_out
from fastpipe.machine import COALESCED
from fastpipe.placement import Placement
from fastpipe.program import Program
from fastpipe.schedule import Schedule
from fastpipe.schedules import find, make_schedule
from fastpipe.timeline import Timeline

COSTS = tuple(field.name for field in fields(CostModel))


def schedule_of(
    arguments: argparse.Namespace, name: str | None = None, cost: CostModel | None = None, *, share: bool = False
) -> Schedule:
    """The schedule that the arguments name: generated, for the costs if it looks at them, or read from a file."""
    name = arguments.name if name is None else name
    if name.lower().endswith((".csv", ".json")):
        _refuse_numbers(arguments, name)
        return read_schedule(name)
    find(name)
    if arguments.ranks is None or arguments.microbatches is None:
        raise ValueError(f"{name}: give --ranks and --microbatches, such as --ranks 4 --microbatches 8")
    options = _options(arguments)
    if cost is not None:
        parts = options.get("stages_per_rank", find(name).stages_per_rank)
        of_stage = shared_out(cost, parts) if share else cost
        options = {**api.generator_costs(name, of_stage), **options}
    with progress(f"generating {name}"):
        return make_schedule(name, num_ranks=arguments.ranks, num_microbatches=arguments.microbatches, **options)


def _options(arguments: argparse.Namespace) -> dict[str, Any]:
    """The options of the schedule, each given once."""
    given = list(arguments.option)
    if arguments.stages_per_rank is not None:
        given.append(("stages_per_rank", arguments.stages_per_rank))
    options: dict[str, Any] = {}
    for name, value in given:
        if name in options:
            raise ValueError(f"--option {name} = {options[name]!r} and {value!r}: give it once")
        options[name] = value
    return options


def _refuse_numbers(arguments: argparse.Namespace, name: str) -> None:
    given = [flag for flag in ("ranks", "microbatches", "stages_per_rank") if getattr(arguments, flag) is not None]
    if given or arguments.option:
        flag = f"--{given[0].replace('_', '-')}" if given else "--option"
        raise ValueError(f"{flag} is for schedules that are generated; {name} is a file: leave it out")


def read_schedule(name: str) -> Schedule:
    """A schedule from a CSV file, or from the JSON that `schedule_document` gives."""
    path = as_path(name)
    if path.suffix.lower() != ".json":
        return Schedule.from_csv(path)
    try:
        document = json.loads(path.read_text(encoding="utf-8-sig"))
        placement = Placement(document["num_ranks"], tuple(map(tuple, document["routes"])), document["placement"])
        orders = document["orders"]
        schedule = Schedule.from_actions(document["name"], placement, document["num_microbatches"], orders)
        _refuse_the_rest(document, schedule_document(schedule))
        return schedule
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        what = f"no {error}" if isinstance(error, KeyError) else str(error)
        text = f"no schedule in this JSON ({what}); `fastpipe show --json` writes one"
        raise ValueError(f"{name}: {text}") from None
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _refuse_the_rest(document: dict[str, Any], read: dict[str, Any]) -> None:
    """Refuse what would not be read, or is not what the other entries say."""
    for name, value in document.items():
        if name not in read:
            raise ValueError(f"there is no entry {name!r}; there are {', '.join(read)}")
        if value != read[name]:
            raise ValueError(f"{name} = {reprlib.repr(value)}: the rest says {reprlib.repr(read[name])}; write that")


def schedule_document(schedule: Schedule) -> dict[str, Any]:
    """A schedule as JSON: what `read_schedule` reads."""
    return {
        "name": schedule.name,
        "num_ranks": schedule.num_ranks,
        "num_stages": schedule.num_stages,
        "num_microbatches": schedule.num_microbatches,
        "placement": schedule.placement.name,
        "routes": [list(route) for route in schedule.placement.routes],
        "orders": [list(map(str, rank)) for rank in schedule],
    }


def cost_of(arguments: argparse.Namespace) -> CostModel:
    """The costs: those of the file, and over them those of the command line."""
    costs = CostModel() if arguments.costs is None else CostModel.from_json(Path(arguments.costs))
    return replace(costs, **given_costs(arguments))


def given_costs(arguments: argparse.Namespace) -> dict[str, Any]:
    """The costs of the command line alone."""
    return {name: getattr(arguments, name) for name in COSTS if getattr(arguments, name) is not None}


def program_of(arguments: argparse.Namespace, schedule: Schedule, name: str | None = None) -> Program:
    """The schedule's program, proved."""
    with progress(f"lowering {schedule.name}"), errors_of(name or arguments.name):
        coalesce = getattr(arguments, "lanes", "") == COALESCED
        return api.lower(schedule, recv_lookahead=arguments.recv_lookahead, coalesce=coalesce)


@contextmanager
def errors_of(name: str) -> Iterator[None]:
    """What is wrong with a schedule, by the name or file that the user gave."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def timeline_of(arguments: argparse.Namespace, name: str | None = None, *, share: bool = False) -> Timeline:
    """The simulated timeline of what the arguments name; with ``share``, costs are of a rank's share of the model."""
    cost = cost_of(arguments)
    if share:
        api.check_one_cost(cost)
    schedule = schedule_of(arguments, name, cost, share=share)
    if share:
        cost = shared_out(cost, schedule.num_stages / schedule.num_ranks)
    cost.check(schedule.num_stages)
    program = program_of(arguments, schedule, name)
    with progress(f"simulating {schedule.name}"):
        return api.simulate(program, cost, lanes=arguments.lanes)
