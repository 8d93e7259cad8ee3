"""Ctrl-C in a process whose ranks are threads: the step ends first, everywhere, and the next one works."""

import os
import signal
import threading
import time
from typing import Any

import pytest

from fastpipe import Pipeline, StepError
from fastpipe.runtime.common.guards import Calls
from fastpipe.runtime.stage.stage import Chain
from tests.patience import PATIENCE
from tests.runtime.checks import reference_of, rows_for
from tests.runtime.faults import AtCall
from tests.runtime.models import CASES

COUNT = 6


@pytest.mark.parametrize("step", [0, 1], ids=["announced", "known"])
def test_the_step_is_drained_and_the_next_one_works(step: int, executor: str) -> None:
    case = CASES["plain"]
    layers = case.layers(4)
    interrupting = AtCall(lambda: os.kill(os.getpid(), signal.SIGINT), step * COUNT + 2)
    interrupting.block = layers[1]
    layers[1] = interrupting
    unsplit = Chain(dict(enumerate(case.layers(4))))
    pipe = Pipeline(layers, "1f1b", COUNT, case.loss_fn, num_ranks=4, executor=executor)
    batches = case.batches(3, rows_for(COUNT))
    for batch in batches[:step]:
        pipe.step(*batch.args, target=batch.target)
    with pytest.raises(KeyboardInterrupt) as caught:
        pipe.step(*batches[step].args, target=batches[step].target)
    assert "KeyboardInterrupt" in str(caught.value.__context__)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    for layer in layers:
        layer.zero_grad()
    result = pipe.step(*batches[2].args, target=batches[2].target)
    reference = reference_of(unsplit, batches[2], pipe, case)
    assert result.loss is not None and result.loss.equal(reference.loss)
    for mine, theirs in zip(pipe.parameters(), unsplit.parameters(), strict=True):
        assert mine.grad is not None and theirs.grad is not None and mine.grad.equal(theirs.grad)


class EndedError(Exception):
    """Raised by a signal's handler."""


@pytest.mark.parametrize("numbers", [[signal.SIGTERM], [signal.SIGINT, signal.SIGINT]])
def test_a_step_that_is_left_ends_the_pipeline(numbers: list[signal.Signals], executor: str) -> None:
    """The threads of its ranks still run it."""

    def end(number: int, frame: Any) -> None:
        raise EndedError

    left = threading.Event()

    def interrupt() -> None:
        for number in numbers:
            os.kill(os.getpid(), number)
            while len(numbers) == 2 and not pipe._steps._calls.interrupted:
                time.sleep(0.01)
        assert left.wait(PATIENCE)

    case = CASES["plain"]
    layers = [AtCall(interrupt, 2), *case.layers(1)]
    pipe = Pipeline(layers, "1f1b", COUNT, case.loss_fn, num_ranks=2, executor=executor)
    batch = case.batches(1, rows_for(COUNT))[0]
    before = signal.signal(signal.SIGTERM, end)
    with pytest.raises((EndedError, KeyboardInterrupt)):
        pipe.step(*batch.args, target=batch.target)
    left.set()
    signal.signal(signal.SIGTERM, before)
    with pytest.raises(StepError, match="(EndedError|KeyboardInterrupt); the pipeline is closed"):
        pipe.step(*batch.args, target=batch.target)
    pool = pipe._steps.ranks._pool
    assert pool is not None
    pool.shutdown()


def test_a_second_one_does_not_wait() -> None:
    calls = Calls(lambda: None)
    reached = []
    with pytest.raises(KeyboardInterrupt), calls.uninterrupted():
        os.kill(os.getpid(), signal.SIGINT)
        reached.append(1)
        os.kill(os.getpid(), signal.SIGINT)
        reached.append(2)
    assert reached == [1]


def test_it_stands_before_what_the_step_raised() -> None:
    calls = Calls(lambda: None)
    with pytest.raises(KeyboardInterrupt) as caught, calls.uninterrupted():
        os.kill(os.getpid(), signal.SIGINT)
        raise OSError("the disk is gone")
    assert isinstance(caught.value.__context__, OSError)


def test_handlers_of_the_users_own_and_other_threads_are_left_alone() -> None:
    calls = Calls(lambda: pytest.fail("not ours"))
    seen: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    try:
        with calls.uninterrupted():
            os.kill(os.getpid(), signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)
    assert seen == [signal.SIGINT] and not calls.interrupted

    def elsewhere() -> None:
        with calls.uninterrupted():
            assert signal.getsignal(signal.SIGINT) is before

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
