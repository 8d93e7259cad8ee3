"""Random numbers and overlapped pairs where ranks are processes."""

import pytest
import torch

from fastpipe import Pipeline
from tests.conftest import BOTH
from tests.distributed.ranks import GroupOf
from tests.runtime.paired import Layer, Own, compare, layers_of, make


def same_masks(schedule: str, executor: str, overlap: str, p: float) -> tuple[int, int, int]:
    """Runs on every rank: dropout in checkpoints against the unsplit model, which recomputes nothing."""
    kind = Layer if p else Own
    pipe = make(
        layers_of(lambda: kind(p, recomputes=bool(p)), 4),
        schedule,
        executor,
        overlap=overlap,
        num_ranks=None,
        rng="per_microbatch",
    )
    compare(pipe, layers_of(lambda: Layer(p), 4), steps=2, rng="per_microbatch")
    counts = pipe._steps.ranks.pair_counts()
    return counts.together, counts.in_order, counts.fused


@pytest.mark.parametrize(("p", "overlap"), [(0.3, "always"), (0.0, "auto")])
def test_masks_and_pairs(p: float, overlap: str, executor: str, group_of: GroupOf) -> None:
    answers = group_of(2).run(same_masks, "dualpipev", executor, overlap, p)
    for together, in_order, fused in answers:
        assert together == 0 and (in_order if p else fused) > 0, "what draws and recomputes goes in order"


def beside(executor: str) -> int:
    """Runs on every rank: a helper thread each."""
    pipe = make(layers_of(Layer, 4), "dualpipev", executor, overlap="always", num_ranks=None)
    compare(pipe, layers_of(Layer, 4))
    return pipe._steps.ranks.pair_counts().together


@BOTH
def test_a_helper_thread_in_every_process(executor: str, group_of: GroupOf) -> None:
    assert all(count > 0 for count in group_of(2).run(beside, executor))


def refused(first_seed: int) -> str:
    """Runs on every rank."""
    torch.manual_seed(first_seed + int(torch.distributed.get_rank()))
    with pytest.raises(ValueError) as caught:
        Pipeline(layers_of(Layer, 2), "1f1b", 4, torch.nn.functional.mse_loss, rng="per_microbatch")
    return str(caught.value)


def test_ranks_with_different_seeds_are_refused(group_of: GroupOf) -> None:
    for text in group_of(2).run(refused, 7):
        assert "torch.initial_seed(), is 7 on rank 0, 8 on rank 1" in text and "torch.manual_seed" in text


def other_count() -> str:
    """Runs on every rank."""
    pipe = make(layers_of(Layer, 2), "1f1b", "auto", num_ranks=None, rng="per_microbatch")
    pipe.step_count = pipe.rank
    x = torch.zeros(8, 6)
    with pytest.raises(ValueError) as caught:
        pipe.step(x, target=x)
    return str(caught.value)


def test_ranks_that_count_steps_differently_are_refused(group_of: GroupOf) -> None:
    for text in group_of(2).run(other_count):
        assert "rank 1: step with num_microbatches=8 and step_count=1" in text
