"""Tied weights: one weight for several stages, whose gradients are the sum of all uses in a known order."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from fastpipe import Pipeline, check_parity, load_checkpoint, save_checkpoint
from fastpipe.runtime.stage.stage import Chain
from fastpipe.testing import Fault, reference_step
from tests.conftest import skip_without_native
from tests.runtime.checks import same_bits, unequal
from tests.runtime.models import CASES, WIDTH, Block, Embed, squared

WORDS = 11
EMBEDDING = "0.table.weight"


def tied_layers(count: int = 8) -> list[nn.Module]:
    """A language model: its last layer is its first, turned round."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        layers = [Embed(), *(Block() for _ in range(count - 2)), nn.Linear(WIDTH, WORDS, bias=False)]
    layers[-1].weight = layers[0].table.weight
    return layers


def repeated_layers(count: int = 8) -> list[nn.Module]:
    """One block again and again, and one with the same matrix."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(6)
        block, other = Block(), Block()
        head = nn.Linear(WIDTH, WORDS)
        other.linear.weight = block.linear.weight
        return [Embed(), *([block, block, other] * count)[: count - 2], head]


def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def batches(steps: int, rows: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(9)
    texts = [torch.randint(WORDS, (rows, 3), generator=generator) for _ in range(steps)]
    return [(text, text.roll(1, dims=1)) for text in texts]


def compare_steps(pipe: Pipeline, layers: list[nn.Module], steps: int = 2, *, every: int = 1) -> None:
    """Steps with clipping and a new optimizer beside those of the unsplit model, whose uses are summed stage by stage.

    Args:
        pipe: the pipeline.
        layers: those that it was built of.
        steps: how many.
        every: after so many steps, whose gradients add up, the optimizer takes one.
    """
    unsplit = Chain(dict(enumerate(copy.deepcopy(layers))))
    for model in (pipe, unsplit):
        for parameter in model.parameters():
            parameter.grad = None
    ours, theirs = (torch.optim.AdamW(list(model.parameters()), lr=0.03) for model in (pipe, unsplit))
    for number, (x, y) in enumerate(batches(steps, 2 * pipe.num_microbatches + 1), start=1):
        result = pipe.step(x, target=y)
        reference = reference_step(unsplit, (x, y), pipe.schedule, loss_fn, ties=pipe._local.ties)
        assert result.loss is not None and same_bits(result.loss, reference.loss)
        assert not (wrong := unequal(pipe, unsplit)), f"the gradients of {wrong} differ"
        if number % every == 0:
            norm = pipe.clip_grad_norm_(0.5)
            assert same_bits(norm, torch.nn.utils.clip_grad_norm_(unsplit.parameters(), 0.5))
            ours.step(), theirs.step()
            ours.zero_grad(), theirs.zero_grad()
    expected = unsplit.state_dict()
    assert all(same_bits(value, expected[key]) for key, value in pipe.state_dict().items())


def train_tied(layers: list[nn.Module], schedule: str, count: int = 4, **options: Any) -> Pipeline:
    pipe = Pipeline(layers, schedule, count, loss_fn, **options)
    compare_steps(pipe, layers, steps=4, every=2)
    return pipe


SCHEDULES = [("1f1b", 1), ("1f1b", 2), ("zbv", 2), ("dualpipe", 2), ("dualpipev", 4), ("interleaved_1f1b", 2)]


def test_a_layer_that_stands_twice_in_a_stage_runs_twice() -> None:
    layers = CASES["plain"].layers(3)
    layers = [layers[0], layers[0], layers[1], layers[2]]
    pipe = Pipeline(layers, "1f1b", 4, squared, num_ranks=2)
    x, y = torch.randn(9, WIDTH), torch.randn(9, WIDTH)
    assert check_parity(pipe, nn.Sequential(*layers), (x, y)).ok


@pytest.mark.parametrize(("schedule", "num_ranks"), SCHEDULES)
@pytest.mark.parametrize("make", [tied_layers, repeated_layers])
def test_tied_weights_train_as_one(make: Any, schedule: str, num_ranks: int, executor: str) -> None:
    layers = make()
    pipe = train_tied(layers, schedule, 2 * num_ranks, num_ranks=num_ranks, executor=executor)
    names = [name for name, _ in pipe.named_parameters()]
    assert names == [name for name, _ in Chain(dict(enumerate(layers))).named_parameters()]
    if make is tied_layers:
        assert layers[-1].weight is layers[0].table.weight


def test_the_sum_is_added_to_an_existing_gradient_in_place(executor: str) -> None:
    layers = tied_layers(4)
    weight = layers[0].table.weight
    assert isinstance(weight, nn.Parameter)
    weight.grad = before = torch.zeros_like(weight)
    pipe = Pipeline(layers, "1f1b", 4, loss_fn, num_ranks=2, executor=executor)
    [(x, y)] = batches(1, 9)
    pipe.step(x, target=y)
    assert weight.grad is before and before.any()


def test_one_microbatch_is_the_unsplit_models_to_the_last_bit() -> None:
    """With several, autograd adds a microbatch's uses first: the same but for rounding."""
    for count, exact in ((1, True), (8, False)):
        layers = tied_layers()
        unsplit = Chain(dict(enumerate(copy.deepcopy(layers))))
        pipe = Pipeline(layers, "1f1b", count, loss_fn, num_ranks=2)
        ((x, y),) = batches(1, 16)
        pipe.step(x, target=y)
        reference_step(unsplit, (x, y), pipe.schedule, loss_fn)
        found, expected = (dict(m.named_parameters())[EMBEDDING].grad for m in (pipe, unsplit))
        torch.testing.assert_close(found, expected)
        assert same_bits(found, expected) == exact
        assert set(unequal(pipe, unsplit)) == (set() if exact else {EMBEDDING})


@pytest.mark.parametrize("schedule", ["1f1b", "dualpipe"])
def test_declared_where_a_function_makes_the_stages(schedule: str) -> None:
    """The weights were two; the first one's value counts."""

    def make(stage: int) -> nn.Module:
        torch.manual_seed(stage)
        return Embed() if stage == 0 else nn.Linear(WIDTH, WORDS, bias=False)

    tied = [("0.table.weight", "1.weight")]
    pipe = Pipeline(make, schedule, 4, loss_fn, num_ranks=2, tied=tied)
    embed, head = (pipe.stage_modules[stage] for stage in range(2))
    assert head.weight is embed.table.weight and same_bits(head.weight, make(0).table.weight)
    model = nn.Sequential(make(0), make(1))
    model[1].weight = model[0].table.weight
    ((x, y),) = batches(1, 9)
    pipe.step(x, target=y)
    reference_step(model, (x, y), pipe.schedule, loss_fn, ties=pipe._local.ties)
    assert not unequal(pipe, model) and head.weight is embed.table.weight


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_parity_and_checkpoints_know_tied_weights(tmp_path: Any) -> None:
    layers = tied_layers()
    pipe = Pipeline(layers, "dualpipev", 4, loss_fn, num_ranks=2)
    optimizer = torch.optim.AdamW(pipe.parameters())
    ((x, y),) = batches(1, 9)
    parity = check_parity(pipe, tied_layers(), (x, y))
    assert parity.ok and parity.num_compared == 13, parity
    with pytest.raises(ValueError, match=r"7.weight and 0.table.weight "):
        model = tied_layers()
        model[-1].weight = nn.Parameter(model[-1].weight.detach().clone())
        reference_step(model, (x, y), pipe.schedule, loss_fn, ties=pipe._local.ties)
    pipe.step(x, target=y)
    optimizer.step()
    save_checkpoint(tmp_path, pipe, optimizer)
    other = Pipeline(tied_layers(), "1f1b", 4, loss_fn, num_ranks=2)
    load_checkpoint(tmp_path, other, torch.optim.AdamW(other.parameters()))
    assert same_bits(pipe.eval_step(x, target=y).loss, other.eval_step(x, target=y).loss)


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_a_failed_step_leaves_the_weights_tied(schedule: str, executor: str) -> None:
    layers = tied_layers()
    layers[3] = Fault(layers[3], at_call=1, error=OverflowError("too large"))
    pipe = Pipeline(layers, schedule, 4, loss_fn, num_ranks=2, executor=executor)
    ((x, y),) = batches(1, 9)
    with pytest.raises(OverflowError):
        pipe.step(x, target=y)
    assert layers[-1].weight is layers[0].table.weight
    pipe.step(x, target=y)
    assert layers[-1].weight is layers[0].table.weight and layers[0].table.weight.grad is not None


def test_frozen_and_moved_weights_are_followed() -> None:
    layers = tied_layers()
    pipe = Pipeline(layers, "1f1b", 4, loss_fn, num_ranks=2)
    ((x, y),) = batches(1, 9)
    layers[0].table.weight.requires_grad_(False)
    before = pipe.step(x, target=y).loss
    assert layers[0].table.weight.grad is None
    layers[0].table.weight.requires_grad_(True)
    layers[0].table.weight.data = layers[0].table.weight.data * 2
    after = pipe.step(x, target=y).loss
    unsplit = Chain(dict(enumerate(copy.deepcopy(layers))))
    unsplit.zero_grad()
    expected = reference_step(unsplit, (x, y), pipe.schedule, loss_fn).loss
    assert same_bits(after, expected) and not same_bits(after, before)
    assert layers[0].table.weight.grad is not None


def test_it_is_described(executor: str) -> None:
    """Weights that wait for W are named, though only the alias is ever seen by a linear."""
    skip_without_native()
    pipe = Pipeline(tied_layers(), "zb_h1", 4, loss_fn, num_ranks=2, executor=executor)
    ((x, y),) = batches(1, 9)
    pipe.step(x, target=y)
    text = pipe.describe()
    assert "tied        0.table.weight = 7.weight (stages [0, 1])" in text
    assert "7 of 14 parameters in W" in text
    assert "*.weight" not in text.partition("in I ")[2].replace("table.weight", "")


@pytest.mark.parametrize(
    ("tied", "text"),
    [
        (["0.table.weight", "7.weight"], "tied has '0.table.weight': give groups of two or more names"),
        ([("0.table.weight",)], "give groups of two or more"),
        ([("0.table.weight", "9.weight")], "tied: '9.weight' names no layer; names begin with the layer's"),
        ([("0.table.weight", "7.bias")], "tied: 7.bias is no parameter of the model"),
        ([("0.table.weight", "1.linear.weight")], r"1.linear.weight is torch.float32 \(6, 6\) but 0.table.weight is"),
    ],
)
def test_what_cannot_be_tied(tied: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Pipeline(tied_layers(), "1f1b", 4, loss_fn, num_ranks=2, tied=tied)


def test_names_of_stages_that_a_function_makes() -> None:
    for name in ("weight", "2.weight", "0"):
        with pytest.raises(ValueError, match=f"tied: '{name}' .*'<stage>.<name"):
            Pipeline(lambda stage: Block(), "1f1b", 4, loss_fn, num_ranks=2, tied=[("0.linear.weight", name)])
