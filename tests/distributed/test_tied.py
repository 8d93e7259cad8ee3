"""Tied weights whose stages are processes: every holder's copy is the same to the last bit, and counts once."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fastpipe import Pipeline, check_parity, load_checkpoint, save_checkpoint
from fastpipe.testing import reference_step
from tests.conftest import executors_in_turn
from tests.distributed.ranks import GroupOf, on_ranks
from tests.distributed.test_step import caught, refuses
from tests.runtime.test_tied import EMBEDDING, batches, loss_fn, repeated_layers, tied_layers, train_tied


def train(make: str, schedule: str, count: int, executor: str) -> list[str]:
    layers = tied_layers() if make == "tied" else repeated_layers()
    # processes of one host share memory by default; the other way to swap is taken, too
    transport = "process_group" if executor == "python" else "auto"
    pipe = train_tied(layers, schedule, count, executor=executor, transport=transport)
    ((x, y),) = batches(1, 2 * count + 1)
    model = tied_layers() if make == "tied" else repeated_layers()
    names = [name for name, _ in pipe.named_parameters()]
    # this rank trained its own stages alone
    others = check_parity(pipe, model, (x, y))
    assert {d.what for d in others.differences} >= {"parameter", "loss"}
    return names


@pytest.mark.parametrize(
    ("make", "schedule", "ranks", "count", "executor"),
    [("tied", "1f1b", 2, 4, "native"), ("tied", "dualpipe", 2, 4, "python"), ("tied", "dualpipe", 2, 4, "native")]
    + [("tied", "1f1b", 4, 5, "python"), ("tied", "zbv", 2, 4, "native"), ("repeated", "1f1b", 4, 5, "native")]
    + [("repeated", "dualpipe", 2, 4, "python"), ("repeated", "zbv", 2, 4, "python")],
    indirect=["executor"],
)
def test_tied_weights_train_as_one(
    make: str, schedule: str, ranks: int, count: int, executor: str, group_of: GroupOf
) -> None:
    answers = group_of(ranks).run(train, make, schedule, count, executor)
    holders = [rank for rank, names in enumerate(answers) if EMBEDDING in names]
    first_only = schedule == "zbv" or (make == "repeated" and schedule == "1f1b")
    assert holders == ([0] if first_only else [0, ranks - 1])


def declare(folder: str) -> dict[str, Any]:
    rank = dist.get_rank()
    layers = tied_layers()

    def make(stage: int) -> Any:
        return layers[0] if stage == 0 else tied_layers()[-1].requires_grad_()

    names = [("0.table.weight", "1.weight")]
    pipe = Pipeline(make, "1f1b", 4, loss_fn, tied=names)
    ((x, y),) = batches(1, 9)
    pipe.step(x, target=y)
    (grad,) = [p.grad for p in pipe.parameters()]
    good = check_parity(pipe, [layers[0], layers[-1]], (x, y))
    found = {
        "grad": grad.tolist(),
        "names": [name for name, _ in pipe.named_parameters()],
        "good": str(good),
        "one": caught(lambda: Pipeline(make, "1f1b", 4, loss_fn, tied=names if rank else None)),
        "none": caught(lambda: Pipeline(make, "1f1b", 4, loss_fn, tied=[("0.table.weight", "1.bias")])),
    }
    save_checkpoint(folder, pipe)
    whole = Pipeline(tied_layers(), "dualpipe", 4, loss_fn)
    found["unlike"] = caught(lambda: load_checkpoint(folder, whole))
    return found


def test_declared_where_each_process_has_one_of_the_layers(group_of: GroupOf, tmp_path: Any) -> None:
    zero, one = group_of(2).run(declare, str(tmp_path))
    assert zero["grad"] == one["grad"]
    assert zero["names"] == one["names"] == ["0.table.weight"]
    assert zero["good"] == one["good"] and "1 gradients are those of the unsplit model" in zero["good"], zero["good"]
    assert zero["one"][0] == one["one"][0] == "ValueError" and "do not build the same pipeline" in zero["one"][1]
    assert one["none"][0] == "ValueError" and "1.bias is no parameter of the model" in one["none"][1]
    assert zero["none"][0] == "StepError"
    assert zero["unlike"][0] in ("KeyError", "StepError")


def train_sparse(schedule: str, tied: bool, executor: str) -> list[torch.Tensor]:
    """Two steps of a model whose embedding has sparse gradients; that weight's gradient after each, made dense."""
    torch.manual_seed(0)
    layers = [nn.Embedding(13, 4, sparse=True), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 13, bias=False)]
    if tied:
        layers[3].weight = layers[0].weight
    unsplit = copy.deepcopy(layers)
    pipe = Pipeline(layers, schedule, 4, loss_fn, executor=executor)
    found = []
    for x in torch.randint(13, (2, 8, 3)):
        pipe.step(x, target=x.roll(-1, dims=1))
        reference_step(unsplit, (x, x.roll(-1, dims=1)), pipe.schedule, loss_fn, ties=pipe._local.ties)
        grad, expected = layers[0].weight.grad, unsplit[0].weight.grad
        if grad is not None and expected is not None and 0 in pipe.stage_modules:
            assert grad.is_sparse == expected.is_sparse == (not tied)
            torch.testing.assert_close(grad.to_dense(), expected.to_dense())
            found.append(grad.to_dense())
    return found


@executors_in_turn("schedule, tied", [("dualpipe", False), ("dualpipe", True), ("1f1b", True), ("dualpipe", False)])
def test_sparse_gradients_are_swapped(schedule: str, tied: bool, executor: str, group_of: GroupOf) -> None:
    first, second = group_of(2).run(train_sparse, schedule, tied, executor)
    assert len(first) == 2
    assert len(second) == (2 if schedule == "dualpipe" else 0)  # else a copy that no optimizer sees
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=False))


@on_ranks(2)
def test_a_hook_on_one_rank_is_an_error_on_all() -> None:
    layers, rank = tied_layers(), dist.get_rank()
    if rank == 1:
        hook = layers[-1].weight.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
    refuses(lambda: Pipeline(layers, "1f1b", 4, loss_fn), "7.weight has a hook of register_hook", on=1)
    if rank == 1:
        hook.remove()
    pipe = Pipeline(layers, "1f1b", 4, loss_fn)
    if rank == 1:
        layers[-1].weight.register_post_accumulate_grad_hook(lambda parameter: None)
    ((x, y),) = batches(1, 9)
    said = f"{EMBEDDING} has a hook of register_post_accumulate_grad_hook"
    refuses(lambda: pipe.step(x, target=y), said, on=1)


class Masked(nn.Module):
    """Has another layer's weight as a buffer."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("copy", weight.data)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.get_buffer("copy")


@pytest.mark.parametrize("way", ["data", "transposed", "buffer"])
@on_ranks(2)
def test_weights_of_several_ranks_over_the_same_memory_are_refused(way: str) -> None:
    """In one process each is updated with the other; in two, each would be trained by itself."""
    layers: list[nn.Module] = [nn.Linear(4, 4, bias=False) for _ in range(4)]
    weight = layers[0].get_parameter("weight")
    if way == "buffer":
        layers[3] = Masked(weight)
    else:
        layers[3].weight = nn.Parameter(weight.detach().t() if way == "transposed" else weight.data)
    other = "3.copy" if way == "buffer" else "3.weight"
    said = f"0.weight and {other} are two tensors over the same memory"
    refuses(lambda: Pipeline(layers, "1f1b", 4, nn.functional.mse_loss), said)
    Pipeline(layers, "zbv", 4, nn.functional.mse_loss, partition=[1, 1, 1, 1])  # both are on one rank
    if way == "data":
        Pipeline(layers, "1f1b", 4, nn.functional.mse_loss, tied=[("0.weight", "3.weight")])
    stacked = torch.randn(4, 4, 4)
    for layer, part in zip(layers[:3], stacked, strict=False):  # parts of one memory
        layer.weight = nn.Parameter(part)
    Pipeline(layers, "1f1b", 4, nn.functional.mse_loss)


class HiddenHead(nn.Module):
    """Multiplies with the weight of another layer that torch does not know as this module's."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.hidden = [embedding]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.hidden[0].weight.t()


@pytest.mark.parametrize("way", ["penalty", "hidden"])
@on_ranks(2)
def test_a_weight_of_another_rank_that_gets_a_gradient_here_is_named(way: str) -> None:
    embedding = nn.Embedding(13, 4)
    layers = [embedding, nn.Linear(4, 4), nn.Tanh(), HiddenHead(embedding) if way == "hidden" else nn.Linear(4, 13)]

    def penalized(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return loss_fn(output, target) + 0.01 * sum(p.square().sum() for layer in layers for p in layer.parameters())

    x = torch.arange(24).reshape(8, 3) % 13
    loss_fn(nn.Sequential(*layers)(x), x).backward()  # as for a comparison with the unsplit model
    pipe = Pipeline(layers, "1f1b", 4, penalized if way == "penalty" else loss_fn)
    pipe.eval_step(x, target=x)
    for _ in range(2):
        refuses(lambda: pipe.step(x, target=x), "uses 0.weight.*, of layers that other ranks compute", on=1)
    if way == "penalty":
        layers[:2] = [layer.requires_grad_(False) for layer in layers[:2]]
        pipe.step(x, target=x)
