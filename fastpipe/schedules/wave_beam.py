"""When the rounds of a compact wave start, by beam search: for where no rule of wave_ticks.py attains the bound.

Tick by tick the most promising beginnings go on with everything that the next tick could be given to. A beginning is
promising when many rounds of I have started, late ones counting more, as they free memory. How many ticks may stay
empty follows from the length that is asked for.
"""

from __future__ import annotations

from dataclasses import dataclass

from fastpipe import native_plan
from fastpipe.schedules import native
from fastpipe.schedules.wave_ticks import Job, Starts, length_of

_ALIKE = 3
"""Beginnings that have started as many of each round, and differ in when: with more, the others have no room."""
_NONE = -1
_Choice = tuple[int, int, int, int]
"""Minus the score, empty ticks, whose beginning goes on, and with what: a round, the W of one, or nothing."""


@dataclass(frozen=True)
class Beam:
    """A search with so many beginnings a tick.

    Attributes:
        job: what is to be scheduled; its groups do not matter.
        width: the beginnings that go on.
    """

    job: Job
    width: int

    def search(self, length: int, budget: int) -> tuple[Starts | None, int]:
        """Look for starts that take ``length`` slots at most.

        Args:
            length: slots.
            budget: the choices that may be looked at.

        Returns:
            The starts, or None where it found none; and what is left of the budget.
        """
        if native_plan.library() is not None:
            job = self.job
            shape = job.num_ranks, job.num_rounds, sum(job.groups), job.limit
            rounds, ticks, left = native.search_beam(*shape, self.width, length, budget)
            return None if rounds is None else _starts(job, rounds, ticks), left
        return _Search(self, length).run(budget)


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
    """One search; `csrc/plan/beam.cpp` does the same sooner."""

    def __init__(self, beam: Beam, length: int) -> None:
        self.job = job = beam.job
        self.width, self.num_ranks, self.half, self.total = beam.width, job.num_ranks, job.num_rounds, sum(job.groups)
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
