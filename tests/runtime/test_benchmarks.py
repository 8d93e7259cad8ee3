"""What the benchmarks compare with is what they say it is."""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

import fastpipe
from fastpipe import CostModel, make_schedule

FOLDER = str(Path(__file__).parents[2] / "benchmarks")
MICROBATCHES = 4


@pytest.fixture
def overhead() -> Iterator[ModuleType]:
    yield from imported("overhead")


@pytest.fixture
def efficiency() -> Iterator[ModuleType]:
    yield from imported("efficiency")


def imported(name: str) -> Iterator[ModuleType]:
    """A script of that folder, or below; it is no package, and its neighbours' short names are forgotten again."""
    before = set(sys.modules)
    sys.path.insert(0, FOLDER)
    try:
        yield __import__(name)
    finally:
        sys.path.remove(FOLDER)
        for found in set(sys.modules) - before:
            if str(getattr(sys.modules[found], "__file__", "")).startswith(FOLDER):
                del sys.modules[found]


def gradients(alone: object) -> list[torch.Tensor]:
    modules = alone.modules.values()  # type: ignore[attr-defined]
    alone()  # type: ignore[operator]
    return [parameter.grad for module in modules for parameter in module.parameters()]


@pytest.mark.parametrize("name", ["interleaved_1f1b", "interleaved_zb", "dualpipev"])
def test_the_compute_alone_is_every_action_of_a_rank_once(overhead: ModuleType, name: str) -> None:
    schedule = make_schedule(name, num_ranks=2, num_microbatches=MICROBATCHES)
    work = overhead.make_work(MICROBATCHES)
    for rank in range(2):
        alone = overhead.Alone(schedule, rank, work)
        found = gradients(alone)
        last = schedule.num_stages - 1
        expected = [overhead.make_stage(stage) for stage in sorted(schedule.placement.stages_of(rank))]
        for stage, module in zip(sorted(schedule.placement.stages_of(rank)), expected, strict=True):
            for piece in work.inputs.chunk(MICROBATCHES):
                output = module(piece if stage == 0 else work.boundary)
                output.backward(torch.full_like(output, 1 / MICROBATCHES) if stage == last else work.boundary)
        parameters = [parameter for module in expected for parameter in module.parameters()]
        assert not alone.outputs
        for one, other in zip(found, parameters, strict=True):
            torch.testing.assert_close(one, other.grad)


def test_split_by_hand_gives_the_same_gradients_and_leaves_nothing(overhead: ModuleType) -> None:
    schedule = make_schedule("zbv", num_ranks=2, num_microbatches=MICROBATCHES)
    work = overhead.make_work(MICROBATCHES)
    whole = overhead.Alone(schedule, 0, work)
    by_hand = overhead.AloneByHand(schedule, 0, work)
    for one, other in zip(gradients(by_hand), gradients(whole), strict=True):
        torch.testing.assert_close(one, other)
    assert not any(layer.waiting for module in by_hand.modules.values() for layer in module.children())


def test_the_schedule_is_simulated_with_the_mean_of_the_sleeps(efficiency: ModuleType) -> None:
    schedule = make_schedule("1f1b", num_ranks=2, num_microbatches=4)
    sleeps = [{"F": [(0, 1), (5, 8)], "I": [(0, 1)], "W": [(0, 2)]}, {"F": [], "I": [(0, 3)], "W": [(3, 5)]}]
    costs = CostModel(forward=2, backward_input=2, backward_weight=2)
    assert efficiency.simulated(schedule, sleeps) == fastpipe.simulate(schedule, costs).makespan
