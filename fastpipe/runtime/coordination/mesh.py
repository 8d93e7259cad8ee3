"""Control of one pipeline of several that share a mesh, whose stages meet in collectives of the modules.

A tensor-parallel stage, for example, is in one pipeline for every rank of the mesh's ``"tp"`` dimension. If one of them
fails, the others wait for it within a stage, where nothing can be drained. So these pipelines begin and end their steps
together, and share the watcher: a failure within a step is fatal for all of them. A rank that learns of it leaves the
mesh's groups (`fastpipe.runtime.transport.MeshGroups`).

`Processes` does the work for all processes of these pipelines, and numbers them through. Here the numbers become
ranks of a pipeline, and replies of other pipelines are dropped.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

from fastpipe.runtime.common import SHORT_EXIT_SECONDS, Failure, FailureError, pauses
from fastpipe.runtime.coordination.control import Control, Replies, Reply
from fastpipe.runtime.coordination.deferred import DeferredResults
from fastpipe.runtime.coordination.gather import StoreGather
from fastpipe.runtime.coordination.processes import Processes


class MeshControl(Control):
    """Control of one pipeline of a mesh.

    Args:
        whole: of all processes, pipeline after pipeline, each in the order of its ranks.
        pipelines: where each pipeline is in the mesh, as text.
        size: the number of ranks of a pipeline.
    """

    def __init__(self, whole: Processes, store: Any, pipelines: Sequence[str], size: int, timeout: float) -> None:
        self._whole, self._pipelines, self.size = whole, pipelines, size
        self._pipeline, self.rank = divmod(whole.rank, size)
        self.pipeline = pipelines[self._pipeline]
        self._on_failure: Callable[[Failure], None] = lambda failure: None
        self.deferred: DeferredResults = DeferredResults(store, self.rank, timeout, self._dead)
        self._gather = StoreGather(store, self.rank, size, timeout, whole.store_gone, self.lost)

    @property
    def step(self) -> int:  # type: ignore[override]
        """See `Control`."""
        return self._whole.step

    @property
    def remark(self) -> str:  # type: ignore[override]
        """See `Control`."""
        return self._whole.remark

    def setup(self, message: Reply) -> Replies:
        """See `Control.setup`."""
        with self._placing():
            return self._own(self._whole.setup(self._marked(message)))

    def exchange(self, phase: str, message: Reply) -> Replies:
        """Exchange with the processes of all pipelines; a failure of another pipeline is one of rank 0's reply."""
        with self._placing():
            return self._own(self._whole.exchange(phase, self._marked(message)))

    def exchange_within(self, phase: str, message: Reply) -> Replies:
        """See `Control.exchange_within`."""
        return Replies(self._gather.exchange(0, phase, message))

    def begin(self, on_failure: Callable[[Failure], None]) -> None:
        """See `Control.begin`."""
        self._on_failure = on_failure
        self._whole.begin(lambda failure: on_failure(self._placed(failure)))

    def end(self) -> None:
        """See `Control.end`."""
        self._whole.end()

    def on_loss(self, report: Callable[[Failure], None]) -> None:
        """See `Control.on_loss`."""
        self._whole.on_loss(lambda failure: report(self._placed(failure)))

    def publish(self, failure: Failure) -> Failure:
        """Report a failure; in a step it ends all pipelines, this one included."""
        if not self.step:
            return self._placed(self._whole.publish(self._numbered(failure)))
        if not failure.is_fatal:
            # a collective may have raised because a process exits, which closes its connections first
            for pause in pauses(SHORT_EXIT_SECONDS):
                if self._whole.lost() is not None:
                    break
                time.sleep(pause)
        lost = self._whole.lost() or self._numbered(failure)
        first = self._placed(self._whole.publish(replace(lost, is_fatal=True)))
        self._on_failure(first)
        return first

    def lost(self, awaited: Sequence[int] | None = None) -> Failure | None:
        """See `Control.lost`."""
        first = self._pipeline * self.size
        found = self._whole.lost(None if awaited is None else [first + rank for rank in awaited])
        return None if found is None else self._placed(found)

    def put_place(self, step: int, is_active: bool, text: str, within: str = "step") -> None:
        """See `Control.put_place`."""
        self._whole.put_place(step, is_active, text, within)

    def places(self, within: str = "step") -> dict[int, tuple[int, bool, str]]:
        """See `Control.places`."""
        first = self._pipeline * self.size
        written = self._whole.places(within)
        return {rank - first: place for rank, place in written.items() if 0 <= rank - first < self.size}

    def close(self) -> None:
        """See `Control.close`."""
        self.deferred.close()
        self._whole.close()
        # it belongs to the steps, which hold this control
        self._on_failure = lambda failure: None

    @property
    def dead(self) -> list[Failure]:
        """See `Control.dead`."""
        return list(map(self._placed, self._whole.dead))

    def _dead(self) -> list[Failure]:
        return [failure for failure in self.dead if failure.pipeline == self.pipeline]

    def _placed(self, failure: Failure) -> Failure:
        """With a rank of a pipeline instead of a process's number."""
        if failure.rank is None or failure.pipeline:
            return failure
        pipeline, rank = divmod(failure.rank, self.size)
        return replace(failure, rank=rank, pipeline=self._pipelines[pipeline])

    def _numbered(self, failure: Failure) -> Failure:
        """With a process's number instead of a rank of a pipeline; without a name it is one of this pipeline."""
        if failure.rank is None:
            return failure
        pipeline = self._pipelines.index(failure.pipeline) if failure.pipeline else self._pipeline
        return replace(failure, rank=pipeline * self.size + failure.rank, pipeline="")

    def _marked(self, message: Reply) -> Reply:
        return message | {key: asdict(self._numbered(Failure(**message[key]))) for key in _failures_in(message)}

    def _own(self, replies: Sequence[Reply]) -> Replies:
        replies = [
            reply | {key: asdict(self._placed(Failure(**reply[key]))) for key in _failures_in(reply)}
            for reply in replies
        ]
        first = self._pipeline * self.size
        own = replies[first : first + self.size]
        elsewhere = [
            reply | {"pipeline": self._pipelines[i // self.size]}
            for i, reply in enumerate(replies)
            if i // self.size != self._pipeline
        ]
        failed = next((reply for reply in elsewhere if "failure" in reply), None)
        if failed is not None and not any("failure" in reply for reply in own):
            own[0] = own[0] | {key: failed[key] for key in _failures_in(failed)}
        return Replies(own, elsewhere)

    @contextmanager
    def _placing(self) -> Iterator[None]:
        try:
            yield
        except FailureError as error:
            raise FailureError(self._placed(error.failure)) from error.__cause__


def _failures_in(message: Reply) -> list[str]:
    return [key for key in ("failure", "first") if key in message]
