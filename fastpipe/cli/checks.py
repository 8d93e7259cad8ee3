"""The commands that look at what is there: validate, convert, doctor."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import platform
import shutil
import subprocess
import sys
from typing import Any

from fastpipe import api
from fastpipe._version import __version__
from fastpipe.checks import as_path
from fastpipe.cli import output, work
from fastpipe.collectives import with_collectives
from fastpipe.hardware_queues import queues_text
from fastpipe.runtime.native import native_status
from fastpipe.schedule import Schedule
from fastpipe.validate_program import validate_program

FORMATS = ("csv", "aligned", "comms", "json", "program")
"""Compute only; with an empty cell where a rank idles; compute with transfers and collectives, as torch can run it; a
schedule, and its program, as JSON."""


def validate(arguments: argparse.Namespace) -> None:
    """Prove a schedule in a file."""
    schedule = work.read_schedule(arguments.file)
    with output.progress(f"validating {arguments.file}"), work.errors_of(arguments.file):
        program = validate_program(api.lower(schedule), queues=arguments.queues)
    if arguments.json:
        output.document(
            {
                "valid": True,
                "num_ranks": schedule.num_ranks,
                "num_stages": schedule.num_stages,
                "num_microbatches": schedule.num_microbatches,
                "num_actions": schedule.num_actions,
                "num_instructions": program.num_instructions,
                "queues": arguments.queues,
            }
        )
        return
    print(
        f"{arguments.file}: valid: {schedule.num_ranks} ranks, {schedule.num_stages} stages, "
        f"{schedule.num_microbatches} microbatches, {schedule.num_actions} actions; its program of "
        f"{program.num_instructions} instructions cannot hang where activations and gradients between two ranks have "
        "lanes of their own, as over every transport of fastpipe but process_group_coalesced"
        + ("" if arguments.queues is None else f", with {queues_text(arguments.queues)} for the streams of a rank")
    )


def convert(arguments: argparse.Namespace) -> None:
    """Rewrite a schedule in another format."""
    to_stdout = arguments.output in (None, "-")
    suffix = ".csv" if to_stdout else as_path(arguments.output).suffix.lower()
    if arguments.to is None and suffix not in (".csv", ".json"):
        raise ValueError(f"-o {arguments.output}: without --to the suffix says the format; use .csv or .json")
    to = arguments.to or suffix[1:]
    schedule = work.read_schedule(arguments.file)
    with work.errors_of(arguments.file):
        text = _text(schedule, "json" if to_stdout and arguments.json and to != "program" else to)
    if to_stdout:
        sys.stdout.write(text)
        return
    path = as_path(arguments.output)
    with output.writing(path):
        path.write_text(text, encoding="utf-8")
    if arguments.json:
        output.document({"path": str(path), "format": to})
    else:
        print(f"wrote {path}")


def _text(schedule: Schedule, to: str) -> str:
    if to == "json":
        return json.dumps(work.schedule_document(schedule), indent=2) + "\n"
    if to == "comms":
        # the file has no waits: both ranks of a pair have to come to their transfers in one order
        return with_collectives(api.lower(schedule, coalesce=True), reshards=True).to_csv()
    if to == "program":
        return api.lower(schedule).to_json()
    return schedule.to_csv(aligned=to == "aligned")


def doctor(arguments: argparse.Namespace) -> None:
    """Say what is there and what is missing."""
    with output.progress("importing torch"):
        found = diagnosis()
    if arguments.json:
        output.document(found)
        return
    for name, value in found.items():
        if name != "advice":
            print(f"{name + ':':<12} {value if value is not None else 'not found'}")
    for line in found["advice"]:
        print(f"- {line}")


def diagnosis() -> dict[str, Any]:
    """What is installed, and what to do about what is not."""
    found: dict[str, Any] = {
        "fastpipe": __version__,
        "python": f"{platform.python_version()} ({sys.executable})",
        "platform": platform.platform(),
        "native": native_status(),
        **{name: _installed(name) for name in ("torch", "numpy", "matplotlib", "rich")},
        "compiler": _compiler(),
        "private": _private_names(),
    }
    found["advice"] = _advice(found)
    return found


def _installed(name: str) -> str | None:
    """A package's version, without importing it."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _private_names() -> str:
    """Whether this torch has what fastpipe uses of it without its being documented."""
    if (version := _installed("torch")) is None:
        return "not looked for, as there is no torch"
    try:
        # by its name, as `fastpipe` imports what needs torch
        torch_private: Any = importlib.import_module("fastpipe.runtime.common.torch_private")
        missing = torch_private.missing()
    except Exception as error:  # told
        return f"torch {version} does not import: {type(error).__name__}: {str(error).splitlines()[:1]}"
    if missing:
        lost = "; ".join(f"{name}, without which this does not work: {what}" for name, what in missing.items())
        return f"undocumented names that are not in torch {version}: {lost}"
    return f"all {torch_private.num_names()} undocumented names of torch and Linux that fastpipe uses are there"


def _compiler() -> str | None:
    for name in ("c++", "g++", "clang++"):
        if (path := shutil.which(name)) is not None:
            ran = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20, check=False)
            return f"{path}: {ran.stdout.splitlines()[0] if ran.stdout else 'does not run'}"
    return None


def _advice(found: dict[str, Any]) -> list[str]:
    """One line for everything that is missing; empty when nothing is."""
    lines = []
    if found["torch"] is None:
        lines.append("planning works without torch; to train, install torch first, then fastpipe again beside it")
    elif "not loaded" in found["native"]:
        lines.append(f"everything works in Python, slower and with whole backwards: {found['native']}")
    if found["compiler"] is None:
        lines.append("no C++ compiler: the extension cannot be built; on Debian and Ubuntu: apt install g++")
    if found["matplotlib"] is None:
        lines.append("pictures need matplotlib: pip install matplotlib")
    if found["rich"] is None:
        lines.append("progress and nicer tables need rich: pip install rich")
    return lines
