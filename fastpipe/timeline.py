"""Timeline: when every instruction of a program started and ended, simulated or measured.

A timeline is columns too: two float64 arrays a rank, one entry an instruction of the program. `Messages` are the
transfers of a program, `Timeline.critical_path` what a timeline's makespan consists of.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fastpipe.action import NONE
from fastpipe.checks import check_index, check_type
from fastpipe.program import COMPUTE_OPS, ChannelKind, Instruction, Op, Program

Seconds = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Step = tuple[int, int]
"""(rank, position) of a compute, or of the SEND of a transfer."""
_LAST_COMPUTE = max(COMPUTE_OPS)  # they come first
_TABLE_STEPS = 200
_TABLE_CELL = 3
"""Actions named in one cell; of those that follow only the number is given."""


class Span(NamedTuple):
    """One instruction and when it ran.

    Attributes:
        rank: where.
        lane: ``"compute"``, or the text of the channel.
        instruction: what.
        start: seconds.
        end: seconds.
    """

    rank: int
    lane: str
    instruction: Instruction
    start: float
    end: float


@dataclass(frozen=True, eq=False)
class Timeline:
    """When every instruction ran.

    Attributes:
        program: what ran.
        starts: per rank, the start of every instruction in seconds; NaN for a rank that was not recorded.
        ends: the same for the ends. A SEND lasts as long as its transfer.
        measured: whether it was measured rather than simulated.
        lanes: the lane of every channel. Default: one lane for each channel.
        memory: computes ``peak_bytes``, where costs are known.
    """

    program: Program
    starts: Sequence[Seconds]
    ends: Sequence[Seconds]
    measured: bool = False
    lanes: Sequence[int] | None = None
    memory: Callable[[], tuple[float, ...]] | None = None

    def __post_init__(self) -> None:
        check_type(Program, program=self.program)
        sizes = [columns.shape[1:] for columns in self.program.columns]
        for name, given in (("starts", self.starts), ("ends", self.ends)):
            arrays = [one for one in given if isinstance(one, np.ndarray)] if isinstance(given, Iterable) else []
            if [one.shape for one in arrays] != sizes:
                raise ValueError(f"{name}: give for each rank the seconds of its instructions, in arrays {sizes}")

    @cached_property
    def _compute(self) -> list[npt.NDArray[np.intp]]:
        """Per rank, the positions of the compute instructions that were recorded."""
        return [
            np.flatnonzero((columns[0] <= _LAST_COMPUTE) & ~np.isnan(starts))
            for columns, starts in zip(self.program.columns, self.starts, strict=True)
        ]

    @cached_property
    def _bounds(self) -> list[tuple[float, float]]:
        """First start and last end of compute, of every rank that computed."""
        return [
            (float(starts[rows].min()), float(ends[rows].max()))
            for rows, starts, ends in zip(self._compute, self.starts, self.ends, strict=True)
            if len(rows)
        ]

    @property
    def start(self) -> float:
        """The first start of compute on any rank."""
        return min((first for first, _ in self._bounds), default=0.0)

    @property
    def makespan(self) -> float:
        """Last end minus first start of compute over all ranks, in seconds."""
        return max((last for _, last in self._bounds), default=0.0) - self.start

    @property
    def span(self) -> float:
        """The longest time from a rank's own first start to its own last end, in seconds."""
        return max((last - first for first, last in self._bounds), default=0.0)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """Seconds of compute, one number per rank."""
        return tuple(
            float((ends[rows] - starts[rows]).sum())
            for rows, starts, ends in zip(self._compute, self.starts, self.ends, strict=True)
        )

    @property
    def bubble_fraction(self) -> float:
        """1 - busy / (ranks * makespan)."""
        return self._bubble(self.makespan)

    @property
    def span_bubble_fraction(self) -> float:
        """1 - busy / (ranks * span)."""
        return self._bubble(self.span)

    def _bubble(self, measure: float) -> float:
        return 1.0 - sum(self.busy) / (len(self._bounds) * measure) if measure > 0 else 0.0

    @cached_property
    def peak_activations(self) -> tuple[int, ...]:
        """Live stage activations at most, one number per rank; released at the end of W or B."""
        return self.program.peak_activations

    @cached_property
    def peak_activations_released_at_input(self) -> tuple[int, ...]:
        """The same if the end of I released them, as some papers count."""
        return tuple(rank.peak_activations_released_at_input for rank in self.program)

    @cached_property
    def peak_bytes(self) -> tuple[float, ...]:
        """Bytes that are held at most, one number per rank; see ``stage_bytes`` of `CostModel`.

        Raises:
            ValueError: for a measured timeline, which does not know them.
        """
        if self.memory is None:
            raise ValueError("peak_bytes: a measured timeline has no costs; ask the one that fastpipe.simulate gives")
        return self.memory()

    @cached_property
    def exposed_communication(self) -> tuple[float, ...]:
        """Seconds, one number per rank, in which it waited for a transfer that was under way at that time."""
        found, exposed = Messages.of(self.program), [0.0] * self.program.num_ranks
        for ranks, positions in ((found.destination, found.wait), (found.source, found.send_wait)):
            for rank in range(self.program.num_ranks):
                mine = np.flatnonzero(ranks == rank)
                at, sends = positions[mine], (found.source[mine], found.send[mine])
                waited = np.minimum(self.ends[rank][at], values_at(self.ends, *sends))
                waited -= np.maximum(self.starts[rank][at], values_at(self.starts, *sends))
                exposed[rank] += float(np.nansum(np.maximum(waited, 0.0)))
        return tuple(exposed)

    def critical_path(self) -> list[Span]:
        """What the makespan consists of: compute and transfers, first to last, each waiting for the one before.

        Where two things ended together, the path goes through the rank's own compute. Transfers without length are
        left out.
        """
        lanes = range(len(self.program.channels)) if self.lanes is None else self.lanes
        return [self._span(*step) for step in _Walk(self.program, self.starts, self.ends, lanes).back()]

    def _span(self, rank: int, position: int) -> Span:
        instruction = self.program[rank][position]
        start, end = float(self.starts[rank][position]), float(self.ends[rank][position])
        return Span(rank, self._lane(instruction), instruction, start, end)

    def __iter__(self) -> Iterator[Span]:
        for rank, rank_program in enumerate(self.program):
            starts, ends = self.starts[rank].tolist(), self.ends[rank].tolist()
            for instruction, start, end in zip(rank_program, starts, ends, strict=True):
                if start == start:
                    yield Span(rank, self._lane(instruction), instruction, start, end)

    def _lane(self, instruction: Instruction) -> str:
        return "compute" if instruction.channel < 0 else str(self.program.channels[instruction.channel])

    def compute_spans(self, rank: int) -> list[Span]:
        """The compute of one rank, in order; ValueError for a rank that there is not."""
        rank = check_index("rank", rank, self.program.num_ranks)
        return [self._span(rank, position) for position in self._compute[rank].tolist()]

    def median_seconds(self) -> dict[tuple[Op, int], float]:
        """Median duration of compute by (op, stage); the stage of the forward for a fused pair."""
        found: dict[tuple[int, int], list[Seconds]] = defaultdict(list)
        for columns, rows, starts, ends in zip(
            self.program.columns, self._compute, self.starts, self.ends, strict=True
        ):
            keys = columns[0, rows].astype(np.int64) * self.program.num_stages + columns[1, rows]
            seconds = ends[rows] - starts[rows]
            for key in np.unique(keys).tolist():
                found[divmod(key, self.program.num_stages)].append(seconds[keys == key])
        return {(Op(op), stage): float(np.median(np.concatenate(parts))) for (op, stage), parts in found.items()}

    def latencies(self) -> tuple[npt.NDArray[np.int64], Seconds]:
        """Of every transfer whose receiver was waiting already: the boundary, and the seconds from send to arrival.

        Boundary b is between the stages b and b + 1. Other sends last until their receiver comes, which is no cost.
        """
        found = Messages.of(self.program)
        sent = values_at(self.starts, found.source, found.send)
        waiting, arrived, consumers = (
            values_at(values, found.destination, found.wait)
            for values in (self.starts, self.ends, [columns[1] for columns in self.program.columns])
        )
        known = waiting <= sent
        kinds = np.array([channel.kind for channel in self.program.channels], dtype=np.int64)
        forwards = kinds[found.channel] == ChannelKind.ACTIVATION if len(found) else np.zeros(0, dtype=bool)
        return (consumers - forwards)[known], (arrived - sent)[known]

    def median_latency(self) -> float:
        """Seconds from a send to its arrival, where the receiver was waiting already; 0 where none was recorded."""
        _, latency = self.latencies()
        return max(0.0, float(np.median(latency))) if len(latency) else 0.0

    def difference(self, other: Timeline) -> list[Seconds]:
        """Per rank, how much later each instruction ended here than in ``other``, both counted from their start.

        Raises:
            ValueError: when the two are of different programs.
        """
        check_type(Timeline, other=other)
        if [c.shape for c in self.program.columns] != [c.shape for c in other.program.columns]:
            raise ValueError("other: the timelines are of different programs; compare two of the same one")
        return [
            (mine - self.start) - (theirs - other.start) for mine, theirs in zip(self.ends, other.ends, strict=True)
        ]

    def __repr__(self) -> str:
        kind = "measured" if self.measured else "simulated"
        return (
            f"<Timeline {self.program.name}, {kind}: makespan {self.makespan:.6g}, bubble {self.bubble_fraction:.1%}>"
        )

    def __str__(self) -> str:
        """A table time x rank: at most 200 rows, each a cell of what the rank was computing at that time."""
        return f"{self!r}\n{_table(self)}"

    def plot(self, path: str | Path, **options: Any) -> Path:
        """Draw it into a PNG, SVG or PDF file; see `fastpipe.plot`."""
        from fastpipe.visualize import plot

        return plot(self, path, **options)

    def to_html(self, path: str | Path) -> Path:
        """Write it as one self-contained interactive page."""
        from fastpipe.visualize import to_html

        return to_html(self, path)

    def to_chrome_trace(self, path: str | Path) -> Path:
        """Write it as JSON for chrome://tracing and Perfetto."""
        from fastpipe.visualize import to_chrome_trace

        return to_chrome_trace(self, path)


def _table(timeline: Timeline) -> str:
    """Time goes down, ranks go right; a step is the shortest action, or longer so that 200 rows are enough."""
    spans = [timeline.compute_spans(rank) for rank in range(timeline.program.num_ranks)]
    lengths = [s.end - s.start for row in spans for s in row if s.end > s.start]
    if not lengths:
        return "(empty)"
    step = max(min(lengths), timeline.makespan / _TABLE_STEPS)
    count = int(np.ceil(timeline.makespan / step - 1e-9))
    columns = [_column(timeline, row, step, count) for row in spans]
    headers = [f"rank {rank}" for rank in range(len(spans))]
    widths = [max(len(header), *map(len, column)) for header, column in zip(headers, columns, strict=True)]
    lines = ["      time  " + "  ".join(h.ljust(w) for h, w in zip(headers, widths, strict=True))]
    for number, line in enumerate(zip(*columns, strict=True)):
        row_text = "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        lines.append(f"{number * step:>10.4g}  {row_text}".rstrip())
    return "\n".join(lines)


def _column(timeline: Timeline, spans: Sequence[Span], step: float, count: int) -> list[str]:
    """A rank's cells: what starts in the step, ``|`` where something goes on, ``.`` where nothing does."""
    cells = ["."] * count
    started: list[list[str]] = [[] for _ in range(count)]
    for span in spans:
        first = min(int((span.start - timeline.start) / step + 1e-6), count - 1)
        last = int(np.ceil((span.end - timeline.start) / step - 1e-6))
        started[first].append(_cell(span.instruction))
        cells[first + 1 : last] = ["|"] * len(cells[first + 1 : last])
    for number, texts in enumerate(started):
        if texts:
            more = [f"+{len(texts) - _TABLE_CELL}"] if len(texts) > _TABLE_CELL else []
            cells[number] = " ".join(texts[:_TABLE_CELL] + more)
    return cells


def _cell(instruction: Instruction) -> str:
    action = instruction.action
    return "&".join(map(str, action.parts)) if action is not None else instruction.op.name


def values_at(values: Sequence[npt.NDArray[Any]], ranks: Ints, positions: Ints) -> npt.NDArray[Any]:
    """From one array a rank, what stands at (rank, position), for many of them."""
    found = np.empty(len(ranks), dtype=values[0].dtype)
    order = np.argsort(ranks, kind="stable")
    by_rank = np.split(order, np.searchsorted(ranks[order], np.arange(1, len(values))))
    for mine, array in zip(by_rank, values, strict=True):
        found[mine] = array[positions[mine]]
    return found


@dataclass(frozen=True, eq=False)
class Messages:
    """Every transfer between two ranks of a valid program: channel after channel, each channel's in order.

    Attributes:
        channel: index into ``program.channels``.
        source: the rank that sends.
        destination: the rank that receives.
        send: position of the SEND on the source.
        post: position of the POST_RECV on the destination.
        wait: position of the WAIT_RECV on the destination.
        send_wait: position of the WAIT_SEND on the source.
    """

    channel: Ints
    source: Ints
    destination: Ints
    send: Ints
    post: Ints
    wait: Ints
    send_wait: Ints

    def __len__(self) -> int:
        return len(self.channel)

    @classmethod
    def of(cls, program: Program) -> Messages:
        """Match them: a channel is a FIFO, so its n-th SEND is what its n-th POST_RECV receives."""
        send, post, wait, send_wait = (
            _rows_of(program, op) for op in (Op.SEND, Op.POST_RECV, Op.WAIT_RECV, Op.WAIT_SEND)
        )
        # a channel's instructions of one op are all on one rank
        send, post = (rows[:, np.argsort(rows[4], kind="stable")] for rows in (send, post))
        return cls(
            channel=send[4],
            source=send[0],
            destination=post[0],
            send=send[1],
            post=post[1],
            wait=_positions_in(wait, post),
            send_wait=_positions_in(send_wait, send),
        )


def _rows_of(program: Program, op: Op) -> Ints:
    """Rank, position, stage, microbatch and channel of all instructions of one op."""
    parts = [np.zeros((5, 0), dtype=np.int64)]
    for rank, columns in enumerate(program.columns):
        rows = np.flatnonzero(columns[0] == op)
        parts.append(np.stack([np.full(len(rows), rank), rows, *columns[[1, 2, 5]][:, rows]]))
    return np.concatenate(parts, axis=1)


def _positions_in(rows: Ints, wanted: Ints) -> Ints:
    """Where ``rows`` name the same channel, stage and microbatch, for each that is wanted."""
    found = np.empty(wanted.shape[1], dtype=np.int64)
    found[np.lexsort(wanted[2:])] = rows[1, np.lexsort(rows[2:])]
    return found


class _Walk:
    """From the last end back, always to what ended last before a step could start.

    A compute waits for its rank's compute before it and for the messages waited for in between. A transfer waits for
    its sender and its receiver to post it, and for the transfers ahead of it in its lane. What moves or frees and took
    no time is left out.
    """

    def __init__(
        self, program: Program, starts: Sequence[Seconds], ends: Sequence[Seconds], lane_of: Sequence[int]
    ) -> None:
        self.program, self.starts, self.ends = program, starts, ends
        self.lane_of = np.asarray(lane_of, dtype=np.int64)
        self.messages = found = Messages.of(program)
        self.message_at = [np.full(columns.shape[1], NONE, dtype=np.int64) for columns in program.columns]
        for ranks, positions in (
            (found.source, found.send),
            (found.source, found.send_wait),
            (found.destination, found.post),
            (found.destination, found.wait),
        ):
            for rank in range(program.num_ranks):
                mine = np.flatnonzero(ranks == rank)
                self.message_at[rank][positions[mine]] = mine

    def back(self) -> list[Step]:
        """The steps, first to last."""
        step = self._last()
        path: list[Step] = []
        while step is not None:
            rank, position = step
            op = self.program.columns[rank][0, position]
            if op <= Op.OVERLAP_F_B or self.ends[rank][position] > self.starts[rank][position]:
                path.append(step)
            step = self._latest(self._before_transfer(step) if op == Op.SEND else self._before(rank, position))
        return path[::-1]

    def _last(self) -> Step | None:
        computes = (
            (rank, int(position))
            for rank, columns in enumerate(self.program.columns)
            for position in np.flatnonzero(columns[0] <= Op.OVERLAP_F_B)[-1:]
        )
        return self._latest(computes)

    def _latest(self, steps: Iterator[Step]) -> Step | None:
        """The one that ended last; of equals the first."""
        found, latest = None, -np.inf
        for rank, position in steps:
            end = float(self.ends[rank][position])
            if end > latest:  # never for NaN
                found, latest = (rank, position), end
        return found

    def _before(self, rank: int, position: int) -> Iterator[Step]:
        """The compute before a position, then the transfers waited for since."""
        ops = self.program.columns[rank][0]
        first = position - 1
        while first >= 0 and ops[first] >= Op.POST_RECV:
            first -= 1
        if first >= 0:
            yield rank, first
        for at in range(first + 1, position):
            if ops[at] in (Op.WAIT_RECV, Op.WAIT_SEND):
                yield self._send_of(int(self.message_at[rank][at]))

    def _before_transfer(self, step: Step) -> Iterator[Step]:
        """What the two ends did before they posted it, then the transfers ahead of it in its lane at either end."""
        number = int(self.message_at[step[0]][step[1]])
        source, destination = int(self.messages.source[number]), int(self.messages.destination[number])
        post = int(self.messages.post[number])
        yield from self._before(*step)
        yield from self._before(destination, post)
        yield from self._ahead(source, step[1])
        yield from self._ahead(destination, post)

    def _ahead(self, rank: int, position: int) -> Iterator[Step]:
        """The transfer that was posted before this one to the same lane."""
        ops, channels = self.program.columns[rank][0], self.program.columns[rank][5]
        lane = self.lane_of[channels[position]]
        for at in range(position - 1, -1, -1):
            if ops[at] in (Op.SEND, Op.POST_RECV) and self.lane_of[channels[at]] == lane:
                yield self._send_of(int(self.message_at[rank][at]))
                return

    def _send_of(self, number: int) -> Step:
        return int(self.messages.source[number]), int(self.messages.send[number])
