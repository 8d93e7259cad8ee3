"""A mesh of replicas x pipeline, and what its gradients must equal.

The reference is the same for both ways to parallelise: each replica's batch through an unsplit model of its own, and
then (first + second) / 2. With two replicas that is exact, whoever adds first.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from fastpipe import Pipeline, Schedule, StepResult
from fastpipe.partition import partition
from fastpipe.runtime.stage.stage import Chain
from fastpipe.testing import reference_step
from tests.runtime.checks import same_bits

WIDTH, LAYERS, MICROBATCHES = 6, 8, 5


class Block(nn.Module):
    """Some parameters whose gradients come in I, one whose gradient waits for W."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


def layers() -> list[nn.Module]:
    torch.manual_seed(0)
    made = [Block() for _ in range(LAYERS)]
    made[3].linear.weight.requires_grad_(False)
    return made


def squared(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


def batch(step: int, replica: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + replica)
    made = torch.randn(2, 2 * MICROBATCHES + 1, WIDTH, generator=generator)
    return made[0], made[1]


def step(pipe: Pipeline, number: int, replica: int) -> StepResult:
    x, target = batch(number, replica)
    return pipe.step(x, target=target)


def mesh() -> DeviceMesh:
    """Two replicas of a pipeline of all the ranks there are."""
    return dist.init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "pp"))


def mesh_and_replica() -> tuple[DeviceMesh, int]:
    """`mesh`, and the number of this process's replica."""
    over = mesh()
    return over, over.get_local_rank("dp")


def shard(module: nn.Module, over: DeviceMesh) -> nn.Module:
    """As users do it: every block, and the stage."""
    for block in module.children():
        fully_shard(block, mesh=over)
    return fully_shard(module, mesh=over)


WRAPS: dict[str, Callable[[nn.Module, DeviceMesh], nn.Module]] = {
    "ddp": lambda module, over: DistributedDataParallel(module, process_group=over.get_group()),
    "fsdp": shard,
    "none": lambda module, over: module,
}


def build(
    wrap: str | Callable[[nn.Module, DeviceMesh], nn.Module],
    schedule: str | Schedule,
    executor: str,
    over: DeviceMesh,
    *,
    made: Callable[[], list[nn.Module]] = layers,
    num_microbatches: int | None = MICROBATCHES,
    **more: Any,
) -> Pipeline:
    """A pipeline of this replica, its stages wrapped by the function that builds them."""
    num_ranks = over["pp"].size()
    num_stages = schedule.num_stages if isinstance(schedule, Schedule) else num_ranks
    if schedule not in ("1f1b", "gpipe", "dualpipe"):
        num_stages = 2 * num_ranks if isinstance(schedule, str) else num_stages
    whole = made()
    ranges = partition(len(whole), num_stages)
    wrapper = WRAPS[wrap] if isinstance(wrap, str) else wrap

    def stage(index: int) -> nn.Module:
        return wrapper(Chain({i: whole[i] for i in ranges[index]}), over["dp"])

    return Pipeline(stage, schedule, num_microbatches, squared, group=over["pp"], executor=executor, **more)


class Reference:
    """Both replicas' unsplit models, whose gradients are averaged as the wrappers do it."""

    def __init__(self, pipe: Pipeline, made: Callable[[], list[nn.Module]] = layers) -> None:
        self.schedule = pipe.schedule
        self.models = [Chain(dict(enumerate(made()))) for _ in range(2)]
        self.kept: dict[str, torch.Tensor | None] = {}

    def step(self, number: int, *, reduces: bool = True) -> list[float]:
        """Each replica's loss."""
        losses = [
            float(reference_step(model, batch(number, replica), self.schedule, squared).loss)
            for replica, model in enumerate(self.models)
        ]
        for pair in zip(*(model.parameters() for model in self.models), strict=True):
            if reduces and any(parameter.grad is not None for parameter in pair):
                _average(pair)
        return losses

    def put_aside(self) -> None:
        """A shard's gradient is added to what was there; DDP averages what was there together with it."""
        self.kept = {name: p.grad for name, p in self.models[0].named_parameters()}
        for model in self.models:
            model.zero_grad()

    def grad(self, name: str) -> torch.Tensor | None:
        made = dict(self.models[0].named_parameters())[name].grad
        kept = self.kept.get(name)
        return made if kept is None or made is None else kept + made


def _average(pair: tuple[nn.Parameter, ...]) -> None:
    first, second = (torch.zeros_like(p) if p.grad is None else p.grad for p in pair)
    for parameter in pair:
        parameter.grad = (first + second) / 2


def whole_grad(parameter: nn.Parameter) -> torch.Tensor | None:
    """Of all shards; every replica has to ask."""
    grad = parameter.grad
    return grad.full_tensor() if isinstance(grad, DTensor) else grad


def wrong_gradients(pipe: Pipeline, reference: Reference) -> list[str]:
    """The local parameters whose gradients are not the reference's, to the last bit."""
    wrong = []
    for name, parameter in pipe.named_parameters():
        found, expected = whole_grad(parameter), reference.grad(name)
        same = found is expected if found is None or expected is None else same_bits(found, expected)
        wrong += [] if same else [name]
    return wrong


def two_steps(pipe: Pipeline, wrap: str, replica: int) -> list[list[str]]:
    """A step, and another that adds to it: what is wrong after each, none of it the losses."""
    reference = Reference(pipe)
    wrong = []
    for number in range(2):
        if number and wrap == "fsdp":
            reference.put_aside()
        loss = step(pipe, number, replica).loss
        assert float(loss) == reference.step(number)[replica]
        wrong.append(wrong_gradients(pipe, reference))
    return wrong
