"""What commands print: tables, JSON, progress on the standard error; with rich where it is installed, else plain."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def document(value: Any) -> None:
    """Print one JSON document; what is no number in JSON (NaN, infinity) becomes null."""
    json.dump(_finite(value), sys.stdout, indent=2, allow_nan=False)
    print()


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table: the first column flush left, numbers flush right. Plain where it is piped."""
    rows = [list(row) for row in rows]
    if sys.stdout.isatty() and _rich_table(header, rows):
        return
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    for row in (list(header), *rows):
        cells = [
            cell.rjust(width) if number else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        print("  ".join(cells).rstrip())


def _rich_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> bool:
    try:
        from rich import box
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        return False
    drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for number, name in enumerate(header):
        drawn.add_column(name, justify="right" if number else "left", no_wrap=True)
    for row in rows:
        drawn.add_row(*row)
    console = Console(markup=False, highlight=False)
    if console.measure(drawn).minimum > console.width:
        return False
    console.print(drawn)
    return True


@contextmanager
def writing(path: str | Path) -> Iterator[None]:
    """Name the file in an error of writing it; that of a full disk names none."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


@contextmanager
def progress(text: str) -> Iterator[Callable[[str], None]]:
    """Say what is being done while it takes long: on the standard error, on a terminal, gone when it is done.

    Yields:
        A function that changes what is said.
    """
    try:
        from rich.console import Console
    except ImportError:
        yield lambda text: None
        return
    if not sys.stderr.isatty():
        yield lambda text: None
        return
    with Console(stderr=True).status(text) as status:
        yield status.update
