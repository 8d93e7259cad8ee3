"""A tied weight that is replaced between steps where its stages are processes."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fastpipe import Pipeline, check_parity, load_checkpoint, save_checkpoint
from fastpipe.testing import reference_step
from tests.conftest import executors_in_turn
from tests.distributed.meshes import mesh
from tests.distributed.ranks import GroupOf, on_ranks
from tests.distributed.test_tied_data_parallel import batch
from tests.runtime.checks import same_bits
from tests.runtime.test_tied import EMBEDDING, batches, compare_steps, loss_fn, tied_layers
from tests.runtime.test_tied_replaced import replace_tied, take_step


def go_on(schedule: str, executor: str, folder: str) -> list[float]:
    layers = tied_layers()
    transport = "process_group" if executor == "python" else "auto"
    pipe = Pipeline(layers, schedule, 4, loss_fn, executor=executor, transport=transport)
    take_step(pipe)
    new = replace_tied(layers)
    ((x, y),) = batches(1, 9)
    assert (parity := check_parity(pipe, copy.deepcopy(nn.Sequential(*layers)), (x, y))).ok, parity
    compare_steps(pipe, layers)
    save_checkpoint(folder, pipe)
    replace_tied(layers, seed=12)
    load_checkpoint(folder, pipe)
    found = dict(pipe.named_parameters()).get(EMBEDDING)
    assert found is None or same_bits(found.detach(), new.detach())
    pipe.step(x, target=y)
    return [] if found is None else found.grad.flatten().tolist()


@executors_in_turn("schedule", ["1f1b", "dualpipe", "zbv"])
def test_the_new_one_is_trained(schedule: str, executor: str, group_of: GroupOf, tmp_path: Any) -> None:
    zero, one = group_of(2).run(go_on, schedule, executor, str(tmp_path))
    assert zero and (zero == one or schedule == "zbv")


@on_ranks(2)
def test_ranks_that_have_other_ones_are_refused() -> None:
    layers = tied_layers()
    pipe = Pipeline(layers, "1f1b", 4, loss_fn)
    take_step(pipe)
    own, rank = (layers[0].table, layers[-1])[dist.get_rank()], dist.get_rank()
    old = own.weight
    if rank == 0:
        replace_tied(layers)
    with pytest.raises(ValueError, match=f"{EMBEDDING} was replaced by another Parameter on rank 0"):
        take_step(pipe)
    own.weight = old
    take_step(pipe)
    replace_tied(layers, seed=rank)
    with pytest.raises(ValueError, match="has other values, shape or dtype on rank 1"):
        take_step(pipe)
    replace_tied(layers)
    compare_steps(pipe, layers)


@on_ranks(4)
def test_with_replicas(executor: str) -> None:
    """Each stage's gradient is averaged, and the averages are added: of the new weight."""
    over = mesh()
    layers = tied_layers()
    options: dict[str, Any] = {"group": over["pp"], "data_parallel": over["dp"], "executor": executor}
    pipe = Pipeline(layers, "1f1b", 4, loss_fn, **options)
    x, y = batch(0, over.get_local_rank("dp"))
    pipe.step(x, target=y)
    replace_tied(layers)
    models = [nn.Sequential(*copy.deepcopy(layers)) for _ in range(2)]
    for parameter in pipe.parameters():
        parameter.grad = None
    pipe.step(x, target=y)
    for replica, model in enumerate(models):
        model.zero_grad()
        reference_step(model, batch(0, replica), pipe.schedule, loss_fn, ties=pipe._local.ties)
    grads = [dict(model.named_parameters()) for model in models]
    for name, parameter in pipe.named_parameters():
        expected = (grads[0][name].grad + grads[1][name].grad) / 2
        torch.testing.assert_close(parameter.grad, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("schedule", ["1f1b", "dualpipe"])
@on_ranks(2)
def test_a_weight_that_is_frozen_on_one_rank_alone_is_refused(schedule: str) -> None:
    layers = tied_layers()
    pipe = Pipeline(layers, schedule, 4, loss_fn)
    take_step(pipe)
    if dist.get_rank() == 0:
        next(pipe.parameters()).requires_grad_(False)
    with pytest.raises(ValueError, match=f"requires_grad of {EMBEDDING} differs between ranks 0 and 1"):
        take_step(pipe)
    next(pipe.parameters()).requires_grad_(False)
    if dist.get_rank() == 1:
        layers[0].table.weight.requires_grad_(False)
    take_step(pipe)
