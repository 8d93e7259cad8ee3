"""All ranks of a program on the native executor in this process, without the Pipeline."""

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

import fastpipe
from fastpipe.program import Program
from fastpipe.runtime.executor.executor import NativeExecutor
from fastpipe.runtime.stage.losses import StageWork
from fastpipe.runtime.stage.stage import Stage
from fastpipe.runtime.transport.transport import Loopback
from tests.patience import PATIENCE

Modules = Sequence[Callable[..., Any]]
Mode = Callable[[], AbstractContextManager[Any]]


def squares(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output * target).square().sum()


class Call(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


class NativeRanks:
    """The ranks as threads over a loopback; ``errors[rank]`` and ``reports[rank]`` are those of the last step."""

    def __init__(
        self, modules: Modules, program: Program, *, loss_fn: Any = squares, delay: float = 0.0, lanes: str = "directed"
    ) -> None:
        modules = [module if isinstance(module, nn.Module) else Call(module) for module in modules]
        self.program = program
        self.stages = [Stage(index, module, len(modules), loss_fn) for index, module in enumerate(modules)]
        transport = Loopback(lanes, delay)
        self.reports: dict[int, list[tuple[int, BaseException]]] = {}
        self.errors: dict[int, BaseException] = {}
        self.spans: dict[int, Any] = {}
        self.executors = [
            NativeExecutor(
                program,
                rank,
                {index: self.stages[index] for index in program.placement.stages_of(rank)},
                transport,
                on_failure=lambda position, error, rank=rank: self._failed(rank, position, error),
                timeout=PATIENCE,
                num_threads=torch.get_num_threads(),
            )
            for rank in range(program.num_ranks)
        ]

    def step(
        self, inputs: Sequence[Any], targets: Any, *, announce: bool, mode: Mode = torch.enable_grad, **work: Any
    ) -> list[torch.Tensor]:
        """One step, in every thread under ``mode()``; the losses. ``inputs``: the arguments of each microbatch."""
        for stage in self.stages:
            stage.begin(StageWork(args=inputs if stage.is_first else None, targets=targets, **work))
        self.reports, self.errors = {rank: [] for rank in range(len(self.executors))}, {}
        threads = [
            threading.Thread(target=self._run, args=(rank, announce, mode)) for rank in range(len(self.executors))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        losses = self.stages[-1].work.losses
        return [losses[microbatch] for microbatch in sorted(losses)]

    def _run(self, rank: int, announce: bool, mode: Mode) -> None:
        try:
            with mode():
                self.spans[rank] = self.executors[rank].run(1, announce)
        except BaseException as error:
            self.errors[rank] = error

    def _failed(self, rank: int, position: int, error: BaseException) -> None:
        self.reports[rank].append((position, error))
        for other, executor in enumerate(self.executors):
            if other != rank:
                executor.fail()

    def drained_but(self, rank: int) -> BaseException:
        """The error of a rank, when all the others have drained or were done already."""
        assert set(self.errors) == {rank}, self.errors
        return self.errors[rank]


def lowered(name: str, num_ranks: int, num_microbatches: int, **options: Any) -> Program:
    return fastpipe.lower(
        fastpipe.make_schedule(name, num_ranks=num_ranks, num_microbatches=num_microbatches, **options)
    )
