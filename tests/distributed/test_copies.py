"""Stages that two ranks hold: the same weights to the last bit from the start to the end; buffers of their own."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fastpipe import Pipeline, StepError
from tests.conftest import executors_in_turn
from tests.distributed.ranks import GroupOf
from tests.runtime.checks import same_bits
from tests.runtime.models import WIDTH, Block, squared

COUNT = 8


class Normed(nn.Module):
    """Has buffers that follow what it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(self.norm(x))


def train(schedule: str, executor: str) -> tuple[list[str], list[dict[str, torch.Tensor]], str]:
    """Every process begins with other weights. What its stages have at the start and at the end, and what is said."""
    torch.manual_seed(dist.get_rank())
    size = dist.get_world_size()
    pipe = Pipeline([Normed() for _ in range(size)], schedule, COUNT, squared, executor=executor)
    optimizer = torch.optim.AdamW(list(pipe.parameters()), lr=0.02)
    states = [{key: value.clone() for key, value in pipe.state_dict().items()}]
    for seed in range(3):
        x, y = torch.randn(2, 2 * COUNT, WIDTH, generator=torch.Generator().manual_seed(seed))
        pipe.step(x, target=y)
        pipe.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()
    return [name for name, _ in pipe.named_parameters()], [*states, pipe.state_dict()], pipe.describe()


@executors_in_turn("schedule, ranks", [("dualpipe", 2), ("dualpipe", 4), ("chimera", 4)])
def test_both_holders_have_the_same_weights(schedule: str, ranks: int, executor: str, group_of: GroupOf) -> None:
    answers = group_of(ranks).run(train, schedule, executor)
    found: dict[str, list[Any]] = {}
    for names, states, text in answers:
        assert "WARNING: buffers differ between copies" in text and "norm.running_mean" in text
        for key in states[0]:
            found.setdefault(key, []).append((key in names, [state[key] for state in states]))
    assert all(len(holders) == 2 for holders in found.values())
    differing = []
    for key, ((is_parameter, mine), (_, theirs)) in found.items():
        if is_parameter:
            assert all(map(same_bits, mine, theirs)), key
            assert not same_bits(mine[0], mine[1]), "it was trained"
        elif key.endswith("running_mean") and not same_bits(mine[1], theirs[1]):
            differing.append(key)
    assert len(differing) == ranks, "each copy has seen other microbatches"


def test_without_buffers_nothing_is_warned_of() -> None:
    for schedule, layers in (("dualpipe", [Block(), Block()]), ("1f1b", [Normed(), Normed()])):
        text = Pipeline(layers, schedule, COUNT, squared, num_ranks=2).describe()
        assert "WARNING" not in text and ("held twice" in text) == (schedule == "dualpipe")


def write_in_forward(schedule: str, tied: bool) -> str:
    """A forward that writes to a weight that several places hold; on one process what the others do not see."""
    torch.manual_seed(0)
    layers = [nn.Embedding(6, WIDTH, max_norm=0.5), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 6, bias=False)]
    if tied:
        layers[3].weight = layers[0].weight
    pipe = Pipeline(layers, schedule, COUNT, nn.functional.cross_entropy, num_ranks=2)
    text = torch.arange(2 * COUNT) % 6
    with pytest.raises((ValueError, StepError)) as raised:
        pipe.eval_step(text, target=text)
    with pytest.raises((ValueError, RuntimeError)):  # autograd may find it first
        pipe.step(text, target=text)
    for module in pipe.stage_modules.values():
        for embedding in filter(lambda m: isinstance(m, nn.Embedding), module.modules()):
            embedding.max_norm = None
    pipe.step(text, target=text)
    return str(raised.value)


@pytest.mark.parametrize(("schedule", "tied"), [("dualpipe", False), ("dualpipe", True), ("1f1b", True)])
def test_a_weight_with_several_holders_that_a_forward_writes_to_is_refused(
    schedule: str, tied: bool, group_of: GroupOf
) -> None:
    for text in (write_in_forward(schedule, tied), *group_of(2).run(write_in_forward, schedule, tied)):
        assert "the step wrote to" in text and "0.weight" in text
        assert ("several stages share" if tied else "holds its stage twice") in text


class Replacing(nn.Linear):
    """Writes to its weight, and replaces it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            with torch.no_grad():
                self.weight.mul_(0.5)
            self.weight = nn.Parameter(self.weight.detach().clone())
        return super().forward(x)


def test_a_weight_with_two_holders_that_a_forward_writes_to_and_replaces_is_refused() -> None:
    pipe = Pipeline([Replacing(WIDTH, WIDTH), Block()], "dualpipe", COUNT, squared, num_ranks=2)
    x = torch.randn(2 * COUNT, WIDTH)
    with pytest.raises(ValueError, match=rf"wrote to the parameter of shape \({WIDTH}, {WIDTH}\) that it also"):
        pipe.eval_step(x, target=x)
    for module in pipe.stage_modules.values():
        module.eval()
    pipe.eval_step(x, target=x)


def test_a_weight_with_one_holder_may_be_written_to() -> None:
    layers = [nn.Embedding(6, WIDTH, max_norm=0.5), nn.Linear(WIDTH, 6)]
    text = torch.arange(2 * COUNT) % 6
    pipe = Pipeline(layers, "1f1b", COUNT, nn.functional.cross_entropy, num_ranks=2)
    pipe.step(text, target=text)
    assert layers[0].weight.norm(dim=1).max() < 0.501


def test_a_scripted_module_that_is_held_twice_is_refused() -> None:
    layers = [torch.jit.script(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU())) for _ in range(2)]
    with pytest.raises(ValueError, match="Sequential is a scripted module"):
        Pipeline(layers, "dualpipe", COUNT, squared, num_ranks=2)
    Pipeline(layers, "1f1b", COUNT, squared, num_ranks=2).step(torch.randn(8, WIDTH), target=torch.randn(8, WIDTH))


class Hiding(nn.Module):
    """Trains a tensor that is none of its parameters."""

    def __init__(self, tensor: torch.Tensor | nn.Module) -> None:
        super().__init__()
        self.hidden = [tensor]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.hidden[0]
        return x * (hidden.weight[0] if isinstance(hidden, nn.Linear) else hidden)


def test_a_hidden_tensor_that_is_trained_is_refused() -> None:
    linear = nn.Linear(WIDTH, WIDTH)
    for tensor in (torch.ones(WIDTH, requires_grad=True), linear):
        with pytest.raises(ValueError, match="hidden of a Hiding holds a tensor that requires a gradient"):
            Pipeline([linear, Hiding(tensor)], "dualpipe", COUNT, squared, num_ranks=2)
    normed = nn.utils.parametrizations.weight_norm(nn.LSTM(WIDTH, WIDTH), "weight_hh_l0")
    for layers in ([Block(), Hiding(torch.ones(WIDTH))], [Block(), normed]):
        Pipeline(layers, "dualpipe", COUNT, squared, num_ranks=2)


def test_parameters_that_come_or_go_later_are_refused() -> None:
    x = torch.randn(2 * COUNT, WIDTH)
    for change, name in (
        (lambda linear: setattr(linear, "bias", None), "bias"),
        (lambda linear: linear.register_parameter("scale", nn.Parameter(torch.ones(1))), "scale"),
    ):
        layers = [nn.Linear(WIDTH, WIDTH) for _ in range(2)]
        pipe = Pipeline(layers, "dualpipe", COUNT, squared, num_ranks=2)
        change(layers[0])
        with pytest.raises(ValueError, match=f"the parameter {name} of a Linear was added or removed since"):
            pipe.step(x, target=x)


def test_an_exported_module_may_be_held_twice() -> None:
    rows = {0: torch.export.Dim("rows", max=64)}
    torch.manual_seed(0)
    blocks, x = [Block(), Block()], torch.randn(2 * COUNT, WIDTH)
    layers = [torch.export.export(block, (x,), dynamic_shapes=(rows,)).module() for block in blocks]
    losses = [
        Pipeline(each, "dualpipe", COUNT, squared, num_ranks=2).step(x, target=x).loss for each in (layers, blocks)
    ]
    assert torch.equal(*losses)
