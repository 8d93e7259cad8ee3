"""Pairs of a forward and a backward that overlap: how they run, and the Python executor's way of running them.

In order: the forward, then the backward. Together: the backward in a helper thread, which needs the GIL for Python
functions in the graph only. Which one is faster depends on the machine and the stages, so it is measured, pair by pair;
both give the same bits. Stages that bring a method of their own for pairs are left to it (`fastpipe.runtime.fused`).
The native executor has the same in ``csrc/core/pairs.h``.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

import torch

from fastpipe.runtime.thread_state import ThreadState

IN_ORDER, TOGETHER, MEASURED = "in order", "together", "measured"
WAYS = (IN_ORDER, TOGETHER, MEASURED)
"""The numbers are those of the native executor."""
OVERLAPS = ("auto", "always", "never")
NUM_VOTES = 8
"""How many rounds decide which way pairs go; see `PairClock`."""
PERIODS = (7, 13, 29, 61)
"""Pairs from round to round, each for `NUM_VOTES` rounds; then the last one. Primes, so that rounds come to another
place in every step."""


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
    """Which way the pairs of two stages go.

    Two pairs in a row that go one way each are a round, and the faster way has its vote: what disturbs the machine for
    longer than a pair disturbs both. Which way comes first alternates. All other pairs go the way that had more of the
    last votes. Rounds come often to begin with and then seldom, but for ever, so that no verdict outlives its machine.
    """

    def __init__(self) -> None:
        self._num_rounds = 0
        self._place = 0  # of the next pair: the first two are the round's
        self._first = 0.0
        self._votes: deque[bool] = deque(maxlen=NUM_VOTES)
        self._best = False

    def next(self) -> bool:
        """Whether the next pair is to be run together."""
        together_first = self._num_rounds % 2 != 0
        if self._place == 0:
            return together_first
        return not together_first if self._place == 1 else self._best

    def note(self, seconds: float) -> None:
        """How long that one took."""
        if self._place == 0:
            self._first = seconds
        if self._place == 1:
            self._vote(seconds < self._first if self.next() else self._first < seconds)
        period = PERIODS[min(self._num_rounds // NUM_VOTES, len(PERIODS) - 1)]
        self._place = (self._place + 1) % period

    def _vote(self, together: bool) -> None:
        self._votes.append(together)
        self._num_rounds += 1
        if 2 * sum(self._votes) != len(self._votes):
            self._best = 2 * sum(self._votes) > len(self._votes)


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

    Attributes:
        counts: what became of them.
    """

    way: str
    num_threads: int
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
        begin = time.perf_counter()
        (self._together if clock.next() else self._in_order)(forward, backward)
        clock.note(time.perf_counter() - begin)

    def _in_order(self, forward: Callable[[], None], backward: Callable[[], None]) -> None:
        self.counts.in_order += 1
        forward()
        backward()

    def _together(self, forward: Callable[[], None], backward: Callable[[], None]) -> None:
        self.counts.together += 1
        if self._helper is None:
            # its thread ends when nothing refers to it any more
            self._helper = ThreadPoolExecutor(1, "fastpipe-helper", torch.set_num_threads, (self.num_threads,))
        running = self._helper.submit(_with_state, ThreadState(), backward)
        error: BaseException | None = None
        try:
            forward()
        except BaseException as found:  # raised below, when the helper is done
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
        except BaseException as found:  # returned, for the caller to raise
            interrupted = found
    return interrupted
