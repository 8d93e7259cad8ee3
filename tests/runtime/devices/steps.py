"""Steps of pipelines on the fake device, in a process of their own: torch's engine counts the devices once.

``python tests/runtime/devices/steps.py LIBRARY CASE...`` prints one JSON line a case: what the account says of
steps in which nothing is new, and whether gradients and losses have the bits of the unsplit model. Under torchrun it is
one rank of several, which meet over Gloo.
"""

import contextlib
import copy
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

import fastpipe
from fastpipe.action import ActionKind
from fastpipe.dependencies import needs, produces
from fastpipe.machine import batches
from fastpipe.program import Op
from fastpipe.runtime import native
from fastpipe.runtime.executor import cuda_graph as recording
from fastpipe.runtime.stage.context import Current
from fastpipe.runtime.transport import groups as own_groups
from fastpipe.runtime.transport import shared_memory as cuda_ipc
from fastpipe.testing import reference_step
from tests.runtime.devices import fake

NUM_STEPS = 3
NUM_LAYERS = 8
NUM_WEIGHTS = 2 * NUM_LAYERS
SECONDS_PER_OPERATION = 1e-4  # in the step that is traced


class Case(NamedTuple):
    """A schedule and how it is run."""

    schedule: str
    num_ranks: int
    options: dict[str, Any]
    arguments: dict[str, Any]


CASES = {
    "one stage per rank": Case("1f1b", 3, {}, {}),
    "several stages per rank": Case("interleaved_1f1b", 2, {"stages_per_rank": 2}, {}),
    "split backward": Case("zbv", 2, {}, {}),
    "pairs": Case("dualpipev", 2, {}, {}),
    "pairs in order": Case("dualpipev", 2, {}, {"overlap": "never"}),
    "two routes": Case("dualpipe", 2, {}, {}),
    "one stage each of two": Case("1f1b", 2, {}, {}),
    "one rank": Case("dualpipev", 1, {}, {}),
    "late sends": Case("dualpipev", 2, {}, {"transport": "delayed"}),
    "trees": Case("interleaved_1f1b", 2, {"stages_per_rank": 2}, {"trees": True}),
    "pairs by their own method": Case("dualpipev", 2, {}, {"own": True}),
    "contexts": Case("dualpipev", 2, {}, {"contexts": True}),
    "contexts of split backwards": Case("zbv", 2, {}, {"contexts": True}),
}
REPLICAS = {
    "replicas": Case("dualpipev", 1, {}, {"replicas": True}),
    "replicas of split backwards": Case("zbv", 1, {}, {"replicas": True}),
}
"""Of several processes, each of which is a whole pipeline."""
RECORDED = {
    "one rank, recorded": Case("dualpipev", 1, {}, {}),
    "one rank, split, recorded": Case("zbv", 1, {}, {}),
    "one stage each, recorded": Case("1f1b", 2, {}, {}),
    "two ranks, recorded": Case("interleaved_1f1b", 2, {"stages_per_rank": 2}, {}),
    "two ranks, split, recorded": Case("zbv", 2, {}, {}),
    "pairs on two ranks, recorded": Case("dualpipev", 2, {}, {}),
    "a host that waits": Case("interleaved_1f1b", 1, {"stages_per_rank": 2}, {"block": "Waiting"}),
    "a host that waits, beside another": Case("1f1b", 2, {}, {"block": "Refused"}),
}
"""Whose later steps are recorded and replayed."""


class Block(nn.Module):
    """What blocks are made of, and an output that is not dense."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Tree(Block):
    """The same, in a dict with other things."""

    def forward(self, given: Any) -> Any:
        y = super().forward(given["y"] if isinstance(given, dict) else given)
        return {"y": y, "more": (None, [y.detach()])}


class Asking(Block):
    """The same, and a hook, which torch's own thread for the device calls, asks what is current."""

    told: ClassVar[list[Current | None]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        if y.requires_grad:
            y.register_hook(lambda grad: self.told.append(fastpipe.current()))
        return y


class Own(nn.Sequential):
    """Two blocks as a layer written for DualPipe, whose method looks at what it is given."""

    def __init__(self, width: int) -> None:
        super().__init__(Block(width), Block(width))

    @classmethod
    def overlapped_forward_backward(
        cls, module0: Any, inputs0: Any, criterion0: Any, labels0: Any, module1: Any, loss1: Any, *theirs: Any
    ) -> Any:
        outputs0 = [module0(*inputs0)]
        loss0 = None if criterion0 is None else criterion0(*outputs0, *labels0)
        roots, grads = theirs if loss1 is None else ((loss1,), None)
        for root in roots:
            root.detach().mean()
        torch.autograd.backward(roots, grads)
        return outputs0, loss0


class Waiting(Block):
    """The same, and the host reads a number on the way."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert x.detach().sum().item() < 1e9
        return super().forward(x)


class Refused(Block):
    """As with CUDA: what makes the host wait raises while a step is recorded."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if FakeGraph.is_open:
            raise RuntimeError("the host waits")
        return super().forward(x)


def loss_fn(output: Any, target: torch.Tensor) -> torch.Tensor:
    output = output["y"] if isinstance(output, dict) else output
    return ((output - target) ** 2).mean()


class Worker:
    """Contexts that work on the device themselves, before and after an action: on one tensor for every stage, so it
    shows when they are not on the stream of its actions."""

    def __init__(self) -> None:
        self.counts = [torch.zeros(4).to(fake.NAME) for _ in range(NUM_LAYERS)]

    @contextlib.contextmanager
    def __call__(self, action: Current) -> Iterator[None]:
        self.counts[action.stage].add_(1)
        yield
        self.counts[action.stage].mul_(0.5)


def arguments_of(case: Case) -> dict[str, Any]:
    arguments = dict(case.arguments)
    if arguments.get("transport") == "delayed":
        arguments["transport"] = fastpipe.runtime.transport.transport.Loopback(delay=0.001)
    for name in ("trees", "own"):
        arguments.pop(name, None)
    if arguments.pop("contexts", False):
        arguments["forward_context"] = arguments["backward_context"] = Worker()
    if arguments.pop("replicas", False):
        own = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
        arguments |= {"group": own, "data_parallel": dist.new_group()}
    return arguments


def run_recorded(account: Any, case: Case) -> dict[str, Any]:
    """Steps on other numbers every time, beside those of the unsplit model; the last one adds to the gradients."""
    torch.manual_seed(0)
    block = {"Waiting": Waiting, "Refused": Refused}.get(case.arguments.get("block", ""), Block)
    layers = [block(8).to(fake.NAME) for _ in range(NUM_LAYERS)]
    unsplit = nn.Sequential(*copy.deepcopy(layers))
    pipe = fastpipe.Pipeline(
        layers, case.schedule, 8, loss_fn, num_ranks=case.num_ranks, cuda_graph=True, **case.options
    )
    both = [pipe, unsplit]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in both]
    losses, expected, different = [], [], []
    for step in range(7):
        x, target = (torch.randn(16, 8).to(fake.NAME) for _ in range(2))
        for parameter in list(pipe.parameters())[::2] if step == 5 else ():
            parameter.grad = torch.zeros_like(parameter)
        result = pipe.step(x, target=target)
        reference = reference_step(unsplit, (x, target), pipe.schedule, loss_fn)
        losses.append(result.loss)  # read when later steps have run
        expected.append(reference.loss.cpu())
        wanted = dict(unsplit.named_parameters())
        different += [name for name, p in pipe.named_parameters() if not same(p.grad, wanted[name].grad, step)]
        for optimizer in optimizers if step < 5 else ():
            optimizer.step()
            optimizer.zero_grad()
    same_losses = [torch.equal(loss.cpu(), other) for loss, other in zip(losses, expected, strict=True)]
    (text,) = [line for line in pipe.describe().splitlines() if line.startswith("cuda graph")]
    return {"same": all(same_losses), "different": different, "faults": account.faults(), "text": text}


def same(grad: torch.Tensor, other: torch.Tensor, step: int) -> bool:
    """To the last bit; but what a replay adds to gradients that are there is added in one piece."""
    return torch.equal(grad.cpu(), other.cpu()) if step < 6 else torch.allclose(grad.cpu(), other.cpu())


class FakeGraph:
    """A recording of the fake device."""

    is_open = False

    def __init__(self, account: Any) -> None:
        self._account, self._tape = account, account.Recording()

    def record(self, stream: torch.Stream, work: Callable[[], None]) -> Callable[[], None]:
        assert torch.accelerator.current_stream() == stream
        before = self._account.faults()
        self._tape.begin()
        FakeGraph.is_open = True
        try:
            work()
        finally:
            FakeGraph.is_open = False
            self._tape.end()
        if self._account.faults() != before:
            raise RuntimeError(self._account.faults()[-1])
        return self._tape.replay


def average(gradients: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Over the processes, as their replicas average."""
    for gradient in gradients.values():
        dist.all_reduce(gradient.div_(dist.get_world_size()))
    return gradients


def look_at(timeline: fastpipe.Timeline) -> dict[str, float]:
    """By how many seconds an action starts before what it waits for has ended, at most, and how long an F lasts, at
    least; without pairs, whose span is that of two actions."""
    alone = {span.instruction.action: span for span in timeline if span.instruction.op in (Op.F, Op.B, Op.I, Op.W)}
    ends = {
        (event, action.stage, action.microbatch): span.end
        for action, span in alone.items()
        for event in produces(action.kind)
    }
    early = [
        ends.get((event, stage, action.microbatch), span.start) - span.start
        for action, span in alone.items()
        for event, stage in needs(action.kind, action.stage, timeline.program.num_stages)
    ]
    return {
        "early": max(early),
        "forward": min(span.end - span.start for action, span in alone.items() if action.kind is ActionKind.F),
    }


def run(account: Any, case: Case) -> dict[str, Any]:
    torch.manual_seed(0)
    kinds: dict[str, type[nn.Module]] = {"trees": Tree, "contexts": Asking, "own": Own}
    block = next((kind for name, kind in kinds.items() if name in case.arguments), Block)
    layers = [block(8).to(fake.NAME) for _ in range(NUM_LAYERS // (2 if block is Own else 1))]
    unsplit = nn.Sequential(*copy.deepcopy(layers))
    replicated = "replicas" in case.arguments
    torch.manual_seed(dist.get_rank() if replicated else 0)
    x, target = torch.randn(16, 8).to(fake.NAME), torch.randn(16, 8).to(fake.NAME)
    arguments, options = arguments_of(case), dict(case.options)
    pipe = fastpipe.Pipeline(
        layers,
        case.schedule,
        8,
        loss_fn,
        num_ranks=case.num_ranks,
        stages_per_rank=options.pop("stages_per_rank", None),
        schedule_options=options,
        **arguments,
    )
    result = pipe.step(x, target=target)  # what is new is announced, and may wait
    reference = reference_step(unsplit, (x, target), pipe.schedule, loss_fn)
    expected = {name: parameter.grad.cpu() for name, parameter in unsplit.named_parameters()}
    expected = average(expected) if replicated else expected
    same = [torch.equal(p.grad.cpu(), expected[name]) for name, p in pipe.named_parameters()]
    same.append(torch.equal(result.loss.cpu(), reference.loss.cpu()))
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    for _ in range(3):
        pipe.eval_step(x)  # in the first steps ranks compare their whole batches, for which they wait
    account.reset()
    Asking.told.clear()  # the unsplit model's
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        result = pipe.step(x, target=target)
        optimizer.step()
    races, waits, events = account.races(), account.host_waits(), account.num_events()
    operations, program = account.operations(), pipe._steps.programs.program(8, forward_only=False)
    assert result.loss.device.type == "cpu"
    pipe.eval_step(x)  # another program
    streams = account.num_streams()
    waits_to_read = sum(account.host_waits().values()) - sum(waits.values())
    account.set_seconds_per_operation(SECONDS_PER_OPERATION)
    timeline = pipe.step(x, target=target, trace=True).timeline
    account.set_seconds_per_operation(0)
    return {
        "same": all(same),
        "races": races,
        "waits": waits,
        "waits to read the loss": waits_to_read,
        "streams": streams,
        "events": events,
        "told": Asking.told,
        "pairs": pipe.describe().rpartition("pairs")[2],
        "transport": pipe.transport.describe(),
        "operations": sorted(operations),
        "proved": sorted(NUM_STEPS * [len(it) for batch in batches(program)[pipe.rank or 0] for it in batch]),
        "times": look_at(timeline),
        "splits": pipe.schedule.splits_backward,
        "deferred": sum(stage.waits(p) for stage in pipe._steps.stages for p in stage.module.parameters()),
    }


def meet(account: Any) -> None:
    """Join the other ranks; the pipelines' groups then take tensors of the fake device as NCCL would, and the device
    has a copy engine."""
    dist.init_process_group("gloo")

    def on_device(make: Any) -> Any:
        def make_group(*arguments: Any) -> Any:
            group = make(*arguments)
            if isinstance(group, dist.ProcessGroup):  # and not of others
                account.add_device(group)
            return group

        return make_group

    own_groups.make_group, dist.new_group = on_device(own_groups.make_group), on_device(dist.new_group)
    if native.load() is not None:
        account.bind_engine()
        cuda_ipc.ENGINES[fake.NAME] = lambda runtime, device: account.Engine()


def main() -> None:
    library, *names = sys.argv[1:]
    account = fake.load(Path(library))
    if "RANK" in os.environ:
        meet(account)
    recording.RECORDERS[fake.NAME] = (
        lambda device: torch.Stream(device=device),
        lambda stream, work: FakeGraph(account).record(stream, work),
    )
    for name in names or CASES:
        found = run_recorded(account, RECORDED[name]) if name in RECORDED else run(account, (CASES | REPLICAS)[name])
        found |= {"case": name, "rank": int(os.environ.get("RANK", 0))}
        sys.stdout.write(json.dumps(found) + "\n")  # at once, as other ranks write, too


if __name__ == "__main__":
    main()
