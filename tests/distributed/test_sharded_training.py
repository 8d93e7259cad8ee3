"""A whole training on shards: accumulation, clipping, parity, checkpoints and another cut, in one pipeline."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from fastpipe import Pipeline, check_parity, load_checkpoint, save_checkpoint
from fastpipe.testing.parity import Parity
from tests.conftest import executors_in_turn
from tests.distributed.meshes import batch, layers, mesh_and_replica, squared, step, whole_grad
from tests.distributed.ranks import GroupOf, on_ranks
from tests.distributed.test_tied_data_parallel import batch as text
from tests.distributed.test_tied_data_parallel import build
from tests.runtime.checks import same_bits
from tests.runtime.test_tied import EMBEDDING, tied_layers

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def sharded(schedule: str, executor: str, over: DeviceMesh) -> tuple[Pipeline, torch.optim.Optimizer]:
    """A list of layers, each of them sharded: the keys are the model's, whatever the cut."""
    made = [fully_shard(layer, mesh=over["dp"]) for layer in layers()]
    pipe = Pipeline(made, schedule, 5, squared, group=over["pp"], executor=executor)
    return pipe, torch.optim.AdamW(list(pipe.parameters()), 0.05)


def train(pipe: Pipeline, optimizer: torch.optim.Optimizer, replica: int, numbers: range, *, checks: bool) -> list[Any]:
    """Steps of two batches each; with `checks` parity is looked at while gradients wait to be reduced."""
    losses = []
    for number in numbers:
        optimizer.zero_grad()
        with pipe.no_sync():
            x, y = batch(2 * number, replica)
            losses.append(pipe.step(x, target=y).loss)
        if checks:
            assert parity_of(pipe, replica).ok
        x, y = batch(2 * number + 1, replica)
        losses.append(pipe.step(x, target=y).loss)
        if checks:
            before = [whole_grad(parameter) for parameter in pipe.parameters()]
            assert parity_of(pipe, replica).ok
            after = [whole_grad(parameter) for parameter in pipe.parameters()]
            assert all(map(same_bits, (b for b in before if b is not None), (a for a in after if a is not None)))
        losses.append(pipe.clip_grad_norm_(0.5))
        optimizer.step()
    return losses


def parity_of(pipe: Pipeline, replica: int) -> Parity:
    """Against the unsplit model with the parameters of now."""
    whole = [nn.Sequential(*layers())] if pipe.rank == 0 else [None]
    state = {key: value.full_tensor() for key, value in pipe.state_dict().items()}
    found = pipe._steps.all_gather("state", lambda: {"state": {key: value.tolist() for key, value in state.items()}})
    for model in whole:
        if model is not None:
            merged = {key: torch.tensor(value) for reply in found for key, value in reply["state"].items()}
            model.load_state_dict(merged)
    return check_parity(pipe, whole[0], batch(50, replica))


def go_on(folder: str, executor: str) -> list[Any]:
    """A training that is checked and saved on its way, one that is not, and one that goes on with another schedule."""
    over, replica = mesh_and_replica()
    pipe, optimizer = sharded("zbv", executor, over)
    losses = train(pipe, optimizer, replica, range(2), checks=True)
    writing = save_checkpoint(folder, pipe, optimizer, extra={"step": 2}, asynchronous=True)
    losses += train(pipe, optimizer, replica, range(2, 4), checks=False)
    assert writing is not None
    writing.result()
    alone = train(*sharded("zbv", executor, over), replica, range(4), checks=False)
    assert all(map(same_bits, losses, alone)) and len(losses) == len(alone) == 12
    other, optimizer = sharded("1f1b", executor, over)
    assert load_checkpoint(folder, other, optimizer) == {"step": 2}
    resumed = train(other, optimizer, replica, range(2, 4), checks=False)
    assert all(map(torch.allclose, resumed, losses[6:])) and same_bits(resumed[0], losses[6])
    return [pipe.eval_step(batch(60, 0)[0], target=batch(60, 0)[1]).loss, losses[6]]


def test_shards_are_checked_clipped_saved_and_cut_otherwise(group_of: GroupOf, tmp_path: Path) -> None:
    """By one executor: what lies between steps knows nothing of them, and gradients of shards by both are those of
    test_data_parallel.py."""
    executor = "auto"
    first = group_of(4).run(go_on, str(tmp_path / "a"), executor)[0]
    plain = Pipeline(layers(), "dualpipev", 5, squared, num_ranks=2, executor=executor, schedule_options={})
    optimizer = torch.optim.AdamW(plain.parameters(), 0.05)
    assert load_checkpoint(tmp_path / "a", plain, optimizer) == {"step": 2}
    x, y = batch(4, 0)
    assert same_bits(plain.eval_step(x, target=y).loss, first[1])


@executors_in_turn("schedule", ["1f1b", "zbv"])
@on_ranks(4)
def test_parity_sums_the_uses_of_tied_shards(schedule: str, executor: str) -> None:
    over, replica = mesh_and_replica()
    pipe = build("fsdp", schedule, executor, over)
    made = tied_layers()
    cut = len(made) // pipe.num_stages
    model = nn.Sequential(*(nn.Sequential(*made[i : i + cut]) for i in range(0, len(made), cut)))
    parity = check_parity(pipe, model, text(7, replica))
    assert parity.ok and parity.num_compared == len(dict(model.named_parameters())), parity
    made[0].get_parameter(EMBEDDING.partition(".")[2]).data[0, 0] += 1  # row of a word that every batch has
    assert not check_parity(pipe, model, text(7, replica)).ok


@on_ranks(4)
def test_gradients_that_wait_in_another_dtype_stay(executor: str) -> None:
    """Gradients wait in another dtype than they are computed in: parity leaves those, too."""
    over, replica = mesh_and_replica()
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float64)
    made = [fully_shard(layer, mesh=over["dp"], mp_policy=policy) for layer in layers()]
    pipe = Pipeline(made, "1f1b", 5, squared, group=over["pp"], executor=executor)
    found = []
    for checked in (True, False):
        with pipe.no_sync():
            step(pipe, 0, replica)
        if checked:
            check_parity(pipe, nn.Sequential(*layers()), batch(1, replica))
        step(pipe, 2, replica)
        found.append([whole_grad(parameter) for parameter in pipe.parameters()])
        for parameter in pipe.parameters():
            parameter.grad = None
    assert all(a is b or same_bits(a, b) for a, b in zip(*found, strict=True))
