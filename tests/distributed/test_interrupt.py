"""Ctrl-C in the midst of a step: on one rank, on all of them at any time; nothing hangs and nothing is left behind."""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import pytest
import torch.distributed as dist

from fastpipe import Pipeline, StepError
from fastpipe.runtime.transport.process_group import _ProcessGroupEndpoint
from tests.conftest import WAYS, skip_without_native
from tests.distributed.ranks import GroupOf, ranks
from tests.distributed.test_death import COUNT, SIZE, Stopping
from tests.patience import PATIENCE
from tests.runtime.checks import rows_for
from tests.runtime.faults import AtCall
from tests.runtime.models import CASES


@pytest.fixture(params=WAYS, ids="-".join)
def way(request: pytest.FixtureRequest) -> dict[str, str]:
    """An executor and a transport."""
    skip_without_native()
    return dict(zip(("executor", "transport"), request.param, strict=True))


def interrupted_itself(victims: list[int], note: str, way: dict[str, str]) -> dict[str, Any]:
    """Runs on every rank: some get a SIGINT in the forward of one microbatch; then a step that must work."""
    case = CASES["plain"]
    at_call = COUNT + 3 if dist.get_rank() in victims else -1
    stages = [Stopping(at_call, signal.SIGINT, f"{note}{dist.get_rank()}") for _ in range(SIZE)]
    pipe = Pipeline(stages, "1f1b", COUNT, case.loss_fn, timeout=PATIENCE, **way)
    first, second, third = case.batches(3, rows_for(COUNT))
    pipe.step(*first.args, target=first.target)
    try:
        pipe.step(*second.args, target=second.target)
    except BaseException as error:
        found = {"type": type(error).__name__, "text": str(error)}
    else:
        found = {"type": "nothing"}
    for stage in stages:
        stage.at_call = -1  # a rank that was drained before has its turn still to come
    again = pipe.step(*third.args, target=third.target)
    return found | {"again": float(again.loss)}


@pytest.mark.parametrize("victims", [[2], [0, 1, 2, 3]], ids=["one", "all"])
def test_in_a_forward(victims: list[int], way: dict[str, str], tmp_path: Path, group_of: GroupOf) -> None:
    """The step is drained and told to the others, and the next one works."""
    answers = group_of(SIZE).run(interrupted_itself, victims, str(tmp_path / "note"), way)
    interrupted = [rank for rank, answer in enumerate(answers) if answer["type"] == "KeyboardInterrupt"]
    assert interrupted and set(interrupted) <= set(victims)
    for answer in answers:
        if answer["type"] != "KeyboardInterrupt":
            assert answer["type"] == "StepError"
            assert answer["text"] == f"the step failed on rank {interrupted[0]}: KeyboardInterrupt"
    assert len({answer["again"] for answer in answers}) == 1


def interrupt_twice() -> None:
    """The second one raises KeyboardInterrupt here."""
    os.kill(os.getpid(), signal.SIGINT)
    os.kill(os.getpid(), signal.SIGINT)
    raise AssertionError("the second one did not wait")


def interrupted_in_a_pair(victim: int, way: dict[str, str]) -> dict[str, Any]:
    """Runs on every rank; a backward is under way in the helper thread when the forward beside it is left."""
    case = CASES["plain"]
    layers = [AtCall(interrupt_twice, 2 * COUNT + 4 if dist.get_rank() == victim else -1) for _ in range(SIZE)]
    pipe = Pipeline(layers, "1f1b_overlap", COUNT, case.loss_fn, timeout=PATIENCE, overlap="always", **way)
    batch = case.batches(1, rows_for(COUNT))[0]
    for _ in range(2):
        pipe.step(*batch.args, target=batch.target)
    together = pipe._steps.ranks.pair_counts()["together"]
    with pytest.raises((KeyboardInterrupt, StepError)) as caught:
        pipe.step(*batch.args, target=batch.target)
    again = [float(pipe.step(*batch.args, target=batch.target).loss) for _ in range(2)]
    return {"type": caught.type, "text": str(caught.value), "together": together, "again": again}


@pytest.mark.parametrize("way", [way for way in WAYS if way[0] == "native"], ids="-".join, indirect=True)
def test_a_second_one_inside_a_pair(way: dict[str, str], group_of: GroupOf) -> None:
    victim = 1
    answers = group_of(SIZE).run(interrupted_in_a_pair, victim, way)
    assert answers[victim]["together"] > 0
    for rank, answer in enumerate(answers):
        assert answer["type"] is (KeyboardInterrupt if rank == victim else StepError)
        assert rank == victim or answer["text"].startswith(f"the step failed on rank {victim}, stage {victim}, action")
        assert answer["again"] == answers[0]["again"] and len(set(answer["again"])) == 1


def interrupted_in_collective_work() -> tuple[str, bool]:
    """Runs on both ranks: rank 1 gets a SIGINT in the collective part of a call, as a save has; then a step."""
    case = CASES["plain"]
    pipe = Pipeline(case.layers(2), "1f1b", COUNT, case.loss_fn, timeout=PATIENCE)
    ended = threading.Event()

    def work(replies: Any) -> None:
        if dist.get_rank() == 1:
            time.sleep(0.2)  # the main thread waits for this one by then
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.5)
        ended.set()

    with pytest.raises((KeyboardInterrupt, StepError)) as caught:
        pipe._steps.all_gather("a call", dict, work)
    has_ended = ended.is_set()
    batch = case.batches(1, rows_for(COUNT))[0]
    pipe.step(*batch.args, target=batch.target)
    return caught.type.__name__, has_ended


def test_collective_work_ends_before_the_next_call(group_of: GroupOf) -> None:
    """It goes on in its thread, in the group that the next call uses."""
    assert group_of(2).run(interrupted_in_collective_work) == [("StepError", True), ("KeyboardInterrupt", True)]


def train_until_interrupted(way: dict[str, str], note: str) -> NoReturn:
    """Runs on every rank, whose process then ends; one that hears of the others first waits for its own."""
    case = CASES["plain"]
    pipe = Pipeline(case.layers(2 * SIZE), "1f1b", COUNT, case.loss_fn, timeout=PATIENCE, **way)
    batch = case.batches(1, rows_for(COUNT))[0]
    try:
        Path(f"{note}{pipe.rank}").touch()
        try:
            while True:
                pipe.step(*batch.args, target=batch.target)
        except StepError:
            time.sleep(20)
    except KeyboardInterrupt:
        sys.exit("interrupted")
    sys.exit("not interrupted")


def names() -> set[str]:
    """Whatever shared memory or a socket with a name would show up in, as far as it is ours."""
    sockets = Path("/proc/net/unix").read_text().splitlines()
    ours = {line.split()[-1] for line in sockets if "fastpipe" in line and "fastpipe-ranks" not in line}
    return ours | {name for name in os.listdir("/dev/shm") if "fastpipe" in name}


@pytest.mark.parametrize(("way", "delay"), list(zip(WAYS, (0.0, 0.01, 0.1), strict=True)), indirect=["way"])
def test_on_all_ranks_at_any_time(way: dict[str, str], delay: float, tmp_path: Path) -> None:
    """As torchrun sends it."""
    before = names()
    with ranks(SIZE) as group:
        group.start(train_until_interrupted, way, str(tmp_path / "ready"))
        while len(list(tmp_path.glob("ready*"))) < SIZE:
            time.sleep(0.01)
        time.sleep(delay)
        for rank in range(SIZE):
            group.signal(rank, signal.SIGINT)
        assert group.results() == ["interrupted"] * SIZE
    assert names() <= before


def interrupted_while_it_waits(note: str, way: dict[str, str]) -> str:
    """Runs on both ranks: rank 1 is stopped, and rank 0 gets two SIGINTs while it waits for it in C++."""
    case = CASES["plain"]

    def stop() -> None:
        Path(note).touch()
        os.kill(os.getpid(), signal.SIGSTOP)

    layers = [AtCall(stop, COUNT if dist.get_rank() == 1 else -1) for _ in range(2)]
    pipe = Pipeline(layers, "1f1b", COUNT, case.loss_fn, timeout=PATIENCE, **way)
    first, second = case.batches(2, rows_for(COUNT))
    pipe.step(*first.args, target=first.target)

    def interrupt() -> None:
        while not Path(note).exists():
            time.sleep(0.01)
        for _ in range(2):
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        pipe.step(*second.args, target=second.target)
    with pytest.raises(StepError) as caught:
        pipe.step(*second.args, target=second.target)
    return str(caught.value)


def test_the_second_one_ends_a_wait(way: dict[str, str], tmp_path: Path) -> None:
    """A stopped peer does not come back: whoever waits for it does not wait until the timeout."""
    with ranks(2) as group:
        group.start(interrupted_while_it_waits, str(tmp_path / "note"), way)
        assert "KeyboardInterrupt; the pipeline is closed; build a new one" in group.results([0])[0]


class Ended(BaseException):
    """Raised by a handler of SIGTERM."""


class EndedError(RuntimeError):
    """The same, of the type that native code and torch raise: so does the handler of a DataLoader whose worker died."""


def ended_while_it_waits(kind: type[BaseException], phase: str, note: str, way: dict[str, str]) -> tuple[str, str, str]:
    """Runs on both ranks: rank 0 gets a SIGTERM while rank 1 keeps it waiting in the second step, or before it."""

    def end(number: int, frame: Any) -> None:
        Path(note).touch()
        raise kind("by a signal")

    def be_late() -> None:
        while not Path(note).exists():
            time.sleep(0.01)
        time.sleep(0.2)  # in which the other one closes the pipeline

    own, case = dist.get_rank(), CASES["plain"]
    before = signal.signal(signal.SIGTERM, end)
    is_late = own == 1 and phase == "step"
    layers = [AtCall(be_late, COUNT if is_late else -1) for _ in range(2)]
    pipe = Pipeline(layers, "1f1b", COUNT, case.loss_fn, timeout=PATIENCE, **way)
    first, second = case.batches(2, rows_for(COUNT))
    pipe.step(*first.args, target=first.target)
    timer = threading.Timer(2, os.kill, (os.getpid(), signal.SIGTERM))
    if own == 1 and phase == "start":
        be_late()
    with pytest.raises((kind, StepError)) as caught:
        if own == 0:
            timer.start()
        pipe.step(*second.args, target=second.target)
    with pytest.raises(StepError) as again:
        pipe.step(*second.args, target=second.target)
    signal.signal(signal.SIGTERM, before)
    return caught.type.__name__, str(caught.value), str(again.value)


@pytest.mark.parametrize("phase", ["start", "step"])
@pytest.mark.parametrize("kind", [Ended, EndedError])
def test_a_handler_that_raises_ends_a_wait_and_the_pipeline(
    kind: type[BaseException], phase: str, way: dict[str, str], tmp_path: Path
) -> None:
    """Its message may still come, and must not be taken for one of the next step."""
    with ranks(2) as group:
        (own, _, again), (other, text, _) = group.run(ended_while_it_waits, kind, phase, str(tmp_path / "note"), way)
    # an Exception that ends the pipeline within a step is the cause of the StepError, also on its own rank
    assert own == ("StepError" if phase == "step" and issubclass(kind, Exception) else kind.__name__)
    assert other == "StepError" and text == again
    assert "rank 0" in text and f"{kind.__name__}: by a signal; the pipeline is closed" in text
    assert phase == "start" or "WAIT_RECV" in text


def ended_after_a_step(way: dict[str, str]) -> list[float]:
    """Runs on both ranks: a handler raises on rank 0 when the ranks have agreed that the first step has succeeded."""
    case = CASES["plain"]
    pipe = Pipeline(case.layers(2), "1f1b", COUNT, case.loss_fn, timeout=PATIENCE, **way)
    batch = case.batches(1, rows_for(COUNT))[0]
    if dist.get_rank() == 0:
        goes_on = pipe._steps._raise_failure

        def end(*_: Any) -> NoReturn:
            pipe._steps._raise_failure = goes_on
            raise Ended

        pipe._steps._raise_failure = end
        with pytest.raises(Ended):
            pipe.step(*batch.args, target=batch.target)
    else:
        pipe.step(*batch.args, target=batch.target)
    return [float(pipe.step(*batch.args, target=batch.target).loss) for _ in range(2)]


def test_a_handler_that_raises_at_the_end_of_a_step(way: dict[str, str]) -> None:
    """Whether a step announces its messages is known to all ranks or to none."""
    with ranks(2) as group:
        first, second = group.run(ended_after_a_step, way)
    assert first == second and len(set(first)) == 1


def ended_when_a_message_is_on_its_way(verb: str) -> tuple[str, str]:
    """Runs on both ranks: a handler raises on rank 0 in the second step when c10d has begun its first transfer."""
    case = CASES["plain"]
    pipe = Pipeline(case.layers(2), "1f1b", COUNT, case.loss_fn, timeout=PATIENCE, executor="python")
    batch = case.batches(1, rows_for(COUNT))[0]
    pipe.step(*batch.args, target=batch.target)
    real = _ProcessGroupEndpoint._call

    def end(endpoint: _ProcessGroupEndpoint, channel: int, call: Callable[..., Any], *args: Any) -> Any:
        def begin_and_raise(*args: Any) -> NoReturn:
            call(*args)
            raise EndedError("by a signal")

        raises = call.__name__ == verb and dist.get_rank() == 0
        return real(endpoint, channel, begin_and_raise if raises else call, *args)

    with mock.patch.object(_ProcessGroupEndpoint, "_call", end), pytest.raises(StepError) as caught:
        pipe.step(*batch.args, target=batch.target)
    dist.barrier()  # rank 0 keeps its pipeline, of which rank 1 would see the end
    return type(caught.value.__cause__).__name__, str(caught.value)


@pytest.mark.parametrize("verb", ["send", "recv"])
def test_a_handler_that_raises_in_a_transfer(verb: str) -> None:
    """Nobody waits until the timeout for what is not sent any more."""
    with ranks(2) as group:
        (cause, text), (_, other) = group.run(ended_when_a_message_is_on_its_way, verb)
    assert cause == "EndedError" and text == other
    assert "rank 0" in text and "EndedError: by a signal; the pipeline is closed" in text


def ended_where_the_others_have_ended(way: dict[str, str]) -> str:
    """Runs on both ranks: a handler raises on rank 0 in the second step when rank 1 has all that it needs of it."""
    case = CASES["plain"]
    pipe = Pipeline(case.layers(2), "1f1b", COUNT, case.loss_fn, timeout=PATIENCE, **way)
    batch = case.batches(1, rows_for(COUNT))[0]
    pipe.step(*batch.args, target=batch.target)
    if dist.get_rank() == 0:
        with mock.patch.object(pipe._steps, "_remember", side_effect=Ended), pytest.raises(Ended):
            pipe.step(*batch.args, target=batch.target)
    else:
        pipe.step(*batch.args, target=batch.target)
    with pytest.raises(StepError) as caught:
        pipe.step(*batch.args, target=batch.target)
    dist.barrier()  # rank 0 keeps its pipeline, of which the others would see the end
    return str(caught.value)


def test_a_handler_that_raises_where_the_others_have_ended_the_step(way: dict[str, str]) -> None:
    """They learn of it in the next one, and do not wait there until the timeout."""
    with ranks(2) as group:
        answers = group.run(ended_where_the_others_have_ended, way)
    assert answers == ["the step failed on rank 0: Ended; the pipeline is closed; build a new one"] * 2


def ended_between_agreement_and_program(owner: str, name: str, way: dict[str, str]) -> tuple[str, str]:
    """Runs on both ranks: a handler raises on rank 0 when the ranks have agreed on the inputs of the second step."""
    case = CASES["plain"]
    pipe = Pipeline(case.layers(2), "1f1b", COUNT, case.loss_fn, timeout=PATIENCE, **way)
    batch = case.batches(1, rows_for(COUNT))[0]
    pipe.step(*batch.args, target=batch.target)
    fault = mock.patch.object(attrgetter(owner)(pipe._steps), name, side_effect=Ended)
    with fault if dist.get_rank() == 0 else contextlib.nullcontext(), pytest.raises((Ended, StepError)) as caught:
        pipe.eval_step(*batch.args, target=batch.target)
    return caught.type.__name__, str(caught.value)


@pytest.mark.parametrize(
    ("way", "owner", "name"),
    [(WAYS[0], "copies", "agreed"), (WAYS[1], "ranks", "prepare"), (WAYS[0], "ranks.executor", "run")],
    indirect=["way"],
)
def test_a_handler_that_raises_before_the_program(owner: str, name: str, way: dict[str, str]) -> None:
    """The others do not wait for it until the timeout."""
    with ranks(2) as group:
        (own, _), (other, text) = group.run(ended_between_agreement_and_program, owner, name, way)
    assert own == "Ended" and other == "StepError" and "rank 0" in text and "Ended" in text
