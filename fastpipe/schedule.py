"""Schedule: for every rank, in order, which stage does what for which microbatch. Data, and nothing else.

A schedule is columns (one int32 array a field and rank); ``Action`` objects are made when asked for. It is immutable.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from fastpipe.action import COMMUNICATION_KINDS, COMPUTE_KINDS, Action, ActionKind
from fastpipe.checks import as_path, check_flags, check_type, is_whole
from fastpipe.dependencies import Play
from fastpipe.errors import ScheduleError
from fastpipe.placement import Placement

Columns = npt.NDArray[np.int32]
"""Five rows (kind, stage, microbatch, pair_stage, pair_microbatch), one column an action."""

Row = TypeVar("Row")

FIELDS = Action._fields
_KINDS = tuple(ActionKind)
MOST = 2**31 - 1
"""Of microbatches: actions are columns of 32 bits."""
_SPACES = re.compile(r"\s*([;()])\s*")
"""Those within a fused pair, which torch reads, too."""
_FIRST_BACKWARD, _LAST_COMPUTE, _FIRST_TRANSFER = ActionKind.B, max(COMPUTE_KINDS), min(COMMUNICATION_KINDS)


class Rows(Sequence[Row]):
    """What one rank does, in order: a read-only sequence over columns, whose first row are kinds."""

    def __init__(self, columns: Columns) -> None:
        self.columns = columns

    def _row(self, *numbers: int) -> Row:
        raise NotImplementedError

    @property
    def peak_activations(self) -> int:
        """Live stage activations at most, in number; released at the end of W or B."""
        return self._peak(ActionKind.W)

    def _peak(self, released_by: int) -> int:
        """Highest level of a counter: a forward adds one, the end of a full backward or ``released_by`` takes one."""
        kinds = self.columns[0]
        fused = kinds == ActionKind.OVERLAP_F_B
        steps = np.zeros((2, len(kinds)), dtype=np.int64)
        steps[0, (kinds == ActionKind.F) | fused] = 1
        steps[1, (kinds == released_by) | (kinds == ActionKind.B) | fused] = -1
        if not steps[1].any():  # forward only: nothing is kept for a backward
            steps[1] = -steps[0]
        return int(np.cumsum(steps.T.ravel()).max(initial=0))

    def __len__(self) -> int:
        return int(self.columns.shape[1])

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return list(map(self._row, *self.columns[:, index].tolist()))
        return self._row(*self.columns[:, index].tolist())

    def __iter__(self) -> Iterator[Row]:
        return map(self._row, *self.columns.tolist())


class RankSchedule(Rows[Action]):
    """The actions of one rank."""

    def _row(self, *numbers: int) -> Action:
        return Action(_KINDS[numbers[0]], *numbers[1:])

    def __str__(self) -> str:
        return " ".join(map(str, self))


class Schedule:
    """An order of actions for every rank.

    Args:
        name: the name that is printed.
        placement: the rank of every stage.
        num_microbatches: the number of microbatches of a step.
        columns: for each rank an int32 array of shape ``(5, n)``, with a row for each field of `Action`.
        options: the options it was generated with, for information.
    """

    def __init__(
        self,
        name: str,
        placement: Placement,
        num_microbatches: int,
        columns: Sequence[Columns],
        options: Mapping[str, Any] | None = None,
    ) -> None:
        check_type(Placement, "see Placement.custom", placement=placement)
        check_type(str, name=name)
        check_type(Mapping | None, options=options)
        check_type(Sequence | np.ndarray, columns=columns)
        if len(columns) != placement.num_ranks:
            raise ScheduleError(f"columns: {placement.num_ranks} ranks need as many arrays; found {len(columns)}")
        if not (is_whole(num_microbatches, least=1) and num_microbatches <= MOST):
            raise ValueError(f"num_microbatches = {num_microbatches!r}: give a whole number from 1 to {MOST}")
        self.name = name
        self.placement = placement
        self.num_microbatches = int(num_microbatches)
        self.options = dict(options or {})
        self.columns = tuple(_frozen(array, rank) for rank, array in enumerate(columns))

    @classmethod
    def from_actions(
        cls,
        name: str,
        placement: Placement,
        num_microbatches: int,
        orders: Sequence[Iterable[Action | str | None]],
        options: Mapping[str, Any] | None = None,
    ) -> Schedule:
        """Build from actions or their texts: ``from_actions("mine", Placement.loop(1), 1, [["0F0", "0B0"]])``.

        None and blank texts are idle steps, as in `time_steps` and in CSV.
        """
        if isinstance(orders, Mapping) or not isinstance(orders, Iterable):
            kind = type(orders).__name__
            raise TypeError(f"orders is a {kind}: give a list with the order of every rank, from rank 0 on")
        columns = []
        for order in orders:
            try:
                if isinstance(order, str):
                    raise ValueError(f"found the text {order!r}; give a list, such as its split()")
                given = (a for a in order if a is not None and not (isinstance(a, str) and not a.strip()))
                rows = [Action.parse(action) if isinstance(action, str) else action for action in given]
                for row in rows:
                    if not all(is_whole(field, least=-1) for field in row):
                        raise ValueError(f"its fields are whole numbers; found {row} of type {type(row).__name__}")
                columns.append(_columns(rows))
            except (TypeError, ValueError, OverflowError) as error:
                raise ScheduleError(
                    f"rank {len(columns)}: give each action as an Action or its text: {error}"
                ) from None
        if isinstance(placement, Placement) and len(columns) != placement.num_ranks:
            raise ScheduleError(f"orders: the placement has {placement.num_ranks} ranks; found {len(columns)} orders")
        return cls(name, placement, num_microbatches, columns, options)

    @property
    def num_ranks(self) -> int:
        """How many ranks take part."""
        return self.placement.num_ranks

    @property
    def num_stages(self) -> int:
        """How many stages the model is cut into."""
        return self.placement.num_stages

    @property
    def num_actions(self) -> int:
        """How many actions there are on all ranks together."""
        return sum(int(columns.shape[1]) for columns in self.columns)

    @property
    def forward_only(self) -> bool:
        """Whether no rank has a backward of any kind."""
        kinds = [columns[0] for columns in self.columns]
        return not any(((kind >= _FIRST_BACKWARD) & (kind <= _LAST_COMPUTE)).any() for kind in kinds)

    @property
    def splits_backward(self) -> bool:
        """Whether any backward is split into I and W."""
        return any((columns[0] == ActionKind.I).any() for columns in self.columns)

    def without_transfers(self) -> Schedule:
        """The same without SEND and RECV, which only a loaded schedule has: `fastpipe.lower` makes its own."""
        keep = [columns[0] < _FIRST_TRANSFER for columns in self.columns]
        if all(mask.all() for mask in keep):
            return self
        columns = [array[:, mask] for array, mask in zip(self.columns, keep, strict=True)]
        return Schedule(self.name, self.placement, self.num_microbatches, columns, self.options)

    def __getitem__(self, rank: int) -> RankSchedule:
        return RankSchedule(self.columns[rank])

    def __len__(self) -> int:
        return self.num_ranks

    def __iter__(self) -> Iterator[RankSchedule]:
        return (RankSchedule(columns) for columns in self.columns)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Schedule):
            return NotImplemented
        return (
            self.placement.routes == other.placement.routes
            and self.num_microbatches == other.num_microbatches
            and all(np.array_equal(a, b) for a, b in zip(self.columns, other.columns, strict=True))
        )

    def __hash__(self) -> int:
        return hash((self.placement.routes, self.num_microbatches, tuple(c.tobytes() for c in self.columns)))

    def __repr__(self) -> str:
        return (
            f"<Schedule {self.name}: {self.num_ranks} ranks, {self.num_stages} stages, "
            f"{self.num_microbatches} microbatches, {self.num_actions} actions>"
        )

    def __str__(self) -> str:
        from fastpipe.visualize import grid

        return grid(self)

    def validate(self) -> Schedule:
        """Prove that it is complete and can run; see `fastpipe.validate_schedule`. Returns itself."""
        from fastpipe.validate import validate_schedule

        return validate_schedule(self)

    def time_steps(self) -> list[list[Action | None]]:
        """Every rank's row of unit time steps, None where it idles; the bare orders if they cannot run."""
        orders = [list(rank) for rank in self]
        played = Play(orders, self.placement, self.num_microbatches)
        if played.stuck:
            return [list(order) for order in orders]
        rows: list[list[Action | None]] = []
        for order, starts in zip(orders, played.starts, strict=True):
            row: list[Action | None] = [None] * (starts[-1] + 1 if starts else 0)
            for action, start in zip(order, starts, strict=True):
                row[start] = action
            rows.append(row)
        return rows

    def chunk_order(self, rank: int) -> list[int]:
        """The order list that ``torch.cuda.make_graphed_callables`` takes: +(chunk+1) a forward, -(chunk+1) a backward.

        A chunk is the position of a stage among those of the rank; W is not listed.
        """
        chunk = {stage: number + 1 for number, stage in enumerate(self.placement.stages_of(rank))}
        signs = {ActionKind.F: 1, ActionKind.B: -1, ActionKind.I: -1}
        return [
            signs[part.kind] * chunk[part.stage] for action in self[rank] for part in action.parts if part.kind in signs
        ]

    def to_csv(self, path: str | Path | None = None, *, aligned: bool = False) -> str:
        """Write one row per rank, in the format of ``torch.distributed.pipelining``.

        Args:
            path: a file to write; nothing is written without it.
            aligned: put an empty cell where a rank idles, so that every column is a time step.

        Returns:
            The text.
        """
        check_flags(aligned=aligned)
        rows: Sequence[Sequence[Action | None]] = self.time_steps() if aligned else list(self)
        width = max(map(len, rows)) if aligned else 0
        lines = []
        for row in rows:
            cells = ["" if action is None else str(action) for action in row]
            lines.append(",".join(cells + [""] * (width - len(cells))) + "\n")
        text = "".join(lines)
        if path is not None:
            as_path(path).write_text(text, encoding="utf-8")
        return text

    @classmethod
    def from_csv(cls, path: str | Path, *, name: str | None = None) -> Schedule:
        """Read a schedule from a file, or from the text itself when it has a line break.

        The placement and the number of microbatches are taken from the actions. Empty cells are idle steps; cells may
        be quoted, with spaces around them.

        Raises:
            ScheduleError: naming the file, and row and column of a cell that is no action.
        """
        text = str(path)
        if "\n" in text:
            return _from_text(text, name or "csv")
        text = _read_text(path := as_path(path))
        try:
            return _from_text(text, name or path.stem)
        except ScheduleError as error:
            raise ScheduleError(f"{path}: {error}") from None


def _frozen(array: npt.ArrayLike, rank: int) -> Columns:
    """A read-only array of the right shape that nobody else can write to, its kinds known."""
    columns = np.asarray(array, dtype=np.int32)
    if columns.ndim != 2 or columns.shape[0] != len(FIELDS):
        raise ScheduleError(f"columns of rank {rank}: shape {columns.shape}; give ({len(FIELDS)}, number of actions)")
    if columns.flags.writeable or not columns.flags.c_contiguous:
        columns = np.array(columns, order="C")
        columns.setflags(write=False)
    kinds = columns[0]
    if kinds.size and not (kinds.min() >= 0 and kinds.max() < len(_KINDS)):
        position = int(np.flatnonzero((kinds < 0) | (kinds >= len(_KINDS)))[0])
        raise ScheduleError(f"rank {rank}, position {position}: {kinds[position]} is no kind of action")
    return columns


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")  # spreadsheets mark UTF-8 by a first character
    except UnicodeDecodeError as error:
        raise ScheduleError(f"{path} is no text: {error}") from None


def _from_text(text: str, name: str) -> Schedule:
    try:
        rows = list(csv.reader(io.StringIO(text, newline=None)))
    except csv.Error as error:
        raise ScheduleError(f"no CSV: {error}") from None
    orders = [_read_row(number, row) for number, row in enumerate(rows)]
    blank = next((number for number, order in enumerate(orders) if not order), None)
    if blank is not None and any(orders):
        raise ScheduleError(f"row {blank + 1} is blank: a row is a rank, and every rank has something to do; remove it")
    return infer(name, orders)


def _read_row(number: int, row: Sequence[str]) -> list[Action]:
    actions = []
    for column, cell in enumerate(row):
        text = _SPACES.sub(r"\1", cell.strip())
        if not text:
            continue
        try:
            action = Action.parse(text)
        except ValueError as error:
            raise ScheduleError(f"row {number + 1}, column {column + 1}: {error}") from None
        actions.append(action)
    return actions


def infer(name: str, orders: Sequence[Sequence[Action]]) -> Schedule:
    """A schedule from bare orders: the placement and the number of microbatches are read off the forwards.

    Raises:
        ScheduleError: when the forwards name no consistent placement.
    """
    ranks: dict[tuple[int, int], int] = {}
    for rank, order in enumerate(orders):
        for action in order:
            for part in action.parts:
                if part.kind is ActionKind.F:
                    ranks.setdefault((part.stage, part.microbatch), rank)
    if not ranks:
        raise ScheduleError("there is no forward on any rank, so no stage has a place: write one row per rank")
    num_stages = max(stage for stage, _ in ranks) + 1
    num_microbatches = max(microbatch for _, microbatch in ranks) + 1
    routes = [_route(ranks, microbatch, num_stages) for microbatch in (0, num_microbatches - 1)]
    try:
        placement = Placement(len(orders), tuple(dict.fromkeys(routes)), "loaded")
    except ValueError as error:
        raise ScheduleError(str(error)) from None
    return Schedule(name, placement, num_microbatches, [_columns(order) for order in orders])


def _columns(order: Sequence[Action]) -> Columns:
    return np.array(order, dtype=np.int32).reshape(-1, len(FIELDS)).T


def _route(ranks: Mapping[tuple[int, int], int], microbatch: int, num_stages: int) -> tuple[int, ...]:
    """The rank of every stage's forward of one microbatch."""
    route: list[int] = []
    for stage in range(num_stages):
        if (stage, microbatch) not in ranks:
            raise ScheduleError(f"microbatch {microbatch} has no forward of stage {stage} on any rank")
        route.append(ranks[stage, microbatch])
    return tuple(route)
