"""Control of several processes: gathers before and after a step, and a watcher for failures in between.

Processes of one host meet on a board in shared memory. Where that cannot be, and to find each other in the first
place, they meet over the store of their process group. It also keeps what failed, as the first who writes it wins.
Those of one host watch each other, and those of other hosts and rank 0 do.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import Any

from fastpipe.runtime.common import SECONDS, Failure, Patience, attended
from fastpipe.runtime.coordination.control import Control, Reply
from fastpipe.runtime.coordination.deferred import DeferredResults
from fastpipe.runtime.coordination.gather import Gather, SharedMemoryGather, StoreGather
from fastpipe.runtime.coordination.host import Identity, LocalPeers, RanksPerHost, same_host
from fastpipe.runtime.coordination.lifeline import Lifeline
from fastpipe.runtime.coordination.watcher import Watcher

logger = logging.getLogger("fastpipe")
_GIVEN_UP = "not built"
"""The key of the first failure while the pipeline is built."""
_UNWATCHED = "their deaths are noticed by their connections with rank 0, or after the timeout"


class Processes(Control):
    """Several processes, one a rank.

    Args:
        store: a store that all of them share, with a prefix of its own.
        rank: this process.
        size: how many there are.
        timeout: seconds to wait for the others.
        ranks_per_host: the ranks of this host.
        identity: who a rank is; None if that is not known yet.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        timeout: float,
        ranks_per_host: RanksPerHost,
        identity: Callable[[int], Identity | None] = lambda rank: None,
    ) -> None:
        self.rank = rank
        self.size = size
        self.step = 0
        self._told: Failure | None = None
        self._store, self._identity, self._timeout = store, identity, timeout
        self._lifeline = Lifeline(rank)
        self._local_peers = LocalPeers()
        self._watcher = Watcher(store, self._local_peers, self._lifeline)
        self._store_gather = StoreGather(store, rank, size, timeout, self._watcher.store_gone, self.lost)
        self._shared_gather = SharedMemoryGather(rank, size, timeout, ranks_per_host, self.lost)
        self._gather: Gather = self._store_gather
        self.deferred: DeferredResults = DeferredResults(store, rank, timeout, self._watcher.dead)
        self._patience = Patience(min(SECONDS, timeout / 4))

    def setup(self, message: Reply) -> list[Reply]:
        """Meet the others, watch those that can be watched, and move to a board if all can."""
        identity = self._local_peers.identity() | self._shared_gather.offer()
        replies = self.exchange("setup", identity | message)
        far = [rank for rank, reply in enumerate(replies) if rank and not _can_watch(replies[0], reply)]
        own: Reply = {"tied": self._tie(far), "rings": self._local_peers.meet(self.rank, replies)}
        answers = self.exchange("connection", own | {"why": self._shared_gather.connect(replies)})
        self._lifeline.keep([rank for rank, answer in enumerate(answers) if self.rank in answer["tied"]])
        if untied := [rank for rank in far if rank not in answers[0]["tied"] or 0 not in answers[rank]["tied"]]:
            logger.warning("ranks %s cannot connect to rank 0: if they die, that is noticed after the timeout", untied)
        unwatched = [rank for rank, reply in enumerate(replies) if not reply["can_watch"]]
        self.remark = f"pidfd_open is denied on ranks {unwatched}: {_UNWATCHED}" if unwatched else ""
        polls = not all(self.rank in answer["rings"] for answer in self._others(answers))
        self._watcher.start(polls, self._connect())
        why = next((f"rank {rank}: {answer['why']}" for rank, answer in enumerate(answers) if answer["why"]), None)
        if why is None:
            self._gather = self._shared_gather
        else:
            logger.info("the ranks agree over the store, which costs each step about a millisecond: %s", why)
            # of its own: who has given up waiting leaves a thread that waits there
            self._store_gather.waits = self._connect()
        return replies

    def _connect(self) -> Any:
        """Another connection to the store."""
        # who has given up by now has answered before: what is wrong is found in the answers, on every rank alike
        return attended(self._store.clone, lambda: None, timedelta(seconds=self._timeout))

    def _tie(self, far: Sequence[int]) -> list[int]:
        """Connect those that are on other hosts than rank 0 with it."""
        if not far:
            return []
        offers = self.exchange("lifeline", self._lifeline.offer(self._store) if self.rank == 0 else {})
        return self._lifeline.tie(offers[0], far)

    def _others(self, answers: Sequence[Reply]) -> list[Reply]:
        return [answer for rank, answer in enumerate(answers) if rank != self.rank]

    def lost(self, awaited: Sequence[int] | None = None) -> Failure | None:
        """What one has left word of, or else who of those awaited has ended. In steps, what the watcher has told."""
        if self.step:
            return self._told or next(iter(self._watcher.dead()), None)
        # in this order: who gives up leaves word before it closes the pipeline
        dead = self._watcher.find_dead(self.step + 1)
        # without the store whoever needs it finds out
        if (failure := self._patience.ask(self._find_given_up, None)) is not None:
            return failure
        first = min((rank for rank in dead if awaited is None or rank in awaited), default=None)
        return None if first is None else Failure(first, dead[first], dead=True)

    def _find_given_up(self) -> Failure | None:
        """What one has left word of; those that have come since are watched."""
        if self._store.check([_GIVEN_UP]):
            return Failure(**json.loads(self._store.get(_GIVEN_UP)))
        for rank in range(self.size):
            unknown = rank != self.rank and rank not in self._local_peers.processes
            if unknown and (identity := self._identity(rank)) is not None:
                self._local_peers.watch(rank, identity)
        return None

    def give_up(self, failure: Failure) -> None:
        """Leave word; that of the first one stands."""
        self._patience.ask(lambda: self._store.compare_set(_GIVEN_UP, "", json.dumps(asdict(failure))), None)

    def begin(self, on_failure: Callable[[Failure], None]) -> None:
        """Start a step."""
        self.step += 1
        self._told = self._gather.suspected = None

        def told(failure: Failure) -> None:
            self._know(failure)
            on_failure(failure)

        self._watcher.begin(self.step, told)
        if self.step == 1 and self._gather is self._shared_gather:
            self._shared_gather.look_around()

    def on_loss(self, tell: Callable[[Failure], None]) -> None:
        """See `Control.on_loss`."""
        self._watcher.on_loss = tell

    def _know(self, failure: Failure) -> None:
        if failure.suspected:
            self._gather.suspected = self._gather.suspected or failure
        elif failure.dead:
            self._told = self._told or failure

    def end(self) -> None:
        """The step is over; what was said in the one before it has been read by all."""
        self._watcher.end()
        says = bool(self._watcher.published) or self._gather is self._store_gather
        if says and self.lost() is None:
            self._patience.ask(self._forget, None)

    def _forget(self) -> None:
        self._watcher.forget()
        if self._gather is self._store_gather:
            self._store_gather.forget(self.step - 2)

    def exchange(self, phase: str, message: Reply) -> list[Reply]:
        """Give a message and get those of all processes."""
        said = len(self._store_gather.said)
        replies = self._gather.exchange(self.step, phase, message)
        if self.step == 0:
            # whoever has come here has read what was said before
            self._patience.ask(lambda: self._store_gather.forget_first(said), None)
        return replies

    def publish(self, failure: Failure) -> Failure:
        """Tell the others of a failure, unless somebody was faster."""
        self._know(failure)
        # without the store nobody can be told; the others find out for themselves, and this rank goes on draining
        return self._patience.ask(lambda: self._watcher.publish(failure), failure)

    def close(self) -> None:
        """Stop watching, and let go of what the processes share."""
        self.deferred.close()
        self._local_peers.part(self.rank, self.step)
        self._watcher.close()
        self._lifeline.close(self.step)
        self._local_peers.close()


def _can_watch(one: Reply, other: Reply) -> bool:
    """Whether two processes see each other's end by a process descriptor."""
    return same_host(one, other) and bool(one["can_watch"] and other["can_watch"])
