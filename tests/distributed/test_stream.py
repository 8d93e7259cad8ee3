"""Streams and gathered outputs over processes: every rank alike, whoever stops or fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fastpipe import Pipeline, StepError
from fastpipe.runtime.stage import Chain
from fastpipe.testing import Fault
from tests.distributed import meshes
from tests.distributed.ranks import Ranks
from tests.runtime.checks import same_bits
from tests.runtime.models import WIDTH, Block, squared
from tests.runtime.test_stream import Counted, inputs
from tests.runtime.tree_models import Pair, Tree


def build(executor: str, schedule: str = "1f1b", layers: list[nn.Module] | None = None, **options: Any) -> Pipeline:
    if layers is None:
        torch.manual_seed(0)
        layers = [Block() for _ in range(4)]
    return Pipeline(layers, schedule, 4, squared, executor=executor, **options)


def expected(given: list[torch.Tensor]) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(4)))
    with torch.no_grad():
        return [model(x) for x in given]


def streamed(executor: str, transport: str) -> None:
    pipe = build(executor, transport=transport)
    given = inputs(11)
    source = Counted(given)
    found = list(pipe.stream(source, window=4))
    assert source.taken == (11 if pipe.needs_input else 0)
    if pipe.is_last:
        assert all(map(same_bits, found, expected(given)))
    else:
        assert found == [None] * 11
    gathered = list(pipe.stream(given if pipe.needs_input else None or [], window=4, gather_outputs=True))
    assert all(map(same_bits, gathered, expected(given)))


def stopped(executor: str) -> None:
    """One rank stops: the others get what is left of their window."""
    pipe = build(executor)
    for stopper in range(dist.get_world_size()):
        seen = 0
        for _ in pipe.stream(inputs(40), window=4):
            seen += 1
            if pipe.rank == stopper and seen == 6:
                break
        assert seen == (6 if pipe.rank == stopper else 7)
        assert pipe.eval_step(torch.ones(8, WIDTH)).loss is None


def failed(executor: str) -> None:
    layers: list[nn.Module] = [Block(), Block(), Block(), Fault(Block(), at_call=9, error=OverflowError("too large"))]
    pipe = build(executor, layers=layers)
    seen = 0
    with pytest.raises(OverflowError if pipe.is_last else StepError, match="too large"):
        for _ in pipe.stream(inputs(40), window=4):
            seen += 1
    assert seen == 7
    with pytest.raises(KeyError if pipe.needs_input else StepError, match="the source broke"):
        for _ in pipe.stream(Counted(inputs(40), broken_at=10), window=4):
            seen += 1
    assert seen == 17
    assert len(list(pipe.stream(inputs(3)))) == 3


def gathered(executor: str, schedule: str) -> None:
    torch.manual_seed(0)
    layers = [Tree() for _ in range(2 * dist.get_world_size())]
    pipe = build(executor, schedule, layers)
    x, target = inputs(1)[0].repeat(16, 1), torch.zeros(16, WIDTH)
    alone = pipe.step(x, target=target)
    for result in (
        pipe.step(x, target=target, gather_outputs=True),
        pipe.eval_step(x, gather_outputs=True),
    ):
        hidden, state, extra, nothing = result.outputs
        assert hidden.shape == (16, WIDTH) and state.depth == [len(layers)] * 4 and set(nothing) == {None}
        assert extra["mask"].dtype is torch.bool and type(extra["deep"][1]["pair"]) is Pair
        assert hidden.sum().item() == result.outputs[0].sum().item() != 0
        if schedule == "1f1b" and pipe.is_last:
            assert same_bits(hidden, alone.outputs[0])
    assert pipe.is_last or alone.outputs is None


def differing(executor: str) -> None:
    pipe = build(executor)
    with pytest.raises((ValueError, StepError), match="do not make the same call"):
        pipe.eval_step(torch.ones(8, WIDTH), gather_outputs=pipe.rank == 0)
        pipe.eval_step(torch.ones(8, WIDTH))


def of_replicas(executor: str) -> None:
    """Each replica has a source of its own; where parameters are whole, of another length than the other's."""
    over = meshes.mesh()
    replica = over.get_local_rank("dp")
    for wrap, length in (("ddp", 7 + 3 * replica), ("fsdp", 9)):
        pipe = meshes.build(wrap, "zbv", executor, over)
        given = [torch.randn(3, meshes.WIDTH) + replica for _ in range(length)]
        dist.broadcast_object_list(given, group=over["pp"].get_group(), group_src=0)
        unsplit = Chain(dict(enumerate(meshes.layers())))
        with torch.no_grad():
            wanted = [unsplit(x) for x in given]
        for trained in (False, True):
            if trained:
                assert meshes.two_steps(pipe, wrap, replica) == [[], []]
            found = list(pipe.stream(iter(given), window=2, gather_outputs=True))
            assert len(found) == length and all(map(same_bits, found, wanted))


@pytest.mark.parametrize("transport", ["shared_memory", "process_group"])
def test_a_stream(executor: str, transport: str, group_of: Callable[[int], Ranks]) -> None:
    group_of(2).run(streamed, executor, transport)


def test_streams_of_replicas(executor: str, group_of: Callable[[int], Ranks]) -> None:
    group_of(4).run(of_replicas, executor)


def test_whoever_stops(executor: str, group_of: Callable[[int], Ranks]) -> None:
    group_of(2).run(stopped, executor)


def test_whoever_fails(executor: str, group_of: Callable[[int], Ranks]) -> None:
    group_of(2).run(failed, executor)


@pytest.mark.parametrize("schedule", ["1f1b", "dualpipe"])
def test_gathered_outputs(schedule: str, executor: str, group_of: Callable[[int], Ranks]) -> None:
    group_of(2).run(gathered, executor, schedule)


def test_ranks_that_do_not_agree(executor: str, group_of: Callable[[int], Ranks]) -> None:
    group_of(2).run(differing, executor)
