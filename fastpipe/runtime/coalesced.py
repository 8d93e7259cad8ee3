"""Process groups in which a send and a receive that two ranks both begin side by side are one operation.

That is what `torch.distributed.batch_isend_irecv` does on NCCL: one kernel moves both ways, on one communicator for
each two ranks, where `fastpipe.runtime.process_group` has one for each of four kinds of messages. The price is that
neither is done before the other. So receives are posted when their messages are made (`fastpipe.lower`), and a program
is proved with that rule (`fastpipe.machine`). In a step that announces its messages these go one by one, through the
four groups.

Gloo knows no such operations; there the parts of one are begun together.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from fastpipe.machine import COALESCED, Turn, batches, turns
from fastpipe.program import Program
from fastpipe.runtime.devices import CPU
from fastpipe.runtime.group import Membership
from fastpipe.runtime.own_groups import OwnGroups, backend_of
from fastpipe.runtime.patience import attended
from fastpipe.runtime.process_group import ProcessGroupEndpoint, ProcessGroups, wait_for
from fastpipe.runtime.tensors import Tensors
from fastpipe.runtime.transport import Endpoint, Message

_BACKENDS = ("gloo", "nccl")


class _Part:
    """A transfer that is begun with the others of its operation."""

    def __init__(self, verb: str, tensor: torch.Tensor) -> None:
        self.verb = verb
        self.tensor = tensor
        self.work: Any = None


class _CoalescedEndpoint(ProcessGroupEndpoint):
    def __init__(self, transport: CoalescedGroups, program: Program, rank: int, timeout: float) -> None:
        super().__init__(transport, program.channels, rank, timeout)
        self.pairs = transport.pairs
        self.turns_of = _turns(program, rank)
        self.turns: dict[int, Iterator[Turn]] = {}
        self.fresh: list[_Part] = []
        self.held: dict[int, dict[int, list[_Part]]] = {}

    def begin(self, signature: Any, announce: bool) -> None:
        super().begin(signature, announce)
        self.turns = {peer: iter(turns) for peer, turns in self.turns_of.items()}
        self.fresh = []
        self.held = {peer: {} for peer in self.turns_of}

    def post_recv(self, message: Message, channel: int, slot: int) -> None:
        super().post_recv(message, channel, slot)
        self._posted(channel)

    def send(self, message: Message, channel: int, number: int, tensors: Tensors | None) -> None:
        super().send(message, channel, number, tensors)
        self._posted(channel)

    def _start(self, verb: str, tensor: torch.Tensor, channel: int) -> Any:
        if self.book.announcing:
            return super()._start(verb, tensor, channel)
        part = _Part(verb, tensor)
        self.fresh.append(part)
        return part

    def _wait(self, works: Sequence[Any], channel: int) -> None:
        super()._wait([work.work if isinstance(work, _Part) else work for work in works], channel)

    def _posted(self, channel: int) -> None:
        """Note a transfer for its operation; with the last one of a batch its operations are begun."""
        peer = self._peer(channel)
        held, turn = self.held[peer], next(self.turns[peer])
        if self.fresh:
            held[turn.operation] = held.get(turn.operation, []) + self.fresh
            self.fresh = []
        if not turn.last:
            return
        self.held[peer] = {}
        try:
            for _, parts in sorted(held.items()):
                begin_together(self.pairs[peer].groups[0], int(self.rank < peer), parts, CPU)
        except RuntimeError as error:
            raise self._lost(channel, error) from error


class CoalescedGroups(ProcessGroups):
    """Process groups with one group more for each peer; see `ProcessGroups`.

    Raises:
        ValueError: for a backend of which is not known what it does with several transfers at once.
    """

    kind = "process_group_coalesced"
    lanes = COALESCED

    def __init__(self, member: Membership, timeout: float = 600) -> None:
        if (backend := backend_of(member)) not in _BACKENDS:
            raise ValueError(
                f"transport = {self.kind!r}: the process group's backend is {backend!r}, and this takes 'gloo' or "
                "'nccl'; use 'process_group'"
            )
        super().__init__(member, timeout)
        self.pairs: dict[int, OwnGroups] = {}

    def endpoint(self, program: Program, rank: int, timeout: float) -> Endpoint:
        """One rank's side."""
        self._warm_up(program)
        return _CoalescedEndpoint(self, program, rank, timeout)

    def _together(self, program: Program, rank: int) -> dict[str, Any]:
        pairs = {peer: own.groups[0] for peer, own in self.pairs.items()}
        return {"pairs": pairs, "turns": turns(batches(program)[rank])}

    def _warm_up(self, program: Program) -> None:
        """The same for the groups of two: made by all ranks in one order, and their connections with them."""
        super()._warm_up(program)
        for channel in program.channels:
            peer = channel.peer_of(self.rank)
            if self.rank in channel[:2] and peer != self.rank and peer not in self.pairs:
                self.pairs[peer] = self._make_pair(peer)

    def _make_pair(self, peer: int) -> OwnGroups:
        both = sorted((self.rank, peer))
        member = replace(
            self._member, rank=both.index(self.rank), size=2, ranks=tuple(self._member.ranks[rank] for rank in both)
        )
        made = OwnGroups(member, [f"pair {both}"], self.timeout)
        if self.device.type != "cpu":
            first = functools.partial(self._first_operation, made.groups[0], both.index(peer))
            attended(first, self._member.lost, self.timeout, peer)
        return made

    def _first_operation(self, group: Any, peer: int) -> None:
        parts = [_Part(verb, torch.zeros(1, dtype=torch.uint8, device=self.device)) for verb in ("send", "recv")]
        begin_together(group, peer, parts, self.device)
        for part in parts:
            wait_for(part.work, self.waits, self.timeout, self.device)

    def _all(self) -> list[OwnGroups]:
        return [*self.pairs.values(), *super()._all()]

    def describe(self) -> str:
        """One line for `Pipeline.describe`."""
        return f"{super().describe()}, and {len(self.pairs)} for pairs of ranks"


def begin_together(group: Any, peer: int, parts: Sequence[_Part], device: torch.device) -> None:
    """Begin an operation, as one where the backend knows such.

    Args:
        group: of two ranks.
        peer: the other one, in the group.
        parts: what it consists of; each gets the work to wait for.
        device: of the tensors.
    """
    if not group._get_backend(device).supports_coalescing:
        for part in parts:
            part.work = getattr(group, part.verb)([part.tensor], peer, 0)
        return
    group._start_coalescing(device)
    try:
        for part in parts:
            getattr(group, part.verb)([part.tensor], peer, 0)
    finally:
        # whatever fails: what NCCL is given in a group that nobody ends, by whomever on this thread, never begins
        work = group._end_coalescing(device)
    for part in parts:
        part.work = work


def _turns(program: Program, rank: int) -> Mapping[int, list[Turn]]:
    """By peer: the turn of each transfer, in order."""
    found: dict[int, list[Turn]] = {}
    for position, turn in sorted(turns(batches(program)[rank]).items()):
        channel = program.channels[program[rank][position].channel]
        found.setdefault(channel.peer_of(rank), []).append(turn)
    return found
