"""A tied weight that the user puts another Parameter in the place of, between two steps."""

from typing import Any

import pytest
import torch
from torch import nn

from fastpipe import Pipeline
from tests.runtime.models import WIDTH, Block
from tests.runtime.test_tied import EMBEDDING, WORDS, batches, compare_steps, loss_fn, repeated_layers, tied_layers


def replace_tied(layers: list[nn.Module], *, seed: int = 11, only: int | None = None) -> nn.Parameter:
    """Another Parameter for the embedding and the head, or for one of the two."""
    value = torch.randn(WORDS, WIDTH, generator=torch.Generator().manual_seed(seed))
    new = nn.Parameter(value)
    if only in (None, 0):
        layers[0].table.weight = new
    if only in (None, 1):
        layers[-1].weight = new
    return new


def take_step(pipe: Pipeline) -> Any:
    ((x, y),) = batches(1, 2 * pipe.num_microbatches + 1)
    return pipe.step(x, target=y)


@pytest.mark.parametrize("schedule", ["1f1b", "zbv", "dualpipe"])
def test_a_replaced_weight_is_the_one_that_is_trained(schedule: str, executor: str) -> None:
    layers = tied_layers()
    pipe = Pipeline(layers, schedule, 4, loss_fn, num_ranks=2, executor=executor)
    take_step(pipe)
    new = replace_tied(layers)
    compare_steps(pipe, layers)
    assert layers[0].table.weight is layers[-1].weight is new


def test_one_that_looks_otherwise() -> None:
    """More words than before, for the hidden copies of the stages, too."""
    layers = tied_layers()
    pipe = Pipeline(layers, "dualpipe", 4, loss_fn, num_ranks=2)
    take_step(pipe)
    layers[0].table.weight = layers[-1].weight = nn.Parameter(torch.randn(WORDS + 3, WIDTH))
    compare_steps(pipe, layers)


def test_a_layer_that_stands_in_two_stages() -> None:
    layers = repeated_layers()
    pipe = Pipeline(layers, "1f1b", 4, loss_fn, num_ranks=2)
    take_step(pipe)
    block, other = layers[1], layers[3]
    block.linear.weight = other.linear.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
    compare_steps(pipe, layers)


def test_weights_of_one_stage_that_are_no_longer_one_are_refused(executor: str) -> None:
    """`pipe.parameters()` would lack the new one, and a state have the value of the other."""
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(4)]
    layers[1].weight = layers[0].weight
    pipe = Pipeline(layers, "1f1b", 4, nn.functional.mse_loss, num_ranks=2, executor=executor)
    x = torch.randn(8, WIDTH)
    pipe.step(x, target=x)
    layers[1].weight = nn.Parameter(torch.zeros(WIDTH, WIDTH))
    with pytest.raises(ValueError, match="0.weight and 1.weight are one weight .* 1.weight got another Parameter"):
        pipe.step(x, target=x)
    layers[0].weight = layers[1].weight
    pipe.step(x, target=x)
    assert next(pipe.parameters()) is layers[1].weight
    layers[0].weight = nn.Parameter(torch.zeros(WIDTH, WIDTH))
    with pytest.raises(ValueError, match="since the last step 0.weight got another Parameter"):
        pipe.step(x, target=x)


@pytest.mark.parametrize(("only", "name"), [(0, "0.table.weight"), (1, "7.weight")])
def test_weights_that_are_no_longer_one_are_refused(only: int, name: str) -> None:
    layers = tied_layers()
    pipe = Pipeline(layers, "1f1b", 4, loss_fn, num_ranks=2)
    take_step(pipe)
    old = layers[0].table.weight
    new = replace_tied(layers, only=only)
    text = f"0.table.weight and 7.weight are one weight in this Pipeline, and since the last step {name} got another"
    for call in (pipe.step, pipe.eval_step):
        ((x, y),) = batches(1, 9)
        with pytest.raises(ValueError, match=text):
            call(x, target=y)
    assert {id(layers[0].table.weight), id(layers[-1].weight)} == {id(old), id(new)}
    layers[0].table.weight = layers[-1].weight = new
    compare_steps(pipe, layers)


def test_a_parameter_that_is_no_longer_there() -> None:
    layers = tied_layers()
    pipe = Pipeline(layers, "1f1b", 4, loss_fn, num_ranks=2)
    layers[-1].weight = None
    with pytest.raises(ValueError, match=r"7.weight got another Parameter"):
        take_step(pipe)
    assert layers[-1].weight is None


def test_a_weight_that_is_not_tied_is_replaced_for_both_holders(executor: str) -> None:
    """The hidden copy of a stage that two ranks hold follows what stands in the stage now."""
    layers = [nn.Embedding(WORDS, WIDTH), Block(), Block(), nn.Linear(WIDTH, WORDS)]
    pipe = Pipeline(layers, "dualpipe", 4, loss_fn, num_ranks=2, executor=executor)
    take_step(pipe)
    layers[1].linear.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
    compare_steps(pipe, layers)
    assert EMBEDDING not in dict(pipe.named_parameters())
