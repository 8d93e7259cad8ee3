"""Microbatches of a stream that are under way: how they go on from window to window, so that no stage runs dry.

A window is a forward-only step. Were each of its microbatches to go through all stages, the last stages would be idle
when it begins and the first ones when it ends. So the newest microbatch of a window goes through the first stage alone,
the one before it through two, and so on: a staircase. In the next window each goes on where it stopped. Then every
stage computes as many microbatches in every window. A stage that has no part in a microbatch of this window hands on a
stand-in, so programs and their proofs are those of any other step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch

from fastpipe.runtime.tensors import Tensors


@dataclass
class Window:
    """Which stages compute which microbatches of one window.

    Attributes:
        starts: by microbatch, the first stage that computes it.
        stops: by microbatch, the stage that is the first one not to.
        given: by stage, what it kept in the last window: the input of the microbatch that starts there.
        stand_in: what is handed on of a microbatch that a stage does not compute.
        kept: out: by stage, the input of the microbatch that stopped before it.
    """

    starts: tuple[int, ...]
    stops: tuple[int, ...]
    given: Mapping[int, Tensors]
    stand_in: Tensors
    kept: dict[int, Tensors] = field(default_factory=dict)

    def inputs(self, stage: int, microbatch: int, received: Tensors) -> Tensors | None:
        """What a stage computes a microbatch from; None where it has no part in it."""
        start, stop = self.starts[microbatch], self.stops[microbatch]
        if stage == stop:
            # what was received may lie in memory that is filled again
            self.kept[stage] = tuple(tensor.clone() for tensor in received)
        if not start <= stage < stop:
            return None
        return self.given[stage] if stage == start > 0 else received

    def computes(self, stage: int) -> bool:
        """Whether a stage has a part in any microbatch."""
        return any(start <= stage < stop for start, stop in zip(self.starts, self.stops, strict=True))

    @property
    def shape(self) -> tuple[Any, ...]:
        """What decides which messages are stand-ins."""
        return self.starts, self.stops


class Source:
    """What gives the microbatches of a stream, a window at a time.

    Args:
        items: the microbatches.
        size: how many a window takes.

    Attributes:
        ended: whether no more will come.
    """

    def __init__(self, items: Iterator[Any], size: int) -> None:
        self.ended = False
        self._items = items
        self._size = size
        self._error: Exception | None = None

    def take(self, *, hold_error: bool) -> list[Any]:
        """The next ones, fewer when it has ended.

        Args:
            hold_error: whether what it raises waits for the next call, as there are microbatches to go through first.
                Those that it gave in this call are such in any case.
        """
        taken: list[Any] = []
        if self._error is not None:
            raise self._error
        if self.ended:
            return taken
        try:
            for item in islice(self._items, self._size):
                taken.append(item)
        except Exception as error:
            if not taken and not hold_error:
                raise
            self._error = error
        self.ended = len(taken) < self._size
        return taken


class UnderWay:
    """The microbatches of one stream that have entered the first stage and not left the last one.

    Args:
        num_stages: how many stages they go through.
        keeps_full: whether they stop on their way at a window's end; otherwise each window runs empty.
        device: of the stages.

    Attributes:
        inputs: what they were at first, on ranks with the first stage: shapes between stages depend on it.
    """

    def __init__(self, num_stages: int, keeps_full: bool, device: torch.device) -> None:
        self.num_stages = num_stages
        self.keeps_full = keeps_full
        self.inputs: list[Any] = []
        self._reached: list[int] = []
        self._kept: Mapping[int, Tensors] = {}
        self._stand_in = (torch.zeros(1, device=device),)

    def __len__(self) -> int:
        return len(self._reached)

    def window(self, count: int, *, is_last: bool) -> Window:
        """The next window.

        Args:
            count: how many microbatches enter.
            is_last: whether none will enter after them, so that all go through.
        """
        starts = [*self._reached, *[0] * count]
        stops = [self.num_stages] * len(starts)
        if self.keeps_full and not is_last:
            stops = [min(self.num_stages, len(starts) - i) for i in range(len(starts))]
        return Window(tuple(starts), tuple(stops), self._kept, self._stand_in)

    def drop(self) -> None:
        """Nobody wants the outputs of those that are under way."""
        self.inputs, self._reached, self._kept = [], [], {}

    def after(self, window: Window, inputs: Sequence[Any]) -> int:
        """A window has run well.

        Args:
            window: which.
            inputs: of its microbatches, those that were under way among them; empty on ranks without the first stage.

        Returns:
            How many microbatches have left the last stage: the first ones.
        """
        done = sum(stop == self.num_stages for stop in window.stops)
        self._reached = list(window.stops[done:])
        self.inputs = list(inputs[done:])
        self._kept = window.kept
        return done
