"""The native executor: hands one rank's program, stages and transport to C++, which runs it without asking Python
anything but ``stage.run`` and, where the caller gave the gradients of the outputs, ``stage.output_grads``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from fastpipe.program import Op, Program
from fastpipe.runtime import native
from fastpipe.runtime.executor import Drained, Executor, OnFailure, Seconds
from fastpipe.runtime.stage import Stage
from fastpipe.runtime.transport import Transport


class NativeExecutor(Executor):
    """Runs one rank's program in C++; see `Executor`.

    A run follows the calling thread's grad mode, autocast and inference mode, as torch itself does.
    """

    def __init__(
        self,
        program: Program,
        rank: int,
        stages: Mapping[int, Stage],
        transport: Transport,
        *,
        on_failure: OnFailure,
        timeout: float,
        num_threads: int,
    ) -> None:
        super().__init__(
            program, rank, stages, transport, on_failure=on_failure, timeout=timeout, num_threads=num_threads
        )
        runtime: Any = native.load()
        if runtime is None:
            raise ValueError(f"executor = 'native': {native.native_status()}")
        columns = np.ascontiguousarray(program[rank].columns)
        channels = [tuple(map(int, channel)) for channel in program.channels]
        places = [(index, stage.is_first, stage.is_last) for index, stage in stages.items()]
        self._splits = bool((columns[0] == Op.I).any())
        endpoint = transport.native(runtime, program, rank, timeout)
        self._native = runtime.Executor(rank, columns, channels, places, endpoint, timeout)

    def run(self, signature: int, announce: bool) -> tuple[Seconds, Seconds]:
        """Run one step; see `Executor.run`."""
        # C++ keeps none of these between steps: a cycle through it could never be collected
        calls = [(stage.run, stage.output_grads if stage.has_output_grads else None) for stage in self.stages.values()]
        spans = self._native.run(signature, announce, calls, self.on_failure, num_threads=self.num_threads)
        if spans is None:
            raise Drained
        if self._splits:
            self._note_deferred()
        start, end = spans
        return start, end

    def _note_deferred(self) -> None:
        for index, leaves, held in self._native.deferred():
            self.stages[index].deferred = frozenset(leaves)
            self.stages[index].peak_held_bytes = held

    def fail(self) -> None:
        """Drain from the next instruction on."""
        self._native.fail()
