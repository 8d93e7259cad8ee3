"""The same pipeline three times: fastpipe's, torch's own, and its compute alone; on one rank, one step a call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

import fastpipe
from fastpipe import Schedule

TORCH_NAMES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved_1f1b": "Interleaved1F1B",
    "looped_bfs": "LoopedBFS",
    "interleaved_zb": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble",
    "dualpipev": "DualPipeV",
}
"""The schedules that torch.distributed.pipelining has, too, and what it calls them."""


@dataclass
class Work:
    """What is trained, by one contender on one rank.

    Attributes:
        make_stage: called with a stage's index; gives the module. The same on every call but for the memory.
        inputs: the batch of the next step.
        targets: its targets.
        loss_fn: of the last stage's output and the target, of one microbatch.
        boundary: what one microbatch looks like between two stages.
    """

    make_stage: Callable[[int], nn.Module]
    inputs: Tensor
    targets: Tensor
    loss_fn: Callable[[Tensor, Tensor], Tensor]
    boundary: Tensor


def local_stages(schedule: Schedule, rank: int, work: Work) -> dict[int, nn.Module]:
    """A rank's stages."""
    return {stage: work.make_stage(stage) for stage in sorted(schedule.placement.stages_of(rank))}


def fastpipe_step(schedule: Schedule, rank: int, work: Work, **options: Any) -> Callable[[], Any]:
    """One step of a Pipeline; the processes are ranks."""
    stages = local_stages(schedule, rank, work)
    pipe = fastpipe.Pipeline(stages, schedule=schedule, loss_fn=work.loss_fn, merge=False, **options)
    step = pipe.eval_step if schedule.forward_only else pipe.step
    return lambda **more: step(work.inputs, target=work.targets, **more)


def torch_step(schedule: Schedule, rank: int, work: Work) -> Callable[[], list[Tensor]]:
    """One step of torch's schedule of the same name; gives the losses of the microbatches where the last stage is."""
    placement = schedule.placement
    stages = [
        PipelineStage(module, index, placement.num_stages, work.inputs.device, group=dist.group.WORLD)
        for index, module in local_stages(schedule, rank, work).items()
    ]
    if placement.num_ranks == 1:
        # torch 2.11 begins with a message to every neighbour, even to one on the same rank, which Gloo cannot send
        for stage in stages:
            stage._get_init_p2p_neighbors_ops = list  # type: ignore[method-assign,assignment]
    kind = get_schedule_class(TORCH_NAMES[schedule.name])
    given = stages[0] if issubclass(kind, PipelineScheduleSingle) else stages
    runner = kind(given, schedule.num_microbatches, loss_fn=work.loss_fn)
    is_first, is_last = any(stage.is_first for stage in stages), any(stage.is_last for stage in stages)

    def step() -> list[Tensor]:
        losses: list[Tensor] = []
        args = (work.inputs,) if is_first else ()
        kwargs = {"target": work.targets, "losses": losses} if is_last else {}
        runner.step(*args, return_outputs=False, **kwargs)
        return losses

    return step


class Alone:
    """A rank's actions in the schedule's order, in plain PyTorch, on tensors that nobody sent.

    I and W are one backward, where the schedule has I: the least for which plain PyTorch gives the same gradients.
    """

    def __init__(self, schedule: Schedule, rank: int, work: Work) -> None:
        self.work = work
        self.modules = local_stages(schedule, rank, work)
        self.last = schedule.placement.num_stages - 1
        self.count = schedule.num_microbatches
        self.args = work.inputs.chunk(self.count)
        self.targets = work.targets.chunk(self.count)
        self.actions = plain_actions(schedule, rank)
        self.outputs: dict[tuple[int, int], Tensor] = {}

    def __call__(self) -> None:
        """One step."""
        for kind, stage, microbatch in self.actions:
            if kind == "F":
                self.outputs[stage, microbatch] = self.forward(stage, microbatch)
            elif kind == "W":
                self.backward_weight(stage)
            else:
                backward = self.backward if kind == "B" else self.backward_input
                backward(stage, self.outputs.pop((stage, microbatch)))

    def forward(self, stage: int, microbatch: int) -> Tensor:
        given = self.args[microbatch] if stage == 0 else self.work.boundary.detach().requires_grad_()
        output = self.modules[stage](given)
        if stage == self.last:
            output = self.work.loss_fn(output, self.targets[microbatch]) / self.count
        return output

    def backward(self, stage: int, output: Tensor) -> None:
        torch.autograd.backward(output, None if stage == self.last else self.work.boundary)

    def backward_input(self, stage: int, output: Tensor) -> None:
        """All of the backward."""
        Alone.backward(self, stage, output)

    def backward_weight(self, stage: int) -> None:
        """Was done in I."""


def plain_actions(schedule: Schedule, rank: int) -> list[tuple[str, int, int]]:
    """F, B, I and W of a rank, in order; of a fused pair the forward first."""
    return [(part.kind.name, part.stage, part.microbatch) for action in schedule[rank] for part in action.parts]
