"""Executor: runs one rank's program. The interface, and the choice between "auto", "native" and "python"."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

from fastpipe.program import Program
from fastpipe.runtime import native
from fastpipe.runtime.pairs import IN_ORDER, PairCounts
from fastpipe.runtime.stage import Stage
from fastpipe.runtime.transport import Transport

Seconds = npt.NDArray[np.float64]
OnFailure = Callable[[int, BaseException], None]
"""Called at once, with the position in the program and the exception, before the rank goes on draining."""


class Drained(Exception):  # noqa: N818 - not an error of its own
    """A step was drained on this rank because it failed on another."""


class Executor(ABC):
    """Runs the program of one rank, step by step.

    Args:
        program: the program of all ranks.
        rank: which one this is.
        stages: the stages of this rank, by index.
        transport: how it exchanges tensors with the others.
        on_failure: called when something fails here.
        timeout: seconds to wait for a peer.
        num_threads: intra-op threads, the same on every rank.
        pairs: how pairs of a forward and a backward are run; see `fastpipe.runtime.pairs`.
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
        pairs: str = IN_ORDER,
    ) -> None:
        self.program = program
        self.rank = rank
        self.stages = stages
        self.transport = transport
        self.on_failure = on_failure
        self.timeout = timeout
        self.num_threads = num_threads
        self.pairs = pairs
        self._prepare()

    @abstractmethod
    def _prepare(self) -> None:
        """Make what every step needs, once."""

    @abstractmethod
    def run(self, signature: int, announce: bool) -> tuple[Seconds, Seconds]:
        """Run one step.

        Args:
            signature: names the shapes of this step.
            announce: whether they are unknown yet, so that every message says what it is.

        Returns:
            The start and end of every instruction, on the monotonic clock.

        Raises:
            Drained: when the step failed elsewhere.
            BaseException: what was raised here, itself.
        """

    @abstractmethod
    def fail(self) -> None:
        """The step has failed elsewhere: drain. May be called from any thread."""

    @abstractmethod
    def pair_counts(self) -> PairCounts:
        """How many pairs went which way so far."""


def executor_class(choice: str) -> type[Executor]:
    """The class for "auto", "native" or "python".

    Raises:
        ValueError: for another choice, or "native" where the extension cannot be loaded; it says why.
    """
    if choice not in ("auto", "native", "python"):
        raise ValueError(f"executor = {choice!r}: use 'auto', 'native' or 'python'")
    if choice == "native" and native.load() is None:
        raise ValueError(f"executor = 'native': {native.native_status()} Use executor='auto' or 'python' instead.")
    if choice != "python" and native.load() is not None:
        from fastpipe.runtime.native_executor import NativeExecutor

        return NativeExecutor
    from fastpipe.runtime.python_executor import PythonExecutor

    return PythonExecutor
