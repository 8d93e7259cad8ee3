"""Which way pairs of the native executor go when it is measured, whatever disturbs the machine."""

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest

from fastpipe.runtime import native
from tests.conftest import skip_without_native

Seconds = Callable[[int, bool], float]
"""What the pair of this number takes, together or not."""
NUM_VOTES, PERIODS = 8, (7, 13, 29, 61)
"""As in ``csrc/core/executor.h``."""
WINDOW = NUM_VOTES * PERIODS[-1]
"""How many pairs one verdict is made from, in the long run."""


@pytest.fixture
def clock() -> Any:
    """A new one."""
    skip_without_native()
    runtime: Any = native.load()
    return runtime.PairClock()


def ways(clock: Any, count: int, seconds: Seconds) -> list[bool]:
    """Which way so many pairs go."""
    found = []
    for number in range(count):
        found.append(clock.next())
        clock.note(seconds(number, found[-1]))
    return found


def takes(faster: bool) -> Seconds:
    """One of the ways takes 1.0, the other one 1.5 seconds."""
    return lambda number, together: 1.0 if together == faster else 1.5


@pytest.mark.parametrize("faster", [False, True])
def test_the_faster_way_is_taken_but_for_one_pair_in_a_round(faster: bool, clock: Any) -> None:
    first = ways(clock, NUM_VOTES * sum(PERIODS[:-1]), takes(faster))
    assert first[:2] == [False, True] and set(first[2 : PERIODS[0]]) == {faster}
    assert len(first) - first.count(faster) == NUM_VOTES * len(PERIODS[:-1])
    later = ways(clock, 2 * WINDOW, takes(faster))
    assert later.count(not faster) == 2 * NUM_VOTES


@pytest.mark.parametrize("faster", [False, True])
def test_a_verdict_does_not_outlive_what_it_was_made_from(faster: bool, clock: Any) -> None:
    """However long it stood: half of the votes and one more, and it is another."""
    ways(clock, 20 * WINDOW, takes(not faster))
    turned = ways(clock, WINDOW, takes(faster))
    late = (NUM_VOTES // 2 + 1) * PERIODS[-1]
    assert turned[: late - PERIODS[-1]].count(faster) <= NUM_VOTES // 2 + 1
    assert turned[late:].count(not faster) <= NUM_VOTES // 2


@pytest.mark.parametrize("faster", [False, True])
def test_a_machine_that_is_busy_for_a_while(faster: bool, clock: Any) -> None:
    """For tens of pairs everything takes up to five times as long, and a pair in ten is interrupted."""
    choice = random.Random(5)
    slow = itertools.chain.from_iterable([choice.uniform(1, 5)] * choice.randrange(5, 80) for _ in itertools.count())
    plain = takes(faster)

    def seconds(number: int, together: bool) -> float:
        return plain(number, together) * next(slow) + (20.0 if choice.random() < 0.1 else 0.0)

    found = ways(clock, 10 * WINDOW, seconds)[WINDOW:]
    assert found.count(faster) > 0.9 * len(found)


@pytest.mark.parametrize("in_a_step", [8, 30, 32, 60, 64])
def test_rounds_come_to_another_place_in_every_step(in_a_step: int) -> None:
    places = {number % in_a_step for number in range(0, PERIODS[-1] * in_a_step, PERIODS[-1])}
    assert places == set(range(in_a_step))
