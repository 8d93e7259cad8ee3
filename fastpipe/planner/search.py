"""Annealing over orders, led by the critical path. csrc/plan/search.cpp does the same sooner, number by number.

A task goes earlier or later on its rank, alone, with the same task of the microbatches that follow, or with those that
the microbatch meets next; or a later task is put into a wait. The order of a stage's microbatches stays, and so does
that of tasks of which one waits for the other. Memory is checked before anything is timed; where it lacks, a task that
frees some is put in front. What is longer is taken if it is longer by no more than a falling heat, times a random
number.
"""

from __future__ import annotations

import numpy as np

from fastpipe.planner.retime import Lines, Retimer, Windows, places
from fastpipe.planner.tasks import NOBODY, Ints, Tasks

SLACK = 1e-9
REACH = 24
"""How many positions away a task is looked for that frees memory."""
HOLE_REACH = 40
MOST_SHIFTS = 160
CHAINS = 4
"""Of eight changes, in which other tasks follow."""
_MASK = 2**64 - 1


class Random:
    """xorshift64*: a few lines in any language."""

    def __init__(self, seed: int) -> None:
        self.state = (seed * 0x9E3779B97F4A7C15 + 0x2545F4914F6CDD1D) & _MASK or 1

    def next(self) -> int:
        """64 random bits."""
        state = self.state
        state ^= state >> 12
        state = (state ^ (state << 25)) & _MASK
        state ^= state >> 27
        self.state = state
        return (state * 0x2545F4914F6CDD1D) & _MASK

    def below(self, limit: int) -> int:
        """0 to limit - 1."""
        return (self.next() >> 33) % limit

    def unit(self) -> float:
        """0 to 1."""
        return (self.next() >> 11) * 2.0**-53


class Search:
    """The state of a search.

    Args:
        tasks: what is ordered.
        order: where it starts.
        span: whether the span is the objective, not the makespan.
        seed: of the random numbers.
    """

    def __init__(self, tasks: Tasks, order: Ints, span: bool, seed: int) -> None:
        self.lines = Lines(tasks)
        self.order: list[int] = order.tolist()
        self.place = places(self.order)
        self.retimer = Retimer(self.lines, self.order, self.place, span)
        self.random = Random(seed)
        self.level = [0.0] * self.lines.size
        self.shifts: list[tuple[int, int]] = []
        self.path: list[int] = []
        self.windows: Windows = {}

    def begin(self) -> bool:
        """False if the order given cannot run or does not fit into memory."""
        if not self.retimer.run():
            return False
        for rank in range(self.lines.num_ranks):
            first, last = self.lines.first[rank : rank + 2]
            if first < last:
                self._touch(rank, first, last - 1)
                if self._overflow(rank) != NOBODY:
                    return False
        self.retimer.find_tails()
        self.path = self.retimer.path()
        self.best, self.best_objective, self.best_score = list(self.order), self.retimer.objective, self.retimer.score
        return True

    def improve(self, attempts: int, hot: float, cold: float) -> None:
        """Try so many changes, the heat falling from the first to the second."""
        for number in range(attempts):
            heat = hot + (cold - hot) * (number / attempts)
            draw = self.random.unit()
            most = self.retimer.score + heat * (draw * draw)
            self.shifts.clear()
            self.windows.clear()
            if self._propose() and self._try_out(most):
                self._accept()
            else:
                self._undo()

    def found(self) -> tuple[Ints, float]:
        """The best order so far, and its objective."""
        return np.array(self.best, dtype=np.int32), self.best_objective

    def _accept(self) -> None:
        retimer = self.retimer
        retimer.keep(self.windows)
        retimer.find_tails()
        self.path = retimer.path()
        if retimer.score < self.best_score:
            self.best, self.best_objective, self.best_score = list(self.order), retimer.objective, retimer.score

    def _propose(self) -> bool:
        random = self.random
        if random.below(2) == 0:
            return self._cross_stretch()
        task = self._chosen_task()
        if random.below(4) == 0:
            return self._fill_hole(task)
        distance = 1 + random.below(1 << random.below(4))
        later = random.below(2) != 0
        return self._shift_chain(task, distance if later else -distance)

    def _cross_stretch(self) -> bool:
        """Put a task of a stretch of the critical path, on one rank, behind the stretch's last task or in front of its
        first: a change that crosses neither end leaves the path as long as it was."""
        path, rank_of = self.path, self.lines.rank_of  # last to first
        at = end = self.random.below(len(path))
        step = -1 if self.random.below(4) != 0 else 1
        while 0 <= end + step < len(path) and rank_of[path[end + step]] == rank_of[path[at]]:
            end += step
        return end != at and self._shift_chain(path[at], self.place[path[end]] - self.place[path[at]])

    def _chosen_task(self) -> int:
        """Three of four times on the critical path, where alone a change can make the whole shorter."""
        if self.random.below(4) != 0:
            return self.path[self.random.below(len(self.path))]
        return self.random.below(self.lines.size)

    def _shift_chain(self, task: int, distance: int) -> bool:
        """The same change for those that follow: in the steady state what helps one microbatch helps all, and what goes
        earlier on one rank may have to on the next."""
        way = self.random.below(8)
        length = 1 << self.random.below(7) if way < CHAINS else 1
        done = 0
        while task != NOBODY and done < length and self._shift_by(task, distance):
            task = self._follower(task, way)
            done += 1
        return done > 0

    def _follower(self, task: int, way: int) -> int:
        lines = self.lines
        if way == 0:
            return lines.sources[task][0][0] if lines.sources[task] else NOBODY
        if way == 1:
            return lines.consumers[task][0] if lines.consumers[task] else NOBODY
        return lines.next[task]

    def _shift_by(self, task: int, distance: int) -> bool:
        origin = self.place[task]
        if distance < 0:
            target = max(origin + distance, self._earliest(task))
        else:
            target = min(origin + distance, self._latest(task))
        if target == origin:
            return False
        self._put(origin, target)
        return True

    def _fill_hole(self, task: int) -> bool:
        """Put a later task in front of one that waits."""
        rank = self.lines.rank_of[task]
        place, first, last = self.place[task], *self.lines.first[rank : rank + 2]
        if place == first or self.retimer.starts[task] <= self.retimer.ends[self.order[place - 1]]:
            return False
        last = min(last - 1, place + HOLE_REACH)
        if last == place:
            return False
        for position in range(place + 1 + self.random.below(last - place), last + 1):
            if self._earliest(self.order[position]) <= place:
                self._put(position, place)
                return True
        return False

    def _put(self, origin: int, target: int) -> None:
        self.shifts.append((origin, target))
        self._touch(self.lines.rank_of[self.order[origin]], min(origin, target), max(origin, target))
        self._rotate(origin, target)

    def _touch(self, rank: int, low: int, high: int) -> None:
        first, last = self.windows.get(rank, (low, high))
        self.windows[rank] = min(first, low), max(last, high)

    def _rotate(self, origin: int, target: int) -> None:
        self.order.insert(target, self.order.pop(origin))
        for position in range(min(origin, target), max(origin, target) + 1):
            self.place[self.order[position]] = position

    def _undo(self) -> None:
        if not self.shifts:
            return
        while self.shifts:
            origin, target = self.shifts.pop()
            self._rotate(target, origin)
        for rank in self.windows:
            self._overflow(rank)

    def _try_out(self, most: float) -> bool:
        settled = 0.0
        for rank in self.windows:
            while (full := self._overflow(rank)) != NOBODY:
                if len(self.shifts) >= MOST_SHIFTS or not self._make_room(rank, full):
                    return False
            low, high = self.windows[rank]
            settled = max(settled, *map(self.retimer.ends.__getitem__, self.order[low : high + 1]))
        return self.retimer.attempt(self.windows, settled, most)

    def _overflow(self, rank: int) -> int:
        """The first position of the rank's window where memory does not suffice, or nobody's; levels are renewed."""
        low, high = self.windows[rank]
        limit, held, found = self.lines.limit[rank] + SLACK, self.level[low], NOBODY
        for position in range(low, high + 1):
            task = self.order[position]
            self.level[position] = held
            held += self.lines.take[task]
            if held > limit and found == NOBODY:
                found = position
            held -= self.lines.give[task]
        return found

    def _make_room(self, rank: int, position: int) -> bool:
        """Put the next task that frees memory, and may, in front of the one that lacks it."""
        last = min(self.lines.first[rank + 1] - 1, position + REACH)
        for other in range(position + 1, last + 1):
            task = self.order[other]
            if self.lines.give[task] > 0.0 and self._earliest(task) <= position:
                self._put(other, position)
                return True
        return False

    def _earliest(self, task: int) -> int:
        first = self.lines.first[self.lines.rank_of[task]]
        return max((self.place[other] + 1 for other in self.lines.before[task]), default=first)

    def _latest(self, task: int) -> int:
        last = self.lines.first[self.lines.rank_of[task] + 1] - 1
        return min((self.place[other] - 1 for other in self.lines.after[task]), default=last)
