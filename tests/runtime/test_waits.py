"""A store that does not answer is not waited for, and is not asked again before it does."""

import threading
import time

import pytest

from fastpipe.runtime.common.waits import CircuitBreaker, pauses


def test_answers_come_through() -> None:
    breaker = CircuitBreaker(60.0)
    assert breaker.call(lambda: 3, 0) == 3

    def gone() -> int:
        raise RuntimeError("the store is gone")

    assert breaker.call(gone, 0) == 0
    assert breaker.call(lambda: 4, 0) == 4


def test_who_does_not_answer_is_asked_again_only_after_the_answer() -> None:
    breaker, asked, never = CircuitBreaker(0.1), [], threading.Event()

    def stuck() -> int:
        asked.append(1)
        never.wait()
        return 1

    assert [breaker.call(stuck, 0) for _ in range(3)] == [0, 0, 0]
    assert len(asked) == 1
    never.set()
    for pause in pauses(10.0):
        if breaker.call(lambda: 2, 0) == 2:
            return
        time.sleep(pause)
    pytest.fail("not asked again")
