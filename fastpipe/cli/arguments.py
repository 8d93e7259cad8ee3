"""The arguments of every command, and how text becomes values."""

from __future__ import annotations

import argparse
import ast
import sys
import textwrap
from collections.abc import Callable
from typing import Any, NoReturn

from fastpipe._version import __version__
from fastpipe.cli import checks, commands
from fastpipe.cli.work import COSTS

_COST_HELP = {
    "forward": "seconds of F",
    "backward_input": "seconds of I",
    "backward_weight": "seconds of W",
    "backward": "seconds of B (default: I + W)",
    "overlapped": "seconds of an overlapped F and B (default: their sum)",
    "comm": "seconds of latency of a transfer",
    "bandwidth": "bytes per second of a link",
    "activation_bytes": "bytes of a stage's output",
    "stage_bytes": "bytes that a stage holds of a microbatch from F to W or B",
    "recompute": "fraction of F, 0 to 1, that I or B runs again",
    "kept_bytes": "bytes that a stage that recomputes holds from F to I or B beside its input (default: the rest)",
}

_EPILOG = """\
examples:
  fastpipe schedules
  fastpipe show 1f1b --ranks 4 --microbatches 8
  fastpipe simulate dualpipev --ranks 4 --microbatches 16
  fastpipe compare all --ranks 8 --microbatches 32 --plot pareto.png
  fastpipe plan --ranks 8 --microbatches 32 --memory 0.625
  fastpipe html dualpipev --ranks 8 --microbatches 32 -o dualpipev.html
`fastpipe COMMAND --help` has more.
"""


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        """Leave with status 2 and one line."""
        self.exit(2, f"{self.prog}: error: {' '.join(message.split())} (see `{self.prog} --help`)\n")

    def _print_message(self, message: str, file: Any = None) -> None:
        """Help and version; argparse would ignore that they could not be written."""
        if file is sys.stdout:
            print(message, end="", flush=True)
        else:
            super()._print_message(message, file)


def parser() -> Parser:
    """The parser of the whole command."""
    top = Parser(
        prog="fastpipe",
        description="Pipeline schedules: list, show, simulate, compare, draw, check and convert them.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    top.add_argument("--version", action="version", version=f"fastpipe {__version__}")
    adder = top.add_subparsers(title="commands", metavar="COMMAND", required=True, parser_class=Parser)
    for add in (_schedules, _show, _simulate, _compare, _plan, _plot, _html, _trace, _validate, _convert, _doctor):
        add(adder)
    return top


def _command(adder: Any, run: Callable[[argparse.Namespace], None], text: str, examples: str) -> Parser:
    name = run.__name__
    command: Parser = adder.add_parser(
        name,
        help=text,
        description=text[0].upper() + text[1:] + ".",
        epilog="examples:\n" + textwrap.indent(textwrap.dedent(examples).strip(), "  "),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    command.set_defaults(run=run)
    command.add_argument("--json", action="store_true", help="print one JSON document")
    return command


def _schedules(adder: Any) -> None:
    command = _command(
        adder,
        commands.schedules,
        "list the schedules, their limits and their options",
        """
        fastpipe schedules
        fastpipe schedules zbv dualpipev
        fastpipe schedules --json
        """,
    )
    command.add_argument("names", metavar="NAME", nargs="*", help="only these")


def _show(adder: Any) -> None:
    command = _command(
        adder,
        commands.show,
        "print a schedule as a grid (ranks down, unit time steps to the right), or one rank's program",
        """
        fastpipe show 1f1b --ranks 4 --microbatches 8
        fastpipe show interleaved_1f1b --ranks 4 --microbatches 8 --stages-per-rank 2
        fastpipe show dualpipev --ranks 4 --microbatches 16 --program 0
        fastpipe show mine.csv
        """,
    )
    _schedule_arguments(command)
    command.add_argument("--program", metavar="RANK", type=_count(0), help="print what this rank executes")
    command.add_argument(
        "--recv-lookahead", metavar="N", type=_lookahead, default=1, help=f"with --program: {_LOOKAHEAD_HELP}"
    )
    command.add_argument("--colour", choices=("auto", "always", "never"), default="auto", help="paint the cells")


def _simulate(adder: Any) -> None:
    command = _command(
        adder,
        commands.simulate,
        "simulate a schedule: makespan, bubble, and a table of the ranks",
        """
        fastpipe simulate dualpipev --ranks 4 --microbatches 16
        fastpipe simulate 1f1b --ranks 4 --microbatches 8 --forward 1 --backward 2 --comm 0.1 --steps
        fastpipe simulate zbv --ranks 4 --microbatches 8 --costs costs.json --json
        """,
    )
    _simulation_arguments(command)
    command.add_argument("--steps", action="store_true", help="print a table of time by rank as well")


def _compare(adder: Any) -> None:
    command = _command(
        adder,
        commands.compare,
        "simulate several schedules side by side: bubble, makespan and memory",
        """
        fastpipe compare 1f1b zbv dualpipev --ranks 4 --microbatches 16
        fastpipe compare all --ranks 8 --microbatches 32 --plot pareto.png
        fastpipe compare all --ranks 8 --microbatches 32 --comm 0.05 --json
        """,
    )
    command.description = (
        "Simulate several schedules side by side. So that they can be compared, costs are those of a rank's whole "
        "share of the model (1/RANKS of it): a stage of a schedule with two stages per rank costs half. Memory is in "
        "activations of such a share."
    )
    command.add_argument("names", metavar="NAME", nargs="+", help="schedules, or `all` that take these numbers")
    _count_arguments(command, required=True)
    _cost_arguments(command, "of a rank's whole share of the model and one microbatch")
    text = "draw bubble against peak memory (.png, .svg or .pdf)"
    command.add_argument("--plot", metavar="FILE", type=_file, help=text)


def _plan(adder: Any) -> None:
    command = _command(
        adder,
        commands.plan,
        "find the best schedule for your costs and memory, with a lower bound",
        """
        fastpipe plan --ranks 8 --microbatches 32 --memory 0.625
        fastpipe plan --ranks 8 --microbatches 32 --costs costs.json --memory 0.75 --plot pareto.png --csv plan.csv
        fastpipe plan --ranks 4 --microbatches 16 --stage-bytes 2e9 --memory 20GiB --objective span --json
        """,
    )
    command.add_argument("--ranks", "-p", metavar="N", type=_count(1), required=True, help="pipeline ranks")
    text = "microbatches of a step; chosen where the costs of layers have a batch_size"
    command.add_argument("--microbatches", "-m", metavar="N", type=_count(1), help=text)
    text = "what a rank may hold: a fraction of 1F1B's (0.625), '5 activations' of a rank's share, or bytes (40GiB)"
    command.add_argument("--memory", metavar="X", help=text)
    command.add_argument("--objective", choices=("makespan", "span"), default="makespan", help="what to minimize")
    command.add_argument("--max-stages-per-rank", metavar="N", type=_count(1), default=4, help="at most (4)")
    text = "stages that run their forward again in their backward to save memory: none, all, or chosen by the search"
    command.add_argument("--recompute-stages", choices=("none", "full", "auto"), default="none", help=text)
    text = "factor of the search's length (1: it anneals for half a second to a second)"
    command.add_argument("--effort", metavar="X", type=_typed(_number), default=1.0, help=text)
    command.add_argument("--time-limit", metavar="S", type=_typed(_number), help="seconds after which the search ends")
    command.add_argument("--seed", metavar="N", type=_count(0), default=0, help="of the search's random numbers (0)")
    command.add_argument("--exact", action="store_true", help="prove a small case, improve a larger one (OR-Tools)")
    _cost_numbers(
        command,
        "of a rank's whole share of the model, or by stage (1,1,2); the file may have those of layers (LayerCosts)",
    )
    for flag, text in (
        ("--plot", "draw bubble against memory of all candidates (.png, .svg or .pdf)"),
        ("--csv", "write the schedule as torch.distributed.pipelining does"),
        ("--html", "write the plan as an interactive page"),
    ):
        command.add_argument(flag, metavar="FILE", type=_file, help=text)


def _plot(adder: Any) -> None:
    command = _command(
        adder,
        commands.plot,
        "draw a timeline into a picture (PNG, SVG or PDF)",
        """
        fastpipe plot dualpipev --ranks 4 --microbatches 16 -o dualpipev.png
        fastpipe plot 1f1b --ranks 4 --microbatches 8 --comm 0.2 --critical-path -o 1f1b.svg
        fastpipe plot zbv --ranks 4 --microbatches 8 --against 1f1b -o both.png
        """,
    )
    _simulation_arguments(command)
    _output_argument(command, ".png")
    command.add_argument(
        "--against",
        metavar="NAME",
        help="a second schedule, drawn below on the same time axis; costs are then of a rank's share of the model",
    )
    command.add_argument("--title", help="the heading")
    command.add_argument("--critical-path", action="store_true", help="outline the critical path")
    command.add_argument("--transfers", action=argparse.BooleanOptionalAction, help="draw every transfer as a line")
    command.add_argument("--width", type=_inches, default=14.0, help="inches, 2 to 200 (14)")


def _html(adder: Any) -> None:
    command = _command(
        adder,
        commands.html,
        "write a timeline as an interactive page, with zoom, dependencies and memory",
        "fastpipe html dualpipev --ranks 8 --microbatches 32 -o dualpipev.html",
    )
    _simulation_arguments(command)
    _output_argument(command, ".html")


def _trace(adder: Any) -> None:
    command = _command(
        adder,
        commands.trace,
        "write a timeline as JSON for ui.perfetto.dev and chrome://tracing",
        "fastpipe trace dualpipev --ranks 8 --microbatches 32 --comm 0.1 -o dualpipev.json",
    )
    _simulation_arguments(command)
    _output_argument(command, ".json")


def _validate(adder: Any) -> None:
    command = _command(
        adder,
        checks.validate,
        "prove that a schedule in a file is complete and free of deadlocks",
        """
        fastpipe validate mine.csv
        fastpipe validate mine.csv --json
        fastpipe validate mine.csv --queues 1
        """,
    )
    command.add_argument(
        "file", metavar="FILE", help="a .csv, one row per rank as in torch.distributed.pipelining, or a .json"
    )
    command.add_argument(
        "--queues",
        type=_count(1),
        metavar="N",
        help="prove it also for GPUs with N hardware queues (CUDA_DEVICE_MAX_CONNECTIONS)",
    )


def _convert(adder: Any) -> None:
    command = _command(
        adder,
        checks.convert,
        "convert a schedule between formats",
        """
        fastpipe convert mine.csv --to aligned
        fastpipe convert mine.csv --to json -o mine.json
        fastpipe convert mine.json --to csv -o mine.csv
        """,
    )
    command.add_argument("file", metavar="FILE", help="a .csv, or a .json that `fastpipe convert` or `show` wrote")
    command.add_argument("--to", choices=checks.FORMATS, help="the format (default: by the suffix of -o, or csv)")
    command.add_argument("-o", "--output", metavar="FILE", help="the output file (default: `-`, the standard output)")


def _doctor(adder: Any) -> None:
    _command(
        adder,
        checks.doctor,
        "say what is installed, whether the native extension is loaded, and what to do if not",
        """
        fastpipe doctor
        fastpipe doctor --json
        """,
    )


_LOOKAHEAD_HELP = "how many compute actions ahead receives are posted (1), or `all`"


def _schedule_arguments(command: Parser) -> None:
    command.add_argument("name", metavar="NAME", help="a schedule (see `fastpipe schedules`), or a .csv or .json file")
    _count_arguments(command, required=False)
    command.add_argument(
        "--option",
        metavar="NAME=VALUE",
        action="append",
        type=_option,
        default=[],
        help="an option of the schedule (repeatable)",
    )
    command.add_argument("--stages-per-rank", metavar="N", type=_count(1), help="stages per rank")


def _count_arguments(command: Parser, *, required: bool) -> None:
    for flag, short, text in (("--ranks", "-p", "pipeline ranks"), ("--microbatches", "-m", "microbatches of a step")):
        command.add_argument(flag, short, metavar="N", type=_count(1), required=required, help=text)


def _simulation_arguments(command: Parser) -> None:
    _schedule_arguments(command)
    _cost_arguments(command)
    command.add_argument("--recv-lookahead", metavar="N", type=_lookahead, default=1, help=_LOOKAHEAD_HELP)


_OF_A_STAGE = "of one stage and one microbatch; a number, or one per stage (1,1,2)"


def _cost_arguments(command: Parser, text: str = _OF_A_STAGE) -> None:
    group = _cost_numbers(command, text)
    group.add_argument(
        "--lanes",
        choices=("directed", "pair", "coalesced", "group"),
        default="directed",
        help="which channels share a queue of the transport: none (directed), those between two ranks (pair; "
        "coalesced: a send and a receive at one time are one operation), or all (group)",
    )


def _cost_numbers(command: Parser, text: str) -> Any:
    group = command.add_argument_group("costs", text)
    group.add_argument("--costs", metavar="FILE", help="a JSON object with any of the following names")
    for name in COSTS:
        flag = "--" + name.replace("_", "-")
        group.add_argument(flag, metavar="X", type=_cost, help=_COST_HELP.get(name, name))
    return group


def _output_argument(command: Parser, suffix: str) -> None:
    command.set_defaults(suffix=suffix)
    text = f"the output file (default: NAME-PxM{suffix})"
    command.add_argument("-o", "--output", metavar="FILE", type=_file, help=text)


def _file(text: str) -> str:
    """A file's name; elsewhere ``-`` is the standard output, where this command says what it wrote."""
    if text in ("", "-"):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no file: this command cannot write to the standard output; give a file"
        )
    return text


def _typed(convert: Callable[[str], Any]) -> Callable[[str], Any]:
    """argparse shows the text of its own error only."""

    def converted(text: str) -> Any:
        try:
            return convert(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return converted


def _count(least: int) -> Callable[[str], Any]:
    def convert(text: str) -> int:
        if not text.isascii() or not text.isdigit() or len(text) > 9 or int(text) < least:
            raise ValueError(f"{text!r}: give a whole number from {least} to 999999999")
        return int(text)

    return _typed(convert)


@_typed
def _inches(text: str) -> float:
    value = _number(text)
    if not 2 <= value <= 200:
        raise ValueError(f"{text!r}: give 2 to 200 inches")
    return value


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{text!r}: give a number") from None


@_typed
def _cost(text: str) -> float | tuple[float, ...]:
    numbers = tuple(_number(part) for part in text.split(","))
    return numbers[0] if len(numbers) == 1 else numbers


@_typed
def _lookahead(text: str) -> int | str:
    if text != "all" and not (text.isascii() and text.isdigit() and len(text) < 10):
        raise ValueError(f"{text!r}: give a whole number, or all")
    return text if text == "all" else int(text)


@_typed
def _option(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise ValueError(f"{text!r}: write NAME=VALUE")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return name, value
