"""What a device comes to after its host: judged once, before any stream is let go, and told alike to all who ask."""

import gc
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fastpipe import StepError
from fastpipe.runtime.common.failure import DIED, Failure, FailureError, lost_peer
from fastpipe.runtime.executor import ranks as module
from fastpipe.runtime.executor.ranks import DeviceEvent, DeviceEvents, LocalRanks
from tests.patience import PATIENCE

DEVICE = torch.device("cuda", 0)
LOST = Failure(1, DIED, is_fatal=True)
CLOSED = Failure(0, "the pipeline was closed")


class Event:
    """A device's: what was before it is done, or not."""

    def __init__(self) -> None:
        self.done = threading.Event()

    def query(self) -> bool:
        return self.done.is_set()

    def synchronize(self) -> None:
        assert self.done.wait(PATIENCE)


class Broken(Event):
    """Of a device that is lost."""

    def query(self) -> bool:
        raise RuntimeError("CUDA error: unspecified launch failure")

    synchronize = query  # type: ignore[assignment]


@pytest.fixture
def event(monkeypatch: pytest.MonkeyPatch) -> Event:
    event = Event()
    monkeypatch.setattr(module, "recorded", lambda device: event)
    return event


def verdict(one: DeviceEvent) -> str:
    try:
        one.wait()
    except StepError as error:
        return str(error)
    return "good"


def test_what_a_device_has_not_done_when_a_process_is_lost_is_given_up(event: Event) -> None:
    events = DeviceEvents()
    one = events.make(DEVICE)
    events.invalidate(LOST)
    event.done.set()
    assert verdict(one).startswith("the step failed on rank 1: its process died")


def test_what_it_has_done_before_is_good_for_ever(event: Event) -> None:
    """Even if whoever is asked says later that streams were let go."""
    events = DeviceEvents()
    one = events.make(DEVICE)
    event.done.set()
    events.invalidate(LOST)
    events.add_checks([pytest.fail])
    assert verdict(one) == "good"


def test_what_is_made_after_a_loss_is_given_up_though_it_is_done(event: Event) -> None:
    """The watcher has let go of streams in the midst of a step, which has come to its end by that."""
    events = DeviceEvents()
    events.invalidate(LOST)
    event.done.set()
    assert verdict(events.make(DEVICE)).startswith("the step failed on rank 1: its process died")
    with pytest.raises(FailureError, match=DIED) as caught:
        events.check()
    assert caught.value.failure.rank == 1


def test_a_device_that_is_lost_has_done_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "recorded", lambda device: Broken())
    events = DeviceEvents()
    given_up, waited_for = events.make(DEVICE), events.make(DEVICE)
    given_up.invalidate(LOST)
    assert "rank 1" in verdict(given_up)
    events.drop_checks()
    assert "unspecified launch failure" in verdict(waited_for)


def test_a_message_that_never_came_is_an_error_with_its_rank_for_all(event: Event) -> None:
    """Though it is told once: one thread posts the loss, and another one reads it."""
    told = iter([lost_peer("nothing came of it", 3)])

    def check() -> None:
        if (error := next(told, None)) is not None:
            raise error

    events = DeviceEvents()
    events.add_checks([check])
    one = events.make(DEVICE)
    with ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(verdict, one) for _ in range(4)]
        event.done.set()
        for answer in answers:
            assert answer.result().startswith("the step failed on rank 3: nothing came of it")


def test_who_is_asked_stays_until_nobody_needs_it(event: Event) -> None:
    """As where a pipeline is planned anew: what was let go of before is known to be no message."""
    asked = threading.Event()

    def check() -> None:
        asked.set()
        raise lost_peer("nothing came of it", 3)

    events = DeviceEvents()
    events.add_checks([check])
    one = events.make(DEVICE)
    threading.Timer(0.05, event.done.set).start()
    events.drop_checks()
    assert asked.is_set()
    assert verdict(one).startswith("the step failed on rank 3: nothing came of it")


@pytest.mark.parametrize("done", [True, False])
def test_a_pipeline_that_is_closed_gives_up_what_is_not_done(done: bool, event: Event) -> None:
    events = DeviceEvents()
    one = events.make(DEVICE)
    if done:
        threading.Timer(0.05, event.done.set).start()
    assert events.close(CLOSED, PATIENCE if done else 0.05) == done
    event.done.set()
    assert (verdict(one) == "good") == done
    assert "the pipeline was closed" in verdict(events.make(DEVICE))


@pytest.mark.parametrize("done", [True, False])
def test_ranks_give_up_before_they_end_what_streams_wait_for(
    done: bool, event: Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fastpipe.runtime.executor.ranks._CLOSING_SECONDS", 0.05)
    verdicts: list[tuple[str, str]] = []

    def ends(way: str) -> Callable[[], None]:
        def end() -> None:
            event.done.set()  # since its streams are let go
            verdicts.append((way, verdict(one)))

        return end

    transport: Any = SimpleNamespace(close=ends("close"), abort=ends("abort"))
    ranks = LocalRanks({2: {}}, None, transport, 1.0, lambda failure: failure, "in order")  # type: ignore[arg-type]
    one = ranks.device_events.make(DEVICE)
    if done:
        event.done.set()
    ranks.closer()()
    ((way, said),) = verdicts
    assert (way, said == "good") == (("close", True) if done else ("abort", False))
    if not done:
        assert said.startswith("the step failed on rank 2: the pipeline was closed before its device was done")


def test_events_may_be_made_while_they_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "recorded", lambda device: Event())
    events, stop = DeviceEvents(), threading.Event()

    def give_up() -> None:
        while not stop.is_set():
            events.invalidate(LOST)

    with ThreadPoolExecutor(1) as pool:
        others = pool.submit(give_up)
        made = [events.make(DEVICE) for _ in range(2000)]
        stop.set()
        others.result()
    assert all("rank 1" in verdict(one) for one in made)


def test_a_result_that_nobody_has_read_keeps_no_stages_alive(event: Event) -> None:
    transport: Any = SimpleNamespace(close=lambda: None)
    ranks = LocalRanks({2: {}}, None, transport, 1.0, lambda failure: failure, "in order")  # type: ignore[arg-type]
    one = ranks.device_events.make(DEVICE)
    event.done.set()
    ranks.closer()()
    alive = weakref.ref(ranks)
    del ranks
    gc.collect()
    assert alive() is None
    assert verdict(one) == "good"
