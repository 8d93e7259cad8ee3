"""Hooks on a weight of several stages: they would see the gradient of one stage's uses, so there must be none."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from fastpipe import Pipeline, check_parity
from tests.runtime.test_tied import batches, loss_fn, tied_layers
from tests.runtime.test_tied_replaced import compare_steps, take_step

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
