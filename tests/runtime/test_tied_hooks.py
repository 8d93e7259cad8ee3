"""Hooks on weights of several stages, which must have none, and in stages that two ranks hold."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from fastpipe import Pipeline, check_parity
from tests.runtime.test_tied import batches, compare_steps, loss_fn, tied_layers
from tests.runtime.test_tied_replaced import take_step

HOOKS = ["register_hook", "register_post_accumulate_grad_hook"]


def add_hook(parameter: nn.Parameter, method: str) -> Any:
    return getattr(parameter, method)(lambda given: None)


def refusal(name: str, method: str) -> Any:
    return pytest.raises(ValueError, match=rf"tied: {name} has a hook of {method}, .* change .grad after pipe.step")


@pytest.mark.parametrize("method", HOOKS)
def test_a_hook_is_refused_before_and_after_a_pipeline_is_built(method: str) -> None:
    layers = tied_layers()
    hook = add_hook(layers[-1].weight, method)
    with refusal("0.table.weight", method):
        Pipeline(layers, "1f1b", 4, loss_fn, num_ranks=2)
    hook.remove()
    pipe = Pipeline(layers, "1f1b", 4, loss_fn, num_ranks=2)
    take_step(pipe)
    hook = add_hook(layers[0].table.weight, method)
    with refusal("0.table.weight", method):
        take_step(pipe)
    assert layers[-1].weight is layers[0].table.weight
    hook.remove()
    compare_steps(pipe, layers)


def test_a_hook_on_a_weight_that_becomes_tied_is_refused() -> None:
    layers = tied_layers()
    layers[-1].weight = nn.Parameter(layers[-1].weight.detach().clone())
    add_hook(layers[-1].weight, HOOKS[0])
    with refusal("7.weight", HOOKS[0]):
        Pipeline(layers, "1f1b", 4, loss_fn, num_ranks=2, tied=[("0.table.weight", "7.weight")])


@pytest.mark.parametrize("method", HOOKS)
def test_check_parity_refuses_it_in_the_model(method: str) -> None:
    layers = tied_layers()
    model = nn.Sequential(*copy.deepcopy(layers))
    pipe = Pipeline(layers, "1f1b", 4, loss_fn, num_ranks=2)
    add_hook(model[0].table.weight, method)
    before = list(model)
    ((x, y),) = batches(1, 9)
    with refusal("0.table.weight", method):
        check_parity(pipe, model, (x, y))
    assert list(model) == before and model[-1].weight is model[0].table.weight


def test_hooks_where_one_stage_has_all_uses_are_autograds_own(executor: str) -> None:
    """And those of other weights."""
    torch.manual_seed(0)
    layers = [nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)]
    layers[1].weight = layers[0].weight
    model = nn.Sequential(*copy.deepcopy(layers))
    for built in (layers, model):
        for i in (0, 3):
            built[i].weight.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
    pipe = Pipeline(layers, "1f1b", 4, nn.functional.mse_loss, num_ranks=2, executor=executor)
    assert check_parity(pipe, model, (torch.randn(9, 6), torch.randn(9, 6))).ok


HOOKED = {
    "tensor": lambda layer: layer.linear.weight.register_hook(lambda grad: grad.clamp(-0.001, 0.001)),
    "forward": lambda layer: layer.register_forward_hook(lambda module, args, output: output * 0.5),
    "backward": lambda layer: layer.linear.register_full_backward_hook(lambda module, given, out: (given[0] * 0.5,)),
}


@pytest.mark.parametrize("what", HOOKED)
def test_hooks_act_on_both_halves_of_a_stage_that_is_held_twice(what: str, executor: str) -> None:
    """Also those that came after the pipeline was built, and no longer when they are gone."""
    layers = tied_layers()
    ((x, y),) = batches(1, 9)
    early = HOOKED[what](layers[1])
    pipe = Pipeline(layers, "dualpipe", 4, loss_fn, num_ranks=2, executor=executor)
    assert check_parity(pipe, nn.Sequential(*layers), (x, y)).ok
    late = HOOKED[what](layers[2])
    assert check_parity(pipe, nn.Sequential(*layers), (x, y)).ok
    early.remove(), late.remove()
    assert check_parity(pipe, nn.Sequential(*layers), (x, y)).ok


def test_a_post_accumulate_hook_in_a_stage_that_is_held_twice_is_refused() -> None:
    layers = tied_layers()
    pipe = Pipeline(layers, "dualpipe", 4, loss_fn, num_ranks=2)
    add_hook(layers[1].linear.weight, HOOKS[1])
    with pytest.raises(ValueError, match="Linear .*register_post_accumulate_grad_hook"):
        take_step(pipe)


def test_what_is_changed_in_a_stage_that_is_held_twice() -> None:
    """Strides and an attribute go to the hidden copy, and a part that was replaced is refused."""
    torch.manual_seed(0)
    layers = [nn.Linear(8, 8), nn.Dropout(0.0), nn.Linear(8, 8), nn.Linear(8, 8)]
    pipe = Pipeline(layers, "dualpipe", 4, nn.functional.mse_loss, num_ranks=2)
    model, batch = nn.Sequential(*layers), (torch.randn(9, 8), torch.randn(9, 8))
    assert check_parity(pipe, model, batch).ok
    for layer in (layers[0], layers[2], layers[3]):  # a product with other strides is rounded in another order
        layer.weight.data = layer.weight.data.t().contiguous().t()
    assert check_parity(pipe, model, batch).ok
    layers[1].p = 1.0
    assert check_parity(pipe, model, batch).ok
    pipe.stage_modules[1].add_module("2", nn.Identity())
    with pytest.raises(ValueError, match="Chain was replaced"):
        pipe.step(batch[0], target=batch[1])


@pytest.mark.parametrize("is_tied", [False, True])
def test_a_tie_that_changes_in_a_stage_that_is_held_twice_is_refused(is_tied: bool) -> None:
    """The hidden copy has one weight where the stage now has two, or the reverse."""
    layers = [nn.Linear(8, 8) for _ in range(4)]
    if is_tied:
        layers[1].weight = layers[0].weight
    pipe = Pipeline(layers, "dualpipe", 4, nn.functional.mse_loss, num_ranks=2)
    pipe.step(torch.randn(8, 8), target=torch.randn(8, 8))
    layers[1].weight = nn.Parameter(torch.randn(8, 8)) if is_tied else layers[0].weight
    with pytest.raises(ValueError, match="weight of a Linear was tied .* or separated .* build a new Pipeline"):
        pipe.step(torch.randn(8, 8), target=torch.randn(8, 8))


def test_what_a_forward_has_left_in_a_stage_that_is_held_twice(executor: str) -> None:
    """Torch copies no tensor with a graph: a loss kept on a layer, or the weight of the older weight_norm."""
    model = nn.Sequential(*(nn.utils.weight_norm(nn.Linear(6, 6)) for _ in range(4)))
    model[0].kept = {"loss": model(torch.randn(9, 6)).mean()}
    pipe = Pipeline(model, "dualpipe", 4, nn.functional.mse_loss, num_ranks=2, executor=executor)
    assert check_parity(pipe, model, (torch.randn(9, 6), torch.randn(9, 6))).ok
