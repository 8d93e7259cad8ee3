"""The schedule and the program for a number of microbatches, cached."""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from fastpipe.action import ActionKind
from fastpipe.collectives import with_collectives
from fastpipe.errors import ProgramError
from fastpipe.hardware_queues import why_too_few
from fastpipe.lower import lower
from fastpipe.machine import COALESCED, Lanes
from fastpipe.placement import Placement
from fastpipe.program import Program
from fastpipe.schedule import Schedule
from fastpipe.schedules import find, make_schedule
from fastpipe.validate import validate_schedule
from fastpipe.validate_program import validate_program

logger = logging.getLogger("fastpipe")


class Programs:
    """Makes and caches the programs of a pipeline.

    Args:
        stage_to_rank: the rank of every stage. Default: the schedule's.
        lanes: operations that the transport executes in order.
        recv_lookahead: see `fastpipe.lower`. If the program cannot be proved for the queues, receives are posted one
            action ahead, or at their waits.
        queues: the number of hardware queues that the streams of a rank share, if the transport has streams on CUDA;
            None otherwise.

    Attributes:
        parallel: whether any stage of the pipeline has replicas, whose reductions are in the program.
    """

    def __init__(
        self,
        schedule: str | Schedule,
        num_ranks: int,
        options: Mapping[str, Any],
        stage_to_rank: Sequence[int] | None,
        lanes: Lanes,
        recv_lookahead: int | str,
        queues: int | None = None,
    ) -> None:
        self._schedule = schedule
        self._num_ranks = num_ranks
        self._options = dict(options)
        self._stage_to_rank = stage_to_rank
        self.lanes = lanes
        self.recv_lookahead = recv_lookahead
        self.queues = queues
        self.parallel = False
        self._schedules: dict[int, Schedule] = {}
        self._programs: dict[tuple[int, bool, bool], Program] = {}
        self._have_pairs: dict[int, bool] = {}

    def schedule(self, num_microbatches: int) -> Schedule:
        """The schedule for a number of microbatches."""
        if num_microbatches not in self._schedules:
            self._schedules[num_microbatches] = self._make(num_microbatches)
        return self._schedules[num_microbatches]

    def _forwards(self, num_microbatches: int) -> Schedule:
        """The forwards only; for a number of microbatches that the schedule does not support, from one for more."""
        given = self._schedule.num_microbatches if isinstance(self._schedule, Schedule) else 0
        try:
            return forwards_of(self.schedule(num_microbatches), num_microbatches)
        except ValueError:
            for more in (given, *range(num_microbatches + 1, num_microbatches + 4 * self._num_ranks + 1)):
                with contextlib.suppress(ValueError):
                    if more > num_microbatches > 0:
                        return forwards_of(self.schedule(more), num_microbatches)
            raise

    def _make(self, num_microbatches: int) -> Schedule:
        if isinstance(self._schedule, Schedule):
            made = self._schedule
            if made.num_microbatches != num_microbatches:
                raise ValueError(
                    f"num_microbatches = {num_microbatches}: the schedule given has {made.num_microbatches}; pass that "
                    "or the name of a schedule, which allows any number"
                )
        else:
            made = make_schedule(
                self._schedule, num_ranks=self._num_ranks, num_microbatches=num_microbatches, **self._options
            )
        return made if self._stage_to_rank is None else relabelled(made, self._stage_to_rank)

    def has_pairs(self, num_microbatches: int) -> bool:
        """Whether the schedule fuses forwards and backwards; some do so only with more microbatches."""
        if num_microbatches not in self._have_pairs:
            columns = self.schedule(num_microbatches).columns
            self._have_pairs[num_microbatches] = any((kinds == ActionKind.OVERLAP_F_B).any() for kinds, *_ in columns)
        return self._have_pairs[num_microbatches]

    def program(self, num_microbatches: int, forward_only: bool) -> Program:
        """The program, validated for the transport's lanes."""
        key = (num_microbatches, forward_only, self.parallel)
        if key not in self._programs:
            chosen = self._forwards(num_microbatches) if forward_only else self.schedule(num_microbatches)
            self._programs[key] = self._lowered(chosen)
        return self._programs[key]

    def _lowered(self, schedule: Schedule) -> Program:
        """The program with the first lookahead for which it is proved.

        Raises:
            ProgramError: if there is none, as streams may share a hardware queue.
        """
        refused: ProgramError | None = None
        validate_schedule(schedule)
        for lookahead in self._lookaheads():
            program = lower(schedule, recv_lookahead=lookahead, coalesce=self.lanes == COALESCED)
            whole = with_collectives(program) if self.parallel else program
            try:
                validate_program(whole, lanes=self.lanes, queues=self.queues)
            except ProgramError as error:
                if self.queues is None:
                    raise
                refused = refused or error
                continue
            if refused is not None:
                logger.warning(
                    "recv_lookahead = %r: %s can hang where streams share a hardware queue, so it runs with %d: %s",
                    *(self.recv_lookahead, schedule.name, lookahead, why_too_few() or refused),
                )
            return whole
        raise ProgramError(
            f"schedule = {schedule.name!r}: it can hang where streams share a hardware queue, also with fewer receives "
            f"ahead: {why_too_few() or refused}; or choose another schedule"
        ) from refused

    def successor(self, schedule: Schedule) -> Programs:
        """The programs of another schedule, for the same transport and replicas; the first one is proved."""
        made = Programs(schedule, self._num_ranks, {}, None, self.lanes, self.recv_lookahead, self.queues)
        made.parallel = self.parallel
        made.program(schedule.num_microbatches, forward_only=False)
        return made

    def _lookaheads(self) -> list[int | str]:
        """The lookaheads to try in order: the requested one, then smaller ones if they may help."""
        if self.queues is None or self.lanes == COALESCED:
            return [self.recv_lookahead]
        less = [n for n in (1, 0) if not isinstance(self.recv_lookahead, int) or n < self.recv_lookahead]
        return [self.recv_lookahead, *less]


def forwards_of(schedule: Schedule, num_microbatches: int) -> Schedule:
    """The schedule's forwards of its first microbatches on every route.

    A forward depends only on forwards of its own microbatch, so the remaining order can be executed.
    """
    placement = schedule.placement
    left: list[deque[int]] = [deque() for _ in placement.routes]
    for i in range(num_microbatches):
        left[placement.route_of(i, num_microbatches)].append(i)
    numbers: dict[int, int] = {}
    for i in range(schedule.num_microbatches):
        line = left[placement.route_of(i, schedule.num_microbatches)]
        if line:
            numbers[i] = line.popleft()
    if any(left):
        raise ValueError(
            f"num_microbatches = {num_microbatches}: a schedule for {schedule.num_microbatches} has fewer on a route"
        )
    orders = [
        [
            part._replace(microbatch=numbers[part.microbatch])
            for action in rank
            for part in action.parts
            if part.kind is ActionKind.F and part.microbatch in numbers
        ]
        for rank in schedule
    ]
    return Schedule.from_actions(f"{schedule.name} forward", placement, num_microbatches, orders)


def options_with_stages(
    schedule: str | Schedule, options: Mapping[str, Any] | None, stages_per_rank: int | None, found: int | None
) -> dict[str, Any]:
    """The options of a schedule, including ``stages_per_rank`` if it has that option.

    Args:
        found: the stages per rank of a model that is split already; used if no option says otherwise.

    Raises:
        ValueError: for a ``stages_per_rank`` that the schedule does not support.
    """
    if options is not None and not isinstance(options, Mapping):
        raise ValueError(f"schedule_options = {options!r}: give a dict of the schedule's options")
    chosen = dict(options or {})
    if isinstance(schedule, Schedule):
        if chosen:
            raise ValueError(
                f"schedule_options = {chosen}: a Schedule has its options; give options with a schedule's name"
            )
        has = len(schedule.placement.stages_of(0))
        if stages_per_rank not in (None, has):
            raise ValueError(f"stages_per_rank = {stages_per_rank}: the schedule given has {has} stages per rank")
        return chosen
    family = find(schedule)
    if stages_per_rank is None:
        by_model = {"stages_per_rank": found} if found and "stages_per_rank" in family.options else {}
        return by_model | chosen
    if "stages_per_rank" in family.options:
        if chosen.setdefault("stages_per_rank", stages_per_rank) != stages_per_rank:
            raise ValueError(
                f"stages_per_rank = {stages_per_rank}, and {chosen['stages_per_rank']} in schedule_options: give one"
            )
    elif stages_per_rank != family.stages_per_rank:
        raise ValueError(
            f"stages_per_rank = {stages_per_rank}: {family.name} has {family.stages_per_rank}; leave it out"
        )
    return chosen


def relabelled(schedule: Schedule, stage_to_rank: Sequence[int]) -> Schedule:
    """The schedule with its ranks renamed so that stages are on the ranks of ``stage_to_rank``.

    Raises:
        ValueError: if it is not a renaming: stages that share a rank in the schedule must share one.
    """
    placement = schedule.placement
    wanted = list(stage_to_rank)
    if placement.num_routes > 1:
        raise ValueError(
            f"stage_to_rank = {wanted}: {schedule.name} has two routes, and stage_to_rank describes one; leave it out"
        )
    names: dict[int, int] = {}
    if len(wanted) == placement.num_stages:
        names = dict(zip(placement.routes[0], wanted, strict=True))
    fits = [names.get(rank) for rank in placement.routes[0]] == wanted
    if not fits or sorted(names.values()) != list(range(schedule.num_ranks)):
        raise ValueError(
            f"stage_to_rank = {wanted}: give the rank of each of {placement.num_stages} stages, with the ranks of "
            f"{schedule.name} ({list(placement.routes[0])}) only renamed; for any other placement pass a Schedule "
            "made with Schedule.from_actions"
        )
    columns = {names[rank]: columns for rank, columns in enumerate(schedule.columns)}
    renamed = Placement(schedule.num_ranks, (tuple(wanted),), "custom")
    ordered = [columns[rank] for rank in range(schedule.num_ranks)]
    return Schedule(schedule.name, renamed, schedule.num_microbatches, ordered, schedule.options)
