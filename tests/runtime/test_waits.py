"""A store that does not answer is not waited for, and is not asked again before it does."""

import sys
import threading
import time
from pathlib import Path

import pytest

from fastpipe.runtime.common.failure import FailureError
from fastpipe.runtime.common.waits import CircuitBreaker, cloned, pauses
from tests import scripts
from tests.conftest import skip_without_native


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


def test_a_store_that_gives_no_connection_is_named() -> None:
    over = threading.Event()

    class Stopped:
        def clone(self) -> None:
            over.wait()

    with pytest.raises(FailureError, match="the store of the process group did not answer within 0.1 s; see whether"):
        cloned(Stopped(), 0.1)
    over.set()


_EXIT = """
import datetime, threading, time
import torch.distributed as dist
from fastpipe.runtime import native

class Slow:
    def __del__(self):
        time.sleep(2)

native.load()
slow = Slow()  # until the interpreter exits
wait = lambda: dist.HashStore().wait(["never"], datetime.timedelta(seconds=1))
threading.Thread(target=wait, daemon=True).start()
"""


def test_a_wait_of_torch_that_ends_while_the_interpreter_exits_does_not_abort_the_process(tmp_path: Path) -> None:
    skip_without_native()
    scripts.command([sys.executable, "-c", _EXIT], tmp_path)
