"""Steps of pipelines on the fake device, in a process of their own: torch's engine counts the devices once.

``python -m tests.runtime.devices.steps LIBRARY EXECUTOR CASE...`` prints one JSON line a case: what the account says of
steps in which nothing is new, and whether gradients and losses have the bits of the unsplit model. With RANK,
WORLD_SIZE and FILE set it is one rank of several, which meet over Gloo in that file.
"""

from __future__ import annotations

import copy
import json
import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

import fastpipe
from fastpipe.runtime import cuda_ipc, native, process_group, shared_memory
from fastpipe.testing import reference_step
from tests.runtime.devices import fake

NUM_STEPS = 3


class Case(NamedTuple):
    """A schedule and how it is run."""

    schedule: str
    num_ranks: int
    options: dict[str, Any]
    arguments: dict[str, Any]


CASES = {
    "one stage a rank": Case("1f1b", 3, {}, {}),
    "several stages a rank": Case("interleaved_1f1b", 2, {"stages_per_rank": 2}, {}),
    "split backward": Case("zbv", 2, {}, {}),
    "pairs": Case("dualpipev", 2, {}, {}),
    "pairs in order": Case("dualpipev", 2, {}, {"overlap": "never"}),
    "two routes": Case("dualpipe", 2, {}, {}),
    "one stage each of two": Case("1f1b", 2, {}, {}),
    "one rank": Case("dualpipev", 1, {}, {}),
    "late sends": Case("dualpipev", 2, {}, {"transport": "delayed"}),
}


class Block(nn.Module):
    """What blocks are made of, and an output that is not dense."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return ((output - target) ** 2).mean()


def run(account: Any, executor: str, case: Case) -> dict[str, Any]:
    torch.manual_seed(0)
    layers = [Block(8).to(fake.NAME) for _ in range(8)]
    unsplit = nn.Sequential(*copy.deepcopy(layers))
    x, target = torch.randn(16, 8).to(fake.NAME), torch.randn(16, 8).to(fake.NAME)
    arguments = dict(case.arguments)
    if arguments.get("transport") == "delayed":
        arguments["transport"] = fastpipe.runtime.loopback.Loopback(delay=0.001)
    options = dict(case.options)
    pipe = fastpipe.Pipeline(
        layers,
        case.schedule,
        8,
        loss_fn,
        num_ranks=case.num_ranks,
        executor=executor,
        stages_per_rank=options.pop("stages_per_rank", None),
        schedule_options=options,
        **arguments,
    )
    result = pipe.step(x, target=target)  # what is new is announced, and may wait
    reference = reference_step(unsplit, (x, target), pipe.schedule, loss_fn)
    expected = {name: parameter.grad for name, parameter in unsplit.named_parameters()}
    same = [torch.equal(p.grad.cpu(), expected[name].cpu()) for name, p in pipe.named_parameters()]
    same.append(torch.equal(result.loss.cpu(), reference.loss.cpu()))
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    account.reset()
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        result = pipe.step(x, target=target)
        optimizer.step()
    races, waits = account.races(), account.host_waits()
    assert result.loss.device.type == "cpu"
    streams, events = account.num_streams(), account.num_events()
    return {
        "same": all(same),
        "races": races,
        "waits": waits,
        "waits to read the loss": sum(account.host_waits().values()) - sum(waits.values()),
        "streams": streams,
        "events": events,
        "pairs": pipe.describe().rpartition("pairs")[2],
        "transport": pipe.transport.describe(),
    }


def meet(account: Any) -> None:
    """Join the other ranks; the pipelines' groups then take tensors of the fake device as NCCL would, and the device
    has a copy engine."""
    dist.init_process_group(
        "gloo", f"file://{os.environ['FILE']}", rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"])
    )
    make = process_group.make_group

    def make_group(*arguments: Any) -> Any:
        group = make(*arguments)
        account.add_device(group)
        return group

    process_group.make_group = shared_memory.make_group = make_group
    if native.load() is not None:
        account.bind_engine()
        cuda_ipc.ENGINES[fake.NAME] = lambda runtime, device: account.Engine()


def main() -> None:
    library, executor, *names = sys.argv[1:]
    account = fake.load(Path(library))
    if "RANK" in os.environ:
        meet(account)
    for name in names or CASES:
        print(json.dumps(run(account, executor, CASES[name])), flush=True)


if __name__ == "__main__":
    main()
