"""Rounds by the library and in Python: the same starts, number by number."""

from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastpipe import make_schedule, native_plan
from fastpipe.schedules.loop_zb import _played
from fastpipe.schedules.rounds import NEVER, groupings
from fastpipe.schedules.wave_ticks import RULES, SLACK_RULES, Job, beam, compact, slack

pytestmark = pytest.mark.skipif(native_plan.library() is None, reason="compares the library with Python")


def in_python(call: Any) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native_plan, "library", lambda: None)
        return call()


def numbers_of(starts: Any) -> list[Any] | None:
    """Every field of what was found, arrays as lists."""
    return None if starts is None else [np.asarray(value).reshape(-1, 1).tolist() for value in vars(starts).values()]


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_both_languages_play_the_same(data: st.DataObject) -> None:
    draw = data.draw
    p, rounds, m = draw(st.integers(1, 7)), draw(st.integers(1, 4)), draw(st.integers(1, 24))
    groups = draw(st.sampled_from([one for size in range(1, m + 1) for one in groupings(m, size)]))
    limit = draw(st.integers(1, 2 * rounds * m + 2))
    model, rules = draw(st.sampled_from([(compact, RULES), (slack, SLACK_RULES)]))
    rule = draw(st.sampled_from(rules))
    give_up = draw(st.sampled_from([NEVER, 3 * rounds * m * 2, 2 * p + rounds]))
    if model is compact and limit < 2 * rounds:
        limit = 2 * rounds  # with less than one microbatch's memory it never ends
    job = Job(p, rounds, groups, limit)
    for play in (lambda: model(job, rule, give_up), lambda: _played(p, rounds, groups, limit, give_up)):
        assert numbers_of(play()) == in_python(lambda play=play: numbers_of(play()))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_both_languages_find_the_same_by_beam_search(data: st.DataObject) -> None:
    draw = data.draw
    p, rounds, m = draw(st.integers(1, 6)), draw(st.integers(1, 4)), draw(st.integers(1, 8))
    limit = draw(st.integers(2 * rounds, 2 * rounds * m + 2))
    length = 6 * rounds * m + p + draw(st.integers(-2, 8 * p))
    search = partial(beam, Job(p, rounds, (m,), limit), draw(st.integers(1, 12)), length)
    budget = draw(st.sampled_from([300, 10**6]))
    assert search(budget) == in_python(lambda: search(budget))


COSTS = {"forward": 1.0, "backward_input": 1.3, "backward_weight": 0.7, "comm": 0.1}
SEARCHED: list[tuple[str, dict[str, Any]]] = [
    ("wave_zb", {"memory": 0.7}),
    ("wave_zb", {"memory": 0.7, **COSTS}),
    ("wave_zb", {"stages_per_rank": 6, "memory": 14}),  # by beam search
    ("loop_zb", {"memory": 0.7}),
    ("loop_zb", {"memory": 0.7, **COSTS}),
]


@pytest.mark.parametrize(("name", "options"), SEARCHED, ids=str)
def test_schedules_do_not_depend_on_the_library(name: str, options: dict[str, Any]) -> None:
    for m in (1, 3, 11):
        numbers: dict[str, Any] = {"num_ranks": 4, "num_microbatches": m, **options}
        native = make_schedule(name, **numbers)
        assert in_python(partial(make_schedule, name, **numbers)) == native
