"""What is current in an action, wherever one asks; and what users put around actions."""

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fastpipe
from fastpipe import ActionKind, Pipeline, Schedule
from fastpipe.runtime import native
from fastpipe.runtime.stage.context import Current
from tests.conftest import overlap_of, skip_without_native
from tests.runtime.checks import same_bits
from tests.runtime.models import WIDTH, Block, squared

SCHEDULES = ["1f1b", "looped_bfs", "zb_h1", "dualpipev", "dualpipe", "interleaved_overlap"]
COUNT = 8


class Log:
    """What was seen, by threads."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, Current]] = []
        self.lock = threading.Lock()

    def __deepcopy__(self, memo: Any) -> "Log":
        return self  # of a stage that two ranks hold, too

    def add(self, where: str) -> None:
        found = fastpipe.current()
        assert found is not None
        with self.lock:
            self.seen.append((where, found))

    def of(self, where: str) -> list[Current]:
        return [current for place, current in self.seen if place == where]


class Asking(nn.Module):
    """Asks in its forward, in a hook of its backward, and in what is recomputed."""

    def __init__(self, log: Log, recomputes: bool = False) -> None:
        super().__init__()
        self.block, self.log, self.recomputes = Block(), log, recomputes
        self.calls = 0

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        self.log.add("recompute" if torch._C._current_graph_task_id() != -1 else "forward")
        return self.block(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = checkpoint(self.inner, x, use_reentrant=False) if self.recomputes else self.inner(x)
        if out.requires_grad:
            out.register_hook(lambda grad: self.log.add("hook"))
        return out


def build(schedule: str, executor: str, log: Log, recomputes: bool = False, **options: Any) -> Pipeline:
    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        log.add("loss")
        return squared(output, target)

    num_stages = fastpipe.make_schedule(schedule, num_ranks=2, num_microbatches=COUNT).num_stages
    torch.manual_seed(0)
    layers = [Asking(log, recomputes) for _ in range(num_stages)]
    return Pipeline(layers, schedule, COUNT, loss_fn, num_ranks=2, executor=executor, **options)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randn(2 * COUNT, WIDTH), torch.randn(2 * COUNT, WIDTH)


def actions(schedule: Schedule) -> Counter[tuple[str, int, int]]:
    parts = [part for rank in schedule for action in rank for part in action.parts]
    return Counter((part.kind.name, part.stage, part.microbatch) for part in parts)


def lasts(schedule: Schedule, kinds: str) -> set[tuple[int, int]]:
    """Stage and microbatch of the last action of these kinds, on each rank that holds the stage."""
    found: dict[tuple[int, int], int] = {}
    for rank, line in enumerate(schedule):
        for action in line:
            for part in action.parts:
                if part.kind.name in kinds:
                    found[rank, part.stage] = part.microbatch
    return {(stage, microbatch) for (_, stage), microbatch in found.items()}


def keys(found: list[Current]) -> Counter[tuple[str, int, int]]:
    return Counter((current.action, current.stage, current.microbatch) for current in found)


@pytest.mark.parametrize("executor", ["python", "native", "python alone"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_it_is_right_wherever_one_asks(schedule: str, executor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if executor == "native":
        skip_without_native()
    if executor == "python alone":
        monkeypatch.setattr(native, "load", lambda: None)
    executor = executor.removesuffix(" alone")
    log = Log()
    pipe = build(schedule, executor, log, recomputes=True, overlap=overlap_of(executor))
    x, target = batch()
    for step in range(2):
        log.seen.clear()
        pipe.step(x, target=target)
        expected = actions(pipe.schedule)
        forwards = Counter({key: n for key, n in expected.items() if key[0] == "F"})
        backwards = Counter({key: n for key, n in expected.items() if key[0] in "BI"})
        last_stage = pipe.num_stages - 1
        assert keys(log.of("forward")) == forwards
        assert keys(log.of("hook")) == keys(log.of("recompute")) == backwards
        assert keys(log.of("loss")) == {key: 1 for key in forwards if key[1] == last_stage}
        assert all(current.training and current.step == step for _, current in log.seen)
        for where, kinds in (("forward", "F"), ("hook", "BI"), ("recompute", "BI")):
            marked = {(c.stage, c.microbatch) for c in log.of(where) if c.is_last_microbatch}
            assert marked == lasts(pipe.schedule, kinds)
    assert fastpipe.current() is None


def test_in_an_evaluation_there_is_no_training(executor: str) -> None:
    log = Log()
    pipe = build("1f1b", executor, log)
    x, target = batch()
    pipe.step(x, target=target)
    log.seen.clear()
    pipe.eval_step(x, num_microbatches=3)
    assert keys(log.of("forward")) == {("F", stage, i): 1 for stage in range(2) for i in range(3)}
    assert all(not c.training and c.step == 1 for _, c in log.seen)
    assert {c.microbatch for c in log.of("forward") if c.is_last_microbatch} == {2}
    assert not log.of("loss")


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_contexts_are_around_every_action(schedule: str, executor: str) -> None:
    log = Log()
    open_now = threading.local()

    @contextlib.contextmanager
    def around(given: Current) -> Iterator[None]:
        assert fastpipe.current() == given
        assert getattr(open_now, "action", None) is None
        open_now.action = given
        log.add("enter")
        yield
        assert open_now.action == given == fastpipe.current()
        open_now.action = None
        log.add("exit")

    contexts = {"forward_context": around, "backward_context": around}
    pipe = build(schedule, executor, log, overlap=overlap_of(executor), **contexts)
    plain = build(schedule, executor, Log())
    x, target = batch()
    expected = plain.step(x, target=target)
    found = pipe.step(x, target=target)
    assert same_bits(found.loss, expected.loss)
    for parameter, other in zip(pipe.parameters(), plain.parameters(), strict=True):
        assert same_bits(parameter.grad, other.grad)
    assert keys(log.of("enter")) == keys(log.of("exit")) == actions(pipe.schedule)
    weights = {(c.stage, c.microbatch) for c in log.of("enter") if c.action == "W" and c.is_last_microbatch}
    split = {(stage, i) for kind, stage, i in actions(pipe.schedule) if kind == ActionKind.W.name}
    assert weights == lasts(pipe.schedule, "BW") & split


@pytest.mark.parametrize("schedule", [name for name in SCHEDULES if name != "dualpipe"])
def test_an_optimizer_steps_in_the_backward_of_the_last_microbatch(schedule: str, executor: str) -> None:
    log, (x, target) = Log(), batch()
    pipe, plain = (build(schedule, executor, log) for _ in range(2))
    optimizers = {p: torch.optim.AdamW([p], lr=0.1) for p in pipe.parameters()}

    def update(parameter: torch.Tensor) -> None:
        at = fastpipe.current()
        assert at is not None
        if at.is_last_microbatch:
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

    for parameter in pipe.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.1)
    for _ in range(2):
        assert same_bits(pipe.step(x, target=target).loss, plain.step(x, target=target).loss)
        optimizer.step()
        optimizer.zero_grad()
    assert all(same_bits(*pair) for pair in zip(pipe.parameters(), plain.parameters(), strict=True))


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_what_a_context_or_an_action_raises_comes_through(schedule: str, executor: str) -> None:
    log = Log()
    wrong: dict[str, Any] = {}
    seen: list[type[BaseException] | None] = []

    class Around:
        def __init__(self, given: Current) -> None:
            self.given = given

        def __enter__(self) -> None:
            if (self.given.action, self.given.microbatch) == wrong.get("enter"):
                raise KeyError("in a context")

        def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
            if kind is not None:
                seen.append(kind)

    pipe = build(schedule, executor, log, forward_context=Around, backward_context=Around)
    x, target = batch()
    backward = "B" if schedule == "1f1b" else "I"
    for where in (("F", 3), (backward, 2)):
        wrong["enter"] = where
        with pytest.raises(KeyError, match="in a context"):
            pipe.step(x, target=target)
    del wrong["enter"]
    assert not seen

    hook = next(pipe.stage_modules[0].parameters()).register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        pipe.step(x, target=target)
    assert seen == [ZeroDivisionError]
    hook.remove()
    pipe.step(x, target=target)


def test_what_is_no_context_is_refused(executor: str) -> None:
    log = Log()
    with pytest.raises(TypeError, match="backward_context .*int: .*function"):
        build("1f1b", executor, log, backward_context=3)
    pipe = build("1f1b", executor, log, forward_context=lambda at: None)
    with pytest.raises(TypeError, match="forward_context .*NoneType: .*context manager"):
        pipe.step(*batch()[:1], target=batch()[1])


@pytest.mark.parametrize("action", ["F", "B"])
def test_a_context_that_suppresses_an_exception_is_refused(action: str, executor: str) -> None:
    def suppressing(given: Current) -> contextlib.suppress:
        return contextlib.suppress(ZeroDivisionError)

    name = "forward_context" if action == "F" else "backward_context"
    pipe = build("1f1b", executor, Log(), **{name: suppressing})
    x, target = batch()
    pipe.step(x, target=target)
    module = pipe.stage_modules[0]
    weight = next(module.parameters())
    hook = (
        module.register_forward_pre_hook(lambda *_: 1 / 0) if action == "F" else weight.register_hook(lambda _: 1 / 0)
    )
    with pytest.raises(RuntimeError, match=f"{name} returned a suppress that suppressed an exception") as raised:
        pipe.step(x, target=target)
    assert isinstance(raised.value.__context__, ZeroDivisionError)
    hook.remove()
    pipe.step(x, target=target)
