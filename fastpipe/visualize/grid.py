"""The text grid: ranks as rows, unit time steps as columns, in blocks that fit the terminal, coloured if wanted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fastpipe.action import Action
from fastpipe.checks import check_counts, check_flags, check_type
from fastpipe.placement import Placement
from fastpipe.schedule import Schedule
from fastpipe.visualize.colours import COLOURS, channels, ink, shade

_RESET = "\x1b[0m"


def grid(schedule: Schedule, *, width: int | None = None, colour: bool = False) -> str:
    """A schedule as text.

    Args:
        schedule: what to print; where it cannot run, its bare orders are printed.
        width: characters of a line; longer rows go on in further blocks. No limit unless given.
        colour: paint the cells with the colours of the pictures, for a terminal.

    Returns:
        The text, without a line break at its end.
    """
    check_type(Schedule, "see make_schedule", schedule=schedule)
    check_counts(width=1 if width is None else width)
    check_flags(colour=colour)
    rows = schedule.time_steps()
    texts = [["." if cell is None else "&".join(map(str, cell.parts)) for cell in row] for row in rows]
    steps = max(map(len, texts), default=0)
    widths = [max((len(row[step]) for row in texts if step < len(row)), default=1) for step in range(steps)]
    head = len(f"rank {len(rows) - 1}") + 2
    lines = [repr(schedule)]
    for first, last in _blocks(widths, None if width is None else width - head):
        if (first, last) != (0, steps):
            lines.append(f"steps {first} to {last - 1}")
        for rank, row in enumerate(rows):
            part = zip(texts[rank][first:last], widths[first:last], row[first:last], strict=False)
            placement = schedule.placement if colour else None
            cells = [_cell(text, size, action, placement, rank) for text, size, action in part]
            lines.append(f"rank {rank}".ljust(head) + " ".join(cells).rstrip())
    return "\n".join(lines)


def _blocks(widths: Sequence[int], limit: int | None) -> Iterator[tuple[int, int]]:
    """The steps that fit into a line, block by block."""
    first, used = 0, 0
    for step, width in enumerate(widths):
        if limit is not None and step > first and used + width > limit:
            yield first, step
            first, used = step, 0
        used += width + 1
    yield first, len(widths)


def _cell(text: str, size: int, action: Action | None, placement: Placement | None, rank: int) -> str:
    """One cell, padded; each half of a pair in its own colour. No placement, no colour."""
    padding = " " * (size - len(text))
    if placement is None or action is None:
        return text + padding
    stages = placement.stages_of(rank)
    painted = []
    for part in action.parts:
        known = part.kind.name in COLOURS and part.stage in stages
        painted.append(_paint(str(part), part.kind.name, stages.index(part.stage), len(stages)) if known else str(part))
    return "&".join(painted) + padding


def _paint(text: str, kind: str, chunk: int, num_chunks: int) -> str:
    back = shade(kind, chunk, num_chunks)
    colours = ";".join(map(str, (38, 2, *channels(ink(back)), 48, 2, *channels(back))))
    return f"\x1b[{colours}m{text}{_RESET}"
