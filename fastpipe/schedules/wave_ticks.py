"""When the rounds of a wave start: the tick models behind `fastpipe.schedules.wave`. docs/waves.md has the pictures.

*Compact*: a tick is two slots. A round that starts at tick t passes rank r in slot 2t + r on its way to the last rank,
and in slot 2t + 2p - 1 - r on its way back. The first is of the parity of r, the second is not: rounds that start at
different ticks never meet, and what p ranks do is what one machine does that has one job a tick: a round of F, a round
of I, or the W of a round.

*Slack*: a tick is three slots, 3t + 2r on the way out and 3t + 3p - 2 - r on the way back. The remainders by 3 differ,
and the third one is left to W. A round has one slot to spare in every hop to the right.

Rounds start by rules; where no rule attains the bound of the compact form, a beam search goes on. Tick by tick the most
promising beginnings go on with everything that the next tick could be given to. A beginning is promising when many
rounds of I have started, late ones counting more, as they free memory. How many ticks may stay empty follows from the
length that is asked for.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from fastpipe import native_plan
from fastpipe.schedules.rounds import NEVER, Groups, Longs, Rounds, RoundsView, is_found, streams
from fastpipe.schedules.words import Ints

FORWARD, INPUT, WEIGHT = range(3)
"""What a tick is given to."""
Rule = tuple[tuple[int, ...], tuple[int, ...], bool]
"""What goes first; the same while memory is full; whether what went last goes to the end of the line."""

RULES: tuple[Rule, ...] = (
    ((INPUT, WEIGHT, FORWARD), (INPUT, WEIGHT, FORWARD), True),
    ((FORWARD, INPUT, WEIGHT), (WEIGHT, INPUT, FORWARD), False),
    ((INPUT, FORWARD, WEIGHT), (INPUT, WEIGHT, FORWARD), False),
    ((FORWARD, INPUT, WEIGHT), (FORWARD, INPUT, WEIGHT), False),
)
"""The first attains the bound at half of 1F1B's memory, the second at 5/8, the third from 3/4 on."""

SLACK_RULES: tuple[Rule, ...] = (
    ((FORWARD, INPUT), (FORWARD, INPUT), True),
    ((FORWARD, INPUT), (FORWARD, INPUT), False),
    ((INPUT, FORWARD), (INPUT, FORWARD), False),
)


@dataclass(frozen=True)
class Job:
    """What is to be scheduled.

    Attributes:
        num_ranks: p; a round lasts p ticks.
        groups: microbatches, see `fastpipe.schedules.rounds.groupings`.
        limit: stage activations that a rank may hold.
    """

    num_ranks: int
    num_rounds: int
    groups: Groups
    limit: int

    def tables(self) -> tuple[list[int], list[int], list[int], int]:
        """The rounds of F and of I in their order, from which tick on each can start, and the microbatches.

        Only first rounds can start from the beginning; when a round starts, it is known when the next of its
        microbatch can.
        """
        total = sum(self.groups)
        forward, backward = streams(self.num_rounds, self.groups)
        return forward.tolist(), backward.tolist(), [0] * total + [NEVER] * (2 * self.num_rounds * total), total


@dataclass(frozen=True)
class Starts:
    """When rounds start.

    Attributes:
        rounds: pairs (tick, round * m + microbatch), rounds from ``num_rounds`` on being those of I.
        length: the slots from the first start to the last end, as far as ticks know.
    """

    rounds: Rounds
    length: int


Model = Callable[[Job, Rule, int], Starts | None]


def compact(job: Job, rule: Rule, give_up: int = NEVER) -> Starts | None:
    """Play a rule of `RULES`.

    Args:
        give_up: only what is shorter than so many slots is of interest.

    Returns:
        None where it is not. (A round that waits always gets its turn, so it does not get stuck unless the memory is
        less than one microbatch's.)
    """
    if native_plan.library() is not None:
        return _played("compact", job, rule, give_up)
    first, full, rotate = rule
    forward, backward, ready, total = job.tables()
    p, room, count = job.num_ranks, job.limit // 2, len(forward)
    f = i = w = tick = last_input = 0
    started: list[tuple[int, int]] = []
    while w < count:
        free = f - w < room
        at_f = ready[forward[f]] if free and f < count else NEVER
        at_i = ready[backward[i]] if i < count else NEVER
        can = (at_f <= tick, at_i <= tick, w < i)
        kind = next_in(first if free else full, can)
        if kind is None:
            tick = min(at_f, at_i)
        elif kind == WEIGHT:
            w += 1
        else:
            f, i, key = (f + 1, i, forward[f]) if kind == FORWARD else (f, i + 1, backward[i])
            last_input = last_input if kind == FORWARD else tick
            started.append((tick, key))
            ready[key + total] = tick + p
        if rotate and kind is not None:
            first = full = _behind(first, kind)
        tick += kind is not None
        if 2 * tick + p - 1 >= give_up:
            return None
    length = length_of(p, tick, last_input)
    return Starts(started, length) if length < give_up else None


def length_of(num_ranks: int, num_ticks: int, last_input: int) -> int:
    """The slots of a compact wave, of which the last round of I starts at tick ``last_input``.

    The last rank has no slot to spare between its two. The last I has to get to rank 0, and its W is one slot more.
    """
    return max(2 * num_ticks + num_ranks - 1, 2 * last_input + 2 * num_ranks + 1)


def slack(job: Job, rule: Rule, give_up: int = NEVER) -> Starts | None:
    """Play a rule of `SLACK_RULES`; a tick without a round has room for three W of a rank, any other for one."""
    if native_plan.library() is not None:
        return _played("slack", job, rule, give_up)
    first, full, rotate = rule
    forward, backward, ready, total = job.tables()
    p, count = job.num_ranks, len(forward)
    f = i = weights = tick = 0
    started: list[tuple[int, int]] = []
    while i < count:
        waiting, free = 2 * i - weights, 2 * (f + 1) - weights <= job.limit
        at_f = ready[forward[f]] if free and f < count else NEVER
        at_i = ready[backward[i]]
        kind = next_in(first if free else full, (at_f <= tick, at_i <= tick))
        if kind is not None:
            f, i, key = (f + 1, i, forward[f]) if kind == FORWARD else (f, i + 1, backward[i])
            started.append((tick, key))
            ready[key + total] = tick + p
            first = full = _behind(first, kind) if rotate else first
        elif not waiting and min(at_f, at_i) == NEVER:
            return None
        weights += min(waiting, 3 if kind is None else 1)
        tick += 1
        if 3 * (tick + p) >= give_up:
            return None
    return Starts(started, 3 * (tick + p))


def _played(model: str, job: Job, rule: Rule, give_up: int) -> Starts | None:
    """The same by the library (csrc/plan/rounds.cpp)."""
    first, full, rotate = rule
    ticks, keys = _places(job)
    view = RoundsView.of(job.num_ranks, job.num_rounds, job.groups, job.limit)
    numbers = np.array([*first, *full, rotate], dtype=np.int32)
    length = native_plan.function(model)(view, numbers, give_up, ticks, keys)
    return Starts(np.column_stack([ticks, keys]), length) if is_found(length) else None


def _places(job: Job) -> tuple[Longs, Ints]:
    """For the tick and the key of every round, which the library fills."""
    count = 2 * job.num_rounds * sum(job.groups)
    return np.empty(count, dtype=np.int64), np.empty(count, dtype=np.int32)


def next_in(line: tuple[int, ...], can: tuple[bool, ...]) -> int | None:
    """The first in line that can start now."""
    for kind in line:
        if can[kind]:
            return kind
    return None


def _behind(line: tuple[int, ...], kind: int) -> tuple[int, ...]:
    """The line once ``kind`` has had its turn: it and those before it go to the end."""
    place = line.index(kind) + 1
    return line[place:] + line[:place]


_ALIKE = 3
"""Beginnings that have started as many of each round, and differ in when: with more, the others have no room."""
_NONE = -1
_Choice = tuple[int, int, int, int]
"""Minus the score, empty ticks, whose beginning goes on, and with what: a round, the W of one, or nothing."""


class _Beam(native_plan.View):
    _fields_ = [
        *((name, ctypes.c_int32) for name in ("num_ranks", "num_rounds", "num_microbatches", "width")),
        ("limit", ctypes.c_int64),
    ]


def beam(job: Job, width: int, length: int, budget: int) -> tuple[Starts | None, int]:
    """Look for starts that take ``length`` slots at most, with ``width`` beginnings a tick.

    Returns:
        The starts, or None where it found none; and what is left of the budget.
    """
    if native_plan.library() is None:
        return _Search(job, width, length).run(budget)
    total, left = sum(job.groups), ctypes.c_int64(budget)
    given = _Beam(job.num_ranks, job.num_rounds, total, width, job.limit)
    ticks, keys = _places(job)
    done = native_plan.function("beam")(given, length, left, ticks, keys)
    if not is_found(done):
        return None, left.value
    return _starts(job, list(zip(ticks.tolist(), keys.tolist(), strict=True)), done), left.value


class _Beginning:
    """What has been started so far: by round, those of I behind those of F."""

    __slots__ = ("ended", "idle", "running", "score", "started", "weights")

    def __init__(self, num_kinds: int, num_ranks: int) -> None:
        self.started, self.ended = [0] * num_kinds, [0] * num_kinds
        self.running = [_NONE] * num_ranks  # what started in the last p ticks, and has not ended
        self.weights = self.idle = self.score = 0

    def copy(self) -> _Beginning:
        other = _Beginning.__new__(_Beginning)
        other.started, other.ended, other.running = self.started[:], self.ended[:], self.running[:]
        other.weights, other.idle, other.score = self.weights, self.idle, self.score
        return other


class _Search:
    """One search; `csrc/plan/rounds.cpp` does the same sooner."""

    def __init__(self, job: Job, width: int, length: int) -> None:
        self.job, self.width = job, width
        self.num_ranks, self.half, self.total = job.num_ranks, job.num_rounds, sum(job.groups)
        self.kinds, self.room = 2 * self.half, job.limit // 2
        self.ticks = (length - self.num_ranks + 1) // 2
        self.last_input = (length - 2 * self.num_ranks - 1) // 2
        self.spare = self.ticks - 3 * self.half * self.total
        self.trail: list[list[tuple[int, int]]] = []

    def run(self, budget: int) -> tuple[Starts | None, int]:
        alive = [_Beginning(self.kinds, self.num_ranks)]
        for tick in range(self.ticks if self.spare >= 0 else 0):
            choices = [choice for place, one in enumerate(alive) for choice in self._choices(one, place, tick)]
            budget -= len(choices)
            if budget < 0 or not choices:
                break
            alive = self._best(alive, sorted(choices), tick % self.num_ranks)
            for place, one in enumerate(alive):
                if one.weights == self.half * self.total:
                    return self._starts(place), budget
        return None, max(0, budget)

    def _choices(self, one: _Beginning, place: int, tick: int) -> list[_Choice]:
        """What the tick can be given to."""
        ended = one.running[tick % self.num_ranks]
        if ended != _NONE:
            one.ended[ended] += 1
        inputs = sum(one.started[self.half :])
        free = sum(one.started[: self.half]) - one.weights < self.room
        found = []
        for kind in range(self.kinds):
            before = self.total if kind == 0 else one.ended[kind - 1]
            allowed = free if kind < self.half else tick <= self.last_input
            if allowed and one.started[kind] < before:
                found.append((-one.score - self._worth(kind), one.idle, place, kind))
        if one.weights < inputs:
            found.append((-one.score, one.idle, place, self.kinds))
        if one.idle < self.spare:
            found.append((-one.score, one.idle + 1, place, self.kinds + 1))
        return found

    def _worth(self, kind: int) -> int:
        return kind + 1 if kind >= self.half else 0

    def _best(self, alive: list[_Beginning], choices: list[_Choice], slot: int) -> list[_Beginning]:
        kept: list[_Beginning] = []
        came_from: list[tuple[int, int]] = []
        alike: dict[tuple[int, ...], list[list[int]]] = {}
        for _, _, place, kind in choices:
            one = alive[place].copy()
            self._add(one, kind, slot)
            others = alike.setdefault((one.weights, *one.started), [])
            if len(others) == _ALIKE or one.running in others:
                continue
            others.append(one.running)
            kept.append(one)
            came_from.append((place, kind))
            if len(kept) == self.width:
                break
        self.trail.append(came_from)
        return kept

    def _add(self, one: _Beginning, kind: int, slot: int) -> None:
        one.running[slot] = kind if kind < self.kinds else _NONE
        if kind < self.kinds:
            one.started[kind] += 1
            one.score += self._worth(kind)
        elif kind == self.kinds:
            one.weights += 1
        else:
            one.idle += 1

    def _starts(self, place: int) -> Starts:
        chosen = []
        for came_from in reversed(self.trail):
            place, kind = came_from[place]
            chosen.append(kind)
        number = [0] * self.kinds
        rounds = []
        for tick, kind in enumerate(reversed(chosen)):
            if kind < self.kinds:
                rounds.append((tick, kind * self.total + number[kind]))
                number[kind] += 1
        return _starts(self.job, rounds, len(chosen))


def _starts(job: Job, rounds: list[tuple[int, int]], num_ticks: int) -> Starts:
    half = job.num_rounds * sum(job.groups)
    last_input = max(tick for tick, key in rounds if key >= half)
    return Starts(rounds, length_of(job.num_ranks, num_ticks, last_input))
