"""A thread that reports slow steps, and where the ranks were when a step failed.

An executor exposes only its position in the program. All processes know the programs of all ranks, so a position says
what a rank does, for which message of which rank it waits, and what it did before.

SIGUSR1 asks for a report at once, in processes that have no handler of their own for it.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from types import FrameType

from fastpipe.action import NONE, Action
from fastpipe.program import ChannelKind, Instruction, Op, Program
from fastpipe.runtime.common import logged, torch_private
from fastpipe.runtime.coordination import Control
from fastpipe.runtime.executor import LocalRanks

logger = logging.getLogger("fastpipe")
RECENT, RECORDED = 10, 100
"""The number of earlier instructions in a report, and in an error: there all before the last ten are folded."""
_PLACES_SECONDS = 1.0
"""How long other ranks have to write where they are, before a slow step is reported."""
_LONGEST_PERIOD = 25
_INTERVAL = 0.5
"""Seconds after which a thread looks again, at most: so long all ranks may take to see a signal."""
MAX_RANKS = 64
"""The number of ranks in a text."""
_COLLECTIVES = (Op.UNSHARD, Op.RESHARD, Op.REDUCE_GRAD)


def place_text(program: Program, rank: int, position: int, where: str = "", recorded: int = RECENT) -> str:
    """What a rank does at a position of its program, where in its Python, and what it did before."""
    instructions = program[rank]
    before = list(instructions)[max(0, position - recorded) : position]
    after = "".join(
        f"; before {those}: {text}"
        for those, text in (("that", _listed(before[-RECENT:])), ("those", folded(before[:-RECENT])))
        if text
    )
    if position >= len(instructions):
        return f"at the end of its program{after}"
    return f"at {position} of {len(instructions)}: {_doing(program, rank, instructions[position])}{where}{after}"


def _doing(program: Program, rank: int, it: Instruction) -> str:
    if it.channel >= 0:
        channel = program.channels[it.channel]
        kind, peer = channel.kind.name.lower(), channel.peer_of(rank)
        message = f"{kind} of microbatch {it.microbatch}"
        if it.op is Op.WAIT_RECV:
            whose = "input" if channel.kind is ChannelKind.ACTIVATION else "output gradient"
            return f"waits for rank {peer} to send the {whose} of stage {it.stage}, microbatch {it.microbatch}"
        if it.op is Op.WAIT_SEND:
            return f"waits for rank {peer} to receive the {message} of stage {it.stage}"
        return f"{it.op.name} of the {message}, stage {it.stage}, rank {peer} at the other end"
    if it.op in _COLLECTIVES:
        return f"{it.op.name} of stage {it.stage}, with its replicas"
    return f"computes {it.action}" if it.action is not None else it.op.name


def _listed(instructions: Sequence[Instruction]) -> str:
    return " ".join(str(it.action or f"{it.op.name}({it.stage},{it.microbatch})") for it in instructions)


def folded(instructions: Sequence[Instruction]) -> str:
    """Instructions as text in which ``[0F3 SEND(0,3)]x2`` stands for ``0F3 SEND(0,3) 0F4 SEND(0,4)``."""
    shapes = [(it.op, it.stage, it.action and _without_microbatch(it.action)) for it in instructions]
    numbers = [it.microbatch for it in instructions]
    parts, start = [], 0
    while start < len(instructions):

        def repeats(period: int, start: int = start) -> int:
            end = start + period
            while end < len(shapes) and (shapes[end], numbers[end]) == (
                shapes[end - period],
                numbers[end - period] + 1,
            ):
                end += 1
            return (end - start) // period

        # what covers most of them, and of those the shortest
        period = max(range(1, _LONGEST_PERIOD + 1), key=lambda period: (period * (repeats(period) - 1), -period))
        count = repeats(period)
        text = _listed(instructions[start : start + period])
        parts.append(f"[{text}]x{count}" if count > 1 else text)
        start += period * count
    return " ".join(parts)


def _without_microbatch(action: Action) -> tuple[int, ...]:
    pair = () if action.pair_stage == NONE else (action.pair_stage, action.pair_microbatch - action.microbatch)
    return action.kind, *pair


def places_text(program: Program, positions: Mapping[int, int]) -> str:
    """Where the ranks were when a step failed, but for those that had drained their programs by then."""
    within = [rank for rank in sorted(positions) if positions[rank] < len(program[rank])]
    lines = [f"rank {rank} was {place_text(program, rank, positions[rank], recorded=RECORDED)}" for rank in within]
    return f"fastpipe: when the step failed\n{_bounded(lines)}"


def _bounded(lines: list[str]) -> str:
    more = [f"and {len(lines) - MAX_RANKS} more ranks"] if len(lines) > MAX_RANKS else []
    return "\n".join(lines[:MAX_RANKS] + more)


class Watchdog:
    """Reports calls that take long. One thread, which sleeps; a call costs it two attributes.

    Every process whose call lasts longer than ``warn_after``, and every one that has been between calls for as long,
    writes into the store what it does. The first one within a call logs what all have written, in a mesh those of all
    pipelines, and again each time the duration has doubled.

    Attributes:
        phase: what the current call does now.
        close: ends the thread, in the process that started it; does not hold the watchdog.
    """

    def __init__(self, control: Control, ranks: LocalRanks, warn_after: float) -> None:
        self._control, self._ranks, self._warn_after = control, ranks, warn_after
        self.phase = ""
        self._step, self._thread_id = 0, 0
        self._since = time.monotonic()
        self._due = warn_after
        self._answered = _signals
        # neither holds this; the thread starts with the first call
        stop = self._stop = threading.Event()
        arguments = weakref.ref(self), stop, warn_after
        self._thread = threading.Thread(target=_watch, args=arguments, name="fastpipe-watchdog", daemon=True)
        self.close = partial(_end, stop, self._thread)

    def begin(self) -> None:
        """A call begins."""
        if self._warn_after != float("inf") and self._thread.ident is None:
            _handle_signal()
            self._thread.start()
        self._thread_id, self._step = threading.get_ident(), self._step + 1
        self._due, self.phase = self._warn_after, "agrees with the other ranks on the inputs"
        self._since = time.monotonic()

    def end(self) -> None:
        """The call ends."""
        self.phase, self._due = "", self._warn_after
        self._since = time.monotonic()

    def look(self) -> None:
        """Report if this call, or the time since the last one, is too long, or if asked to. Called by the thread."""
        since, phase, step = self._since, self.phase, self._step
        seconds, signals = time.monotonic() - since, _signals
        asked, self._answered = self._answered != signals, signals
        if seconds < self._due and not asked:
            return
        if seconds >= self._due:
            self._due = 2 * seconds
        text = self._text()
        self._control.put_place(step, bool(phase), text)
        if asked and not phase:
            logger.warning("%s %s", self._control.name_of(self._control.number), text)
        others_need = _PLACES_SECONDS if asked else min(_PLACES_SECONDS, self._warn_after / 4)
        if not phase or self._stop.wait(others_need) or since != self._since:
            return
        first, lines = self._report("")
        if first == self._control.number:
            logger.warning(
                "call %d of the pipeline has taken %.0f s:\n%s", step, time.monotonic() - since, _bounded(lines)
            )

    def last_report(self) -> str:
        """The report for the error that ends the pipeline."""
        failed = self._ranks.failed_at
        places = (place_text(program, rank, position, recorded=RECORDED) for rank, program, position in failed)
        text = "; ".join(f"was {place}" for place in places)
        self._control.put_place(self._step, True, text or self._text())
        _, lines = self._report(text)
        return f"fastpipe: when the pipeline ended\n{_bounded(lines)}"

    def _report(self, text: str) -> tuple[int, list[str]]:
        """The first process that has said that it is within this call, and a line for each.

        Args:
            text: what this process does, if it is not what `_text` says.
        """
        places = [
            f"rank {rank} is {place_text(program, rank, position)}" for rank, program, position in self._running()
        ]
        if len(places) > 1:  # threads of this process, which is the only one
            return 0, places
        own, found = self._control.number, self._control.places()
        lines, first = [], own
        for number in range(self._control.num_processes):
            step, is_active, said = found.get(number, (-2, False, ""))
            if number == own:
                said = text or self._text()
            elif not found:
                said = "is not known: the store does not answer"
            elif step != (self._step if is_active else self._step - 1):
                said = "has not reported: it is stopped or dead, or has just begun this step"
            elif is_active:
                first = min(first, number)
            lines.append(f"{self._control.name_of(number)} {said}")
        return first, lines

    def _running(self) -> list[tuple[int, Program, int]]:
        """The local ranks in the midst of a program."""
        return [(rank, program, at) for rank, program, at in self._ranks.places() if at < len(program[rank])]

    def _text(self) -> str:
        """What this process does now."""
        seconds = time.monotonic() - self._since
        # the error that this thread raises itself shows its lines
        line = "" if threading.get_ident() == self._thread_id else torch_private.line_of_thread(self._thread_id)
        where = line and f" ({line})"
        if not self.phase:
            return f"has been between two steps for {seconds:.0f} s{where}"
        for rank, program, position in self._running():
            return f"is {place_text(program, rank, position, where)}"
        return f"{self.phase}, for {seconds:.0f} s{where}"


_signals = 0
"""The number of SIGUSR1 that were seen. No event: a handler may run within itself, and would wait for its own lock."""


def _on_signal(number: int, frame: FrameType | None) -> None:
    global _signals
    _signals += 1


def _handle_signal() -> None:
    """Have SIGUSR1 ask for a report from now on, unless the application uses it.

    It stays after the last pipeline, which any thread may drop, and only the main thread can set handlers.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and not torch_private.handles_signal(signal.SIGUSR1):
        signal.signal(signal.SIGUSR1, _on_signal)


def _end(stop: threading.Event, thread: threading.Thread) -> None:
    stop.set()
    if thread.ident is not None and thread is not threading.current_thread():
        thread.join(timeout=2)


def _watch(watchdog: weakref.ref[Watchdog], stop: threading.Event, warn_after: float) -> None:
    while not stop.wait(min(warn_after / 4, _INTERVAL)):
        own = watchdog()
        if own is None:
            return
        with logged("to report a long step"):
            own.look()
        del own
