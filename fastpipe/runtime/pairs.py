"""Pairs of a forward and a backward that overlap: how they run, and the Python executor's way of running them.

In order: the forward, then the backward. Together: the backward in a helper thread, which needs the GIL for Python
functions in the graph only. Which one is faster depends on the machine and the stages, so it is measured, pair by pair;
both give the same bits. Stages that bring a method of their own for pairs are left to it (`fastpipe.runtime.fused`).
The native executor has the same in ``csrc/core/pairs.h``.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

import torch

from fastpipe.runtime.devices import CPU
from fastpipe.runtime.thread_state import ThreadState

IN_ORDER, TOGETHER, MEASURED = "in order", "together", "measured"
WAYS = (IN_ORDER, TOGETHER, MEASURED)
"""The numbers are those of the native executor."""
OVERLAPS = ("auto", "always", "never")
NUM_SAMPLES = 8
"""How many pairs of two stages are measured either way."""
FIRST_KEPT = 64
"""After how many pairs it is measured again for the first time, as the first pairs of all may be slow for reasons of
their own; then after twice as many, and so on, up to `NUM_KEPT`."""
NUM_KEPT = 4096
"""After how many pairs it is measured again, in the long run."""


@dataclass(frozen=True)
class PairPolicy:
    """How pairs are run, and why.

    Attributes:
        way: `IN_ORDER`, `TOGETHER` or `MEASURED`.
        reason: for the user.
    """

    way: str = IN_ORDER
    reason: str = ""


def pair_policy(
    overlap: str, num_ranks_here: int, num_cores: int, device: torch.device, several_streams: bool = False
) -> PairPolicy:
    """What ``overlap`` of the Pipeline means here.

    Args:
        overlap: "auto", "always" or "never".
        num_ranks_here: how many ranks share this host.
        num_cores: how many cores this process may use.
        device: what is computed on.
        several_streams: whether stages have streams of their own there.
    """
    if overlap != "auto":
        return PairPolicy(TOGETHER if overlap == "always" else IN_ORDER, f"overlap={overlap!r}")
    if several_streams:
        return PairPolicy(TOGETHER, f"each stage has its own stream on {device}, and a helper thread fills the other's")
    if device.type != "cpu":
        return PairPolicy(IN_ORDER, f"all stages share a stream on {device}")
    if num_cores <= num_ranks_here:
        return PairPolicy(IN_ORDER, f"{num_ranks_here} ranks on this host, {num_cores} cores: no core is free")
    return PairPolicy(MEASURED, f"{num_ranks_here} ranks on this host, {num_cores} cores: what is faster is measured")


def check_overlap(overlap: str) -> None:
    """Refuse an ``overlap`` that is none."""
    if overlap not in OVERLAPS:
        raise ValueError(f"overlap = {overlap!r}: use 'auto', 'always' or 'never'")


class PairClock:
    """Which way the pairs of two stages go: the first ones by turns, the next ones the way whose median was less."""

    def __init__(self) -> None:
        self._seconds: tuple[list[float], list[float]] = ([], [])
        self._best = False
        self._left = 0
        self._kept = FIRST_KEPT

    def next(self) -> bool:
        """Whether the next pair is to be run together."""
        if self._left:
            return self._best
        in_order, together = self._seconds
        return len(together) < len(in_order)

    def note(self, together: bool, seconds: float) -> None:
        """How long it took."""
        if self._left:
            self._left -= 1
            return
        self._seconds[together].append(seconds)
        if min(map(len, self._seconds)) == NUM_SAMPLES:
            in_order, overlapped = map(statistics.median, self._seconds)
            self._best = overlapped < in_order
            self._left = self._kept
            self._kept = min(2 * self._kept, NUM_KEPT)
            self._seconds = ([], [])


@dataclass
class PairCounts:
    """How many pairs went which way so far.

    Attributes:
        together: with the backward in the helper thread.
        in_order: one after the other.
        fused: by the modules' own method.
    """

    together: int = 0
    in_order: int = 0
    fused: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return self.together + self.in_order + self.fused


@dataclass
class Pairs:
    """Runs the pairs of one rank.

    Args:
        way: how.
        num_threads: intra-op threads; bits depend on them, so the helper has as many.
        device: what is computed on.

    Attributes:
        counts: what became of them.
    """

    way: str
    num_threads: int
    device: torch.device = CPU
    counts: PairCounts = field(default_factory=PairCounts)
    _clocks: dict[Hashable, PairClock] = field(default_factory=dict)
    _helper: ThreadPoolExecutor | None = None

    def run(self, forward: Callable[[], None], backward: Callable[[], None], stages: Hashable, may: bool) -> None:
        """Run a pair.

        Args:
            forward: its F.
            backward: its B.
            stages: which two stages it is of: their pairs are measured apart.
            may: whether the two may run at the same time.
        """
        if not may or self.way == IN_ORDER:
            return self._in_order(forward, backward)
        if self.way == TOGETHER:
            return self._together(forward, backward)
        clock = self._clocks.setdefault(stages, PairClock())
        together = clock.next()
        begin = time.perf_counter()
        (self._together if together else self._in_order)(forward, backward)
        clock.note(together, time.perf_counter() - begin)

    def _in_order(self, forward: Callable[[], None], backward: Callable[[], None]) -> None:
        self.counts.in_order += 1
        forward()
        backward()

    def _together(self, forward: Callable[[], None], backward: Callable[[], None]) -> None:
        self.counts.together += 1
        if self._helper is None:
            # its thread ends when nothing refers to it any more
            self._helper = ThreadPoolExecutor(1, "fastpipe-helper", torch.set_num_threads, (self.num_threads,))
        running = self._helper.submit(_with_state, ThreadState(self.device), backward)
        error: BaseException | None = None
        try:
            forward()
        except BaseException as found:
            error = found
        error = _waited(running) or error
        other = running.exception()
        if error is not None:
            raise error
        if other is not None:
            raise other


def _with_state(state: ThreadState, backward: Callable[[], None]) -> None:
    with state.applied():
        backward()


def _waited(running: Future[None]) -> BaseException | None:
    """Wait to the end, whatever interrupts: the backward works with what the caller would free."""
    interrupted: BaseException | None = None
    while not running.done():
        try:
            wait([running])
        except BaseException as found:
            interrupted = found
    return interrupted
