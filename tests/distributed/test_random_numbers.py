"""Random numbers and overlapped pairs where ranks are processes."""

import pytest
import torch

from fastpipe import Pipeline
from tests.conftest import NATIVE, overlap_of
from tests.distributed.ranks import on_ranks
from tests.runtime.paired import Layer, Own, compare, layers_of, make


@pytest.mark.parametrize("p", [0.3, 0.0])
@on_ranks(2)
def test_masks_and_pairs(p: float, executor: str) -> None:
    """Dropout in checkpoints against the unsplit model, which recomputes nothing; what draws and recomputes goes in
    order."""
    made = layers_of(lambda: (Layer if p else Own)(p, recomputes=bool(p)), 4)
    pipe = make(made, "dualpipev", executor, overlap=overlap_of(executor), num_ranks=None, rng="per_microbatch")
    compare(pipe, layers_of(lambda: Layer(p), 4), steps=2, rng="per_microbatch")
    counts = pipe._steps.ranks.pair_counts()
    assert counts["together"] == 0 and (counts["in order"] if p else counts["fused"]) > 0


@NATIVE
@on_ranks(2)
def test_a_helper_thread_in_every_process(executor: str) -> None:
    pipe = make(layers_of(Layer, 4), "dualpipev", executor, overlap="always", num_ranks=None)
    compare(pipe, layers_of(Layer, 4))
    assert pipe._steps.ranks.pair_counts()["together"] > 0


@on_ranks(2)
def test_ranks_with_different_seeds_are_refused() -> None:
    torch.manual_seed(7 + int(torch.distributed.get_rank()))
    said = r"torch.initial_seed\(\), is 7 on ranks \[0\], 8 on ranks \[1\].*torch.manual_seed"
    with pytest.raises(ValueError, match=said):
        Pipeline(layers_of(Layer, 2), "1f1b", 4, torch.nn.functional.mse_loss, rng="per_microbatch")


@on_ranks(2)
def test_ranks_that_count_steps_differently_are_refused() -> None:
    pipe = make(layers_of(Layer, 2), "1f1b", "auto", num_ranks=None, rng="per_microbatch")
    pipe.step_count = pipe.rank
    x = torch.zeros(8, 6)
    with pytest.raises(ValueError, match="rank 1: step with num_microbatches=8 and step_count=1"):
        pipe.step(x, target=x)
