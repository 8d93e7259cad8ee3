"""A stream of microbatches through the pipeline: in order, in windows, stopped, and failing."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import fastpipe
from fastpipe import Pipeline
from fastpipe.testing import Fault
from tests.runtime.checks import same_bits
from tests.runtime.models import WIDTH, Block, Scaled, squared

EXECUTORS = ["python", "native"]


def build(executor: str, layers: list[nn.Module] | None = None, schedule: str = "1f1b", **options: Any) -> Pipeline:
    if layers is None:
        torch.manual_seed(0)
        layers = [Block() for _ in range(4)]
    return Pipeline(layers, schedule, 4, squared, num_ranks=2, executor=executor, **options)


def inputs(count: int) -> list[torch.Tensor]:
    torch.manual_seed(2)
    return [torch.randn(1 + i % 3, WIDTH) for i in range(count)]


def expected(pipe: Pipeline, given: list[torch.Tensor]) -> list[torch.Tensor]:
    with torch.no_grad():
        chain = nn.Sequential(*(layer for _, m in sorted(pipe.stage_modules.items()) for layer in m.children()))
        return [chain(x) for x in given]


class Counted:
    """A source that knows how far it was taken."""

    def __init__(self, items: list[Any], broken_at: int | None = None) -> None:
        self.items, self.broken_at, self.taken = items, broken_at, 0

    def __iter__(self) -> Iterator[Any]:
        for item in self.items:
            if self.taken == self.broken_at:
                raise KeyError("the source broke")
            self.taken += 1
            yield item


class Counting(Block):
    """Counts how often it is called."""

    def __init__(self, calls: list[int], index: int) -> None:
        super().__init__()
        self.calls, self.index = calls, index

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls[self.index] += 1
        return super().forward(x)


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1", "dualpipev", "dualpipe", "looped_bfs", "interleaved_1f1b"])
@pytest.mark.parametrize("count", [0, 1, 11])
def test_outputs_come_in_order(schedule: str, count: int, executor: str) -> None:
    num_stages = fastpipe.make_schedule(schedule, num_ranks=2, num_microbatches=8).num_stages
    torch.manual_seed(0)
    pipe = build(executor, [Block() for _ in range(num_stages)], schedule)
    given = inputs(count)
    found = list(pipe.stream(given))
    assert len(found) == count
    assert all(map(same_bits, found, expected(pipe, given)))
    assert not any(output.requires_grad for output in found)
    assert all(p.grad is None for p in pipe.parameters())


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("drain", [True, False])
def test_no_more_than_a_window_is_taken(executor: str, drain: bool) -> None:
    pipe = build(executor)
    source = Counted(inputs(50))
    found = pipe.stream(source, window=5, drain=drain)
    assert source.taken == 0
    under_way = 0 if drain else 1
    for i, _ in enumerate(found):
        assert source.taken == min(50, 5 * ((i + under_way) // 5 + 1))


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize(("window", "count"), [(3, 9), (1, 5), (2, 7), (5, 4)])
def test_the_pipeline_stays_full(executor: str, window: int, count: int) -> None:
    calls = [0] * 4
    torch.manual_seed(0)
    layers = [Counting(calls, i) for i in range(4)]
    pipe = Pipeline(layers, "1f1b", 4, squared, num_ranks=4, executor=executor)
    given = inputs(count)
    for seen, (found, wanted) in enumerate(zip(pipe.stream(given, window=window), expected(pipe, given), strict=True)):
        assert same_bits(found, wanted)
        entered = window * ((seen + 3) // window + 1)
        if entered <= count:  # each stage is one behind the one before it, and never more
            assert calls == [entered + count - i for i in range(4)]
    assert calls == [2 * count] * 4


@pytest.mark.parametrize("executor", EXECUTORS)
def test_stages_that_have_computed_nothing_yet_may_draw(executor: str) -> None:
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Sequential(Block(), nn.Dropout(0.5)) for _ in range(4)]
    pipe = Pipeline(layers, "1f1b", 4, squared, num_ranks=4, executor=executor, rng="per_microbatch")
    given = inputs(6)
    # in the first windows only the first stages show that they do; the numbers are those of another such stream
    streams = [list(pipe.stream(given, window=1)) for _ in range(2)]
    assert all(map(same_bits, *streams))
    assert not any(map(same_bits, streams[0], expected(pipe.eval(), given)))


@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_source_may_wait_for_outputs(executor: str) -> None:
    pipe = build(executor)
    outputs = [torch.ones(1, WIDTH)]

    def source() -> Iterator[torch.Tensor]:
        for _ in range(4):
            yield outputs[-1]

    for output in pipe.stream(source(), window=1, drain=True):
        outputs.append(output)
    assert all(map(same_bits, outputs[1:], expected(pipe, outputs[:4])))


def test_a_schedule_of_few_microbatches_is_drained() -> None:
    torch.manual_seed(0)
    schedule = fastpipe.make_schedule("1f1b", num_ranks=2, num_microbatches=4)
    pipe = Pipeline([Block() for _ in range(4)], schedule, None, squared)
    given = inputs(9)
    for window in (3, 4):
        assert all(map(same_bits, list(pipe.stream(given, window=window)), expected(pipe, given)))


def test_no_replan_with_microbatches_under_way() -> None:
    pipe = build("native")
    stream = pipe.stream(inputs(20), window=4)
    next(stream)
    pipe._steps.follow(copy.copy(pipe._steps.plans), forward_only=False)  # what replan does
    with pytest.raises(ValueError, match="replanned with microbatches under way; use drain=True"):
        list(stream)
    assert len(list(pipe.stream(inputs(3)))) == 3


@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_consumer_may_stop(executor: str) -> None:
    pipe = build(executor)
    x, target = torch.randn(8, WIDTH), torch.randn(8, WIDTH)
    source = Counted(inputs(50))
    for i, _ in enumerate(pipe.stream(source, window=3)):
        if i == 4:
            break
    assert source.taken == 6
    assert pipe.step(x, target=target).loss is not None
    stream = pipe.stream(inputs(9), window=3)
    next(stream)
    pipe.eval_step(x, target=target)  # in the middle of it
    assert len(list(stream)) == 8
    unused = pipe.stream(inputs(3))
    del unused


@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_source_or_a_stage_may_fail(executor: str) -> None:
    pipe = build(executor)
    found = []
    with pytest.raises(KeyError, match="the source broke"):
        for output in pipe.stream(Counted(inputs(20), broken_at=10), window=4):
            found.append(output)
    assert len(found) == 10
    with pytest.raises(KeyError, match="the source broke"):
        next(pipe.stream(Counted(inputs(20), broken_at=0)))
    assert len(list(pipe.stream(inputs(6)))) == 6

    layers = [Block(), Block(), Fault(Block(), at_call=9, error=OverflowError("too large")), Block()]
    pipe = build(executor, layers)
    found = []
    with pytest.raises(OverflowError, match="too large"):
        for output in pipe.stream(inputs(20), window=4):
            found.append(output)
    assert len(found) == 7
    assert len(list(pipe.stream(inputs(6)))) == 6


@pytest.mark.parametrize("executor", EXECUTORS)
def test_several_arguments_and_keywords(executor: str) -> None:
    pipe = build(executor, [Block(), Scaled()], merge=False)
    given = inputs(5)
    found = list(pipe.stream([(x,) for x in given], window=2, scale=torch.tensor(2.0), offset=0.5))
    with torch.no_grad():
        first, second = (list(m.children())[0] for _, m in sorted(pipe.stage_modules.items()))
        wanted = [second(first(x), scale=torch.tensor(2.0), offset=0.5) for x in given]
    assert all(map(same_bits, found, wanted))


@pytest.mark.parametrize("window", [0, -1, 1.5, True, "4"])
def test_a_window_that_is_none_is_refused(window: Any) -> None:
    with pytest.raises(ValueError, match="window = .*: give a number of microbatches of at least 1"):
        build("native").stream(inputs(2), window=window)


def test_microbatches_that_are_none_are_refused() -> None:
    pipe = Pipeline([nn.Linear(4, 4), nn.Linear(4, 4)], "1f1b", 4, num_ranks=2)
    with pytest.raises(TypeError, match="microbatches is of type int: give an iterable"):
        pipe.stream(5)  # type: ignore[arg-type]


def test_outputs_are_gathered_only_if_there_are_any() -> None:
    pipe = build("native", merge=False)
    with pytest.raises(ValueError, match="gather_outputs: merge=False keeps no outputs"):
        pipe.eval_step(torch.randn(8, WIDTH), gather_outputs=True)
    whole = build("native")
    assert whole.eval_step(torch.randn(8, WIDTH), gather_outputs=True).outputs.shape == (8, WIDTH)
