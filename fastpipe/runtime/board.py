"""Board: the meeting of processes of one host, through memory that all of them map.

Every process has a board, on which it alone writes and which all others read; who waits sleeps on a futex. It is C++
(csrc/core/shared_memory_exchange.h); this module says what is written, and what is wrong when nobody answers.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from typing import Any

from fastpipe.runtime import native
from fastpipe.runtime.control import Reply
from fastpipe.runtime.failure import DIED, Failure, LostError, first_line
from fastpipe.runtime.host import Crowd
from fastpipe.runtime.meeting import Deadline, Lost, Meeting

_SLICE_SECONDS = 0.1
"""After which Python is asked whether it has been interrupted, and who is lost."""


class Board(Meeting):
    """Through shared memory; `offer` and `connect` before the first exchange.

    Args:
        rank: this process.
        size: how many there are.
        timeout: seconds to wait for the others.
        crowd: the ranks of this host.
        lost: see `Control.lost`.
    """

    def __init__(self, rank: int, size: int, timeout: float, crowd: Crowd, lost: Lost) -> None:
        super().__init__(rank, size, timeout)
        self._lost = lost
        self._crowd = crowd
        self._native: Any = None

    def offer(self) -> Reply:
        """Where this process's board is, or why there is none."""
        runtime: Any = native.load()
        if runtime is None:
            return {"no_board": native.native_status()}
        try:
            self._native = runtime.SharedMemoryExchange(self.rank, self.size)
        except RuntimeError as error:
            return {"no_board": first_line(error)}
        return {"board": self._native.address()}

    def connect(self, offers: Sequence[Reply]) -> str:
        """Open what the others offer; why it cannot be, or nothing."""
        for rank, offer in enumerate(offers):
            if offer["host"] != offers[0]["host"] or not offer["host"]:
                return "the processes are not all on one host"
            if "no_board" in offer:
                return f"rank {rank}: {offer['no_board']}"
        try:
            for rank, offer in enumerate(offers):
                if rank != self.rank:
                    self._native.connect(rank, *offer["board"])
        except RuntimeError as error:
            return first_line(error)
        return ""

    def look_around(self) -> None:
        """Wait as it fits a host with so many ranks; when pipelines beside this one have been built."""
        with contextlib.suppress(RuntimeError):  # a store that is gone is others' to tell
            self._native.share_host(self._crowd.count())

    def exchange(self, step: int, phase: str, message: Reply) -> list[Reply]:
        """Every message begins with the place that its process is at, which must be the same everywhere."""
        place = f"{phase} of step {step}"
        self._native.post(f"{place}\n{json.dumps(message)}".encode())
        try:
            self._wait(step, phase)
            return [self._read(rank, place, text) for rank, text in enumerate(self._native.messages())]
        except RuntimeError as error:
            raise LostError(Failure(None, first_line(error), dead=True)) from error

    def _wait(self, step: int, phase: str) -> None:
        deadline = Deadline(self)
        while not self._native.wait(min(self.timeout, _SLICE_SECONDS)):
            failure = self._lost(self._native.missing())
            if failure is not None and self._native.missing():
                raise LostError(failure)
            if missing := deadline.passed(self._native.missing):
                raise self.late(missing, step, phase)

    def _read(self, rank: int, place: str, text: bytes | None) -> Reply:
        if text is None:
            raise LostError(Failure(rank, DIED, dead=True))
        found, _, content = text.decode().partition("\n")
        if found != place:
            raise LostError(
                Failure(
                    rank,
                    f"rank {rank} did not come to the {place}: it is at the {found}; call step and eval_step on every "
                    "rank",
                    dead=True,
                )
            )
        reply: Reply = json.loads(content)
        return reply
