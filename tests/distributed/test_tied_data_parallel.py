"""Tied weights of stages that have replicas: averaged over these, summed over the stages, one weight everywhere."""

from collections.abc import Mapping
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fastpipe import Pipeline, StepError
from fastpipe.runtime.model.chain import Chain
from fastpipe.runtime.model.tied import Shared, Tie
from fastpipe.testing import reference_step
from tests.distributed.meshes import WRAPS, mesh, mesh_and_replica, whole_grad
from tests.distributed.ranks import GroupOf, on_ranks
from tests.runtime.checks import same_bits
from tests.runtime.test_tied import EMBEDDING, WORDS, loss_fn, tied_layers

Grads = dict[str, torch.Tensor]
COUNT, LAYERS = 4, 8


def batch(number: int, replica: int) -> tuple[torch.Tensor, torch.Tensor]:
    text = torch.randint(WORDS, (2 * COUNT + 1, 3), generator=torch.Generator().manual_seed(10 * number + replica))
    return text, text.roll(1, dims=1)


class Expected:
    """Each replica's unsplit model: a stage's uses are averaged over the replicas, and the averages are added."""

    def __init__(self, pipe: Pipeline) -> None:
        self.schedule = pipe.schedule
        last = pipe.num_stages - 1
        self.tie = Tie((EMBEDDING, "7.weight"), ((0, EMBEDDING), (last, "7.weight")))
        self.models = [Chain(dict(enumerate(tied_layers()))) for _ in range(2)]
        self.optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in self.models]

    def step(self, numbers: list[int]) -> Grads:
        """The gradients of several steps of both replicas, reduced once."""
        by_use: list[Mapping[int, Any]] = []

        def note(weight: Shared, grads: Mapping[int, Any]) -> None:
            by_use.append(dict(grads))

        for replica, model in enumerate(self.models):
            model.zero_grad()
            for number in numbers:
                with mock.patch.object(Shared, "add_up", note):
                    reference_step(model, batch(number, replica), self.schedule, loss_fn, ties=[self.tie])
        own, theirs = (dict(model.named_parameters()) for model in self.models)
        found = {name: (own[name].grad, theirs[name].grad) for name in own}
        grads = {n: (a + b) / 2 for n, (a, b) in found.items() if n != EMBEDDING and a is not None and b is not None}
        steps = len(numbers)
        first, last = (
            (sum(u[stage] for u in by_use[:steps]) + sum(u[stage] for u in by_use[steps:])) / 2
            for stage in self.tie.stages
        )
        return grads | {EMBEDDING: last + first}

    def train(self, grads: Grads) -> Any:
        """One optimizer's step with clipping, on both; the norm."""
        norms = []
        for model, optimizer in zip(self.models, self.optimizers, strict=True):
            for name, parameter in model.named_parameters():
                parameter.grad = grads[name].clone()
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5))
            optimizer.step()
        return norms[0]


def whole_name(name: str, num_stages: int) -> str:
    """From the name in a stage that a function made to that in the list of layers."""
    stage, layer, rest = name.split(".", 2)
    return f"{int(stage) * LAYERS // num_stages + int(layer)}.{rest}"


def build(wrap: str, schedule: str, executor: str, over: DeviceMesh) -> Pipeline:
    """Layers and ``data_parallel=``, or stages that a function makes and wraps, each with a weight of its own."""
    options: dict[str, Any] = {"group": over["pp"], "executor": executor}
    if wrap == "argument":
        return Pipeline(tied_layers(), schedule, COUNT, loss_fn, data_parallel=over["dp"], **options)
    num_stages = 4 if schedule == "zbv" else 2
    own = dict(enumerate(tied_layers()))
    if wrap == "fsdp":
        own[LAYERS - 1] = nn.Linear(own[1].linear.in_features, WORDS, bias=False)  # type: ignore[union-attr,arg-type]
    cut = LAYERS // num_stages

    def stage(index: int) -> nn.Module:
        return WRAPS[wrap](nn.Sequential(*(own[i] for i in range(index * cut, index * cut + cut))), over["dp"])

    tied = [("0.0.table.weight", f"{num_stages - 1}.{cut - 1}.weight")]
    return Pipeline(stage, schedule, COUNT, loss_fn, tied=tied, **options)


def grads_of(pipe: Pipeline, wrap: str) -> Grads:
    found = {name: whole_grad(p) for name, p in pipe.named_parameters()}
    known = found if wrap == "argument" else {whole_name(name, pipe.num_stages): g for name, g in found.items()}
    return {name: grad for name, grad in known.items() if grad is not None}


def train(wrap: str, schedule: str, executor: str) -> list[str]:
    over, replica = mesh_and_replica()
    pipe = build(wrap, schedule, executor, over)
    expected = Expected(pipe)
    optimizer = torch.optim.SGD(list(pipe.parameters()), 0.1)
    for number in range(2):
        x, y = batch(number, replica)
        pipe.step(x, target=y)
        grads, found = expected.step([number]), grads_of(pipe, wrap)
        wrong = [name for name, grad in found.items() if not same_bits(grad, grads[name])]
        assert not wrong, wrong
        norm, expected_norm = pipe.clip_grad_norm_(0.5), expected.train(grads)
        assert torch.allclose(norm, expected_norm, rtol=1e-6, atol=0) and (
            wrap == "fsdp" or same_bits(norm, expected_norm)
        )
        optimizer.step()
        optimizer.zero_grad()
    accumulate(pipe, wrap, expected, replica)
    return sorted(grads_of(pipe, wrap))


def accumulate(pipe: Pipeline, wrap: str, expected: Expected, replica: int) -> None:
    """Two steps, reduced once; the trained weights are the models' by now."""
    with pipe.no_sync():
        x, y = batch(2, replica)
        pipe.step(x, target=y)
    x, y = batch(3, replica)
    pipe.step(x, target=y)
    grads = expected.step([2, 3])
    for name, grad in grads_of(pipe, wrap).items():
        torch.testing.assert_close(grad, grads[name], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("wrap", "schedule", "executor"),
    [("argument", "1f1b", "native"), ("argument", "zbv", "python"), ("ddp", "1f1b", "python")]
    + [("ddp", "zbv", "native"), ("fsdp", "1f1b", "native"), ("fsdp", "zbv", "python")],
    indirect=["executor"],
)
def test_tied_weights_of_replicas_train_as_one(wrap: str, schedule: str, executor: str, group_of: GroupOf) -> None:
    answers = group_of(4).run(train, wrap, schedule, executor)
    assert answers[0] == answers[2] and answers[1] == answers[3]
    holders = [rank for rank, names in enumerate(answers) if EMBEDDING in names]
    assert holders == ([0, 2] if schedule == "zbv" else [0, 1, 2, 3])


@on_ranks(4)
def test_copies_replicas_and_uses_are_summed(executor: str) -> None:
    """Each rank has the first and the last stage, twice over: copies, replicas and uses are all summed."""
    over, replica = mesh_and_replica()
    pipe = build("argument", "dualpipe", executor, over)
    expected = Expected(pipe)
    x, y = batch(0, replica)
    pipe.step(x, target=y)
    grads = expected.step([0])
    for name, grad in grads_of(pipe, "argument").items():
        torch.testing.assert_close(grad, grads[name], rtol=1e-5, atol=1e-7)
    mine = grads_of(pipe, "argument")[EMBEDDING]
    theirs: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(theirs, mine)
    assert all(same_bits(mine, other) for other in theirs)


@on_ranks(4)
def test_weights_that_are_wrapped_otherwise_are_refused() -> None:
    over = mesh()

    def make(wraps: dict[int, str], schedule: str = "1f1b") -> None:
        stages = dict(enumerate([nn.Embedding(4, 4), *(nn.Linear(4, 4, bias=False) for _ in range(3))]))
        last = 3 if schedule == "zbv" else 1

        def stage(index: int) -> nn.Module:
            return WRAPS[wraps.get(index, "none")](nn.Sequential(stages[index]), over["dp"])

        tied = [("0.0.weight", f"{last}.0.weight")]
        Pipeline(stage, schedule, COUNT, loss_fn, group=over["pp"], tied=tied)

    for wraps, schedule, said, kind in (
        ({0: "ddp"}, "1f1b", "in DistributedDataParallel and .* but in no wrapper", Exception),
        ({0: "ddp", 3: "fsdp"}, "zbv", "in DistributedDataParallel and .* but in fully_shard", StepError),
        (
            {0: "ddp", 3: "ddp"},
            "zbv",
            "stage 3 was wrapped in DistributedDataParallel while its 0.0.weight was a Parameter",
            StepError,
        ),
    ):
        elsewhere = over.get_local_rank("pp") == 1
        with pytest.raises(kind if elsewhere else Exception, match="" if elsewhere and kind is StepError else said):
            make(wraps, schedule)
