"""The native executor: C++ runs one rank's program and calls Python only for ``stage.run`` and, where used, the
caller's output gradients (``stage.losses.output_grads``), pairs in turns or by the modules' own method, the user's
contexts, and data-parallel collectives.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from fastpipe.action import NONE
from fastpipe.program import Op
from fastpipe.runtime import native
from fastpipe.runtime.common import Tensors
from fastpipe.runtime.executor.events import Check
from fastpipe.runtime.executor.executor import Executor, Seconds, last_backwards
from fastpipe.runtime.stage import WAYS, PairCounts, Pairs, Stage


class NativeExecutor(Executor):
    """Runs one rank's program in C++; see `Executor`.

    A run uses the calling thread's grad mode, autocast and inference mode.
    """

    is_native: ClassVar[bool] = True

    def _prepare(self) -> None:
        runtime: Any = native.load()
        if runtime is None:
            raise ValueError(f"executor = 'native': {native.native_status()} Use executor='auto' or 'python' instead.")
        columns = np.ascontiguousarray(self.program[self.rank].columns)
        channels = [tuple(map(int, channel)) for channel in self.program.channels]
        places = [(i, stage.is_first, stage.is_last, stage.fused_weight_grad) for i, stage in self.stages.items()]
        self._last_backwards = last_backwards(list(self.program[self.rank]))
        self._splits = bool((columns[0] == Op.I).any())
        self._pairs = Pairs(self.pairs, self.num_threads)
        endpoint = self.transport.native(runtime, self.program, self.rank, self.timeout)
        self._native = runtime.Executor(
            self.rank,
            columns,
            channels,
            places,
            endpoint,
            self.timeout,
            self.device,
            pairs=WAYS.index(self.pairs),
            streams=[self.streams[index] for index in self.stages] if self.streams else [],
        )

    def run(
        self, signature: int, announce: bool, trace: bool = False, drain: bool = False
    ) -> tuple[Seconds, Seconds] | None:
        """Run one step; see `Executor.run`."""
        # C++ keeps none of these between steps: a cycle through C++ is never collected
        calls = [
            (*_calls(stage), *self._fusing(stage), self._last_backwards.get(index, NONE), *self._around(stage))
            for index, stage in self.stages.items()
        ]
        spans = self._native.run(
            signature,
            announce,
            calls,
            self.on_failure,
            num_threads=self.num_threads,
            trace=trace,
            drain=drain,
            in_turns=self._pairs.in_turns,
        )
        if spans is None:
            return None
        if self._splits:
            self._note_deferred()
        start, end = spans
        return start, end

    def _fusing(self, stage: Stage) -> tuple[Any, Sequence[int]]:
        """The function that runs a pair by the modules' own method, and the stages whose backwards it can run."""
        if not stage.fuses:
            return None, ()

        def fuse(
            microbatch: int, inputs: Tensors, pair: int, pair_microbatch: int, roots: Tensors, grads: Any
        ) -> Tensors:
            return stage.run_fused(microbatch, inputs, self.stages[pair], roots, grads)

        return fuse, [index for index, pair in self.stages.items() if stage.fuses_with(pair)]

    def _around(self, stage: Stage) -> tuple[Any, tuple[int, tuple[int, int, int]], bool]:
        """The context of its backwards, the step's part of `fastpipe.current`, and whether its pairs may alternate."""
        return stage.context.around, (stage.context.step, self.last[stage.index]), stage.exchanges

    @property
    def checks(self) -> Sequence[Check]:
        """See `Executor.checks`."""
        return (self._native.check,)

    def pair_counts(self) -> PairCounts:
        """See `Executor.pair_counts`."""
        return PairCounts(*self._native.pair_counts())

    def _note_deferred(self) -> None:
        for index, leaves, held in self._native.deferred():
            self.stages[index].deferred = frozenset(leaves)
            self.stages[index].has_split = True
            self.stages[index].peak_held_bytes = held

    def position(self) -> int:
        """See `Executor.position`."""
        return int(self._native.position())

    def fail(self) -> None:
        """See `Executor.fail`."""
        self._native.fail()

    def forget_failure(self) -> None:
        """See `Executor.forget_failure`."""
        self._native.forget_failure()


def _calls(stage: Stage) -> tuple[Any, ...]:
    """The functions of a stage that C++ calls: run, output_grads, random, run_collective, fold; None if not needed."""
    parallel = stage.parallel
    return (
        stage.run,
        stage.losses.output_grads if stage.losses.has_output_grads else None,
        None if stage.random is None else stage.random.guard,
        None if parallel is None else stage.run_collective,
        parallel.fold if parallel is not None and parallel.folds else None,
    )
