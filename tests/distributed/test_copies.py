"""Stages that two ranks hold: the same weights to the last bit from the start to the end; buffers of their own."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fastpipe import Pipeline
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
