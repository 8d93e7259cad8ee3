"""The proof that a program cannot hang where the streams of a rank share a hardware queue of its GPU.

Over NCCL every lane of a rank is a stream, and no host waits: it queues the whole program. A hardware queue hands out
operations in the order in which they came, and one that cannot begin holds up all behind it, whatever their streams: a
wait for what is not done, and an operation of which the one before it in its stream is not done. (*Streams and
Concurrency*, S. Rennich, GTC 2011: an operation is dispatched when those before it in its stream have completed and
those before it in its queue have been dispatched.) A transfer that has begun holds up nobody else.

So a rank comes past a position when the other end of one lane has come to a position of its own: the one where the
operation begins that a wait is for, or the one before that which begins here. Both are read off the program, and one
run over them decides. Sends are unbuffered in it: none is done before its receive has begun. A message counts as one
operation, so it must be one tensor; its header in a step that announces it, 4 KiB, is taken to be buffered by NCCL.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from fastpipe.checks import is_whole
from fastpipe.errors import ProgramError
from fastpipe.hardware_queues import QUEUES
from fastpipe.machine import COALESCED, Batch, batches, lane_numbers
from fastpipe.program import Op, Program, RankProgram

Ints = npt.NDArray[np.integer]


def streams_share(program: Program, queues: int | None) -> bool:
    """Whether streams of a rank may share a hardware queue.

    Which stream gets which queue depends on all streams that the process has made, torch's 128 and those of other
    libraries among them, and on the driver, which does not say. So no assignment is assumed: with fewer queues than
    CUDA can make any streams may share one. All streams in one queue is the worst, since to deal them over several only
    takes away reasons to wait. With all queues no two streams share one, unless a rank has more of them than there are
    queues; nothing better can be had.

    Args:
        queues: how many hardware queues there are; None where each stream has its own.

    Raises:
        ValueError: for a number of queues that is none.
    """
    if queues is None:
        return False
    if not is_whole(queues, 1):
        raise ValueError(f"queues = {queues!r}: give a whole number of at least 1, or None")
    ends = [rank for channel in program.channels if channel.source != channel.destination for rank in channel[:2]]
    own = 1  # of what is computed
    return queues < max(QUEUES, own + max(map(ends.count, set(ends)), default=0))


def check_one_queue(program: Program, *, coalesced: bool = False, late: bool = False) -> None:
    """Run a program where every rank has one hardware queue.

    Args:
        program: one that is valid with a queue for every stream.
        coalesced: whether what two ranks begin side by side is one operation, in a lane for each pair of ranks;
            otherwise every channel has a lane.
        late: whether receives begin at their waits, as in a step that announces its messages.

    Raises:
        ProgramError: with the cycle of waits.
    """
    lanes = np.array(lane_numbers(COALESCED if coalesced else "directed", program.channels), dtype=np.int32)
    together: Sequence[Sequence[Batch] | None] = batches(program) if coalesced else [None] * program.num_ranks
    ranks = [_Rank(rank, lanes, own, late) for rank, own in zip(program, together, strict=True)]
    for own in ranks:
        own.find(ranks)
    places = _run(ranks)
    stuck = [rank for rank, place in enumerate(places) if place < math.inf]
    if stuck:
        where = ", in a step that makes its receives at their waits" if late else ""
        raise ProgramError(
            f"the program can hang{where}, where the streams of a rank share a hardware queue, ranks wait in a cycle: "
            + _cycle(program, ranks, stuck[0])
        )


class _Rank:
    """What one rank waits for, in order.

    Args:
        together: the transfers that it begins side by side, and which of them are one operation; None where each is
            one by itself.
        late: whether receives begin at their waits.

    Attributes:
        begins: of each lane the positions at which its operations begin.
        peers: of each lane the rank at its other end.
        needs: ``(position, peer, place)``: to come past the position, the peer must have come to its own place.
        met: how many of these are met.
    """

    def __init__(self, program: RankProgram, lanes: Ints, together: Sequence[Batch] | None, late: bool) -> None:
        ops, channels, slots = program.columns[[0, 5, 6]]
        posts = np.flatnonzero((ops == Op.SEND) | (ops == Op.POST_RECV))
        waits = np.flatnonzero((ops == Op.WAIT_SEND) | (ops == Op.WAIT_RECV))
        lane, sends = lanes[channels[posts]], ops[posts] == Op.SEND
        # a slot is posted, waited for, posted again: the n-th wait for it is for the n-th post
        awaited = np.empty(len(waits), dtype=np.intp)
        awaited[_by_key(slots[waits] * 2 + (ops[waits] == Op.WAIT_SEND))] = _by_key(slots[posts] * 2 + sends)
        number, begin = _in_turn(posts, lane) if together is None else _side_by_side(posts, lane, together)
        if late:
            waited = np.empty_like(posts)
            waited[awaited] = waits
            for each in np.unique(lane[~sends]):
                # with one that is waited for those posted before it in its channel begin, too
                own = np.flatnonzero((lane == each) & ~sends)
                begin[own] = np.minimum.accumulate(waited[own][::-1])[::-1]
        later = number > 0
        self._needs = np.stack(
            [
                np.concatenate([begin[later], waits]),
                np.concatenate([lane[later], lane[awaited]]),
                np.concatenate([number[later] - 1, number[awaited]]),
            ]
        )
        self.begins: dict[int, Ints] = {}
        self.peers: dict[int, int] = {}
        for each in np.unique(lane).tolist():
            own = np.flatnonzero(lane == each)
            self.begins[each] = np.empty(number[own].max() + 1, dtype=np.intp)
            self.begins[each][number[own]] = begin[own]
            self.peers[each] = program.channels[channels[posts[own[0]]]].peer_of(program.rank)
        self.needs: list[tuple[int, int, int]] = []
        self.met = 0

    def find(self, ranks: Sequence[_Rank]) -> None:
        """See where the others have to come to."""
        position, lane, number = self._needs
        peers, places = np.empty_like(position), np.empty_like(position)
        for each, peer in self.peers.items():
            own = lane == each
            peers[own], places[own] = peer, ranks[peer].begins[each][number[own]]
        in_order = _by_key(position)
        self.needs = list(zip(*(each[in_order].tolist() for each in (position, peers, places)), strict=True))


def _run(ranks: Sequence[_Rank]) -> list[float]:
    """Let every rank go on until nothing moves; the positions that they have come to, infinity at the end."""
    places = [-1.0] * len(ranks)
    waiting: dict[int, list[int]] = defaultdict(list)
    ready = list(range(len(ranks)))
    while ready:
        rank = ready.pop()
        own, before = ranks[rank], places[rank]
        while own.met < len(own.needs):
            places[rank], peer, place = own.needs[own.met]
            if places[peer] < place:
                waiting[peer].append(rank)
                break
            own.met += 1
        else:
            places[rank] = math.inf
        if places[rank] > before:
            ready += waiting.pop(rank, [])
    return places


def _by_key(keys: Ints) -> Ints:
    return np.argsort(keys, kind="stable")


def _in_turn(posts: Ints, lane: Ints) -> tuple[Ints, Ints]:
    """The number in its lane of every transfer, and where it begins; each is an operation."""
    in_order = _by_key(lane)
    number = np.empty_like(posts)
    number[in_order] = np.arange(len(posts)) - np.searchsorted(lane[in_order], lane[in_order])
    return number, posts.copy()


def _side_by_side(posts: Ints, lane: Ints, together: Sequence[Batch]) -> tuple[Ints, Ints]:
    """The same where those of a batch begin with the last of them, and some are one operation."""
    lane_at = dict(zip(posts.tolist(), lane.tolist(), strict=True))
    found: dict[int, tuple[int, int]] = {}
    counts: Counter[int] = Counter()
    for batch in together:
        last = max(map(max, batch))
        for operation in batch:
            found |= {position: (counts[lane_at[last]], last) for position in operation}
            counts[lane_at[last]] += 1
    number, begin = np.array([found[position] for position in posts.tolist()], dtype=np.intp).reshape(-1, 2).T
    return number, begin


def _cycle(program: Program, ranks: Sequence[_Rank], rank: int) -> str:
    """Follow the waits until a rank comes again."""
    path: list[int] = []
    lines: list[str] = []
    while rank not in path:
        path.append(rank)
        at, peer, place = ranks[rank].needs[ranks[rank].met]
        own, other = (program[r].text(program[r][p]) for r, p in ((rank, at), (peer, place)))
        lines.append(f"rank {rank} at position {at}, {own} waits for rank {peer} to come to position {place}, {other}")
        rank = peer
    return "; ".join(lines[path.index(rank) :])
