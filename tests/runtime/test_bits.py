"""Every schedule, executor and odd model over loopback: the unsplit model's loss and gradients, bit for bit."""

import contextlib

import pytest
import torch

from fastpipe import Pipeline, list_schedules, make_schedule
from fastpipe.runtime.stage.stage import Chain
from fastpipe.testing import Loopback, backward_order, reference_step
from tests.conftest import paired
from tests.runtime.checks import reference_of, rows_for, same_bits, train_and_compare
from tests.runtime.models import CASES, Case, squared

TRAINING = [family.name for family in list_schedules() if family.name != "forward_only"]


def microbatches_for(schedule: str, num_ranks: int) -> int | None:
    """As few as bring out all of a schedule, and do not divide evenly if possible; None where it has other limits."""
    for count in (2 * num_ranks + 1, 2 * num_ranks, 4 * num_ranks):
        with contextlib.suppress(ValueError):
            make_schedule(schedule, num_ranks=num_ranks, num_microbatches=count)
            return count
    return None


OF_A_KIND = ("1f1b", "interleaved_zb", "dualpipev", "dualpipe")
"""One schedule of each kind: a line, a loop, a V, two routes."""
COMBINATIONS = [
    (name, num_ranks, count)
    for name in TRAINING
    for num_ranks in (1, 2, 4)
    if (count := microbatches_for(name, num_ranks)) is not None
]


@pytest.mark.parametrize(
    ("schedule", "num_ranks", "num_microbatches", "executor"),
    [
        (*case, executor)
        for *case, turn in paired(COMBINATIONS)
        for executor in (("native", "python") if case[1] == 4 else (turn,))
    ],
    indirect=["executor"],
)
def test_every_schedule(schedule: str, num_ranks: int, num_microbatches: int, executor: str) -> None:
    """On four ranks by both executors, on fewer by one of them in turn."""
    train_and_compare("plain", schedule, num_microbatches, num_ranks=num_ranks, executor=executor)


def test_no_schedule_is_left_out() -> None:
    assert {name for name, num_ranks, _ in COMBINATIONS if num_ranks == 4} == set(TRAINING)


@pytest.mark.parametrize(
    ("case", "schedule", "executor"),
    [
        (case, schedule, ("native", "python")[(number + place) % 2])
        for number, case in enumerate(CASES)
        for place, schedule in enumerate(("1f1b", "dualpipev"))
    ],
    indirect=["executor"],
)
def test_every_boundary(case: str, schedule: str, executor: str) -> None:
    """By both executors, of which one has whole backwards, the other one split ones; between processes the other way
    round."""
    train_and_compare(case, schedule, 4, num_ranks=2, executor=executor)


@pytest.mark.parametrize(("schedule", "num_microbatches"), [("gpipe", 2), ("1f1b", 1), ("1f1b", 3), ("zbv", 2)])
def test_fewer_microbatches_than_ranks(schedule: str, num_microbatches: int, executor: str) -> None:
    train_and_compare("plain", schedule, num_microbatches, num_ranks=4, executor=executor)


@pytest.mark.parametrize("lookahead", [0, 3, "all"])
def test_receives_posted_earlier_or_later(lookahead: int | str, executor: str) -> None:
    train_and_compare("two_tensors", "dualpipev", 8, num_ranks=4, executor=executor, recv_lookahead=lookahead)


def test_a_placement_of_ones_own(executor: str) -> None:
    pipe = train_and_compare("plain", "1f1b", 5, num_ranks=4, executor=executor, stage_to_rank=[2, 0, 3, 1])
    assert [pipe.schedule.placement.stages_of(rank) for rank in range(4)] == [(1,), (3,), (0,), (2,)]


def test_a_partition_of_ones_own(executor: str) -> None:
    partition = [1, 4, 2, 3]
    pipe = train_and_compare("plain", "1f1b", 5, num_ranks=4, num_layers=10, executor=executor, partition=partition)
    assert [len(list(pipe.stage_modules[i].children())) for i in range(4)] == partition


@pytest.mark.parametrize("lanes", ["directed", "pair"])
def test_delayed_sends_change_nothing(lanes: str, executor: str) -> None:
    """A buffer that were overwritten or freed before its send has gone would be seen by the receiver."""
    transport = Loopback(lanes=lanes, delay=0.003)
    train_and_compare("two_tensors", "gpipe", 5, num_ranks=2, executor=executor, transport=transport, recv_lookahead=0)


def gradients(layers: list[torch.nn.Module]) -> list[torch.Tensor]:
    """The gradients of a model, and then none."""
    found = [p.grad for layer in layers for p in layer.parameters() if p.grad is not None]
    for layer in layers:
        layer.zero_grad()
    return found


def test_a_wrong_order_differs() -> None:
    """Equal bits mean something: the same microbatches in another order give other last bits."""
    case = CASES["plain"]
    layers = case.layers(4)
    unsplit = Chain(dict(enumerate(layers)))
    batch = case.batches(1, rows_for(8))[0]
    pipe = Pipeline(case.layers(4), "1f1b", 8, case.loss_fn, num_ranks=4)
    reference_of(unsplit, batch, pipe, case)
    right = gradients(layers)
    parts = list(zip(batch.args[0].tensor_split(8), batch.target.tensor_split(8), strict=True))
    divisors = [17 / len(part) for part, _ in parts]
    for i in reversed(backward_order(pipe.schedule)):
        (squared(unsplit(parts[i][0]), parts[i][1]) / divisors[i]).backward()
    wrong = gradients(layers)
    assert all(map(torch.allclose, right, wrong))
    assert not all(map(same_bits, right, wrong))


def test_the_reference_sums_in_the_schedules_order() -> None:
    """`looped_bfs` goes through the microbatches backwards, and the reference with it."""
    case = Case(CASES["plain"].make)
    results = []
    for schedule in ("1f1b", "looped_bfs"):
        layers = case.layers(4)
        pipe = Pipeline(case.layers(4), schedule, 8, case.loss_fn, num_ranks=2, stages_per_rank=None)
        batch = case.batches(1, rows_for(8))[0]
        reference_step(layers, (batch.args, batch.target), pipe.schedule, loss_fn=case.loss_fn)
        results.append(gradients(layers))
    assert not all(map(same_bits, *results))
