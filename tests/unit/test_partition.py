from collections.abc import Sequence
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastpipe import partition


def brute_force(costs: Sequence[int], num_stages: int) -> list[range]:
    """Of all cuts: the smallest maximum, then the most even, then the longest earlier ranges."""

    def score(cut: tuple[int, ...]) -> tuple:
        bounds = [0, *cut, len(costs)]
        sums = [sum(costs[a:b]) for a, b in zip(bounds, bounds[1:], strict=False)]
        return max(sums), sum(s * s for s in sums), [-end for end in cut]

    best = min(combinations(range(1, len(costs)), num_stages - 1), key=score)
    bounds = [0, *best, len(costs)]
    return [range(a, b) for a, b in zip(bounds, bounds[1:], strict=False)]


@given(st.lists(st.integers(0, 9), min_size=1, max_size=9), st.data())
@settings(max_examples=300, deadline=None)
def test_against_all_cuts(costs: list[int], data: st.DataObject) -> None:
    num_stages = data.draw(st.integers(1, len(costs)))
    assert partition(costs, num_stages) == brute_force(costs, num_stages)


def test_a_tail_may_be_as_long_as_the_longest_stage_if_that_is_more_even() -> None:
    # the first stage costs 9 anyway; for the rest 6, 3, 2 is more even than 5, 5, 1 by the sum of squares
    costs = [9, 5, 1, 3, 1, 1]
    assert partition(costs, 4) == brute_force(costs, 4)


def test_earlier_ranges_are_longer() -> None:
    assert partition(10, 3) == [range(0, 4), range(4, 7), range(7, 10)]
    assert partition([1] * 10, 4) == [range(0, 3), range(3, 6), range(6, 8), range(8, 10)]


def test_floats() -> None:
    assert partition([0.1] * 10, 5) == [range(i, i + 2) for i in range(0, 10, 2)]
    assert partition([0.1, 0.2, 0.3], 1) == [range(3)]


def test_layers_that_cost_the_same_are_cut_as_if_their_costs_were_given() -> None:
    for num_layers in range(1, 17):
        for num_stages in range(1, num_layers + 1):
            assert partition(num_layers, num_stages) == partition([1] * num_layers, num_stages)


def test_many_layers() -> None:
    for costs in (200, [1] * 200):
        assert [len(part) for part in partition(costs, 16)] == [13] * 8 + [12] * 8


@pytest.mark.parametrize(
    ("costs", "num_stages", "message"),
    [
        (3, 4, "num_stages = 4: there are only 3 layers; give at most as many stages"),
        ([], 1, "there are only 0 layers"),
        (3, 0, "num_stages = 0: give a whole number of at least 1"),
        (3, 1.0, "num_stages = 1.0"),
        ([1, -1], 1, r"costs\[1\] = -1: a cost is a finite number of at least 0"),
        ([1, float("nan")], 1, r"costs\[1\] = nan"),
        ([float("inf")], 1, r"costs\[0\] = inf"),
    ],
)
def test_bad_arguments(costs: object, num_stages: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        partition(costs, num_stages)  # type: ignore[arg-type]
