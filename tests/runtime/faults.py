"""A model with one layer that fails on purpose, for the tests of one process and of several."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fastpipe import Pipeline
from fastpipe.action import ActionKind
from fastpipe.runtime.stage.stage import Chain
from fastpipe.testing import Fault
from tests.runtime.checks import assert_same, reference_of, rows_for
from tests.runtime.models import CASES, DEVICE, Block

NEVER = -1
MOST_STAGES = 8


class AtCall(nn.Module):
    """A block that does something in one of its forwards.

    Args:
        act: what it does.
        at_call: in which forward, counted from 0.
    """

    def __init__(self, act: Callable[[], object], at_call: int) -> None:
        super().__init__()
        self.block = Block().to(DEVICE)
        self.act, self.at_call, self.calls = act, at_call, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls - 1 == self.at_call:
            self.act()
        out: torch.Tensor = self.block(x)
        return out


class Boom(Exception):  # noqa: N818 - as users name theirs, or do not
    """What the layer raises: a type that nobody else knows."""


@dataclass(frozen=True)
class Scenario:
    """Where it fails.

    Attributes:
        schedule: its name.
        stage: the stage, which may be negative to count from the last.
        microbatch: the microbatch.
        step: which step: the first announces shapes, the others know them.
        backward: whether the backward fails.
        executor: which one.
        num_microbatches: how many.
    """

    schedule: str
    stage: int
    microbatch: int
    step: int
    backward: bool
    executor: str
    num_microbatches: int = 8

    @property
    def at_call(self) -> int:
        """Which call of the layer, if every earlier step goes well and microbatches come in order."""
        return self.step * self.num_microbatches // self.num_routes + self.microbatch

    @property
    def num_routes(self) -> int:
        """Two ranks hold each stage of dualpipe, and each computes half of the microbatches."""
        return 2 if self.schedule == "dualpipe" else 1


class FaultyTraining:
    """A pipeline with one layer a stage, one of which fails once; and the unsplit model beside it."""

    def __init__(self, scenario: Scenario, **options: Any) -> None:
        self.scenario = scenario
        self.case = CASES["plain"]
        self._layers, plain = self.case.layers(MOST_STAGES), self.case.layers(MOST_STAGES)
        self.pipe = Pipeline(
            self._stage,
            scenario.schedule,
            scenario.num_microbatches,
            self.case.loss_fn,
            executor=scenario.executor,
            device=DEVICE,
            **options,
        )
        layers = [self._layer(plain[i], i, NEVER) for i in range(self.pipe.num_stages)]
        self.unsplit = Chain(dict(enumerate(layers)))
        self.batches = iter(self.case.batches(8, rows_for(scenario.num_microbatches)))

    @property
    def stage(self) -> int:
        """The stage that fails."""
        return self.scenario.stage % self.pipe.num_stages

    def _stage(self, index: int) -> nn.Module:
        num_stages = MOST_STAGES if self.scenario.schedule in ("dualpipev", "interleaved_1f1b", "zbv") else 4
        fails = index == self.scenario.stage % num_stages
        if self.scenario.num_routes > 1 and dist.is_initialized():
            fails = fails and dist.get_rank() == index
        at_call = self.scenario.at_call if fails else NEVER
        return self._layer(self._layers[index], index, at_call)

    def _layer(self, layer: nn.Module, index: int, at_call: int) -> nn.Module:
        return Fault(layer, at_call, Boom(f"stage {index} fails on purpose"), backward=self.scenario.backward)

    def good_step(self) -> None:
        """A step from zero gradients that must equal the unsplit model's."""
        for module in (self.unsplit, *self.pipe.stage_modules.values()):
            module.zero_grad()
        batch = next(self.batches)
        result = self.pipe.step(*batch.args, target=batch.target)
        reference = reference_of(self.unsplit, batch, self.pipe, self.case)
        assert_same(self.pipe, result, self.unsplit, reference)

    def bad_step(self) -> tuple[BaseException, float]:
        """What is raised, and after how many seconds."""
        batch = next(self.batches)
        start = time.perf_counter()
        try:
            self.pipe.step(*batch.args, target=batch.target)
        except BaseException as error:
            return error, time.perf_counter() - start
        raise AssertionError("nothing was raised")

    def places(self) -> set[tuple[int, str]]:
        """The rank and the text of the action that fails; of both if two ranks hold the stage."""
        kinds = {ActionKind.F} if not self.scenario.backward else {ActionKind.B, ActionKind.I}
        return {
            (rank, str(action))
            for rank, actions in enumerate(self.pipe.schedule)
            for action in actions
            for part in action.parts
            if part.kind in kinds and (part.stage, part.microbatch) == (self.stage, self.scenario.microbatch)
        }
