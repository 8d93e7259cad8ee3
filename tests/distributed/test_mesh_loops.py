"""A training loop on a mesh of three dimensions against the same loop of one process."""

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from fastpipe import Pipeline
from tests.distributed.ranks import GroupOf
from tests.distributed.test_mesh import whole

WORDS, WIDTH, HEADS, TOKENS, COUNT = 20, 16, 4, 6, 4


class Attention(nn.Module):
    """Two heads for each key and value, with rotary positions."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"q": WIDTH, "k": WIDTH // 2, "v": WIDTH // 2, "o": WIDTH}
        for name, size in sizes.items():
            self.add_module(name, nn.Linear(WIDTH, size, bias=False))
        angles = torch.outer(torch.arange(TOKENS), 0.1 ** torch.arange(WIDTH // HEADS // 2)).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (linear(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for linear in (self.q, self.k, self.v))
        q, k = (self.rotated(part) for part in (q, k))
        made = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o(made.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def rotated(self, x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, -1)
        return x * self.cos + torch.cat([-second, first], -1) * self.sin


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention, self.up = nn.RMSNorm(WIDTH), Attention(), nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.down(nn.functional.silu(self.up(x)))


def layers() -> list[nn.Module]:
    torch.manual_seed(0)
    head = nn.Linear(WIDTH, WORDS, bias=False)
    return [nn.Embedding(WORDS, WIDTH), *(Block() for _ in range(4)), nn.RMSNorm(WIDTH), head]


def spread(mesh: DeviceMesh) -> list[nn.Module]:
    """With parts of sequences between blocks, and replicas' shards."""
    part = Shard(1)
    ways: dict[str, Any] = {f"attention.{name}": ColwiseParallel() for name in "qkv"}
    ways |= {
        "norm": SequenceParallel(),
        "attention": PrepareModuleInput(input_layouts=(part,), desired_input_layouts=(Replicate(),)),
    }
    ways |= {"attention.o": RowwiseParallel(output_layouts=part), "up": ColwiseParallel(input_layouts=part)}
    ways |= {"down": RowwiseParallel(output_layouts=part)}
    head = ColwiseParallel(input_layouts=part, output_layouts=Replicate())
    ends = {0: RowwiseParallel(input_layouts=Replicate(), output_layouts=part), 5: SequenceParallel(), 6: head}
    made = layers()
    for i, layer in enumerate(made):
        parallelize_module(layer, mesh["tp"], ends.get(i, ways))
    return [fully_shard(layer, mesh=mesh["dp_shard"]) for layer in made]


def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def text(number: int, replica: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(2 * number + replica)
    return torch.randint(WORDS, (2 * COUNT, TOKENS), generator=generator)


def optimizer_of(parameters: Any) -> tuple[torch.optim.Optimizer, Any]:
    optimizer = torch.optim.SGD(list(parameters), 0.5, momentum=0.9, weight_decay=0.01, foreach=False)
    return optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)


def loop(schedule: str, executor: str) -> None:
    """Two steps of an optimizer, each of two batches; clipping, a falling rate, and an evaluation after each."""
    mesh = dist.init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp_shard", "pp", "tp"))
    replica = mesh.get_local_rank("dp_shard")
    pipe, plain = Pipeline(spread(mesh), schedule, COUNT, loss_fn, mesh=mesh, executor=executor), layers()
    unsplit = nn.Sequential(*plain)
    optimizer, rate = optimizer_of(pipe.parameters())
    other, other_rate = optimizer_of(unsplit.parameters())
    for number in range(2):
        for batch in (2 * number, 2 * number + 1):
            x = text(batch, replica)
            with pipe.no_sync() if batch % 2 == 0 else contextlib.nullcontext():
                loss = pipe.step(x, target=x).loss
            losses = [loss_fn(unsplit(text(batch, i)), text(batch, i)) for i in range(2)]
            (sum(losses) / 2).backward()  # type: ignore[union-attr]
            torch.testing.assert_close(loss, losses[replica].detach())
        norm = nn.utils.clip_grad_norm_(unsplit.parameters(), 0.5)
        torch.testing.assert_close(pipe.clip_grad_norm_(0.5), norm)
        for one in (optimizer, other, rate, other_rate):
            one.step()
        for one in (optimizer, other):
            one.zero_grad()
        x = text(9, replica)
        torch.testing.assert_close(pipe.eval().eval_step(x, target=x).loss, loss_fn(unsplit(x), x).detach())
        pipe.train()
    expected = dict(unsplit.named_parameters())
    for name, parameter in pipe.named_parameters():
        torch.testing.assert_close(whole(parameter.detach()), expected[name].detach(), msg=name)


@pytest.mark.parametrize(
    ("schedule", "executor"),
    [("dualpipev", "native"), pytest.param("zbv", "python", marks=pytest.mark.nightly)],
    indirect=["executor"],
)
def test_a_loop_of_sequences_in_parts(group_of: GroupOf, schedule: str, executor: str) -> None:
    group_of(8).run(loop, schedule, executor)
